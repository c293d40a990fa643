"""Count-only replay without driver and policy objects: hits of the simplest policies, vectorised over the layers.

Each policy here is an order of ranks: after every event (one layer of one step) the experts that rank highest keep the
layer's slots, out of the residents and of those just fetched. A rank changes only when its expert is used, so all of
them are worked out beforehand for the whole trace, and a step is a few operations on whole rows for all layers at once.
The counts equal those of `replay.count` with the policy of the same name, at any number of slots (issue 3, point 8).
What such a run cannot have: forecasts, a CPU, prefetches, a pool that layers share.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..policies.residency import even_shares
from ..traces.errors import InputError
from ..traces.views import Steps
from .accesses import Accesses


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


@dataclass(frozen=True)
class Ranks:
    """What a policy thinks of each access's expert from then on, [A] whole numbers from 1, different within a layer.

    kept: once it is resident. missed: in the choice at the end of the event that fetched it, in which the others have
    their `kept`. entered: added to `kept` for as long as the expert stays, if it comes in with this access.
    """

    kept: np.ndarray
    missed: np.ndarray
    entered: np.ndarray | None = None


def equal_slots(slots: int, layers: int, experts: int) -> tuple[int, ...]:
    """`slots` shared out over the layers, no more than there are experts; as `engine.setup_for` does."""
    return even_shares(min(slots, layers * experts), layers)


def count_fast(trace: Steps | Accesses, policy: str, slots: int) -> Counts:
    """Counts of one of `FAST`, or "static", with `slots` expert slots in all, starting empty (but for "static").

    InputError for another policy.
    """
    if policy not in FAST and policy != "static":
        names = ", ".join([*FAST, "static"])
        raise InputError(f"--policy {policy}: cannot be counted without a driver; these can: {names}")
    accesses = trace if isinstance(trace, Accesses) else Accesses.of(trace)
    shares = equal_slots(slots, accesses.layers, accesses.experts)
    if policy == "static":
        shares = _last_layers(sum(shares), accesses)
        hits = accesses.ids < np.array(shares)[accesses.keys // accesses.experts]
    else:
        hits = hits_of(accesses, FAST[policy](accesses), shares)
    return tally(accesses, policy, shares, hits)


def tally(accesses: Accesses, policy: str, slots: tuple[int, ...], hits: np.ndarray) -> Counts:
    """Counts from hits, [A] bool."""
    return Counts(
        policy,
        slots,
        accesses.decode,
        needed=accesses.by_event(np.ones(len(hits))),
        hits=accesses.by_event(hits),
        assignments=np.repeat(accesses.assignments[:, None], accesses.layers, axis=1),
        hit_assignments=accesses.by_event(accesses.loads * hits),
    )


def _last_layers(slots: int, accesses: Accesses) -> tuple[int, ...]:
    """`static` fills the last layers, and of the one before them the lowest ids."""
    after = np.arange(accesses.layers)[::-1] * accesses.experts
    return tuple(np.clip(slots - after, 0, accesses.experts).tolist())


# Ranks. Where two experts are equal their ids decide: `up` prefers the higher, `down` the lower.


def _up(a: Accesses) -> np.ndarray:
    return a.experts + a.ids + 1


def _down(a: Accesses) -> np.ndarray:
    return a.experts - a.ids


def _recency(a: Accesses) -> np.ndarray:
    return a.step_of * (2 * a.experts)


def lru(a: Accesses) -> Ranks:
    """`ar-lru`: a layer that needs more than it has slots keeps its hits and the lowest ids of the others."""
    return Ranks(_recency(a) + _up(a), _recency(a) + _down(a))


def _above(a: Accesses) -> int:
    """More than any recency."""
    return (a.steps + 1) * 2 * a.experts


def fifo(a: Accesses) -> Ranks:
    """`fifo`: by arrival, then by recency."""
    entered = a.step_of * _above(a)
    return Ranks(_recency(a) + _up(a), entered + _above(a) + _down(a), entered)


def lfu(a: Accesses) -> Ranks:
    """`lfu`: by uses so far, then by recency; every miss is kept."""
    return Ranks(a.uses * _above(a) + _recency(a) + _up(a), (a.steps + 1) * _above(a) + _down(a))


def lfu_in_cache(a: Accesses) -> Ranks:
    """`lfu-in-cache`: the same, with uses counted from 1 whenever an expert comes in."""
    return replace(lfu(a), entered=(1 - a.uses) * _above(a))


def minimum(a: Accesses) -> Ranks:
    """`min`: what is needed soonest stays (Belady 1966); of equals, residents."""
    following = a.following
    wait = np.where(following > 0, a.step_of[following], a.steps) if len(following) else following
    soon = (a.steps - wait) * (2 * a.experts)
    return Ranks(soon + _up(a), soon + _down(a))


def forced_minimum(a: Accesses) -> Ranks:
    """`min:bypass=false`: the same, but every miss is kept."""
    ranks = minimum(a)
    return Ranks(ranks.kept, ranks.missed + _above(a))


FAST: dict[str, Callable[[Accesses], Ranks]] = {
    "ar-lru": lru,
    "fifo": fifo,
    "lfu": lfu,
    "lfu-in-cache": lfu_in_cache,
    "min": minimum,
    "min:bypass=false": forced_minimum,
}


class Keeper:
    """The choice at the end of an event: in each row of [L, E] ranks the highest `slots[l]` stay, the rest become 0."""

    def __init__(self, slots: tuple[int, ...], experts: int) -> None:
        self._at = np.clip(experts - np.array(slots), 0, experts - 1)
        self._marks = np.unique(self._at)
        self._rows = np.arange(len(slots))
        self._none = np.flatnonzero(np.array(slots) == 0)

    def __call__(self, ranks: np.ndarray) -> None:
        lowest = np.partition(ranks, self._marks, axis=1)[self._rows, self._at]
        ranks *= ranks >= lowest[:, None]
        ranks[self._none] = 0


def hits_of(a: Accesses, ranks: Ranks, slots: tuple[int, ...], fresh: np.ndarray | None = None) -> np.ndarray:
    """Replay an order: [A] bool, whether each access found its expert resident.

    fresh: [S] bool, steps before which all slots are filled anew, at no cost, with what is needed soonest.
    """
    kept, missed, entered = _narrow(ranks, a)
    now = np.zeros(a.layers * a.experts, kept.dtype)  # rank of each resident, 0 of all others
    rows = now.reshape(a.layers, a.experts)
    base = np.zeros(len(now), kept.dtype)
    keeper = Keeper(slots, a.experts)
    hits = np.zeros(len(a.keys), bool)
    begins = a.begins.tolist()
    for step in range(a.steps):
        here = slice(begins[step], begins[step + 1])
        if fresh is not None and fresh[step]:
            _fill(now, a, here.start)
            keeper(rows)
        at, gained = a.keys[here], kept[here]
        hit = now[at] > 0
        hits[here] = hit
        if entered is not None:
            base[at] = np.where(hit, base[at], entered[here])
            gained = gained + base[at]
        now[at] = np.where(hit, gained, missed[here])
        keeper(rows)
        now[at] = np.where(now[at] > 0, gained, 0)
    return hits


def _fill(now: np.ndarray, a: Accesses, access: int) -> None:
    """Rank every expert by its next use from `access` on."""
    first = a.first_from(access)
    now[:] = 0
    now[a.keys[first]] = (a.steps - a.step_of[first]) * (2 * a.experts) + a.ids[first] + 1


def _narrow(ranks: Ranks, a: Accesses) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """In four bytes where all of them fit, which sort faster."""
    columns = [ranks.kept, ranks.missed] + ([] if ranks.entered is None else [ranks.entered])
    most = max(sum(int(np.abs(c).max(initial=0)) for c in columns), _above(a))
    narrow = [c.astype(np.int32 if most < 1 << 31 else np.int64) for c in columns]
    return narrow[0], narrow[1], narrow[2] if len(narrow) > 2 else None
