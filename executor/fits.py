"""From observed steps to a machine's times: what a layer, an expert, a wait and a drafted token take here, in ns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
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

    def scaled(self, factor: float) -> "Figures":
        """The same on a machine that takes `factor` times as long for everything."""
        times = {f.name: getattr(self, f.name) * factor for f in fields(self) if f.name != "overlap"}
        return replace(self, **times)


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
    alone_on_cpu = [(late, x) for late, x in slowed(on_cpu, dense) if x.cpu_work]
    base, *cpu = calls(
        [(len(x.cpu_work), sum(n for n, _ in x.cpu_work), late + x.wall - x.policy) for late, x in alone_on_cpu]
    )
    fast = priced(gpu)
    first, hybrid, overlap = contention(slowed(both, dense), base, (call, fast), priced(cpu))
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
    ordered = sorted(points, key=lambda p: p[2] / p[0])  # the slowest hundredth does not count
    kept = np.array(ordered[: len(ordered) - len(ordered) // 100], float).reshape(-1, 3)
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
    layers: Sequence[tuple[float, LayerTimes]], base: float, gpu: tuple[float, Price], cpu: Price
) -> tuple[float, float, float]:
    """Of what a layer on the CPU tier costs beside its experts (`base`): the part that other work hides, and the part
    that nothing does; and the share of the time in which both tiers compute that each loses.

    layers: of both tiers, as `slowed` gives them. gpu: ns of a call and of an expert, cpu: of an expert, alone.
    """
    both = [(late + x.wall - x.policy, x) for late, x in layers if x.cpu_work and x.work]
    if not both:
        return base, 0.0, 0.0
    wall = np.array([ns for ns, _ in both])
    fast = np.array([gpu[0] + sum(gpu[1](n) for n, _ in x.work) for _, x in both])
    slow = np.array([sum(cpu(n) for n, _ in x.cpu_work) for _, x in both])
    best, answer = np.inf, (base, 0.0, 0.0)
    for first in np.linspace(0, base, 33):
        beside = np.minimum(fast, first + slow)
        lost = wall - np.maximum(fast, first + slow) - (base - first)
        share = max(0.0, float(lost @ beside)) / max(1.0, float(beside @ beside))  # none where nothing overlapped
        error = float(((lost - share * beside) ** 2).sum())
        if error < best:
            best, answer = error, (float(first), float(base - first), share)
    return answer


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
