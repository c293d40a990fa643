"""The real clock: copies and experts take the time they take, and the policy decides while they run.

The main thread is the fast device: it computes residents first and then each copied expert as it lands, while the link
copies and the CPU tier works. On CUDA the experts' kernels are only queued by it, so its expert times are launch times.
The CUDA parts have not been run: there was no GPU where this was written.
"""

import os
from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
import torch

from ..policies.driver import Driver, Plan
from ..policies.interface import Key, LayerReport, StepInfo, Where
from ..simulator.engine import gate_forecasts
from ..simulator.machine import Rates
from .host import Routed, fill_placement
from .lanes import CpuTier, Job, Link, Shared
from .moe import Call
from .store import Arena, HostStore
from .times import LayerTimes, StepTimes


class RealHost:
    """Runs a model on the wall clock. `times` grows by one entry a step."""

    def __init__(self, driver: Driver, rates: Rates, store: HostStore, arena: Arena) -> None:
        self.driver = driver
        self.times: list[StepTimes] = []
        self.arena = arena
        self._asked = 0
        self._mark = 0
        self._threads_before = torch.get_num_threads()
        # Half for the fast device where it is emulated, half for the CPU tier.
        threads = max(1, min(self._threads_before, (os.cpu_count() or 2) // 2))
        torch.set_num_threads(threads)
        fill_placement(driver, store, arena)
        self._shared = Shared()
        self._link = Link(self._shared, driver, store, arena, rates.costs.copy_ns)
        self._cpu = CpuTier(self._shared, store, threads)

    def draft_length(self, planned: int) -> int:
        self._asked = perf_counter_ns()
        with self._shared.lock:
            return self.driver.draft_length(planned)

    def step_begins(self, step: StepInfo, context: int) -> None:
        self._mark = perf_counter_ns()
        drafting = self._mark - self._asked if self._asked else 0
        self._asked = 0
        self.times.append(StepTimes(step.kind, len(step.tokens), drafting))
        with self._shared.lock:
            self._shared.check()
            self.driver.step_begins(step)
            self._link.kick()

    def layer(self, call: Call, route: Callable[[], Routed]) -> None:
        entered = perf_counter_ns()
        routed = route()
        times = LayerTimes(before=entered - self._mark)
        with self._shared.lock:
            self._shared.check()
            plan = self._ask(call, routed)
            arrivals = self._link.order(plan)
            job = self._cpu.submit(call, plan.cpu) if plan.cpu else None
        if job is not None and self.driver.policy.serial_tiers:
            times.wait_cpu += self._shared.wait_for(job)
        for expert in plan.gpu:
            self._compute(call, expert, self.driver.cache.resident[Key(call.layer, expert)], times)
        for copy in arrivals:
            times.wait_copy += self._shared.wait_for(copy)
            self._compute(call, copy.key.expert, copy.slot, times)
            if copy.passing:
                self._fence()
                self._link.release(copy)
        if job is not None:
            times.wait_cpu += self._shared.wait_for(job)
            call.bring(plan.cpu)
            times.cpu_work = job.work
        self._fence()
        self._end_layer(plan, job, times, entered)
        self.times[-1].layers.append(times)
        self._mark = perf_counter_ns()
        times.wall = self._mark - entered

    def step_ends(self, accepted: int, kept: np.ndarray, emitted: int) -> None:
        with self._shared.lock:
            self._shared.check()
            self.driver.step_ends(accepted, kept)
            self._link.kick()
        self.times[-1].tail = perf_counter_ns() - self._mark

    def close(self) -> None:
        self._shared.close()
        torch.set_num_threads(self._threads_before)

    def _ask(self, call: Call, routed: Routed) -> Plan:
        if routed.ahead is not None:
            for forecast in gate_forecasts(call.layer, routed.ahead, self.driver.setup.layers):
                self.driver.forecast(forecast)
        return self.driver.gate(call.layer, routed.ids, routed.weights)

    def _compute(self, call: Call, expert: int, slot: int, times: LayerTimes) -> None:
        begin = perf_counter_ns()
        call.compute(expert, self.arena, slot)
        times.work.append((len(call.places[expert]), perf_counter_ns() - begin))

    def _fence(self) -> None:
        """Slots may be overwritten only when what the compute stream has been given so far is over."""
        if self.arena.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._link.fence = event

    def _end_layer(self, plan: Plan, job: Job | None, times: LayerTimes, entered: int) -> None:
        layer = plan.demand.layer
        with self._shared.lock:
            for expert, (tokens, ns) in zip((*plan.gpu, *plan.joins, *plan.copies), times.work, strict=True):
                self.driver.worked(Key(layer, expert), Where.GPU, tokens, ns)
            for expert, (tokens, ns) in zip(plan.cpu, times.cpu_work, strict=True):
                self.driver.worked(Key(layer, expert), Where.CPU, tokens, ns)
            self.driver.layer_ends(
                LayerReport(
                    layer=layer,
                    wall_ns=perf_counter_ns() - entered,
                    gpu_ns=times.expert,
                    cpu_ns=sum(ns for _, ns in times.cpu_work),
                    wait_copy_ns=times.wait_copy,
                    wait_cpu_ns=times.wait_cpu,
                )
            )
            self._link.kick()
