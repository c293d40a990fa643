"""Checkpoints that keep a matrix in several tensors, seen as if they kept plain ones.

FP8 in blocks (Qwen3's and DeepSeek's: `weight` in e4m3 and `weight_scale_inv`, a factor a block), MXFP4 (gpt-oss:
`*_blocks`, two numbers a byte, and `*_scales`, an exponent for 32), and GPTQ in 4 bits (`qweight`, `qzeros`, `scales`,
`g_idx`). Each is decoded when it is read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..traces.errors import InputError
from ..traces.models import Source
from .shards import Shards

READ = "FP8 in blocks, MXFP4, GPTQ with 4 bits, GGUF and plain numbers"


@dataclass(frozen=True)
class Code:
    """A matrix of `shape`, decoded from tensors of these names. `stacked`: the first dimension of all is of experts."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    decode: Callable[..., torch.Tensor]
    stacked: bool = False


class Packed(Shards):
    """Shards in which some names stand for several tensors of the files.

    `shapes` has the decoded matrices in place of their parts. Raises InputError for a code that is not known here.
    """

    def __init__(self, source: Source, settings: dict[str, Any]) -> None:
        super().__init__(source)
        method = settings.get("quant_method")
        find = {"fp8": _fp8, "mxfp4": _mxfp4, "gptq": _gptq}.get(str(method))
        if find is None:
            raise InputError(
                f"{source.flag} {source.name}: its weights are quantised by {method!r}, which is not read here ({READ} "
                "are); give another version of the model"
            )
        try:
            self.codes = find(self.shapes, settings)
        except ValueError as error:
            raise InputError(f"{source.flag} {source.name}: {error}") from None
        self.bits = 4 if method in ("mxfp4", "gptq") else 8
        parts = {part for code in self.codes.values() for part in code.parts}
        self.shapes = {name: shape for name, shape in self.shapes.items() if name not in parts}
        self.shapes |= {name: code.shape for name, code in self.codes.items()}
        self.stored |= {name: sum(self.stored[p] for p in code.parts) for name, code in self.codes.items()}

    def read(self, name: str) -> torch.Tensor:
        code = self.codes.get(name)
        if code is None:
            return super().read(name)
        return code.decode(*(super(Packed, self).read(part) for part in code.parts))

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        code = self.codes.get(name)
        if code is None or not code.stacked:
            yield from super().pieces(name)
            return
        parts = [super(Packed, self).read(part) for part in code.parts]
        for expert in range(code.shape[0]):
            yield code.decode(*(part[expert : expert + 1] for part in parts))[0]


def shards_of(source: Source) -> Shards:
    """The files of a folder or hub name, decoded as its configuration says."""
    settings = getattr(source.config, "quantization_config", None)
    if settings is None:
        return Shards(source)
    return Packed(source, settings if isinstance(settings, dict) else settings.to_dict())


def _fp8(shapes: dict[str, tuple[int, ...]], settings: dict[str, Any]) -> dict[str, Code]:
    block = tuple(settings.get("weight_block_size") or ())
    if len(block) != 2:
        raise ValueError("FP8 weights with one factor for a whole matrix are not read here, only those in blocks")

    def decode(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """float32 [..., r, c] from e4m3 and a factor for each block of r and c; the last blocks may be cut."""
        factors = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        return weight.float().mul_(factors[..., : weight.shape[-2], : weight.shape[-1]])

    codes = {}
    for name in shapes:
        weight = name.removesuffix("_scale_inv")
        if weight != name and weight in shapes:
            codes[weight] = Code((weight, name), shapes[weight], decode, stacked=len(shapes[weight]) == 3)
    return codes


def _mxfp4(shapes: dict[str, tuple[int, ...]], settings: dict[str, Any]) -> dict[str, Code]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = {}
    for name, shape in shapes.items():
        plain = name.removesuffix("_blocks")
        if plain != name and f"{plain}_scales" in shapes:
            experts, rows, groups, half = shape
            decoded = (experts, groups * half * 2, rows)  # as the model has it: [E, in, out]
            codes[plain] = Code((name, f"{plain}_scales"), decoded, convert_moe_packed_tensors, stacked=True)
    return codes


def _gptq(shapes: dict[str, tuple[int, ...]], settings: dict[str, Any]) -> dict[str, Code]:
    if settings.get("bits") != 4:
        raise ValueError(f"GPTQ with {settings.get('bits')} bits is not read here, only with 4")
    offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1  # the first version stores zero points less one

    def decode(quants: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """float32 [out, in]; quants [in / 8, out], zeros [g, out / 8], scales [g, out], groups [in]."""
        numbers = _halves(quants, 0) - (_halves(zeros, 1) + offset)[groups]
        return (numbers * scales.float()[groups]).T

    codes = {}
    for name, shape in shapes.items():
        base = name.removesuffix(".qweight")
        if base != name:
            parts = tuple(f"{base}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
            absent = [part for part in parts if part not in shapes]
            if absent:
                raise ValueError(f"{absent[0]} is missing beside {name}")
            codes[f"{base}.weight"] = Code(parts, (shape[1], shape[0] * 8), decode)
    return codes


def _halves(packed: torch.Tensor, along: int) -> torch.Tensor:
    """The eight 4-bit numbers of every int32, lowest first, side by side in dimension `along`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    numbers = packed.unsqueeze(along + 1) >> shifts.view(-1, *[1] * (packed.ndim - 1 - along)) & 15
    return numbers.flatten(along, along + 1)
