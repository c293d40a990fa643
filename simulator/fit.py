"""What a model needs of a machine, and what the machine leaves for expert slots: the part of `fit` that is arithmetic.

Assumptions: batch 1; every routed expert lies in host memory once and the slots hold copies, as in spac-exec; the
draft lies on the card as a whole.
"""

from dataclasses import dataclass, replace
from typing import Any

from ..policies.prefill import crossing, expected_union
from ..traces.console import show_size
from ..traces.errors import InputError
from ..traces.schema import DraftShape, ModelShape
from .capacity import FITS, Card, Fit, Pin, card_with, check_pin, count_slots, staging_for
from .machine import Machine, Quantity, rates_for
from .sizing import Format, ModelSize

PROCESS_BYTES = 2 * 2**30  # assumed: the process itself and its runtime, beside the experts
WINDOWS_PINS = "pinned host memory, which Windows charges to the card"
DOES_NOT_FIT, TOO_FEW = "DOES_NOT_FIT", "SLOTS_LT_TOPK"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to fit where. Sizes in bytes, `slots` a layer (None: as many as there is room for); `ram` None: not
    said; `pin`: host memory to pin, None: all experts where that costs nothing of the card (not on Windows).
    `pooled`: the slots are one pool for all layers, which needs more for staging."""

    model: ModelSize
    form: Format
    vram: int
    context: int
    ram: int | None = None
    draft: ModelSize | None = None
    kv: str = "fp16"
    platform: str = "linux"
    pin: int | None = None
    slots: int | None = None
    pooled: bool = False

    @property
    def shape(self) -> ModelShape:
        return self.model.shape(self.form, self.kv)

    @property
    def draft_shape(self) -> DraftShape | None:
        return self.draft.as_draft(self.kv) if self.draft else None

    @property
    def layers(self) -> int:
        return len(self.model.moe_layers)


@dataclass(frozen=True, slots=True)
class Plan:
    """How memory is shared out. `slots` in all layers; `machine` is the given one with the pins that it can have;
    `problems` say what does not fit, `limits` what keeps slots or speed down. Neither stops what can still be said.
    """

    wanted: Wanted
    machine: Machine
    slots: int
    staging: int
    fit: Fit
    card: Card | None
    pin: Pin
    host_bytes: int
    whole_layers: int
    problems: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        if self.problems:
            return DOES_NOT_FIT
        return FITS if self.slots >= self.wanted.layers * self.wanted.model.top_k else TOO_FEW


def plan(wanted: Wanted, machine: Machine) -> Plan:
    """Share out the memory. InputError for a model without experts or one that cannot be run there at all."""
    model, shape = wanted.model, wanted.shape
    if not model.moe_layers:
        raise InputError(f"{model.name}: has no routed experts, so there is nothing to offload; give an MoE model")
    more = fixed_bytes(wanted)
    fit = count_slots(wanted.vram, machine, shape, wanted.draft_shape, wanted.context, wanted.pooled, more)
    slots = fit.slots if wanted.slots is None else min(wanted.slots, model.experts) * wanted.layers
    machine = with_entry(machine, "gpu.vram", min(machine["gpu.vram"], wanted.vram), "--vram")
    card = None
    if wanted.slots is not None:
        card = card_with(slots, machine, shape, wanted.draft_shape, wanted.context, wanted.pooled, more)
    everything = slots == wanted.layers * model.experts
    staging = fit.staging if wanted.slots is None else staging_for(slots, shape, wanted.pooled)
    pin, machine = _pinned(wanted, machine, fit, slots + staging, everything)
    result = Plan(
        wanted,
        machine,
        slots,
        staging,
        fit,
        card,
        pin,
        shape.all_expert_bytes + PROCESS_BYTES,
        min(wanted.layers, fit.left // (model.experts * shape.expert_bytes)),
    )
    return replace(result, problems=_problems(result), limits=_limits(result, everything), notes=_notes(wanted))


def fixed_bytes(wanted: Wanted) -> dict[str, int]:
    """What the card holds whatever the context, beside weights: windows and states of both models, and on Windows
    what is to be pinned."""
    fixed = wanted.model.kv_fixed(wanted.kv) + (wanted.draft.kv_fixed(wanted.kv) if wanted.draft else 0)
    pinned = wanted.pin or 0 if wanted.platform == "windows" and wanted.slots is None else 0
    return {"windows and states of attention": fixed, WINDOWS_PINS: pinned}


def _pinned(wanted: Wanted, machine: Machine, fit: Fit, places: int, everything: bool) -> tuple[Pin, Machine]:
    """Whether what should be pinned can be, and the machine whose copies are priced accordingly."""
    shape = wanted.shape
    size = shape.all_expert_bytes if wanted.pin is None else wanted.pin
    held = sum(taken for name, taken in fit.taken.items() if name not in ("headroom", WINDOWS_PINS))
    pin = check_pin(size, held + places * shape.expert_bytes, machine, wanted.platform)
    if everything:
        return replace(pin, fits=True, words="nothing to copy, so nothing to pin"), machine
    if wanted.platform == "windows":
        granted = min(wanted.pin or 0, pin.most or 0)
    elif wanted.pin is None or pin.most is not None:
        granted = size if pin.most is None else min(size, pin.most)
    else:
        granted = wanted.pin
    if granted >= shape.all_expert_bytes:
        return pin, machine
    source = f"--platform {wanted.platform}, --pin: what can be pinned"
    return pin, with_entry(machine, "host.pin_limit", max(1, granted), source)


def with_entry(machine: Machine, entry: str, value: float, source: str) -> Machine:
    """The machine with another value in base units, known as the old one was."""
    quantity = Quantity(float(value), machine.quantities[entry].basis, source)
    return replace(machine, quantities={**machine.quantities, entry: quantity})


def _problems(p: Plan) -> tuple[str, ...]:
    wanted, found = p.wanted, []
    if p.slots < 1:
        found.append(f"card: {p.fit.words}: not one expert fits")
    if p.card is not None and p.card.free < 0:
        found.append(f"card: {p.card.words}")
    if wanted.ram is not None and wanted.ram < p.host_bytes:
        found.append(
            f"host memory: {show_size(p.host_bytes)} are needed ({show_size(wanted.shape.all_expert_bytes)} of experts "
            f"and {show_size(PROCESS_BYTES)} for the process), --ram has {show_size(wanted.ram)}"
        )
    if wanted.pin is not None and not p.pin.fits:
        found.append(f"pinned memory: {p.pin.words}")
    if wanted.model.longest and wanted.context > wanted.model.longest:
        found.append(f"--ctx {wanted.context}: {wanted.model.name} was made for {wanted.model.longest} tokens")
    return tuple(found)


def _limits(p: Plan, everything: bool) -> tuple[str, ...]:
    """What keeps the number of slots or their speed down, most telling first."""
    wanted, model = p.wanted, p.wanted.model
    each, found = p.slots // wanted.layers, []
    if each < model.top_k:
        found.append(
            f"fewer slots ({each}) than experts per token ({model.top_k}): a token's own experts push each other out"
        )
    if everything:
        found.append("nothing: all experts are on the card")
    else:
        found.append(f"card memory: {each} of {model.experts} experts a layer fit")
    if p.card is not None and p.card.status != FITS:
        found.append(p.card.words)
    pinned, all_bytes = p.machine["host.pin_limit"], wanted.shape.all_expert_bytes
    if not everything and 0 < pinned < all_bytes:
        share = f"{show_size(pinned)} of {show_size(all_bytes)}" if pinned > 1 else "none"
        found.append(f"pinned memory: {share} of the experts can lie there; the others are copied at pageable speed")
    return tuple(found)


def _notes(wanted: Wanted) -> tuple[str, ...]:
    model, found = wanted.model, []
    if model.kv_window:
        found.append(f"layers with a window of {model.window} tokens keep no more keys and values than that")
    if model.state_bytes:
        found.append(
            f"linear attention keeps {show_size(model.state_bytes)} whatever the context; spac-exec cannot roll such "
            "states back, so it runs this model without a draft"
        )
    if model.latent:
        found.append("latent attention: the compressed vector is counted, as in llama.cpp; transformers keeps more")
    if wanted.vram % 10**9 == 0 and wanted.vram % 2**20:
        gib = round(wanted.vram / 10**9)
        found.append(f"--vram {gib}GB is {show_size(wanted.vram)}; a card sold with {gib} GB has {gib}GiB")
    return tuple(found)


def unions(wanted: Wanted, lengths: tuple[int, ...]) -> dict[int, float]:
    """Distinct experts of a layer that a batch of so many rows needs, routing being even and independent (O20)."""
    return {rows: expected_union(wanted.model.experts, wanted.model.top_k, rows) for rows in lengths}


def streaming(machine: Machine, shape: ModelShape) -> dict[str, Any]:
    """From how many prompt tokens at a time it is cheaper to stream the absent experts than to use the CPU (O21).

    `pass_s`: seconds that all experts take over the link once; `rule_tokens`: 32 N/k, the rule of thumb of
    ik_llama.cpp#520, which knows nothing of the machine.
    """
    costs = rates_for(machine, shape).costs
    return {
        "crossing_tokens": crossing(shape.experts, shape.top_k, costs),
        "pass_s": len(shape.moe_layers) * shape.experts * costs.copy_ns / 1e9,
        "rule_tokens": 32 * shape.experts // shape.top_k,
    }


def llama_flags(p: Plan, draft_length: int = 0) -> str:
    """The nearest thing in llama.cpp: the experts of the first layers on the CPU, those of the others on the card.

    N counts all layers, dense ones too. llama.cpp needs no slots for staging, so whole layers get all that is left.
    """
    wanted = p.wanted
    on_cpu = wanted.layers - p.whole_layers
    number = 0 if on_cpu == 0 else wanted.model.moe_layers[on_cpu - 1] + 1
    words = ["llama-server", "-m", f"{wanted.model.name}.gguf", "-ngl", "99", "--n-cpu-moe", str(number)]
    words += ["-c", str(wanted.context)]
    if wanted.kv != "fp16":
        words += ["-fa", "on", "-ctk", wanted.kv, "-ctv", wanted.kv]
    if wanted.draft:
        words += ["-md", f"{wanted.draft.name}.gguf", "-ngld", "99", "--draft-max", str(draft_length)]
    return " ".join(words)
