"""The real clock: copies and experts take the time they take, and the policy decides while they run.

The main thread is the fast device, or gives it its work: residents first and then each copied expert as it lands, while
the link copies and the CPU tier works. All times are taken between moments of the device (`Device.stamp`). A GPU's are
known only when it has got there, so a layer's times are read when they are: at once where the device is emulated.
The CUDA parts have not been run: there was no GPU where this was written.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np
import torch

from ..policies.driver import Driver, Plan
from ..policies.interface import Key, LayerReport, StepInfo, Where
from ..simulator.engine import gate_forecasts
from ..simulator.machine import Rates
from ..traces.console import warn
from . import kernels
from .device import Stamp
from .host import Routed, fill_placement
from .lanes import Copy, CpuTier, Job, Link, Shared
from .moe import Call
from .spans import Recorder
from .store import Arena, HostStore
from .times import LayerTimes, StepTimes

Between = tuple[Stamp, Stamp]


@dataclass(slots=True, eq=False)
class LayerMoments:
    """One layer's moments, to be read as `LayerTimes` when the last has passed. `before` is the end of the last one."""

    step: int
    layer: int
    before: Stamp
    entered: Stamp
    asked: int  # on the host's clock, as `decided`
    work: list[tuple[int, int, Stamp, Stamp]] = field(default_factory=list)  # expert, tokens, begin, end
    wait_copy: list[Between] = field(default_factory=list)
    wait_cpu: list[Between] = field(default_factory=list)
    cpu_work: list[tuple[int, int]] = field(default_factory=list)
    calls: int = 0
    kept: int = 0
    done: Stamp = None  # its experts are computed
    end: Stamp = None  # and all is written down
    times: LayerTimes | None = None
    decided: tuple[int, int] = (0, 0)
    hits: int = 0
    needed: int = 0


class RealHost:
    """Runs a model on the wall clock. `times` grows by one entry a step, `recorder` keeps spans if it is asked to."""

    def __init__(self, driver: Driver, rates: Rates, store: HostStore, arena: Arena, record: bool = False) -> None:
        self.driver = driver
        self.times: list[StepTimes] = []
        self.arena = arena
        self._device = arena.device
        self._asked = 0
        self._step = -1
        self._open: deque[LayerMoments] = deque()
        self._threads_before = torch.get_num_threads()
        threads = kernels.threads(emulated=self._device.place.type == "cpu")
        torch.set_num_threads(min(self._threads_before, threads))
        self._device.start()
        store.pin(self._device)
        if (trouble := self._device.trouble()) is not None:
            warn(trouble)
        fill_placement(driver, store, arena)
        self._shared = Shared(self._device)
        self._link = Link(self._shared, driver, rates, store, arena)
        self._cpu = CpuTier(self._shared, store, threads)
        self.recorder = Recorder(self._link.meter, self._cpu.meter) if record else None
        self._spent, self._prefetched = self._meters(), 0
        self._mark: Stamp = self._device.stamp()

    def draft_length(self, planned: int) -> int:
        self._asked = perf_counter_ns()
        with self._shared.lock:
            return self.driver.draft_length(planned)

    def step_begins(self, step: StepInfo, context: int) -> None:
        now = perf_counter_ns()
        drafting = now - self._asked if self._asked else 0
        if self.recorder is not None:
            self.recorder.step_begins(step, self._asked, now)
        self._asked, self._step = 0, step.index
        self._device.align()
        self._mark = self._device.stamp()
        self.times.append(StepTimes(step.kind, len(step.tokens), drafting))
        with self._shared.lock:
            self._shared.check()
            self._link.settle()
            self.driver.step_begins(step)
            self._link.kick()

    def layer(self, call: Call, route: Callable[[], Routed]) -> None:
        shared, link = self._shared, self._link
        moments = LayerMoments(self._step, call.layer, self._mark, self._device.stamp(), perf_counter_ns())
        routed = route()
        begin = perf_counter_ns()
        with shared.lock:
            shared.check()
            link.settle()
            self._collect()
            plan = self._ask(call, routed)
            if plan.cpu:
                call.fetch()
                job = self._cpu.submit(call, plan.cpu, own=not (plan.gpu or plan.copies or plan.joins))
            else:
                job = None
            arrivals = link.order(plan) if plan.copies or plan.joins else ()
        moments.decided = begin, perf_counter_ns()
        moments.hits, moments.needed = len(plan.demand.held), len(plan.load)
        if job is not None and self.driver.policy.serial_tiers:
            self._wait_cpu(job, moments)
        self._residents(call, plan, moments)
        self._arrivals(call, arrivals, moments)
        if job is not None:
            self._wait_cpu(job, moments)
            call.bring(plan.cpu)
            moments.cpu_work = job.work
        moments.done = self._device.stamp()
        self._end_layer(plan, moments)
        moments.end = self._mark = self._device.stamp()
        self._open.append(moments)

    def step_ends(self, accepted: int, kept: np.ndarray, emitted: int) -> None:
        with self._shared.lock:
            self._shared.check()
            self._link.settle()
            self._collect(finish=True)
            self.driver.step_ends(accepted, kept)
            self._link.kick()
        end, times = self._device.stamp(), self.times[-1]
        self._device.finish(end)
        times.tail = self._device.elapsed(self._mark, end)
        before, self._spent = self._spent, self._meters()
        times.busy = {name: ns - before[name] for name, ns in self._spent.items()}
        prefetched, self._prefetched = self._prefetched, self._link.prefetched
        times.prefetches = self._prefetched - prefetched
        if self.recorder is not None:
            self.recorder.step_ends(accepted, emitted, self._device.clock(end))

    def close(self) -> None:
        self._shared.close()
        torch.set_num_threads(self._threads_before)

    def _meters(self) -> dict[str, int]:
        link, cpu = self._link, self._cpu.meter.spent["busy"]
        return {**link.meter.spent, "cpu": cpu, "asked": link.asked_ns, "held": link.held_ns}

    def _ask(self, call: Call, routed: Routed) -> Plan:
        if routed.ahead is not None:
            for forecast in gate_forecasts(call.layer, routed.ahead, self.driver.setup.layers):
                self.driver.forecast(forecast)
        return self.driver.gate(call.layer, routed.ids, routed.weights, needed=call.needed)

    def _residents(self, call: Call, plan: Plan, moments: LayerMoments) -> None:
        resident, layer = self.driver.cache.resident, call.layer
        self._compute(call, plan.gpu, [resident[Key(layer, e)] for e in plan.gpu], self._device.stamp(), moments)

    def _arrivals(self, call: Call, copies: Sequence[Copy], moments: LayerMoments) -> None:
        """Each copied expert as it lands; those that landed meanwhile go together."""
        at = 0
        while at < len(copies):
            begin, worked = self._device.stamp(), self._link.own_ns
            self._link.arrive(copies[at])
            there, first = self._device.stamp(), at
            moments.wait_copy.append((begin, there))
            if not self._device.queues and (ticket := copies[at].ticket):
                moments.kept += self._kept(worked, there - max(begin, ticket.end))
            at += 1
            while at < len(copies) and (ticket := copies[at].ticket) and self._device.passed(ticket.end):
                at += 1
            group = copies[first:at]
            self._compute(call, [c.key.expert for c in group], [c.slot for c in group], there, moments)
            for copy in group:
                if copy.passing:
                    self._link.release(copy)

    def _compute(
        self, call: Call, experts: Sequence[int], slots: Sequence[int], begin: Stamp, moments: LayerMoments
    ) -> None:
        """Experts on the device; their slots may be overwritten when that is over."""
        if self._device.queues:
            for expert, slot in zip(experts, slots, strict=True):
                call.compute(expert, self.arena, slot)
                end = self._device.stamp()
                self._link.last_use[slot] = end
                moments.work.append((expert, len(call.places[expert]), begin, end))
                begin = end
        elif experts:
            worked = self._link.own_ns
            spent, kept = call.compute_all(experts, self.arena, slots)
            moments.calls += 1
            moments.kept += self._kept(worked, kept)
            scale = (self._device.stamp() - begin) / max(1, sum(spent))  # what the call itself takes is shared out
            for expert, ns in zip(experts, spent, strict=True):
                end = begin + round(ns * scale)
                moments.work.append((expert, len(call.places[expert]), begin, end))
                begin = end

    def _kept(self, worked: int, late: int) -> int:
        """For how many of the `late` ns before now the link's thread worked, which had worked for `worked` ns then."""
        return min(late, self._link.own_ns - worked)

    def _wait_cpu(self, job: Job, moments: LayerMoments) -> None:
        begin = self._device.stamp()
        if job.own:
            self._cpu.run(job)
        self._shared.wait_for(job.is_done)
        moments.wait_cpu.append((begin, self._device.stamp()))

    def _end_layer(self, plan: Plan, moments: LayerMoments) -> None:
        driver, report = self.driver, None
        if driver.hears_layers:  # only then is a GPU waited for
            self._device.finish(moments.done)
        with self._shared.lock:
            self._link.settle()
            if self._device.passed(moments.done):
                self._read(moments)
            if driver.hears_work:
                for expert, (tokens, ns) in zip(plan.cpu, moments.cpu_work, strict=True):
                    driver.worked(Key(moments.layer, expert), Where.CPU, tokens, ns)
            if driver.hears_layers:
                report = _report(moments)
            driver.layer_ends(report)
            self._link.kick()

    def _collect(self, finish: bool = False) -> None:
        """Take in the times of layers that are over; `finish` waits until all are. Lock held."""
        device = self._device
        if finish and self._open:
            device.finish(self._open[-1].end)
        while self._open and device.passed(self._open[0].end):
            moments = self._open.popleft()
            times = moments.times or self._read(moments)
            times.wall = device.elapsed(moments.entered, moments.end)
            if self.recorder is not None:
                self.recorder.layer(moments, device.clock)
            self.times[-1].layers.append(times)

    def _read(self, moments: LayerMoments) -> LayerTimes:
        """The times of a layer whose work is done; the driver is told of its experts. Lock held."""
        elapsed = self._device.elapsed
        work = [(tokens, elapsed(begin, end)) for _, tokens, begin, end in moments.work]
        if self.driver.hears_work:
            for (expert, *_), (tokens, ns) in zip(moments.work, work, strict=True):
                self.driver.worked(Key(moments.layer, expert), Where.GPU, tokens, ns)
        moments.times = LayerTimes(
            before=elapsed(moments.before, moments.entered),
            wall=elapsed(moments.entered, moments.done),
            wait_copy=sum([elapsed(begin, end) for begin, end in moments.wait_copy]),
            wait_cpu=sum([elapsed(begin, end) for begin, end in moments.wait_cpu]),
            work=work,
            cpu_work=moments.cpu_work,
            decided=moments.decided[1] - moments.asked,
            calls=moments.calls,
            kept=moments.kept,
        )
        return moments.times


def _report(moments: LayerMoments) -> LayerReport:
    times = moments.times
    assert times is not None
    return LayerReport(
        layer=moments.layer,
        wall_ns=times.wall - times.policy,  # from the decision on, as the simulator reports it
        gpu_ns=times.expert,
        cpu_ns=sum(ns for _, ns in times.cpu_work),
        wait_copy_ns=times.wait_copy,
        wait_cpu_ns=times.wait_cpu,
    )
