"""SP-MoE: what the draft sees tells which experts verification will need, and they come in while it drafts."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .interface import Key, LayerReport, Scope, Setup, StepInfo, View
from .parts import Composed, IfBetter, Parts
from .predictors import Known, Modelled, PatientLru, WindowAhead, check_share

SMOOTHING = 0.2  # of measured times


class DraftTime:
    """How long drafting takes, told by the link: a policy has no clock, but hears how long each copy took.

    What was copied between two passes fits into the draft; if the wishes ran out, the draft took at least so long.
    `ns` is None until that is known: copies that take no time (a host that only counts) say nothing.
    """

    def __init__(self) -> None:
        self.ns: float | None = None
        self._open = False

    def begins(self) -> None:
        self._open, self._moved, self._begun, self._landed = True, 0, 0, 0

    def asked(self, key: Key | None) -> None:
        self._begun += key is not None

    def landed(self, ns: int) -> None:
        self._moved += ns
        self._landed += 1

    def ends(self, wishes: bool) -> None:
        """`wishes`: the link would have had more to do."""
        if not self._open:
            return
        self._open = False
        if not self._begun or (self._landed and not self._moved):
            return
        if self.ns is None:
            self.ns = float(self._moved)
        elif wishes or self._moved > self.ns:
            self.ns += SMOOTHING * (self._moved - self.ns)


class DraftGates(WindowAhead):
    """Layer by layer up to the cutoff: the last layer whose copies, with all before it, are expected to be in time.

    They are if their copies take no longer than drafting and the verification of the layers before, as measured, and
    if all that is forecast up to there fits into the pool. cutoff: a fixed number of layers instead.
    """

    def __init__(self, predictor: Modelled, known: Known, cutoff: int | None) -> None:
        super().__init__(predictor, known)
        self._fixed = cutoff

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self._time = DraftTime()
        self._walls = [0.0] * setup.layers
        self._slots = setup.slots
        self._fresh = False

    def slots_changed(self, slots: tuple[int, ...]) -> None:
        self._slots = slots

    def plan(self, step: int) -> None:
        for layer, said in enumerate(self.predictor.forecasts(step)):
            self.name(layer, said)
        self._fresh = True

    def step_begins(self, step: StepInfo) -> None:
        self._time.ends(any(self._wanted))
        super().step_begins(step)

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        super().step_ends(accepted, kept)
        if self._early:
            self._time.begins()

    def layer_ends(self, report: LayerReport) -> None:
        old = self._walls[report.layer] or report.wall_ns
        self._walls[report.layer] = old + SMOOTHING * (report.wall_ns - old)

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        if self.drafting:
            self._time.landed(ns)

    def next_fetch(self, view: View) -> Key | None:
        if self._fresh:
            self._fresh = False
            for layer in range(self._layers_in_time(view), self._setup.layers):
                self.name(layer, [])
        key = super().next_fetch(view)
        if self.drafting:
            self._time.asked(key)
        return key

    def _layers_in_time(self, view: View) -> int:
        if self._fixed is not None:
            return self._fixed
        copy_ns, copies, found = self._setup.costs.copy_ns, 0, 0
        room = self._slots[0] if len(self._slots) == 1 else self._setup.layers * self._setup.experts
        time = 0.0
        if self._early:
            time = float("inf") if self._time.ns is None else self._time.ns
        for layer, said in enumerate(self._named):
            keys = [Key(layer, e) for e in said]
            copies += sum(not view.resident(key) and not view.in_flight(key) for key in keys)
            room -= len(keys)
            if room < 0:
                break
            if copies * copy_ns <= time:
                found = layer + 1
            time += self._walls[layer]
        return found


@dataclass
class SpMoe(Composed):
    """Prefetch while drafting, up to a cutoff layer; LRU, no CPU tier (SP-MoE, arXiv 2510.10302; forecasts MODELLED).

    A reconstruction: there is no released code, and the signal, the draft's attention outputs fed to the target's
    gates, is in no trace. Its accuracy stands in: the true needs of the coming verify pass are taken from the trace and
    spoiled, `recall` of them seen and of all that is forecast `precision` right (`none`: as many experts are forecast
    as are needed). So it is clairvoyant and cannot run live; without a draft it forecasts nothing and is `ar-lru` in
    one pool.
    Theirs: forecasts while drafting; copies in layer order up to a cutoff layer, from measured latencies; LRU; a miss
    is copied on demand; top-1 experts hit in some 89 % of cases.
    Ours: that 0.89 holds for every expert; the cutoff, which is chosen anew for each pass (see `DraftGates`;
    `cutoff` = a fixed number of layers); draft time by what the link moved meanwhile; all forecasts of a pass are there
    at once, as drafting begins, or with `known=verify` as it ends: the truth lies between; nothing that is forecast is
    displaced by a prefetch; a copy whose layer has begun without needing it is given up if demand wants the link.
    """

    name: ClassVar[str] = "sp-moe"
    clairvoyant: ClassVar[bool] = True
    scope: Scope = "global"
    recall: float = 0.89
    precision: float | None = None
    known: Known = "draft"
    cutoff: int | None = None

    def __post_init__(self) -> None:
        check_share("recall", self.recall)
        check_share("precision", self.precision, above_zero=True)
        if self.cutoff is not None and self.cutoff < 0:
            raise ValueError("cutoff must be at least 0, or none")

    def parts(self, setup: Setup) -> Parts:
        ahead = DraftGates(Modelled(self.recall, self.precision), self.known, self.cutoff)
        lru = PatientLru(ahead)
        return Parts(lru, IfBetter(lru), prefetch=[ahead])
