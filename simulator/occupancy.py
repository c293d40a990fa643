"""Who sits in the cache: how often each expert is resident, beside how often it is needed.

Residency is looked at after every step of short runs and after evenly spread ones of long runs, so that it costs a
long run next to nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..traces.schema import Kind
from ..traces.views import Steps
from .engine import Engine

if TYPE_CHECKING:
    from .compare import Outcome

LOOKS = 256  # most steps of a run after which residency is looked at


class Occupancy:
    """Watches one run: give `engine_of` and `after_step` to `simulate`. `shares` is [L, E], of the looks."""

    def __init__(self, layers: int, experts: int, steps: int) -> None:
        self._every = max(1, -(-steps // LOOKS))
        self._seen = np.zeros((layers, experts), np.int64)
        self._looks = 0
        self._engine: Engine | None = None

    def engine_of(self, *given: Any, **options: Any) -> Engine:
        self._engine = Engine(*given, **options)
        return self._engine

    def after_step(self, done: int) -> None:
        if done % self._every or self._engine is None:
            return
        self._looks += 1
        for row, experts in zip(self._seen, self._engine.driver.cache.by_layer, strict=True):
            row[list(experts)] += 1

    @property
    def shares(self) -> np.ndarray:
        return (self._seen / max(1, self._looks)).astype(np.float32)


def need_shares(trace: Steps) -> np.ndarray:
    """[L, E] float32: the share of decode steps that need an expert."""
    shape = trace.header.target
    layers = len(shape.moe_layers)
    needed, steps = np.zeros((layers, shape.experts), np.int64), 0
    rows = np.arange(layers)[None, :, None]
    for step in trace.steps():
        if step.kind is not Kind.PREFILL:
            steps += 1
            now = np.zeros((layers, shape.experts), bool)
            now[rows, step.experts] = True
            needed += now
    return (needed / max(1, steps)).astype(np.float32)


def table_of(outcomes: Sequence["Outcome"], needs: dict[str, np.ndarray]) -> Any:
    """A row for every expert of every run that was watched: the run, layer, expert, share of looks at which it was
    `resident`, share of decode steps that `needed` it. needs: [L, E] by mode."""
    import pyarrow as pa

    watched = [o for o in outcomes if o.residency is not None]
    sizes = [o.residency.size for o in watched if o.residency is not None]
    layers, experts = next(iter(needs.values())).shape

    def of_run(values: Sequence[Any], kind: Any) -> Any:
        return pa.array([v for v, size in zip(values, sizes, strict=True) for _ in range(size)], kind)

    def of_all(parts: Sequence[np.ndarray]) -> Any:
        return pa.array(np.concatenate(parts) if parts else np.zeros(0, np.float32))

    return pa.table(
        {
            "policy": of_run([o.policy for o in watched], pa.string()).dictionary_encode(),
            "slots": of_run([o.slots for o in watched], pa.int64()),
            "mode": of_run([o.mode for o in watched], pa.string()).dictionary_encode(),
            "layer": pa.array(np.tile(np.repeat(np.arange(layers, dtype=np.int32), experts), len(watched))),
            "expert": pa.array(np.tile(np.arange(experts, dtype=np.int32), len(watched) * layers)),
            "resident": of_all([o.residency.ravel() for o in watched if o.residency is not None]),
            "needed": of_all([needs[o.mode].ravel() for o in watched]),
        }
    )
