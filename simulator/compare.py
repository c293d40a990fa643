"""Several policies over one trace on one machine: every policy, cache size and mode is a run of its own.

Modes: "sd" replays the trace with its verify steps, "ar" the same text without speculation. A policy that fails does
not stop the others. The order of the outcomes, and every number in them, is the same for any number of processes.

Beside the policies stand references: the offline optimum MIN, AR-LRU as the base of "gap closed" (run even if nobody
asked for it, and then not ranked), and the fluid bound, which no lossless policy can be faster than.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from ..policies.interface import Policy
from ..policies.load import load_policy
from ..traces.batch import batched
from ..traces.redraft import redrafted, windowed
from ..traces.schema import DraftShape
from ..traces.views import Steps, autoregressive
from .accesses import Accesses
from .bounds import Bounds, bounds
from .capacity import slots_for_context, taken_with
from .engine import Run, future_of
from .machine import Machine, rates_for
from .metrics import OK, Limited, Load, Metrics, gaps, load_of, measure, status_of, time_gap
from .occupancy import Occupancy
from .prefetch_metrics import Layers, layer_spread
from .regret import watch
from .run import simulate
from .steptimes import Table
from .verdict import Verdict, judge

SD, AR = "sd", "ar"
OPTIMUM, BASE = "min", "ar-lru"
LENGTHS = (1, 2, 4, 8)  # draft lengths to try where none are named


@dataclass(frozen=True, slots=True)
class Source:
    """A trace and what to take of it: the first `limit` steps; `window` > 0 assumes a draft of that length, accepted
    with the chance `acceptance`, with the costs of `draft` (None: drafting is free); `batch` sequences at a time."""

    trace: Steps
    limit: int = 0
    window: int = 0
    acceptance: float = 0.0
    seed: int = 0
    draft: DraftShape | None = None
    batch: int = 1

    def view(self, mode: str, draft_length: int | None = None) -> Steps:
        """The steps to replay in a mode; `draft_length` None: as recorded or assumed.

        InputError if a draft is assumed for a trace that has one, or another length is wanted of one that has none.
        """
        steps = self._steps(Limited(self.trace, self.limit), mode, draft_length)
        return steps if self.batch == 1 else batched(steps, self.batch)

    def _steps(self, trace: Steps, mode: str, draft_length: int | None) -> Steps:
        if mode == AR:
            return autoregressive(trace)
        if self.window:
            return windowed(trace, draft_length or self.window, self.acceptance, self.seed, self.draft)
        return trace if draft_length is None else redrafted(trace, draft_length, self.seed)

    @property
    def speculates(self) -> bool:
        return self.window > 0 or self.trace.header.acceptance != "none"


@dataclass(frozen=True, slots=True)
class Case:
    """One run to do: a policy as it was asked for, expert slots in all, and the mode.

    draft_length: cut the text again for drafts of that length. size: which cases are compared with each other; the
    slots, unless a draft leaves less memory for experts than plain decoding has. reference: not to be ranked.
    """

    policy: str
    slots: int
    mode: str
    draft_length: int | None = None
    size: int | None = None
    reference: bool = False

    @property
    def view(self) -> str:
        """Names the steps that it replays."""
        return self.mode if self.draft_length is None else f"{self.mode}, draft length {self.draft_length}"


@dataclass(slots=True)
class Outcome:
    """What became of a case. A failed one has no metrics and no steps.

    reference: the offline optimum, or a base that nobody asked for. draft_length: the trace's, or what it was `cut`
    to; 0 in plain decoding. bound: of everything that could have been done with these steps and slots. residency:
    [L, E], how often each expert was resident, where the job wants to know.
    """

    policy: str
    slots: int
    mode: str
    status: str
    lossless: bool
    reference: bool
    size: int
    draft_length: int = 0
    cut: bool = False
    metrics: Metrics = field(default_factory=dict)
    steps: Table = field(default_factory=dict)
    layers: Layers = field(default_factory=dict)
    bound: Bounds | None = None
    residency: np.ndarray | None = None

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
    """What every case shares. `loads` by `Case.view`. protect: prefill leaves the cache alone. regret: also judge
    every eviction, which takes time. bounded: also work out the bounds. occupancy: also keep who was resident. vram:
    bytes of the card, of which keys and values take more as the context grows (None: slots stay as they are); pooled:
    some policy shares slots."""

    source: Source
    machine: Machine
    loads: dict[str, Load]
    seed: int = 0
    protect: bool = False
    regret: bool = False
    bounded: bool = False
    occupancy: bool = False
    vram: int | None = None
    pooled: bool = False

    def slots_at(self, trace: Steps) -> Callable[[int], int] | None:
        """Slots in all beside the keys and values of so many tokens."""
        if self.vram is None:
            return None
        vram, header = self.vram, trace.header
        return cache(
            lambda context: slots_for_context(vram, self.machine, header.target, header.draft, context, self.pooled)
        )


def cases_for(
    policies: Sequence[str], sizes: Sequence[int | Mapping[str, int]], modes: Sequence[str], optimum: bool = True
) -> list[Case]:
    """Cache sizes x policies x modes, references last of their size. A size is a number of slots, or one a mode."""
    asked = [p for p in dict.fromkeys(policies) if not (optimum and p == OPTIMUM)]
    added = [p for p in (BASE, OPTIMUM) if p not in asked] if optimum else []
    cases = []
    for size in sizes:
        slots = size if isinstance(size, Mapping) else dict.fromkeys(modes, size)
        cases += [
            Case(policy, slots[mode], mode, size=slots[modes[0]], reference=policy in added)
            for policy in [*asked, *added]
            for mode in modes
        ]
    return list(dict.fromkeys(cases))


def length_cases(outcomes: Sequence[Outcome], lengths: Sequence[int], only: Outcome | None = None) -> list[Case]:
    """The speculative runs again with other draft lengths: of all ranked policies and sizes, or those of `only`."""
    chosen = [o for o in outcomes if o.mode == SD and not o.reference and not o.cut and o.status == OK]
    if only:
        chosen = [o for o in chosen if (o.policy, o.size) == (only.policy, only.size)]
    return [Case(o.policy, o.slots, SD, n, o.size) for o in chosen for n in dict.fromkeys(lengths) if n > 0]


def loads_for(source: Source, modes: Sequence[str]) -> dict[str, Load]:
    return {mode: load_of(source.view(mode)) for mode in modes}


def loads_of(source: Source, cases: Sequence[Case]) -> dict[str, Load]:
    views = {c.view: c for c in cases}
    return {name: load_of(source.view(c.mode, c.draft_length)) for name, c in views.items()}


def run_case(job: Job, case: Case, progress: Callable[[int], None] | None = None) -> Outcome:
    """Replay and measure. InputError for a damaged trace; a policy's own failure is in the outcome's status."""
    policy = load_policy(case.policy)
    trace = job.source.view(case.mode, case.draft_length)
    shape, load = trace.header.target, job.loads[case.view]
    picks = None
    if job.regret:
        picks = watch(policy, future_of(shape, trace.steps()), len(shape.moe_layers), load.steps)
    watched = Occupancy(len(shape.moe_layers), shape.experts, load.steps) if job.occupancy else None

    def done(steps: int) -> None:
        if watched:
            watched.after_step(steps)
        if progress:
            progress(steps)

    more: dict[str, Any] = {"protect": job.protect, "slots_at": job.slots_at(trace)}
    if watched:
        more["engine_of"] = watched.engine_of
    run = simulate(trace, policy, job.machine, case.slots, job.seed, done, **more)
    outcome = Outcome(
        policy=case.policy,
        slots=case.slots,
        mode=case.mode,
        status=status_of(run, shape, load),
        lossless=policy.lossless,
        reference=policy.clairvoyant or case.reference,
        size=case.slots if case.size is None else case.size,
        draft_length=trace.header.draft_length,
        cut=case.draft_length is not None,
    )
    if not outcome.failed:
        _measure(outcome, run, trace, load, job.machine, policy)
        outcome.metrics |= picks.metrics() if picks else {}
        outcome.residency = watched.shares if watched else None
    return outcome


def _measure(outcome: Outcome, run: Run, trace: Steps, load: Load, machine: Machine, policy: Policy) -> None:
    shape, draft = trace.header.target, trace.header.draft
    rates = rates_for(machine, shape, draft)
    outcome.steps, outcome.layers = run.steps.table(), run.layers
    outcome.metrics = measure(run, outcome.steps, shape, rates, load, policy.channels)
    outcome.metrics |= layer_spread(run.layers, run.decode.assignments // len(shape.moe_layers))
    held = taken_with(outcome.slots, machine, shape, draft, load.context, policy.scope == "global")
    outcome.metrics["vram_bytes"] = sum(held.values())


def run_cases(
    job: Job, cases: Sequence[Case], jobs: int = 1, progress: Callable[[int], None] | None = None
) -> list[Outcome]:
    """All cases, in order. `progress` is told how many steps are done, over all cases."""
    outcomes: list[Outcome] = []

    def tell(steps: int) -> None:
        if progress:
            progress(sum(job.loads[c.view].steps for c in cases[: len(outcomes)]) + steps)

    for outcome in _each(job, cases, jobs, tell):
        outcomes.append(outcome)
        tell(0)
    if job.bounded:
        _add_bounds(job, outcomes)
    _add_gaps(outcomes)
    return outcomes


def _each(job: Job, cases: Sequence[Case], jobs: int, progress: Callable[[int], None]) -> Iterator[Outcome]:
    if min(jobs, len(cases)) <= 1:
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


def find(outcomes: Sequence[Outcome], policy: str, size: int, mode: str) -> Outcome | None:
    """The outcome of a case at its recorded draft length, if it ran to its end."""
    for o in outcomes:
        if (o.policy, o.size, o.mode, o.cut) == (policy, size, mode, False) and not o.failed:
            return o
    return None


def _add_bounds(job: Job, outcomes: Sequence[Outcome]) -> None:
    """One set of bounds for every number of slots and mode; runs at other draft lengths, also of a policy that chose
    its own, get none: theirs were other steps."""
    found: dict[tuple[int, str], Bounds] = {}
    accesses: dict[str, Accesses] = {}
    for o in outcomes:
        same_steps = not o.cut and o.metrics.get("decode_steps") in (None, job.loads[o.mode].decodes)
        if same_steps and o.slots:
            if (o.slots, o.mode) not in found:
                trace = job.source.view(o.mode)
                if o.mode not in accesses:
                    accesses[o.mode] = Accesses.of(trace)
                rates = rates_for(job.machine, trace.header.target, trace.header.draft)
                found[o.slots, o.mode] = bounds(trace, rates, o.slots, accesses=accesses[o.mode])
            o.bound = found[o.slots, o.mode]


def _add_gaps(outcomes: Sequence[Outcome]) -> None:
    for o in outcomes:
        if o.failed or o.cut:
            continue
        base = find(outcomes, BASE, o.size, o.mode)
        best = find(outcomes, OPTIMUM, o.size, o.mode)
        if best and o.metrics["hit_rate_unique"] is not None:
            o.metrics |= gaps(o.metrics, best.metrics, base.metrics if base else None)
        if o.bound:
            o.metrics |= time_gap(o.metrics, base.metrics if base else None, o.bound.layered_ns)


def winner(outcomes: Sequence[Outcome], size: int) -> Outcome | None:
    """The fastest run of a cache size, in whichever mode, by a policy that keeps tokens exact and needs no future."""
    fit = [o for o in outcomes if o.size == size and not o.cut and o.lossless and not o.reference and o.speed > 0]
    return max(fit, key=lambda o: o.speed, default=None)


def by_length(outcomes: Sequence[Outcome], policy: str, size: int) -> dict[int, Outcome]:
    """Runs of one policy and size by draft length, plain decoding being 0; ascending."""
    mine = [o for o in outcomes if (o.policy, o.size) == (policy, size) and o.speed > 0]
    found = {o.draft_length: o for o in sorted(mine, key=lambda o: o.cut)}
    return dict(sorted(found.items()))


def verdicts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Whether speculation pays, for every policy and cache size with an "ok" run in both modes."""
    found = []
    for sd in outcomes:
        ar = find(outcomes, sd.policy, sd.size, AR)
        if sd.mode == SD and not sd.cut and sd.speed > 0 and ar is not None and ar.speed > 0:
            speeds = {n: o.speed for n, o in by_length(outcomes, sd.policy, sd.size).items()}
            found.append(judge(sd.policy, sd.size, sd.metrics, ar.metrics, speeds, sd.draft_length))
    return [v for v in found if v is not None]
