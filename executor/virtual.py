"""The virtual clock: a real forward pass whose time is the simulator's.

The simulator's engine decides when copies land and what that costs; its callbacks move the real bytes and compute the
real experts. So a trace of the run, replayed with the same policy and profile, gives the same decisions exactly.
"""

from collections.abc import Callable

import numpy as np

from ..policies.driver import Driver, Plan
from ..policies.interface import Key, StepInfo
from ..simulator.engine import Engine
from ..simulator.machine import Rates
from ..simulator.steptimes import StepLog
from ..traces.schema import Kind
from .host import Routed, fill_placement
from .moe import Call
from .store import Arena, HostStore


class VirtualHost:
    """Runs a model on simulated time. The arena has one slot more than the driver, for what is not kept."""

    def __init__(
        self, driver: Driver, rates: Rates, store: HostStore, arena: Arena, dense_only_layers: int = 0
    ) -> None:
        self.driver = driver
        self.engine = Engine(driver, rates, dense_only_layers, on_land=self._land, on_serve=self._serve)
        self._store, self.arena = store, arena
        self._passing = driver.cache.physical_slots
        self._call: Call | None = None
        fill_placement(driver, store, arena)

    @property
    def times(self) -> StepLog:
        return self.engine.steps

    def draft_length(self, planned: int) -> int:
        return self.driver.draft_length(planned)

    def step_begins(self, step: StepInfo, context: int) -> None:
        if step.kind is Kind.VERIFY:
            self.engine.draft(int(step.drafted.sum()))
        self.engine.step_begins(step, context)

    def layer(self, call: Call, route: Callable[[], Routed]) -> None:
        self._call, routed = call, route()
        self.engine.layer(call.layer, routed.ids, routed.weights, None, routed.ahead)
        self._call = None

    def step_ends(self, accepted: int, kept: np.ndarray, emitted: int) -> None:
        self.engine.step_ends(accepted, kept, emitted)

    def close(self) -> None:
        """Nothing runs beside the caller."""

    def _land(self, key: Key) -> None:
        """A copy is complete; what no slot keeps is copied when it is computed."""
        cache = self.driver.cache
        if key in cache.resident or key in cache.staged:
            self.arena.load(cache.slot(key), self._store.flat(key))

    def _serve(self, plan: Plan) -> None:
        call = self._call
        assert call is not None
        layer, cache = plan.demand.layer, self.driver.cache
        for expert in (*plan.gpu, *plan.joins, *plan.copies):
            key = Key(layer, expert)
            slot = self._passing
            if expert in plan.copies and expert not in plan.kept:
                self.arena.load(slot, self._store.flat(key))
            else:
                slot = cache.slot(key)
            call.compute(expert, self.arena, slot)
        if plan.cpu:
            call.compute_on_host(plan.cpu, self._store)
            call.bring(plan.cpu)
