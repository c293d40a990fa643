"""What calibration runs: a policy that decides nothing, on a pair of models or on a replay's random experts."""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from ..policies.interface import Candidates, Demand, Key, Policy, Setup, StepInfo, View, Where
from ..simulator.machine import Machine
from ..traces.errors import InputError
from ..traces.prompts import encode, read_prompts
from ..traces.schema import DraftShape, Header, Kind, ModelShape, Provenance, Step
from ..traces.speculate import Options, Speculation
from ..traces.views import View as TraceView
from .live import Live, routers_of
from .models import Models
from .quiet import steady
from .replay import Rig, replay
from .session import LOOKAHEAD, Settings, lookahead_of, make_host
from .store import HostStore
from .times import StepTimes

MANY = 9  # rows of a step with a draft of 8
DRAFTS = 4
PROMPT, TOKENS = 8 * MANY + 1, 40  # of a run, and of each half of a yardstick
BRIEF = 3 * MANY + 1  # prompt of one in which copies take most of the time; it has a third of the tokens
WARM_UP = 2  # steps of each kind that are not counted
HOMES = {"g": Where.GPU, "c": Where.CPU, "s": Where.STREAM}


@dataclass(frozen=True, slots=True)
class Seen:
    """One observed step, the tokens in the cache before it, and what a copy takes on an emulated link (ns)."""

    context: int
    times: StepTimes
    copy_ns: int = 0

    def scaled(self, factor: float) -> "Seen":
        """On a machine that takes `factor` times as long for everything, a copy too."""
        return Seen(self.context, self.times.scaled(factor), round(self.copy_ns * factor))


class Subject(Protocol):
    """What a machine is measured with."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def draft_shape(self) -> DraftShape | None: ...
    @property
    def store(self) -> HostStore: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def module(self) -> Any:
        """A layer's experts module, which knows the activation."""
        ...

    @property
    def gates(self) -> bool:
        """Whether it has some that can be asked ahead."""
        ...

    def observe(self, probe: "Probe", machine: Machine, draft: bool = False, brief: bool = False) -> list[Seen]:
        """Steps of one row and of many under `probe`, or of drafting and verifying; warm-up taken off."""
        ...

    def yardstick(self, machine: Machine) -> int:
        """ns that a short piece of the same work takes now, whatever else was measured: how fast the machine is."""
        ...


class Probe(Policy):
    """Gives every expert one home: e of layer l is where `pattern[(e + l) % len]` says: g(pu), c(pu), or s: streamed.

    As under a placement that never changes, what a tier computes lies in its own memory and nowhere else in the caches.
    experts: how many of each layer are used, the first ones (None: all). whole: all of layer l are where
    `pattern[l % len]` says.
    """

    name: ClassVar[str] = "calibration"

    def __init__(self, pattern: str = "g", experts: int | None = None, whole: bool = False) -> None:
        self.pattern, self.experts, self.whole = pattern, experts, whole

    def slots(self, shape: ModelShape) -> int:
        """How many it needs, in all layers: enough for whatever is used."""
        return len(shape.moe_layers) * self._used(shape.experts)

    def setup(self, setup: Setup) -> None:
        self._setup = setup

    def placement(self) -> Iterable[Key]:
        return self._at_home(Where.GPU)

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        return [(e, self._home(demand.layer, e)) for e in demand.experts]

    def _at_home(self, where: Where) -> list[Key]:
        used = range(self._used(self._setup.experts))
        return [Key(la, e) for la in range(self._setup.layers) for e in used if self._home(la, e) is where]

    def _used(self, experts: int) -> int:
        return experts if self.experts is None else self.experts

    def _home(self, layer: int, expert: int) -> Where:
        at = layer if self.whole else layer + expert
        return HOMES[self.pattern[at % len(self.pattern)]]


class Asking(Probe):
    """Has the next layers' gates asked, and heeds nothing of what they say."""

    channels = frozenset({"next-gate"})


class Prefetching(Probe):
    """Prefetches the experts that are the CPU tier's, one after another and over again, as long as the run lasts; they
    stay its all the same.

    There is room for a few of them only, so each takes the place of the one that has been there longest.
    """

    def slots(self, shape: ModelShape) -> int:
        """For those that are placed, and for as many more in each layer as a token needs."""
        used = self._used(shape.experts)
        placed = -(-used // len(self.pattern)) * self.pattern.count("g")
        return len(shape.moe_layers) * min(used, placed + shape.top_k)

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        wanted = self._at_home(Where.CPU)
        # The layers take turns; first comes who was fetched longest ago.
        self._next = deque(sorted(wanted, key=lambda key: key.expert))
        self._begun = False

    def step_begins(self, step: StepInfo) -> None:
        self._begun = self._begun or step.kind is not Kind.PREFILL

    def next_fetch(self, view: View) -> Key | None:
        for _ in range(len(self._next) if self._begun else 0):
            self._next.rotate(-1)
            if not (view.resident(self._next[-1]) or view.in_flight(self._next[-1])):
                return self._next[-1]
        return None

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        return next((key for key in self._next if key.layer == incoming.layer and key in candidates), None)


@dataclass(frozen=True, slots=True)
class PairSubject:
    """A pair of models: short runs of the real loop on the real clock; more `tokens` give steadier means."""

    models: Models
    tokens: int = TOKENS

    @property
    def shape(self) -> ModelShape:
        return self.models.pair.shape

    @property
    def draft_shape(self) -> DraftShape | None:
        shape = self.models.pair.draft_shape
        return shape if shape is not None and shape.layers else None  # a look-up costs nothing

    @property
    def store(self) -> HostStore:
        return self.models.store

    @property
    def device(self) -> torch.device:
        return self.models.device

    @property
    def module(self) -> Any:
        return self.models.experts[0]

    @property
    def gates(self) -> bool:
        try:
            routers_of(self.models, LOOKAHEAD)
        except InputError:
            return False
        return True

    def observe(self, probe: Probe, machine: Machine, draft: bool = False, brief: bool = False) -> list[Seen]:
        prompt, tokens = (BRIEF, self.tokens // 3) if brief else (PROMPT, self.tokens)
        return self._observe(probe, machine, draft, prompt, tokens)

    def yardstick(self, machine: Machine) -> int:
        seen = [s for pattern in ("g", "gc") for s in self.observe(Probe(pattern), machine, draft=True)]
        return steady([s.times.wall_ns for s in seen])

    def _observe(self, probe: Probe, machine: Machine, draft: bool, prompt: int, tokens: int) -> list[Seen]:
        pair = self.models.pair
        ids = [i for p in read_prompts("held-out") for i in encode(pair.tokenizer, p)[0]][:prompt]
        options = Options(max_new_tokens=tokens, draft_length=DRAFTS, prefill_chunk=MANY)
        lookahead = lookahead_of(probe)
        routers = routers_of(self.models, lookahead) if lookahead else None
        host = make_host(self.models, probe, Settings(machine, probe.slots(pair.shape), options=options))
        with ExitStack() as stack:
            stack.callback(host.close)
            live = _Watched(host, self.models, routers, lookahead)
            live.listen(self.models, stack)
            Speculation(pair.target, pair.draft if draft else None, options, live).generate(ids)
        seen = [Seen(c, s) for c, s in zip(live.contexts, host.times, strict=True) if isinstance(s, StepTimes)]
        return _warm(seen)


class _Watched(Live):
    """Notes the context of every step."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.contexts: list[int] = []

    def step_begins(self, kind: Kind, tokens: np.ndarray, positions: np.ndarray, drafted: np.ndarray) -> None:
        self.contexts.append(int(positions[0]))
        super().step_begins(kind, tokens, positions, drafted)


@dataclass(frozen=True, slots=True)
class RigSubject:
    """A replay's random experts, of which `slots` a layer are used, by steps made up for the purpose."""

    rig: Rig
    slots: int

    @property
    def shape(self) -> ModelShape:
        return self.rig.shape

    @property
    def draft_shape(self) -> DraftShape | None:
        return None  # a replay's draft takes what the profile says

    @property
    def store(self) -> HostStore:
        return self.rig.store

    @property
    def device(self) -> torch.device:
        return self.rig.device

    @property
    def module(self) -> Any:
        return self.rig.module

    @property
    def gates(self) -> bool:
        return False  # a replay's gates are a trace's

    def observe(self, probe: Probe, machine: Machine, draft: bool = False, brief: bool = False) -> list[Seen]:
        probe.experts = self.slots
        header = Header(self.shape, Provenance.SYNTHETIC, "calibration")
        trace = TraceView(header, lambda: iter(self._steps(3 if brief else 5)))
        settings = Settings(machine, probe.slots(self.shape))
        return _warm([Seen(0, s) for s in replay(self.rig, trace, probe, settings).times])

    def yardstick(self, machine: Machine) -> int:
        seen = self.observe(Probe("gc"), machine, brief=True)
        return steady([s.times.wall_ns - s.times.draft for s in seen])  # a pause takes as long on any machine

    def _steps(self, count: int) -> list[Step]:
        """Of one row to as many as a step of the replay verifies, since time does not grow evenly with them; and every
        other one of as many as that, as most are."""
        rng, most = np.random.default_rng(0), 1 + (self.rig.draft_length or MANY - 1)
        fewer = range(1, most, max(1, most // 4))
        return [self._step(rng, rows) for _ in range(count) for few in fewer for rows in (few, most)]

    def _step(self, rng: np.random.Generator, rows: int) -> Step:
        """Experts come from four times as many as one row needs: most are then wanted by one row or two, as live."""
        layers, k = len(self.shape.moe_layers), self.shape.top_k
        pools = [rng.choice(self.slots, min(self.slots, 4 * k), replace=False) for _ in range(layers)]
        experts = np.array([[rng.choice(pool, k, replace=False) for pool in pools] for _ in range(rows)])
        at = np.arange(rows, dtype=np.int32)
        kind = Kind.DECODE if rows == 1 else Kind.VERIFY
        return Step(0, 0, kind, at, np.zeros(rows, np.int32), at > 0, 0, experts)


def _warm(seen: Sequence[Seen]) -> list[Seen]:
    """Without the first steps of each kind."""
    kinds = {s.times.kind for s in seen}
    return [s for kind in sorted(kinds) for s in [s for s in seen if s.times.kind is kind][WARM_UP:]]
