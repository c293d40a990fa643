"""From the routing of tokens to what a layer needs: distinct experts and how many tokens chose each."""

from collections.abc import Callable

import numpy as np

Needed = tuple[tuple[int, ...], tuple[int, ...]]  # experts ascending, and the tokens of each


def needed_by_layer(ids: np.ndarray) -> list[Needed]:
    """For every layer of a step; ids: [n, L, k]. One sort for all layers, because a sort a layer costs as much."""
    n, layers, k = ids.shape
    chosen = ids[0] if n == 1 else np.moveaxis(ids, 1, 0).reshape(layers, n * k)
    chosen = np.sort(chosen, axis=1)
    new = chosen[:, 1:] != chosen[:, :-1]
    if new.all():
        ones = (1,) * (n * k)
        return [(tuple(row), ones) for row in chosen.tolist()]
    first = np.ones(chosen.shape, bool)
    first[:, 1:] = new
    starts = np.flatnonzero(first)
    experts = tuple(chosen.reshape(-1)[starts].tolist())
    loads = tuple(np.diff(starts, append=chosen.size).tolist())
    ends = np.cumsum(first.sum(axis=1)).tolist()
    return [(experts[a:b], loads[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


class PerLoad(dict[int, int]):
    """Times of an expert by its tokens, worked out once each."""

    def __init__(self, price: Callable[[int], int]) -> None:
        self._price = price

    def __missing__(self, tokens: int) -> int:
        self[tokens] = self._price(tokens)
        return self[tokens]
