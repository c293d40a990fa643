"""MoE-SpeQ: a quantised twin drafts, and its routes say what to bring in and what to evict."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .interface import Demand, Key, Scope, Setup, StepInfo, View
from .orders import Ranked
from .parts import Composed, IfBetter, Parts
from .predictors import Known, Modelled, WindowAhead, check_share


class LookaheadBuffer(WindowAhead):
    """The expert lookahead buffer: what the twin routed to, by layer and how sure; and three phases of prefetch.

    `likely` [L, E] is the probability with which an expert of a layer to come will be needed, 0 for what the twin does
    not name. The twin's confidences are modelled as calibrated: of the experts named with confidence c a share c is
    needed, c is distributed as a * c^(a-1), and its mean is the fidelity, a / (a + 1).
    While drafting only experts named with at least `sure` come in, and nothing that is named makes room; then all that
    is missing does, in the order of layers, displacing what is less likely.
    """

    def __init__(self, fidelity: float, sure: float, prefetch: bool, known: Known) -> None:
        super().__init__(Modelled(fidelity, None), known)
        self._fidelity, self._sure, self._prefetch = fidelity, sure, prefetch

    def _clear(self) -> None:
        super()._clear()
        self.likely = np.zeros((self._setup.layers, self._setup.experts))

    def plan(self, step: int) -> None:
        rng = np.random.default_rng((self._setup.seed, step, 1))
        for layer, (right, wrong) in enumerate(self.predictor.window(step)):
            self.likely[layer, right], self.likely[layer, wrong] = self._confidences(len(right), len(wrong), rng)
            self._want(layer, self._sure if self.drafting else 0.0)

    def _confidences(self, right: int, wrong: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        if self._fidelity == 1:
            return np.ones(right), np.zeros(wrong)
        a = self._fidelity / (1 - self._fidelity)
        return rng.random(right) ** (1 / (a + 1)), rng.beta(a, 2, wrong)

    def _want(self, layer: int, least: float) -> None:
        row = self.likely[layer]
        named = np.argsort(-row, kind="stable")[: np.count_nonzero(row)]
        self.name(layer, named[row[named] >= least].tolist())

    def step_begins(self, step: StepInfo) -> None:
        planned = self.drafting
        super().step_begins(step)
        if planned:
            for layer in range(self._setup.layers):
                self._want(layer, 0.0)

    def used(self, demand: Demand, view: View) -> None:
        super().used(demand, view)
        self.likely[demand.layer] = 0

    def next_fetch(self, view: View) -> Key | None:
        return super().next_fetch(view) if self._prefetch else None

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        if self.drafting:
            return not self.likely[victim]
        return bool(self.likely[incoming] > self.likely[victim])


class Remaining(Ranked):
    """What is least likely to be needed in the rest of the window goes first."""

    def __init__(self, buffer: LookaheadBuffer) -> None:
        self._buffer = buffer

    def ranks(self, layers: slice) -> np.ndarray:
        return self._buffer.likely[layers]


@dataclass
class MoeSpeq(Composed):
    """Prefetch and eviction by what a quantised twin routed to, no CPU tier (MoE-SpeQ, 2511.14102; forecasts MODELLED).

    There is no released code, and the twin's routes are in no trace. Their fidelity stands in: the true needs of the
    coming verify pass are taken from the trace, `fidelity` = 0.909 of them seen (theirs; 0.441 exact and 0.468 nearly),
    others named in the place of those that are missed. So it is clairvoyant and cannot run live; without a draft the
    buffer stays empty, and this is `ar-lru` in one pool.
    Theirs: the buffer of expert and confidence; three phases: the cache serves and is primed, then in the middle of
    drafting only what is named with high confidence comes in, then all that is missing; the least likely in what
    remains of the buffer is evicted first; a miss is copied on demand; all on the GPU. Without asynchronous prefetch
    (`prefetch=false`) they lose 5 %. Their governor of draft lengths is the policy `governed`: the future cannot be
    known where the draft length still changes it.
    Ours: fidelity holds for the whole pass, not for each token; the distribution of confidences, and `sure` = 0.9; of
    two as unlikely the least recently used goes; what is fetched stays if it is worth more than the victim; all of the
    buffer is there as drafting begins, or with `known=verify` as it ends: the truth lies between.
    """

    name: ClassVar[str] = "moe-speq"
    clairvoyant: ClassVar[bool] = True
    scope: Scope = "global"
    fidelity: float = 0.909
    sure: float = 0.9
    prefetch: bool = True
    known: Known = "draft"

    def __post_init__(self) -> None:
        check_share("fidelity", self.fidelity, above_zero=True)
        check_share("sure", self.sure)

    def parts(self, setup: Setup) -> Parts:
        buffer = LookaheadBuffer(self.fidelity, self.sure, self.prefetch, self.known)
        order = Remaining(buffer)
        return Parts(order, IfBetter(order), prefetch=[buffer])
