"""Caches that fetch every miss and evict by how often an expert was used, fresh uses counting more or not."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .interface import Demand, Key, Scope, Setup, StepInfo, View
from .orders import BestFirst, Ranked
from .parts import Composed, IfBetter, Parts


class Counts(Ranked):
    """Fewest uses first. A use is one layer of one step that needs the expert, however many tokens chose it.

    accepted_only: a step's uses count when it ends, and those by rejected drafts never do.
    in_cache: an expert's count starts anew whenever it comes in.
    """

    def __init__(self, accepted_only: bool = False, in_cache: bool = False) -> None:
        self._accepted_only, self._in_cache = accepted_only, in_cache
        self._uncounted: list[Demand] = []

    def used(self, demand: Demand, view: View) -> None:
        super().used(demand, view)
        if self._in_cache:
            self.scores[demand.layer, [e for e in demand.experts if e not in demand.held]] = 0
        if self._accepted_only:
            self._uncounted.append(demand)
        else:
            self.count(demand.layer, list(demand.experts))

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        for demand in self._uncounted:
            self.count(demand.layer, np.unique(demand.ids[kept]).tolist())
        self._uncounted.clear()

    def count(self, layer: int, experts: list[int]) -> None:
        self.scores[layer, experts] += 1


@dataclass
class Lfu(Composed):
    """On-demand loading, evicting the least used so far; counts survive eviction (LFU, lifetime counts).

    The rule as event-atomic cache studies give it (arXiv 2608.07911): fewest uses, then least recent, then id. Every
    miss is kept, as in the textbook; `bypass=true` keeps it only if it outranks the victim, as that study does.
    `accepted_only=true` does not count what rejected drafts used (ours).
    """

    name: ClassVar[str] = "lfu"
    scope: Scope = "layer"
    bypass: bool = False
    accepted_only: bool = False

    def parts(self, setup: Setup) -> Parts:
        order = Counts(self.accepted_only)
        return _retaining(order) if self.bypass else Parts(order)


@dataclass
class LfuInCache(Composed):
    """On-demand loading, evicting the least used since it came in (in-cache LFU).

    The textbook form: a count starts anew when its expert comes in. `reset=false,scope=global` is what MoE-Infinity's
    release does (d617801): visits of cached experts, over all layers, not reset by an eviction; since every miss is
    cached, that is `lfu:scope=global`.
    """

    name: ClassVar[str] = "lfu-in-cache"
    scope: Scope = "layer"
    reset: bool = True

    def parts(self, setup: Setup) -> Parts:
        return Parts(Counts(in_cache=self.reset))


def _retaining(order: Ranked) -> Parts:
    """After each event the best of residents and fetched ones stay."""
    return Parts(order, IfBetter(order), dispatch=BestFirst(order))


class FrequencyByAge(Counts):
    """Smallest uses / age first, age = events since the last use + 1, events counted through all layers."""

    def ranks(self, layers: slice) -> np.ndarray:
        return self.scores[layers] / (self.now - self.last[layers] + 1)


@dataclass
class Lfru(Composed):
    """On-demand loading, evicting the smallest uses / age: the best causal rule of arXiv 2608.07911.

    Theirs: lifetime uses over age = now - last use + 1, now counting events; after each event the best of residents
    and fetched ones stay (`bypass=true`); best in 12 of 13 of their conditions.
    Ours: ties by last use and id, where theirs are drawn at random; `accepted_only` as for `lfu`.
    """

    name: ClassVar[str] = "lfru"
    scope: Scope = "layer"
    bypass: bool = True
    accepted_only: bool = False

    def parts(self, setup: Setup) -> Parts:
        order = FrequencyByAge(self.accepted_only)
        return _retaining(order) if self.bypass else Parts(order)


class HalvedCounts(Counts):
    """Fewest uses first, all counts being halved every `period` steps; 0: never."""

    def __init__(self, period: int, accepted_only: bool = False) -> None:
        super().__init__(accepted_only)
        self._period, self._steps = period, 0

    def step_begins(self, step: StepInfo) -> None:
        if self._period and self._steps == self._period:
            self._steps = 0
            self.scores *= 0.5
        self._steps += 1


@dataclass
class DecayedLfu(Composed):
    """On-demand loading, evicting the least used, with old uses counting less and less.

    Theirs ("foresight", a public study of MoE caches, read at second hand): counts halved periodically and every miss
    admitted is its best rule without a forecast; on Qwen3-30B-A3B with 16 slots a layer 134.0 reads a token, with
    admission filters 143.5 and 150.2. Ours: the period, 128 steps, which was not at hand; `period=0` is `lfu`.
    """

    name: ClassVar[str] = "decayed-lfu"
    scope: Scope = "layer"
    period: int = 128
    accepted_only: bool = False

    def __post_init__(self) -> None:
        if self.period < 0:
            raise ValueError("period must be at least 0")

    def parts(self, setup: Setup) -> Parts:
        return Parts(HalvedCounts(self.period, self.accepted_only))


class Crf(Ranked):
    """Smallest combined recency and frequency first: each use is worth 1 and halves every `half_life` steps."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self._layers = setup.layers

    def used(self, demand: Demand, view: View) -> None:
        row = demand.layer, list(demand.experts)
        before, old = self.last[row], self.scores[row]
        super().used(demand, view)
        self.scores[row] = 1 + old * self._faded(before)

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        self.scores[key] *= float(self._faded(self.last[key]))
        super().transfer_done(key, size, ns)

    def _faded(self, last: np.ndarray) -> np.ndarray:
        """What is left of a value as of the event `last`. A step has as many events as there are layers."""
        return np.exp2((last - self.now) / (self._layers * self._half_life))

    def ranks(self, layers: slice) -> np.ndarray:
        return self.scores[layers] * self._faded(self.last[layers])


@dataclass
class Lrfu(Composed):
    """On-demand loading, evicting the smallest combined recency and frequency (LRFU, Lee et al. 2001).

    Theirs: every past use is worth 2^(-x / half-life), x its age; short half-lives give LRU, long ones LFU. The
    expert cache of llama.cpp (pull request 31233) keeps such a score in 8 classes and advances its clock by tokens.
    Ours: a continuous score, age in steps, a half-life of 32 steps; every miss is kept.
    """

    name: ClassVar[str] = "lrfu"
    scope: Scope = "layer"
    half_life: float = 32.0

    def __post_init__(self) -> None:
        if not self.half_life > 0:
            raise ValueError("half_life must be above 0")

    def parts(self, setup: Setup) -> Parts:
        return Parts(Crf(self.half_life))
