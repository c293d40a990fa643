"""Where the bytes of experts lie: all of them in host memory, some of them in the fast device's slots.

One expert is one contiguous record, gate and up projection [2I, H] and then down projection [H, I], in both places;
so a copy is one transfer and both tiers read the same layout.
"""

from dataclasses import dataclass

import torch

from ..policies.interface import Key
from ..traces.console import show_size
from ..traces.errors import InputError


@dataclass(frozen=True, slots=True)
class Record:
    """Layout of one expert: hidden size H, expert width I, element type."""

    hidden: int
    width: int
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        return 3 * self.hidden * self.width

    @property
    def size(self) -> int:
        """Bytes of one expert."""
        return self.numbers * self.dtype.itemsize

    def gate_up(self, flat: torch.Tensor) -> torch.Tensor:
        """[2I, H] view of a flat record; rows 0..I-1 are the gate's."""
        return flat[: 2 * self.width * self.hidden].view(2 * self.width, self.hidden)

    def down(self, flat: torch.Tensor) -> torch.Tensor:
        """[H, I] view of a flat record."""
        return flat[2 * self.width * self.hidden :].view(self.hidden, self.width)


class HostStore:
    """Every expert of the model in host memory. `pinned` makes the slab page-locked, which fast CUDA copies need."""

    def __init__(self, layers: int, experts: int, record: Record, pinned: bool = False) -> None:
        self.record = record
        self.layers, self.experts = layers, experts
        self._slab = torch.empty((layers, experts, record.numbers), dtype=record.dtype, pin_memory=pinned)

    def flat(self, key: Key) -> torch.Tensor:
        return self._slab[key.layer, key.expert]

    def weights(self, key: Key) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate/up [2I, H] and down [H, I] of one expert."""
        flat = self.flat(key)
        return self.record.gate_up(flat), self.record.down(flat)


class Arena:
    """The fast device's slots for experts, numbered from 0. On "cpu" it is emulated: a part of RAM with a budget.

    Raises InputError if the slots need more than `budget` bytes.
    """

    def __init__(
        self, slots: int, record: Record, device: torch.device | str = "cpu", budget: int | None = None
    ) -> None:
        if budget is not None and slots * record.size > budget:
            raise InputError(
                f"--vram: {slots} slots of {show_size(record.size)} need {show_size(slots * record.size)}, the budget "
                f"is {show_size(budget)}; lower --slots"
            )
        self.record = record
        self.slots = slots
        self.device = torch.device(device)
        self._slab = torch.empty((slots, record.numbers), dtype=record.dtype, device=self.device)

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.record.size

    def load(self, slot: int, source: torch.Tensor) -> None:
        """Copy a flat record into a slot. On CUDA it is queued on the current stream, and the source must be pinned."""
        self._slab[slot].copy_(source, non_blocking=True)

    def weights(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate/up [2I, H] and down [H, I] of the expert in a slot."""
        flat = self._slab[slot]
        return self.record.gate_up(flat), self.record.down(flat)
