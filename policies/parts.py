"""A policy from six parts: placement, victim order, admission, prefetchers, dispatcher, draft control.

A part is a plain object. `Composed` tells every part what the policy is told and asks each one its own question; a
part overrides what it needs. One object may serve in two places, and one part may be given another in its
constructor. Most published policies add a single new part; docs/policies.md shows how.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ..traces.schema import Kind
from .future import Future
from .interface import Answer, Candidates, Demand, Forecast, Key, LayerReport, Policy, Setup, StepInfo, View, Where
from .prefill import cheaper_absent
from .residency import even_shares

GPU = Where.GPU  # looking up a member costs ten times a name


class Part:
    """What a part may be told, as in `Policy`; everything does nothing by default.

    Of `work_done`, which costs a host a call for every expert, parts hear nothing: override it in the policy.
    `channels`: forecasts it wants to hear.
    """

    channels: ClassVar[frozenset[str]] = frozenset()

    def setup(self, setup: Setup) -> None:
        """Once, first; parts are made anew for every run."""

    def reveal(self, future: Future) -> None:
        """Once, after `setup`, in a policy that declares itself clairvoyant."""

    def placed(self, keys: Sequence[Key]) -> None:
        """What is resident before the first step."""

    def step_begins(self, step: StepInfo) -> None: ...

    def forecast(self, forecast: Forecast) -> None: ...

    def used(self, demand: Demand, view: View) -> None:
        """A layer's router has spoken. Before `dispatch` is asked."""

    def transfer_done(self, key: Key, size: int, ns: int) -> None: ...

    def transfer_dropped(self, key: Key) -> None: ...

    def slots_changed(self, slots: tuple[int, ...]) -> None: ...

    def layer_ends(self, report: LayerReport) -> None: ...

    def step_ends(self, accepted: int, kept: np.ndarray) -> None: ...


TOLD = (
    *("setup", "reveal", "placed", "step_begins", "forecast", "used", "transfer_done", "transfer_dropped"),
    *("slots_changed", "layer_ends", "step_ends"),
)


class Placement(Part):
    """What is resident before the first step. This one: nothing."""

    def keys(self) -> Iterable[Key]:
        """Asked after `setup` and `reveal`; at most as many as there are slots."""
        return ()


class FirstIds(Placement):
    """See `even`."""

    def setup(self, setup: Setup) -> None:
        self._setup = setup

    def keys(self) -> Iterable[Key]:
        return even(self._setup)


class VictimOrder(Part):
    """Who goes first when a slot is needed. This one: the lowest layer, then the lowest id."""

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        """The candidate to go for an expert of `layer`; None only if there is no candidate."""
        return next(iter(candidates), None)

    def better(self, incoming: Key, victim: Key) -> bool:
        """`incoming` is worth more than `victim`; equals are not better."""
        return True


class Admission(Part):
    """What becomes of a miss that was fetched for the running layer. This one: it is always kept."""

    def admits(self, key: Key, view: View) -> bool:
        """May it be kept at all? If not, it is streamed. Asked before the copy."""
        return True

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        """No slot is free: may it have the victim's? Asked when the layer ends."""
        return True


@dataclass
class IfBetter(Admission):
    """A fetched expert stays only if the victim order ranks it above the victim: the best of both remain.

    This is how event-atomic cache studies define a policy (arXiv 2608.07911): after each event the best `slots` of
    residents and fetched ones stay.
    """

    order: VictimOrder

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        return self.order.better(incoming, victim)


class Never(Admission):
    """Fetched experts pass through."""

    def admits(self, key: Key, view: View) -> bool:
        return False


class DecodeOnly(Admission):
    """Fetched experts stay, but not in prefill, so that a prompt does not sweep the cache empty."""

    def step_begins(self, step: StepInfo) -> None:
        self._open = step.kind is not Kind.PREFILL

    def admits(self, key: Key, view: View) -> bool:
        return self._open


class Prefetcher(Part):
    """Copies that no layer waits for. Asked whenever the link is free."""

    def next_fetch(self, view: View) -> Key | None:
        """An expert that is neither resident nor in flight, or None."""
        return None

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        """No slot is free for what was just asked for: may it have the victim's?"""
        return True

    def keep_fetch(self, key: Key, view: View) -> bool:
        """One of its copies was pushed off the link by demand. False cancels it."""
        return True


class Dispatcher(Part):
    """Who computes each needed expert. This one: residents first, then the misses, fetched."""

    def dispatch(self, demand: Demand, view: View) -> Answer:
        return Where.FETCH


class OnCpu(Dispatcher):
    """Residents on the GPU, misses on the CPU; streamed where there is no CPU tier.

    offload_tokens: batches of so many tokens are streamed, too; "auto": layers for which that takes less time.
    """

    def __init__(self, offload_tokens: int | Literal["auto"] = 32) -> None:
        self._offload_tokens: int | Literal["auto"] = offload_tokens

    def setup(self, setup: Setup) -> None:
        self._cpu, self._costs = setup.cpu, setup.costs

    def dispatch(self, demand: Demand, view: View) -> Answer:
        return self._missing(demand)

    def _missing(self, demand: Demand) -> Where:
        if not self._cpu:
            return Where.STREAM
        if self._offload_tokens == "auto":
            loads = [n for e, n in zip(demand.experts, demand.loads, strict=True) if e not in demand.held]
            return cheaper_absent(loads, self._costs)
        return Where.CPU if len(demand.ids) < self._offload_tokens else Where.STREAM


class DraftControl(Part):
    """How far to draft. This one: as far as the run allows."""

    def draft_length(self, longest: int) -> int:
        return longest


@dataclass
class Parts:
    """What a policy consists of. Prefetchers are asked in turn until one names an expert."""

    victims: VictimOrder
    admission: Admission
    placement: Placement
    prefetch: Sequence[Prefetcher]
    dispatch: Dispatcher
    draft: DraftControl

    def __init__(
        self,
        victims: VictimOrder | None = None,
        admission: Admission | None = None,
        placement: Placement | None = None,
        prefetch: Sequence[Prefetcher] = (),
        dispatch: Dispatcher | None = None,
        draft: DraftControl | None = None,
    ) -> None:
        self.victims = victims or VictimOrder()
        self.admission = admission or Admission()
        self.placement = placement or Placement()
        self.prefetch = prefetch
        self.dispatch = dispatch or Dispatcher()
        self.draft = draft or DraftControl()

    def each(self) -> list[Part]:
        """Every part once, in a fixed order."""
        parts = [self.victims, self.admission, self.placement, *self.prefetch, self.dispatch, self.draft]
        return list({id(part): part for part in parts}.values())


class Composed(Policy):
    """A policy that is its parts: a subclass says which in `parts` and has parameters as dataclass fields."""

    def parts(self, setup: Setup) -> Parts:
        """The parts for one run, new and not yet set up."""
        raise NotImplementedError

    # Told

    def setup(self, setup: Setup) -> None:
        self._parts = parts = self.parts(setup)
        each = parts.each()
        self.channels = frozenset[str]().union(*(part.channels for part in each))
        self._tell = {event: _listeners(each, event) for event in TOLD}
        self._used = self._tell["used"]
        self._selective = _overrides(parts.admission, Admission, "admits")
        self._asked: dict[Key, Prefetcher] = {}  # who asked for what is not yet there
        self.deaf = self._deaf()
        self._told("setup", setup)

    def _deaf(self) -> frozenset[str]:
        """What no part hears or answers, unless the subclass does."""
        parts, idle = self._parts, {"layer_ends"} - {e for e in TOLD if self._tell[e]}
        if not parts.prefetch:
            idle |= {"next_fetch"} | ({"transfer_done"} if not self._tell["transfer_done"] else set())
        if not _overrides(parts.draft, DraftControl, "draft_length"):
            idle.add("draft_length")
        return frozenset(name for name in idle if not _overrides(self, Composed, name))

    def _told(self, event: str, *what: Any) -> None:
        for tell in self._tell[event]:
            tell(*what)

    def reveal(self, future: Future) -> None:
        self._told("reveal", future)

    def step_begins(self, step: StepInfo) -> None:
        self._told("step_begins", step)

    def forecast(self, forecast: Forecast) -> None:
        self._told("forecast", forecast)

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        self._asked.pop(key, None)
        self._told("transfer_done", key, size, ns)

    def transfer_dropped(self, key: Key) -> None:
        self._asked.pop(key, None)
        self._told("transfer_dropped", key)

    def slots_changed(self, slots: tuple[int, ...]) -> None:
        self._told("slots_changed", slots)

    def layer_ends(self, report: LayerReport) -> None:
        self._told("layer_ends", report)

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        self._told("step_ends", accepted, kept)

    # Asked

    def placement(self) -> Iterable[Key]:
        keys = list(self._parts.placement.keys())
        self._told("placed", keys)
        return keys

    def dispatch(self, demand: Demand, view: View) -> Answer:
        for tell in self._used:
            tell(demand, view)
        answer = self._parts.dispatch.dispatch(demand, view)
        if not self._selective:
            return answer
        admits = self._parts.admission.admits
        return [
            (e, Where.STREAM if where is Where.FETCH and not admits(Key(demand.layer, e), view) else where)
            for e, where in (split(demand, answer) if isinstance(answer, Where) else answer)
        ]

    def next_fetch(self, view: View) -> Key | None:
        for prefetcher in self._parts.prefetch:
            key = prefetcher.next_fetch(view)
            if key is not None:
                self._asked[key] = prefetcher
                return key
        return None

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        victim = self._parts.victims.first(incoming.layer, candidates, view)
        if victim is None:
            return None
        asker = self._asked.get(incoming, self._parts.admission)
        return victim if asker.replaces(incoming, victim, view) else None

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        return self._parts.victims.first(layer, candidates, view)

    def keep_fetch(self, key: Key, view: View) -> bool:
        asker = self._asked.get(key)
        return asker is None or asker.keep_fetch(key, view)

    def draft_length(self, longest: int) -> int:
        return self._parts.draft.draft_length(longest)


def _listeners(parts: Sequence[Part], event: str) -> list[Callable[..., None]]:
    return [getattr(part, event) for part in parts if _overrides(part, Part, event)]


def _overrides(one: object, base: type, method: str) -> bool:
    return getattr(type(one), method) is not getattr(base, method)


def split(demand: Demand, missing: Where) -> list[tuple[int, Where]]:
    """Residents on the GPU, ascending, then all others `missing`, ascending."""
    held, experts = demand.held, demand.experts
    hits = [(e, GPU) for e in experts if e in held]
    if len(hits) < len(experts):
        hits += [(e, missing) for e in experts if e not in held]
    return hits


def next_absent(wanted: list[Key], view: View) -> Key | None:
    """The last of `wanted` that is neither resident nor on its way; it and those after it are taken off the list."""
    while wanted:
        key = wanted.pop()
        if not view.resident(key) and not view.in_flight(key):
            return key
    return None


def even(setup: Setup) -> list[Key]:
    """The lowest ids of every layer, as many as its slots or an even share of a pool, the rest to the first layers."""
    shares = setup.slots
    if len(shares) < setup.layers:
        shares = even_shares(shares[0], setup.layers)
    return [Key(layer, e) for layer, n in enumerate(shares) for e in range(min(n, setup.experts))]
