"""What scores of experts are worth: precision, recall, calibration, and hits of a cache that keeps what they rank high.

Scores are [T, L, E]: after pass t, of what pass t + 1 and those after it will need. needs: [T, L, E] bool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .signals import Pass

TIE = 1e-7  # below what tells two scores apart; equal ones are told apart by recency
NEVER = np.iinfo(np.int32).max


def demand(told: Sequence[Pass]) -> np.ndarray:
    """[T, L, E] bool."""
    return np.array([now.needs for now in told])


def recency(needs: np.ndarray) -> np.ndarray:
    """[T, L, E] float64 in 0..1: the last pass that needed the expert, up to this one."""
    at = np.where(needs, np.arange(1, len(needs) + 1)[:, None, None], 0)
    return np.maximum.accumulate(at, axis=0) / len(needs)


# Clairvoyant scores


def next_use(needs: np.ndarray) -> np.ndarray:
    """[T, L, E]: the first pass after each that needs the expert, or NEVER."""
    found = np.full(needs.shape, NEVER, np.int32)
    for t in range(len(needs) - 2, -1, -1):
        found[t] = np.where(needs[t + 1], t + 1, found[t + 1])
    return found


def lookahead(needs: np.ndarray, ahead: int | None) -> np.ndarray:
    """Exact sight of `ahead` passes, recency beyond them; None: of all, which makes the optimum (Belady 1966)."""
    wait = next_use(needs) - np.arange(len(needs), dtype=np.int32)[:, None, None]
    seen = wait <= (len(needs) if ahead is None else ahead)
    return np.where(seen, 1 / np.maximum(wait, 1), 0.0)


# A forecast


@dataclass(frozen=True)
class Quality:
    """How scores foretell the next pass's demand, over all layers.

    precision: share of the needed among the best k of a layer, k as many as it will need (so it is recall as well).
    recall: share of the needed among the best `slots`. skill: 1 - Brier score / that of the mean rate, with scores made
    chances by what such scores meant in the first half of the passes, tried on the second half. off: mean distance
    between a score, taken as a chance, and the frequency it stands for, in the second half.
    """

    precision: float
    recall: float
    skill: float
    off: float


def quality(scores: np.ndarray, needs: np.ndarray, slots: int, warm_up: int) -> Quality:
    """The first `warm_up` passes are not counted."""
    said, came = scores[warm_up:-1], needs[warm_up + 1 :]
    order = np.argsort(-(said + TIE * recency(needs)[warm_up:-1]), axis=-1, kind="stable")
    ranked = np.take_along_axis(came, order, axis=-1)
    many = came.sum(axis=-1, keepdims=True)
    best = np.arange(came.shape[-1]) < many
    half = len(said) // 2
    meant, rate = chances(said[:half], came[:half], said[half:]), came[:half].mean()
    late = came[half:]
    worst = np.mean((late - rate) ** 2)
    curve = reliability(said[half:], late)
    return Quality(
        precision=float((ranked & best).sum() / came.sum()),
        recall=float(ranked[..., :slots].sum() / came.sum()),
        skill=float(1 - np.mean((late - meant) ** 2) / worst),
        off=float(np.average(np.abs(curve[0] - curve[1]), weights=curve[2])),
    )


def chances(said: np.ndarray, came: np.ndarray, asked: np.ndarray, bins: int = 50) -> np.ndarray:
    """What scores mean: for each of `asked`, how often experts with such a score were needed.

    said, came: scores and whether the need came, of one shape, cut into up to `bins` of like size (equal scores are
    never parted)."""
    edges = _edges(said, bins)
    place = np.searchsorted(edges, said.reshape(-1), side="right")
    total = np.bincount(place, minlength=len(edges) + 1)
    needed = np.bincount(place, weights=came.reshape(-1), minlength=len(edges) + 1)
    mean = (needed + came.mean()) / (total + 1)
    return mean[np.searchsorted(edges, asked, side="right")]


def reliability(said: np.ndarray, came: np.ndarray, bins: int = 10) -> np.ndarray:
    """[3, B]: of each bin the mean score, the frequency of need, and how many experts it holds."""
    edges = _edges(said, bins)
    place = np.searchsorted(edges, said.reshape(-1), side="right")
    total = np.bincount(place, minlength=len(edges) + 1)
    sums = [np.bincount(place, weights=of.reshape(-1), minlength=len(edges) + 1) for of in (said, came)]
    there = total > 0
    return np.array([sums[0][there] / total[there], sums[1][there] / total[there], total[there]])


def _edges(said: np.ndarray, bins: int) -> np.ndarray:
    """Quantiles, of about 50,000 of the scores."""
    some = said.reshape(-1)[:: max(1, said.size // 50_000)]
    return np.unique(np.quantile(some, np.arange(1, bins) / bins))


# A cache


def residents(scores: np.ndarray, needs: np.ndarray, slots: int) -> np.ndarray:
    """[T, L, E] bool: what is resident when each pass begins, with `slots` a layer, empty at first.

    After each pass a layer keeps the best of its residents and of what the pass needed. Of equal scores the most recent
    stays, then what was resident (the higher id first), then the lower id, as `counting.lru` has it.
    """
    size = needs.shape[-1]
    key = scores + TIE * recency(needs)
    ids = np.arange(size)
    found, missed = (size + ids + 1) * TIE * 1e-6, (size - ids) * TIE * 1e-6
    there = np.zeros(needs.shape, bool)
    for t in range(len(needs) - 1):
        choice = there[t] | needs[t]
        worth = np.where(choice, key[t] + np.where(there[t], found, missed), -np.inf)
        least = np.partition(worth, size - slots, axis=1)[:, size - slots]
        there[t + 1] = choice & (worth >= least[:, None])
    return there


def hits(scores: np.ndarray, needs: np.ndarray, slots: int) -> np.ndarray:
    """[T, L] needed experts that were resident, see `residents`."""
    return (residents(scores, needs, slots) & needs).sum(axis=2)


def prefetched(
    scores: np.ndarray, needs: np.ndarray, there: np.ndarray, many: int, warm_up: int
) -> tuple[float, float]:
    """If the `many` best absent experts of each layer were copied before each pass: which share of them the pass needs,
    and which share of the experts that it would have missed they are. there: [T, L, E], see `residents`."""
    absent = ~there[warm_up + 1 :]
    said = np.where(absent, (scores + TIE * recency(needs))[warm_up:-1], -np.inf)
    best = np.argpartition(-said, many - 1, axis=-1)[..., :many]
    missed = needs[warm_up + 1 :] & absent
    right = np.take_along_axis(missed, best, axis=-1)
    return float(right.mean()), float(right.sum() / missed.sum())


def hits_in_pool(
    scores: np.ndarray,
    needs: np.ndarray,
    slots: int,
    before: np.ndarray | None = None,
    named: Sequence[np.ndarray | None] | None = None,
) -> np.ndarray:
    """[T, L] the same where all layers share `slots` x L, and each makes its room when it runs, from whichever layer.

    A layer's scores change when it runs. before: [T, L, E], see `scored`: those that layers which have yet to run have
    instead, once a pass's tokens are known. named: of each pass [J, L, E], see `Pass`: what a layer that runs names for
    the next J is kept before all else.
    """
    passes, layers, size = needs.shape
    habit = TIE * recency(needs)
    now, there = np.full((layers, size), -np.inf), np.zeros((layers, size), bool)
    counted = np.empty((passes, layers), np.int64)
    for t in range(passes):
        if before is not None and t:
            now[:] = before[t - 1] + habit[t - 1]
        for layer in range(layers):
            need = needs[t, layer]
            counted[t, layer] = (need & there[layer]).sum()
            there[layer] |= need
            now[layer] = scores[t, layer] + habit[t, layer]
            spare = int(there.sum()) - slots * layers
            if spare > 0:
                worth = np.where(there, now, np.inf)
                if named is not None:
                    _spare_named(worth, named[t], layer)
                there.reshape(-1)[np.argpartition(worth.reshape(-1), spare - 1)[:spare]] = False
    return counted


def _spare_named(worth: np.ndarray, named: np.ndarray | None, layer: int) -> None:
    if named is None:
        return
    for j in range(min(len(named), len(worth) - 1 - layer)):
        worth[layer + 1 + j] += named[j, layer + 1 + j] > 0


def hit_rate(found: np.ndarray, needs: np.ndarray, warm_up: int) -> float:
    """Of distinct experts of every event from pass `warm_up` on."""
    return float(found[warm_up:].sum() / needs[warm_up:].sum())


def as_lookahead(rate: float, curve: Sequence[float], aheads: Sequence[float]) -> float:
    """How many windows of exact sight hit as often, between the points of the (rising) curve, which are at `aheads`."""
    return float(np.interp(rate, curve, aheads))


def difference(
    one: np.ndarray, other: np.ndarray, needs: np.ndarray, blocks: np.ndarray, warm_up: int, draws: int = 1000
) -> tuple[float, float, float]:
    """Hit rate of `one` less that of `other`, and its 95 % interval by bootstrap over blocks of passes.

    one, other: [T, L] hits; blocks: [T], the block of each pass, a sequence for example.
    """
    _, place = np.unique(blocks[warm_up:], return_inverse=True)
    gain = np.bincount(place, weights=(one - other)[warm_up:].sum(axis=1))
    total = np.bincount(place, weights=needs[warm_up:].sum(axis=(1, 2)))
    drawn = np.random.default_rng(0).integers(len(gain), size=(draws, len(gain)))
    low, high = np.quantile(gain[drawn].sum(axis=1) / total[drawn].sum(axis=1), [0.025, 0.975])
    return float(gain.sum() / total.sum()), float(low), float(high)
