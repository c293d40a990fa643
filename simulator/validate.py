"""Replay published measurements and say how far off the simulator is.

For each study the entries that its file names are fitted to one row each, by scaling them; such rows are shown and
not counted. All other rows are predicted: the row's placement or cache runs through the engine on the study's machine,
on routing that says what it is. The error is predicted over measured, less one, for every kind of number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from .machine import COUNT, TIME, UNITS, Machine, Quantity
from .validate_cases import Fit, Row, Study
from .validate_replay import predict

LIMIT = 0.30  # an error beyond this is a failure, for every tier
AIM = 0.15  # of the median


@dataclass(frozen=True, slots=True)
class Result:
    """A row and what was predicted of it. `fitted`: the study was made to predict it, so that it counts for nothing."""

    study: str
    row: Row
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.predicted / self.row.measured - 1

    @property
    def fails(self) -> bool:
        return not self.fitted and abs(self.error) > LIMIT


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a fit did: each entry with its value before and after. `reached`: the row is now predicted exactly."""

    study: str
    fit: Fit
    changes: tuple[tuple[str, float, float], ...]
    reached: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """An order or a shape that the predictions must have, and whether they have it; if not, `why`."""

    study: str
    claim: str
    source: str
    holds: bool
    why: str = "not explained"


@dataclass(frozen=True, slots=True)
class Report:
    results: tuple[Result, ...]
    fits: tuple[Fitted, ...]
    checks: tuple[Checked, ...]

    @property
    def counted(self) -> list[Result]:
        return [r for r in self.results if not r.fitted]

    @property
    def failures(self) -> list[Result]:
        return [r for r in self.results if r.fails]

    def summary(self, of: Sequence[Result]) -> dict[str, float | int | str]:
        """Of some counted results: how many, the median absolute error, the worst, and how many are within the aim."""
        sizes = [abs(r.error) for r in of]
        worst = max(of, key=lambda r: abs(r.error))
        return {
            "rows": len(of),
            "median_absolute_error": median(sizes),
            "worst_error": worst.error,
            "worst_row": worst.row.id,
            "within_15_percent": sum(size <= AIM for size in sizes),
            "beyond_30_percent": sum(r.fails for r in of),
        }


def validate(studies: Sequence[Study], progress: Callable[[int], None] | None = None) -> Report:
    """Fit and predict. `progress` is told how many rows are done."""
    results: list[Result] = []
    fits: list[Fitted] = []
    checks: list[Checked] = []
    for study in studies:
        factors, done = fit(study)
        fits += done
        targets = {f.row for f in study.fits}
        for row in study.rows:
            results.append(
                Result(study.name, row, predict(row, machine_for(study, row, factors)), row.fitted or row.id in targets)
            )
            if progress:
                progress(len(results))
        checks += _check(study, {r.row.id: r.predicted for r in results if r.study == study.name})
    return Report(tuple(results), tuple(fits), tuple(checks))


def machine_for(study: Study, row: Row, factors: dict[str, float]) -> Machine:
    """The study's machine with the row's own entries, and the fitted ones scaled."""
    quantities = study.machine.quantities | dict(row.machine)
    for entry, factor in factors.items():
        was = quantities[entry]
        quantities[entry] = Quantity(was.value * factor, "assumed", f"fitted; before: {was.source}")
    return replace(study.machine, quantities=quantities)


def fit(study: Study) -> tuple[dict[str, float], list[Fitted]]:
    """Factors by entry, found one fit after the other, and what each did."""
    factors: dict[str, float] = {}
    done = []
    for each in study.fits:
        row, before = study.row(each.row), dict(factors)
        u, reached = _solve(partial(_time, study, row, each, before), _as_time(row, row.measured))
        factors |= {entry: _factor(entry, u) for entry in each.entries}
        was, now = machine_for(study, row, before), machine_for(study, row, factors)
        done.append(Fitted(study.name, each, tuple((e, was[e], now[e]) for e in each.entries), reached))
    return factors, done


def _time(study: Study, row: Row, wanted: Fit, factors: dict[str, float], u: float) -> float:
    """What the row comes to if the entries of a fit are scaled by u."""
    scaled = factors | {entry: _factor(entry, u) for entry in wanted.entries}
    return _as_time(row, predict(row, machine_for(study, row, scaled)))


def _as_time(row: Row, value: float) -> float:
    return 1 / value if row.what == "speed" else value


def _factor(entry: str, u: float) -> float:
    """Times and counts grow with u, rates fall: so the replayed time is nearly linear in u."""
    return u if UNITS[entry] in (TIME, COUNT) else 1 / u


def _solve(time: Callable[[float], float], target: float) -> tuple[float, bool]:
    """u with time(u) = target within 0.1 %, by secants between 1/50 and 50; False if there is none."""
    u, value = 1.0, time(1.0)
    last_u, last = u, value
    u, value = 1.25, time(1.25)
    for _ in range(12):
        if abs(value / target - 1) < 1e-3 or value == last:
            break
        step = (target - value) * (u - last_u) / (value - last)
        last_u, last = u, value
        u = min(50.0, max(0.02, u + step))
        value = time(u)
    return u, abs(value / target - 1) < 1e-3


def _check(study: Study, predicted: dict[str, float]) -> list[Checked]:
    orders = [
        Checked(
            study.name, f"{o.first} is more than {o.second}", o.source, predicted[o.first] > predicted[o.second], o.why
        )
        for o in study.orders
    ]
    return orders + [
        Checked(
            study.name,
            f"{id} gains less than its share of experts",
            d.source,
            _way(predicted, d.zero, d.full, id) < study.row(id).slots / study.row(d.full).slots,
        )
        for d in study.diagonals
        for id in d.rows
    ]


def _way(speeds: dict[str, float], zero: str, full: str, id: str) -> float:
    """How much of the time between two rows is saved, 0 to 1."""
    return (1 / speeds[zero] - 1 / speeds[id]) / (1 / speeds[zero] - 1 / speeds[full])
