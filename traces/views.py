"""Traces derived from a trace, step by step while they are read: nothing is copied or held but the current window."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import numpy as np

from .errors import InputError
from .schema import DraftShape, Header, Kind, Step


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


def windowed(
    trace: Steps, draft_length: int, acceptance: float, seed: int = 0, draft: DraftShape | None = None
) -> Steps:
    """Cut the decode steps of an autoregressive trace into verify steps, as if a draft had run.

    A window is a decoded token and the next `draft_length` of the true text (fewer at the end of a run of decode
    steps of one sequence and turn). Each drafted token is accepted independently with probability `acceptance`, up to
    the first that is not; the next window begins after the accepted ones. What a wrong draft would have routed is not
    known: the true continuation stands in for it, which the header's `acceptance` says. A window of one token stays a
    decode step. Chances depend on (seed, sequence, turn), so a selection of sequences gets the same windows.

    Raises InputError for a trace that has a draft already, a draft length below 1 or a chance outside 0..1.
    """
    if trace.header.acceptance != "none":
        raise InputError(f"draft length {draft_length}: the trace has a draft already; take its autoregressive view")
    if draft_length < 1 or not 0 <= acceptance <= 1:
        raise InputError(f"draft length {draft_length}, acceptance {acceptance}: give at least 1, and 0 to 1")
    model = (
        f"modelled: each drafted token accepted independently with probability {acceptance:g} (seed {seed}); the "
        "routing of the true continuation stands in for that of rejected drafts"
    )
    header = replace(trace.header, draft=draft, draft_length=draft_length, acceptance=model)

    def steps() -> Iterator[Step]:
        chances: dict[tuple[int, int], np.random.Generator] = {}
        for (kind, *owner), run in groupby(trace.steps(), key=lambda s: (s.kind, s.sequence, s.turn)):
            if kind is Kind.PREFILL:
                yield from run
            else:
                chance = chances.setdefault((owner[0], owner[1]), np.random.default_rng([seed, *owner]))
                yield from _windows(run, draft_length, acceptance, chance)

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


def _windows(run: Iterator[Step], length: int, probability: float, chance: np.random.Generator) -> Iterator[Step]:
    waiting: list[Step] = []
    while True:
        while len(waiting) <= length and (step := next(run, None)) is not None:
            waiting.append(step)
        if not waiting:
            return
        if len(waiting) == 1:
            yield waiting.pop()
            return
        kept = chance.random(len(waiting) - 1) < probability
        accepted = len(kept) if kept.all() else int(np.argmin(kept))
        yield _verify(waiting, accepted)
        del waiting[: accepted + 1]


def _verify(window: list[Step], accepted: int) -> Step:
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(s, name) for s in window])

    first = window[0]
    return replace(
        first,
        kind=Kind.VERIFY,
        accepted=accepted,
        drafted=np.arange(len(window)) > 0,
        positions=joined("positions"),
        tokens=joined("tokens"),
        experts=joined("experts"),
        weights=None if first.weights is None else joined("weights"),
        scores=None if first.scores is None else joined("scores"),
        ahead=None if first.ahead is None else joined("ahead"),
    )


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
