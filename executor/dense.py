"""Dense weights in groups of 32 on the CPU, multiplied by the compiled kernels.

A packed matrix stands where a linear layer's weight stood: `F.linear` with it goes to the kernels, whoever calls it, so
neither transformers' modules nor the lean forward know. `torch.cat` of some makes one of them, to be multiplied in one
call. Everything else with it is refused.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import kernels
from .attention import Attention, attention_of
from .formats import GROUP, Format
from .pages import moved, roomy


class Packed(torch.Tensor):
    """A matrix [rows, columns] that shows itself as float32; `raw` are its bytes [rows, row bytes] in `format`."""

    raw: torch.Tensor
    stored: Format
    product: kernels.Product

    @staticmethod
    def __new__(cls, raw: torch.Tensor, stored: Format, columns: int) -> "Packed":
        make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        made = make(cls, (len(raw), columns), dtype=torch.float32, device="cpu")
        made.stored = stored
        made._hold(raw)
        return made

    def _hold(self, raw: torch.Tensor) -> None:
        layout = kernels.Matrices(self.stored, torch.float32, self.shape[1], 0, len(raw), False, (0, 0, 0, 0))
        self.raw, self.product = raw, kernels.product_of(layout, raw.data_ptr())

    def attend(self, layer: Any, out: Any) -> Attention | None:
        """Of a layer's queries, keys and values; for the lean forward, which see, and `attention_of`."""
        return attention_of(layer, self, out) if isinstance(out, Packed) else None

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Packed({list(self.shape)}, {self.stored.name})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func is torch.cat:
            return _joined(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise TypeError(f"{func}: a packed matrix is for products only")


def _linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None, out: torch.Tensor | None = None) -> Any:
    """x [.., columns] to [.., rows] in x's type."""
    flat = x.reshape(-1, x.shape[-1]).to(torch.float32).contiguous()
    shape = *x.shape[:-1], len(weight.raw)
    if out is not None and out.dtype == torch.float32 and out.shape == shape and out.is_contiguous():
        result = out
    else:
        result = torch.empty(shape)
    kernels.multiply(weight.product, flat, result, kernels.threads(emulated=True))
    if bias is not None:
        result += bias
    if out is not None:
        return out if result is out else out.copy_(result)
    return result.to(x.dtype)


def _joined(parts: Sequence[Packed], dim: int = 0) -> Packed:
    """The rows of all, which from now on are views of the new bytes. TypeError: of another kind, or not by rows."""
    first = parts[0]
    alike = all(isinstance(p, Packed) and p.stored == first.stored and p.shape[1] == first.shape[1] for p in parts)
    if dim or not alike:
        raise TypeError("packed matrices are joined by rows, and with their like only")
    raws = [p.raw for p in parts]
    width, at = raws[0].shape[1], raws[0].data_ptr()
    places = [at + sum(map(len, raws[:i])) * width for i in range(len(raws))]
    if [raw.data_ptr() for raw in raws] == places and len({raw.untyped_storage().data_ptr() for raw in raws}) == 1:
        rows = sum(map(len, raws))  # they have been joined before
        return Packed(raws[0].as_strided((rows, width), (width, 1)), first.stored, first.shape[1])
    made = Packed(torch.cat(raws, out=roomy(sum(map(len, raws)), width)), first.stored, first.shape[1])
    for part, raw in zip(parts, made.raw.split([len(p.raw) for p in parts]), strict=True):
        part._hold(raw)
    return made


def pack_dense(model: torch.nn.Module, stored: Format) -> int:
    """Put packed matrices into every linear layer on the CPU whose rows hold whole groups. Returns how many.

    Routers are no linear layers in transformers' mixture models and stay as they are. Only where `kernels.ready()`.
    """
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and not m.in_features % GROUP]
    for layer in layers:
        if not layer.weight.is_meta:
            raw = moved(stored.encode(layer.weight.detach()))
            packed: Any = Packed(raw, stored, layer.in_features)
            layer._parameters["weight"] = packed
    return len(layers)
