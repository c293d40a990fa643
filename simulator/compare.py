"""Several policies over one trace on one machine: every policy, cache size and mode is a run of its own.

Modes: "sd" replays the trace with its verify steps; "ar" the same text without speculation. A policy that fails does
not stop the others. The order of the outcomes, and every number in them, is the same for any number of processes.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..policies.load import load_policy
from ..traces.redraft import windowed
from ..traces.views import Steps, autoregressive
from .engine import Run
from .machine import Machine, rates_for
from .metrics import OK, Limited, Load, Metrics, Table, gaps, load_of, measure, status_of, table_of
from .run import simulate
from .verdict import Verdict, judge

SD, AR = "sd", "ar"
OPTIMUM, BASE = "min", "ar-lru"


@dataclass(frozen=True, slots=True)
class Source:
    """A trace and what to take of it: the first `limit` steps; `window` > 0 assumes a draft of that length."""

    trace: Steps
    limit: int = 0
    window: int = 0
    acceptance: float = 0.0
    seed: int = 0

    def view(self, mode: str) -> Steps:
        """The steps to replay in a mode. InputError if a draft is assumed for a trace that has one."""
        trace = Limited(self.trace, self.limit)
        if mode == AR:
            return autoregressive(trace)
        return windowed(trace, self.window, self.acceptance, self.seed) if self.window else trace

    @property
    def speculates(self) -> bool:
        return self.window > 0 or self.trace.header.acceptance != "none"


@dataclass(frozen=True, slots=True)
class Case:
    """One run to do: a policy as it was asked for, expert slots in all, and the mode."""

    policy: str
    slots: int
    mode: str


@dataclass(slots=True)
class Outcome:
    """What became of a case. A failed one has no metrics and no steps; `reference` marks the offline optimum."""

    policy: str
    slots: int
    mode: str
    status: str
    lossless: bool
    reference: bool
    metrics: Metrics = field(default_factory=dict)
    steps: Table = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.status.startswith("failed")

    @property
    def speed(self) -> float:
        """Tokens/s of a run that may be ranked, else 0."""
        value = self.metrics.get("tokens_per_s") if self.status == OK else None
        return float(value or 0.0)


@dataclass(frozen=True, slots=True)
class Job:
    """What every case shares."""

    source: Source
    machine: Machine
    loads: dict[str, Load]
    seed: int = 0


def cases_for(policies: Sequence[str], slots: Sequence[int], modes: Sequence[str], optimum: bool = True) -> list[Case]:
    """Cache sizes x policies x modes, the optimum last of its size."""
    wanted = list(dict.fromkeys(policies))
    if optimum:
        wanted = [p for p in wanted if p != OPTIMUM] + [OPTIMUM]
    return [Case(policy, size, mode) for size in dict.fromkeys(slots) for policy in wanted for mode in modes]


def loads_for(source: Source, modes: Sequence[str]) -> dict[str, Load]:
    return {mode: load_of(source.view(mode)) for mode in modes}


def run_case(job: Job, case: Case, progress: Callable[[int], None] | None = None) -> Outcome:
    """Replay and measure. InputError for a damaged trace; a policy's own failure is in the outcome's status."""
    policy = load_policy(case.policy)
    trace = job.source.view(case.mode)
    run = simulate(trace, policy, job.machine, case.slots, job.seed, progress)
    shape = trace.header.target
    outcome = Outcome(case.policy, case.slots, case.mode, status_of(run, shape), policy.lossless, policy.clairvoyant)
    if not outcome.failed:
        _measure(outcome, run, trace, job)
    return outcome


def _measure(outcome: Outcome, run: Run, trace: Steps, job: Job) -> None:
    shape = trace.header.target
    rates = rates_for(job.machine, shape, trace.header.draft)
    outcome.steps = table_of(run.steps)
    outcome.metrics = measure(run, outcome.steps, shape, rates, job.loads[outcome.mode])


def run_cases(
    job: Job, cases: Sequence[Case], jobs: int = 1, progress: Callable[[int], None] | None = None
) -> list[Outcome]:
    """All cases, in order. `progress` is told how many steps are done, over all cases."""
    outcomes: list[Outcome] = []

    def tell(steps: int) -> None:
        if progress:
            progress(sum(job.loads[c.mode].steps for c in cases[: len(outcomes)]) + steps)

    for outcome in _each(job, cases, jobs, tell):
        outcomes.append(outcome)
        tell(0)
    _add_gaps(outcomes)
    return outcomes


def _each(job: Job, cases: Sequence[Case], jobs: int, progress: Callable[[int], None]) -> Iterator[Outcome]:
    if jobs <= 1:
        yield from (run_case(job, case, progress) for case in cases)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of whatever is loaded
    with context.Pool(min(jobs, len(cases)), _start_worker, (job,)) as pool:
        yield from pool.imap(_work, cases)


_job: Job | None = None


def _start_worker(job: Job) -> None:
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends the pool


def _work(case: Case) -> Outcome:
    assert _job is not None
    return run_case(_job, case)


def find(outcomes: Sequence[Outcome], policy: str, slots: int, mode: str) -> Outcome | None:
    """The outcome of a case, if it ran to its end."""
    for o in outcomes:
        if (o.policy, o.slots, o.mode) == (policy, slots, mode) and not o.failed:
            return o
    return None


def _add_gaps(outcomes: Sequence[Outcome]) -> None:
    for o in outcomes:
        best = find(outcomes, OPTIMUM, o.slots, o.mode)
        if o.failed or best is None or o.metrics["hit_rate_unique"] is None:
            continue
        base = find(outcomes, BASE, o.slots, o.mode)
        o.metrics |= gaps(o.metrics, best.metrics, base.metrics if base else None)


def winner(outcomes: Sequence[Outcome], slots: int) -> Outcome | None:
    """The fastest run of a cache size, in whichever mode, by a policy that keeps tokens exact and needs no future."""
    fit = [o for o in outcomes if o.slots == slots and o.lossless and not o.reference and o.speed > 0]
    return max(fit, key=lambda o: o.speed, default=None)


def verdicts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Whether speculation pays, for every policy and cache size with an "ok" run in both modes."""
    found = []
    for sd in outcomes:
        ar = find(outcomes, sd.policy, sd.slots, AR)
        if sd.mode == SD and sd.speed > 0 and ar is not None and ar.speed > 0:
            found.append(judge(sd.policy, sd.slots, sd.metrics, ar.metrics))
    return [v for v in found if v is not None]
