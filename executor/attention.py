"""One layer's attention in one call of the compiled kernels (csrc/attention.c), where its projections are packed.

At a decode or verify step the dozens of small tensor operations around two products take longer than the products, and
torch's attention reads keys and values once for every query head. The values are those of the lean forward but for
rounding; a row's do not depend on how many are computed with it, on threads or on the instruction set.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from . import kernels

MOST_ROWS = 16  # as attention.c has it
LANES = 16


class _Attention(ctypes.Structure):
    """As csrc/attention.c has it."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "before", "hidden", "heads", "kv_heads", "width", "threads")),
        ("isa", ctypes.c_char_p),
        *((name, ctypes.c_float) for name in ("eps", "head_eps", "scale")),
        *((name, ctypes.c_void_p) for name in ("x", "norm", "q_norm", "k_norm", "cosines", "sines", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("into", "out")),
    )


@dataclass(slots=True)
class Attention:
    """One layer's. made: as C reads it. kept: what that points to."""

    made: _Attention
    kept: tuple[Any, ...]

    def __call__(
        self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> bool:
        """Add to the residual stream x [n, hidden]; False, and nothing was done, where n is more than MOST_ROWS.

        cosines, sines: [n, .., width], as the lean forward has them. keys, values: [.., kv heads, length, width], views
        of a cache [capacity, kv heads, width], of which the last n places are written. MemoryError: there is none left.
        """
        if len(x) > MOST_ROWS:
            return False
        made, choice = self.made, kernels.chosen()
        assert choice.library is not None
        made.rows, made.before = len(x), keys.shape[-2] - len(x)
        made.threads, made.isa = kernels.threads(emulated=True), kernels.ISAS[choice.isa or ""]
        made.x, made.cosines, made.sines = x.data_ptr(), cosines.data_ptr(), sines.data_ptr()
        made.keys, made.values = keys.data_ptr(), values.data_ptr()
        if choice.library.spac_attention(ctypes.byref(made)):
            raise MemoryError(f"attention needs more memory for {keys.shape[-2]} tokens")
        return True


def attention_of(layer: Any, into: Any, out: Any) -> Attention | None:
    """For transformers' decoder `layer`; None where it is not as csrc/attention.c has it.

    into, out: packed, from hidden to queries, keys and values, and from all heads to hidden.
    """
    own, norm = layer.self_attn, layer.input_layernorm
    heads = [getattr(own, name, None) for name in ("q_norm", "k_norm")]
    weights = [None if one is None else one.weight for one in (norm, *heads)]
    plain = all(w is None or (w.dtype == torch.float32 and w.device.type == "cpu") for w in weights)
    by_head = all(w is None or len(w) == own.head_dim for w in weights[1:])
    if not (plain and by_head and own.head_dim % LANES == 0 and kernels.ready()):
        return None
    places = dict(
        zip(("norm", "q_norm", "k_norm"), (None if w is None else w.data_ptr() for w in weights), strict=True)
    )
    made = _Attention(
        hidden=into.shape[1],
        heads=out.shape[1] // own.head_dim,
        kv_heads=(len(into) - out.shape[1]) // own.head_dim // 2,
        width=own.head_dim,
        eps=norm.variance_epsilon,
        head_eps=getattr(heads[0], "variance_epsilon", 0.0),
        scale=own.scaling,
        into=ctypes.addressof(into.product.layer),
        out=ctypes.addressof(out.product.layer),
        **places,
    )
    return Attention(made, (weights, into, out))
