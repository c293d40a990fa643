"""Where the nanoseconds of every step went: one row of numbers a step, so that long runs stay small."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from ..traces.schema import Kind

KINDS = tuple(Kind)
# What the GPU's time goes to. Everything but the first four is waiting or overhead.
GPU_LABELS: tuple[str, ...] = ("dense", "expert", "draft", "step", "wait_copy", "wait_cpu", "hybrid", "policy")
# What the other resources are busy with; "back" is the link from device to host.
LANES = {"cpu": ("busy",), "link": ("demand", "prefetch"), "dram": ("busy",), "back": ("write_back",)}
COUNTS = ("kind", "tokens", "drafted", "emitted", "wall_ns")
TIMES = (("gpu", GPU_LABELS), *LANES.items())
COLUMNS = (*COUNTS, *(f"{lane}_{label}_ns" for lane, labels in TIMES for label in labels))

Table = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: where each of its nanoseconds went. On every resource the values and idle add up to `wall_ns`."""

    kind: Kind
    tokens: int
    drafted: int
    emitted: int
    wall_ns: int
    gpu: dict[str, int]
    cpu: dict[str, int]
    link: dict[str, int]
    dram: dict[str, int]
    back: dict[str, int]


class StepLog(Sequence[StepTime]):
    """The steps of a run, in order."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def add(self, kind: Kind, counts: tuple[int, int, int, int], lanes: Mapping[str, Mapping[str, int]]) -> None:
        """counts: tokens, drafted, emitted, wall_ns; lanes: time by label, for "gpu" and every lane of `LANES`."""
        self._numbers.append(KINDS.index(kind))
        self._numbers.extend(counts)
        for lane, labels in TIMES:
            times = lanes[lane]
            self._numbers.extend([times.get(label, 0) for label in labels])

    def __len__(self) -> int:
        return len(self._numbers) // len(COLUMNS)

    @overload
    def __getitem__(self, at: int) -> StepTime: ...
    @overload
    def __getitem__(self, at: slice) -> list[StepTime]: ...
    def __getitem__(self, at: int | slice) -> StepTime | list[StepTime]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        first = range(len(self))[at] * len(COLUMNS)
        numbers = iter(self._numbers[first : first + len(COLUMNS)])
        kind, tokens, drafted, emitted, wall = (next(numbers) for _ in COUNTS)
        lanes = {lane: {label: ns for label in labels if (ns := next(numbers))} for lane, labels in TIMES}
        return StepTime(KINDS[kind], tokens, drafted, emitted, wall, **lanes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepLog) and self._numbers == other._numbers

    def table(self) -> Table:
        """One int64 column for every time and count of a step; `kind` counts in `KINDS`."""
        numbers = np.array(self._numbers, np.int64).reshape(-1, len(COLUMNS))
        return {name: numbers[:, i] for i, name in enumerate(COLUMNS)}
