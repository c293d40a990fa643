"""A trace's routing on real kernels, copies and threads, with random weights of the right shape: no model is needed.

What runs is what runs live: the host of the wall clock, its link and its CPU tier, the experts' own kernels on both.
Stand-ins are said to be such: a layer's attention, norms and router are one matrix product over as many bytes
(`_dense`), drafting is a pause as long as the profile says, and every expert holds the same random numbers in a place
of its own. So a replay times a machine, and is the ground truth for the simulator on it; what it computes is noise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from time import sleep
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..policies.driver import Counters, PolicyError
from ..policies.interface import Key, Policy, StepInfo
from ..simulator.machine import rates_for
from ..simulator.run import simulate
from ..traces.errors import InputError
from ..traces.redraft import drafted
from ..traces.schema import DraftShape, Kind, ModelShape, Step
from ..traces.views import Steps, View
from . import kernels
from .dense import Packed
from .formats import EXACT, QUANTISED, Format
from .host import RING, Routed
from .memory import ROOM
from .moe import Call
from .pages import moved
from .predict import per_token, priced_by_run
from .session import Settings, host_for
from .store import HostStore, Record
from .times import StepTimes

FORMATS: dict[str, Format] = {"f32": EXACT["float32"], "bf16": EXACT["bfloat16"], **QUANTISED}
ROWS = 512  # random hidden states to draw from


@dataclass(frozen=True, slots=True)
class Rig:
    """Random experts of `shape` in host memory, and what stands for the rest of a layer.

    shape: as replayed, with the bytes of the chosen format. draft_length: the trace's. dense: one matrix [m, H] a
    layer, or nothing.
    """

    shape: ModelShape
    draft_shape: DraftShape | None
    draft_length: int
    store: HostStore
    module: Any  # transformers' experts module: it knows the activation
    dense: list[torch.Tensor]
    hidden: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.hidden.device


@dataclass(slots=True)
class Replayed:
    """What a replay measured: one entry of `times` and of `emitted` a step; counts of everything after prefill."""

    policy: str
    slots: int
    times: list[StepTimes] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    decode: Counters = field(default_factory=Counters)
    decisions: list[tuple[Any, ...]] = field(default_factory=list)


def first_layers(trace: Steps, layers: int | None) -> Steps:
    """The trace of a model that has only the first `layers` MoE layers (None: all), and no layers without experts.

    Dense weights and keys and values go with the layers; the embedding stays. InputError: more layers than there are.
    """
    shape = trace.header.target
    there = len(shape.moe_layers)
    count = there if layers is None else layers
    if not 1 <= count <= there:
        raise InputError(f"--layers {count}: the trace has {there} layers with experts; give 1 to {there}")
    kept = (shape.dense_bytes - shape.embedding_bytes) * count // shape.layers
    cut = replace(
        shape,
        layers=count,
        moe_layers=tuple(range(count)),
        dense_bytes=kept + shape.embedding_bytes,
        kv_bytes_per_token=shape.kv_bytes_per_token * count // shape.layers,
    )

    def steps() -> Iterator[Step]:
        for step in trace.steps():
            columns = {name: getattr(step, name) for name in ("experts", "weights", "scores", "ahead")}
            yield replace(step, **{name: v[:, :count] for name, v in columns.items() if v is not None})

    note = f"The first {count} of {there} MoE layers." if count < there else ""
    return View(replace(trace.header, target=cut, notes=f"{trace.header.notes} {note}".strip()), steps)


def paused(trace: Steps) -> Steps:
    """The same with a draft of one layer and no bytes: a pause of `gpu.draft_fixed` and the launches of a layer."""
    draft = trace.header.draft
    if draft is None:
        return trace
    bare = replace(draft, layers=1, dense_bytes=0)
    return View(replace(trace.header, draft=bare), lambda: iter(trace.steps()))


def in_format(trace: Steps, name: str) -> Steps:
    """The same routing of a model whose experts are stored in one of `FORMATS`. InputError: no such format, or rows
    that cannot be cut into its groups."""
    if name not in FORMATS:
        raise InputError(f"--format {name}: unknown; choose {', '.join(FORMATS)}")
    try:
        size = record_of(trace.header.target, name).size
    except ValueError as error:
        raise InputError(f"--format {name}: {error}; choose f32 or bf16") from None
    shape = replace(trace.header.target, expert_bytes=size, dtype=FORMATS[name].name)
    return View(replace(trace.header, target=shape), lambda: iter(trace.steps()))


def record_of(shape: ModelShape, name: str) -> Record:
    """Layout of one expert: gated, without biases, whatever the family has."""
    stored = FORMATS[name]
    return Record(shape.hidden, shape.expert_width, stored, stored.dtype if stored.exact else torch.float32)


def memory_of(shape: ModelShape, slots: int, dense: bool) -> dict[str, int]:
    """Bytes that a replay needs, by what they are for; `slots` is a total."""
    layer_bytes = (shape.dense_bytes - shape.embedding_bytes) // shape.layers
    staging = min(shape.experts, slots) + RING
    return {
        "experts": shape.all_expert_bytes,
        "slots": (slots + staging) * shape.expert_bytes,
        "dense weights": layer_bytes * shape.layers if dense else 0,
        "everything else": ROOM,
    }


def build(trace: Steps, name: str, dense: bool = True, device: str = "cpu", seed: int = 0) -> Rig:
    """Random weights for a trace that has gone through `in_format(trace, name)`."""
    header = trace.header
    shape = header.target
    rng = torch.Generator().manual_seed(seed)
    record = record_of(shape, name)
    store = HostStore(len(shape.moe_layers), shape.experts, record, pinned=device != "cpu")
    _fill(store, record, rng)
    hidden = torch.randn((ROWS, shape.hidden), generator=rng, dtype=record.dtype)
    matrices = _dense(shape, rng, device) if dense else []
    return Rig(shape, header.draft, header.draft_length, store, _module(shape), matrices, hidden.to(device))


def _dense(shape: ModelShape, rng: torch.Generator, device: str) -> list[torch.Tensor]:
    """A matrix [m, H] a layer, of all the bytes that a layer has beside its experts; each in a place of its own.

    On a CPU it is bfloat16 and multiplied by the compiled kernels where there are any: torch's float32 product takes
    longer with 3 rows than with 9, which no machine that this stands for does.
    """
    layer_bytes = (shape.dense_bytes - shape.embedding_bytes) // shape.layers
    stored = EXACT["bfloat16" if device == "cpu" and kernels.ready() else "float32"]
    one = torch.randn((max(1, layer_bytes // stored.row_bytes(shape.hidden)), shape.hidden), generator=rng)
    one /= shape.hidden**0.5
    if stored.dtype == torch.float32:
        return [one.clone().to(device) for _ in shape.moe_layers]
    raw = stored.encode(one)
    return [Packed(moved(raw), stored, shape.hidden) for _ in shape.moe_layers]


def _fill(store: HostStore, record: Record, rng: torch.Generator) -> None:
    one = torch.zeros(record.size, dtype=torch.uint8)
    for part, columns in ((record.up(one), record.hidden), (record.down(one), record.width)):
        part.copy_(record.format.encode(torch.randn((len(part), columns), generator=rng) / columns**0.5))
    for layer in range(store.layers):
        for expert in range(store.experts):
            store.flat(Key(layer, expert)).copy_(one)


def _module(shape: ModelShape) -> Any:
    """transformers' own experts module, without weights: it knows the activation."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.expert_width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    with torch.device("meta"):
        return Qwen3MoeExperts(config)


@torch.inference_mode()
def replay(rig: Rig, trace: Steps, policy: Policy, settings: Settings, limit: int | None = None) -> Replayed:
    """Run the first `limit` steps of a trace, cut anew by a policy that chooses draft lengths. `settings.machine` gives
    the emulated link's times and the draft's.

    Raises InputError: a clairvoyant policy, slots below top-k, a policy that gave an illegal answer.
    """
    if limit is not None:
        trace = first_steps(trace, limit)
    header = trace.header
    found = Replayed(policy.name, settings.slots)
    shapes = rig.shape, rig.draft_shape
    host: Any = host_for(shapes, header.draft_length, rig.store, rig.device, policy, settings, found.decisions)
    pause = rates_for(settings.machine, *shapes).draft_token_ns / 1e9
    steps = iter(trace.steps())
    if host.driver.drafts and header.acceptance != "none":
        steps = drafted(trace, host.draft_length, header.draft_length, settings.seed)
    try:
        for index, step in enumerate(steps):
            _step(rig, host, index, step, pause)
            found.emitted.append(step.emitted)
    except PolicyError as error:
        raise InputError(str(error)) from error
    finally:
        host.close()
        found.times, found.decode = host.times, host.driver.decode
    return found


def _step(rig: Rig, host: Any, index: int, step: Step, pause: float) -> None:
    n = len(step)
    if step.kind is Kind.VERIFY:
        if not host.driver.drafts:
            host.draft_length(int(step.drafted.sum()))
        sleep(pause * int(step.drafted.sum()))
    host.step_begins(StepInfo(index, step.kind, step.tokens, step.drafted), step.context)
    at = index % max(1, ROWS - n)
    hidden = rig.hidden[at : at + n] if n <= ROWS else rig.hidden[torch.arange(n) % ROWS]
    for layer in range(len(rig.shape.moe_layers)):
        _layer(rig, host, layer, step, hidden)
    host.step_ends(step.accepted, step.kept, step.emitted)


def _layer(rig: Rig, host: Any, layer: int, step: Step, hidden: torch.Tensor) -> None:
    if rig.dense:
        F.linear(hidden.float(), rig.dense[layer])
    ids = step.experts[:, layer]
    weights = np.full(ids.shape, 1 / ids.shape[1], np.float16) if step.weights is None else step.weights[:, layer]
    ahead = None if step.ahead is None else step.ahead[:, layer]
    applied = torch.from_numpy(weights.astype(np.float32)).to(hidden)
    call = Call(layer, rig.module, hidden, ids.tolist(), applied)
    host.layer(call, lambda: Routed(ids, weights, ahead))
    call.merge()


@dataclass(frozen=True, slots=True)
class Compared:
    """Steps after prefill and warm-up, measured and simulated: tpot_ms and split_ms by cause; hit_rate of all steps
    after prefill."""

    measured: dict[str, Any]
    simulated: dict[str, Any]
    tokens: int


def compare(
    rig: Rig, trace: Steps, policy: Callable[[], Policy], settings: Settings, limit: int, warm_up: int = 0
) -> Compared:
    """Replay on this machine and simulate the same steps; decision time as the replay had it.

    `policy` makes a fresh object. InputError: nothing is left to be counted.
    """
    live = replay(rig, trace, policy(), settings, limit)
    taken = [i for i, step in enumerate(live.times) if step.kind is not Kind.PREFILL][warm_up:]
    tokens = sum(live.emitted[i] for i in taken)
    if not tokens:
        raise InputError(f"--limit-steps {limit}: no steps after prefill and --warm-up {warm_up} are left; give more")
    machine = priced_by_run(settings.machine, [live.times[i] for i in taken])
    run = simulate(first_steps(trace, limit), policy(), machine, settings.slots, settings.seed)
    if run.error:
        raise InputError(run.error)
    sides = []
    for steps, splits, count in (
        (live.times, [live.times[i].split() for i in taken], live.decode),
        (run.steps, [run.steps[i].gpu for i in taken], run.decode),
    ):
        sides.append(
            {
                "hit_rate": count.hits / max(1, count.needed),
                "tpot_ms": sum(steps[i].wall_ns for i in taken) / 1e6 / tokens,
                "split_ms": per_token(splits, tokens),
            }
        )
    measured, simulated = sides
    return Compared(measured, simulated, tokens)


def first_steps(trace: Steps, limit: int) -> Steps:
    """A trace that ends after `limit` steps."""
    return View(trace.header, lambda: iter(islice(trace.steps(), limit)))
