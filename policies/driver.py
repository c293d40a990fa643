"""What both hosts do with a policy's answers, written once: pin, ask, check, admit, evict, count.

The driver waits for nothing and reads no clock. A host calls, for every step,
`step_begins`; for every layer `gate`, then (while it spends the time) `next_fetch` and `landed`, then `layer_ends`; and
`step_ends`. Simulator and executor differ only in how they spend time between these calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from ..traces.schema import Kind
from .future import Future
from .interface import Demand, Forecast, Key, LayerReport, Policy, Setup, StepInfo, Where
from .residency import Residency

T = TypeVar("T")


class PolicyError(Exception):
    """A policy gave an illegal answer or raised; the message names policy, step, layer and expert."""


@dataclass(slots=True)
class Counters:
    """Counts of one phase. "needed" and "hits" are distinct experts of a layer event, "assignments" are per token."""

    events: int = 0
    needed: int = 0
    hits: int = 0
    assignments: int = 0
    hit_assignments: int = 0
    cpu: int = 0
    joins: int = 0
    fetches: int = 0
    streams: int = 0
    prefetches: int = 0
    prefetches_used: int = 0
    prefetches_late: int = 0
    prefetches_wasted: int = 0
    insertions: int = 0
    evictions: int = 0
    fallbacks: int = 0

    @property
    def copies(self) -> int:
        return self.fetches + self.streams + self.prefetches

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True)
class Plan:
    """What the host has to do for one layer.

    gpu: residents, in working order. copies: experts to bring over now, in order, each run on the GPU as it lands;
    `kept` are those that hold a staging slot until the layer ends, the rest pass through. joins: already on their way
    here; run when they land. cpu: in working order.
    """

    demand: Demand
    gpu: tuple[int, ...]
    copies: tuple[int, ...]
    kept: frozenset[int]
    joins: tuple[int, ...]
    cpu: tuple[int, ...]


@dataclass
class Driver:
    """Runs one policy. `record`, if given, receives one tuple for every decision; equal runs give equal records."""

    policy: Policy
    setup: Setup
    future: Future | None = None
    record: list[tuple[Any, ...]] | None = None
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        staging = min(self.setup.experts, max(self.setup.slots, default=0))
        self.cache = Residency(self.setup.layers, self.setup.slots, staging)
        self.cache_view = CacheView(self.cache)
        self._step = -1
        self._layer: int | None = None
        self._count = self.decode
        self._pinned: frozenset[Key] = frozenset()
        self._unused: set[Key] = set()
        self._ask(self.policy.setup, self.setup)
        if self.policy.clairvoyant:
            if self.future is None:
                raise PolicyError(f"policy {self.policy.name} needs the future, which a live run does not have")
            self._ask(self.policy.reveal, self.future)
        self._place()

    @property
    def total(self) -> Counters:
        return self.prefill + self.decode

    # The host tells

    def step_begins(self, step: StepInfo) -> None:
        self._step = step.index
        self._count = self.prefill if step.kind is Kind.PREFILL else self.decode
        self._ask(self.policy.step_begins, step)

    def forecast(self, forecast: Forecast) -> None:
        if forecast.source in self.policy.channels:
            self._ask(self.policy.forecast, forecast)

    def gate(
        self, layer: int, ids: np.ndarray, weights: np.ndarray | None = None, scores: np.ndarray | None = None
    ) -> Plan:
        """A layer's router has spoken: classify its whole demand against residency now, and plan the layer.

        ids: [n, k]. Everything needed is pinned until `layer_ends`.
        """
        loads = np.bincount(ids.reshape(-1), minlength=1)
        experts = np.flatnonzero(loads)
        demand = Demand(layer, tuple(experts.tolist()), tuple(loads[experts].tolist()), ids, weights, scores)
        self._layer = layer
        self._pinned = frozenset(Key(layer, e) for e in demand.experts)
        self._count_demand(demand)
        answer = self._ask(self.policy.dispatch, demand, self.cache_view)
        plan = self._plan(demand, dict(answer))
        self._note("gate", layer, plan.gpu, plan.copies, plan.joins, plan.cpu)
        return plan

    def landed(self, key: Key, ns: int) -> None:
        """A copy is complete. A prefetched expert is resident from now on; a fetched one stays in staging."""
        if key in self.cache.flying:
            self.cache.land(key)
        self._ask(self.policy.transfer_done, key, self.setup.expert_bytes, ns)

    def worked(self, key: Key, where: Where, tokens: int, ns: int) -> None:
        self._ask(self.policy.work_done, key, where, tokens, ns)

    def layer_ends(self, report: LayerReport) -> None:
        """The layer has been served: admit what was fetched, evicting what the policy names, and unpin."""
        admitted: set[Key] = set()
        self._pinned = frozenset()
        for key in list(self.cache.staged):
            if self._make_room(key, admitted):
                self.cache.admit(key)
                admitted.add(key)
                self._count.insertions += 1
                self._note("admit", key)
            else:
                self.cache.unstage(key)
        self._ask(self.policy.layer_ends, report)
        self._layer = None

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        self._ask(self.policy.step_ends, accepted, kept)

    # The host asks

    def next_fetch(self) -> Key | None:
        """The link is free: an expert to prefetch, whose slot is reserved when this returns; or None."""
        key = self._ask(self.policy.next_fetch, self.cache_view)
        if key is None:
            return None
        self._check_key(key)
        if self.cache_view.resident(key) or self.cache_view.in_flight(key):
            self._fail(f"asked to fetch expert {key.expert} of layer {key.layer}, which is already there or on its way")
        if not self._make_room(key, self._pinned):
            self._ask(self.policy.transfer_dropped, key)
            return None
        self.cache.take_off(key)
        self._unused.add(key)
        self._count.prefetches += 1
        self._note("prefetch", key)
        return key

    def draft_length(self, longest: int) -> int:
        n = self._ask(self.policy.draft_length, longest)
        if not 0 <= n <= longest:
            self._fail(f"asked for a draft of {n} tokens; 0 to {longest} are possible")
        return n

    # Inside

    def _place(self) -> None:
        for key in self._ask(lambda: list(self.policy.placement())):
            self._check_key(key)
            if key in self.cache.resident or self.cache.free(key.layer) <= 0:
                self._fail(f"placed expert {key.expert} of layer {key.layer} twice or beyond the slots")
            self.cache.place(key)

    def _count_demand(self, demand: Demand) -> None:
        count = self._count
        count.events += 1
        count.needed += len(demand.experts)
        count.assignments += demand.ids.size
        for expert, load in zip(demand.experts, demand.loads, strict=True):
            key = Key(demand.layer, expert)
            if key in self.cache.resident:
                count.hits += 1
                count.hit_assignments += load
                if key in self._unused:
                    self._unused.remove(key)
                    count.prefetches_used += 1

    def _plan(self, demand: Demand, answer: dict[int, Where]) -> Plan:
        unknown = answer.keys() - set(demand.experts)
        if unknown:
            self._fail(f"dispatched expert {min(unknown)}, which this layer does not need")
        missing = [e for e in demand.experts if e not in answer]
        self._count.fallbacks += len(missing)
        answer |= {e: self._fallback(Key(demand.layer, e)) for e in missing}
        gpu, copies, joins, cpu = [], [], [], []
        for expert, where in answer.items():
            key = Key(demand.layer, expert)
            resident, flying = key in self.cache.resident, key in self.cache.flying
            if where is Where.CPU:
                if not self.setup.cpu:
                    self._fail(f"sent expert {expert} to the CPU, and there is no CPU tier")
                cpu.append(expert)
            elif where is Where.GPU and not resident:
                self._fail(f"called expert {expert} resident, and it is not")
            elif where is not Where.GPU and resident:
                self._fail(f"asked to {where} expert {expert}, which is resident")
            elif resident:
                gpu.append(expert)
            elif flying:
                joins.append(expert)
            else:
                copies.append(expert)
        return self._commit_plan(demand, answer, gpu, copies, joins, cpu)

    def _commit_plan(self, demand: Demand, answer: dict[int, Where], gpu, copies, joins, cpu) -> Plan:
        count = self._count
        for expert in joins:
            key = Key(demand.layer, expert)
            if key in self._unused:
                self._unused.remove(key)
                count.prefetches_late += 1
        kept = [e for e in copies if answer[e] is Where.FETCH][: self.cache.staging]
        for expert in kept:
            self.cache.stage(Key(demand.layer, expert))
        count.joins += len(joins)
        count.fetches += len(kept)
        count.streams += len(copies) - len(kept)
        count.cpu += len(cpu)
        return Plan(demand, tuple(gpu), tuple(copies), frozenset(kept), tuple(joins), tuple(cpu))

    def _fallback(self, key: Key) -> Where:
        if key in self.cache.resident:
            return Where.GPU
        return Where.CPU if self.setup.cpu else Where.STREAM

    def _make_room(self, key: Key, spared: frozenset[Key] | set[Key]) -> bool:
        """A slot for `key`, evicting one resident that is not `spared` if the policy names one."""
        if self.cache.free(key.layer) > 0:
            return True
        candidates = self.cache.candidates(key.layer, spared)
        victim = self._ask(self.policy.victim, key, candidates, self.cache_view)
        if victim is None:
            return False
        self._check_key(victim)
        if victim not in candidates:
            self._fail(f"evicts expert {victim.expert} of layer {victim.layer}, which is needed now or not resident")
        self.cache.evict(victim)
        self._count.evictions += 1
        if victim in self._unused:
            self._unused.remove(victim)
            self._count.prefetches_wasted += 1
        self._note("evict", victim)
        return True

    def _check_key(self, key: Key) -> None:
        if not (0 <= key.layer < self.setup.layers and 0 <= key.expert < self.setup.experts):
            self._fail(f"named expert {key.expert} of layer {key.layer}, which the model does not have")

    def _ask(self, question: Callable[..., T], *args: Any) -> T:
        try:
            return question(*args)
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(f"{self._where()}: {type(error).__name__}: {error}") from error

    def _fail(self, what: str) -> None:
        raise PolicyError(f"{self._where()}: {what}")

    def _where(self) -> str:
        layer = "" if self._layer is None else f", layer {self._layer}"
        return f"policy {self.policy.name}, step {self._step}{layer}"

    def _note(self, *what: Any) -> None:
        if self.record is not None:
            self.record.append((self._step, *what))


class CacheView:
    """The `View` that policies get."""

    __slots__ = ("_cache",)

    def __init__(self, cache: Residency) -> None:
        self._cache = cache

    def resident(self, key: Key) -> bool:
        return key in self._cache.resident

    def in_flight(self, key: Key) -> bool:
        return key in self._cache.flying or key in self._cache.staged

    def residents(self, layer: int) -> list[int]:
        return self._cache.residents(layer)

    def free(self, layer: int) -> int:
        return self._cache.free(layer)
