"""The policy contract: what a policy is told, what it is asked, and the words both sides use.

A policy is a deterministic state machine. It holds no weights, reads no clock, starts no thread, and imports neither
torch nor simpy. The host (simulator or executor) owns time, buffers and correctness. A minimal policy overrides
`dispatch` and `victim`; everything else has a default that does nothing. Parameters are the dataclass fields of the
policy's class, so `--policy name:field=value` works for every policy, also for a user's own.

Ties break by (score, last use, layer, expert). Times are integer nanoseconds, sizes bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from ..traces.schema import Kind

if TYPE_CHECKING:
    from .future import Future


class Key(NamedTuple):
    """One expert of one layer (MoE order). The only way to name an expert; a bare expert id is never a key."""

    layer: int
    expert: int


class Where(StrEnum):
    """Who computes a needed expert."""

    GPU = "gpu"  # it is resident
    FETCH = "fetch"  # copy it, compute on the GPU, then ask for a slot to keep it
    STREAM = "stream"  # copy it, compute on the GPU, drop it
    CPU = "cpu"


# Where each needed expert goes, in working order; or one place for all that are not resident.
Answer = Sequence[tuple[int, Where]] | Where
Scope = Literal["layer", "global"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What this machine needs for this model; both hosts and every policy price with the same numbers.

    A resident expert with n tokens takes `gpu_fixed_ns + max(gpu_memory_ns, n * gpu_token_ns)`; on the CPU
    `cpu_fixed_ns + max(cpu_memory_ns, n * cpu_token_ns)`, and the first one of a layer `cpu_first_ns` more.
    A layer that uses the CPU at all pays `hybrid_ns` for submission, synchronisation and merging. CPU and link together
    read host memory at `host_bytes_ns` an expert (0: neither slows the other).
    """

    gpu_fixed_ns: int
    gpu_memory_ns: int
    gpu_token_ns: float
    cpu_first_ns: int
    cpu_fixed_ns: int
    cpu_memory_ns: int
    cpu_token_ns: float
    hybrid_ns: int
    copy_fixed_ns: int
    copy_bytes_ns: int
    host_bytes_ns: int = 0

    @property
    def copy_ns(self) -> int:
        """One expert over the link, alone."""
        return self.copy_fixed_ns + self.copy_bytes_ns

    def gpu_ns(self, tokens: int) -> int:
        return self.gpu_fixed_ns + max(self.gpu_memory_ns, round(tokens * self.gpu_token_ns))

    def cpu_ns(self, tokens: int, first: bool = False) -> int:
        busy = max(self.cpu_memory_ns, round(tokens * self.cpu_token_ns))
        return self.cpu_fixed_ns + busy + (self.cpu_first_ns if first else 0)


@dataclass(frozen=True, slots=True)
class Setup:
    """Told once, before anything else. `slots` holds one number a layer (scope "layer") or one in all ("global").

    draft_token_ns: to draft one token; pass_ns: what a forward pass of one token takes outside its MoE layers;
    decide_ns: what the profile allows a policy to decide about one layer.
    """

    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    slots: tuple[int, ...]
    costs: Costs
    cpu: bool = True
    draft_length: int = 0
    seed: int = 0
    draft_token_ns: int = 0
    pass_ns: int = 0
    decide_ns: int = 0


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A forward pass begins. `tokens` are the ids fed in; `drafted` marks those that a draft proposed."""

    index: int
    kind: Kind
    tokens: np.ndarray
    drafted: np.ndarray


class Demand(NamedTuple):
    """What one layer of one step needs, all of it at once.

    experts: ascending, without repeats; loads: tokens that chose each. ids: [n, k] in the router's order;
    weights: [n, k] or None; scores: [n, E] or None. held: those of `experts` that are resident at the gate. table: the
    keys of all experts of this layer, if the host has them at hand.
    """

    layer: int
    experts: tuple[int, ...]
    loads: tuple[int, ...]
    ids: np.ndarray
    weights: np.ndarray | None = None
    scores: np.ndarray | None = None
    held: frozenset[int] = frozenset()
    table: tuple[Key, ...] = ()

    @property
    def keys(self) -> tuple[Key, ...]:
        """`experts` as keys of this layer; made when asked for, as many policies do without."""
        return tuple([self.table[e] if self.table else Key(self.layer, e) for e in self.experts])

    def load(self) -> dict[int, int]:
        return dict(zip(self.experts, self.loads, strict=True))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Which experts `layer` will probably need, by whom (`source`), how sure (0..1). It may be wrong.

    `counts` gives the expected tokens for each expert.
    """

    source: str
    layer: int
    counts: dict[int, float]
    confidence: float = 1.0


class LayerReport(NamedTuple):
    """How a layer went: wall time from its gate to its end and what the GPU waited for in between."""

    layer: int
    wall_ns: int
    gpu_ns: int
    cpu_ns: int
    wait_copy_ns: int
    wait_cpu_ns: int


class View(Protocol):
    """Read-only state of the cache at the instant of a question."""

    def resident(self, key: Key) -> bool: ...
    def in_flight(self, key: Key) -> bool:
        """On its way into a slot, or copied for the running layer, which may keep it when it ends."""
        ...

    def residents(self, layer: int) -> Sequence[int]:
        """Resident experts of one layer, ascending."""
        ...

    def free(self, layer: int) -> int:
        """Slots in which an expert of this layer could be put without evicting anything."""
        ...


class Candidates(Protocol):
    """The residents that may be evicted now, in (layer, expert) order."""

    def __iter__(self) -> Iterator[Key]: ...
    def __contains__(self, key: object, /) -> bool: ...
    def __len__(self) -> int: ...


class Policy:
    """Base class. Told methods default to nothing; `dispatch` defaults to "residents on the GPU, misses fetched"."""

    name: ClassVar[str]
    channels: frozenset[str] = frozenset()  # forecasts it may receive; all others are closed to it
    clairvoyant: ClassVar[bool] = False  # gets the future through `reveal`; refused by live hosts
    lossless: ClassVar[bool] = True
    serial_tiers: bool = False  # CPU experts finish before GPU experts start, as in some releases
    write_back: bool = False  # a victim's bytes are copied back to the host, as in some releases
    deaf: frozenset[str] = frozenset()  # after `setup`: methods that would do nothing here, so that hosts save the call
    scope: Scope = "layer"

    # Told

    def setup(self, setup: Setup) -> None:
        """Once, first. A policy starts its state here, so that one object can serve several runs in turn."""

    def reveal(self, future: "Future") -> None:
        """Once, after `setup`, for clairvoyant policies only."""

    def step_begins(self, step: StepInfo) -> None:
        """Before the first layer of a forward pass."""

    def forecast(self, forecast: Forecast) -> None:
        """Any time; only from the channels that the policy declares."""

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        """A copy has landed."""

    def transfer_dropped(self, key: Key) -> None:
        """A prefetch that the policy asked for will not happen: no slot could be had for it, or it was cancelled."""

    def slots_changed(self, slots: tuple[int, ...]) -> None:
        """The keys and values took slots away or gave some back; `slots` as in `Setup`. Before `surrender` is asked."""

    def work_done(self, key: Key, where: Where, tokens: int, ns: int) -> None:
        """An expert was computed."""

    def layer_ends(self, report: LayerReport) -> None:
        """After the layer was served and its fetched experts were admitted or dropped."""

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        """After verification: drafted tokens accepted, and [n] which rows stay in the text."""

    # Asked

    def placement(self) -> Iterable[Key]:
        """Experts that are resident before the first step, at most as many as there are slots."""
        return ()

    def dispatch(self, demand: Demand, view: View) -> Answer:
        """Who computes each needed expert, in the order to work and to copy in. What is left out falls back.

        A single `Where` is short for "residents on the GPU, then all others there, ascending".
        """
        return [(e, Where.GPU if view.resident(Key(demand.layer, e)) else Where.FETCH) for e in demand.experts]

    def next_fetch(self, view: View) -> Key | None:
        """The link is free: an absent expert to bring in, or None. Called again after every copy and layer."""
        return None

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        """No slot is free for `incoming`: which candidate goes, or None to leave `incoming` out."""
        return None

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        """A slot of this layer's scope is taken away: which candidate goes. None: the first one."""
        return None

    def keep_fetch(self, key: Key, view: View) -> bool:
        """A prefetch that demand has pushed off the link may go on. False cancels it; what it moved was in vain."""
        return True

    def draft_length(self, longest: int) -> int:
        """How many tokens to draft next, 0 to `longest`."""
        return longest
