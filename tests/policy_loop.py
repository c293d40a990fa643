"""A small count-only host for policy tests: the driver's calls in order, with copies landing when chance says so."""

from collections.abc import Mapping, Sequence

import numpy as np

from moe_spac.policies.driver import Driver
from moe_spac.policies.future import Future
from moe_spac.policies.interface import Costs, Forecast, Key, LayerReport, Policy, Setup, StepInfo
from moe_spac.traces.schema import Kind

# One unit is a microsecond: GPU 10, CPU 40 and 20 more for the first, copy 100.
COSTS = Costs(8_000, 2_000, 100.0, 20_000, 10_000, 30_000, 2_000.0, 5_000, 10_000, 90_000)


def make_setup(policy: Policy, layers: int, experts: int, slots: int, top_k: int = 2, **more) -> Setup:
    """`slots` in a layer, or that many times the layers in one pool, as the policy's scope asks."""
    capacity = (slots,) * layers if policy.scope == "layer" else (slots * layers,)
    return Setup(layers, experts, top_k, 1000, capacity, more.pop("costs", COSTS), **more)


def random_routing(rng: np.random.Generator, steps: int, layers: int, experts: int, top_k: int, tokens: int = 4):
    """Steps of 1 to `tokens` tokens, [n, L, k], with popular experts, so that there is something to learn."""
    share = np.log(rng.dirichlet(np.full(experts, 0.5), size=layers) + 1e-3)
    counts = rng.integers(1, tokens + 1, size=steps).tolist()
    return [np.argsort(share + rng.gumbel(size=(n, layers, experts)))[:, :, -top_k:] for n in counts]


class Host:
    """Plays steps. Without `rng` the link is instant: prefetches happen after each layer until there are none.

    link: copies under way at once. slow: a prefetch begins or lands every other time at most.
    """

    def __init__(
        self, policy: Policy, setup: Setup, routing: Sequence[np.ndarray], rng=None, link: int = 1, slow: bool = False
    ) -> None:
        future = Future.of(setup.layers, setup.experts, routing)
        self.record: list = []
        self.driver = Driver(policy, setup, future, self.record)
        self.setup, self.routing, self.rng, self.link, self.chances = setup, routing, rng, link, 2 if slow else 4
        self.flying: list[Key] = []
        self.wall_ns = 1_000_000  # of every layer, ten copies

    def play(
        self,
        kinds: Sequence[Kind] | None = None,
        ahead: int = 0,
        scores: bool = False,
        slots: Mapping[int, tuple[int, ...]] | None = None,
    ) -> Driver:
        """`ahead`: give true forecasts of so many next layers, from "next-gate". `slots`: resize before steps."""
        for index, ids in enumerate(self.routing):
            if slots and index in slots:
                self.driver.resize(slots[index])
            n = len(ids)
            kind = kinds[index] if kinds else Kind.VERIFY
            self.driver.step_begins(StepInfo(index, kind, np.zeros(n, np.int32), np.arange(n) > 0))
            for layer in range(self.setup.layers):
                for later in range(layer + 1, min(layer + ahead, self.setup.layers - 1) + 1):
                    experts, loads = np.unique(ids[:, later], return_counts=True)
                    counts = dict(zip(experts.tolist(), loads.astype(float).tolist(), strict=True))
                    self.driver.forecast(Forecast("next-gate", later, counts))
                given = self._scores(ids[:, layer]) if scores else None
                self._layer(layer, ids[:, layer], given)
            self.driver.step_ends(0, np.arange(n) == 0)
            self.driver.cache.check()
        return self.driver

    def _scores(self, ids: np.ndarray) -> np.ndarray:
        scores = np.full((len(ids), self.setup.experts), 0.01, np.float16)
        np.put_along_axis(scores, ids.astype(np.intp), np.float16(0.4), axis=1)
        return scores

    def _layer(self, layer: int, ids: np.ndarray, scores: np.ndarray | None) -> None:
        plan = self.driver.gate(layer, ids, None, scores)
        served = [*plan.gpu, *plan.copies, *plan.joins, *plan.cpu]
        assert sorted(served) == np.unique(ids).tolist()
        self._link()
        for expert in (*plan.copies, *plan.joins):
            key = Key(layer, expert)
            if key in self.flying:
                self.flying.remove(key)
            elif expert in plan.joins:
                continue  # landed meanwhile
            self.driver.landed(key, 100_000)
        self._link()
        self.driver.layer_ends(LayerReport(layer, self.wall_ns, 0, 0, 0, 0))
        self._link(idle=True)

    def _link(self, idle: bool = False) -> None:
        """Let prefetches start and land: at random, or all of them at once when the layer is over."""
        if self.rng is None:
            while idle and (key := self.driver.next_fetch()) is not None:
                self.driver.landed(key, 0)
            return
        for _ in range(int(self.rng.integers(0, self.chances))):
            if self.flying and (len(self.flying) >= self.link or self.rng.random() < 0.5):
                self.driver.landed(self.flying.pop(int(self.rng.integers(len(self.flying)))), 100_000)
            elif (key := self.driver.next_fetch()) is not None:
                self.flying.append(key)


def one_by_one(*keys: int, layers: int = 1) -> list[np.ndarray]:
    """Steps of one token with one expert, the same in every layer."""
    return [np.full((1, layers, 1), key) for key in keys]


def sets(*needed: Sequence[int], layers: int = 1) -> list[np.ndarray]:
    """Steps of one token that needs these experts in every layer."""
    return [np.array([[list(s)] * layers]) for s in needed]
