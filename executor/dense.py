"""Dense weights in groups of 32 on the CPU, multiplied by the compiled kernels.

A packed matrix stands where a linear layer's weight stood: `F.linear` with it goes to the kernels, whoever calls it, so
neither transformers' modules nor the lean forward know. Everything else with it is refused.
"""

from typing import Any

import torch
import torch.nn.functional as F

from . import kernels
from .formats import GROUP, Format


class Packed(torch.Tensor):
    """A matrix [rows, columns] that shows itself as float32; `raw` are its bytes [rows, row bytes] in `format`."""

    raw: torch.Tensor
    matrices: kernels.Matrices

    @staticmethod
    def __new__(cls, raw: torch.Tensor, stored: Format, columns: int) -> "Packed":
        make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        made = make(cls, (len(raw), columns), dtype=torch.float32, device="cpu")
        made.raw = raw
        made.matrices = kernels.Matrices(stored, torch.float32, columns, 0, len(raw), False, (0, 0, 0, 0))
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Packed({list(self.shape)}, {self.matrices.format.name})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise TypeError(f"{func}: a packed matrix is for products only")


def _linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None, out: torch.Tensor | None = None) -> Any:
    """x [.., columns] to [.., rows] in x's type."""
    flat = x.reshape(-1, x.shape[-1]).to(torch.float32).contiguous()
    n, rows = len(flat), len(weight.raw)
    result = torch.empty((n, rows))
    threads, every = kernels.threads(emulated=True), range(n)
    address = weight.raw.data_ptr()
    kernels.run(weight.matrices, kernels.UP, [address], [n], every, every, flat, result, result, threads)
    if bias is not None:
        result += bias
    result = result.view(*x.shape[:-1], rows)
    return result.to(x.dtype) if out is None else out.copy_(result)


def pack_dense(model: torch.nn.Module, stored: Format) -> int:
    """Put packed matrices into every linear layer on the CPU whose rows hold whole groups. Returns how many.

    Routers are no linear layers in transformers' mixture models and stay as they are. Only where `kernels.ready()`.
    """
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and not m.in_features % GROUP]
    for layer in layers:
        if not layer.weight.is_meta:
            packed: Any = Packed(stored.encode(layer.weight.detach()), stored, layer.in_features)
            layer._parameters["weight"] = packed
    return len(layers)
