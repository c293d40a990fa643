"""HybriMoE: a scheduler for CPU, GPU and link, a score-based cache, and prefetch by the time it would save."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..traces.schema import Kind
from .hss import RELEASE_COSTS, Planner, Schedule, release_schedule
from .interface import Candidates, Demand, Forecast, Key, Policy, Setup, StepInfo, View, Where
from .llamacpp import BackgroundInserts
from .parts import VictimOrder, next_absent, split


def top_scores(demand: Demand, keep: int, experts: int) -> np.ndarray:
    """TopP of each token's router scores, [n, E]: the `keep` largest stay, the others are 0.

    Where the trace has no full scores the weights of the chosen experts stand in for them, and 1/k each where it has
    no weights either. Scores with negative values are taken for logits and go through a softmax first.
    """
    n, k = demand.ids.shape
    if demand.scores is None:
        chosen = np.full((n, k), 1.0 / k) if demand.weights is None else demand.weights.astype(np.float64)
        scores = np.zeros((n, experts))
        np.put_along_axis(scores, demand.ids.astype(np.intp), chosen, axis=1)
        return scores
    scores = demand.scores.astype(np.float64)
    if scores.min() < 0:
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    if keep < experts:
        dropped = np.argsort(-scores, axis=1, kind="stable")[:, keep:]
        np.put_along_axis(scores, dropped, 0.0, axis=1)
    return scores


class MrsScores(VictimOrder):
    """Minus-recent-score cache order: per layer S = alpha * TopP(s) + (1 - alpha) * S, the smallest S goes first.

    With alpha = 0 nothing ever scores, and the least recently used goes first.
    """

    def __init__(self, layers: int, experts: int, alpha: float, keep: int) -> None:
        self.scores = np.zeros((layers, experts))
        self._used = np.full((layers, experts), -1)
        self._event = 0
        self._alpha, self._keep = alpha, keep

    def update(self, demand: Demand, first_row: bool) -> None:
        """One iteration: the mean of all tokens' scores, or only the first token's."""
        self._event += 1
        self._used[demand.layer, list(demand.experts)] = self._event
        rows = top_scores(demand, self._keep, self.scores.shape[1])
        seen = rows[0] if first_row else rows.mean(axis=0)
        self.scores[demand.layer] += self._alpha * (seen - self.scores[demand.layer])

    def better(self, incoming: Key, victim: Key) -> bool:
        return self._worth(incoming) > self._worth(victim)

    def _worth(self, key: Key) -> tuple[float, int]:
        return float(self.scores[key]), int(self._used[key])

    def ascending(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Experts by (score, last use, id)."""
        ids = np.asarray(experts, dtype=np.intp)
        return ids[np.lexsort((ids, self._used[layer, ids], self.scores[layer, ids]))].tolist()


class _HybriMoe(Policy):
    """What paper and release share: cache order, admission of everything fetched, placement."""

    _setup: Setup
    _mrs: MrsScores

    def _start(self, setup: Setup, alpha: float, p: int) -> None:
        self._setup = setup
        self._mrs = MrsScores(setup.layers, setup.experts, alpha, p or 2 * setup.top_k)

    def _split(self, demand: Demand, view: View) -> tuple[list[int], list[int], int]:
        """Residents and missing experts by descending load, and how many of the latter, put first, are on their way."""
        load = demand.load()
        ranked = sorted(demand.experts, key=lambda e: -load[e])
        resident = [e for e in ranked if view.resident(Key(demand.layer, e))]
        coming = [e for e in ranked if view.in_flight(Key(demand.layer, e))]
        there = {*resident, *coming}
        return resident, coming + [e for e in ranked if e not in there], len(coming)

    def _first_victim(self, layer: int, candidates: Candidates, view: View, spared: Iterable[int] = ()) -> Key | None:
        for expert in self._mrs.ascending(layer, view.residents(layer)):
            key = Key(layer, expert)
            if expert not in spared and key in candidates:
                return key
        return None

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        return self._first_victim(layer, candidates, view)

    def _place(self, how: str) -> Iterable[Key]:
        rng = np.random.default_rng(self._setup.seed)
        for layer, slots in enumerate(self._setup.slots):
            order = rng.permutation(self._setup.experts) if how == "random" else np.arange(self._setup.experts)
            if how != "empty":
                yield from (Key(layer, e) for e in sorted(order[:slots].tolist()))


def _answer(schedule: Schedule, order: Sequence[int], copied: Where = Where.FETCH) -> list[tuple[int, Where]]:
    lanes = ((schedule.gpu, Where.GPU), (schedule.copies, copied), (schedule.cpu, Where.CPU))
    return [(order[i], where) for items, where in lanes for i in items]


@dataclass
class HybriMoe(_HybriMoe):
    """Hybrid CPU/GPU scheduling, MRS cache and impact-driven prefetch (HybriMoE paper, arXiv 2504.05897).

    Theirs: the three-timeline scheduler (`paper_schedule`), S = alpha * TopP(s) + (1 - alpha) * S with p = 2k and the
    smallest S evicted, prefetch of the expert that saves most time when the next `horizon` = 3 layers are planned with
    and without it, from those layers' gates applied to the present hidden state (channel "next-gate"); a random start
    (`start=random`).
    Ours: an empty start by default, as for the other policies; alpha = 0.5 (the release's; the paper's value is not
    known); a batch counts once, with the mean of its tokens' scores; experts that a forecast needs are not evicted for
    a prefetch of the same layer, and equal impacts go to the nearest layer. Times come from the machine's `Costs`, not
    from the paper's three-parameter model.
    For ablations, in our reading: without `schedule` residents are the GPU's and all else the CPU's, and what was
    missed comes in behind, if it outranks what it displaces; `cache` is "mrs", "lru", or "fixed", where nothing stays
    that was missed, and a prefetch displaces the least recently used.
    """

    name: ClassVar[str] = "hybrimoe"
    channels = frozenset({"next-gate"})
    alpha: float = 0.5
    p: int = 0  # 0: twice top-k
    horizon: int = 3
    prefetch: bool = True
    schedule: bool = True
    cache: Literal["mrs", "lru", "fixed"] = "mrs"
    start: Literal["empty", "random", "first"] = "empty"

    def setup(self, setup: Setup) -> None:
        self._start(setup, self.alpha if self.cache == "mrs" else 0.0, self.p)
        self._behind = BackgroundInserts(self._mrs, setup.experts, frozen=False)
        self._inserting: Key | None = None
        self._layer = -1
        self._ahead: dict[int, dict[int, int]] = {}
        self._dropped: set[Key] = set()
        self._best: dict[int, tuple[int, Key | None]] = {}  # of a layer, until anything there changes
        self._planner = Planner(setup.costs, setup.cpu)

    def placement(self) -> Iterable[Key]:
        return self._place(self.start)

    def step_begins(self, step: StepInfo) -> None:
        self._layer = -1
        self._behind.step_begins(step)
        self._ahead.clear()
        self._best.clear()

    def forecast(self, forecast: Forecast) -> None:
        self._best.pop(forecast.layer, None)
        self._ahead[forecast.layer] = {e: max(1, round(n)) for e, n in sorted(forecast.counts.items())}
        self._dropped = {key for key in self._dropped if key.layer != forecast.layer}

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        self._layer = demand.layer
        self._ahead.pop(demand.layer, None)
        self._mrs.update(demand, first_row=False)
        if not self.schedule:
            if self.cache != "fixed":
                self._behind.used(demand, view)
            return split(demand, Where.CPU if self._setup.cpu else self._copied)
        resident, missing, coming = self._split(demand, view)
        load = demand.load()
        schedule = self._planner.plan(tuple(load[e] for e in resident), tuple(load[e] for e in missing), coming)
        return _answer(schedule, resident + missing, self._copied)

    @property
    def _copied(self) -> Where:
        return Where.STREAM if self.cache == "fixed" else Where.FETCH

    def next_fetch(self, view: View) -> Key | None:
        key, self._inserting = self._most_saving(view) if self.prefetch and self._ahead else None, None
        if key is None and not self.schedule:
            key = self._inserting = self._behind.next_fetch(view)
        return key

    def _most_saving(self, view: View) -> Key | None:
        """The absent expert of the next layers that would save most."""
        saved, key = 0, None
        for layer in range(self._layer + 1, self._layer + 1 + self.horizon):
            if layer in self._ahead:
                if layer not in self._best:
                    self._best[layer] = max(self._impacts(layer, view), key=lambda i: i[0], default=(0, None))
                if self._best[layer][0] > saved:
                    saved, key = self._best[layer]
        if key is not None:
            del self._best[key.layer]
        return key

    def _impacts(self, layer: int, view: View) -> Iterable[tuple[int, Key]]:
        """Makespan saved by having one more expert of `layer`; experts of equal load save the same, the first counts.

        What is on its way counts as there.
        """
        held = set(view.residents(layer))
        there: list[int] = []
        absent: list[int] = []
        first: dict[int, Key] = {}
        for expert, load in self._ahead[layer].items():
            if expert in held or view.in_flight(key := Key(layer, expert)):
                there.append(load)
            else:
                absent.append(load)
                if load not in first and key not in self._dropped:
                    first[load] = key
        there.sort(reverse=True)
        absent.sort(reverse=True)
        without = self._planner.makespan(there, absent)
        for load in sorted(first, reverse=True):
            place = absent.index(load)
            fewer = absent[:place] + absent[place + 1 :]
            more = sorted([*there, load], reverse=True)
            yield without - self._planner.makespan(more, fewer), first[load]

    def transfer_dropped(self, key: Key) -> None:
        self._dropped.add(key)
        self._best.pop(key.layer, None)

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        self._best.pop(incoming.layer, None)
        victim = self._first_victim(incoming.layer, candidates, view, self._ahead.get(incoming.layer, ()))
        if victim is not None and incoming == self._inserting and not self._mrs.better(incoming, victim):
            return None
        return victim

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        self._best.pop(layer, None)
        return super().surrender(layer, candidates, view)


@dataclass
class HybriMoeRelease(_HybriMoe):
    """Hybrid CPU/GPU scheduling and MRS cache as HybriMoE's code really does it (commit 508a85b).

    Theirs: the head/tail scheduler (`release_schedule`), alpha 0.5, p = 2k, scores taken from the first token of a
    batch only, every expert fetched is admitted, prefetch of the `prefetch_size` best-scored experts of the next layer
    (default 0) if the GPU has work, prefill wholly on the GPU with weights that are not kept; the cache starts with
    the first ids (`start=first`). `literal` plans with the constants in the code instead of this machine's costs.
    Ours: an empty start by default, as for the other policies; the scores do not change in prefill; absent experts of
    a prefill are streamed one by one, where theirs copies whole layers ahead; verify batches are planned with their
    real loads; the bug that can give CPU experts each other's routing weights is not copied.
    """

    name: ClassVar[str] = "hybrimoe-release"
    alpha: float = 0.5
    p: int = 0  # 0: twice top-k
    prefetch_size: int = 0
    literal: bool = False
    start: Literal["empty", "random", "first"] = "empty"

    def setup(self, setup: Setup) -> None:
        self._start(setup, self.alpha, self.p)
        self._costs = RELEASE_COSTS if self.literal else setup.costs
        self._prefill = False
        self._wanted: list[Key] = []

    def placement(self) -> Iterable[Key]:
        return self._place(self.start)

    def step_begins(self, step: StepInfo) -> None:
        self._prefill = step.kind is Kind.PREFILL
        self._wanted = []

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        resident, missing, _ = self._split(demand, view)
        self._wanted = []
        if self._prefill:
            return [(e, Where.GPU) for e in resident] + [(e, Where.STREAM) for e in missing]
        self._mrs.update(demand, first_row=True)
        load = demand.load()
        loads = [load[e] for e in resident], [load[e] for e in missing]
        schedule = release_schedule(*loads, self._costs, self._setup.cpu)
        if schedule.gpu or schedule.copies:
            self._want(demand.layer + 1)
        return _answer(schedule, resident + missing)

    def _want(self, layer: int) -> None:
        if self.prefetch_size and layer < self._setup.layers:
            best = self._mrs.ascending(layer, range(self._setup.experts))[-self.prefetch_size :]
            self._wanted = [Key(layer, e) for e in best]

    def next_fetch(self, view: View) -> Key | None:
        return next_absent(self._wanted, view)

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        return self._first_victim(incoming.layer, candidates, view)
