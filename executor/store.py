"""Where the bytes of experts lie: all of them in host memory, some of them in the fast device's slots.

One expert is one contiguous record, in both places alike: a copy is one transfer, and both tiers read the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..policies.interface import Key
from ..traces.console import show_size, warn
from ..traces.errors import InputError
from .device import Device, Pins, device_of
from .formats import Format
from .kernels import Matrices
from .pages import roomy

ALIGNMENT = 64  # bytes: a cache line, and what vector loads like


class Weights(NamedTuple):
    """One expert's matrices as numbers: up [U, H] (gate and up projection where it has a gate: U = 2I), down [H, I]."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Record:
    """Layout of one expert: up [U, H] in `format`, down [H, I] in `format`, then the biases [U] and [H] in `dtype`.

    hidden is H, width I; U is 2I with a gate, else I. Each part begins on a cache line. `dtype` is what is computed in.
    """

    hidden: int
    width: int
    format: Format
    dtype: torch.dtype
    gated: bool = True
    biased: bool = False

    @property
    def up_rows(self) -> int:
        return 2 * self.width if self.gated else self.width

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where up, down, up's bias and down's bias begin, and the record's end, in bytes."""
        biases = (self.up_rows, self.hidden) if self.biased else (0, 0)
        sizes = (
            self.up_rows * self.format.row_bytes(self.hidden),
            self.hidden * self.format.row_bytes(self.width),
            *(n * self.dtype.itemsize for n in biases),
        )
        at = [0]
        for size in sizes:
            at.append(at[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return tuple(at)

    @property
    def size(self) -> int:
        """Bytes of one expert."""
        return self.offsets[-1]

    @cached_property
    def matrices(self) -> Matrices:
        """The same for the compiled kernels."""
        return Matrices(self.format, self.dtype, self.hidden, self.width, self.up_rows, self.biased, self.offsets)

    def up(self, flat: torch.Tensor) -> torch.Tensor:
        """Up's bytes [U, row bytes], a view of a flat record."""
        return self._matrix(flat, 0, self.up_rows, self.hidden)

    def down(self, flat: torch.Tensor) -> torch.Tensor:
        """Down's bytes [H, row bytes], a view of a flat record."""
        return self._matrix(flat, 1, self.hidden, self.width)

    def biases(self, flat: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Up's [U] and down's [H] as numbers, views of a flat record."""
        if not self.biased:
            return None, None
        size = self.dtype.itemsize
        up, down = (
            flat[at : at + rows * size].view(self.dtype)
            for at, rows in zip(self.offsets[2:4], (self.up_rows, self.hidden), strict=True)
        )
        return up, down

    def weights(self, flat: torch.Tensor) -> Weights:
        """The numbers of a flat record: views if the format is exact and of `dtype`, else new tensors."""
        decode = self.format.decode
        return Weights(decode(self.up(flat), self.dtype), decode(self.down(flat), self.dtype), *self.biases(flat))

    def _matrix(self, flat: torch.Tensor, part: int, rows: int, columns: int) -> torch.Tensor:
        begin, size = self.offsets[part], self.format.row_bytes(columns)
        return flat[begin : begin + rows * size].view(rows, size)


class HostStore:
    """Every expert of the model in host memory, or room for them: a slab [E, record.size] of bytes for each MoE layer.

    `losses`: for each layer the relative error that quantising made, empty if it made none. `memory`: ram, mmap (pages
    of a file that the system may drop and read again) or pinned (page-locked, which fast CUDA copies need; as far as
    the system lets us, see `pin`).
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        record: Record,
        pinned: bool = False,
        slabs: Sequence[torch.Tensor] | None = None,
        losses: Sequence[float] = (),
        memory: str | None = None,
    ) -> None:
        self.layers, self.experts, self.record = layers, experts, record
        self.losses, self.memory = tuple(losses), memory or ("pinned" if pinned else "ram")
        shape = (experts, record.size)
        self._slabs = slabs or [roomy(*shape) for _ in range(layers)]
        self.pins = Pins()

    @property
    def size(self) -> int:
        """Bytes of all experts."""
        return self.layers * self.experts * self.record.size

    def slab(self, layer: int) -> torch.Tensor:
        """One layer's experts [E, record.size]."""
        return self._slabs[layer]

    def pin(self, device: Device, limit: int | None = None) -> None:
        """Page-lock experts in order of (layer, expert), until `limit` bytes or the system refuses; once, if at all."""
        if self.memory != "pinned" or self.pins.size or self.pins.refused:
            return
        for slab in self._slabs:
            if not device.pin(slab.view(-1), self.pins, limit):
                break
        if self.pins.refused:
            slow = 1 - self.pins.size / self.size
            warn(
                f"the system lets {show_size(self.pins.size)} of host memory be page-locked; the last {slow:.0%} of "
                "the experts, by layer, are copied through a buffer, which is slower"
            )

    def flat(self, key: Key) -> torch.Tensor:
        """One expert's bytes [record.size]."""
        return self._slabs[key.layer][key.expert]

    def address(self, key: Key) -> int:
        """Where one expert's bytes begin."""
        slab = self._slabs[key.layer]
        return slab.data_ptr() + key.expert * slab.stride(0)

    def weights(self, key: Key) -> Weights:
        return self.record.weights(self.flat(key))


class Arena:
    """The fast device's slots for experts, numbered from 0, in one piece of its memory.

    Raises InputError if the slots need more than `budget` bytes, PoolError if the device has not that much.
    """

    def __init__(
        self, slots: int, record: Record, device: Device | torch.device | str = "cpu", budget: int | None = None
    ) -> None:
        if budget is not None and slots * record.size > budget:
            raise InputError(
                f"--vram: {slots} slots of {show_size(record.size)} need {show_size(slots * record.size)}, the budget "
                f"is {show_size(budget)}; lower --slots"
            )
        self.record = record
        self.slots = slots
        self.device = device_of(device) if isinstance(device, torch.device | str) else device
        self._slab = self.device.allocate(slots * record.size, "expert slots").view(slots, record.size)

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.record.size

    def load(self, slot: int, source: torch.Tensor) -> None:
        """Copy a flat record into a slot, before anything runs."""
        self._slab[slot].copy_(source)

    def flat(self, slot: int) -> torch.Tensor:
        """The bytes [record.size] of the expert in a slot."""
        return self._slab[slot]

    def address(self, slot: int) -> int:
        """Where a slot begins in the device's memory."""
        return self._slab.data_ptr() + slot * self.record.size

    def weights(self, slot: int) -> Weights:
        return self.record.weights(self.flat(slot))
