"""The pool of all layers' experts in one order: which resident is worth least, which absent one most.

A pool is one array, float32 [5, L, E]. `_marginal` (csrc/pool.c) has the same functions, equal to the last bit, at a
tenth of the time. Ties go to the first key; `keys` are those of every layer's experts (`all_keys`).
"""

from collections.abc import Collection, Sequence

import numpy as np

from .interface import Candidates, Key

# Added to the worth of what is not resident, so that one order has them all. No worth is so great, or so far below 0,
# that ranks would mix.
RESIDENT, COMING, ABSENT = 0.0, 500.0, 1000.0
RESIDENT_BELOW, ABSENT_ABOVE = 250.0, 750.0

WORTH, AWAY, RANK = range(3)  # what an expert is worth, what is added, and the sum; the other two planes are for C

Keys = Sequence[Sequence[Key]]


def new_pool(layers: int, experts: int) -> np.ndarray:
    """All are absent and worth nothing."""
    pool = np.full((5, layers, experts), ABSENT, np.float32)
    pool[WORTH] = 0
    return pool


def price(
    pool: np.ndarray, layer: int, demand: np.ndarray, passes: float, named: Collection[int], chance: float
) -> None:
    """A layer's experts are worth `passes` times their row of `demand` (float32 [L, E]), `named` ones `chance` more."""
    worth = pool[WORTH, layer]
    np.multiply(demand[layer], passes, out=worth)
    worth[list(named)] += chance
    np.add(worth, pool[AWAY, layer], out=pool[RANK, layer])


def put(pool: np.ndarray, key: Key, away: float) -> None:
    """The expert is RESIDENT, COMING (on its way or out of reach) or ABSENT."""
    layer, expert = key
    pool[AWAY, layer, expert] = away
    pool[RANK, layer, expert] = pool[WORTH, layer, expert] + pool[AWAY, layer, expert]


def least(pool: np.ndarray) -> float:
    """What the resident of least worth is worth."""
    return pool[RANK].item(pool[RANK].argmin())


def coldest(pool: np.ndarray, keys: Keys, candidates: Candidates, below: float) -> Key | None:
    """The candidate that is worth least, if it is worth less than `below`; it is ABSENT then."""
    rank = pool[RANK].copy()
    while rank.item(at := int(rank.argmin())) < below:
        key = keys[at // rank.shape[1]][at % rank.shape[1]]
        if key in candidates:
            put(pool, key, ABSENT)
            return key
        rank[key] = COMING
    return None


def warmest(pool: np.ndarray, keys: Keys) -> tuple[Key, float] | None:
    """The ABSENT expert that is worth most, and its worth; None if there is none."""
    rank = pool[RANK]
    layer, expert = divmod(int(rank.argmax()), rank.shape[1])
    greatest = rank.item(layer, expert)
    return (keys[layer][expert], greatest - ABSENT) if greatest > ABSENT_ABOVE else None
