"""What no policy can beat: offline optima of hit counts, and lower bounds of decode time (issue 3, O1 to O7).

O3, the value of a short sight, is a policy: `lookahead`. Everything here is about the decode and verify steps that a
trace has; a policy that chooses draft lengths replays other steps, and is bounded on those. A *run* is a stretch of
them without prefill in between. What a policy did in prefill, or placed before the first step, helps it at the start of
a run and may have cost no decode time at all. So every run is granted whatever content of the slots suits it best, for
nothing; this is what keeps the bounds true for every placement, and why a trace of many short runs has looser ones.

**Misses, M\\*.** Let R_e be what is resident, or on its way into a slot of its own, at the gate of event e (one layer
of one step); |R_e| <= slots. In a run a policy makes x copies that are ordered and used in it, and lets the CPU serve y
needed experts. Claim: x + y >= M*, the misses of Belady's rule with bypass, event by event, from the best content.
Proof: let Q be R at the first gate, and after e let Q be what is in R at the next gate of (Q + what e needed). It never
exceeds the slots and gains only what an event needed, so it is a demand cache with bypass and has at least M* misses.
Each of its misses (e, i) is charged to the CPU's work on i in e, or, if the GPU did that, to the copy that brought i:
that of e itself, or, if i was in R_e, one ordered after the last gate at which i was in Q or needed, as i was outside R
in between. No copy is charged twice, because the next miss of i is charged to one ordered after e. Belady's rule is
optimal among demand caches with bypass and equal sizes (exchange argument; the tests compare it with exhaustive
search), and so for every prefix of a run at once. Copies that are never used, or cancelled, only add to the link's
time.

**Time.** Decode time is the GPU's timeline, so it is at least the link's busy time with those x copies, and the sum of
what the GPU does or waits for: steps, drafts, dense parts, decisions, and each layer's serving, during which that
layer's CPU experts, their joining and any copies beyond the slots must take place. `fluid_ns` and `layered_ns` minimise
over y with nothing else held against a policy.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from ..policies.interface import Costs, Scope
from ..traces.schema import Kind
from ..traces.views import Steps
from .accesses import BATCH, Accesses
from .counting import count_fast, equal_slots, hits_of, minimum
from .machine import Rates

Loads = tuple[int, ...]  # tokens of each needed expert of one event, most first


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds for decode on one machine with `slots` expert slots in all. Rates of hits are per distinct expert.

    If the slots change in a run, take the most there ever are.

    scope: whose bounds they are. "global": any policy's, however it shares the slots out over the layers; "layer":
    those of policies that give each layer its equal share, which are tighter.

    steps, tokens, needed: decode and verify steps, output tokens, needed experts over all events.
    least_misses: M* of the module's docstring, in this scope; 1 - least_misses / needed is the highest hit rate of any
    policy that copies on demand only, wherever it starts from (`best_hit_rate`).
    min_hit_rate (O1), forced_hit_rate (O2): of the policies `min` and `min:bypass=false`, equal shares, starting empty,
    prefill replayed. Their difference is what leaving experts out is worth. The second is no bound: if every miss must
    be kept, keeping the soonest needed is best where an event needs one expert, and need not be where it needs several
    (exhaustive search finds schedules with fewer misses).
    static_hit_rate, static_quota_hit_rate (O7): the best placement that never changes, chosen in hindsight, with equal
    shares of the slots and with any.
    resident_ns: decode time with every expert on the GPU. Not a bound: a CPU may help even then.
    prefetch_ns (O4): for policies that leave nothing to the CPU. Copies go over the link in the order of their
    deadlines from the start of a run, each event waiting for as many as any cache would have needed by then. EDF makes
    the largest lateness as small as can be; leaving out that early copies need slots makes it a bound.
    fluid_ns (O6): for every lossless policy. GPU, CPU, link and DRAM each need their time, all fully overlapped.
    layered_ns (O5): the same with each layer's serving as a unit of its own; for every lossless policy. At least
    `fluid_ns`.
    on_demand_ns (O5): for policies that copy nothing but what the running layer needs. At least `layered_ns`.
    """

    slots: int
    scope: Scope
    steps: int
    tokens: int
    needed: int
    least_misses: int
    min_hit_rate: float | None
    forced_hit_rate: float | None
    static_hit_rate: float | None
    static_quota_hit_rate: float | None
    resident_ns: int
    prefetch_ns: int
    fluid_ns: int
    layered_ns: int
    on_demand_ns: int

    @property
    def best_hit_rate(self) -> float | None:
        return 1 - self.least_misses / self.needed if self.needed else None

    def tokens_per_s(self, ns: int) -> float | None:
        """What one of the times comes to."""
        return self.tokens * 1e9 / ns if ns else None


def bounds(
    trace: Steps,
    rates: Rates,
    slots: int,
    scope: Scope = "global",
    cpu: bool = True,
    accesses: Accesses | None = None,
) -> Bounds:
    """All bounds of a trace. `cpu`: whether there is a CPU tier, as in `Setup`.

    The whole trace is held in memory as `accesses`, which whoever wants bounds for several sizes makes once.
    """
    shape = trace.header.target
    whole = accesses or Accesses.of(trace)
    decode = whole.only_decode()
    starts = whole.run_starts[whole.decode]
    shares = equal_slots(slots, whole.layers, whole.experts)
    pooled = scope == "global"
    misses = least_misses(decode, (sum(shares),) if pooled else shares, starts, pooled)
    events = _Events.of(decode, rates.costs)
    around, tokens = _around(trace, rates, shape.layers - len(shape.moe_layers))
    room = sum(shares) if pooled else max(shares)
    needed, missed = int(events.needed.sum()), int(misses.sum())
    static = _static_hits(decode, shares)
    serving = [(_Event(loads, rates.costs, room, cpu), times) for loads, times in events.kinds.items()]
    fluid = _fluid_ns(events.kinds, rates, int(around.sum()), missed, shape.expert_bytes, cpu)
    layered = max(fluid, _layered_ns(serving, rates.costs, int(around.sum()), missed))
    on_demand = max(layered, int(around.sum()) + _least_sum([(e.on_demand(), t) for e, t in serving])(missed))
    return Bounds(
        slots=sum(shares),
        scope=scope,
        steps=decode.steps,
        tokens=tokens,
        needed=needed,
        least_misses=missed,
        min_hit_rate=_rate(whole, "min", slots),
        forced_hit_rate=_rate(whole, "min:bypass=false", slots),
        static_hit_rate=static[0] / needed if needed else None,
        static_quota_hit_rate=static[1] / needed if needed else None,
        resident_ns=int(around.sum() + events.gpu_ns.sum()),
        prefetch_ns=_prefetch_ns(around + events.gpu_ns, misses, starts, rates.costs.copy_ns),
        fluid_ns=fluid,
        layered_ns=layered,
        on_demand_ns=on_demand,
    )


def _rate(accesses: Accesses, policy: str, slots: int) -> float | None:
    counts = count_fast(accesses, policy, slots)
    needed = counts.in_decode(counts.needed)
    return counts.in_decode(counts.hits) / needed if needed else None


# Misses


def least_misses(accesses: Accesses, capacity: tuple[int, ...], starts: np.ndarray, pooled: bool) -> np.ndarray:
    """[S, L]: misses of each event under Belady's rule with bypass, filled anew for nothing where `starts`, [S] bool.

    capacity: one number a layer, or, `pooled`, a single one for all.
    """
    if pooled:
        hits = _pool_hits(accesses, capacity[0], starts)
    else:
        hits = hits_of(accesses, minimum(accesses), capacity, starts)
    return accesses.by_event(~hits)


def _pool_hits(accesses: Accesses, slots: int, starts: np.ndarray) -> np.ndarray:
    """The same rule for one pool, [A] bool, as the choice of intervals: two uses of an expert that follow each other
    are a hit if it stays in between, at most `slots` may stay over any event, and those that end last are given up.
    """
    begins = np.searchsorted(accesses.events, np.arange(accesses.steps * accesses.layers + 1)).tolist()
    fresh = set((np.flatnonzero(starts) * accesses.layers).tolist())
    following = accesses.following.tolist()
    stays = bytearray(len(following))  # of each access: whether its expert stayed since the use before
    ends: list[int] = []  # accesses at which the staying intervals end, negated; those that are over are lowest
    live = 0
    for event, (begin, end) in enumerate(pairwise(begins)):
        if event in fresh:
            for a in ends:
                stays[-a] = -a < begin and stays[-a]
            first = accesses.first_from(begin)[:slots].tolist()
            for a in first:
                stays[a] = 1
            ends = [-a for a in reversed(first)]  # ascending, so a heap
            live = len(ends)
        live -= stays.count(1, begin, end)
        for a in following[begin:end]:
            if a:
                heappush(ends, -a)
                stays[a] = 1
                live += 1
        while live > slots:
            stays[-heappop(ends)] = 0
            live -= 1
        if len(ends) > 2 * slots + 4096:
            ends = [a for a in ends if -a >= end]
            heapify(ends)
    return np.frombuffer(stays, bool)


def _static_hits(accesses: Accesses, shares: tuple[int, ...]) -> tuple[int, int]:
    """Hits of the best fixed placement: with the layers' equal shares, and with the slots shared out at will."""
    uses = np.bincount(accesses.keys, minlength=accesses.layers * accesses.experts)
    best = -np.sort(-uses.reshape(accesses.layers, accesses.experts), axis=1)
    equal = sum(int(row[:share].sum()) for row, share in zip(best, shares, strict=True))
    return equal, int(-np.sort(-uses)[: sum(shares)].sum())


# Time


@dataclass(frozen=True)
class _Events:
    """needed, gpu_ns: [S, L], experts of each event and their time on the GPU. kinds: how often each set of loads
    occurs, which is all that the price of an event depends on."""

    needed: np.ndarray
    gpu_ns: np.ndarray
    kinds: Counter[Loads]

    @classmethod
    def of(cls, accesses: Accesses, costs: Costs) -> "_Events":
        most = int(accesses.loads.max(initial=0))
        price = np.array([0, *(costs.gpu_ns(n) for n in range(1, most + 1))])
        needed, gpu_ns = accesses.by_event(np.ones(len(accesses.keys))), accesses.by_event(price[accesses.loads])
        kinds = Counter[Loads]()
        size = accesses.layers * max(1, most)
        for first in range(0, accesses.steps, BATCH):
            last = min(first + BATCH, accesses.steps)
            here = slice(int(accesses.begins[first]), int(accesses.begins[last]))
            at = (accesses.events[here] - first * accesses.layers) * most + most - accesses.loads[here]
            tally = np.bincount(at, minlength=(last - first) * size).reshape(-1, max(1, most))
            for row, times in zip(*np.unique(tally, axis=0, return_counts=True), strict=True):
                kinds[tuple(np.repeat(np.arange(most, 0, -1), row).tolist())] += int(times)
        return cls(needed, gpu_ns, kinds)


def _around(trace: Steps, rates: Rates, dense_only: int) -> tuple[np.ndarray, int]:
    """[S, L]: what the GPU's timeline holds before each decode event's experts, whatever the policy: drafting, the
    step's fixed cost and the dense-only layers before the first, attention and the decision before each. And the output
    tokens of all these steps."""
    layers = len(trace.header.target.moe_layers)
    rows, tokens = [], 0
    for step in trace.steps():
        if step.kind is not Kind.PREFILL:
            drafted = int(step.drafted.sum())
            dense = rates.dense_ns(len(step), int(step.positions[0]), drafted > 0)
            row = np.full(layers, dense + rates.policy_ns)
            row[0] += drafted * rates.draft_token_ns + rates.step_ns + dense_only * dense
            rows.append(row)
            tokens += step.emitted
    return np.array(rows, np.int64).reshape(-1, layers), tokens


def _prefetch_ns(gpu_ns: np.ndarray, misses: np.ndarray, starts: np.ndarray, copy_ns: int) -> int:
    """Runs one after the other: the GPU's own time, and the largest lateness of a copy. Both arrays are [S, L]."""
    total = 0
    for work, missed in zip(*(np.split(a, np.flatnonzero(starts)[1:]) for a in (gpu_ns, misses)), strict=True):
        until = np.cumsum(work)
        late = np.cumsum(missed) * copy_ns - until
        total += int(work.sum()) + max(0, int(late.max(initial=0)))
    return total


class _Event:
    """Serving times of one event by how many experts the CPU takes (y = 0..n): arrays of [n + 1] ns.

    The GPU is spared its dearest experts and the CPU gets its cheapest, which may be different ones: a relaxation.
    """

    def __init__(self, loads: Loads, costs: Costs, room: int, cpu: bool) -> None:
        n = len(loads)
        gpu = np.array([costs.gpu_ns(tokens) for tokens in loads])
        by_cpu = np.array([costs.cpu_ns(tokens) for tokens in reversed(loads)])
        self._y = np.arange(n + 1 if cpu else 1)
        self._copy_ns = costs.copy_ns
        on_gpu = gpu.sum() - np.r_[0, np.cumsum(gpu)]
        on_cpu = np.r_[0, np.cumsum(by_cpu) + costs.cpu_first_ns]
        self._busy = np.maximum(on_gpu, on_cpu)[self._y]
        self._joined = np.where(self._y > 0, costs.hybrid_ns, 0)
        self._beyond, self._n = max(0, n - room), n

    def _with_copies(self, copies: np.ndarray) -> np.ndarray:
        return np.maximum(self._busy, np.maximum(copies, 0) * self._copy_ns) + self._joined

    def prefetched(self) -> list[int]:
        """By y, if all that fits was resident at the gate: only what exceeds the slots is copied meanwhile."""
        return self._with_copies(self._beyond - self._y).tolist()

    def on_demand(self) -> list[int]:
        """By the number of experts that were not resident at the gate, 0 to n; the best y for each."""
        absent = range(self._n + 1)
        return [int(self._with_copies(max(self._beyond, m) - self._y).min()) for m in absent]


def _least_sum(curves: list[tuple[list[int], int]]) -> Callable[[int], int]:
    """The least total of one value from each curve, as a function of the sum of their arguments, from below.

    Each curve comes with how often it occurs. Convex hulls from below are added up by taking their pieces in order of
    slope; all in integers, rounded down.
    """
    pieces = []
    total = 0
    for values, times in curves:
        total += values[0] * times
        hull = _hull(values)
        pieces += [((b - a) * times, (values[b] - values[a]) * times) for a, b in pairwise(hull)]
    pieces.sort(key=lambda piece: piece[1] / piece[0])
    at, heights = [0], [total]
    for width, rise in pieces:
        at.append(at[-1] + width)
        heights.append(heights[-1] + rise)

    def value(x: int) -> int:
        i = min(bisect_right(at, x) - 1, len(pieces) - 1)
        if i < 0:
            return total
        width, rise = pieces[i]
        return heights[i] + rise * (min(x, at[-1]) - at[i]) // width

    return value


def _hull(values: list[int]) -> list[int]:
    """Arguments at which the convex hull from below of `values` has its corners."""
    hull: list[int] = []
    for c, height in enumerate(values):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (c - b) < (height - values[b]) * (b - a):
                break
            hull.pop()
        hull.append(c)
    return hull


def _least_max(rising: Callable[[int], int], falling: Callable[[int], int], last: int) -> int:
    """The least over 0..last of the larger of two functions, one that does not fall and one that does not rise."""
    low, high = 0, last  # the first argument at which `rising` has caught up is in low..high, or there is none
    while low < high:
        middle = (low + high) // 2
        if rising(middle) >= falling(middle):
            high = middle
        else:
            low = middle + 1
    return min(max(rising(y), falling(y)) for y in (low, max(low - 1, 0)))


def _layered_ns(serving: list[tuple[_Event, int]], costs: Costs, around: int, misses: int) -> int:
    """O5: each layer is served at least as long as its y demands, the link has the other misses to copy."""
    curves = [(event.prefetched(), times) for event, times in serving]
    # Up to the y at which an event is served fastest, more of it is better for the link too.
    best = sum(times * values.index(min(values)) for values, times in curves)
    last = sum(times * (len(values) - 1) for values, times in curves)
    served = _least_sum(curves)
    return _least_max(
        lambda y: around + served(best + y), lambda y: (misses - best - y) * costs.copy_ns, max(0, last - best)
    )


def _fluid_ns(kinds: Counter[Loads], rates: Rates, around: int, misses: int, size: int, cpu: bool) -> int:
    """O6: max over the resources, each with the least it can have to do if the CPU serves y; the best y."""
    costs, loads = rates.costs, Counter[int]()
    for kind, times in kinds.items():
        for tokens in kind:
            loads[tokens] += times
    most_first = sorted(loads.items(), reverse=True)
    gpu = _least_of([(costs.gpu_ns(tokens), times) for tokens, times in most_first])
    by_cpu = _least_of([(costs.cpu_ns(tokens), times) for tokens, times in reversed(most_first)])
    needed = sum(loads.values())
    everything = gpu(needed)
    fluid = _least_max(
        by_cpu,
        lambda y: max(around + everything - gpu(y), (misses - y) * costs.copy_ns),
        needed if cpu else 0,
    )
    return max(fluid, _dram_ns(rates, misses * size, cpu))


def _dram_ns(rates: Rates, size: int, cpu: bool) -> int:
    """DRAM's time for all misses, whoever serves them, less a millionth, as the engine rounds a flow's rate down to
    whole bytes a second. Like it, do not charge DRAM where moving an expert takes no time at all."""
    costs = rates.costs
    free = costs.copy_bytes_ns == 0 or (cpu and costs.cpu_ns(1) == costs.cpu_fixed_ns)
    return 0 if free else size * (10**9 - 1000) // rates.dram_bytes_per_s


def _least_of(priced: list[tuple[int, int]]) -> Callable[[int], int]:
    """Sum of the first y of prices that each come several times, as a function of y."""
    at, sums = [0], [0]
    for price, times in priced:
        at.append(at[-1] + times)
        sums.append(sums[-1] + price * times)

    def value(y: int) -> int:
        i = min(bisect_right(at, y) - 1, len(priced) - 1)
        return sums[i] + (y - at[i]) * priced[i][0] if priced else 0

    return value
