"""Search a policy's parameters on one part of a trace, and judge the best ones on the other.

The score that chose a setting says nothing about that setting: among many, one is lucky. So a part of the trace is held
out of the search, and only what the winner does there is a result.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from ..policies.load import load_policy, parameter_types
from ..traces.errors import InputError
from ..traces.schema import Header, Step
from ..traces.views import Steps
from .ablate import with_parameters
from .compare import Case, Job, Outcome, Source, loads_for, run_cases
from .machine import Machine
from .metrics import OK

MOST = 10_000  # settings that a grid may have if all are to be tried
SCORES = ("tokens_per_s", "hit_rate_unique", "hit_rate_assignment")  # larger is better


@dataclass(frozen=True, slots=True)
class Portion:
    """Steps of some sequences, or, if `sequences` is None, steps start..stop - 1."""

    trace: Steps
    words: str
    sequences: frozenset[int] | None = None
    start: int = 0
    stop: int | None = None

    @property
    def header(self) -> Header:
        header = self.trace.header
        return replace(header, notes=f"{header.notes} Only {self.words}.".strip())

    def steps(self) -> Iterator[Step]:
        if self.sequences is None:
            return islice(iter(self.trace.steps()), self.start, self.stop)
        wanted = self.sequences
        return (step for step in self.trace.steps() if step.sequence in wanted)


def halves(trace: Steps, share: float) -> tuple[Portion, Portion]:
    """The training part, about `share` of the steps, and the held-out rest: whole sequences if there are several, else
    the first steps and the others. InputError if either would be empty."""
    if not 0 < share < 1:
        raise InputError(f"--train {share:g}: give a share between 0 and 1; the rest is held out to judge the winner")
    lengths = Counter(step.sequence for step in trace.steps())
    total = sum(lengths.values())
    if total < 2:
        raise InputError("tune: one step cannot be parted into training and held-out; give a longer trace")
    if len(lengths) == 1:
        cut = min(max(1, round(share * total)), total - 1)
        first, rest = f"steps 1 to {cut}", f"steps {cut + 1} to {total}"
        return Portion(trace, first, stop=cut), Portion(trace, rest, start=cut)
    order, sums = list(lengths), np.cumsum(list(lengths.values()))
    cut = min(max(1, int(np.searchsorted(sums, share * total)) + 1), len(order) - 1)
    parts = frozenset(order[:cut]), frozenset(order[cut:])
    words = [f"{len(p)} of {len(order)} sequences, {sum(lengths[s] for s in p)} of {total} steps" for p in parts]
    return Portion(trace, f"the first {words[0]}", parts[0]), Portion(trace, f"the last {words[1]}", parts[1])


def values_of(text: str, kind: Any) -> tuple[str, list[str]]:
    """A parameter's name and the values to try, of "key=a,b,c" or "key=lo..hi:n" (n values, evenly from lo to hi,
    whole ones if `kind` of the key is int). InputError for anything else."""
    key, equals, given = text.partition("=")
    bad = InputError(f"--param {text}: write key=a,b,c or key=lo..hi:n, for example smoothing=0.05..0.5:10")
    if not (key.strip() and equals and given.strip()):
        raise bad
    key = key.strip()
    if ".." not in given:
        return key, list(dict.fromkeys(part.strip() for part in given.split(",")))
    low, _, rest = given.partition("..")
    high, _, count = rest.partition(":")
    try:
        numbers = np.linspace(float(low), float(high), int(count))
    except ValueError:
        raise bad from None
    if not numbers.size:
        raise bad
    whole = kind(key) is int
    return key, list(dict.fromkeys(str(round(n)) if whole else f"{n:.6g}" for n in numbers.tolist()))


def settings(spec: str, params: Sequence[str], tries: int, seed: int) -> list[str]:
    """The policies to try, in the order of the grid: all of it, or `tries` > 0 of it drawn without repeats.

    InputError for a policy or a value that there is not, for no parameter, or too many combinations.
    """
    types = parameter_types(type(load_policy(spec)))
    if not params:
        raise InputError(f"--param: say what to search, as key=a,b,c; {spec} has {', '.join(types) or 'no parameters'}")
    grid: dict[str, list[str]] = dict(values_of(text, types.get) for text in params)
    total = prod(map(len, grid.values()))
    if not tries and total > MOST:
        raise InputError(f"--param: {total} settings are too many to try all; give --tries N to draw some")
    chosen = range(total)
    if 0 < tries < total:
        rng = np.random.default_rng(seed)
        chosen = sorted(_distinct(rng, total, tries))
    combinations = (_combination(i, list(grid.values())) for i in chosen)
    found = [with_parameters(spec, dict(zip(grid, values, strict=True))) for values in combinations]
    for one in found:
        load_policy(one)
    return found


def _distinct(rng: np.random.Generator, total: int, tries: int) -> set[int]:
    drawn: set[int] = set()
    while len(drawn) < tries:
        drawn.add(int(rng.integers(total)))
    return drawn


def _combination(index: int, values: Sequence[Sequence[str]]) -> list[str]:
    """The `index`-th of the product, the last factor turning fastest."""
    found = []
    for options in reversed(values):
        index, place = divmod(index, len(options))
        found.append(options[place])
    return found[::-1]


@dataclass(frozen=True, slots=True)
class Tuned:
    """winner: the setting that scored best in training. held_out, held_out_default: the result. Scores are of the
    metric named; `training` scores are those that chose, in the order of `tried`, None for runs that were not ok."""

    policy: str
    winner: str
    metric: str
    held_out: float | None
    held_out_default: float | None
    tried: tuple[str, ...]
    training: tuple[float | None, ...]
    training_default: float | None
    parts: tuple[str, str]

    @property
    def gain(self) -> float | None:
        """Winner over default where neither was chosen by it."""
        if self.held_out is None or not self.held_out_default:
            return None
        return self.held_out / self.held_out_default

    @property
    def training_score(self) -> float | None:
        return self.training[self.tried.index(self.winner)]


@dataclass(frozen=True, slots=True)
class Search:
    """What to tune on: see `Job` and `Case`. share: of the steps, for training."""

    source: Source
    machine: Machine
    slots: int
    mode: str
    share: float = 0.5
    metric: str = "tokens_per_s"
    seed: int = 0

    def job(self, portion: Portion) -> Job:
        source = replace(self.source, trace=portion, limit=0)
        return Job(source, self.machine, loads_for(source, [self.mode]), self.seed)


def tune(
    search: Search,
    spec: str,
    tried: Sequence[str],
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Tuned:
    """Try the settings and `spec` itself on the training part; run the best and `spec` on the held-out part.

    progress: told steps done and steps in all. InputError if no setting ran with the status ok.
    """
    if search.metric not in SCORES:
        raise InputError(f"--metric {search.metric}: choose one of {', '.join(SCORES)}")
    parts = halves(search.source.trace, search.share)
    training, judging = (search.job(part) for part in parts)
    steps = [job.loads[search.mode].steps for job in (training, judging)]
    total = steps[0] * (len(tried) + 1) + steps[1] * 2

    def scores(job: Job, specs: Sequence[str], before: int) -> list[float | None]:
        def tell(done: int) -> None:
            if progress:
                progress(before + done, total)

        cases = [Case(one, search.slots, search.mode) for one in specs]
        return [_score(o, search.metric) for o in run_cases(job, cases, jobs, tell)]

    default, *found = scores(training, [spec, *tried], 0)
    known = [(value, -i) for i, value in enumerate(found) if value is not None]
    if not known:
        raise InputError(f"tune: no setting of {spec} ran with the status ok in training; see spac-sim run")
    winner = tried[-max(known)[1]]
    best, usual = scores(judging, [winner, spec], steps[0] * (len(tried) + 1))
    return Tuned(
        spec, winner, search.metric, best, usual, tuple(tried), tuple(found), default, (parts[0].words, parts[1].words)
    )


def _score(outcome: Outcome, metric: str) -> float | None:
    value = outcome.metrics.get(metric) if outcome.status == OK else None
    return None if value is None else float(value)
