"""How the numbers of an expert's matrices are stored: exactly, or in groups of 32 with a scale.

The groups are those of GGUF's Q8_0 and Q4_0 (ggml's `block_q8_0`, `block_q4_0`), so that such a file needs no
conversion: a float16 scale d, then 32 signed bytes q with value d * q; or 16 bytes whose low halves are numbers 0-15 of
the group and whose high halves 16-31, with value d * (half - 8).
"""

from dataclasses import dataclass

import torch

GROUP = 32


@dataclass(frozen=True, slots=True)
class Format:
    """`bits` 8 or 4 for groups of 32; None for plain numbers of `dtype`, which loses nothing."""

    name: str
    dtype: torch.dtype
    bits: int | None = None

    @property
    def exact(self) -> bool:
        return self.bits is None

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row. Raises ValueError where groups do not fit into it."""
        if self.bits is None:
            return columns * self.dtype.itemsize
        if columns % GROUP:
            raise ValueError(f"rows of {columns} numbers cannot be cut into groups of {GROUP}")
        return columns // GROUP * (2 + GROUP * self.bits // 8)

    def encode(self, matrix: torch.Tensor) -> torch.Tensor:
        """[r, c] of any float type to bytes [r, row_bytes(c)]; to the nearest value, as ggml's reference does."""
        rows, columns = matrix.shape
        if self.bits is None:
            return matrix.to(self.dtype).contiguous().view(torch.uint8).view(rows, self.row_bytes(columns))
        groups = matrix.float().reshape(rows, -1, GROUP)
        scale, quants = _eight(groups) if self.bits == 8 else _four(groups)
        return torch.cat([scale.half().view(torch.uint8), quants], -1).reshape(rows, self.row_bytes(columns))

    def decode(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Bytes [r, row_bytes(c)] to numbers [r, c] of `dtype`; a view where nothing has to be converted."""
        if self.bits is None:
            return raw.view(self.dtype).to(dtype)
        blocks = raw.reshape(raw.shape[0], -1, 2 + GROUP * self.bits // 8)
        scale = blocks[..., :2].contiguous().view(torch.float16).to(dtype)
        body = blocks[..., 2:]
        if self.bits == 8:
            quants = body.contiguous().view(torch.int8)
        else:
            quants = torch.cat([body & 15, body >> 4], -1).to(torch.int8) - 8
        return (quants.to(dtype) * scale).reshape(raw.shape[0], -1)


def _eight(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and bytes of groups [..., 32]: the largest magnitude becomes 127; halves round away from zero."""
    scale = groups.abs().amax(-1, keepdim=True) / 127
    parts = groups * torch.where(scale > 0, 1 / scale, 0)
    return scale, (torch.trunc(parts + torch.copysign(torch.tensor(0.5), parts))).to(torch.int8).view(torch.uint8)


def _four(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and halves of groups [..., 32]: the number of largest magnitude becomes -8."""
    at = groups.abs().argmax(-1, keepdim=True)
    scale = groups.gather(-1, at) / -8
    halves = (groups * torch.where(scale != 0, 1 / scale, 0) + 8.5).to(torch.uint8).clamp(max=15)
    return scale, halves[..., : GROUP // 2] | halves[..., GROUP // 2 :] << 4


EXACT = {name: Format(name, getattr(torch, name)) for name in ("float32", "bfloat16", "float16")}
QUANTISED = {"q8": Format("q8", torch.uint8, 8), "q4": Format("q4", torch.uint8, 4)}
