"""MoE-Infinity: the running request is matched with past ones, and these say what comes next."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..traces.schema import Kind
from .frequency import Counts
from .interface import Demand, Key, Setup, StepInfo, View
from .orders import Ranked
from .parts import Composed, Parts, Prefetcher

TINY = 1e-300  # in the place of a zero that divides a zero


class Collection:
    """Activation matrices [L, E] of past requests, at most `capacity`, and how like them a pass is so far.

    by_layer: likeness is the mean of the layers' cosines, else the cosine of all the layers so far together.
    A new matrix in a full collection replaces the one that it is most like.
    """

    def __init__(self, layers: int, experts: int, capacity: int, by_layer: bool = False) -> None:
        self._all = np.zeros((capacity, layers, experts))
        self._norms = np.zeros((capacity, layers))  # squared
        self._by_layer = by_layer
        self.size = 0
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self._dot = np.zeros(self.size)
        self._norm = np.zeros(self.size)
        self._own = 0.0

    def see(self, layer: int, counts: np.ndarray) -> None:
        """What the pass chose in its next layer, [E]."""
        rows, norms, own = self._all[: self.size, layer], self._norms[: self.size, layer], float(counts @ counts)
        dot = rows @ counts
        if self._by_layer:
            self._dot += dot / np.sqrt(np.maximum(norms * own, TINY))
        else:
            self._dot += dot
            self._norm += norms
            self._own += own

    def nearest(self) -> int | None:
        """Which matrix is most like the pass so far, the older one of equals; None if none is like it at all."""
        return self._likest() if self._dot.any() else None

    def __getitem__(self, at: int) -> np.ndarray:
        return self._all[at]

    def _likest(self) -> int:
        likeness = self._dot if self._by_layer else self._dot / np.sqrt(np.maximum(self._norm * self._own, TINY))
        return int(likeness.argmax())

    def add(self, counts: np.ndarray) -> None:
        """A request is over; counts: [L, E]."""
        at = self.size
        if at == len(self._all):
            self.begin()
            for layer, row in enumerate(counts):
                self.see(layer, row)
            at = self._likest()
        else:
            self.size += 1
        self._all[at] = counts
        self._norms[at] = (counts * counts).sum(axis=1)


class Matched(Prefetcher):
    """Brings in what the most similar past request says of the layers to come, the most probable and nearest first.

    p: [L, E], the share of a layer's choices that each expert had in that request. Where none is like the pass at all
    the running one stands in. A request is over when a prompt begins, or after `request` steps without one. Prompts
    are not counted.
    release: likeness and priority as in the code, see `MoeInfinityRelease`; what comes in displaces anything.
    """

    def __init__(self, capacity: int, request: int, release: bool = False) -> None:
        self._capacity, self._request, self._release = capacity, request, release

    def setup(self, setup: Setup) -> None:
        self._layers = setup.layers
        shape = setup.layers, setup.experts
        self.collection = Collection(*shape, self._capacity, by_layer=self._release)
        self.p, self.worth = np.zeros(shape), np.zeros(shape)
        self._running, self._steps = np.zeros(shape), 0
        self._nearness = 1 - np.arange(self._layers)[:, None] / (self._layers + self._release)
        self._nearest: int | None = None  # whose p it is
        self._layer, self._open = -1, False
        self._priority: np.ndarray | None = None

    def step_begins(self, step: StepInfo) -> None:
        prompt = step.kind is Kind.PREFILL
        if self._steps and (prompt or self._steps == self._request):
            self.collection.add(self._running)
            self._running, self._steps = np.zeros_like(self._running), 0
            self.p, self.worth = np.zeros_like(self.p), np.zeros_like(self.worth)
            self._nearest = None
        self._steps += not prompt
        self._open, self._layer = not prompt, -1
        self._priority = None
        self.collection.begin()

    def used(self, demand: Demand, view: View) -> None:
        self._layer, self._priority = demand.layer, None
        if not self._open:
            return
        row = np.zeros(self._running.shape[1])
        row[list(demand.experts)] = demand.loads
        self._running[demand.layer] += row
        self.collection.see(demand.layer, row)
        nearest = self.collection.nearest()
        if nearest is None or nearest != self._nearest:
            said = self._running if nearest is None else self.collection[nearest]
            self.p = said / np.maximum(said.sum(axis=1, keepdims=True), 1)
            self.worth = self.p * self._nearness
            self._nearest = nearest

    def next_fetch(self, view: View) -> Key | None:
        if not self._open or self._layer < 0:
            return None
        if self._priority is None:
            self._priority = self._prioritise(view)
        priority, first = self._priority, self._layer + 1
        while priority.size:
            at = int(priority.argmax())
            if priority[at] <= 0:
                return None
            priority[at] = 0
            layer, expert = divmod(at, self.p.shape[1])
            key = Key(first + layer, expert)
            if not view.resident(key) and not view.in_flight(key):
                return key
        return None

    def _prioritise(self, view: View) -> np.ndarray:
        """Of the absent experts of the layers to come, flat."""
        first = self._layer + 1
        p, nearness = self.p[first:], self._nearness[1 : self._layers - self._layer]
        priority = (p + 1e-8 * (p > 0)) * nearness
        for at, row in enumerate(priority):
            row[view.residents(first + at)] = 0
        return priority.reshape(-1)

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        return self._release or bool(self.worth[incoming] > self.worth[victim])

    def keep_fetch(self, key: Key, view: View) -> bool:
        return key.layer > self._layer


class Improbable(Ranked):
    """Lowest probability times nearness of the layer to the first one goes first."""

    def __init__(self, matched: Matched) -> None:
        self._matched = matched

    def ranks(self, layers: slice) -> np.ndarray:
        return self._matched.worth[layers]


@dataclass
class MoeInfinity(Composed):
    """Prefetch and eviction by the past request that is most like the running one (MoE-Infinity paper, 2401.14361).

    Theirs: how many tokens of a request chose each expert of each layer is a matrix; up to `capacity` = 120 of past
    requests are kept, a new one replacing the most similar; after each layer's gate the matrix of the pass so far is
    matched by cosine, and the nearest one, normalised, is the probability p of what comes; prefetch by
    p(l', e) * (1 - (l' - l) / L), l the running layer; the resident with the lowest p times a layer term that protects
    the first layers goes first; misses are copied on demand, before any prefetch, and kept; no CPU tier.
    Ours: the layer term of eviction, 1 - l / L; a prefetch displaces only what is worth less by it; the collection
    starts empty, and where nothing in it has anything in common with the pass the running request stands in; prompts
    are neither counted nor matched; policies are not told of requests, so one is over when a prompt begins, or after
    `request` steps. A copy whose layer has begun without needing it is given up if demand wants the link.
    """

    name: ClassVar[str] = "moe-infinity"
    scope = "global"
    capacity: int = 120
    request: int = 64

    def __post_init__(self) -> None:
        _check(self.capacity, self.request)

    def parts(self, setup: Setup) -> Parts:
        matched = Matched(self.capacity, self.request)
        return Parts(Improbable(matched), prefetch=[matched])


@dataclass
class MoeInfinityRelease(Composed):
    """On-demand loading, evicting what was visited least, as MoE-Infinity's code really does it (commit d617801).

    Theirs: prefetch is off, and commented out for most models; one pool of all layers; the fewest visits go first, and
    an eviction does not reset them. `prefetch=true` is what is left for Arctic and Grok: up to 1000 past requests,
    likeness the mean of the layers' cosines, priority (p + 1e-8) * (1 - (l' - l) / (L + 1)) for all with p > 0.
    Ours: requests are told apart, and prompts treated, as in `moe-infinity`; the second evictor of the code, which
    throws out the most visited, is taken for a mistake and not copied.
    """

    name: ClassVar[str] = "moe-infinity-release"
    scope = "global"
    prefetch: bool = False
    capacity: int = 1000
    request: int = 64

    def __post_init__(self) -> None:
        _check(self.capacity, self.request)

    def parts(self, setup: Setup) -> Parts:
        ahead = [Matched(self.capacity, self.request, release=True)] if self.prefetch else []
        return Parts(Counts(), prefetch=ahead)


def _check(capacity: int, request: int) -> None:
    if capacity < 1 or request < 1:
        raise ValueError("capacity and request must be at least 1")
