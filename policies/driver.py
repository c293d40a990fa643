"""What both hosts do with a policy's answers, written once: pin, ask, check, admit, evict, count.

The driver waits for nothing and reads no clock. A host calls, for every step,
`step_begins`; for every layer `gate`, then (while it spends the time) `next_fetch`, `landed` and, where demand pushed a
prefetch aside, `keep_fetch` and `cancelled`; then `layer_ends`; and `step_ends`. Between steps it may call `resize`.
Simulator and executor differ only in how they spend time between these calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from ..traces.schema import Kind
from .demand import Needed, needed_by_layer
from .future import Future
from .interface import Answer, Demand, Forecast, Key, LayerReport, Policy, Setup, StepInfo, Where
from .residency import Evictable, Residency

T = TypeVar("T")
GPU, FETCH, CPU = Where.GPU, Where.FETCH, Where.CPU  # looking up a member costs ten times a name
NOTHING: frozenset[Any] = frozenset()
new_tuple = tuple.__new__  # what a NamedTuple's own constructor comes to, at a third of the time


class PolicyError(Exception):
    """A policy gave an illegal answer or raised; the message names policy, step, layer and expert."""


@dataclass(slots=True)
class Counters:
    """Counts of one phase. "needed" and "hits" are distinct experts of a layer event, "assignments" are per token.

    `prefetches` counts those begun; `cancelled` those of them that were given up, `cancelled_bytes` what these had
    moved by then. `write_backs` are victims copied back to the host.
    """

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
    cancelled: int = 0
    cancelled_bytes: int = 0
    insertions: int = 0
    evictions: int = 0
    write_backs: int = 0
    fallbacks: int = 0

    @property
    def copies(self) -> int:
        """Experts copied to the device whole."""
        return self.fetches + self.streams + self.prefetches - self.cancelled

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


class Plan(NamedTuple):
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

    @property
    def load(self) -> dict[int, int]:
        """Tokens that chose each needed expert."""
        return self.demand.load()


@dataclass
class Driver:
    """Runs one policy. `record`, if given, receives one tuple for every decision; equal runs give equal records.

    protect: prefill leaves the cache as it is (its copies pass through and nothing is prefetched), so that a long
    prompt does not displace what decoding uses. evicted: told every victim whose bytes go back to the host.
    """

    policy: Policy
    setup: Setup
    future: Future | None = None
    record: list[tuple[Any, ...]] | None = None
    protect: bool = False
    evicted: Callable[[Key], None] | None = None
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        staging = min(self.setup.experts, max(self.setup.slots, default=0))
        self.cache = Residency(self.setup.layers, self.setup.experts, self.setup.slots, staging)
        self.cache_view = CacheView(self.cache)
        self._step = -1
        self._layer: int | None = None
        self._count = self.decode
        self._frozen = False
        self._demand: Demand | None = None  # of the running layer: pinned
        self._unused: set[Key] = set()
        self._ask(self.policy.setup, self.setup)
        self.hears_work, self.hears_landing, self.hears_layers, self.prefetches, self.drafts = (
            self._hears(name) for name in ("work_done", "transfer_done", "layer_ends", "next_fetch", "draft_length")
        )
        if self.policy.clairvoyant:
            if self.future is None:
                raise PolicyError(f"policy {self.policy.name} needs the future, which a live run does not have")
            if self.drafts:
                raise PolicyError(f"policy {self.policy.name} knows the future, so it cannot change it by drafting")
            self._ask(self.policy.reveal, self.future)
        self._place()
        self._dispatch, self._victim = self.policy.dispatch, self.policy.victim  # asked in every layer
        self._writes_back = self.policy.write_back

    def _hears(self, name: str) -> bool:
        """Whether the policy has a method of its own: calls that would do nothing are saved."""
        own = getattr(type(self.policy), name) is not getattr(Policy, name)
        return own and name not in self.policy.deaf

    @property
    def total(self) -> Counters:
        return self.prefill + self.decode

    # The host tells

    def step_begins(self, step: StepInfo) -> None:
        self._step = step.index
        prefill = step.kind is Kind.PREFILL
        self._count = self.prefill if prefill else self.decode
        self._frozen = prefill and self.protect
        self._ask(self.policy.step_begins, step)

    def forecast(self, forecast: Forecast) -> None:
        if forecast.source in self.policy.channels:
            self._ask(self.policy.forecast, forecast)

    def gate(
        self,
        layer: int,
        ids: np.ndarray,
        weights: np.ndarray | None = None,
        scores: np.ndarray | None = None,
        needed: Needed | None = None,
    ) -> Plan:
        """A layer's router has spoken: classify its whole demand against residency now, and plan the layer.

        ids: [n, k]; `needed` is what `needed_by_layer` makes of them, if the host has it already. Everything needed
        is pinned until `layer_ends`.
        """
        cache, count = self.cache, self._count
        experts, loads = needed or needed_by_layer(ids[:, None])[0]
        hits = tuple(filter(cache.by_layer[layer].__contains__, experts))
        demand = new_tuple(Demand, (layer, experts, loads, ids, weights, scores, frozenset(hits), cache.keys[layer]))
        self._layer, self._demand = layer, demand
        count.events += 1
        count.needed += len(experts)
        count.hits += len(hits)
        count.assignments += ids.size
        count.hit_assignments += len(hits) if len(ids) == 1 else _tokens(demand)
        if self._unused:
            self._count_used(demand)
        try:
            answer = self._dispatch(demand, self.cache_view)
        except Exception as error:
            self._raised(error)
        plan = self._fetch_all(demand, hits) if answer is FETCH and not cache.flying else self._plan(demand, answer)
        if self.record is not None:
            self._note("gate", layer, plan.gpu, plan.copies, plan.joins, plan.cpu)
        return plan

    def landed(self, key: Key, ns: int) -> None:
        """A copy is complete. A prefetched expert is resident from now on; a fetched one stays in staging."""
        if key in self.cache.flying:
            self.cache.land(key)
        if self.hears_landing:
            self._ask(self.policy.transfer_done, key, self.setup.expert_bytes, ns)

    def cancelled(self, key: Key, moved: int) -> None:
        """A prefetch was given up after `moved` bytes."""
        self.cache.call_off(key)
        self._unused.discard(key)
        self._count.cancelled += 1
        self._count.cancelled_bytes += moved
        self._note("cancel", key)
        self._ask(self.policy.transfer_dropped, key)

    def worked(self, key: Key, where: Where, tokens: int, ns: int) -> None:
        self._ask(self.policy.work_done, key, where, tokens, ns)

    def layer_ends(self, report: LayerReport | None) -> None:
        """The layer has been served: admit what was fetched, evicting what the policy names, and unpin.

        A policy that does not hear of layers needs no report.
        """
        self._demand = None
        if self.cache.staged:
            self._admit()
        if self.hears_layers and report is not None:
            self._ask(self.policy.layer_ends, report)
        self._layer = None

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        self._ask(self.policy.step_ends, accepted, kept)

    def resize(self, slots: tuple[int, ...]) -> None:
        """Between steps: other slots than before, at most as many as at the start. The policy names what goes.

        A scope whose copies are still on their way may stay too full until the next call.
        """
        if slots == self.cache.capacity:
            return
        self.cache.capacity = slots
        self._ask(self.policy.slots_changed, slots)
        for scope, most in enumerate(slots):
            candidates = self.cache.evictable[scope]
            while self.cache.used[scope] > most and (first := next(iter(candidates), None)) is not None:
                self._evict(self._ask(self.policy.surrender, scope, candidates, self.cache_view) or first, candidates)

    # The host asks

    def next_fetch(self) -> Key | None:
        """The link is free: an expert to prefetch, whose slot is reserved when this returns; or None."""
        if self._frozen or not self.prefetches:
            return None
        key = self._ask(self.policy.next_fetch, self.cache_view)
        if key is None:
            return None
        self._check_key(key)
        if self.cache_view.resident(key) or self.cache_view.in_flight(key):
            self._fail(f"asked to fetch expert {key.expert} of layer {key.layer}, which is already there or on its way")
        if self.cache.free(key.layer) <= 0 and not self._make_room(key):
            self._ask(self.policy.transfer_dropped, key)
            return None
        self.cache.take_off(key)
        self._unused.add(key)
        self._count.prefetches += 1
        self._note("prefetch", key)
        return key

    def keep_fetch(self, key: Key) -> bool:
        """Whether a prefetch that was pushed aside goes on."""
        return self._ask(self.policy.keep_fetch, key, self.cache_view)

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

    def _count_used(self, demand: Demand) -> None:
        used = self._unused.intersection([demand.table[e] for e in demand.held])
        self._unused -= used
        self._count.prefetches_used += len(used)

    def _fetch_all(self, demand: Demand, hits: tuple[int, ...]) -> Plan:
        """`_plan` of the commonest answer: every miss is fetched, and none is on its way."""
        experts, held, copies, kept = demand.experts, demand.held, (), NOTHING
        if len(hits) < len(experts):
            copies = tuple([e for e in experts if e not in held])
            kept = self._stage(demand.layer, copies)
        return new_tuple(Plan, (demand, hits, copies, kept, (), ()))

    def _stage(self, layer: int, fetched: Sequence[int], passing: int = 0) -> frozenset[int]:
        """Staging slots for those copies that are `fetched`, as far as there are any; the rest pass through, too."""
        places, count = 0 if self._frozen else self.cache.staging, self._count
        keep = fetched[:places] if len(fetched) > places else fetched
        self.cache.stage(layer, keep)
        count.fetches += len(keep)
        count.streams += len(fetched) - len(keep) + passing
        return frozenset(keep)

    def _plan(self, demand: Demand, answer: Answer) -> Plan:
        gpu, others = self._sorted(demand, answer)
        held, flying, keys = demand.held, self.cache.flying, demand.table
        copies, fetched, joins, cpu = [], [], [], []
        for expert, where in others:
            if where is CPU:
                cpu.append(expert)
            elif expert in held:
                self._fail(f"asked to {where} expert {expert}, which is resident")
            elif keys[expert] in flying:
                joins.append(expert)
            else:
                copies.append(expert)
                if where is FETCH:
                    fetched.append(expert)
        kept = self._stage(demand.layer, fetched, len(copies) - len(fetched)) if copies else NOTHING
        if joins:
            self._count_joins([keys[e] for e in joins])
        if cpu:
            self._count.cpu += len(cpu)
            if not self.setup.cpu:
                self._fail(f"sent expert {cpu[0]} to the CPU, and there is no CPU tier")
        return Plan(demand, tuple(gpu), tuple(copies), kept, tuple(joins), tuple(cpu))

    def _sorted(self, demand: Demand, answer: Answer) -> tuple[list[int], Sequence[tuple[int, Where]]]:
        """Who runs as a resident, and who elsewhere and where, both in the policy's order; complete and legal."""
        held, experts = demand.held, demand.experts
        if isinstance(answer, Where):
            gpu = [e for e in experts if e in held]
            return gpu, [(e, answer) for e in experts if e not in held] if len(gpu) < len(experts) else ()
        told = dict(answer)
        if told.keys() != set(experts):
            self._complete(demand, told)
        gpu = [e for e, where in told.items() if where is GPU]
        if not held.issuperset(gpu):
            self._fail(f"called expert {next(e for e in gpu if e not in held)} resident, and it is not")
        return gpu, [pair for pair in told.items() if pair[1] is not GPU] if len(gpu) < len(told) else ()

    def _complete(self, demand: Demand, told: dict[int, Where]) -> None:
        """What the policy left out falls back; what it invented fails."""
        unknown = told.keys() - set(demand.experts)
        if unknown:
            self._fail(f"dispatched expert {min(unknown)}, which this layer does not need")
        for key in demand.keys:
            if key.expert not in told:
                self._count.fallbacks += 1
                told[key.expert] = self._fallback(key)

    def _fallback(self, key: Key) -> Where:
        if key in self.cache.resident:
            return Where.GPU
        return Where.CPU if self.setup.cpu else Where.STREAM

    def _count_joins(self, joins: list[Key]) -> None:
        late = self._unused.intersection(joins)
        self._unused -= late
        self._count.joins += len(joins)
        self._count.prefetches_late += len(late)

    def _admit(self) -> None:
        """Staged experts ask for a slot, one by one; those admitted before are spared."""
        cache, staged, admitted = self.cache, list(self.cache.staged), []
        layer = staged[0].layer
        candidates, free = cache.evictable[cache.scopes[layer]], cache.free(layer)
        for key in staged:
            if free > 0:
                free -= 1
                cache.admit(key)
            else:
                try:
                    victim = self._victim(key, candidates, self.cache_view)
                except Exception as error:
                    self._raised(error)
                if victim is None:
                    cache.unstage(key)
                    continue
                if victim not in candidates:
                    self._illegal(victim)
                cache.exchange(victim, key)
                self._evicted(victim)
            admitted.append(key)
            if self.record is not None:
                self._note("admit", key)
        candidates.update(admitted)
        self._count.insertions += len(admitted)

    def _make_room(self, key: Key) -> bool:
        """Evict the resident that the policy names for `key`, if it names one; what the running layer needs stays."""
        candidates = self.cache.evictable[self.cache.scopes[key.layer]]
        spared = candidates.intersection(self._demand.keys) if self._demand else NOTHING
        candidates -= spared
        victim = self._ask(self.policy.victim, key, candidates, self.cache_view)
        if victim is not None:
            self._evict(victim, candidates)
        candidates |= spared
        return victim is not None

    def _evict(self, victim: Key, candidates: Evictable) -> None:
        if victim not in candidates:
            self._illegal(victim)
        self.cache.evict(victim)
        self._evicted(victim)

    def _illegal(self, victim: Key) -> NoReturn:
        self._check_key(victim)
        self._fail(f"evicts expert {victim.expert} of layer {victim.layer}, which is needed now or not resident")

    def _evicted(self, victim: Key) -> None:
        self._count.evictions += 1
        if self._unused and victim in self._unused:
            self._unused.remove(victim)
            self._count.prefetches_wasted += 1
        if self._writes_back:
            self._count.write_backs += 1
            if self.evicted:
                self.evicted(victim)
        if self.record is not None:
            self._note("evict", victim)

    def _check_key(self, key: Key) -> None:
        if not isinstance(key, Key):
            self._fail(f"answered {key!r}, which is no Key(layer, expert)")
        if not (0 <= key.layer < self.setup.layers and 0 <= key.expert < self.setup.experts):
            self._fail(f"named expert {key.expert} of layer {key.layer}, which the model does not have")

    def _ask(self, question: Callable[..., T], *args: Any) -> T:
        try:
            return question(*args)
        except Exception as error:
            self._raised(error)

    def _raised(self, error: Exception) -> NoReturn:
        if isinstance(error, PolicyError):
            raise error
        raise PolicyError(f"{self._where()}: {type(error).__name__}: {error}") from error

    def _fail(self, what: str) -> NoReturn:
        raise PolicyError(f"{self._where()}: {what}")

    def _where(self) -> str:
        layer = "" if self._layer is None else f", layer {self._layer}"
        return f"policy {self.policy.name}, step {self._step}{layer}"

    def _note(self, *what: Any) -> None:
        if self.record is not None:
            self.record.append((self._step, *what))


def _tokens(demand: Demand) -> int:
    """Choices that find their expert resident."""
    held = demand.held
    return sum([load for e, load in zip(demand.experts, demand.loads, strict=True) if e in held])


class CacheView:
    """The `View` that policies get."""

    __slots__ = ("_by_layer", "_cache")

    def __init__(self, cache: Residency) -> None:
        self._cache, self._by_layer = cache, cache.by_layer

    def resident(self, key: Key) -> bool:
        layer, expert = key
        return 0 <= layer < len(self._by_layer) and expert in self._by_layer[layer]

    def in_flight(self, key: Key) -> bool:
        return key in self._cache.flying or key in self._cache.staged

    def residents(self, layer: int) -> list[int]:
        return self._cache.residents(layer)

    def free(self, layer: int) -> int:
        return self._cache.free(layer)
