"""ProMoE: a trained predictor looks a few layers on, and what it gets wrong is cancelled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .future import Future
from .interface import Demand, Scope, Setup, StepInfo, View, Where
from .parts import Composed, Dispatcher, IfBetter, Parts
from .predictors import Ahead, Modelled, PatientLru, check_share


class Stride(Ahead):
    """At each layer's gate, what a predictor says of the layer `stride` further on."""

    def __init__(self, predictor: Modelled, stride: int) -> None:
        self._predictor, self._stride = predictor, stride

    def reveal(self, future: Future) -> None:
        self._predictor.reveal(self._setup, future)

    def step_begins(self, step: StepInfo) -> None:
        super().step_begins(step)
        self._said = self._predictor.forecasts(step.index)

    def used(self, demand: Demand, view: View) -> None:
        super().used(demand, view)
        target = demand.layer + self._stride
        if target < self._setup.layers:
            self.name(target, self._said[target])


class NearestFirst(Dispatcher):
    """Residents, then misses that are on their way, then those that have not started."""

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        hits, coming, absent = [], [], []
        for key in demand.keys:
            if key.expert in demand.held:
                hits.append((key.expert, Where.GPU))
            else:
                (coming if view.in_flight(key) else absent).append((key.expert, Where.FETCH))
        return hits + coming + absent


@dataclass
class ProMoe(Composed):
    """Proactive caching by a predictor, here MODELLED by its accuracy; LRU, no CPU tier (ProMoE, arXiv 2410.22134).

    The predictors (one small network a layer) are trained on hidden states that no trace holds, so this takes the true
    needs from the trace and spoils them: `recall` of them are seen, and of all that is forecast `precision` is right
    (`none`: as many experts are forecast as are needed). 0.847 is the paper's mean accuracy; with 0.669 and 0.583 it is
    what they give for the next gate and for token ids. It is therefore clairvoyant and cannot run live.
    Theirs: a forecast `stride` layers ahead; what a gate confirms goes before what is only forecast; forecasts that a
    gate refutes are dropped from the queue; cached experts run first, then those on their way, then the others; LRU.
    Of the host, not of the policy: demand before prefetch, and experts in chunks between which a copy can be pushed
    aside (theirs: 3).
    Ours: `stride` = 2, which was not at hand; no forecast for the first `stride` layers of a pass; nothing that is
    forecast is displaced by a prefetch; the time that predicting takes (theirs: some 200 us on the CPU) is not charged.
    """

    name: ClassVar[str] = "promoe"
    clairvoyant: ClassVar[bool] = True
    scope: Scope = "layer"
    recall: float = 0.847
    precision: float | None = None
    stride: int = 2

    def __post_init__(self) -> None:
        check_share("recall", self.recall)
        check_share("precision", self.precision, above_zero=True)
        if self.stride < 1:
            raise ValueError("stride must be at least 1")

    def parts(self, setup: Setup) -> Parts:
        ahead = Stride(Modelled(self.recall, self.precision), self.stride)
        lru = PatientLru(ahead)
        return Parts(lru, IfBetter(lru), prefetch=[ahead], dispatch=NearestFirst())
