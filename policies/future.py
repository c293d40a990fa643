"""What clairvoyant policies and offline bounds know: at which steps each expert will be needed."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from .demand import needed_by_layer
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
            for layer, (needed, _) in enumerate(needed_by_layer(ids)):
                for expert in needed:
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

    def uses(self, key: Key) -> Sequence[int]:
        """The steps that need `key`, ascending."""
        return self._uses[key.layer][key.expert]
