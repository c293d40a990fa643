"""Prefetch by the later layers' gates, applied to the hidden state of the running layer."""

from dataclasses import dataclass
from typing import ClassVar

from .future import Future
from .interface import Demand, Forecast, Key, Scope, Setup, StepInfo, View
from .parts import Composed, IfBetter, Parts
from .predictors import Ahead, Modelled, PatientLru


class GateAhead(Ahead):
    """What the gates of the next `layers` layers choose now, the experts with most tokens first.

    top: experts of a layer that count, 0 for all that are chosen; most: copies that one gate may ask for, 0 for any
    number.
    """

    channels: ClassVar[frozenset[str]] = frozenset({"next-gate"})

    def __init__(self, layers: int, top: int = 0, most: int = 0) -> None:
        self._reach, self._top, self._most = layers, top, most

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self._latest: dict[int, list[int]] = {}
        self._left = 0

    def step_begins(self, step: StepInfo) -> None:
        super().step_begins(step)
        self._latest.clear()

    def forecast(self, forecast: Forecast) -> None:
        ranked = sorted(forecast.counts, key=lambda e: (-forecast.counts[e], e))
        self._latest[forecast.layer] = ranked[: self._top or None]

    def used(self, demand: Demand, view: View) -> None:
        super().used(demand, view)
        self._left = self._most or self._setup.layers * self._setup.experts
        for layer in range(demand.layer + 1, min(demand.layer + self._reach, self._setup.layers - 1) + 1):
            self.name(layer, self._latest.get(layer, []))

    def next_fetch(self, view: View) -> Key | None:
        if self._left <= 0:
            return None
        key = super().next_fetch(view)
        self._left -= key is not None
        return key


class Pregated(GateAhead):
    """The same with gates that are never wrong, as gates that were trained to choose for a later layer are."""

    channels: ClassVar[frozenset[str]] = frozenset()

    def reveal(self, future: Future) -> None:
        self._true = Modelled(1.0, 1.0)
        self._true.reveal(self._setup, future)

    def step_begins(self, step: StepInfo) -> None:
        super().step_begins(step)
        self._latest = {
            layer: needed[: self._top or None] for layer, needed in enumerate(self._true.forecasts(step.index))
        }


@dataclass
class GateLookahead(Composed):
    """On-demand loading and LRU, with prefetch by the gates of the next 1 to 3 layers, the nearest first.

    The idea that many papers share: the gates of layers l+1, l+2, ... are applied to the hidden state of layer l.
    Mixtral-Offloading's paper (2312.17238): `layers=1,top=1` or 2. AdapMoE (2408.10284): one missing expert a layer out
    of the top 2, looking up to 3 layers on where all of the next are resident: `layers=3,top=2,most=1`; its code looks
    one layer on. Pre-gated MoE (2308.12066) has retrained gates, which are exact: `exact=true`, which takes the next
    layers' needs from the trace, so it is clairvoyant and cannot run live.
    Ours: what is brought in takes a slot at once and never that of another expert that is forecast; the channel counts
    tokens and does not tell how sure a gate is, so `top` is by tokens and then id; a copy whose layer has begun without
    needing it is given up if demand wants the link. AdapMoE's other half, gating by sensitivity and slots by layer, is
    not here. Without the "next-gate" channel in the trace nothing is prefetched, and this is `ar-lru`.
    """

    name: ClassVar[str] = "gate-lookahead"
    scope: Scope = "layer"
    layers: int = 1
    top: int = 0  # 0: all that the gate chooses
    most: int = 0  # 0: no limit
    exact: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= 3:
            raise ValueError("layers must be 1 to 3: gates further on are not recorded")
        if self.top < 0 or self.most < 0:
            raise ValueError("top and most must be at least 0")
        self.clairvoyant = self.exact  # type: ignore[misc]

    def parts(self, setup: Setup) -> Parts:
        ahead = (Pregated if self.exact else GateAhead)(self.layers, self.top, self.most)
        lru = PatientLru(ahead)
        return Parts(lru, IfBetter(lru), prefetch=[ahead])
