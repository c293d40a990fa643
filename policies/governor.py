"""MoE-SpeQ's governor: the draft length that is worth most, given what drafts cost on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..traces.schema import Kind
from .interface import Demand, LayerReport, Scope, Setup, StepInfo, View
from .llamacpp import BackgroundInserts
from .orders import Lru
from .parts import Composed, DraftControl, IfBetter, Never, OnCpu, Parts


class Line:
    """A straight line through points that fade: least squares, each point's weight multiplied by `fade` at the next."""

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self._sums = np.zeros(5)  # of 1, x, y, x * x, x * y

    def add(self, x: float, y: float) -> None:
        self._sums = self._fade * self._sums + (1, x, y, x * x, x * y)

    def at(self, x: float) -> float:
        """The line's value, not below 0; level where all points have the same x."""
        n, sx, sy, sxx, sxy = self._sums.tolist()
        if not n:
            return 0.0
        spread = sxx - sx * sx / n
        slope = (sxy - sx * sy / n) / spread if spread > 1e-6 * sxx else 0.0
        return max(0.0, (sy + slope * (n * x - sx)) / n)


def best_length(lengths: range, accepted: Callable[[int], float], cycle_ns: Callable[[int], float]) -> int:
    """The draft length with most accepted tokens for its time; the shorter one of equals."""
    return max(lengths, key=lambda k: (accepted(k) / max(1.0, cycle_ns(k)), -k))


class Governor(DraftControl):
    """k* = argmax k_acc(k) / T_cycle(k) over `shortest` <= k <= what the run allows (MoE-SpeQ, 2511.14102).

    k_acc(k) = sum over i <= k of the product over j <= i of p_j, p_j a running mean of whether the j-th drafted token
    is accepted where those before it were. T_cycle(k) = max(T_draft(k), T_init) + T_new(k) + T_verify(k + 1), T_new the
    copies of experts that the pass still misses. Ours: T_verify and the number of missing experts are straight lines
    in the tokens of a pass, fitted to the passes so far; T_init is 0; the first four passes draft the longest and the
    shortest in turn, so that there is a slope; `bonus` counts the token that the target gives itself, which k_acc
    leaves out. Hosts tell the time of MoE layers only, so what else a cycle takes is given: draft_ms for each drafted
    token, pass_ms for attention, head and launch. copies: misses are copied while their layer waits.
    """

    def __init__(
        self, shortest: int, draft_ms: float, pass_ms: float, smoothing: float, bonus: bool, copies: bool = True
    ) -> None:
        self._shortest, self._smoothing, self._bonus, self._copies = shortest, smoothing, bonus, copies
        self._draft_ns, self._pass_ns = draft_ms * 1e6, pass_ms * 1e6

    def setup(self, setup: Setup) -> None:
        self._copy_ns = setup.costs.copy_ns if self._copies else 0
        self.p = np.ones(max(1, setup.draft_length))
        self._verify, self._missing = Line(1 - self._smoothing), Line(1 - self._smoothing)
        self._passes = 0
        self._tokens, self._wall, self._missed = 0, 0, 0
        self._counted = False

    def step_begins(self, step: StepInfo) -> None:
        self._counted = step.kind is not Kind.PREFILL
        self._tokens, self._wall, self._missed = len(step.tokens), 0, 0

    def used(self, demand: Demand, view: View) -> None:
        self._missed += len(demand.experts) - len(demand.held)

    def layer_ends(self, report: LayerReport) -> None:
        self._wall += report.wall_ns - report.wait_copy_ns

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        if not self._counted:
            return
        self._passes += 1
        self._verify.add(self._tokens, self._wall)
        self._missing.add(self._tokens, self._missed)
        seen = min(accepted + 1, self._tokens - 1, len(self.p))  # drafted tokens whose predecessors were accepted
        self.p[:seen] += self._smoothing * ((np.arange(seen) < accepted) - self.p[:seen])

    def accepted(self, k: int) -> float:
        return float(np.cumprod(self.p[:k]).sum()) + self._bonus

    def cycle_ns(self, k: int) -> float:
        copies = self._missing.at(k + 1) * self._copy_ns
        return k * self._draft_ns + self._pass_ns + copies + self._verify.at(k + 1)

    def draft_length(self, longest: int) -> int:
        if longest <= self._shortest:
            return longest
        if self._passes < 4:
            return self._shortest if self._passes % 2 else longest
        return best_length(range(self._shortest, longest + 1), self.accepted, self.cycle_ns)


@dataclass
class Governed(Composed):
    """LRU with draft lengths chosen by accepted tokens for their time (the governor of MoE-SpeQ, arXiv 2511.14102).

    Theirs: the rule, see `Governor`. Ours: its place. Their policy evicts and prefetches by a twin that no trace holds,
    and a policy that knows the future cannot draft; so here it goes with plain caches: `misses=fetch` is `ar-lru`,
    `misses=cpu` the `llamacpp-cache`. `draft_ms` (time to draft a token) and `pass_ms` (time of a pass outside its MoE
    layers) belong to the machine and are not told to policies: at 0 drafts look free, and passes cheaper than they are.
    The trace's own draft length is the longest.
    """

    name: ClassVar[str] = "governed"
    scope: Scope = "layer"
    misses: Literal["fetch", "cpu"] = "fetch"
    shortest: int = 1
    draft_ms: float = 0.0
    pass_ms: float = 0.0
    smoothing: float = 0.1
    bonus: bool = False

    def __post_init__(self) -> None:
        if min(self.shortest, self.draft_ms, self.pass_ms) < 0 or not 0 < self.smoothing <= 1:
            raise ValueError("shortest, draft_ms and pass_ms must be at least 0, and smoothing lie in (0, 1]")

    def parts(self, setup: Setup) -> Parts:
        copies = self.misses == "fetch"
        governor = Governor(self.shortest, self.draft_ms, self.pass_ms, self.smoothing, self.bonus, copies)
        lru = Lru()
        if copies:
            return Parts(lru, IfBetter(lru), draft=governor)
        inserts = BackgroundInserts(lru, 2, frozen=True)
        return Parts(lru, Never(), prefetch=[inserts], dispatch=OnCpu(), draft=governor)
