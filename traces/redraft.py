"""Other draft lengths for a trace: its text cut again into verify windows, with what was recorded wherever it is known.

In greedy decoding "the draft's token here, given the true text before it, is the target's" is a property of the
position, and so are the wrong tokens that the draft goes on with from there. A recorded trace tells both for nearly
every position: accepted drafts are right, the first rejected one of a window is wrong, and the rejected rows are what
the draft would propose again. Not known are the position after a window that was accepted whole (the draft was not
asked) and rejected rows beyond those recorded; a chance by seed decides the first, the true continuation stands in for
the second, and the header says how many drafted positions are modelled in this way. With sampling, what was accepted
once is taken to be accepted again.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from .batch import Batch
from .errors import InputError
from .schema import DraftShape, Header, Kind, Step
from .views import Steps, View, autoregressive

Row = tuple[Step, int]
FIELDS = ("positions", "tokens", "experts")
OPTIONAL = ("weights", "scores", "ahead")


def redrafted(trace: Steps, draft_length: int, seed: int = 0) -> Steps:
    """A recorded speculative trace as if it had been drafted `draft_length` tokens at a time; 0: without a draft.

    Positions whose fate was not recorded are accepted with the recorded chance of a draft that follows accepted ones;
    the draws depend on (seed, sequence, turn) and on no draft length. Raises InputError for a trace without a draft
    or a length below 0.
    """
    if draft_length < 0:
        raise InputError(f"draft length {draft_length}: give at least 0")
    if draft_length == 0:
        return autoregressive(trace)
    chance = recorded_chance(trace)
    cut = Cut(chance, seed)
    drafts = fates = rows = 0
    for window in cut.windows(trace.steps(), lambda longest: longest, draft_length):
        if isinstance(window, Window):
            drafts, fates, rows = drafts + window.drafts, fates + window.guessed, rows + window.stand_ins
    modelled = (
        f"measured at draft length {trace.header.draft_length}, cut again at {draft_length}: of {drafts} drafted "
        f"positions {fates} have a modelled fate (accepted with probability {chance:.4f}, seed {seed}) and {rows} "
        "rejected ones the routing of the true continuation"
    )
    if trace.header.sampling.get("temperature"):
        modelled += "; sampled, so that a draft once accepted is taken to be accepted again"
    return _view(trace, cut, draft_length, replace(trace.header, draft_length=draft_length, acceptance=modelled))


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
    return _view(trace, Cut(acceptance, seed), draft_length, header)


def drafted(
    trace: Steps, choose: Callable[[int], int], longest: int, seed: int = 0, acceptance: float | None = None
) -> Iterator[Step]:
    """The steps of a trace under draft lengths chosen as it goes: `choose(n)` is asked before each window that can be
    drafted at all, with n the most tokens that are possible there (at most `longest`, and what is left of the text).

    `acceptance` is the chance of positions whose fate was not recorded; None: the recorded one. Raises InputError for
    a trace without a draft and no `acceptance`.
    """
    chance = recorded_chance(trace) if acceptance is None else acceptance
    for window in Cut(chance, seed).windows(trace.steps(), choose, longest):
        yield window.step() if isinstance(window, Window) else window


def recorded_chance(trace: Steps) -> float:
    """How often a draft after accepted ones (or first in its window) was accepted; InputError without any draft."""
    accepted = refused = 0
    if trace.header.acceptance != "none":
        for step in trace.steps():
            accepted += step.accepted
            refused += step.accepted < int(step.drafted.sum())
    if not accepted + refused:
        raise InputError("the trace has no drafts to cut again; assume some with an acceptance, as --window does")
    return accepted / (accepted + refused)


@dataclass(slots=True)
class _Position:
    """A row of the text. `right`: a draft would have proposed it; if not, `wrong` are the rows it would propose
    instead, from here on. `guessed`: chance said so."""

    row: Row
    right: bool
    guessed: bool
    wrong: list[Row]


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of one forward pass: the last settled token, the accepted drafts, the rejected ones. `guessed` counts the
    drafts whose fate chance decided, `stand_ins` the rejected ones with the routing of the true continuation."""

    rows: list[Row]
    accepted: int
    guessed: int
    stand_ins: int

    @property
    def drafts(self) -> int:
        return len(self.rows) - 1

    def step(self) -> Step:
        first = self.rows[0][0]
        parts = list(_runs(self.rows))
        names = (*FIELDS, *(n for n in OPTIONAL if getattr(first, n) is not None))
        joined = {name: _joined([getattr(step, name)[rows] for step, rows in parts]) for name in names}
        kind = Kind.VERIFY if self.drafts else Kind.DECODE
        marks = np.arange(len(self.rows)) > 0
        return replace(first, kind=kind, accepted=self.accepted, drafted=marks, **joined)


@dataclass(frozen=True, slots=True)
class Cut:
    """How to cut: the chance of a position whose fate was not recorded, and the seed that decides it."""

    chance: float
    seed: int

    def windows(self, steps: Iterable[Step], choose: Callable[[int], int], longest: int) -> Iterator["Step | Window"]:
        """Prefill steps as they are, the rest as windows. Holds `longest` + 1 positions and their steps."""
        chances: dict[tuple[int, int], np.random.Generator] = {}
        for (prefill, *owner), run in groupby(steps, key=lambda s: (s.kind is Kind.PREFILL, s.sequence, s.turn)):
            if prefill:
                yield from run
            else:
                rng = chances.setdefault((owner[0], owner[1]), np.random.default_rng([self.seed, *owner]))
                yield from _windows(self._positions(run, rng), choose, longest)

    def _positions(self, run: Iterable[Step], rng: np.random.Generator) -> Iterator[_Position]:
        """The text row by row, each with what is known of a draft there."""
        wrong: list[Row] = []
        for step in run:
            if isinstance(step, Batch):
                raise InputError("draft lengths are chosen for one sequence at a time: no --batch with such a policy")
            kept = step.kept
            for row in np.flatnonzero(kept).tolist():
                if step.drafted[row]:
                    yield _Position((step, row), True, False, [])
                elif wrong:
                    yield _Position((step, row), False, False, wrong)
                else:
                    yield _Position((step, row), bool(rng.random() < self.chance), True, [])
                wrong = []
            wrong = [(step, row) for row in np.flatnonzero(~kept).tolist()]


def _windows(positions: Iterator[_Position], choose: Callable[[int], int], longest: int) -> Iterator[Window]:
    waiting: list[_Position] = []
    while True:
        while len(waiting) <= longest and (position := next(positions, None)) is not None:
            waiting.append(position)
        if not waiting:
            return
        possible = min(longest, len(waiting) - 1)
        window = waiting[: 1 + (min(choose(possible), possible) if possible else 0)]
        yield _window(window)
        del waiting[: 1 + _accepted(window)]


def _accepted(window: list[_Position]) -> int:
    return next((i for i, p in enumerate(window[1:]) if not p.right), len(window) - 1)


def _window(window: list[_Position]) -> Window:
    accepted = _accepted(window)
    rows = [p.row for p in window[: accepted + 1]]
    refused = window[accepted + 1 :]
    known = refused[0].wrong[: len(refused)] if refused else []
    rows += known + [p.row for p in refused[len(known) :]]
    fates = sum(p.guessed for p in window[1 : accepted + 2])
    return Window(rows, accepted, fates, len(refused) - len(known))


def _runs(rows: list[Row]) -> Iterator[tuple[Step, slice]]:
    """Neighbouring rows of one step as one slice."""
    begin = 0
    for at in range(1, len(rows) + 1):
        step, first = rows[begin]
        if at == len(rows) or rows[at][0] is not step or rows[at][1] != first + at - begin:
            yield step, slice(first, first + at - begin)
            begin = at


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _view(trace: Steps, cut: Cut, draft_length: int, header: Header) -> Steps:
    def steps() -> Iterator[Step]:
        for window in cut.windows(trace.steps(), lambda longest: longest, draft_length):
            yield window.step() if isinstance(window, Window) else window

    return View(header, steps)
