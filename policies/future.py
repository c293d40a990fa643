"""What clairvoyant policies and offline bounds know: at which steps each expert will be needed."""

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from .interface import Key

NEVER = 1 << 62


class Future:
    """Steps at which every key is used, from the routing of a whole trace."""

    def __init__(self, layers: int, experts: int) -> None:
        self._uses: list[list[list[int]]] = [[[] for _ in range(experts)] for _ in range(layers)]

    @classmethod
    def of(cls, layers: int, experts: int, routing: Iterable[np.ndarray]) -> "Future":
        """From one [n, L, k] array of expert ids a step, in replay order."""
        future = cls(layers, experts)
        for step, ids in enumerate(routing):
            for layer in range(layers):
                for expert in np.unique(ids[:, layer]).tolist():
                    future.add(Key(layer, expert), step)
        return future

    def add(self, key: Key, step: int) -> None:
        """Note a use; steps must come in ascending order."""
        self._uses[key.layer][key.expert].append(step)

    def next_use(self, key: Key, step: int) -> int:
        """First step strictly after `step` that needs `key`, or `NEVER`."""
        uses = self._uses[key.layer][key.expert]
        at = bisect_right(uses, step)
        return uses[at] if at < len(uses) else NEVER

    def uses(self, key: Key) -> int:
        """How many steps need `key`."""
        return len(self._uses[key.layer][key.expert])
