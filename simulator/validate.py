"""Replay published measurements and say how far off the simulator is.

For each study the entries that its file names are fitted to one row each, by scaling them; such rows are shown and
not counted. All other rows are predicted: the row's placement or cache runs through the engine on the study's machine,
on routing that says what it is. The error is predicted over measured, less one, for every kind of number.

Short replays: a placement by whole layers takes the same time for every token, so 8 tokens are replayed; others take
48 or what their row says, after a prefill step that fills the cache and is not counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median

import numpy as np
import simpy

from ..policies.interface import Policy
from ..policies.load import load_policy
from ..traces.errors import InputError
from ..traces.schema import Kind
from ..traces.views import Steps
from .engine import Run, setup_for
from .lanes import Dram
from .machine import COUNT, TIME, UNITS, Machine, Quantity, load_machine, rates_for
from .replay import count
from .run import simulate
from .validate_cases import Fit, Row, Study, shape_of
from .validate_policies import PLACEMENTS, HalfPinned, Placed, Split, placed
from .validate_routing import (
    PROMPT,
    Router,
    counts_of,
    decoded,
    even,
    given,
    popularity,
    router_of,
    synthetic,
    trace_of,
)

ANY = "rtx4090-pcie4"  # prices for policies that are replayed without a clock and look at none
LIMIT = 0.30  # an error beyond this is a failure, for every tier
AIM = 0.15  # of the median
LAYERS = 12  # that stand for all where hit rates of per-layer caches are counted
STEADY = 8  # tokens of a replay in which every token takes the same time
CHUNK, WINDOW_NS = 4_000_000, 100_000_000  # of the replayed measurements of shared DRAM


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
    """An order or a shape that the predictions must have, and whether they have it."""

    study: str
    claim: str
    source: str
    holds: bool


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


def predict(row: Row, machine: Machine) -> float:
    """The row's number on this machine, in the row's unit."""
    if row.what == "copy":
        costs = rates_for(machine, shape_of(row)).costs
        return costs.copy_ns / 1e6
    if row.what.startswith("shared-"):
        return shared(machine)[row.what.removeprefix("shared-")]
    if row.what == "hit":
        return 100 * hit_rate(row)
    run = replayed(row, machine)
    decode = [step for step in run.steps if step.kind is not Kind.PREFILL]
    wall = sum(step.wall_ns for step in decode)
    if row.what == "speed":
        return len(decode) * 1e9 / wall
    waited = sum(step.gpu.get("wait_copy", 0) for step in decode)
    return 100 * waited / wall if row.what == "copy-share" else waited / len(decode) / 1e6


def replayed(row: Row, machine: Machine) -> Run:
    """The row's policy on its routing. InputError if the policy fails."""
    run = simulate(_trace(row), _policy(row, _router(row)), machine, row.slots)
    if run.error is not None:
        raise InputError(f"validation: row {row.id}: {run.error}")
    return run


def hit_rate(row: Row) -> float:
    """By distinct experts, of the row's policy in a replay without a clock; each sequence starts with an empty cache.

    Caches of a layer do not see each other, so that a few layers, evenly spaced, stand for all.
    """
    whole = shape_of(row)
    shape = replace(whole, layers=LAYERS, moe_layers=tuple(range(LAYERS)))
    slots = round(row.slots / len(whole.moe_layers) * LAYERS)
    router, rates = router_of(shape), rates_for(load_machine(ANY), shape)
    hits = needed = 0
    for sequence in range(row.sequences):
        steps = decoded(synthetic(router, row.tokens, first=sequence), 0)
        for sign, part in ((1, steps), (-1, steps[: row.skip])):
            if part:
                policy = _policy(row, router, sequence)
                counted = count(part, policy, setup_for(shape, rates, policy, slots, 0)).decode
                hits += sign * counted.hits
                needed += sign * counted.needed
    return hits / needed


def shared(machine: Machine) -> dict[str, float]:
    """GB/s of CPU and link, and of both, while both read host memory all the time."""
    env = simpy.Environment()
    dram = Dram(env, round(machine["host.bandwidth"]))
    moved = {"cpu": 0, "link": 0}

    def go_on(who: str, ns: int) -> None:
        def landed() -> None:
            moved[who] += CHUNK
            go_on(who, ns)

        dram.flow(CHUNK, ns, landed)

    for who in moved:
        go_on(who, round(CHUNK * 1e9 / machine[f"{who}.bandwidth"]))
    env.run(until=WINDOW_NS)
    rates = {who: size / WINDOW_NS for who, size in moved.items()}
    return rates | {"sum": sum(rates.values())}


@lru_cache(maxsize=2)
def _trace(row: Row) -> Steps:
    shape, router = shape_of(row), _router(row)
    if row.routing == "given":
        rates = rates_for(load_machine(ANY), shape)
        return given(shape, rates, _policy(row, router), row.slots, row.hit / 100, row.tokens, row.context)
    return trace_of(shape, decoded(_ids(row, router), row.context))


def _ids(row: Row, router: Router) -> np.ndarray:
    if row.routing == "any":
        return even(router, STEADY)
    if row.routing == "even":
        return even(router, row.tokens)
    if row.routing != "synthetic":
        raise InputError(f"validation: row {row.id}: routing {row.routing!r} is not any, even, given or synthetic")
    if row.policy == "prompt":
        return synthetic(router, PROMPT + row.tokens)[PROMPT:]
    return synthetic(router, row.tokens, row.sequences)


def _router(row: Row) -> Router:
    return router_of(shape_of(row))


def _policy(row: Row, router: Router, sequence: int = 0) -> Policy:
    """A new policy object for the row: a placement, one of the engines' own, or a shipped one by its name."""
    how, _, mode = row.policy.partition(":")
    if how in PLACEMENTS:
        return Placed(placed(how, row.slots, _counts(row, router)), serial=mode == "serial")
    if how == "split":
        return Split(float(mode))
    if how == "half-pinned":
        return HalfPinned(counts_of(router, synthetic(router, row.tokens, first=sequence)))
    return load_policy(row.policy)


def _counts(row: Row, router: Router) -> np.ndarray:
    if row.policy.startswith("frequency"):
        return popularity(router)
    if row.policy == "prompt":
        return counts_of(router, synthetic(router, PROMPT + row.tokens)[:PROMPT])
    return np.zeros((router.layers, router.experts))


def _check(study: Study, predicted: dict[str, float]) -> list[Checked]:
    orders = [
        Checked(study.name, f"{o.first} is more than {o.second}", o.source, predicted[o.first] > predicted[o.second])
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
