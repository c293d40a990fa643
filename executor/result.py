"""What live runs and requests give back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..policies.driver import Counters
from ..simulator.metrics import INACTIVE, OK
from ..simulator.steptimes import StepTime
from ..simulator.timeline import Span
from ..traces.schema import Kind
from ..traces.speculate import Generation
from .times import StepTimes

Clock = Literal["real", "virtual"]
Times = Sequence[StepTimes | StepTime]

IDLE_DRAFT = "DRAFT_IDLE"
WHY = {
    INACTIVE: "no expert was ever resident or copied, so these figures are not those of a cache",
    IDLE_DRAFT: "the draft proposed nothing, so these figures are not those of speculation",
}


def status_of(slots: int, counts: Counters, speculates: bool, generations: Sequence[Generation]) -> str:
    """ "ok", or why figures are not what they seem (a key of `WHY`). counts: prefill and decode together."""
    if slots == 0 or (counts.needed and counts.hits + counts.copies + counts.joins == 0):
        return INACTIVE
    idle = not any(g.drafted for g in generations) and any(len(g.tokens) > 1 for g in generations)
    return IDLE_DRAFT if speculates and idle else OK


@dataclass(slots=True)
class Result:
    """What a run gave. `times` has one entry a step: measured on the real clock, simulated on the virtual one.

    `decisions` is the driver's record, `arena_bytes` what the slots took on the fast device, `spans` what every lane
    did where that was asked for.
    """

    policy: str
    slots: int
    clock: Clock
    texts: list[list[int]] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    times: Times = ()
    arena_bytes: int = 0
    decisions: list[tuple[Any, ...]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        return sum(len(g.tokens) for g in self.generations)

    @property
    def drafted(self) -> int:
        return sum(g.drafted for g in self.generations)

    @property
    def accepted(self) -> int:
        return sum(g.accepted for g in self.generations)

    @property
    def prefill_s(self) -> float:
        """Time spent on prompts, over all sequences; the draft's prompt is part of it."""
        return self._draft_prefill_s + sum(t.wall_ns for t in self.times if t.kind is Kind.PREFILL) / 1e9

    @property
    def decode_s(self) -> float:
        """Wall time of everything after prefill, drafting included."""
        return sum(t.wall_ns for t in self.times if t.kind is not Kind.PREFILL) / 1e9 - self._draft_prefill_s

    @property
    def _draft_prefill_s(self) -> float:
        """The virtual clock does not charge it."""
        return sum(g.seconds.get("draft_prefill", 0.0) for g in self.generations) if self.clock == "real" else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over `decode_s`."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0


@dataclass(slots=True)
class Answer:
    """What one request took. `reused` of the `prompt` tokens had their keys and values in the cache already.

    Counters, times (one entry a step) and `seconds` (from the call to its return) are of this request alone.
    """

    policy: str
    prompt: int
    reused: int
    generation: Generation
    prefill: Counters
    decode: Counters
    times: Times
    seconds: float

    @property
    def prompt_s(self) -> float:
        """Time until the target and, where it drafts, the draft have read the prompt."""
        return self.generation.seconds.get("prefill", 0.0) + self.generation.seconds.get("draft_prefill", 0.0)
