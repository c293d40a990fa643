"""Traces derived from a trace, step by step while they are read: nothing is held but the current step."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from .errors import InputError
from .schema import Header, Kind, Step


class Steps(Protocol):
    """What traces and views of traces have in common; `steps` may be called again and again."""

    @property
    def header(self) -> Header: ...
    def steps(self) -> Iterable[Step]: ...


@dataclass(frozen=True, slots=True)
class View:
    """A header and a way to start over the steps."""

    header: Header
    start: Callable[[], Iterator[Step]]

    def steps(self) -> Iterator[Step]:
        return self.start()


def autoregressive(trace: Steps) -> Steps:
    """The same text decoded without a draft: prefill as it is, then each row that stayed in the text is one decode
    step. A trace without a draft is returned as it is.
    """
    if trace.header.acceptance == "none":
        return trace
    note = (
        f"Autoregressive view of a trace with draft length {trace.header.draft_length}: its accepted rows, one a step."
    )
    header = replace(
        trace.header, draft=None, draft_length=0, acceptance="none", notes=f"{trace.header.notes} {note}".strip()
    )

    def steps() -> Iterator[Step]:
        for step in trace.steps():
            if step.kind is Kind.PREFILL:
                yield step
            else:
                yield from (_decoded(step, row) for row in np.flatnonzero(step.kept).tolist())

    return View(header, steps)


def only_sequences(trace: Steps, ids: Iterable[int]) -> Steps:
    """The steps of some sequences; these keep their ids. InputError for an id that the header does not list."""
    wanted = frozenset(ids)
    known = len(trace.header.sequences)
    strange = sorted(i for i in wanted if not 0 <= i < known)
    if strange:
        raise InputError(f"sequence {strange[0]}: the trace has sequences 0 to {known - 1}")
    note = f"{trace.header.notes} {len(wanted)} of {known} sequences selected.".strip()
    return View(replace(trace.header, notes=note), lambda: (s for s in trace.steps() if s.sequence in wanted))


def _decoded(step: Step, row: int) -> Step:
    one = slice(row, row + 1)
    return replace(
        step,
        kind=Kind.DECODE,
        accepted=0,
        drafted=np.zeros(1, bool),
        positions=step.positions[one],
        tokens=step.tokens[one],
        experts=step.experts[one],
        weights=None if step.weights is None else step.weights[one],
        scores=None if step.scores is None else step.scores[one],
        ahead=None if step.ahead is None else step.ahead[one],
    )
