"""The statistics that publications give of routing, each by the name that a model's .toml uses for it.

Every value is a mean over layers unless the name says a layer (`overlap@7`).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .stats import cosines, entropy, hit_rate, lru_depths, overlap, shares, top_share, unions
from .synth_process import BLOCK, Chain, Process

MEANING = {
    "overlap": "part of a token's experts that the token before it chose too",
    "lag": "the same for the token so many before it",
    "union": "distinct experts in so many tokens that follow one another",
    "repeat": "choices whose expert is chosen again within so many tokens",
    "lru": "hit rate of LRU with so many slots a layer, empty at first, a whole token looked up before it replaces any",
    "lru_inside": "the same, where each expert of a token replaces at once",
    "lfu": "hit rate of least frequently used",
    "oracle": "hit rate of a clairvoyant cache, which may leave an expert out",
    "miss_first": "miss rate in the first so many tokens, LRU with so many slots",
    "miss_after": "miss rate after so many tokens, LRU with so many slots",
    "top16": "share of a sequence's choices that go to its busiest 16 experts",
    "entropy": "entropy of a sequence's choices over that of uniform ones",
    "sequence_top20": "share of a sequence's choices that go to its busiest 20 % of experts",
    "top20": "share of all choices that go to the busiest 20 % of experts",
    "domain_top20": "the same within one domain",
    "domain_cosine": "cosine between the shares of experts in two domains",
}


@dataclass(frozen=True)
class Sample:
    """Routing experts [T, L, k] of sequences of equal length: sequence i is of domain places[i]."""

    experts: np.ndarray
    places: tuple[int, ...]
    count: int  # experts of a layer

    @property
    def length(self) -> int:
        return len(self.experts) // len(self.places)

    @cached_property
    def offsets(self) -> np.ndarray:
        return np.arange(len(self.places) + 1) * self.length

    @cached_property
    def depths(self) -> np.ndarray:
        return lru_depths(self.experts, self.offsets, self.count)

    def by_sequence(self) -> np.ndarray:
        """[S, T, L, k]"""
        return self.experts.reshape(len(self.places), self.length, *self.experts.shape[1:])

    def of(self, place: int) -> "Sample":
        """Only the sequences of one domain."""
        chosen = [i for i, p in enumerate(self.places) if p == place]
        rows = self.by_sequence()[chosen].reshape(-1, *self.experts.shape[1:])
        return Sample(rows, (place,) * len(chosen), self.count)

    def domain_shares(self) -> np.ndarray:
        """[D, L, E] shares of each domain's choices."""
        return np.stack([shares(self.of(place).experts, self.count) for place in sorted(set(self.places))])


def sample(process: Process, places: tuple[int, ...], tokens: int, seed: int) -> Sample:
    """One sequence of so many tokens for each domain in `places`; the same seed gives the same noise."""
    rows = []
    for sequence, place in enumerate(places):
        chain = Chain(process, place, seed, sequence)
        rows += [chain.advance(min(BLOCK, tokens - done))[0] for done in range(0, tokens, BLOCK)]
    return Sample(np.concatenate(rows), places, process.experts)


def statistic(name: str, found: Sample, names: list[str]) -> float:
    """A statistic by its name in the .toml: one of `MEANING`, with its numbers after slashes (`lru/16`); `overlap@7`
    is that of one layer, `overlap/math` that of one domain. `names` are the domains. ValueError for another name.
    """
    what, _, argument = name.partition("/")
    what, _, layer = what.partition("@")
    if argument in names:
        return statistic(what, found.of(names.index(argument)), names)
    values = _by_layer(what, found, [int(n) for n in argument.split("/") if n])
    return float(values[int(layer)] if layer else np.mean(values))


def _by_layer(what: str, found: Sample, numbers: list[int]) -> np.ndarray:
    experts, offsets, count = found.experts, found.offsets, found.count
    match what:
        case "overlap":
            return overlap(experts, offsets)
        case "lag":
            return overlap(experts, offsets, numbers[0])
        case "union":
            return unions(experts, offsets, numbers)[0]
        case "lru":
            return hit_rate(found.depths, numbers[0])
        case "lru_inside":
            return hit_rate(lru_depths(experts, offsets, count, atomic=False), numbers[0])
        case "lfu" | "oracle":
            return kept_hits(found, numbers[0], clairvoyant=what == "oracle")
        case "top16":
            return np.mean([top_share(s, 16 / count) for s in _sequence_shares(found)], axis=0)
        case "entropy":
            return np.mean([entropy(s) for s in _sequence_shares(found)], axis=0)
        case "sequence_top20":
            return np.mean([top_share(s) for s in _sequence_shares(found)], axis=0)
        case "top20":  # of all domains together, each with the same weight
            return top_share(found.domain_shares().mean(axis=0))
        case "domain_top20":
            return np.mean([top_share(s) for s in found.domain_shares()], axis=0)
        case "domain_cosine":
            parts = {str(i): s for i, s in enumerate(found.domain_shares())}
            return np.array(list(cosines(parts).values()))
        case "repeat":
            return repeated(found, numbers[0])
        case "miss_first" | "miss_after":
            return _misses(found, numbers[0], numbers[1], what == "miss_first")
    raise ValueError(f"no statistic {what!r}")


def _sequence_shares(found: Sample) -> list[np.ndarray]:
    return [shares(rows, found.count) for rows in found.by_sequence()]


def repeated(found: Sample, window: int) -> np.ndarray:
    """[L] share of choices whose expert is chosen again within the next `window` tokens of its sequence; the last
    `window` tokens of a sequence are left out, as their future is not known.
    """
    rows = found.by_sequence()
    now = rows[:, : found.length - window]
    again = np.zeros(now.shape, bool)
    for lag in range(1, window + 1):
        later = rows[:, lag : found.length - window + lag]
        again |= (now[..., :, None] == later[..., None, :]).any(axis=-1)
    return again.mean(axis=(0, 1, 3))


def kept_hits(found: Sample, slots: int, clairvoyant: bool) -> np.ndarray:
    """[L] hit rate of a cache, empty when a sequence begins, all experts of a token looked up before any is replaced.

    Least frequently used (counted since the sequence began, ties to the more recent) must take in what it missed;
    the clairvoyant keeps the experts that are needed soonest, and may leave a new one out.
    """
    rows = found.by_sequence()
    sequences, length, layers, _ = rows.shape
    shape = (sequences, layers, found.count)
    future = _next_uses(rows, found.count) if clairvoyant else None
    held, uses, last = np.zeros(shape, bool), np.zeros(shape), np.zeros(shape)
    hits = np.zeros(layers)
    for t in range(length):
        ids = rows[:, t].astype(np.int64)
        hits += np.take_along_axis(held, ids, 2).sum(axis=(0, 2))
        wanted = np.zeros(shape, bool)
        np.put_along_axis(wanted, ids, True, 2)
        if future is not None:
            worth = np.where(held | wanted, -future[t], -np.inf)
        else:
            uses += wanted
            last[wanted] = t
            worth = np.where(wanted, np.inf, np.where(held, uses + last / (length + 1), -np.inf))
        keep = np.argsort(-worth, axis=2, kind="stable")[..., :slots]  # ties: the lowest ids stay
        held = np.zeros(shape, bool)
        np.put_along_axis(held, keep, True, 2)
        held &= worth > -np.inf
    return hits / (sequences * length * rows.shape[3])


def _next_uses(rows: np.ndarray, count: int) -> np.ndarray:
    """[T, S, L, E] the token at which each expert is used next, after token t; the length of the sequence if never."""
    sequences, length, layers, _ = rows.shape
    after = np.full((sequences, layers, count), length, np.int32)
    found = np.empty((length, *after.shape), np.int32)
    for t in range(length - 1, -1, -1):
        found[t] = after
        np.put_along_axis(after, rows[:, t].astype(np.int64), t, 2)
    return found


def _misses(found: Sample, tokens: int, slots: int, first: bool) -> np.ndarray:
    """[L] LRU miss rate of the first so many tokens of each sequence, or of those after them."""
    rows = found.by_sequence()[:, :tokens]
    head = Sample(rows.reshape(-1, *rows.shape[2:]), found.places, found.count)
    early = head.depths[:, :slots].sum(axis=1)
    if first:
        return 1 - early / head.depths.sum(axis=1)
    late = found.depths - head.depths
    return 1 - late[:, :slots].sum(axis=1) / late.sum(axis=1)
