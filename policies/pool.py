"""The pool of all layers' experts in one order: which resident is worth least, which absent one most."""

from collections.abc import Collection, Sequence

import numpy as np

from .interface import Candidates, Key

# Added to the worth of what is not resident, so that one order has them all. No worth is so great, or so far below 0,
# that ranks would mix.
RESIDENT, COMING, ABSENT = 0.0, 500.0, 1000.0
RESIDENT_BELOW, ABSENT_ABOVE = 250.0, 750.0

WORTH, AWAY, RANK = range(3)  # what an expert is worth, what is added, and the sum


def new_pool(layers: int, experts: int) -> np.ndarray:
    """A pool's array, float32 [3, L, E], in which all are absent and worth nothing."""
    array = np.full((3, layers, experts), ABSENT, np.float32)
    array[WORTH] = 0
    return array


class Pool:
    """`array` [3, L, E] and its `keys` [L][E]. Ties go to the first key.

    `_marginal.Pool` (csrc/pool.c) has the same methods, equal to the last bit, at a tenth of the time.
    """

    def __init__(self, array: np.ndarray, keys: Sequence[Sequence[Key]]) -> None:
        self.array, self._keys = array, keys

    def price(self, layer: int, demand: np.ndarray, passes: float, named: Collection[int], chance: float) -> None:
        """A layer's experts are worth `passes` times their row of `demand` (float32 [L, E]), `named` ones `chance`
        more."""
        worth = self.array[WORTH, layer]
        np.multiply(demand[layer], passes, out=worth)
        worth[list(named)] += chance
        np.add(worth, self.array[AWAY, layer], out=self.array[RANK, layer])

    def put(self, key: Key, away: float) -> None:
        """The expert is RESIDENT, COMING (on its way or out of reach) or ABSENT."""
        layer, expert = key
        self.array[AWAY, layer, expert] = away
        self.array[RANK, layer, expert] = self.array[WORTH, layer, expert] + self.array[AWAY, layer, expert]

    def least(self) -> float:
        """What the resident of least worth is worth."""
        rank = self.array[RANK]
        return rank.item(rank.argmin())

    def coldest(self, candidates: Candidates, below: float) -> Key | None:
        """The candidate that is worth least, if it is worth less than `below`; it is ABSENT then."""
        rank = self.array[RANK].copy()
        while rank.item(at := int(rank.argmin())) < below:
            key = self._keys[at // rank.shape[1]][at % rank.shape[1]]
            if key in candidates:
                self.put(key, ABSENT)
                return key
            rank[key] = COMING
        return None

    def exchange(self, candidates: Candidates, incoming: Key) -> Key | None:
        """The candidate that is worth least, if it is worth less than `incoming`, which is RESIDENT then in its
        place."""
        victim = self.coldest(candidates, self.array.item(WORTH, *incoming))
        if victim is not None:
            self.put(incoming, RESIDENT)
        return victim

    def warmest(self) -> tuple[Key, float, float] | None:
        """The ABSENT expert that is worth most, its worth, and that of the `least` resident; None if none is absent."""
        rank = self.array[RANK]
        layer, expert = divmod(int(rank.argmax()), rank.shape[1])
        greatest = rank.item(layer, expert)
        return (self._keys[layer][expert], greatest - ABSENT, self.least()) if greatest > ABSENT_ABOVE else None
