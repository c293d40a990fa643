"""What the simulator says of a run that has just been made: same trace, policy, slots and machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..policies.interface import Policy
from ..simulator.machine import Machine, Quantity
from ..simulator.run import simulate
from ..simulator.timeline import MEASURED, SIMULATED, Timeline
from ..simulator.traced import spans_of
from ..traces.errors import InputError
from ..traces.reader import open_trace
from ..traces.schema import Kind
from .session import Result
from .times import Deciding, StepTimes


@dataclass(frozen=True, slots=True)
class Prediction:
    """Tokens/s after prefill, simulated and measured, and where the time of an output token went (ms), both ways."""

    predicted: float
    measured: float
    predicted_split: dict[str, float]
    measured_split: dict[str, float]

    @property
    def error(self) -> float:
        """Relative: +0.1 is a prediction ten per cent too fast."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def predict(trace: Path, policy: Policy, machine: Machine, result: Result, seed: int = 0) -> Prediction:
    """Replay a recorded run on the real clock.

    `policy` is a fresh object of the run's policy. The decision time charged is the run's own mean.
    """
    steps = _steps(result)
    run = simulate(open_trace(trace), policy, priced_by_run(machine, steps), result.slots, seed)
    if run.error:
        raise InputError(run.error)
    simulated = [s for s in run.steps if s.kind is not Kind.PREFILL]
    tokens = max(1, result.new_tokens)
    wall = sum(s.wall_ns for s in simulated)
    return Prediction(
        predicted=tokens * 1e9 / wall if wall else 0.0,
        measured=result.tokens_per_s,
        predicted_split=per_token([s.gpu for s in simulated], tokens),
        measured_split=per_token([s.split() for s in steps], tokens),
    )


def compare_lanes(trace: Path, policy: Policy, machine: Machine, result: Result, seed: int = 0) -> Timeline:
    """What every lane did in a run that kept its spans, and in the simulation that predicts it; as `predict`."""
    simulated = spans_of(open_trace(trace), policy, priced_by_run(machine, _steps(result)), result.slots, seed=seed)
    return {SIMULATED: simulated, MEASURED: result.spans}


def _steps(result: Result) -> list[StepTimes]:
    """All steps after prefill."""
    return [s for s in result.times if isinstance(s, StepTimes) and s.kind is not Kind.PREFILL]


def priced_by_run(machine: Machine, steps: Sequence[StepTimes]) -> Machine:
    """The machine with the run's own decision time."""
    return with_policy_time(machine, Deciding.of(steps))


def with_policy_time(machine: Machine, deciding: Deciding, source: str = "mean of the run") -> Machine:
    """The same machine with the decision time that a run really had."""
    times = {"policy.layer": deciding.layer, "policy.layer_end": deciding.ending}
    entries = {name: Quantity(max(0.0, ns), "measured", source) for name, ns in times.items()}
    for name, ns in (("gpu.first_expert", deciding.call), ("link.prefetch_fixed", deciding.prefetch)):
        entries[name] = Quantity(machine[name] + ns, "measured", f"the profile's, and deciding beside it, {source}")
    return replace(machine, quantities={**machine.quantities, **entries})


def per_token(splits: Sequence[Mapping[str, int]], tokens: int) -> dict[str, float]:
    """ms an output token, by cause."""
    total: dict[str, float] = {}
    for split in splits:
        for name, ns in split.items():
            total[name] = total.get(name, 0.0) + ns / tokens / 1e6
    return total
