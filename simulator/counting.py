"""Count-only replay without driver and policy objects: hits of the simplest policies, vectorised over the layers.

Each policy here is an order: after every event (one layer of one step) the experts that rank highest keep the layer's
slots, out of the residents and of those just fetched. So an event is a comparison of whole rows, for all layers at
once, and the ranks themselves are worked out for many steps together. The counts equal those of `replay.count` with
the policy of the same name (issue 3, point 8). What such a run cannot have: forecasts, a CPU, prefetches, one pool for
all layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..traces.errors import InputError
from ..traces.schema import Kind
from ..traces.views import Steps

NEVER = 1 << 40  # later than any step
TOP = 1 << 60  # above every rank
CHUNK = 64  # steps whose ranks are worked out together; 64 x 48 x 128 ranks fill a few MB


@dataclass(frozen=True)
class Routing:
    """A trace's expert ids. ids: [N, L, k] of all N rows; begins: [S + 1], step s is the rows begins[s]:begins[s + 1];
    decode: [S] bool, False for prefill."""

    experts: int
    ids: np.ndarray
    begins: np.ndarray
    decode: np.ndarray

    @classmethod
    def of(cls, trace: Steps) -> "Routing":
        shape = trace.header.target
        listed = [(step.experts, step.kind is not Kind.PREFILL) for step in trace.steps()]
        ids = np.concatenate([e for e, _ in listed] or [np.zeros((0, len(shape.moe_layers), shape.top_k), np.uint8)])
        begins = np.cumsum([0, *(len(e) for e, _ in listed)])
        return cls(shape.experts, ids, begins, np.array([d for _, d in listed], bool))

    @property
    def steps(self) -> int:
        return len(self.decode)

    @property
    def layers(self) -> int:
        return self.ids.shape[1]

    @cached_property
    def run_starts(self) -> np.ndarray:
        """[S] bool: steps that follow prefill, or nothing."""
        return ~np.r_[False, self.decode[:-1]] & self.decode

    def only_decode(self) -> "Routing":
        """The decode and verify steps alone; `run_starts` would be lost, so take it before."""
        sizes = np.diff(self.begins)
        rows = np.repeat(self.decode, sizes)
        kept = self.decode[self.decode]
        return Routing(self.experts, self.ids[rows], np.r_[0, np.cumsum(sizes[self.decode])], kept)

    def chunks(self) -> Iterator["Chunk"]:
        for first in range(0, self.steps, CHUNK):
            yield self.chunk(first)

    def chunk(self, first: int) -> "Chunk":
        """The steps from `first` on, at most `CHUNK`."""
        last = min(first + CHUNK, self.steps)
        ids = self.ids[self.begins[first] : self.begins[last]]
        of_row = np.repeat(np.arange(last - first), np.diff(self.begins[first : last + 1]))
        rows = of_row[:, None] * self.layers + np.arange(self.layers)
        places = rows[:, :, None] * self.experts + ids
        need = np.zeros((last - first, self.layers, self.experts), bool)
        need.reshape(-1)[places] = True
        return Chunk(first, need, places, self.begins[first:last] - self.begins[first])


@dataclass(frozen=True)
class Chunk:
    """Some steps in a row. need: [s, L, E] bool; places: [n, L, k], where each assignment lies in the flat `need`;
    begins: [s], first row of each step."""

    first: int
    need: np.ndarray
    places: np.ndarray
    begins: np.ndarray

    @property
    def numbers(self) -> np.ndarray:
        """[s, 1, 1]: the steps' numbers."""
        return np.arange(self.first, self.first + len(self.need))[:, None, None]


@dataclass(frozen=True)
class Counts:
    """[S, L] counts of every event. needed and hits: distinct experts; assignments and hit_assignments: a token's
    choices. slots: [L]. decode: [S] bool. A miss is a copy, but for "static", which leaves it to the CPU."""

    policy: str
    slots: tuple[int, ...]
    decode: np.ndarray
    needed: np.ndarray
    hits: np.ndarray
    assignments: np.ndarray
    hit_assignments: np.ndarray

    @property
    def misses(self) -> np.ndarray:
        return self.needed - self.hits

    def in_decode(self, counts: np.ndarray) -> int:
        """Total of one of the arrays over decode and verify steps."""
        return int(counts[self.decode].sum())

    def in_prefill(self, counts: np.ndarray) -> int:
        return int(counts[~self.decode].sum())

    def by_layer(self, counts: np.ndarray) -> np.ndarray:
        """[L]: totals over decode and verify steps."""
        return counts[self.decode].sum(axis=0)


def equal_slots(slots: int, layers: int, experts: int) -> tuple[int, ...]:
    """`slots` shared out over the layers, the remainder to the first ones; as `engine.setup_for` does."""
    slots = min(slots, layers * experts)
    return tuple(slots // layers + (i < slots % layers) for i in range(layers))


def count_fast(trace: Steps | Routing, policy: str, slots: int) -> Counts:
    """Counts of one of `FAST` with `slots` expert slots in all, starting empty (but for "static").

    They equal those of `replay.count` with that policy at any number of slots. InputError for another policy.
    """
    if policy not in FAST:
        raise InputError(
            f"--policy {policy}: not one that can be counted without a driver; these can: {', '.join(FAST)}"
        )
    routing = trace if isinstance(trace, Routing) else Routing.of(trace)
    shares = equal_slots(slots, routing.layers, routing.experts)
    ranks = FAST[policy](routing, shares)
    return count_ranked(policy, ranks, np.zeros(routing.steps, bool))


class Ranks:
    """A policy as an order. `of(chunk)` gives two arrays of [s, L, E] ranks, all different within a row: what a
    resident is worth after each step, and what an expert is worth that is not resident, below 0 if it is not to be had.

    `held`: residents keep the rank they came in with (or last got as a miss), and the first array is not used.
    """

    held = False

    def __init__(self, routing: Routing, slots: tuple[int, ...]) -> None:
        self.routing, self.slots = routing, slots
        self.up = np.arange(routing.experts)  # tells equals apart: higher ids first, or lower ids first
        self.down = self.up[::-1]

    def start(self) -> np.ndarray:
        """[L, E] bool: resident before the first step."""
        return np.zeros((self.routing.layers, self.routing.experts), bool)

    def of(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError


class Lru(Ranks):
    """`ar-lru`: what was used last stays, higher ids first. A layer that needs more than it has slots keeps its hits
    and then its lowest ids."""

    def __init__(self, routing: Routing, slots: tuple[int, ...]) -> None:
        super().__init__(routing, slots)
        self.last = np.full((routing.layers, routing.experts), -1)

    def of(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        e = self.routing.experts
        used = np.where(chunk.need, chunk.numbers, -1)
        np.maximum(used[0], self.last, out=used[0])
        last = np.maximum.accumulate(used, axis=0)
        self.last = last[-1]
        resident = last * (2 * e) + e + self.up
        return resident, np.where(chunk.need, chunk.numbers * (2 * e) + self.down, -1)


class Fifo(Ranks):
    """What came in last stays, of one event the lowest ids; a use changes nothing."""

    held = True

    def of(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        miss = np.where(chunk.need, chunk.numbers * self.routing.experts + self.down, -1)
        return miss, miss


class Minimum(Ranks):
    """`min`: what is needed soonest stays (Belady 1966); among equals residents go first. With `bypass` off, misses
    go before residents."""

    bypass = True

    def __init__(self, routing: Routing, slots: tuple[int, ...]) -> None:
        super().__init__(routing, slots)
        self.after = _first_uses(routing)

    def of(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        e = self.routing.experts
        soon = (NEVER - next_uses(chunk, self.after[chunk.first // CHUNK])) * (2 * e)
        forced = 0 if self.bypass else NEVER * 4 * e
        return soon + e + self.up, np.where(chunk.need, soon + self.down + forced, -1)


class ForcedMinimum(Minimum):
    """`min:bypass=false`."""

    bypass = False


class Static(Ranks):
    """`static`: experts of the last layers from the start, lowest ids in the layer that is not whole."""

    def __init__(self, routing: Routing, slots: tuple[int, ...]) -> None:
        from_the_end = np.arange(routing.layers)[::-1] * routing.experts
        shares = np.clip(sum(slots) - from_the_end, 0, routing.experts)
        super().__init__(routing, tuple(shares.tolist()))

    def start(self) -> np.ndarray:
        return self.up < np.array(self.slots)[:, None]

    def of(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        shape = chunk.need.shape
        return np.broadcast_to(self.up, shape), np.broadcast_to(-1, shape)


FAST: dict[str, type[Ranks]] = {
    "ar-lru": Lru,
    "fifo": Fifo,
    "min": Minimum,
    "min:bypass=false": ForcedMinimum,
    "static": Static,
}


def _first_uses(routing: Routing) -> list[np.ndarray]:
    """For every chunk, [L, E]: the first step after it that needs each expert, or `NEVER`."""
    later = np.full((routing.layers, routing.experts), NEVER)
    after = []
    for first in range(0, routing.steps, CHUNK)[::-1]:
        after.append(later)
        need = routing.chunk(first).need
        later = np.where(need.any(axis=0), first + need.argmax(axis=0), later)
    return after[::-1]


def next_uses(chunk: Chunk, after: np.ndarray) -> np.ndarray:
    """[s, L, E]: the first step after each of the chunk's that needs each expert. `after`: the same for its last."""
    coming = np.where(chunk.need, chunk.numbers, NEVER)[1:]
    coming = np.concatenate([coming, after[None]])
    return np.minimum.accumulate(coming[::-1], axis=0)[::-1]


class Keeper:
    """Chooses who keeps the slots: in each row of [L, E] ranks the highest `slots[l]`, if they are not below 0."""

    def __init__(self, slots: tuple[int, ...], experts: int) -> None:
        self._any = np.array(slots)[:, None] > 0
        self._at = np.clip(experts - np.array(slots), 0, experts - 1)
        self._marks = np.unique(self._at)
        self._rows = np.arange(len(slots))

    def __call__(self, ranks: np.ndarray) -> np.ndarray:
        """[L, E] bool. The ranks of a row are all different, but for those below 0."""
        lowest = np.partition(ranks, self._marks, axis=1)[self._rows, self._at]
        return (ranks >= np.maximum(lowest, 0)[:, None]) & self._any


def count_ranked(policy: str, ranks: Ranks, fresh: np.ndarray) -> Counts:
    """Replay an order. fresh: [S] bool, steps before which all slots are filled anew with what ranks highest, at no
    cost (only for an order whose ranks look ahead)."""
    routing, resident = ranks.routing, ranks.start()
    needed, hits, assignments, hit_assignments = (np.zeros((routing.steps, routing.layers), np.int64) for _ in range(4))
    keeper = Keeper(ranks.slots, routing.experts)
    held = np.full(resident.shape, -1)
    for chunk in routing.chunks():
        before = np.empty_like(chunk.need)
        of_resident, of_miss = ranks.of(chunk)
        for i in range(len(before)):
            if fresh[chunk.first + i]:
                resident = keeper(np.where(chunk.need[i], TOP + ranks.up, of_resident[i]))
            before[i] = resident
            held = np.where(resident, held if ranks.held else of_resident[i], of_miss[i])
            resident = keeper(held)
        here = slice(chunk.first, chunk.first + len(before))
        needed[here] = np.count_nonzero(chunk.need, axis=2)
        hits[here] = np.count_nonzero(chunk.need & before, axis=2)
        chosen = np.count_nonzero(before.reshape(-1)[chunk.places], axis=2)
        hit_assignments[here] = np.add.reduceat(chosen, chunk.begins, axis=0)
        assignments[here] = np.diff(routing.begins[here.start : here.stop + 1])[:, None] * routing.ids.shape[2]
    return Counts(policy, ranks.slots, routing.decode, needed, hits, assignments, hit_assignments)
