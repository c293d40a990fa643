"""One price for everything: what an expert's being on the GPU will save, against what bringing it there costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..traces.draft_length import LengthChooser
from ..traces.schema import Kind
from .demand import PerLoad
from .interface import (
    Answer,
    Candidates,
    Costs,
    Demand,
    Forecast,
    Key,
    LayerReport,
    Policy,
    Setup,
    StepInfo,
    View,
    Where,
)
from .parts import even
from .prefill import cheaper_absent
from .reuse import Reuse

GPU, FETCH, CPU = Where.GPU, Where.FETCH, Where.CPU  # looking up a member costs ten times a name

ABSENT, COMING = 1000.0, 500.0  # added to the worth of what is not resident; see `_rank`
RESIDENT_BELOW, ABSENT_ABOVE = 250.0, 750.0  # no worth is so great, or so far below 0, that ranks would mix
SURE = 0.5  # how often a gate's forecast is right, until that was seen
LEARN = 0.02  # weight of a layer's forecast, and of a pass, in what was seen

Missing = tuple[float, float, int, int, int]  # see `most_worth_copying`


def most_worth_copying(missing: Sequence[Missing], gpu_ns: int, link_ns: int, costs: Costs) -> int:
    """How many of `missing`, from the front, are to be copied and kept; the CPU computes the others.

    missing: (what it is sorted by, ns that its being kept will save later, its time on the CPU, on the GPU, expert).
    The least of the layer's time less what the copies will save. The layer takes as long as the longest of: the GPU
    with its residents (`gpu_ns`) and the copied ones; the link, busy for `link_ns` already, and the last arrival's
    work; the CPU and the joining of both tiers; and host memory giving all the missing their bytes, if CPU and link
    read at a time.
    """
    cpu_ns = sum([m[2] for m in missing]) + costs.cpu_first_ns + costs.hybrid_ns
    host_ns, copy_ns, count = len(missing) * costs.host_bytes_ns, costs.copy_ns, len(missing)
    best, least, gained = 0, float(max(cpu_ns, gpu_ns, link_ns)), 0.0
    for copied, (_, gain, on_cpu, on_gpu, _) in enumerate(missing, 1):
        gained += gain
        cpu_ns -= on_cpu
        gpu_ns += on_gpu
        link_ns += copy_ns
        both = max(cpu_ns, host_ns) if copied < count else 0
        ns = max(gpu_ns, link_ns + on_gpu, both) - gained
        if ns < least:
            best, least = copied, ns
    return best


def saved_by_a_hit(costs: Costs, cpu: bool) -> float:
    """ns less of a layer that finds one more expert resident: its copy, or where CPU and link share the misses by their
    speeds, with host memory as the limit of both, what one takes there more than on the GPU."""
    copy, here = costs.copy_ns, costs.cpu_fixed_ns + costs.cpu_memory_ns
    if not cpu:
        return float(copy)
    return max(0.0, max(here * copy / max(1, here + copy), costs.host_bytes_ns) - costs.gpu_ns(1))


def slowing_of_cpu(costs: Costs, cpu: bool) -> float:
    """ns that the CPU loses to one copy made while it reads experts: host memory gives the link its rate, and what is
    left to the CPU."""
    if not (cpu and costs.host_bytes_ns):
        return 0.0
    left = 1 / costs.host_bytes_ns - 1 / max(1, costs.copy_bytes_ns)  # experts a ns
    return costs.copy_bytes_ns * min(1.0, max(0.0, 1 - left * costs.cpu_memory_ns))


@dataclass
class Marginal(Policy):
    """Placement, eviction, prefetch, split and draft length by one price: expected uses times the time each saves.

    Ours. An expert is worth `passes` times its expected demand a pass (`Reuse`, learnt from this run), and one use
    more, as likely as such forecasts have come true, where the gates of coming layers forecast it on the present
    hidden state ("next-gate"). A use saves the time by which a miss lengthens a layer (`saved_by_a_hit`). By that
    price the pool of all layers gives up its least valuable resident, and only for what is worth more; a layer's
    misses are split between link and CPU so that time less future savings is least (`most_worth_copying`); and an idle
    link fetches the expert that gains most, if it gains more than the copy costs the CPU, which reads the same memory:
    nothing while drafting goes on. Where a token's uses save less than a decision takes, nothing moves and nothing is
    learnt. The draft length is that of `LengthChooser`, 0 included; `drafts=false` leaves it to the run. Times are the
    machine's `Costs` and what layers are reported to take.

    `passes` was tuned on training texts only, as docs/marginal.md says, with where this policy loses. Prompts are
    served by whichever tier takes less time, and nothing is fetched for them to stay; their routing counts as use.
    """

    name: ClassVar[str] = "marginal"
    scope = "global"
    channels = frozenset({"next-gate"})
    passes: float = 1.5
    forecasts: bool = True
    background: bool = True
    drafts: bool = True

    def __post_init__(self) -> None:
        if not self.passes > 0:
            raise ValueError("passes must be above 0")
        if not self.forecasts:
            self.channels = frozenset()

    # Told

    def setup(self, setup: Setup) -> None:
        self._setup, costs, shape = setup, setup.costs, (setup.layers, setup.experts)
        self.reuse = Reuse(*shape)
        self._worth = np.zeros(shape, np.float32)  # expected uses
        # The least of all ranks is the coldest resident and the greatest the warmest of those that could be fetched.
        self._absent = np.full(shape, ABSENT, np.float32)
        self._rank = self._worth + self._absent
        self._flying: set[Key] = set()
        self._ahead: dict[int, tuple[int, np.ndarray]] = {}  # of a layer: how far ahead it was forecast, and what
        self._right = [SURE] * setup.layers
        self._gpu_ns, self._cpu_ns = PerLoad(costs.gpu_ns), PerLoad(costs.cpu_ns)
        self._saved, self._slowing = saved_by_a_hit(costs, setup.cpu), slowing_of_cpu(costs, setup.cpu)
        if setup.cpu and setup.top_k * self._saved <= setup.decide_ns:
            self._saved = 0.0  # a token's hits in a layer save less than it takes to decide about them
        self._busy = 1.0  # share of a pass in which the CPU computes experts
        self._lengths = LengthChooser(max(1, setup.draft_length))
        copies = self.background and self._saved > 0
        silent = {"draft_length": self.drafts and setup.draft_length > 0, "next_fetch": copies, "transfer_done": copies}
        self.deaf = frozenset(name for name, wanted in silent.items() if not wanted)
        self._layer, self._prefill = -1, False

    def step_begins(self, step: StepInfo) -> None:
        self._prefill = step.kind is Kind.PREFILL
        self._drafted = len(step.tokens) - 1
        self._layer, self._layers_ns, self._on_cpu_ns = -1, 0, 0
        self._ahead.clear()

    def forecast(self, forecast: Forecast) -> None:
        if not self._saved:
            return
        layer, experts = forecast.layer, np.fromiter(forecast.counts, np.intp)
        distance = layer - self._layer - 1  # the gate of the layer before it has just been asked
        self._ahead[layer] = distance, experts
        self._price(layer, self.reuse.demand[layer], experts, self._right[distance])

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        if key in self._flying:  # a prefetch; what a layer fetched has not been given a slot yet
            self._flying.remove(key)
            self._put(key, 0)

    def transfer_dropped(self, key: Key) -> None:
        self._flying.discard(key)
        self._absent[key] = ABSENT  # from its layer's next pass on

    def layer_ends(self, report: LayerReport) -> None:
        self._layers_ns += report.wall_ns
        self._on_cpu_ns += report.cpu_ns
        if report.layer == self._setup.layers - 1:
            self._layer = -1  # nothing on this side needs host memory until the next pass

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        if self._prefill:
            return
        pass_ns = self._layers_ns + self._setup.pass_ns
        self._busy += LEARN * (self._on_cpu_ns / max(1, pass_ns) - self._busy)
        draft_s = self._drafted * self._setup.draft_token_ns / 1e9
        self._lengths.learn(self._drafted, accepted, draft_s, pass_ns / 1e9)

    # Asked

    def placement(self) -> Iterable[Key]:
        keys = even(self._setup)
        for key in keys:
            self._put(key, 0)
        return keys

    def draft_length(self, longest: int) -> int:
        return min(longest, self._lengths.choose())

    def dispatch(self, demand: Demand, view: View) -> Answer:
        self._layer = layer = demand.layer
        if layer in self._ahead:
            self._check_forecast(demand)
        if self._prefill:
            return self._read(demand)
        if not self._saved and self._setup.cpu:
            return CPU  # no copy can pay, so there is nothing to know either
        self._price(layer, self.reuse.seen(layer, demand.experts))
        if len(demand.held) == len(demand.experts) or not self._setup.cpu:
            return FETCH
        return self._split(demand, view)

    def next_fetch(self, view: View) -> Key | None:
        rank = self._rank.reshape(-1)
        while (best := float(rank[id_ := int(rank.argmax())])) > ABSENT_ABOVE:
            key = Key(*divmod(id_, self._setup.experts))
            if not (view.resident(key) or view.in_flight(key)):
                price = self._busy * self._slowing / self._saved if self._layer >= 0 else 0.0
                if best - ABSENT <= self._floor(view, key.layer) + price:
                    return None
                self._flying.add(key)
                self._put(key, COMING)
                return key
            # It took a free slot, of which policies are not told, or was copied for the running layer.
            self._put(key, 0 if view.resident(key) else COMING)
        return None

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        victim = self._coldest(candidates, float(self._worth[incoming]))
        if victim is not None and incoming not in self._flying:
            self._put(incoming, 0)
        return victim

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        return self._coldest(candidates, RESIDENT_BELOW)

    # Inside

    def _price(self, layer: int, demand: np.ndarray, named: np.ndarray | None = None, chance: float = 0.0) -> None:
        """A layer's experts are worth `passes` times their demand, `named` ones `chance` uses more; what was forecast
        before is forgotten."""
        worth = self._worth[layer]
        np.multiply(demand, self.passes, out=worth)
        if named is not None:
            worth[named] += chance
        np.add(worth, self._absent[layer], out=self._rank[layer])

    def _put(self, key: Key, where: float) -> None:
        """Resident (0), on its way or out of reach (COMING), or ABSENT."""
        self._absent[key] = where
        self._rank[key] = self._worth[key] + where

    def _check_forecast(self, demand: Demand) -> None:
        distance, experts = self._ahead.pop(demand.layer)
        right = len(set(demand.experts).intersection(experts.tolist())) / max(1, len(experts))
        self._right[distance] += LEARN * (right - self._right[distance])

    def _read(self, demand: Demand) -> Answer:
        tokens, costs = len(demand.ids), self._setup.costs
        shares = [load / tokens for load in demand.loads]
        self._price(demand.layer, self.reuse.read(demand.layer, demand.experts, shares, tokens))
        if not self._setup.cpu:
            return Where.STREAM
        loads = [n for e, n in zip(demand.experts, demand.loads, strict=True) if e not in demand.held]
        return cheaper_absent(loads, costs)

    def _split(self, demand: Demand, view: View) -> Answer:
        layer, held, saved, costs = demand.layer, demand.held, self._saved, self._setup.costs
        worth, floor = self._worth[layer].tolist(), self._floor(view, layer)
        on_gpu, on_cpu, flying = self._gpu_ns, self._cpu_ns, self._flying
        joins = {key.expert for key in flying if key.layer == layer} if flying else ()
        pairs = list(zip(demand.experts, demand.loads, strict=True))
        gpu_ns = sum([on_gpu[n] for e, n in pairs if e in held or e in joins])
        missing: list[Missing] = []
        for expert, load in pairs:
            if expert not in held and expert not in joins:
                gain, ns = max(0.0, worth[expert] - floor) * saved, on_cpu[load]
                missing.append((-gain - ns, gain, ns, on_gpu[load], expert))
        missing.sort()
        link_ns = len(joins) * costs.copy_ns // 2  # half of it is over, on average
        copied = most_worth_copying(missing, gpu_ns, link_ns, costs)
        answer = [(e, GPU if e in held else FETCH) for e, _ in pairs if e in held or e in joins]
        answer += [(m[4], FETCH) for m in missing[:copied]]
        answer += [(m[4], CPU) for m in missing[copied:]]
        return answer

    def _floor(self, view: View, layer: int) -> float:
        """What has to go for one more resident is worth at least this."""
        return 0.0 if view.free(layer) > 0 else float(self._rank.min())

    def _coldest(self, candidates: Candidates, below: float) -> Key | None:
        """The least valuable candidate, if it is worth less than `below`. It is then evicted."""
        rank, experts, spared = self._rank.reshape(-1), self._setup.experts, []
        found = None
        while (worth := float(rank[id_ := int(rank.argmin())])) < below:
            key = Key(*divmod(id_, experts))
            if key in candidates:
                self._put(key, ABSENT)
                found = key
                break
            spared.append((id_, worth))
            rank[id_] = COMING
        for id_, worth in spared:
            rank[id_] = worth
        return found
