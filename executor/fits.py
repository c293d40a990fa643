"""From observed steps to a machine's times: what a layer, an expert, a wait and a drafted token take here, in ns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np

from ..traces.schema import Kind
from .probe import Seen
from .times import LayerTimes

Points = Sequence[tuple[float, float]]
Price = Callable[[int], float]  # ns of an expert with so many tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """ns, but for `overlap`. dense: of a layer without its experts, by tokens and by tokens of context. Experts: of a
    call, an expert and a token, on either tier alone. overlap: share of the time in which both tiers compute that each
    loses."""

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
    overlap: float
    arrival: float
    draft: float


def typical(values: Iterable[float]) -> float:
    """Mean without the outer hundredth on either side: speed is a matter of means, so only a freak does not count."""
    ordered = np.sort(np.fromiter(values, float))
    cut = len(ordered) // 100
    return float(ordered[cut : len(ordered) - cut].mean()) if len(ordered) else 0.0


def medians(rounds: Sequence[Figures]) -> tuple[Figures, dict[str, tuple[float, float]]]:
    """The median of every figure over the rounds, and the least and most of it."""
    names = [f.name for f in fields(Figures)]
    columns = {name: [getattr(one, name) for one in rounds] for name in names}
    return Figures(**{n: median(c) for n, c in columns.items()}), {n: (min(c), max(c)) for n, c in columns.items()}


def figures(
    alone: Sequence[Seen],
    on_cpu: Sequence[Seen],
    both: Sequence[Seen],
    copying: Sequence[Seen],
    drafting: Sequence[Seen],
    copy_ns: int,
) -> Figures:
    """One round: steps with all experts on the fast device, all on the CPU tier, on both, some of them copied, and with
    a draft in between (may be empty). copy_ns: one expert over the emulated link."""
    # Where a draft runs in between, caches are colder; so its steps are taken for those of several rows.
    rows = [*(s for s in alone if s.times.tokens == 1), *(drafting or (s for s in alone if s.times.tokens > 1))]
    dense = plane([(s.times.tokens, s.context + s.times.tokens, _before(s)) for s in rows])
    call, *gpu = calls([(len(x.work), sum(n for n, _ in x.work), x.expert) for x in layers(rows)])
    cpu = line([work for x in layers(on_cpu) for work in x.cpu_work[1:]])
    fast, slow = priced(gpu), priced(cpu)
    first = max(0.0, typical(x.cpu_work[0][1] - slow(x.cpu_work[0][0]) for x in layers(on_cpu) if x.cpu_work))
    hybrid, overlap = contention(slowed([*on_cpu, *both], dense), (call, fast), (first, slow))
    tails = [s.times.layers[0].before - _before(s) + s.times.tail for s in rows]
    verifies = [s.times for s in drafting if s.times.kind is Kind.VERIFY]
    return Figures(
        *dense,
        step=typical(tails),
        policy=typical(x.policy for x in layers(rows)),
        gpu_call=call,
        gpu_fixed=gpu[0],
        gpu_token=gpu[1],
        cpu_first=first,
        cpu_fixed=cpu[0],
        cpu_token=cpu[1],
        hybrid=hybrid,
        overlap=overlap,
        arrival=arrival(slowed(copying, dense), copy_ns, (call, fast)),
        draft=typical(s.draft / (s.tokens - 1) for s in verifies if s.tokens > 1),
    )


def layers(seen: Iterable[Seen]) -> list[LayerTimes]:
    return [layer for s in seen for layer in s.times.layers]


def _before(seen: Seen) -> float:
    """A layer's time without its experts; the first layer's has the embedding in it."""
    times = seen.times.layers
    return float(np.mean([x.before for x in times[1:] or times]))


def priced(fitted: Sequence[float]) -> Price:
    fixed, slope = fitted
    return lambda tokens: fixed + slope * tokens


def line(points: Points) -> tuple[float, float]:
    """Fixed part and slope (ns) of (tokens, ns), from the typical time of each number of tokens.

    Where a disturbance makes the fixed part negative, growth cannot be told and all of it is called fixed.
    """
    flat = typical(ns for _, ns in points), 0.0
    tokens = sorted({n for n, _ in points})
    if len(tokens) < 2:
        return flat
    means = [typical(ns for n, ns in points if n == t) for t in tokens]
    counts = [sum(n == t for n, _ in points) for t in tokens]
    slope, fixed = np.polyfit(tokens, means, 1, w=np.sqrt(counts))
    return (float(fixed), max(0.0, float(slope))) if fixed > 0 else flat


def plane(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Fixed part, slope by tokens and slope by context of (tokens, context, ns), none of them below 0.

    Least squares. The slowest and the fastest hundredth of each number of tokens do not count.
    """
    kept = []
    for tokens in sorted({p[0] for p in points}):
        same = sorted((p for p in points if p[0] == tokens), key=lambda p: p[2])
        cut = len(same) // 100
        kept += same[cut : len(same) - cut]
    table = np.array(kept, float).reshape(-1, 3)
    columns = np.column_stack([np.ones(len(table)), table[:, :2]])
    told = np.ptp(table[:, 1] - table[:, 0]) > 0  # whether context is more than the tokens themselves
    choices = ((0, 1, 2), (0, 1), (0, 2), (0,)) if told else ((0, 1), (0,))
    return tuple(positive(columns, table[:, 2], choices))  # type: ignore[return-value]


def calls(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """ns of a call, an expert and a token, from (experts, tokens, ns) of layers whose experts were computed at once."""
    table = np.array(points, float).reshape(-1, 3)
    kept = table[table[:, 2] <= np.quantile(table[:, 2] / table[:, 0], 0.99) * table[:, 0]] if len(table) else table
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
        rows = s.times.tokens
        price = dense[0] + dense[1] * rows + dense[2] * (s.context + rows)
        found += [(x.before - price, x) for x in s.times.layers[1:]]
    return found


def contention(
    layers: Sequence[tuple[float, LayerTimes]], gpu: tuple[float, Price], cpu: tuple[float, Price]
) -> tuple[float, float]:
    """What a layer that uses the CPU tier costs beyond the slower tier alone: a fixed part, and a share of the time in
    which both compute. Layers on the CPU alone give the fixed part with nothing beside it.

    layers: as `slowed` gives them. gpu, cpu: ns of a call and of an expert, alone.
    """
    lost, beside = [], []
    for late, x in layers:
        if x.cpu_work:
            fast = gpu[0] + sum(gpu[1](n) for n, _ in x.work) if x.work else 0.0
            slow = cpu[0] + sum(cpu[1](n) for n, _ in x.cpu_work)
            lost.append(late + x.wall - x.policy - max(fast, slow))
            beside.append(min(fast, slow))
    if not lost:
        return 0.0, 0.0
    fixed, share = positive(np.column_stack([np.ones(len(lost)), beside]), np.array(lost), ((0, 1), (0,), (1,)))
    return float(fixed), float(share)


def arrival(layers: Sequence[tuple[float, LayerTimes]], copy_ns: int, gpu: tuple[float, Price]) -> float:
    """What waiting for copies costs beyond their time, from layers all of whose experts were copied (`slowed`).

    Where each copy takes longer than the work on the one before, a layer takes its copies' time, the work on the last
    expert, and this: waking up, and working with what others left in the caches.
    """
    late: list[float] = []
    for slower, x in layers:
        work = [gpu[0] + gpu[1](n) for n, _ in x.work]
        if work and all(ns < copy_ns for ns in work):
            late.append(slower + x.wall - x.policy - len(work) * copy_ns - work[-1])
    return max(0.0, typical(late))
