"""An engine that also keeps what every lane did when, as spans for a timeline.

It runs everything through the environment (`exact`), so that all periods are seen as they happen; the times are those
of any other engine. GPU, draft and policy lanes are the engine's one timeline split by what it goes to; CPU and both
ways of the link are the periods that their meters count, so that lanes add up to the times of the steps.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ..policies.driver import Driver, Plan
from ..policies.interface import Key, Policy, StepInfo
from ..traces.errors import InputError
from ..traces.views import Steps
from .engine import Engine
from .lanes import Copy, Meter
from .machine import Machine, Rates
from .metrics import Limited
from .run import simulate
from .timeline import Span

LANE_OF = {"draft": "draft", "policy": "policy"}  # all else is on the GPU's lane
WORDS = {  # name and category of what the engine's timeline goes to
    "dense": ("attention", "attention"),
    "draft": ("draft", "draft"),
    "step": ("fixed cost of a step", "step"),
    "wait_copy": ("wait for copy", "wait"),
    "wait_cpu": ("wait for CPU", "wait"),
    "hybrid": ("join CPU and GPU", "hybrid"),
    "policy": ("policy decides", "plan"),
}


class _Watched(Meter):
    """A meter that tells of every period when it is over: its label, beginning and end."""

    def __init__(self, tell: Callable[[str, int, int], None]) -> None:
        super().__init__()
        self._tell = tell

    @property
    def running(self) -> bool:
        return self._since >= 0

    def end(self, now: int) -> None:
        label, since = self._label, self._since
        super().end(now)
        self._tell(label, since, now)


class TracedEngine(Engine):
    """Takes what `Engine` takes; `spans` holds what happened so far, with its step and layer in `args`."""

    def __init__(self, driver: Driver, rates: Rates, dense_only_layers: int = 0, **options: Any) -> None:
        super().__init__(driver, rates, dense_only_layers, **{**options, "exact": True})
        self.spans: list[Span] = []
        self._watched = [_Watched(self._copied), _Watched(self._went_back), _Watched(self._computed)]
        self.link.meter, self.link.back_meter, self._cpu = self._watched
        self._at: dict[str, int] = {"step": 0}
        self._title = ""
        self._step_began = 0
        self._plan: Plan | None = None
        self._awaited: Key | None = None
        self._brought: dict[Key, int] = {}  # where in `spans` the copy is that brought an expert not used since

    def step_begins(self, step: StepInfo, context: int) -> None:
        self._at = {"step": step.index}
        self._title = f"step {step.index}: {step.kind}, {len(step.tokens)} tokens"
        self._step_began = self.now
        super().step_begins(step, context)

    def layer(self, layer: int, ids: np.ndarray, *given: Any, **named: Any) -> Plan:
        self._at["layer"] = layer
        begin, gpu = self.now, self._gpu
        dense = gpu["dense"]
        plan = super().layer(layer, ids, *given, **named)
        self._keep("dense", begin, begin + gpu["dense"] - dense)
        self._add("GPU", f"L{layer}", begin, self.now, "layer", hits=len(plan.demand.held), needed=len(plan.load))
        del self._at["layer"]
        return plan

    def step_ends(self, accepted: int, kept: np.ndarray, emitted: int) -> None:
        super().step_ends(accepted, kept, emitted)
        self._add("GPU", self._title, self._step_began, self.now, "step", accepted=accepted, emitted=emitted)
        self._at = {"step": self._at["step"] + 1}  # whose draft comes next

    def close(self) -> None:
        """The run is over: what still goes on is kept up to now."""
        for meter in self._watched:
            if meter.running:
                meter.end(self.now)

    # What the engine spends its time on

    def _serve(self, plan: Plan) -> None:
        self._plan = plan
        self._keep("policy", self.now - self._policy_ns, self.now)
        super()._serve(plan)

    def _work(self, experts: Iterable[int], load: dict[int, int], beside: int = 0, call: bool = True) -> int:
        experts, begin, done = tuple(experts), self.now, 0
        lost = super()._work(experts, load, beside, call)
        took, alone = self.now - begin, sum([self._gpu_ns[load[e]] for e in experts])
        for expert in experts:  # what they have in common is shared out
            first, done = done, done + self._gpu_ns[load[expert]]
            ends = (begin + at * took // max(1, alone) for at in (first, done))
            self._expert(expert, *ends)
        return lost

    def _wait(self, work: Any, label: str, late: int = 0) -> None:
        self._awaited = work.key if isinstance(work, Copy) else None
        super()._wait(work, label, late)
        self._awaited = None

    def _spend(self, ns: int, label: str) -> None:
        begin = self.now
        super()._spend(ns, label)
        if label != "expert":
            self._keep(label, begin, self.now)

    def _expert(self, expert: int, begin: int, end: int) -> None:
        """One expert on the GPU."""
        assert self._plan is not None
        key = Key(self._plan.demand.layer, expert)
        tokens = self._plan.load[expert]
        flow = self._brought.pop(key, None)
        if flow is not None:
            self.spans[flow] = replace(self.spans[flow], flow=flow)
        self._add("GPU", _name(key), begin, end, "expert", flow, expert=expert, tokens=tokens)

    def _keep(self, label: str, begin: int, end: int) -> None:
        if end > begin:
            name, category = WORDS[label]
            why: dict[str, Any] = {"why": f"waits for {_name(self._awaited)}"} if self._awaited else {}
            self._add(LANE_OF.get(label, "GPU"), name, begin, end, category, **why)

    # What the others do

    def _copied(self, label: str, begin: int, end: int) -> None:
        copy = self.link.current
        assert copy is not None
        more = {"copied_layer": copy.key.layer, "expert": copy.key.expert, "bytes": self.driver.setup.expert_bytes}
        self._add("H2D", _name(copy.key), begin, end, f"fetch_{label}", **more)

    def _landed(self, key: Key, ns: int) -> None:
        self._brought[key] = len(self.spans) - 1  # the link's last period was this copy's
        super()._landed(key, ns)

    def _went_back(self, label: str, begin: int, end: int) -> None:
        self._add("D2H", "victim goes back", begin, end, label, bytes=self.driver.setup.expert_bytes)

    def _computed(self, _: str, begin: int, end: int) -> None:
        assert self._plan is not None
        load, experts = self._plan.load, self._plan.cpu
        name = f"L{self._plan.demand.layer} " + " ".join(f"E{e}" for e in experts)
        self._add("CPU", name, begin, end, "expert", experts=list(experts), tokens=[load[e] for e in experts])

    def _add(
        self, lane: str, name: str, begin: int, end: int, category: str, flow: int | None = None, **more: Any
    ) -> None:
        self.spans.append(Span(lane, name, begin, end, {**self._at, **more}, category, flow))


def _name(key: Key) -> str:
    return f"L{key.layer} E{key.expert}"


def spans_of(
    trace: Steps,
    policy: Policy,
    machine: Machine,
    slots: int,
    steps: int = 0,
    seed: int = 0,
    protect: bool = False,
    slots_at: Callable[[int], int] | None = None,
) -> list[Span]:
    """What every lane does in the first `steps` forward passes (0: all) of a run as `simulate` makes it.

    InputError if the policy fails on the way.
    """
    engines: list[TracedEngine] = []

    def make(*given: Any, **options: Any) -> TracedEngine:
        engines.append(TracedEngine(*given, **options))
        return engines[0]

    wanted = trace if policy.clairvoyant else Limited(trace, steps)  # what it does depends on all that it can foresee
    run = simulate(wanted, policy, machine, slots, seed, protect=protect, slots_at=slots_at, engine_of=make)
    if run.error:
        raise InputError(f"--timeline: {run.error}; nothing was written")
    engines[0].close()
    return [span for span in engines[0].spans if not steps or span.args["step"] < steps]
