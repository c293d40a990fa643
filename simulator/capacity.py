"""How many expert slots a memory budget holds, and what a number of slots leaves of a card."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..traces.console import show_size
from ..traces.errors import InputError
from ..traces.schema import DraftShape, ModelShape
from .machine import Machine

FITS, NEAR_FULL, EXCEEDED = "ok", "VRAM_NEAR_FULL", "VRAM_EXCEEDED"
EXPERTS = "expert slots and staging"

# Windows charges pinned host memory to the card. On a 24,576 MiB card the most that could be pinned beside 15,360 to
# 22,528 MiB of resident data brought the sum to between 23,296 and 24,320 MiB (ninfer-3090#45): a sum that leaves less
# than the first of these was never seen to work, one that leaves the second was never seen to fail.
WINDOWS_NEVER = 256 * 2**20
WINDOWS_ALWAYS = 1280 * 2**20


@dataclass(frozen=True, slots=True)
class Fit:
    """Expert slots in all layers together and the sum that led there, in words.

    `places`: experts that the memory holds; `staging` of them are where a running layer's fetched experts wait, and
    `slots` keep experts. `left`: bytes for experts. `taken`: what everything else takes, by name.
    """

    slots: int
    words: str
    places: int
    staging: int
    left: int
    taken: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Card:
    """What a number of slots leaves of a card: `FITS`, `NEAR_FULL` (it fits, without the headroom) or `EXCEEDED`."""

    status: str
    free: int
    words: str


@dataclass(frozen=True, slots=True)
class Pin:
    """Whether host memory can be pinned. `most`: bytes that can (None: no limit known). `sure`: not only perhaps."""

    fits: bool
    sure: bool
    most: int | None
    words: str


def staging_for(slots: int, shape: ModelShape, pooled: bool) -> int:
    """Slots beyond the capacity in which a running layer's fetched experts wait: as many as one scope can keep."""
    largest = slots if pooled else -(-slots // len(shape.moe_layers))
    return min(shape.experts, largest)


def taken_by(
    machine: Machine,
    shape: ModelShape,
    draft: DraftShape | None,
    context: int,
    more: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Bytes of the card that experts cannot have, by name.

    What the driver, desktop and workspace take and what is to stay free, all weights but the routed experts, the
    draft, the keys and values of `context` tokens for both models, and `more` (bytes by name).
    """
    kv = shape.kv_bytes_per_token + (draft.kv_bytes_per_token if draft else 0)
    return {
        "reserved": round(machine["gpu.reserved"]),
        "headroom": round(machine["gpu.headroom"]),
        "dense weights": shape.dense_bytes,
        "draft": draft.dense_bytes if draft else 0,
        f"keys and values of {context} tokens": context * kv,
        **(more or {}),
    }


def fit_in(
    vram: int,
    machine: Machine,
    shape: ModelShape,
    draft: DraftShape | None,
    context: int,
    pooled: bool,
    more: Mapping[str, int] | None = None,
) -> Fit:
    """Most slots that `vram` bytes hold beside `taken_by`; `pooled` if a policy shares slots between layers.

    InputError if not one slot is left.
    """
    fit = count_slots(vram, machine, shape, draft, context, pooled, more)
    if fit.slots < 1:
        raise InputError(f"--vram: {fit.words}: not one slot fits; give more, or a trace of a smaller model")
    return fit


def count_slots(
    vram: int,
    machine: Machine,
    shape: ModelShape,
    draft: DraftShape | None,
    context: int,
    pooled: bool,
    more: Mapping[str, int] | None = None,
) -> Fit:
    """As `fit_in`, with 0 slots where none is left."""
    card = round(machine["gpu.vram"])
    usable = min(vram, card)
    taken = taken_by(machine, shape, draft, context, more)
    left = usable - sum(taken.values())
    room = min(max(0, left) // shape.expert_bytes, len(shape.moe_layers) * shape.experts + shape.experts)
    slots = _most(room, shape, pooled)
    staging = staging_for(slots, shape, pooled)
    terms = " - ".join(f"{show_size(size)} {name}" for name, size in taken.items() if size)
    clipped = f" (the card has no more than {show_size(card)})" if vram > card else ""
    words = f"{show_size(usable)}{clipped} - {terms} = {show_size(left)} for experts of {show_size(shape.expert_bytes)}"
    if slots:
        each = slots / len(shape.moe_layers)
        words += f": {slots + staging} slots, {staging} of them for staging, {each:.1f} a layer"
    return Fit(slots, words, room, staging, max(0, left), taken)


def slots_for_context(
    vram: int, machine: Machine, shape: ModelShape, draft: DraftShape | None, context: int, pooled: bool
) -> int:
    """Slots that are left once the keys and values hold `context` tokens; 0 if none."""
    return count_slots(vram, machine, shape, draft, context, pooled).slots


def taken_with(
    slots: int,
    machine: Machine,
    shape: ModelShape,
    draft: DraftShape | None,
    context: int,
    pooled: bool,
    more: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Bytes of the card that are in use, by name, with `slots` slots in all and their staging; headroom is not."""
    taken = taken_by(machine, shape, draft, context, more)
    del taken["headroom"]
    return taken | {EXPERTS: (slots + staging_for(slots, shape, pooled)) * shape.expert_bytes}


def card_with(
    slots: int,
    machine: Machine,
    shape: ModelShape,
    draft: DraftShape | None,
    context: int,
    pooled: bool,
    more: Mapping[str, int] | None = None,
) -> Card:
    """What the card has left beside `slots` slots in all and their staging.

    Near full the driver may begin to move memory to the host without a word: a larger cache was seen to run 7 times
    slower there (Crow#86).
    """
    taken = taken_with(slots, machine, shape, draft, context, pooled, more)
    headroom, held = round(machine["gpu.headroom"]), taken[EXPERTS]
    card = round(machine["gpu.vram"])
    free = card - sum(taken.values())
    each = f"{slots / len(shape.moe_layers):.3g} slots a layer take {show_size(held)}"
    if free < 0:
        return Card(EXCEEDED, free, f"{each}, {show_size(-free)} more than the card of {show_size(card)} has left")
    if free < headroom:
        near = f"{each} and leave {show_size(free)} of the card free, less than the {show_size(headroom)} of headroom"
        return Card(NEAR_FULL, free, f"{near}: the driver may begin to page, which is many times slower")
    return Card(FITS, free, f"{each} and leave {show_size(free)} of the card free")


def check_pin(size: int, resident: int, machine: Machine, platform: str) -> Pin:
    """Can `size` bytes of host memory be pinned while `resident` bytes of the card are taken?

    On "windows" the sum is charged to the card; on "linux" only the profile's `host.pin_limit` counts, 0 being none
    known.
    """
    if platform == "windows":
        card = round(machine["gpu.vram"])
        total, most = resident + size, max(0, card - WINDOWS_NEVER - resident)
        words = (
            f"Windows charges pinned memory to the card: {show_size(resident)} resident + {show_size(size)} pinned = "
            f"{show_size(total)} of {show_size(card)}; at most {show_size(most)} can be pinned beside that"
        )
        return Pin(size <= most, total <= card - WINDOWS_ALWAYS, most, words)
    limit = round(machine["host.pin_limit"])
    if not limit:
        return Pin(True, False, None, f"{show_size(size)} pinned; how much this host lets be pinned is not known")
    fits = size <= limit
    words = f"{show_size(size)} to pin, {show_size(limit)} can be ({machine.quantities['host.pin_limit'].source})"
    return Pin(fits, fits, limit, words)


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
