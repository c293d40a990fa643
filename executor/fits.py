"""From observed steps to a machine's times: what a layer, an expert, a wait and a drafted token take here, in ns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from ..traces.schema import Kind
from .probe import Seen
from .quiet import freaks
from .times import LayerTimes, asked_between

Price = Callable[[int], float]  # ns of an expert with so many tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """ns, but for `overlap`. dense: of a layer without its experts, by tokens and by tokens of context. Experts: of a
    call, an expert and a token, on either tier alone. beside: what a layer on both takes longer. overlap: share of
    the time in which both tiers compute that each loses. after_draft: what a layer takes longer after drafting;
    ahead: where gates are asked ahead, beside that.
    """

    dense_fixed: float
    dense_token: float
    dense_context: float
    step: float
    policy: float
    gpu_call: float
    gpu_fixed: float
    gpu_token: float
    cpu_first: float
    cpu_fixed: float
    cpu_token: float
    hybrid: float
    beside: float
    overlap: float
    arrival: float
    landing: float
    draft: float
    after_draft: float
    ahead: float

    def scaled(self, factor: float) -> "Figures":
        """The same on a machine that takes `factor` times as long for everything."""
        times = {f.name: getattr(self, f.name) * factor for f in fields(self) if f.name != "overlap"}
        return replace(self, **times)


def typical(values: Iterable[float]) -> float:
    """Mean of all but freaks."""
    told = np.fromiter(values, float)
    return float(told[~freaks(told)].mean()) if len(told) else 0.0


@dataclass(frozen=True, slots=True)
class Round:
    """Steps with all experts on the fast device, without a draft in between, with one (none if there is none), and with
    gates asked ahead (none without gates); all on the CPU tier, a half of them there, four fifths there, the same while
    some of these are prefetched, all of two layers in three, and all copied."""

    alone: list[Seen] = field(default_factory=list)
    drafting: list[Seen] = field(default_factory=list)
    asking: list[Seen] = field(default_factory=list)
    on_cpu: list[Seen] = field(default_factory=list)
    halves: list[Seen] = field(default_factory=list)
    fifths: list[Seen] = field(default_factory=list)
    prefetching: list[Seen] = field(default_factory=list)
    layered: list[Seen] = field(default_factory=list)
    copying: list[Seen] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Figures of all rounds together, and of each alone."""

    all: Figures
    rounds: list[Figures]

    def scaled(self, factor: float) -> "Fitted":
        """Of a machine that takes `factor` times as long for everything."""
        return Fitted(self.all.scaled(factor), [one.scaled(factor) for one in self.rounds])


def fit(rounds: Sequence[Round]) -> Fitted:
    """Figures of rounds that were observed at one speed of the machine."""
    together = {f.name: [s for one in rounds for s in getattr(one, f.name)] for f in fields(Round)}
    return Fitted(figures(Round(**together)), [figures(one) for one in rounds])


def figures(seen: Round) -> Figures:
    """What a layer, an expert, a wait and a drafted token took in these steps.

    Plain decoding finds warm caches and a draft leaves cold ones: what that costs a layer is `after_draft`, the time of
    a call of its experts included, and what it costs a step's ends is the draft's.
    """
    warm = plane([(s.times.tokens, s.context + s.times.tokens, _before(s)) for s in seen.alone])
    call, *gpu = calls([(len(x.work), sum(n for n, _ in x.work), x.expert) for x in layers(seen.alone)])
    step, price, cold = max(0.0, typical(map(_ends, seen.alone))), priced(gpu), verifying(seen.drafting)
    dense, cold_call, cold_step = _after_drafting(cold, warm, (call, price), step)
    after = dense[0] - warm[0] + cold_call - call
    on_cpu = [x.cpu_work for x in layers([*seen.on_cpu, *seen.layered]) if x.cpu_work]
    _, *cpu = calls([(len(work), sum(n for n, _ in work), sum(ns for _, ns in work)) for work in on_cpu])
    used = [one for group in (seen.on_cpu, seen.halves, seen.fifths, seen.layered) for one in verifying(group)]
    gpu_alone, cpu_alone = (cold_call, price), priced(cpu)
    overlap = sharing(layers([*verifying(seen.halves), *verifying(seen.fifths)]), gpu_alone, cpu_alone)
    first, hybrid, beside = contention([slowed([s], dense) for s in used], gpu_alone, cpu_alone, overlap)
    drafted = [s.times for s in [*cold, *used] if s.times.draft and s.times.tokens > 1]
    return Figures(
        *warm,
        step=step,
        policy=typical(x.policy for x in layers([*seen.alone, *seen.drafting])),
        gpu_call=call,
        gpu_fixed=gpu[0],
        gpu_token=gpu[1],
        cpu_first=first,
        cpu_fixed=cpu[0],
        cpu_token=cpu[1],
        hybrid=hybrid,
        beside=beside,
        overlap=overlap,
        arrival=arrival(verifying(seen.copying), dense, (cold_call, price)),
        landing=landing(seen.fifths, seen.prefetching),
        draft=typical((s.draft + cold_step - step) / (s.tokens - 1) for s in drafted),
        after_draft=after,
        ahead=max(0.0, typical(_before(s) - _grown(s, dense) for s in verifying(seen.asking)) - dense[0]),
    )


def _after_drafting(
    cold: Sequence[Seen], warm: tuple[float, float, float], gpu: tuple[float, Price], step: float
) -> tuple[tuple[float, float, float], float, float]:
    """A layer without its experts, a call and a step's ends after a draft; each is at least what it is without one."""
    if not cold:
        return warm, gpu[0], step
    fixed = typical(_before(s) - _grown(s, warm) for s in cold)
    call = typical(x.expert - sum(gpu[1](n) for n, _ in x.work) for x in layers(cold) if x.work)
    return (max(warm[0], fixed), *warm[1:]), max(gpu[0], call), max(step, typical(map(_ends, cold)))


def _ends(seen: Seen) -> float:
    """A step's beginning and end: embedding, head and loop."""
    return seen.times.layers[0].before - _before(seen) + seen.times.tail


def verifying(seen: Sequence[Seen]) -> list[Seen]:
    """The steps that verify drafts; where none does, all."""
    return [s for s in seen if s.times.kind is Kind.VERIFY] or list(seen)


def layers(seen: Iterable[Seen]) -> list[LayerTimes]:
    return [layer for s in seen for layer in s.times.layers]


def _before(seen: Seen) -> float:
    """A layer's time without its experts; the first layer's has the embedding in it."""
    times = seen.times.layers
    return float(np.mean([x.before for x in times[1:] or times]))


def _grown(seen: Seen, dense: tuple[float, float, float]) -> float:
    """What of a layer without its experts grows with tokens and context."""
    rows = seen.times.tokens
    return dense[1] * rows + dense[2] * (seen.context + rows)


def priced(fitted: Sequence[float]) -> Price:
    fixed, slope = fitted
    return lambda tokens: fixed + slope * tokens


def plane(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Fixed part, slope by tokens and slope by context of (tokens, context, ns), none of them below 0.

    Least squares, without freaks.
    """
    table = np.array(points, float).reshape(-1, 3)
    if len(table):
        table = table[~freaks(table[:, 2])]
    columns = np.column_stack([np.ones(len(table)), table[:, :2]])
    told = np.ptp(table[:, 1] - table[:, 0]) > 0  # whether context is more than the tokens themselves
    choices = ((0, 1, 2), (0, 1), (0, 2), (0,)) if told else ((0, 1), (0,))
    return tuple(positive(columns, table[:, 2], choices))  # type: ignore[return-value]


def calls(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """ns of a call, an expert and a token, from (experts, tokens, ns) of layers whose experts were computed at once."""
    kept = np.array(points, float).reshape(-1, 3)
    if len(kept):
        kept = kept[~freaks(kept[:, 2] / kept[:, 0])]
    columns = np.column_stack([np.ones(len(kept)), kept[:, :2]])
    found = positive(columns, kept[:, 2], ((0, 1, 2), (0, 1), (1, 2), (1,), (0, 2)))
    return tuple(found)  # type: ignore[return-value]


def positive(columns: np.ndarray, values: np.ndarray, choices: Sequence[Sequence[int]]) -> np.ndarray:
    """Least squares with some of the columns, those of the best choice whose coefficients are not below 0."""
    best, answer = np.inf, np.zeros(columns.shape[1])
    for used in choices:
        found, *_ = np.linalg.lstsq(columns[:, used], values, rcond=None)
        error = float(((columns[:, used] @ found - values) ** 2).sum())
        if (found >= 0).all() and error < best:
            best, answer = error, np.zeros(columns.shape[1])
            answer[list(used)] = found
    return answer


def slowed(seen: Iterable[Seen], dense: tuple[float, float, float]) -> list[tuple[float, LayerTimes]]:
    """All layers but the first of each step, and what the way to each took longer than a layer without experts does.

    Whoever has slept finds his caches taken and his core asleep, and that shows in what comes after the wait.
    """
    found = []
    for s in seen:
        price = dense[0] + _grown(s, dense)
        found += [(x.before - price, x) for x in s.times.layers[1:]]
    return found


def sharing(seen: Iterable[LayerTimes], gpu: tuple[float, Price], cpu: Price) -> float:
    """Share of the time in which both tiers compute that each loses: how much longer the experts on the fast device
    take than alone, where the CPU tier computes for longer. gpu: ns of a call and of an expert, cpu: of an expert,
    alone."""
    slower = []
    for x in seen:
        fast, slow = gpu[0] + sum(gpu[1](n) for n, _ in x.work), sum(cpu(n) for n, _ in x.cpu_work)
        if x.work and 0 < fast <= slow:
            slower.append(x.expert / fast - 1)
    return min(1.0, max(0.0, typical(slower)))


def contention(
    steps: Iterable[Sequence[tuple[float, LayerTimes]]], gpu: tuple[float, Price], cpu: Price, overlap: float
) -> tuple[float, float, float]:
    """Of what a layer on the CPU tier costs beside its experts: the part that other work hides, and the part that
    nothing does; and what it costs more on both tiers.

    steps: layers as `slowed` gives them, some on the CPU tier, alone or beside the device. They are taken together:
    whoever has waited for the CPU tier is slower for longer than that layer. gpu, cpu: as for `sharing`, which says
    `overlap`.
    """
    table = []  # of each step: ns in all, and of each layer the device's work, the CPU tier's, and whether it has any
    for step in steps:
        fast = [gpu[0] + sum(gpu[1](n) for n, _ in x.work) if x.work else 0.0 for _, x in step]
        slow = [sum(cpu(n) for n, _ in x.cpu_work) for _, x in step]
        table.append(
            (sum(late + x.wall - x.policy for late, x in step), fast, slow, [bool(x.cpu_work) for _, x in step])
        )
    if not table:
        return 0.0, 0.0, 0.0
    wall, fast, slow, uses = (np.array(column, float) for column in zip(*table, strict=True))
    usual = ~freaks(wall)
    wall, fast, slow, uses = wall[usual], fast[usual], slow[usual], uses[usual]
    best, answer = np.inf, (0.0, 0.0, 0.0)
    both = ((fast > 0) * uses).sum(1)
    columns = np.column_stack([uses.sum(1), both])
    choices = ((0, 1), (0,), (1,)) if both.any() else ((0,),)
    most = float((wall - slow.sum(1)).sum() / max(1.0, uses.sum()))
    for first in np.linspace(0, max(0.0, most), 33):
        tier = slow + first * uses
        lost = wall - (np.maximum(fast, tier) + overlap * np.minimum(fast, tier)).sum(1)
        told = positive(columns, lost, choices)
        error = float(((lost - columns @ told) ** 2).sum())
        if error < best:
            best, answer = error, (float(first), float(told[0]), float(told[1]))
    return answer


def arrival(seen: Iterable[Seen], dense: tuple[float, float, float], gpu: tuple[float, Price]) -> float:
    """What waiting for copies costs beyond their time, from steps all of whose experts were copied.

    Where each copy takes longer than the work on the one before, a layer takes its copies' time, the work on the last
    expert, and this: waking up, and working with what others left in the caches.
    """
    late: list[float] = []
    for s in seen:
        for slower, x in slowed([s], dense):
            work = [gpu[0] + gpu[1](n) for n, _ in x.work]
            if work and all(ns < s.copy_ns for ns in work):
                late.append(slower + x.wall - x.policy - len(work) * s.copy_ns - work[-1])
    return max(0.0, typical(late))


def landing(without: Sequence[Seen], prefetching: Sequence[Seen]) -> float:
    """What a prefetch that lands costs all others: how much longer the same steps take with prefetches than without
    them, deciding on them left out, by the copies that landed."""
    pairs = [(one, other) for one, other in zip(without, prefetching, strict=False) if other.copy_ns]
    if not pairs:
        return 0.0
    before, after = (np.array([_without_policy(s) for s in side], float) for side in zip(*pairs, strict=True))
    landed = np.array([other.times.busy.get("prefetch", 0) / other.copy_ns for _, other in pairs])
    usual = ~(freaks(before) | freaks(after))
    count = landed[usual].sum()
    return max(0.0, float((after - before)[usual].sum() / count)) if count else 0.0


def _without_policy(seen: Seen) -> float:
    return seen.times.wall_ns - asked_between([seen.times]) - sum(x.policy + x.kept for x in seen.times.layers)
