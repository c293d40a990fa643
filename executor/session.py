"""A loaded pair that answers requests under a policy, one after another; and runs over a set of prompts.

What lives on between requests: the slots with the experts in them, the policy's state, the threads of both lanes, and
the keys and values of the last text.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch

from ..policies.driver import Counters, Driver, PolicyError
from ..policies.events import EventLog, Recording
from ..policies.interface import Policy
from ..policies.load import check_causal
from ..simulator.capacity import check_size
from ..simulator.engine import setup_for
from ..simulator.machine import Machine, rates_for
from ..simulator.steptimes import StepTime
from ..traces.errors import InputError
from ..traces.prompts import Prompt, encode
from ..traces.recorder import make_header
from ..traces.routers import Routers
from ..traces.schema import DraftShape, ModelShape, Step
from ..traces.speculate import Options, Speculation
from ..traces.writer import TraceWriter
from .device import naming
from .host import RING, Host
from .live import Live, routers_of
from .models import Models
from .real import RealHost
from .result import Answer, Clock, Result, Times
from .store import Arena, HostStore
from .times import StepTimes
from .virtual import VirtualHost

LOOKAHEAD = 3  # layers whose gates are asked ahead for a policy that wants it (HybriMoE's horizon)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run. `slots` is the total over all layers; `budget` bounds the arena in bytes.

    `record` takes the routing trace, `events` what the policy was told and asked (see `policies.events`), the first
    `most_events` bytes of it. With `timeline` a run on the real clock keeps spans of what every lane did.
    """

    machine: Machine
    slots: int
    clock: Clock = "real"
    options: Options = field(default_factory=Options)
    seed: int = 0
    budget: int | None = None
    record: Path | None = None
    events: Path | None = None
    timeline: bool = False
    most_events: int | None = None


def lookahead_of(policy: Policy) -> int:
    """How many layers' gates are asked ahead for it."""
    return LOOKAHEAD if "next-gate" in policy.channels else 0


class Session:
    """Answers requests one at a time, all from the thread that made it.

    After an error or an interrupt in the middle of a step, the next request begins with empty slots and a policy that
    is set up anew. Raises InputError as `make_host` does, and for a policy that gives an illegal answer.
    """

    def __init__(
        self,
        models: Models,
        policy: Policy,
        settings: Settings,
        write: Callable[[Step], None] | None = None,
        decisions: list[tuple[Any, ...]] | None = None,
    ) -> None:
        self.models, self.settings, self.policy = models, settings, policy
        self.sequence = self.turn = 0
        self._write, self._decisions = write, decisions
        self._routers: dict[int, Routers] = {}
        self._arena: Arena | None = None
        self._live: Live | None = None
        self._speculation: Speculation | None = None
        self._lanes = ExitStack()
        self._files = ExitStack()
        self._log: EventLog | None = None
        try:
            if settings.events is not None:
                self._log = self._files.enter_context(EventLog(settings.events, settings.most_events))
            self.use(policy)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def host(self) -> Host:
        """The running host; it is another one after `use`."""
        return self._ready().host

    @property
    def text(self) -> list[int]:
        """Token ids of the last text, prompt and answer."""
        return [] if self._speculation is None else list(self._speculation.text)

    def use(self, policy: Policy) -> None:
        """Decide by `policy` from now on: a new driver and new lanes on the same store and slots, which start as the
        policy places them. Keys and values stay."""
        self._drop()
        lookahead = lookahead_of(policy)
        if lookahead not in self._routers:
            self._routers[lookahead] = routers_of(self.models, lookahead)
        told = policy if self._log is None else Recording(policy, self._log)
        host = make_host(self.models, told, self.settings, self._decisions, self._arena)
        self._arena = host.arena
        self._lanes.callback(host.close)
        self._live = Live(host, self.models, self._routers[lookahead], lookahead, self._write)
        self._live.listen(self.models, self._lanes)
        self.policy = policy

    def begin(self, options: Options) -> None:
        """Start a new text, with nothing of the last one."""
        pair = self.models.pair
        self._speculation = Speculation(pair.target, pair.draft, options, self._ready())

    def extend(
        self,
        ids: Sequence[int],
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Answer:
        """Append `ids` to the text and generate.

        `on_tokens` is told the new tokens of every step; `stop` is asked before every forward pass and ends the answer.
        """
        live, speculation = self._ready(), self._speculation
        assert speculation is not None, "begin first"
        live.sequence, live.turn = self.sequence, self.turn
        live.on_tokens, live.should_stop = on_tokens, stop
        speculation.observer = live  # another one since `use`
        driver, begin, reused, first = live.host.driver, perf_counter(), speculation.target.length, len(live.host.times)
        before = replace(driver.prefill), replace(driver.decode)
        prompt = len(speculation.text) + len(ids)
        try:
            with naming("keys, values and activations", self.models.device):
                generation = speculation.generate(ids)
        except PolicyError as error:
            self._forget()
            raise InputError(str(error)) from error
        except BaseException:
            self._forget()
            raise
        finally:
            live.on_tokens = live.should_stop = None
        return Answer(
            policy=self.policy.name,
            prompt=prompt,
            reused=reused,
            generation=generation,
            prefill=_since(driver.prefill, before[0]),
            decode=_since(driver.decode, before[1]),
            times=self._take_times(first),
            seconds=perf_counter() - begin,
        )

    def generate(
        self,
        ids: Sequence[int],
        options: Options | None = None,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Answer:
        """Answer a whole text `ids`. What it has in common with the last one is not read again."""
        own, live, last = options or self.settings.options, self._ready(), self._speculation
        if last is None or not last.target.can_crop:  # a recurrent state cannot be cut back
            self.begin(own)
        assert self._speculation is not None
        self._speculation.continue_from(ids, own, live)
        return self.extend((), on_tokens, stop)

    def forget(self) -> None:
        """Drop the keys and values of the last text; experts stay where they are."""
        self._speculation = None

    def close(self) -> None:
        """End every thread and close every file. The models stay loaded."""
        self._drop()
        self._files.close()

    def _ready(self) -> Live:
        if self._live is None:
            self.use(self.policy)
        assert self._live is not None
        return self._live

    def _drop(self) -> None:
        """End the lanes."""
        self._lanes.close()
        self._live = None

    def _forget(self) -> None:
        """A step was left in the middle: neither driver nor caches can go on."""
        self._drop()
        self.forget()

    def _take_times(self, first: int) -> Times:
        """The steps from `first` on. The real clock's list is emptied, or a server's would grow without end."""
        times = self.host.times
        taken = times[first:]
        if isinstance(times, list):
            times.clear()
        return taken


def _since(now: Counters, then: Counters) -> Counters:
    return Counters(**{f.name: getattr(now, f.name) - getattr(then, f.name) for f in fields(Counters)})


def run(models: Models, policy: Policy, prompts: Sequence[Prompt], settings: Settings, source: str = "") -> Result:
    """Generate for every prompt, one after another, under `policy`; the cache lives on from one to the next.

    Sequence i samples with seed `options.seed + i`. Raises InputError: a clairvoyant policy, slots below top-k, an
    arena over its budget, a policy that gave an illegal answer.
    """
    options = settings.options
    turns = [encode(models.pair.tokenizer, prompt) for prompt in prompts]
    lookahead = lookahead_of(policy)
    result = Result(policy.name, settings.slots, settings.clock)
    with ExitStack() as stack:
        writer = None
        if settings.record is not None:
            header = make_header(models.pair, prompts, turns, options, source, False, lookahead)
            writer = stack.enter_context(TraceWriter(settings.record, header))
        write = None if writer is None else writer.append
        session = stack.enter_context(Session(models, policy, settings, write, result.decisions))
        times: list[StepTimes | StepTime] = []
        for index, sequence in enumerate(turns):
            session.sequence = index
            session.begin(replace(options, seed=options.seed + index))
            for session.turn, ids in enumerate(sequence):
                answer = session.extend(ids)
                result.generations.append(answer.generation)
                times += answer.times
            result.texts.append(session.text)
            if writer is not None:
                writer.flush()
        host = session.host
        result.prefill, result.decode = host.driver.prefill, host.driver.decode
        result.times, result.arena_bytes = times, host.arena.size
        if isinstance(host, RealHost) and host.recorder is not None:
            result.spans = host.recorder.spans()
    return result


def make_host(
    models: Models,
    policy: Policy,
    settings: Settings,
    decisions: list[tuple[Any, ...]] | None = None,
    arena: Arena | None = None,
) -> Host:
    """The policy's driver with slots, machine and arena, on the clock that the settings name.

    An `arena` that has slots enough is used again.
    """
    pair = models.pair
    length = settings.options.draft_length if pair.draft is not None else 0
    shapes = pair.shape, pair.draft_shape
    return host_for(shapes, length, models.store, models.device, policy, settings, decisions, arena)


def host_for(
    shapes: tuple[ModelShape, DraftShape | None],
    draft_length: int,
    store: HostStore,
    device: torch.device,
    policy: Policy,
    settings: Settings,
    decisions: list[tuple[Any, ...]] | None = None,
    arena: Arena | None = None,
) -> Host:
    """The same for experts without a model around them."""
    shape, draft = shapes
    check_causal(policy.name, policy)
    check_size("--slots", settings.slots, shape)
    rates = rates_for(settings.machine, shape, draft)
    setup = setup_for(shape, rates, policy, settings.slots, draft_length, settings.seed)
    try:
        driver = Driver(policy, setup, record=decisions)
    except PolicyError as error:
        raise InputError(str(error)) from error
    needed = driver.cache.physical_slots + RING
    if arena is None or arena.slots < needed:
        arena = Arena(needed, store.record, device, settings.budget)
    if settings.clock == "virtual":
        return VirtualHost(driver, rates, store, arena, shape.layers - len(shape.moe_layers))
    return RealHost(driver, rates, store, arena, record=settings.timeline)
