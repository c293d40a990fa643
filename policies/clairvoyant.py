"""What a cache could do at best, knowing the whole trace."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar

from .future import NEVER, Future
from .interface import Candidates, Demand, Key, Policy, Scope, Setup, StepInfo, View, Where


@dataclass
class Min(Policy):
    """Farthest next use goes first: the offline optimum of on-demand caching (Belady 1966, Mattson 1970).

    One layer of one step is one event: at its end the experts with the earliest next use stay, out of residents and
    fetched ones. With `bypass` a fetched expert may be left out, which makes the number of copies minimal. Without it
    every miss must be admitted (classic MIN): a rule, and no optimum where an event needs several experts, as a
    schedule that keeps something needed later may then miss less. `placed` starts with what is needed first instead of
    with nothing, to bound policies that do not start empty. It bounds hit counts of policies that copy on demand only:
    a prefetching policy may hit more often, and a lower hit rate may be faster once a CPU computes as well.
    """

    name: ClassVar[str] = "min"
    clairvoyant: ClassVar[bool] = True
    scope: Scope = "layer"
    bypass: bool = True
    placed: bool = False

    def setup(self, setup: Setup) -> None:
        self._setup = setup
        self._layers = setup.layers
        self._step = 0
        self._layer = 0
        self._needed: set[Key] = set()
        # Per eviction group a heap of (-next event, key), one entry a use. An entry whose event is over is stale,
        # and lies below every live one.
        self._heaps: list[list[tuple[int, Key]]] = [[] for _ in range(setup.layers if self.scope == "layer" else 1)]
        self._limit = 4 * max(setup.slots) + 4 * setup.experts

    def reveal(self, future: Future) -> None:
        self._future = future

    def step_begins(self, step: StepInfo) -> None:
        self._step = step.index

    def _next_event(self, key: Key) -> int:
        """Number of the next event that needs `key`, events counted through all layers of all steps."""
        over = key.layer <= self._layer  # this step's event of that layer is over, or is the present one
        step = self._future.next_use(key, self._step if over else self._step - 1)
        return NEVER if step == NEVER else step * self._layers + key.layer

    def placement(self) -> Iterable[Key]:
        if not self.placed:
            return
        self._step, self._layer = -1, self._layers  # before the first step
        layers, experts = range(self._layers), range(self._setup.experts)
        groups = [[layer] for layer in layers] if self.scope == "layer" else [list(layers)]
        for heap, group, slots in zip(self._heaps, groups, self._setup.slots, strict=True):
            first = sorted((self._next_event(key), key) for key in (Key(la, e) for la in group for e in experts))
            for event, key in first[:slots]:
                heappush(heap, (-event, key))
                yield key

    def _heap(self, layer: int) -> list[tuple[int, Key]]:
        return self._heaps[layer if self.scope == "layer" else 0]

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        """Misses in order of next use, so that those worth keeping are asked for first."""
        self._layer = demand.layer
        self._needed = {Key(demand.layer, e) for e in demand.experts}
        heap = self._heap(demand.layer)
        hits, misses = [], []
        for expert in demand.experts:
            key = Key(demand.layer, expert)
            event = self._next_event(key)
            heappush(heap, (-event, key))
            if view.resident(key):
                hits.append((expert, Where.GPU))
            else:
                misses.append((event, expert))
        if len(heap) > self._limit:
            self._prune(heap, view)
        return hits + [(expert, Where.FETCH) for _, expert in sorted(misses)]

    def _present(self, key: Key, view: View) -> bool:
        """Resident, or fetched for the running layer and possibly resident at its end."""
        return key in self._needed or view.resident(key)

    def _prune(self, heap: list[tuple[int, Key]], view: View) -> None:
        """Drop stale entries and those of experts that are gone."""
        now = self._step * self._layers + self._layer
        heap[:] = {pair for pair in heap if -pair[0] > now and self._present(pair[1], view)}
        heapify(heap)

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        heap = self._heap(incoming.layer)
        spared, found = [], None
        while heap and found is None:
            pair = heappop(heap)
            if pair[1] in candidates:
                found = pair
            elif self._present(pair[1], view):
                spared.append(pair)
        keep = found is not None and self.bypass and -found[0] <= self._next_event(incoming)
        if found is not None and keep:
            spared.append(found)
        for pair in spared:
            heappush(heap, pair)
        return None if found is None or keep else found[1]

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        return max(candidates, key=self._next_event, default=None)
