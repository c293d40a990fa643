"""Caches made of two queues: new experts have to prove themselves before they may stay long."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .interface import Candidates, Demand, Key, Scope, Setup, View
from .parts import Composed, Parts, VictimOrder

Queue = OrderedDict[Key, int]  # the oldest entry first; the value is the queue's own


class TwoQueues(VictimOrder):
    """A new and an old queue for each eviction group. `share` of its slots belong to the old one.

    Entries of experts that turn out to be gone are dropped where they are met; policies are not told of refusals.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def setup(self, setup: Setup) -> None:
        self._pooled = len(setup.slots) == 1
        self._new: list[Queue] = [OrderedDict() for _ in setup.slots]
        self._old: list[Queue] = [OrderedDict() for _ in setup.slots]
        self._slots = setup.slots

    def slots_changed(self, slots: tuple[int, ...]) -> None:
        self._slots = slots

    def group(self, layer: int) -> int:
        return 0 if self._pooled else layer

    def placed(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.arrive(key, self.group(key.layer))

    def used(self, demand: Demand, view: View) -> None:
        group = self.group(demand.layer)
        for key in demand.keys:
            if key.expert in demand.held:
                self.hit(key, group)
            else:
                self._forget(key, group)
                self.arrive(key, group)

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        group = self.group(key.layer)
        if key not in self._new[group] and key not in self._old[group]:
            self.arrive(key, group)

    def _forget(self, key: Key, group: int) -> None:
        self._new[group].pop(key, None)
        self._old[group].pop(key, None)

    def sweep(self, queue: Queue, view: View) -> None:
        """Drop the entries of experts that are not there."""
        for key in [k for k in queue if not view.resident(k) and not view.in_flight(k)]:
            del queue[key]

    def arrive(self, key: Key, group: int) -> None:
        raise NotImplementedError

    def hit(self, key: Key, group: int) -> None:
        raise NotImplementedError


class SlruOrder(TwoQueues):
    """Probation and protected; a hit protects, and what the protected queue has too many of goes back."""

    def arrive(self, key: Key, group: int) -> None:
        self._new[group][key] = 0

    def hit(self, key: Key, group: int) -> None:
        new, old = self._new[group], self._old[group]
        self._forget(key, group)
        most = int(self._share * self._slots[group])
        if most:
            old[key] = 0
        else:
            new[key] = 0
        while len(old) > most:
            new[old.popitem(last=False)[0]] = 0

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        group = self.group(layer)
        for queue in (self._new[group], self._old[group]):
            self.sweep(queue, view)
            found = next((key for key in queue if key in candidates), None)
            if found is not None:
                del queue[found]
                return found
        return None


@dataclass
class Slru(Composed):
    """On-demand loading with a segmented LRU: only what was used again is protected (Karedla et al. 1994).

    Theirs: a probation and a protected queue, both LRU; a hit moves to the protected one, whose overflow goes back to
    probation; probation is evicted first. It resists a prompt that sweeps through. Ours: `protected` is 80 % of the
    slots; every miss is kept.
    """

    name: ClassVar[str] = "slru"
    scope: Scope = "layer"
    protected: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.protected <= 1:
            raise ValueError("protected must lie in 0..1")

    def parts(self, setup: Setup) -> Parts:
        return Parts(SlruOrder(self.protected))


MOST = 3  # S3-FIFO counts hits with two bits


class S3FifoOrder(TwoQueues):
    """A small queue of newcomers, a main queue, and ghosts: the keys last evicted from the small queue."""

    def __init__(self, small: float, promote: int) -> None:
        super().__init__(1 - small)
        self._small, self._promote = small, promote

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self._ghosts: list[Queue] = [OrderedDict() for _ in setup.slots]

    def arrive(self, key: Key, group: int) -> None:
        ghost = self._ghosts[group].pop(key, None) is not None
        (self._old if ghost else self._new)[group][key] = 0

    def hit(self, key: Key, group: int) -> None:
        for queue in (self._new[group], self._old[group]):
            if key in queue:
                queue[key] = min(MOST, queue[key] + 1)

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        group = self.group(layer)
        small, main = self._new[group], self._old[group]
        self.sweep(small, view)
        self.sweep(main, view)
        # Newcomers of the running layer stand in a queue already, but do not hold its slots yet.
        waiting = sum(1 for key in small if not view.resident(key))
        found = None
        if len(small) - waiting >= max(1, round(self._small * self._slots[group])):
            found = self._from_small(group, candidates)
        found = found or self._from_main(main, candidates) or self._from_small(group, candidates)
        for key in [k for k in main if not view.resident(k)]:  # they come in after what was moved just now
            main.move_to_end(key)
        return found

    def _from_small(self, group: int, candidates: Candidates) -> Key | None:
        """The oldest newcomer, those used often moving to the main queue on the way."""
        small, ghosts = self._new[group], self._ghosts[group]
        for key in [k for k in small if k in candidates]:
            hits = small.pop(key)
            if hits < self._promote:
                ghosts[key] = 0
                while len(ghosts) > max(1, round(self._share * self._slots[group])):
                    ghosts.popitem(last=False)
                return key
            self._old[group][key] = 0
        return None

    def _from_main(self, main: Queue, candidates: Candidates) -> Key | None:
        """The oldest without a hit; one with hits loses one and goes round again."""
        going_round = [k for k in main if k in candidates]
        for key in going_round:
            hits = main.pop(key)
            if not hits:
                return key
            main[key] = hits - 1
            going_round.append(key)
        return None


@dataclass
class S3Fifo(Composed):
    """On-demand loading with three first-in-first-out queues (S3-FIFO, Yang et al., SOSP 2023).

    Theirs: newcomers enter a `small` queue of 10 % of the slots; when they come to its end they move to the main queue
    if they were hit at least twice, and are evicted if not; an evicted newcomer that returns while its key is
    remembered enters the main queue at once; the main queue gives one more round for every hit, of which it counts 3.
    Ours: the queues live in the eviction groups of experts; of a layer that needs more than it has slots some experts
    pass through; a victim that may not go now is passed over.
    """

    name: ClassVar[str] = "s3-fifo"
    scope: Scope = "layer"
    small: float = 0.1
    promote: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.small <= 1 or self.promote < 1:
            raise ValueError("small must lie in 0..1 and promote be at least 1")

    def parts(self, setup: Setup) -> Parts:
        return Parts(S3FifoOrder(self.small, self.promote))
