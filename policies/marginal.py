"""One price for everything: what an expert's being on the GPU will save, against what bringing it there costs."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..traces.draft_length import LengthChooser
from ..traces.schema import Kind
from .demand import PerLoad
from .interface import (
    Answer,
    Candidates,
    Costs,
    Demand,
    Forecast,
    Key,
    LayerReport,
    Policy,
    Setup,
    StepInfo,
    View,
    Where,
)
from .parts import even
from .pool import ABSENT, AWAY, COMING, RESIDENT, RESIDENT_BELOW, new_pool
from .prefill import cheaper_absent
from .residency import all_keys
from .reuse import Reuse
from .split import CPU, FETCH, Prices, all_answers

try:
    from ._marginal import Pool, split
except ImportError:  # there was no C compiler: these decide the same, in more time
    from .pool import Pool
    from .split import split

SURE = 0.5  # how often a gate's forecast is right, until that was seen
LEARN = 0.02  # weight of a layer's forecast, and of a pass, in what was seen


def saved_by_a_hit(costs: Costs, cpu: bool) -> float:
    """ns less of a layer that finds one more expert resident: its copy, or where CPU and link share the misses by their
    speeds, with host memory as the limit of both, what one takes there more than on the GPU."""
    copy, here = costs.copy_ns, costs.cpu_fixed_ns + costs.cpu_memory_ns
    if not cpu:
        return float(copy)
    return max(0.0, max(here * copy / max(1, here + copy), costs.host_bytes_ns) - costs.gpu_ns(1))


def slowing_of_cpu(costs: Costs, cpu: bool) -> float:
    """ns that the CPU loses to one copy made while it reads experts: host memory gives the link its rate, and what is
    left to the CPU."""
    if not (cpu and costs.host_bytes_ns):
        return 0.0
    left = 1 / costs.host_bytes_ns - 1 / max(1, costs.copy_bytes_ns)  # experts a ns
    return costs.copy_bytes_ns * min(1.0, max(0.0, 1 - left * costs.cpu_memory_ns))


@dataclass
class Marginal(Policy):
    """Placement, eviction, prefetch, split and draft length by one price: expected uses times the time each saves.

    Ours. An expert is worth `passes` times its expected demand a pass (`Reuse`, learnt from this run), and one use
    more, as likely as such forecasts have come true, where the gates of coming layers forecast it on the present
    hidden state ("next-gate"). A use saves the time by which a miss lengthens a layer (`saved_by_a_hit`). By that
    price the pool of all layers gives up its least valuable resident, and only for what is worth more; a layer's
    misses are split between link and CPU so that time less future savings is least (`most_worth_copying`); and an idle
    link fetches the expert that gains most, if it gains more than the copy costs the CPU, which reads the same memory:
    nothing while drafting goes on. Where a token's uses save less than a decision takes, nothing moves and nothing is
    learnt. The draft length is that of `LengthChooser`, 0 included; `drafts=false` leaves it to the run. Times are the
    machine's `Costs` and what layers are reported to take.

    `passes` was tuned on training texts only, as docs/marginal.md says, with where this policy loses. Prompts are
    served by whichever tier takes less time, and nothing is fetched for them to stay; their routing counts as use.
    """

    name: ClassVar[str] = "marginal"
    scope = "global"
    channels = frozenset({"next-gate"})
    passes: float = 1.5
    forecasts: bool = True
    background: bool = True
    drafts: bool = True

    def __post_init__(self) -> None:
        if not self.passes > 0:
            raise ValueError("passes must be above 0")
        if not self.forecasts:
            self.channels = frozenset()

    # Told

    def setup(self, setup: Setup) -> None:
        self._setup, costs, shape = setup, setup.costs, (setup.layers, setup.experts)
        self.reuse = Reuse(*shape)
        self._pool = Pool(new_pool(*shape), all_keys(*shape))  # worth is expected uses
        self._answers = all_answers(setup.experts)
        self._flying: list[set[Key]] = [set() for _ in range(setup.layers)]  # prefetches, at least all on their way
        self._passing: list[Key] = []  # COMING, because they are copied for the running layer
        self._unasked: tuple[Key, ...] = ()  # of the layer before, which may have taken free slots
        self._ahead: dict[int, tuple[int, dict[int, float]]] = {}  # of a layer: how far ahead it was forecast, and what
        self._right = [SURE] * setup.layers
        self._saved, self._slowing = saved_by_a_hit(costs, setup.cpu), slowing_of_cpu(costs, setup.cpu)
        if setup.cpu and setup.top_k * self._saved <= setup.decide_ns:
            self._saved = 0.0  # a token's hits in a layer save less than it takes to decide about them
        on_gpu, on_cpu = PerLoad(costs.gpu_ns), PerLoad(costs.cpu_ns)
        more = costs.cpu_first_ns + costs.hybrid_ns
        self._prices = Prices(self._saved, on_gpu, on_cpu, costs.copy_ns, more, costs.host_bytes_ns)
        self._busy = 1.0  # share of a pass in which the CPU computes experts
        self._lengths = LengthChooser(max(1, setup.draft_length))
        copies = self.background and self._saved > 0
        silent = {"draft_length": self.drafts and setup.draft_length > 0, "next_fetch": copies}
        self.deaf = frozenset(name for name, wanted in silent.items() if not wanted)
        self._layer, self._prefill = -1, False

    def step_begins(self, step: StepInfo) -> None:
        self._prefill = step.kind is Kind.PREFILL
        self._drafted = len(step.tokens) - 1
        self._layer, self._layers_ns, self._on_cpu_ns = -1, 0, 0
        self._ahead.clear()

    def forecast(self, forecast: Forecast) -> None:
        if not self._saved:
            return
        layer = forecast.layer
        distance = layer - self._layer - 1  # the gate of the layer before it has just been asked
        self._ahead[layer] = distance, forecast.counts
        self._price(layer, forecast.counts, self._right[distance])

    def transfer_dropped(self, key: Key) -> None:
        self._flying[key.layer].discard(key)
        self._pool.put(key, ABSENT)

    def layer_ends(self, report: LayerReport) -> None:
        self._layers_ns += report.wall_ns
        self._on_cpu_ns += report.cpu_ns
        for key in self._passing:
            if self._pool.array.item(AWAY, *key) == COMING:
                self._pool.put(key, ABSENT)  # if a slot was given for it, without asking, it shows when looked at
        self._passing.clear()
        if report.layer == self._setup.layers - 1:
            self._layer = -1  # nothing on this side needs host memory until the next pass

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        if self._prefill:
            return
        pass_ns = self._layers_ns + self._setup.pass_ns
        self._busy += LEARN * (self._on_cpu_ns / max(1, pass_ns) - self._busy)
        draft_s = self._drafted * self._setup.draft_token_ns / 1e9
        self._lengths.learn(self._drafted, accepted, draft_s, pass_ns / 1e9)

    # Asked

    def placement(self) -> Iterable[Key]:
        keys = even(self._setup)
        for key in keys:
            self._pool.put(key, RESIDENT)
        return keys

    def draft_length(self, longest: int) -> int:
        return min(longest, self._lengths.choose())

    def dispatch(self, demand: Demand, view: View) -> Answer:
        self._layer = layer = demand.layer
        for key in self._unasked:
            if view.resident(key):
                self._pool.put(key, RESIDENT)
        room = view.free(layer) > 0
        self._unasked = demand.keys if room else ()
        distance, named = self._ahead.pop(layer, (0, None))
        if self._prefill:
            if named is not None:
                self._check_forecast(distance, len(named), len(named.keys() & demand.experts))
            return self._read(demand)
        if not self._saved and self._setup.cpu:
            return CPU  # no copy can pay, so there is nothing to know either
        right = self.reuse.seen(layer, demand.experts, named or ())
        if named is not None:
            self._check_forecast(distance, len(named), right)
        self._price(layer)
        if len(demand.held) == len(demand.experts) or not self._setup.cpu:
            return FETCH
        return self._split(demand, view, room)

    def next_fetch(self, view: View) -> Key | None:
        pool = self._pool
        slowing = self._busy * self._slowing / self._saved if self._layer >= 0 else 0.0
        while best := pool.warmest():
            key, worth, least_worth = best
            layer = key[0]
            if worth <= (0.0 if view.free(layer) > 0 else least_worth) + slowing:
                return None
            if not (view.resident(key) or view.in_flight(key)):
                self._flying[layer].add(key)
                pool.put(key, RESIDENT)  # when it lands; until then it is no candidate
                return key
            # It took a free slot, of which policies are not told, or was copied for the running layer.
            if view.resident(key):
                pool.put(key, RESIDENT)
            else:
                pool.put(key, COMING)
                self._passing.append(key)
        return None

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        return self._pool.exchange(candidates, incoming)

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        return self._pool.coldest(candidates, RESIDENT_BELOW)

    # Inside

    def _price(self, layer: int, named: Collection[int] = (), chance: float = 0.0) -> None:
        """A layer's experts are worth `passes` times their demand, `named` ones `chance` uses more; what was forecast
        before is forgotten."""
        self._pool.price(layer, self.reuse.demand, self.passes, named, chance)

    def _check_forecast(self, distance: int, named: int, right: int) -> None:
        self._right[distance] += LEARN * (right / max(1, named) - self._right[distance])

    def _read(self, demand: Demand) -> Answer:
        tokens, costs = len(demand.ids), self._setup.costs
        shares = [load / tokens for load in demand.loads]
        self.reuse.read(demand.layer, demand.experts, shares, tokens)
        self._price(demand.layer)
        if not self._setup.cpu:
            return Where.STREAM
        loads = [n for e, n in zip(demand.experts, demand.loads, strict=True) if e not in demand.held]
        return cheaper_absent(loads, costs)

    def _split(self, demand: Demand, view: View, room: bool) -> Answer:
        joins: Sequence[int] = ()
        if flying := self._flying[demand.layer]:
            flying = self._flying[demand.layer] = {key for key in flying if view.in_flight(key)}
            joins = [key.expert for key in flying]
        link_ns = len(joins) * self._prices.copy_ns // 2  # half of it is over, on average
        floor = 0.0 if room else self._pool.least()  # what has to go for one more resident is worth at least this
        return split(self._pool, demand, joins, floor, link_ns, self._prices, self._answers)
