"""Simulator against live on this machine: hit rates and time per output token (TPOT) of both, policy by policy.

A shared machine's speed changes by the second and by more than the model errs. So a yardstick, a piece of fixed work,
is timed before and after every run and every measurement of the calibration (`quiet.Pace`): calibrated times are kept
as multiples of it, and a run is predicted at the speed of those beside it. What others disturb is repeated, together
with its yardsticks. What is compared is the median over the repetitions. A policy's decision time is charged as it
was in the other repetitions, so no run helps to predict itself.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from ..policies.driver import Counters, Driver
from ..policies.load import load_policy
from ..simulator.engine import Engine
from ..simulator.machine import Machine, Quantity, Rates, rates_for
from ..simulator.run import simulate
from ..traces.errors import InputError
from ..traces.prompts import Prompt
from ..traces.reader import open_trace
from ..traces.schema import Kind
from ..traces.speculate import Options
from ..traces.views import Steps
from .calibrate import YARD_NS, EmulatedLink, blank, observe_round, profile
from .fits import Round, fit
from .models import Models
from .predict import per_token, with_policy_time
from .probe import PairSubject, RigSubject, Subject
from .quiet import TRIES, Pace
from .replay import Rig, first_steps, replay
from .session import Settings, run
from .times import Deciding, StepTimes

HITS_POINTS = 1.0  # how far hit rates may be apart
TPOT_ERROR = 0.10
TOKENS = 80  # of a measurement of the calibration: twice an ordinary one's, so that it is as long as a run
PAUSE_NS = 2.5e6  # that stands for drafting a token where nothing drafts
APART = 0.10  # policies that differ by more must come in the same order


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: the emulated link, slots a layer, a policy."""

    link: EmulatedLink
    slots: int
    policy: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A run, live or simulated: ms a token, share of needed experts that were resident."""

    tpot: float
    hits: float
    split: dict[str, float]
    deciding: Deciding = field(default_factory=Deciding)


@dataclass(slots=True)
class Row:
    """One cell: what each repetition measured and what was predicted for it."""

    cell: Cell
    live: list[Sample] = field(default_factory=list)
    simulated: list[Sample] = field(default_factory=list)
    yards: list[float] = field(default_factory=list)  # ns of the yardstick beside each live run
    others: list[float] = field(default_factory=list)  # cores that other processes took meanwhile
    exact: bool | None = None  # hits under the virtual clock are those of the simulator

    @property
    def measured(self) -> float:
        return median(s.tpot for s in self.live)

    @property
    def predicted(self) -> float:
        return median(s.tpot for s in self.simulated)

    @property
    def errors(self) -> list[float]:
        """By repetition; +0.1 is ten per cent too slow a prediction."""
        return [s.tpot / m.tpot - 1 for s, m in zip(self.simulated, self.live, strict=True)]

    @property
    def error(self) -> float:
        return median(self.errors)

    @property
    def points(self) -> float:
        """Hit rate simulated less live, in percentage points."""
        return 100 * median(s.hits - m.hits for s, m in zip(self.simulated, self.live, strict=True))

    def good(self) -> bool:
        return abs(self.error) <= TPOT_ERROR and abs(self.points) <= HITS_POINTS and self.exact is not False


class Stage(Protocol):
    """What runs: `live` on this machine, `trace` what it routes, for the policy that asks gates ahead or not."""

    name: str

    @property
    def subject(self) -> Subject: ...
    def drafting(self, machine: Machine) -> Machine:
        """The machine with what drafting takes here, if no calibration says so."""
        ...

    def live(self, cell: Cell, machine: Machine) -> Sample: ...
    def virtual(self, cell: Cell, machine: Machine) -> Counters: ...
    def trace(self, cell: Cell) -> Steps: ...


@dataclass(slots=True)
class PairStage:
    """A pair of models that answers prompts; its traces go to `folder`, one a policy."""

    models: Models
    prompts: Sequence[Prompt]
    options: Options
    folder: Path
    name: str = "embedded pair"
    tokens: int = TOKENS

    @property
    def subject(self) -> Subject:
        return PairSubject(self.models, self.tokens)

    def drafting(self, machine: Machine) -> Machine:
        return machine

    def live(self, cell: Cell, machine: Machine) -> Sample:
        result = run(self.models, load_policy(cell.policy), self.prompts, self._settings(cell, machine))
        read = sum(g.seconds.get("draft_prefill", 0.0) for g in result.generations)
        times = [s for s in result.times if isinstance(s, StepTimes)]
        return live_sample(times, result.new_tokens, result.decode, round(read * 1e9))

    def virtual(self, cell: Cell, machine: Machine) -> Counters:
        settings = self._settings(cell, machine, "virtual", self._file(cell))
        return run(self.models, load_policy(cell.policy), self.prompts, settings).decode

    def trace(self, cell: Cell) -> Steps:
        """Written by the virtual clock's run, which comes first."""
        return open_trace(self._file(cell))

    def _file(self, cell: Cell) -> Path:
        return self.folder / f"{cell.policy}.spac".replace("/", "_")

    def _settings(self, cell: Cell, machine: Machine, clock: Any = "real", record: Path | None = None) -> Settings:
        total = cell.slots * len(self.models.pair.shape.moe_layers)
        return Settings(machine, total, clock, self.options, record=record)


@dataclass(slots=True)
class RigStage:
    """A trace's routing on random experts; its first `limit` steps."""

    rig: Rig
    steps: Steps
    limit: int
    name: str

    @property
    def subject(self) -> Subject:
        return RigSubject(self.rig, 4 * self.rig.shape.top_k)

    def drafting(self, machine: Machine) -> Machine:
        """A pause of PAUSE_NS a token, of which the profile's launches are a part."""

        def made(ns: float) -> Machine:
            entry = Quantity(ns, "assumed", "a pause stands for drafting")
            return replace(machine, quantities={**machine.quantities, "gpu.draft_fixed": entry})

        launches = rates_for(made(0.0), self.rig.shape, self.rig.draft_shape).draft_token_ns
        return made(max(0.0, PAUSE_NS - launches))

    def live(self, cell: Cell, machine: Machine) -> Sample:
        total = cell.slots * len(self.rig.shape.moe_layers)
        found = replay(self.rig, self.steps, load_policy(cell.policy), Settings(machine, total), self.limit)
        return live_sample(found.times, sum(found.emitted), found.decode)

    def virtual(self, cell: Cell, machine: Machine) -> Counters:
        total = cell.slots * len(self.rig.shape.moe_layers)
        settings = Settings(machine, total, "virtual")
        return replay(self.rig, self.steps, load_policy(cell.policy), settings, self.limit).decode

    def trace(self, cell: Cell) -> Steps:
        return first_steps(self.steps, self.limit)


def live_sample(times: Sequence[StepTimes], tokens: int, count: Counters, read_ns: int = 0) -> Sample:
    """What a live run's steps after prefill come to, without the `read_ns` in which the draft read the prompts."""
    steps = [s for s in times if s.kind is not Kind.PREFILL]
    split = per_token([*(s.split() for s in steps), {"draft": -read_ns}], tokens)
    return Sample(sum(split.values()), _hits(count), split, Deciding.of(steps))


def simulated_sample(
    trace: Steps, policy: str, told: Machine, slots: int, charged: Machine | None = None
) -> tuple[Sample, Counters]:
    """The same of a simulation; InputError if the policy fails. `slots` is a total.

    told: whose costs the policy hears, as it does live. charged: what time is spent by, if that was measured anew.
    """
    rates = rates_for(charged or told, trace.header.target, trace.header.draft)

    def engine(driver: Driver, _: Rates, *more: Any, **options: Any) -> Engine:
        return Engine(driver, rates, *more, **options)

    found = simulate(trace, load_policy(policy), told, slots, engine_of=engine)
    if found.error:
        raise InputError(found.error)
    steps = [s for s in found.steps if s.kind is not Kind.PREFILL]
    tokens = max(1, sum(s.emitted for s in steps))
    split = per_token([s.gpu for s in steps], tokens)
    return Sample(_ms(s.wall_ns for s in steps) / tokens, _hits(found.decode), split), found.decode


def _ms(ns: Iterable[int]) -> float:
    return sum(ns) / 1e6


def _hits(count: Counters) -> float:
    return count.hits / max(1, count.needed)


def contest(
    stage: Stage,
    cells: Sequence[Cell],
    repetitions: int = 5,
    tell: Callable[[str], None] = lambda _: None,
    tries: int = TRIES,
) -> list[Row]:
    """Measure and predict every cell. `tell` is told what is going on; `tries` are those of `Pace`.

    Policies hear the costs of the first calibration, live and simulated.
    """
    rows = [Row(cell) for cell in cells]
    subject = stage.subject
    fastest = max((cell.link for cell in cells), key=lambda link: link.bandwidth)  # where copies disturb most
    start = stage.drafting(Machine("this-machine", "", blank(subject, fastest)))
    pace = Pace(lambda: subject.yardstick(start), tries)
    rounds: list[Round] = []

    def measure() -> None:
        tell("measuring the machine")
        rounds.append(observe_round(subject, start, pace))

    measure()
    first = stage.drafting(profile(start, subject, fit(rounds).scaled(pace.yard / YARD_NS)))
    for number in range(repetitions):
        for i in range(len(rows)):  # every repetition begins with another cell
            row = rows[(i + number * len(rows) // repetitions) % len(rows)]
            tell(f"repetition {number + 1} of {repetitions}: {row.cell.policy}, {row.cell.slots} slots")
            beside = pace.beside(partial(stage.live, row.cell, linked(first, row.cell.link)))
            row.live.append(beside.found)
            row.yards.append(beside.yard)
            row.others.append(beside.taken)
        measure()
    fitted = fit(rounds)
    for row in rows:
        tell(f"predicting {row.cell.policy}, {row.cell.slots} slots")
        here = [profile(start, subject, fitted.scaled(yard / YARD_NS)) for yard in row.yards]
        _predict(stage, row, first, here)
    return rows


def linked(machine: Machine, link: EmulatedLink) -> Machine:
    """The machine with an emulated link."""
    return replace(machine, quantities={**machine.quantities, **link.entries()})


def _predict(stage: Stage, row: Row, first: Machine, near: Sequence[Machine]) -> None:
    """near: the machine as fast as it was beside each repetition."""
    cell = row.cell
    told, total = linked(first, cell.link), cell.slots * len(stage.subject.shape.moe_layers)
    count = stage.virtual(cell, told)
    deciding = [s.deciding.scaled(1 / yard) for s, yard in zip(row.live, row.yards, strict=True)]
    for i, machine in enumerate(near):
        others = [one for j, one in enumerate(deciding) if j != i] or deciding
        usual = Deciding(*(median(getattr(d, f.name) for d in others) for f in fields(Deciding)))
        spent = stage.drafting(linked(machine, cell.link))
        charged = with_policy_time(spent, usual.scaled(row.yards[i]), "median of the other repetitions")
        sample, _ = simulated_sample(stage.trace(cell), cell.policy, told, total, charged)
        row.simulated.append(sample)
    _, same = simulated_sample(stage.trace(cell), cell.policy, told, total)
    row.exact = same == count


def orders(rows: Sequence[Row]) -> tuple[int, list[tuple[Row, Row]]]:
    """Pairs of policies on one link with the same slots that differ live by more than APART; and those of them that
    the simulator puts in the other order."""
    pairs = [
        (a, b)
        for a, b in combinations(rows, 2)
        if (a.cell.link, a.cell.slots) == (b.cell.link, b.cell.slots)
        and max(a.measured, b.measured) > (1 + APART) * min(a.measured, b.measured)
    ]
    return len(pairs), [(a, b) for a, b in pairs if (a.measured < b.measured) != (a.predicted < b.predicted)]
