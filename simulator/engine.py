"""The event-level run: spends simulated time between the calls of the policy driver.

A host calls `draft`, `step_begins`, `layer` for every MoE layer and `step_ends`. The simulator does so from a
trace (`simulate`); the executor's virtual clock does so from inside a real forward pass, which is why the engine takes
one layer at a time.

Assumptions: the GPU does one thing at a time and its timeline is the run's timeline; a layer's CPU experts run while
its GPU experts run, and the layer ends when both are done; residents run first, then each copied expert as it lands;
the CPU's experts of one layer share DRAM as one flow; drafting leaves the link free for prefetches; while an expert is
copied from pageable memory the host launches nothing.

The GPU's timeline is a number that runs ahead; the SimPy environment (link, DRAM, CPU) is brought up to it where the
two can see each other: at gates, at the ends of layers, and while the GPU waits. Where nothing can disturb a layer's
copies or CPU experts, their times are worked out in closed form; `exact=True` leaves that out, to the same result.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import simpy

from ..policies.demand import Needed, PerLoad, needed_by_layer
from ..policies.driver import Counters, Driver, Plan
from ..policies.future import Future
from ..policies.interface import Forecast, Key, LayerReport, Policy, Setup, StepInfo, Where
from ..policies.residency import even_shares
from ..traces.schema import Kind, ModelShape, Step
from .lanes import Copy, CopyPrice, Dram, Link, Meter
from .machine import Rates
from .steptimes import GPU_LABELS, StepLog

LAYER_COLUMNS = ("needed", "hits", "copies", "cpu", "joins", "wall_ns", "wait_copy_ns", "wait_cpu_ns")


@dataclass
class Run:
    """What happened to one policy on one trace: times by step, counts by phase. `error` is set if the policy failed.

    layers: for every MoE layer the sums over decode of `LAYER_COLUMNS`, int64 [L] each. slots_seen: least and most
    slots there were, if the keys and values took some.
    """

    policy: str
    slots: int
    steps: StepLog = field(default_factory=StepLog)
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    layers: dict[str, np.ndarray] = field(default_factory=dict)
    slots_seen: tuple[int, int] = (0, 0)
    error: str | None = None


@dataclass(slots=True, eq=False)
class _CpuWork:
    """The CPU's share of a layer: `at` is when it is done, -1 until then."""

    at: int = -1


class Engine:
    """One policy on one machine. `now` is the simulated time in ns since the start.

    slots_at: slots for a context of so many tokens, where keys and values take memory from experts.
    """

    def __init__(
        self,
        driver: Driver,
        rates: Rates,
        dense_only_layers: int = 0,
        on_land: Callable[[Key], None] | None = None,
        on_serve: Callable[[Plan], None] | None = None,
        slots_at: Callable[[int], tuple[int, ...]] | None = None,
        exact: bool = False,
    ) -> None:
        self.driver, self.rates = driver, rates
        self.now = 0
        self.env = simpy.Environment()
        self.dram = Dram(self.env, rates.dram_bytes_per_s)
        self.link = _link(self.env, self.dram, driver, rates, self._landed)
        self.steps = StepLog()
        self._dense_only = dense_only_layers
        self._on_land, self._on_serve, self._slots_at, self._exact = on_land, on_serve, slots_at, exact
        self._gpu_ns, self._cpu_ns = PerLoad(rates.costs.gpu_ns), PerLoad(rates.costs.cpu_ns)
        self._policy_ns, self._ending_ns, self._copy_ns = rates.policy_ns, rates.ending_ns, rates.costs.copy_ns
        self._gpu: dict[str, int] = dict.fromkeys(GPU_LABELS, 0)
        self._cpu = Meter()
        self._owed = 0  # ns by which landed prefetches held up the fast device
        self._begin = 0
        self._before: list[dict[str, int]] = [{}, {}, {}, {}]
        # Nothing looks at a layer's end but the driver.
        self._alone = not (driver.prefetches or driver.policy.write_back or driver.hears_layers)
        self._rows = [[0] * len(LAYER_COLUMNS) for _ in range(driver.setup.layers)]

    @property
    def layers(self) -> dict[str, np.ndarray]:
        table = np.array(self._rows, np.int64)
        return {name: table[:, i] for i, name in enumerate(LAYER_COLUMNS)}

    def draft(self, tokens: int) -> None:
        """The draft model proposes tokens; the link goes on prefetching meanwhile."""
        self._spend(tokens * self.rates.draft_token_ns, "draft")

    def step_begins(self, step: StepInfo, context: int) -> None:
        """A forward pass of the target starts, `context` tokens being in its cache already."""
        self._info, self._decoding = step, step.kind is not Kind.PREFILL
        self._set_clock()
        if self._slots_at:
            self.driver.resize(self._slots_at(context + len(step.tokens)))
        self.driver.step_begins(step)
        self._look_for_work()
        self._spend(self.rates.step_ns, "step")
        self._dense = self.rates.dense_ns(len(step.tokens), context, bool(step.drafted.any()))
        self._spend(self._dense_only * self._dense, "dense")

    def layer(
        self,
        layer: int,
        ids: np.ndarray,
        weights: np.ndarray | None = None,
        scores: np.ndarray | None = None,
        ahead: np.ndarray | None = None,
        needed: Needed | None = None,
    ) -> Plan:
        """One MoE layer from its attention to its merged output. ids: [n, k]; ahead: [n, J, k]; `needed`: see
        `Driver.gate`."""
        driver, gpu, dense, policy = self.driver, self._gpu, self._dense, self._policy_ns
        heard = ahead if "next-gate" in driver.policy.channels else None
        dense += 0 if heard is None else self.rates.ahead_ns
        self.now += dense
        gpu["dense"] += dense
        if driver.prefetches:
            self._catch_up()
            self._spend(self._owed, "policy")
            self._owed = 0
        if heard is not None:
            for forecast in gate_forecasts(layer, heard, driver.setup.layers):
                driver.forecast(forecast)
        plan = driver.gate(layer, ids, weights, scores, needed)
        self.now += policy
        gpu["policy"] += policy
        self._serve(plan)
        self._spend(self._ending_ns, "policy")
        return plan

    def step_ends(self, accepted: int, kept: np.ndarray, emitted: int) -> None:
        """Verification is over; the step's times are closed."""
        self._catch_up()
        self.driver.step_ends(accepted, kept)
        self._look_for_work()
        self.link.settle()
        meters = (self._cpu, self.link.meter, self.dram.meter, self.link.back_meter)
        after = [meter.read(self.now) for meter in meters]
        cpu, link, dram, back = (_difference(a, b) for a, b in zip(after, self._before, strict=True))
        info = self._info
        counts = len(info.tokens), int(info.drafted.sum()), emitted, self.now - self._begin
        self.steps.add(info.kind, counts, {"gpu": self._gpu, "cpu": cpu, "link": link, "dram": dram, "back": back})
        self._gpu, self._before, self._begin = dict.fromkeys(GPU_LABELS, 0), after, self.now

    def _serve(self, plan: Plan) -> None:
        """Both tiers work on one layer's demand; then the driver admits and evicts."""
        gpu, driver, begin, cpu_ns = self._gpu, self.driver, self.now, 0
        copied, waited = gpu["wait_copy"], gpu["wait_cpu"]
        if plan.joins or plan.cpu or self._exact or (plan.copies and not self.link.undisturbed):
            cpu_ns = self._with_others(plan)
        else:
            self._undisturbed(plan)
        if driver.hears_work:
            self._tell_work(plan)
        if self._on_serve is not None:
            self._on_serve(plan)
        copied, waited = gpu["wait_copy"] - copied, gpu["wait_cpu"] - waited
        if self._decoding:
            row, demand = self._rows[plan.demand.layer], plan.demand
            row[0] += len(demand.experts)
            row[1] += len(demand.held)
            row[2] += len(plan.copies)
            row[3] += len(plan.cpu)
            row[4] += len(plan.joins)
            row[5] += self.now - begin
            row[6] += copied
            row[7] += waited
        if self._alone:
            driver.layer_ends(None)
        else:
            self._layer_ends(plan, self.now - begin, cpu_ns, copied, waited)

    def _layer_ends(self, plan: Plan, wall: int, cpu_ns: int, copied: int, waited: int) -> None:
        driver = self.driver
        if driver.prefetches:
            self._catch_up()
        if driver.policy.write_back:
            self._set_clock()
        report = None
        if driver.hears_layers:
            load = plan.load
            worked = sum(self._gpu_ns[load[e]] for group in (plan.gpu, plan.joins, plan.copies) for e in group)
            report = LayerReport(plan.demand.layer, wall, worked, cpu_ns, copied, waited)
        driver.layer_ends(report)
        if driver.prefetches:
            self._look_for_work()

    def _undisturbed(self, plan: Plan) -> None:
        """In closed form: a layer without CPU experts whose copies land one after the other."""
        copies, gpu, count = plan.copies, self._gpu, len(plan.copies)
        begin, one, each = self.now, self._gpu_ns[1], self._copy_ns
        if count:
            self.link.at_once(count)
            if self.driver.prefetches:  # the link looks for work when the last one has landed
                last = begin + each * count - int(self.env.now)
                self.env.timeout(last).callbacks.append(self.link.wake)  # type: ignore[union-attr]
        if len(plan.demand.ids) > 1 or self.rates.arrival_ns or self.rates.call_ns:
            worked, waited = self._one_by_one(plan)
        else:  # the last wait ends with the first or the last landing, for all experts take one time
            worked = one * len(plan.demand.experts)
            waited = max(0, each + one * count - worked, each * count + one - worked) if count else 0
        self.now = begin + worked + waited
        gpu["wait_copy"] += waited
        gpu["expert"] += worked
        if count and (self.driver.hears_landing or self._on_land is not None):
            for expert in copies:
                self._landed(plan.demand.table[expert], each)

    def _one_by_one(self, plan: Plan) -> tuple[int, int]:
        """ns of work and of waiting where experts take different times."""
        load, times, each = plan.load, self._gpu_ns, self._copy_ns
        arrival, call = self.rates.arrival_ns, self.rates.call_ns
        now = sum([times[load[e]] for e in plan.gpu], call if plan.gpu else 0)
        lands = waited = 0
        called = -1
        for expert in plan.copies:
            lands += each
            if lands > now:
                waited += lands + arrival - now
                now = lands + arrival
            if lands > called:  # else it is computed with what landed before
                called = now
                now += call
            now += times[load[expert]]
        return now - waited, waited

    def _with_others(self, plan: Plan) -> int:
        """A layer in which something may disturb the copies, or that uses the CPU; the CPU's ns."""
        load = plan.load
        cpu_ns = self._cpu_total(plan, load) if plan.cpu else 0
        if not (plan.copies or plan.joins or plan.cpu):
            self._work(plan.gpu, load)
        elif plan.copies or plan.joins or self._exact or not self._cpu_alone(plan, load, cpu_ns):
            self._by_events(plan, load, cpu_ns)
        return cpu_ns

    def _cpu_alone(self, plan: Plan, load: dict[int, int], cpu_ns: int) -> bool:
        """In closed form: a layer whose CPU experts nothing disturbs; False if something may."""
        reading, size = cpu_ns - self._cpu_fixed(plan), len(plan.cpu) * self.driver.setup.expert_bytes
        if not (self.link.idle and self.dram.idle and self.dram.carries(size, reading)):
            return False
        self._cpu.add("busy", cpu_ns)
        self.dram.meter.add("busy", reading)
        done = self.now + cpu_ns
        if self.driver.policy.serial_tiers:
            self._wait_until(done, "wait_cpu")
        done += self._work(plan.gpu, load, beside=done)
        self._wait_until(done, "wait_cpu")
        self._merge(plan)
        return True

    def _by_events(self, plan: Plan, load: dict[int, int], cpu_ns: int) -> None:
        """Serve a layer whose copies and CPU experts go through the environment."""
        self._set_clock()
        layer, done = plan.demand.layer, self.now + cpu_ns
        arrivals = [(e, self._joined(Key(layer, e))) for e in plan.joins]
        arrivals += [(e, self.link.demand(Key(layer, e))) for e in plan.copies]
        cpu = self._start_cpu(plan, cpu_ns) if plan.cpu else None
        if cpu is not None and self.driver.policy.serial_tiers:
            self._wait(cpu, "wait_cpu")
        for _, copy in arrivals:
            if copy is not None and copy.pageable:
                self._wait(copy, "wait_copy")
        begin, called = self.now, -1
        late = self._work(plan.gpu, load, beside=done)
        for expert, copy in arrivals:
            if copy is not None:
                self._wait(copy, "wait_copy", self.rates.arrival_ns)
            alone = (begin if copy is None else copy.at) > called  # else computed with what landed before
            called = self.now if alone else called
            late += self._work((expert,), load, beside=done + late, call=alone)
        if cpu is not None:
            self._wait(cpu, "wait_cpu", late)
            self._merge(plan)

    def _joined(self, key: Key) -> Copy | None:
        """The copy that was on its way at the gate; None if it landed while the policy was deciding."""
        return self.link.join(key) if key in self.driver.cache.flying else None

    def _cpu_total(self, plan: Plan, load: dict[int, int]) -> int:
        return self.rates.costs.cpu_first_ns + sum(self._cpu_ns[load[e]] for e in plan.cpu)

    def _cpu_fixed(self, plan: Plan) -> int:
        """The part of it that reads no memory."""
        costs = self.rates.costs
        return costs.cpu_first_ns + len(plan.cpu) * costs.cpu_fixed_ns

    def _start_cpu(self, plan: Plan, ns: int) -> _CpuWork:
        work, reading = _CpuWork(), ns - self._cpu_fixed(plan)
        self._cpu.begin("busy", self.now)

        def done() -> None:
            work.at = int(self.env.now)
            self._cpu.end(work.at)

        def reads(_: object) -> None:
            self.dram.flow(len(plan.cpu) * self.driver.setup.expert_bytes, reading, done)

        self.env.timeout(ns - reading).callbacks.append(reads)  # type: ignore[union-attr]
        return work

    def _tell_work(self, plan: Plan) -> None:
        """Every expert's undisturbed time, in working order."""
        layer, costs, load = plan.demand.layer, self.rates.costs, plan.load
        for e in (*plan.gpu, *plan.joins, *plan.copies):
            self.driver.worked(Key(layer, e), Where.GPU, load[e], costs.gpu_ns(load[e]))
        for i, e in enumerate(plan.cpu):
            self.driver.worked(Key(layer, e), Where.CPU, load[e], costs.cpu_ns(load[e], first=i == 0))

    def _landed(self, key: Key, ns: int) -> None:
        if key in self.driver.cache.flying:
            self._owed += self.rates.landing_ns
        self.driver.landed(key, ns)
        if self._on_land is not None:
            self._on_land(key)

    # Time

    def _spend(self, ns: int, label: str) -> None:
        if ns > 0:
            self.now += ns
            self._gpu[label] += ns

    def _work(self, experts: Sequence[int], load: dict[int, int], beside: int = 0, call: bool = True) -> int:
        """Compute experts, the CPU tier being busy until `beside`; ns that both tiers lose to each other by it."""
        times = self._gpu_ns
        ns, lost = sum([times[load[e]] for e in experts], self.rates.call_ns if call and experts else 0), 0
        if self.rates.overlap and beside > self.now:
            lost = round(self.rates.overlap * min(ns, beside - self.now))
        self._spend(ns + lost, "expert")
        return lost

    def _merge(self, plan: Plan) -> None:
        """The end of a layer that used the CPU tier."""
        both = plan.gpu or plan.copies or plan.joins
        self._spend(self.rates.costs.hybrid_ns + (self.rates.beside_ns if both else 0), "hybrid")

    def _wait_until(self, time: int, label: str) -> None:
        self._spend(time - self.now, label)

    def _wait(self, work: Copy | _CpuWork, label: str, late: int = 0) -> None:
        """Let time pass until `late` ns after it is done; nothing is charged if it is already."""
        while work.at < 0:
            self.env.step()
        if work.at > self.now or label == "wait_cpu":
            self._wait_until(work.at + late, label)

    def _catch_up(self) -> None:
        """Let everything happen that is due by now: prefetches and ways back, for layers wait for what they need."""
        while self.env.peek() <= self.now:
            self.env.step()

    def _set_clock(self) -> None:
        """Catch up, and let the environment's clock show the present, before something is begun there."""
        self._catch_up()
        if self.env.now < self.now:
            self.env.run(until=self.now)

    def _look_for_work(self) -> None:
        """Something has changed: an idle link asks the policy again."""
        if not self.driver.prefetches or not self.link.idle:
            return
        if self.driver.policy.write_back:
            self._set_clock()
        key = self.driver.next_fetch()
        if key is None:
            return
        self._set_clock()
        self.link.prefetch(key)
        while (copy := self.link.current) is not None and copy.pageable:
            self._wait(copy, "wait_copy")


def _link(env: simpy.Environment, dram: Dram, driver: Driver, rates: Rates, landed: Callable[[Key, int], None]) -> Link:
    costs, setup = rates.costs, driver.setup
    price = CopyPrice(
        setup.expert_bytes,
        costs.copy_fixed_ns,
        costs.copy_bytes_ns,
        rates.chunks,
        rates.back_bytes_ns,
        rates.both_ways,
        rates.prefetch_ns,
    )
    link = Link(env, dram, price, driver.next_fetch, driver.keep_fetch, landed, driver.cancelled)
    if 0 <= rates.pinned_experts < setup.layers * setup.experts:
        link.set_pageable(
            rates.pageable_fixed_ns,
            rates.pageable_bytes_ns,
            lambda key: key.layer * setup.experts + key.expert >= rates.pinned_experts,
        )
    if driver.policy.write_back:
        driver.evicted = lambda _: link.write_back()
    return link


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}


def gate_forecasts(layer: int, ahead: np.ndarray, layers: int) -> Iterable[Forecast]:
    """Forecasts of the "next-gate" channel from ids [n, J, k] that later gates gave on this layer's hidden state."""
    for j in range(min(ahead.shape[1], layers - 1 - layer)):
        counts = np.bincount(ahead[:, j].reshape(-1))
        experts = np.flatnonzero(counts)
        yield Forecast("next-gate", layer + 1 + j, dict(zip(experts.tolist(), counts[experts].tolist(), strict=True)))


def shares(slots: int, layers: int, policy: Policy) -> tuple[int, ...]:
    """Share out a total: evenly by layer, or as one pool."""
    return (slots,) if policy.scope == "global" else even_shares(slots, layers)


def setup_for(shape: ModelShape, rates: Rates, policy: Policy, slots: int, draft_length: int, seed: int = 0) -> Setup:
    """What a policy is told; `slots` is a total over all layers."""
    layers = len(shape.moe_layers)
    return Setup(
        layers=layers,
        experts=shape.experts,
        top_k=shape.top_k,
        expert_bytes=shape.expert_bytes,
        slots=shares(min(slots, layers * shape.experts), layers, policy),
        costs=rates.costs,
        draft_length=draft_length,
        seed=seed,
        draft_token_ns=rates.draft_token_ns,
        pass_ns=rates.step_ns + shape.layers * rates.dense_ns(1, 0) + layers * rates.policy_ns,
        decide_ns=rates.policy_ns,
    )


def step_info(index: int, step: Step) -> StepInfo:
    return StepInfo(index, step.kind, step.tokens, step.drafted)


def future_of(shape: ModelShape, steps: Iterable[Step]) -> Future:
    return Future.of(len(shape.moe_layers), shape.experts, (s.experts for s in steps))


def replay_step(engine: Engine, index: int, step: Step) -> None:
    """Put one step of a trace through the engine."""
    if step.kind is Kind.VERIFY:
        engine.draft(int(step.drafted.sum()))
    engine.step_begins(step_info(index, step), context=step.context)
    experts, weights, scores, ahead = step.experts, step.weights, step.scores, step.ahead
    for layer, needed in enumerate(needed_by_layer(experts)):
        engine.layer(
            layer,
            experts[:, layer],
            None if weights is None else weights[:, layer],
            None if scores is None else scores[:, layer],
            None if ahead is None else ahead[:, layer],
            needed,
        )
    engine.step_ends(step.accepted, step.kept, step.emitted)
