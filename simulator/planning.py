"""What a policy's decisions cost in Python here: CPU time inside each policy's own methods, a layer event.

Measured on the machine that runs this, which is not the simulated one; the simulator charges the profile's
`policy.layer` instead, the same for every policy.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..policies.interface import Policy
from ..policies.load import load_policy
from ..traces.synth import synthesize
from ..traces.views import Steps
from .foretold import Foretold
from .machine import Machine
from .run import simulate

ASKED = ("dispatch", "victim", "next_fetch", "layer_ends")
TOLD = ("step_begins", "forecast", "transfer_done", "transfer_dropped", "work_done", "step_ends", "keep_fetch")
SHAPE = "synthetic Qwen3-30B-A3B: 48 layers, 128 experts, top-8; verify steps of up to 9 tokens; made-up forecasts"


def planning_trace(tokens: int) -> Steps:
    """`SHAPE`, of so many generated tokens, three or four a step."""
    made = synthesize("qwen3-30b-a3b", tokens, draft_length=8, acceptance=0.75, sequences=1)
    return Foretold(made, (0.8, 0.7, 0.6))


class Watch:
    """CPU time inside a policy by the driver's calls; a call that a policy makes of itself belongs to its caller. What
    reading the clock takes, which is as much as some calls, is taken off."""

    def __init__(self, policy: Policy) -> None:
        self.ns: dict[str, int] = defaultdict(int)
        self._clock_ns = min(-time.thread_time_ns() + time.thread_time_ns() for _ in range(1000))
        self._inside = False
        for name in ASKED + TOLD:
            setattr(policy, name, self._watched(name, getattr(policy, name)))

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self._inside:
                return method(*args)
            self._inside = True
            begin = time.thread_time_ns()
            try:
                return method(*args)
            finally:
                self.ns[name] += max(0, time.thread_time_ns() - begin - self._clock_ns)
                self._inside = False

        return call


@dataclass(frozen=True, slots=True)
class Planning:
    """us of CPU time a layer event by method, of the cheapest of several repeats; None and `error` if it failed."""

    policy: str
    us: dict[str, float] | None
    error: str | None = None

    @property
    def total(self) -> float | None:
        return None if self.us is None else sum(self.us.values())

    @property
    def rest(self) -> float:
        """What it is told, `layer_ends` aside."""
        return sum((self.us or {}).get(call, 0.0) for call in TOLD)


def planned(spec: str, trace: Steps, machine: Machine, slots: int, repeats: int = 2) -> Planning:
    """Replay the trace `repeats` times; `slots` in all. What the policy raises while it runs is in `error`."""
    layers = len(trace.header.target.moe_layers)
    best: Planning | None = None
    for _ in range(repeats):
        policy = load_policy(spec)
        watch = Watch(policy)
        run = simulate(trace, policy, machine, slots)
        if run.error or not len(run.steps):
            return Planning(spec, None, run.error or "no steps")
        events = layers * len(run.steps)
        found = Planning(spec, {call: ns / 1e3 / events for call, ns in watch.ns.items()})
        if best is None or (found.total or 0.0) < (best.total or 0.0):
            best = found
    assert best is not None, "at least one repeat"
    return best


def planning(
    specs: Sequence[str],
    trace: Steps,
    machine: Machine,
    slots: int,
    repeats: int = 2,
    progress: Callable[[int], None] | None = None,
) -> list[Planning]:
    """One for each policy, in order. `progress`: told how many are done."""
    found = []
    for spec in specs:
        found.append(planned(spec, trace, machine, slots, repeats))
        if progress:
            progress(len(found))
    return found
