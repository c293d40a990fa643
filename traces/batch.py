"""Several sequences decoded together: steps of the same number share one forward pass, and so their experts.

Only decode and verify steps are joined; prompts are fed one after the other before the first of them, as they are. A
sequence that ends leaves the batch, which goes on with the others.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .errors import InputError
from .schema import Kind, Step
from .views import Steps, View

ARRAYS = ("positions", "tokens", "drafted", "experts")
OPTIONAL = ("weights", "scores", "ahead")


@dataclass(frozen=True, slots=True)
class Batch(Step):
    """Rows of several sequences in one forward pass. `accepted` counts over all; `parts` are the steps as they were."""

    parts: tuple[Step, ...] = ()

    @property
    def emitted(self) -> int:
        return sum(step.emitted for step in self.parts)

    @property
    def context(self) -> int:
        return sum(step.context for step in self.parts)

    @property
    def kept(self) -> np.ndarray:
        return np.concatenate([step.kept for step in self.parts])


def batched(trace: Steps, size: int) -> Steps:
    """Up to `size` sequences of a trace at a time, in the order of their first steps; 1 is the trace in that order.

    The groups follow each other; within a group step i of every sequence makes one. Holds the steps of one group.
    InputError for a size below 1.
    """
    if size < 1:
        raise InputError(f"batch of {size} sequences: give at least 1")
    note = f"{trace.header.notes} Up to {size} sequences decoded at once.".strip()

    def steps() -> Iterator[Step]:
        for group in _groups(trace.steps(), size):
            yield from (step for steps in group for step in steps if step.kind is Kind.PREFILL)
            waiting = [[s for s in steps if s.kind is not Kind.PREFILL] for steps in group]
            for i in range(max(map(len, waiting))):
                yield joined([steps[i] for steps in waiting if i < len(steps)])

    return View(replace(trace.header, notes=note), steps)


def joined(steps: Sequence[Step]) -> Step:
    """Steps of different sequences as one; a single one stays what it is."""
    if len(steps) == 1:
        return steps[0]
    first = steps[0]
    kind = Kind.VERIFY if any(s.kind is Kind.VERIFY for s in steps) else Kind.DECODE
    accepted = sum(s.accepted for s in steps)
    given = [n for n in OPTIONAL if all(getattr(s, n) is not None for s in steps)]
    rows: dict[str, Any] = {n: np.concatenate([getattr(s, n) for s in steps]) for n in (*ARRAYS, *given)}
    return Batch(sequence=first.sequence, turn=first.turn, kind=kind, accepted=accepted, parts=tuple(steps), **rows)


def parts_of(step: Step) -> tuple[Step, ...]:
    """The steps of each sequence that make up a step."""
    return step.parts if isinstance(step, Batch) else (step,)


def _groups(steps: Iterable[Step], size: int) -> Iterator[list[list[Step]]]:
    """Whole sequences, `size` at a time. A later turn of a sequence belongs to it; one that comes back after others
    had begun is read as a sequence of its own."""
    group: list[list[Step]] = []
    for step in steps:
        if group and group[-1][0].sequence == step.sequence:
            group[-1].append(step)
            continue
        if len(group) == size:
            yield group
            group = []
        group.append([step])
    if group:
        yield group
