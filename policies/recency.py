"""Caches that fetch every miss and evict by age: recency, arrival, generations, queues."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .interface import Answer, Candidates, Demand, Forecast, Key, Scope, Setup, StepInfo, View, Where
from .orders import Lru, Ranked
from .parts import Composed, IfBetter, Parts, Prefetcher, next_absent


class SpeculativeLoading(Prefetcher):
    """Bring in those of the `top` experts that the next layer's gate names on this layer's hidden state.

    The channel tells how many tokens chose an expert, not how sure the gate is: of equals the lowest ids count. What
    has not started when its layer begins is dropped.
    """

    channels: ClassVar[frozenset[str]] = frozenset({"next-gate"})

    def __init__(self, top: int) -> None:
        self._top = top
        self._likely: dict[int, list[Key]] = {}
        self._wanted: list[Key] = []

    def step_begins(self, step: StepInfo) -> None:
        self._likely.clear()
        self._wanted = []

    def forecast(self, forecast: Forecast) -> None:
        ranked = sorted(forecast.counts, key=lambda e: (-forecast.counts[e], e))
        self._likely[forecast.layer] = [Key(forecast.layer, e) for e in ranked[: self._top]]

    def used(self, demand: Demand, view: View) -> None:
        self._wanted = self._likely.get(demand.layer + 1, [])[::-1]

    def next_fetch(self, view: View) -> Key | None:
        return next_absent(self._wanted, view)


@dataclass
class ArLru(Composed):
    """On-demand loading with LRU eviction (Mixtral-Offloading, arXiv 2312.17238).

    Theirs: each layer is its own eviction group; residents work first, then the misses, which the GPU computes after
    their copy; the whole demand counts as used before a victim is chosen. Release (ce54518): a swap, so a victim's
    bytes travel back to the host (`write_back=true`), and no prefetch. Paper: the next layer's gate on this layer's
    hidden state names 1 or 2 experts to load ahead (`spec_topk`). "AR" is the MoE-SpAc paper's word for it: no
    speculation goes into its decisions.
    Ours: weights are read-only, so by default a victim is dropped (their swap is an artefact of one fixed host
    buffer); the cache starts empty instead of with the first ids; a resident that this very layer needed is not
    evicted for a sibling of the same layer, which passes through instead; `scope` may be "global"; what is loaded
    ahead takes a slot at once, where theirs waits in one of `b` = 4 shared buffers until it is used.
    """

    name: ClassVar[str] = "ar-lru"
    scope: Scope = "layer"
    write_back: bool = False
    spec_topk: int = 0

    def __post_init__(self) -> None:
        _check_top(self.spec_topk)

    def parts(self, setup: Setup) -> Parts:
        self._lru = Lru()
        return Parts(self._lru, IfBetter(self._lru), prefetch=_ahead(self.spec_topk))

    # Nothing is prefetched by default, and then the parts are asked in one call: many comparisons rest on this policy.

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        if not self.spec_topk:
            self.deaf |= {"transfer_done"}  # what a layer fetched was used already

    def dispatch(self, demand: Demand, view: View) -> Answer:
        if self.spec_topk:
            return super().dispatch(demand, view)
        self._lru.used(demand, view)
        return Where.FETCH

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        if self.spec_topk:
            return super().victim(incoming, candidates, view)
        return self._lru.older(incoming, candidates)


class Arrival(Ranked):
    """First in, first out; what came for one event leaves by ascending id."""

    def used(self, demand: Demand, view: View) -> None:
        super().used(demand, view)
        self.scores[demand.layer, [e for e in demand.experts if e not in demand.held]] = self.now

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        super().transfer_done(key, size, ns)
        self.scores[key] = self.now


@dataclass
class Fifo(Composed):
    """On-demand loading, evicting what came first, however much it is used.

    The textbook baseline that tells what recency is worth; per layer or global. Experts that arrived for the same
    layer of the same step leave by ascending id.
    """

    name: ClassVar[str] = "fifo"
    scope: Scope = "layer"

    def parts(self, setup: Setup) -> Parts:
        return Parts(Arrival())


Reading = Literal["generations", "layers", "interval"]


class Staleness(Ranked):
    """The three readings of Least-Stale; see `LeastStale`."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self._begun = 1  # the first event of the present pass
        self._interval = np.full(self.last.shape, np.inf)

    def step_begins(self, step: StepInfo) -> None:
        self._begun = self.now + 1

    def used(self, demand: Demand, view: View) -> None:
        row = demand.layer, list(demand.experts)
        before = self.last[row]
        super().used(demand, view)
        if self._reading == "interval":
            seen, old = self.now - before, self._interval[row]
            again = np.where(np.isinf(old), seen, 0.75 * np.where(np.isinf(old), 0, old) + 0.25 * seen)
            self._interval[row] = np.where(before < 0, np.inf, again)

    def ranks(self, layers: slice) -> np.ndarray:
        if self._reading == "generations":
            return self.last[layers] >= self._begun
        if self._reading == "layers":
            rows = range(*layers.indices(len(self.last)))
            return np.repeat(np.array(rows)[:, None], self.last.shape[1], axis=1)
        return -(self.last[layers] + self._interval[layers])


@dataclass
class LeastStale(Composed):
    """Evict what this pass has not touched yet before what it has (Least-Stale, SpecMD, arXiv 2602.03921).

    The rule is known in three readings that do not agree; `reading` takes one. "generations": experts not used in the
    present pass go first, by age within each generation; without prefetch this is LRU exactly, and global by nature.
    "layers": the lowest layer goes first, because it is needed last in the next pass (differs in a global pool only).
    "interval": the largest last use + mean interval between uses goes first, the mean moving by 0.75/0.25.
    Ours: which of the three is meant is not known to us, so the first is the default; an expert used once has an
    infinite interval; prefetch is off (`spec_topk=0`), where SpecMD pairs the rule with score-based prefetchers.
    """

    name: ClassVar[str] = "least-stale"
    reading: Reading = "generations"
    scope: Scope = "global"
    spec_topk: int = 0

    def __post_init__(self) -> None:
        _check_top(self.spec_topk)

    def parts(self, setup: Setup) -> Parts:
        order = Staleness(self.reading)
        better = IfBetter(order) if self.reading == "generations" else None
        return Parts(order, better, prefetch=_ahead(self.spec_topk))


def _check_top(top: int) -> None:
    if top < 0:
        raise ValueError("spec_topk must be at least 0")


def _ahead(top: int) -> Sequence[Prefetcher]:
    return [SpeculativeLoading(top)] if top else []
