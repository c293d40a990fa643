"""MoE-SpAc: utilities from verify batches decide what is prefetched and evicted, and where to split CPU and GPU."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from ..traces.schema import Kind
from .balancer import ExpertTimes, best_threshold
from .interface import Candidates, Demand, Key, LayerReport, Policy, Setup, StepInfo, View, Where
from .utility import UtilityEstimator, scaled_constants

SAVED_COPIES = 2  # for which a layer may save up the link's time


class Request(NamedTuple):
    """A wish to have an expert on the GPU; `run` is how often its layer had begun when it was made."""

    id: int
    level: int
    run: int


class LevelQueues:
    """One first-in-first-out queue a utility level; the highest level goes first.

    What one layer asks for at one time stands in a queue as one entry [layer, run, experts, how many are taken].
    """

    def __init__(self, top: int, experts: int) -> None:
        self._queues: list[deque[list[Any]]] = [deque() for _ in range(top + 1)]
        self._experts = experts

    def push(self, layer: int, run: int, experts: Sequence[int], levels: Sequence[int]) -> None:
        """Wishes of one layer, each with its level."""
        entries: dict[int, list[int]] = {}
        for expert, level in zip(experts, levels, strict=True):
            entries.setdefault(level, []).append(expert)
        for level, asked in entries.items():
            self._queues[level].append([layer, run, asked, 0])

    def pop(self, lowest: int) -> Request | None:
        """The oldest request of the highest level that has any, down to level `lowest`."""
        queues = self._queues
        for level in range(len(queues) - 1, lowest - 1, -1):
            if queues[level]:
                entry = queues[level][0]
                layer, run, asked, taken = entry
                if taken + 1 < len(asked):
                    entry[3] = taken + 1
                else:
                    queues[level].popleft()
                return Request(layer * self._experts + asked[taken], level, run)
        return None

    def drop_heads(self, layer: int) -> None:
        """Forget the requests of one layer that are first in their queue: they come too late."""
        for queue in self._queues:
            while queue and queue[0][0] == layer:
                queue.popleft()


class SlotKeys:
    """The key of every resident, by which it is evicted: 0 to top, or frozen while its layer runs.

    One flat array over all experts, id = layer * E + expert, so that the lowest (key, id) is one argmin; `count` holds
    how many residents have each key.
    """

    def __init__(self, layers: int, experts: int, top: int) -> None:
        self.frozen, self._absent = top + 1, top + 2
        self.count = [0] * (top + 2)
        self._keys = np.full(layers * experts, self._absent, dtype=np.int32)
        self._layers = self._keys.reshape(layers, experts)

    def resident(self, id_: int) -> bool:
        return self._keys.item(id_) != self._absent

    def absent(self, layer: int) -> np.ndarray:
        """[E] bool: not resident."""
        return self._layers[layer] == self._absent

    def coldest(self) -> tuple[int, int]:
        """Lowest (key, id); the key is above `frozen` when nothing is resident."""
        id_ = int(self._keys.argmin())
        return self._keys.item(id_), id_

    def add(self, id_: int, key: int) -> None:
        self._keys[id_] = key
        self.count[key] += 1

    def remove(self, id_: int) -> None:
        self.count[self._keys.item(id_)] -= 1
        self._keys[id_] = self._absent

    def lift(self, id_: int, level: int) -> None:
        """Raise a resident's key to `level`, if it is lower."""
        if self._keys.item(id_) < level:
            self.remove(id_)
            self.add(id_, level)

    def freeze(self, layer: int) -> np.ndarray:
        """Keep a layer's residents from being evicted; returns the layer's keys until now, [E]."""
        row = self._layers[layer]
        before = row.copy()
        there = (before != self._absent).nonzero()[0]
        self._count(before[there], -1)
        row[there] = self.frozen
        self.count[self.frozen] += there.size
        return before

    def thaw(self, layer: int, keys: np.ndarray | int) -> None:
        """Give a layer's frozen residents these keys, [E] or one for all."""
        row = self._layers[layer]
        frozen = (row == self.frozen).nonzero()[0]
        self.count[self.frozen] -= frozen.size
        if isinstance(keys, int):
            row[frozen] = keys
            self.count[keys] += frozen.size
        else:
            thawed = row[frozen] = keys[frozen]
            self._count(thawed, 1)

    def _count(self, keys: np.ndarray, sign: int) -> None:
        for key, n in enumerate(np.bincount(keys).tolist()):
            self.count[key] += sign * n

    def colder(self) -> list[int]:
        """How many residents have a key below 0, 1, ..., top + 1."""
        return list(accumulate(self.count[:-1], initial=0))


@dataclass
class MoeSpac(Policy):
    """Prefetch and evict by speculative activation utility, with a balanced CPU/GPU split (MoE-SpAc, 2603.09983).

    A re-creation of what the paper describes; neither its formulas nor its full text were at hand. All experts share
    one pool. A layer's residents run on the GPU and all else on the CPU: there is no copy that a layer waits for.
    After each layer its experts' utilities move by the verify batch's counts, and hot experts that are absent ask for
    a slot; the link serves them whenever it is free, through drafting too, the highest utility first.
    Theirs in both variants: the transition, levels 0..k, queues by level, lowest (key, id) evicted.
    Theirs by description, here switches: `unified` (a layer's residents keep their utility as eviction key, where the
    release drops them to 0), `adaptive` (boundaries that follow the deviations), `balance` (a threshold a layer
    from the integer program, else `tau`), CPU and GPU at the same time (`serial_tiers=false`).
    Ours: the formulas of `adaptive` and `balance`; `discard_late` (a request whose layer has begun is dropped);
    `scale` (levels and boundary follow the draft length); with `unified`, residents are not queued again. The link's
    time binds only when the slots are full. Then a layer has its share of a step, and keeps what it does not use up to
    SAVED_COPIES copies, because what fits once is not a whole number of them. The time of a step is the sum of its
    layers' reports, so drafting and attention are a reserve.
    `calibration=change` is another reading of `adaptive`: boundaries follow how counts differ from the last batch's.
    For ablations, in our reading: `estimator=binary` (without the utility estimator: an expert is hot if the last batch
    used it at all, which is all that plain decoding shows) and `asynchronous=false` (without the engine: hot experts
    that are absent are copied when their layer needs them, and it waits).
    Batches of `offload_tokens` or more bypass all this, as in llama.cpp: absent experts are streamed, no utility moves.

    The signal is the count over a verify batch. On plain decoding the released constants never lift an expert from 0,
    so nothing is ever prefetched; with `scale` there are two levels left and an expert is wanted if the last token
    chose it.
    """

    name: ClassVar[str] = "moe-spac"
    scope = "global"
    k: int = 5
    up: int = 5
    down: int = 1
    tau: int = 1
    scale: bool = True
    unified: bool = True
    adaptive: bool = True
    calibration: Literal["utility", "change"] = "utility"
    balance: bool = True
    discard_late: bool = True
    serial_tiers: bool = False
    estimator: Literal["utility", "binary"] = "utility"
    asynchronous: bool = True
    offload_tokens: int = 32
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        if self.k < 1 or not 1 <= self.tau <= self.k + 1:
            raise ValueError("k must be at least 1, and tau lie in 1..k+1")
        if self.up < 1 or self.down < 1:
            raise ValueError("up and down must be at least 1")
        if not 0 < self.smoothing <= 1:
            raise ValueError("smoothing must lie in (0, 1]")

    # Told

    def setup(self, setup: Setup) -> None:
        self._binary = self.estimator == "binary"
        top, up, down = scaled_constants(setup.draft_length, self.k) if self.scale else (self.k, self.up, self.down)
        if self._binary:
            top = up = down = 1
        layers, experts = setup.layers, setup.experts
        self._setup = setup
        smoothing = self.smoothing if self.adaptive and not self._binary else None
        self.utility = UtilityEstimator(layers, experts, top, up, down, smoothing, self.calibration == "change")
        self.keys = SlotKeys(layers, experts, top)
        self._queues = LevelQueues(top, experts)
        self._held: Request | None = None
        self._flying: dict[int, int] = {}
        self._slots = setup.slots[0]
        self._taken = 0  # slots that are occupied or reserved
        self._thresholds = [min(self.tau, top + 1)] * layers
        self._runs = [0] * layers
        self._running = -1
        self._bypassed = False
        self._landed: dict[int, int] = {}
        self._fetched: list[Key] = []
        self._most = top  # of what an expert's expected load can be
        self._mean_counts = np.zeros((layers, experts))
        self._times = ExpertTimes(setup.costs)
        self._copy_ns = float(setup.costs.copy_ns)
        self._saved = [0.0] * layers  # ns of the link's time that a layer has not used
        self._step_ns = 0.0
        self._this_step_ns = 0
        self._timed = False

    def step_begins(self, step: StepInfo) -> None:
        self._this_step_ns = 0
        self._timed = step.kind is not Kind.PREFILL

    def slots_changed(self, slots: tuple[int, ...]) -> None:
        self._slots = slots[0]

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        if self._timed and self._this_step_ns:
            old = self._step_ns or self._this_step_ns
            self._step_ns = old + self.smoothing * (self._this_step_ns - old)

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        if ns > 0:
            self._copy_ns += self.smoothing * (ns - self._copy_ns)
        id_ = key.layer * self._setup.experts + key.expert
        level = self._flying.pop(id_, None)
        if level is None:
            return
        if key.layer == self._running:  # too late for this run, kept for the next
            self._landed[id_] = level
            level = self.keys.frozen
        self.keys.add(id_, level)

    def transfer_dropped(self, key: Key) -> None:
        if self._flying.pop(key.layer * self._setup.experts + key.expert, None) is not None:
            self._taken -= 1

    def layer_ends(self, report: LayerReport) -> None:
        layer = report.layer
        self._this_step_ns += report.wall_ns
        self._running = -1
        for key in self._fetched:
            if self._view.resident(key):
                self.keys.add(layer * self._setup.experts + key.expert, self.keys.frozen)
                self._taken += 1
        if self._bypassed or not self.unified:
            for id_, level in self._landed.items():
                self.keys.remove(id_)
                self.keys.add(id_, level)
        if self._bypassed:
            self.keys.thaw(layer, self._before)
            return
        utility = self.utility.update(layer, np.minimum(self._counts, 1) if self._binary else self._counts)
        self.keys.thaw(layer, utility if self.unified else 0)
        absent = self.keys.absent(layer)
        if self.balance:
            self._thresholds[layer] = self._balanced(layer, absent)
        if self.asynchronous:
            self._ask_for_hot(layer, absent)

    def _balanced(self, layer: int, absent: np.ndarray) -> int:
        """This layer's threshold for the next step; see `best_threshold`. absent: [E] bool."""
        mean = self._mean_counts[layer]
        mean += self.smoothing * (self._counts - mean)
        utility = self.utility.u[layer]
        gpu_ns, cpu_ns = self._times.of(np.maximum(utility, mean), self._most)
        free = self._slots - self._taken
        room = [free + colder for colder in self.keys.colder()]
        share = self._step_ns / self._setup.layers or self._this_step_ns / (layer + 1)
        budget = min(self._saved[layer], SAVED_COPIES * self._copy_ns) + share
        bound = budget if free <= 0 else float("inf")
        first = self._setup.costs.cpu_first_ns
        threshold = best_threshold(utility, absent, gpu_ns, cpu_ns, room, self._copy_ns, bound, first)
        copies = np.count_nonzero(absent & (utility >= threshold))
        self._saved[layer] = max(0.0, budget - copies * self._copy_ns)
        return threshold

    def _hot(self, layer: int) -> np.ndarray:
        """[E] bool: at or above the layer's threshold; the release wants everything above level 0."""
        return self.utility.u[layer] >= (self._thresholds[layer] if self.balance else 1)

    def _ask_for_hot(self, layer: int, absent: np.ndarray) -> None:
        """Queue the hot experts of a layer by ascending id; absent: [E] bool.

        The release queues residents too: that is how these regain their key.
        """
        hot = self._hot(layer)
        experts = (hot & absent if self.unified else hot).nonzero()[0]
        if experts.size:
            levels = self.utility.u[layer, experts]
            self._queues.push(layer, self._runs[layer], experts.tolist(), levels.tolist())

    # Asked

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        layer = demand.layer
        self._bypassed = len(demand.ids) >= self.offload_tokens
        self._running = layer
        self._landed = {}
        self._runs[layer] += 1
        self._before = self.keys.freeze(layer)
        self._fetched, self._view = [], view
        absent = Where.STREAM if self._bypassed or not self._setup.cpu else Where.CPU
        held = demand.held
        if not self._bypassed:
            self._queues.drop_heads(layer)
            self._most = max(self._most, len(demand.ids))
            self._counts = np.bincount(demand.ids.reshape(-1), minlength=self._setup.experts)
            if not self.asynchronous:
                return self._fetching(demand, absent)
        return [(e, Where.GPU if e in held else absent) for e in demand.experts]

    def _fetching(self, demand: Demand, absent: Where) -> list[tuple[int, Where]]:
        """Absent experts that are hot are copied now, the hottest first, and all else goes where it would."""
        utility, hot = self.utility.u[demand.layer], self._hot(demand.layer)
        wanted = [k for k in demand.keys if hot[k.expert] and k.expert not in demand.held]
        self._fetched = sorted(wanted, key=lambda k: -utility[k.expert])
        others = [e for e in demand.experts if e in demand.held or not hot[e]]
        answer = [(e, Where.GPU if e in demand.held else absent) for e in others]
        return answer + [(key.expert, Where.FETCH) for key in self._fetched]

    def next_fetch(self, view: View) -> Key | None:
        """Requests by level, then age. One that finds no colder victim is held, and those behind it wait too."""
        experts = self._setup.experts
        while True:
            request = self._held or self._queues.pop(1 if self.balance else self.tau)
            self._held = None
            if request is None:
                return None
            layer = request.id // experts
            if self.discard_late and self._runs[layer] != request.run:
                continue
            if self.balance and request.level < self._thresholds[layer]:
                continue  # asked for under an older threshold
            if self.keys.resident(request.id):
                self.keys.lift(request.id, request.level)
            elif request.id not in self._flying:
                if view.free(layer) <= 0 and self.keys.coldest()[0] >= self._thresholds[layer]:
                    self._held = request
                    return None
                self._flying[request.id] = request.level
                self._taken += 1
                return Key(layer, request.id % experts)

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        key, id_ = self.keys.coldest()
        victim = Key(*divmod(id_, self._setup.experts))
        if key >= self._thresholds[incoming.layer] or victim not in candidates:
            return None
        self._remove(id_)
        return victim

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        _, id_ = self.keys.coldest()
        self._remove(id_)
        return Key(*divmod(id_, self._setup.experts))

    def _remove(self, id_: int) -> None:
        self.keys.remove(id_)
        self._taken -= 1


@dataclass
class MoeSpacRelease(MoeSpac):
    """Prefetch by utility as MoE-SpAc's released code does it, all constants fixed (llama.cpp fork, commit 77bb9cf).

    Theirs: levels 0..5, up 5, down 1, threshold 1; at a layer's end its residents drop to key 0 whatever their
    utility, then the utilities move and all experts above 0 are queued by ascending id; a request that finds nothing
    colder than the threshold is held and blocks the rest; requests of a layer that begins are dropped only at the head
    of their queue; the GPU starts a layer's experts when the CPU has finished its own (`serial_tiers`).
    Ours: the update happens at once and in layer order, where theirs races with the next layer on a helper thread.
    A batch of up to 4 tokens never lifts an expert from 0: on plain decoding nothing is ever prefetched.
    """

    name: ClassVar[str] = "moe-spac-release"
    scale: bool = False
    unified: bool = False
    adaptive: bool = False
    balance: bool = False
    discard_late: bool = False
    serial_tiers: bool = True
