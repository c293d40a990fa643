"""The event-level run: spends simulated time between the calls of the policy driver.

A host calls `draft`, `step_begins`, `layer` for every MoE layer and `step_ends`. The simulator does so from a
trace (`simulate`); the executor's virtual clock does so from inside a real forward pass, which is why the engine takes
one layer at a time.

Assumptions: the GPU does one thing at a time and its timeline is the run's timeline; a layer's CPU experts run while
its GPU experts run, and the layer ends when both are done; residents run first, then each copied expert as it lands;
the CPU's experts of one layer share DRAM as one flow; drafting leaves the link free for prefetches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import simpy

from ..policies.driver import Counters, Driver, Plan
from ..policies.future import Future
from ..policies.interface import Forecast, Key, LayerReport, Policy, Setup, StepInfo, Where
from ..traces.schema import Kind, ModelShape, Step
from .lanes import Dram, Link, Meter
from .machine import Rates

# What the GPU's time goes to. Everything but the first four is waiting or overhead.
GPU_LABELS = ("dense", "expert", "draft", "step", "wait_copy", "wait_cpu", "hybrid", "policy")


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: where each of its nanoseconds went. On every resource the values and idle add up to `wall_ns`."""

    kind: Kind
    tokens: int
    drafted: int
    emitted: int
    wall_ns: int
    gpu: dict[str, int]
    cpu: dict[str, int]
    link: dict[str, int]
    dram: dict[str, int]


@dataclass
class Run:
    """What happened to one policy on one trace: times by step, counts by phase. `error` is set if the policy failed."""

    policy: str
    slots: int
    steps: list[StepTime] = field(default_factory=list)
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    error: str | None = None


class Engine:
    """One policy on one machine. `now` is the simulated time in ns since the start."""

    def __init__(
        self,
        driver: Driver,
        rates: Rates,
        dense_only_layers: int = 0,
        on_land: Callable[[Key], None] | None = None,
        on_serve: Callable[[Plan], None] | None = None,
    ) -> None:
        self.driver, self.rates = driver, rates
        self.env = simpy.Environment()
        self.dram = Dram(self.env, rates.dram_bytes_per_s)
        costs = rates.costs
        size = driver.setup.expert_bytes
        self.link = Link(
            self.env, self.dram, size, costs.copy_fixed_ns, costs.copy_bytes_ns, driver.next_fetch, self._landed
        )
        self.steps: list[StepTime] = []
        self._dense_only = dense_only_layers
        self._on_land, self._on_serve = on_land, on_serve
        self._gpu: dict[str, int] = {}
        self._cpu = Meter()
        self._begin = 0
        self._before: list[dict[str, int]] = [{}, {}, {}]

    @property
    def now(self) -> int:
        return int(self.env.now)

    def draft(self, tokens: int) -> None:
        """The draft model proposes tokens; the link goes on prefetching meanwhile."""
        self._spend(tokens * self.rates.draft_token_ns, "draft")

    def step_begins(self, step: StepInfo, context: int) -> None:
        """A forward pass of the target starts, `context` tokens being in its cache already."""
        self._info, self._context = step, context
        self.driver.step_begins(step)
        self.link.kick()
        dense = self._dense_only * self.rates.dense_ns(len(step.tokens), context)
        self._spend(self.rates.step_ns, "step")
        self._spend(dense, "dense")

    def layer(
        self,
        layer: int,
        ids: np.ndarray,
        weights: np.ndarray | None = None,
        scores: np.ndarray | None = None,
        ahead: np.ndarray | None = None,
    ) -> Plan:
        """One MoE layer from its attention to its merged output. ids: [n, k]; ahead: [n, J, k]."""
        self._spend(self.rates.dense_ns(len(ids), self._context), "dense")
        if ahead is not None and "next-gate" in self.driver.policy.channels:
            for forecast in gate_forecasts(layer, ahead, self.driver.setup.layers):
                self.driver.forecast(forecast)
        plan = self.driver.gate(layer, ids, weights, scores)
        self._spend(self.rates.policy_ns, "policy")
        self._serve(plan)
        return plan

    def step_ends(self, accepted: int, kept: np.ndarray, emitted: int) -> None:
        """Verification is over; the step's times are closed."""
        self.driver.step_ends(accepted, kept)
        self.link.kick()
        after = [meter.read(self.now) for meter in (self._cpu, self.link.meter, self.dram.meter)]
        cpu, link, dram = (_difference(a, b) for a, b in zip(after, self._before, strict=True))
        info = self._info
        self.steps.append(
            StepTime(
                kind=info.kind,
                tokens=len(info.tokens),
                drafted=int(info.drafted.sum()),
                emitted=emitted,
                wall_ns=self.now - self._begin,
                gpu=self._gpu,
                cpu=cpu,
                link=link,
                dram=dram,
            )
        )
        self._gpu, self._before, self._begin = {}, after, self.now

    def _serve(self, plan: Plan) -> None:
        """Both tiers work on one layer's demand; then the driver admits and evicts."""
        begin, costs = self.now, self.rates.costs
        before = dict(self._gpu)
        layer, load = plan.demand.layer, plan.demand.load()
        arrivals = [(e, self._arrival(Key(layer, e))) for e in plan.joins]
        arrivals += [(e, self.link.demand(Key(layer, e))) for e in plan.copies]
        cpu_done, cpu_ns = self._start_cpu(plan, load)
        if cpu_done is not None and self.driver.policy.serial_tiers:
            self._wait(cpu_done, "wait_cpu")
        self._spend(sum(costs.gpu_ns(load[e]) for e in plan.gpu), "expert")
        for expert, arrival in arrivals:
            self._wait(arrival, "wait_copy")
            self._spend(costs.gpu_ns(load[expert]), "expert")
        if cpu_done is not None:
            self._wait(cpu_done, "wait_cpu")
            self._spend(costs.hybrid_ns, "hybrid")
        self._tell_work(plan, load)
        if self._on_serve is not None:
            self._on_serve(plan)
        spent = _difference(self._gpu, before)
        self.driver.layer_ends(
            LayerReport(
                layer=layer,
                wall_ns=self.now - begin,
                gpu_ns=spent.get("expert", 0),
                cpu_ns=cpu_ns,
                wait_copy_ns=spent.get("wait_copy", 0),
                wait_cpu_ns=spent.get("wait_cpu", 0),
            )
        )
        self.link.kick()

    def _arrival(self, key: Key) -> simpy.Event:
        """When a copy that was on its way at the gate lands: perhaps it did while the policy was deciding."""
        return self.link.arrival(key) if key in self.driver.cache.flying else self.env.event().succeed()

    def _start_cpu(self, plan: Plan, load: dict[int, int]) -> tuple[simpy.Event | None, int]:
        """Begin the CPU's share of a layer; returns the event of its end and its undisturbed time."""
        if not plan.cpu:
            return None, 0
        costs = self.rates.costs
        total = sum(costs.cpu_ns(load[e], first=i == 0) for i, e in enumerate(plan.cpu))
        fixed = costs.cpu_first_ns + len(plan.cpu) * costs.cpu_fixed_ns

        def work():
            self._cpu.begin("busy", self.now)
            yield self.env.timeout(fixed)
            yield self.dram.flow(len(plan.cpu) * self.driver.setup.expert_bytes, total - fixed)
            self._cpu.end(self.now)

        return self.env.process(work()), total

    def _tell_work(self, plan: Plan, load: dict[int, int]) -> None:
        """Every expert's undisturbed time, in working order."""
        layer, costs = plan.demand.layer, self.rates.costs
        for e in (*plan.gpu, *plan.joins, *plan.copies):
            self.driver.worked(Key(layer, e), Where.GPU, load[e], costs.gpu_ns(load[e]))
        for i, e in enumerate(plan.cpu):
            self.driver.worked(Key(layer, e), Where.CPU, load[e], costs.cpu_ns(load[e], first=i == 0))

    def _landed(self, key: Key, ns: int) -> None:
        self.driver.landed(key, ns)
        if self._on_land is not None:
            self._on_land(key)

    def _spend(self, ns: int, label: str) -> None:
        if ns > 0:
            self.env.run(until=self.env.timeout(ns))
            self._gpu[label] = self._gpu.get(label, 0) + ns

    def _wait(self, event: simpy.Event, label: str) -> None:
        """Let time pass until `event`; nothing is charged if it has already happened."""
        begin = self.now
        if not event.processed:
            self.env.run(until=event)
        if self.now > begin:
            self._gpu[label] = self._gpu.get(label, 0) + self.now - begin


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}


def gate_forecasts(layer: int, ahead: np.ndarray, layers: int) -> Iterable[Forecast]:
    """Forecasts of the "next-gate" channel from ids [n, J, k] that later gates gave on this layer's hidden state."""
    for j in range(min(ahead.shape[1], layers - 1 - layer)):
        counts = np.bincount(ahead[:, j].reshape(-1))
        experts = np.flatnonzero(counts)
        yield Forecast("next-gate", layer + 1 + j, dict(zip(experts.tolist(), counts[experts].tolist(), strict=True)))


def setup_for(shape: ModelShape, rates: Rates, policy: Policy, slots: int, draft_length: int, seed: int = 0) -> Setup:
    """Share out `slots` (a total over all layers): evenly by layer, the remainder to the first, or as one pool."""
    layers = len(shape.moe_layers)
    slots = min(slots, layers * shape.experts)
    shares = [slots // layers + (i < slots % layers) for i in range(layers)]
    return Setup(
        layers=layers,
        experts=shape.experts,
        top_k=shape.top_k,
        expert_bytes=shape.expert_bytes,
        slots=tuple(shares) if policy.scope == "layer" else (slots,),
        costs=rates.costs,
        draft_length=draft_length,
        seed=seed,
    )


def step_info(index: int, step: Step) -> StepInfo:
    return StepInfo(index, step.kind, step.tokens, step.drafted)


def future_of(shape: ModelShape, steps: Iterable[Step]) -> Future:
    return Future.of(len(shape.moe_layers), shape.experts, (s.experts for s in steps))


def replay_step(engine: Engine, index: int, step: Step) -> None:
    """Put one step of a trace through the engine."""
    if step.kind is Kind.VERIFY:
        engine.draft(int(step.drafted.sum()))
    engine.step_begins(step_info(index, step), context=int(step.positions[0]))
    for layer in range(step.experts.shape[1]):
        engine.layer(
            layer,
            step.experts[:, layer],
            None if step.weights is None else step.weights[:, layer],
            None if step.scores is None else step.scores[:, layer],
            None if step.ahead is None else step.ahead[:, layer],
        )
    engine.step_ends(step.accepted, step.kept, step.emitted)
