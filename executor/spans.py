"""What every lane of a live run did when, for a timeline; kept only where it is asked for.

Times are the host's clock while the run lasts, whatever the device measures with, and ns from its beginning at the end.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..policies.interface import Key, StepInfo
from ..simulator.timeline import Span
from .lanes import Job, Meter, Piece

if TYPE_CHECKING:
    from .device import Stamp
    from .real import LayerMoments

Clock = Callable[["Stamp"], int]


class Recorder:
    """Gathers spans from the main thread and, through their meters, from the link and the CPU tier."""

    def __init__(self, link: Meter, cpu: Meter) -> None:
        link.periods, cpu.periods = [], []
        self._link, self._cpu = link.periods, cpu.periods
        self._spans: list[Span] = []
        self._at: dict[str, int] = {"step": 0}
        self._uses: list[tuple[Key, int, int]] = []  # expert on the device, when, where in `_spans`
        self._step: tuple[StepInfo, int, int] | None = None

    def step_begins(self, step: StepInfo, asked: int, now: int) -> None:
        """asked: when the draft began, 0 if there was none."""
        self._at = {"step": step.index}
        self._step = step, asked, now
        drafted = int(step.drafted.sum())
        if asked and drafted:
            self._add("draft", f"{drafted} tokens", asked, now, "draft", tokens=drafted)

    def layer(self, moments: "LayerMoments", clock: Clock) -> None:
        layer = moments.layer
        self._at = {"step": moments.step, "layer": layer}
        before, entered, end = clock(moments.before), clock(moments.entered), clock(moments.end)
        self._add("GPU", f"L{layer}", before, end, "layer", hits=moments.hits, needed=moments.needed)
        self._add("GPU", "attention", before, entered, "attention")
        self._add("policy", "policy decides", *moments.decided, "plan")
        for expert, tokens, begin, done in moments.work:
            self._uses.append((Key(layer, expert), clock(begin), len(self._spans)))
            self._add("GPU", f"L{layer} E{expert}", clock(begin), clock(done), "expert", expert=expert, tokens=tokens)
        for name, waits in (("wait for copy", moments.wait_copy), ("wait for CPU", moments.wait_cpu)):
            for begin, done in waits:
                self._add("GPU", name, clock(begin), clock(done), "wait")

    def step_ends(self, accepted: int, emitted: int, now: int) -> None:
        assert self._step is not None
        step, _, begin = self._step
        self._at = {"step": step.index}
        title = f"step {step.index}: {step.kind}, {len(step.tokens)} tokens"
        self._add("GPU", title, begin, now, "step", accepted=accepted, emitted=emitted)

    def spans(self) -> list[Span]:
        """All spans so far, from the first one's beginning on; an arrow leads from a copy to the first use of it."""
        found = [*self._spans]
        for _, begin, end, job in self._cpu:
            assert isinstance(job, Job)
            layer, places = job.call.layer, job.call.places
            name = f"L{layer} " + " ".join(f"E{e}" for e in job.experts)
            tokens = [len(places[e]) for e in job.experts]
            args = {"layer": layer, "experts": list(job.experts), "tokens": tokens}
            found.append(Span("CPU", name, begin, end, args, "expert"))
        for label, begin, end, piece in self._link:
            assert isinstance(piece, Piece)
            self._add_piece(found, label, begin, end, piece)
        zero = min((span.begin_ns for span in found), default=0)
        return [replace(s, begin_ns=s.begin_ns - zero, end_ns=s.end_ns - zero) for s in found]

    def _add_piece(self, found: list[Span], label: str, begin: int, end: int, piece: Piece) -> None:
        key, size = piece.copy.key, piece.end - piece.begin
        args = {"copied_layer": key.layer, "expert": key.expert, "bytes": size}
        flow = None
        if piece.ticket is piece.copy.ticket:  # its last one
            flow = next((at for used, when, at in self._uses if used == key and when >= end), None)
        if flow is not None and found[flow].flow is None:
            found[flow] = replace(found[flow], flow=flow)
        else:
            flow = None
        found.append(Span("H2D", f"L{key.layer} E{key.expert}", begin, end, args, f"fetch_{label}", flow))

    def _add(self, lane: str, name: str, begin: int, end: int, category: str, **more: Any) -> None:
        if end > begin:
            self._spans.append(Span(lane, name, begin, end, {**self._at, **more}, category))
