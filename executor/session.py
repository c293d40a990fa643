"""One live run: the draft/verify loop, the policy's host, and the trace of what happened.

The loop's observer is also the listener of the target's expert layers, so it sees a step whole: its tokens, the
routing of every layer, and what verification kept.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..policies.driver import Counters, Driver, PolicyError
from ..policies.interface import Policy, StepInfo
from ..simulator.capacity import check_size
from ..simulator.engine import setup_for
from ..simulator.machine import Machine, rates_for
from ..simulator.steptimes import StepTime
from ..traces.errors import InputError
from ..traces.prompts import Prompt, encode
from ..traces.recorder import make_header
from ..traces.routers import Asked, Routers, asking, gate_choice, read_routers
from ..traces.schema import DraftShape, Kind, ModelShape, Step, id_dtype, kept_rows
from ..traces.speculate import Generation, Observer, Options, Speculation
from ..traces.writer import TraceWriter
from .host import RING, Host, Routed
from .models import Models
from .moe import Call, attach
from .real import RealHost
from .store import Arena, HostStore
from .times import StepTimes
from .virtual import VirtualHost

LOOKAHEAD = 3  # layers whose gates are asked ahead for a policy that wants it (HybriMoE's horizon)
Clock = Literal["real", "virtual"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run. `slots` is the total over all layers; `budget` bounds the arena in bytes."""

    machine: Machine
    slots: int
    clock: Clock = "real"
    options: Options = field(default_factory=Options)
    seed: int = 0
    budget: int | None = None
    record: Path | None = None


@dataclass(slots=True)
class Result:
    """What a run gave. `times` has one entry a step: measured on the real clock, simulated on the virtual one.

    `decisions` is the driver's record, `arena_bytes` what the slots took on the fast device.
    """

    policy: str
    slots: int
    clock: Clock
    texts: list[list[int]] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    times: Sequence[StepTimes | StepTime] = ()
    arena_bytes: int = 0
    decisions: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        return sum(len(g.tokens) for g in self.generations)

    @property
    def drafted(self) -> int:
        return sum(g.drafted for g in self.generations)

    @property
    def accepted(self) -> int:
        return sum(g.accepted for g in self.generations)

    @property
    def prefill_s(self) -> float:
        """Time spent on prompts, over all sequences; the draft's prompt is part of it."""
        return self._draft_prefill_s + sum(t.wall_ns for t in self.times if t.kind is Kind.PREFILL) / 1e9

    @property
    def decode_s(self) -> float:
        """Wall time of everything after prefill, drafting included."""
        return sum(t.wall_ns for t in self.times if t.kind is not Kind.PREFILL) / 1e9 - self._draft_prefill_s

    @property
    def _draft_prefill_s(self) -> float:
        """The virtual clock does not charge it."""
        return sum(g.seconds.get("draft_prefill", 0.0) for g in self.generations) if self.clock == "real" else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over `decode_s`."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0


class Live(Observer):
    """Tells the host of every step and layer, and gathers the routing for `write`."""

    def __init__(
        self, host: Host, models: Models, routers: Routers, lookahead: int, write: Callable[[Step], None] | None
    ) -> None:
        self.host = host
        self.sequence = self.turn = 0
        self.asked: dict[int, Asked] = {}  # filled by `asking` where gates are asked ahead
        self._gates, self._routers = [block.gate for block in models.blocks], routers
        self._ids = id_dtype(models.pair.shape.experts)
        self._lookahead, self._write = lookahead, write
        self._index = -1
        self._routed: list[Routed] = []

    def draft_length(self, planned: int) -> int:
        return self.host.draft_length(planned)

    def step_begins(self, kind: Kind, tokens: np.ndarray, positions: np.ndarray, drafted: np.ndarray) -> None:
        self._index += 1
        self._positions, self._step = positions, StepInfo(self._index, kind, tokens, drafted)
        self._routed.clear()
        self.host.step_begins(self._step, int(positions[0]))

    def layer(self, call: Call) -> None:
        def route() -> Routed:
            ids = np.array(call.ids, dtype=self._ids)
            self._routed.append(Routed(ids, call.weights.half().cpu().numpy(), self._ahead(call.layer)))
            return self._routed[-1]

        self.host.layer(call, route)

    def step_ends(self, accepted: int, emitted: Sequence[int]) -> None:
        self.host.step_ends(accepted, kept_rows(self._step.drafted, accepted), len(emitted))
        if self._write is not None:
            self._write(self._whole_step(accepted))

    def _ahead(self, layer: int) -> np.ndarray | None:
        """[n, J, k]: what the next layers' gates say of this layer's gate input; the last layer repeats at the end."""
        if not self._lookahead:
            return None
        hidden = self.asked.pop(layer).args[0]
        choices: dict[int, torch.Tensor] = {}
        later = [min(layer + j, len(self._gates) - 1) for j in range(1, self._lookahead + 1)]
        for one in set(later):
            args, kwargs = self._routers.extras[one]
            choices[one] = gate_choice(self._gates[one], hidden, *args, **kwargs)
        return torch.stack([choices[one] for one in later], 1).cpu().numpy().astype(self._ids)

    def _whole_step(self, accepted: int) -> Step:
        layers = self._routed
        ahead = [r.ahead for r in layers if r.ahead is not None]
        return Step(
            sequence=self.sequence,
            turn=self.turn,
            kind=self._step.kind,
            positions=self._positions,
            tokens=self._step.tokens,
            drafted=self._step.drafted,
            accepted=accepted,
            experts=np.stack([r.ids for r in layers], 1),
            weights=np.stack([r.weights for r in layers], 1),
            ahead=np.stack(ahead, 1) if ahead else None,
        )


def run(models: Models, policy: Policy, prompts: Sequence[Prompt], settings: Settings, source: str = "") -> Result:
    """Generate for every prompt, one after another, under `policy`; the cache lives on from one to the next.

    Sequence i samples with seed `options.seed + i`. Raises InputError: a clairvoyant policy, slots below top-k, an
    arena over its budget, a policy that gave an illegal answer.
    """
    options = settings.options
    turns = [encode(models.pair.tokenizer, prompt) for prompt in prompts]
    lookahead = LOOKAHEAD if "next-gate" in policy.channels else 0
    result = Result(policy.name, settings.slots, settings.clock)
    with ExitStack() as stack:
        write = None
        if settings.record is not None:
            header = make_header(models.pair, prompts, turns, options, source, False, lookahead)
            write = stack.enter_context(TraceWriter(settings.record, header)).append
        host = make_host(models, policy, settings, result.decisions)
        stack.callback(host.close)
        live = Live(host, models, _routers(models, lookahead), lookahead, write)
        if lookahead:
            stack.enter_context(asking(models.blocks, live.asked, models.pair.shape.experts, values=False))
        attach(models.experts, live)
        try:
            _generate(models, turns, options, live, result)
        except PolicyError as error:
            raise InputError(str(error)) from error
        finally:
            result.prefill, result.decode = host.driver.prefill, host.driver.decode
            result.times, result.arena_bytes = host.times, host.arena.size
    return result


class _NoExperts:
    """Listener of a pass in which only the gates are of interest."""

    def layer(self, call: Call) -> None:
        call.rows.zero_()


def _routers(models: Models, lookahead: int) -> Routers:
    """What gates take beside hidden states. Raises InputError for gates that cannot be asked ahead."""
    attach(models.experts, _NoExperts())
    return read_routers(models.pair.target, models.blocks, models.pair.shape.experts, False, lookahead > 0)


def _generate(models: Models, turns: Sequence[list[list[int]]], options: Options, live: Live, result: Result) -> None:
    for index, sequence in enumerate(turns):
        live.sequence = index
        own = replace(options, seed=options.seed + index)
        speculation = Speculation(models.pair.target, models.pair.draft, own, live)
        result.texts.append(speculation.text)
        for turn, ids in enumerate(sequence):
            live.turn = turn
            result.generations.append(speculation.generate(ids))


def make_host(
    models: Models, policy: Policy, settings: Settings, decisions: list[tuple[Any, ...]] | None = None
) -> Host:
    """The policy's driver with slots, machine and arena, on the clock that the settings name."""
    pair = models.pair
    length = settings.options.draft_length if pair.draft is not None else 0
    shapes = pair.shape, pair.draft_shape
    return host_for(shapes, length, models.store, models.device, policy, settings, decisions)


def host_for(
    shapes: tuple[ModelShape, DraftShape | None],
    draft_length: int,
    store: HostStore,
    device: torch.device,
    policy: Policy,
    settings: Settings,
    decisions: list[tuple[Any, ...]] | None = None,
) -> Host:
    """The same for experts without a model around them."""
    shape, draft = shapes
    if policy.clairvoyant:
        raise InputError(
            f"--policy {policy.name}: it has to know the future, so it cannot run live; use it in spac-sim"
        )
    check_size("--slots", settings.slots, shape)
    rates = rates_for(settings.machine, shape, draft)
    setup = setup_for(shape, rates, policy, settings.slots, draft_length, settings.seed)
    try:
        driver = Driver(policy, setup, record=decisions)
    except PolicyError as error:
        raise InputError(str(error)) from error
    arena = Arena(driver.cache.physical_slots + RING, store.record, device, settings.budget)
    if settings.clock == "virtual":
        return VirtualHost(driver, rates, store, arena, shape.layers - len(shape.moe_layers))
    return RealHost(driver, rates, store, arena)
