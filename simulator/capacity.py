"""How many expert slots a memory budget holds."""

from dataclasses import dataclass

from ..traces.console import show_size
from ..traces.errors import InputError
from ..traces.schema import DraftShape, ModelShape
from .machine import Machine


@dataclass(frozen=True, slots=True)
class Fit:
    """Expert slots in all layers together, and the sum that led there, in words."""

    slots: int
    words: str


def staging_for(slots: int, shape: ModelShape, pooled: bool) -> int:
    """Slots beyond the capacity in which a running layer's fetched experts wait: as many as one scope can keep."""
    largest = slots if pooled else -(-slots // len(shape.moe_layers))
    return min(shape.experts, largest)


def fit_in(vram: int, machine: Machine, shape: ModelShape, draft: DraftShape | None, context: int, pooled: bool) -> Fit:
    """Most slots that `vram` bytes hold beside everything else; `pooled` if a policy shares slots between layers.

    Resident: what the driver, desktop and workspace take, all weights but the routed experts, the draft, and the keys
    and values of `context` tokens for both models. InputError if not one slot is left.
    """
    card = round(machine["gpu.vram"])
    usable = min(vram, card)
    taken = {
        "reserved": round(machine["gpu.reserved"]),
        "dense weights": shape.dense_bytes,
        "draft": draft.dense_bytes if draft else 0,
        f"keys and values of {context} tokens": context
        * (shape.kv_bytes_per_token + (draft.kv_bytes_per_token if draft else 0)),
    }
    left = usable - sum(taken.values())
    room = max(0, left) // shape.expert_bytes
    slots = _most(room, shape, pooled)
    terms = " - ".join(f"{show_size(size)} {name}" for name, size in taken.items() if size)
    clipped = f" (the card has no more than {show_size(card)})" if vram > card else ""
    words = f"{show_size(usable)}{clipped} - {terms} = {show_size(left)} for experts of {show_size(shape.expert_bytes)}"
    if slots < 1:
        raise InputError(f"--vram: {words}: not one slot fits; give more, or a trace of a smaller model")
    staging = staging_for(slots, shape, pooled)
    each = slots / len(shape.moe_layers)
    return Fit(slots, f"{words}: {slots + staging} slots, {staging} of them for staging, {each:.1f} a layer")


def _most(room: int, shape: ModelShape, pooled: bool) -> int:
    """Largest number of slots that fits in `room` together with its staging."""
    low, high = 0, min(room, len(shape.moe_layers) * shape.experts)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle + staging_for(middle, shape, pooled) <= room else (low, middle - 1)
    return low


def check_size(flag: str, slots: int, shape: ModelShape) -> None:
    """InputError for a cache that cannot hold one token's experts, or more than there are. 0 is let through."""
    layers = len(shape.moe_layers)
    each = f"{slots / layers:.3g} slots a layer"
    if 0 < slots < layers * shape.top_k:
        raise InputError(
            f"{flag}: {each} are fewer than the {shape.top_k} experts that one token needs (top-k of {shape.name}); "
            f"give at least {shape.top_k} slots a layer"
        )
    if slots > layers * shape.experts:
        raise InputError(f"{flag}: {each}, but {shape.name} has {shape.experts} experts a layer; give at most that")
