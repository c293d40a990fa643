"""How a model's routers are read: what they were given, what they chose, and the values by which they ranked.

In every family that transformers runs through its experts registry the router returns (logits, weights, ids), and the
block hands ids [n, k] and weights [n, k] to the experts. What differs is how the choice is made: softmax or sigmoid,
with a bias that only ranking sees (DeepSeek-V3's aux-free balancing, arXiv 2412.19437, section 2.1.2), within the best
groups of experts alone (DeepSeek-V2, arXiv 2405.04434, section 2.2.2). So the values are not computed a second time
here: those are kept that the router itself handed to top-k.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .errors import InputError
from .models import MoeBlock

LOGIT, BIASED = "logit", "biased score"
TOPK = (torch.topk, torch.Tensor.topk)
HALF_ROUNDING = 2e-3  # relative; twice what float16 loses


class LastTopK(TorchFunctionMode):
    """Keeps the values [n, E] of the last top-k over E of them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.values: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TOPK:
            values = args[0] if args else kwargs["input"]
            if values.shape[-1] == self.experts:
                self.values = values
        return func(*args, **kwargs)


@dataclass(slots=True)
class Asked:
    """The last call of one gate: its input and further arguments, logits [n, E], and the values that it ranked by."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    logits: torch.Tensor | None = None
    ranked: torch.Tensor | None = None


@contextmanager
def asking(blocks: Sequence[MoeBlock], asked: dict[int, Asked], experts: int, values: bool) -> Iterator[None]:
    """Inside this context `asked` has each gate's last call, by MoE order; `values` also what it ranked by."""
    with ExitStack() as stack:
        for order, block in enumerate(blocks):
            for hook in _hooks(order, block.gate, asked, experts, values):
                stack.callback(hook.remove)
        yield


def _hooks(order: int, gate: torch.nn.Module, asked: dict[int, Asked], experts: int, values: bool) -> list[Any]:
    mode = LastTopK(experts)

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asked[order] = Asked(args, kwargs)
        if values:
            mode.values = None
            mode.__enter__()

    def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        mode.__exit__(None, None, None)
        logits = output[0] if isinstance(output, tuple) else output
        if logits is not None:  # None where the gate raised
            asked[order].logits = logits.reshape(-1, logits.shape[-1])
            asked[order].ranked = None if mode.values is None else mode.values.reshape(-1, experts)

    hooks: list[Any] = [gate.register_forward_pre_hook(before, with_kwargs=True)]
    if values:
        hooks.append(gate.register_forward_hook(after, always_call=True))
    return hooks


@dataclass(frozen=True, slots=True)
class Routers:
    """What one short pass over a model shows of its gates.

    `scores` names the quantity that `ranking` returns; `extras` are, by MoE order, the arguments that a gate takes
    beside hidden states, where they are the same in every pass.
    """

    scores: str | None = None
    extras: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def ranking(self, asked: Asked) -> torch.Tensor:
        """[n, E] values whose top-k is the gate's choice."""
        values = asked.logits if self.scores == LOGIT or asked.ranked is None else asked.ranked
        assert values is not None
        return values


def read_routers(model: Any, blocks: Sequence[MoeBlock], experts: int, scores: bool, lookahead: bool) -> Routers:
    """Run the model once over a few tokens and look at its gates.

    Raises InputError: full scores of a gate that does not choose by a top-k of them; lookahead through a gate that
    needs more than hidden states.
    """
    if not scores and not lookahead:
        return Routers()
    asked: dict[int, Asked] = {}
    tokens = torch.arange(min(8, model.config.get_text_config().vocab_size), device=model.device)[None]
    with torch.inference_mode(), asking(blocks, asked, experts, values=scores):
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    quantity = None
    if scores:
        plain = all(_by_logits(asked[order]) for order in range(len(blocks)))
        quantity = LOGIT if plain else BIASED
    extras = {}
    if lookahead:
        fixed = {id(t) for t in (*model.parameters(), *model.buffers())}
        extras = {order: _extras(block.gate, asked[order], fixed) for order, block in enumerate(blocks)}
    return Routers(quantity, extras)


def _by_logits(asked: Asked) -> bool:
    """Whether a gate ranks by its logits, or by their softmax or sigmoid, which have the same order."""
    logits, ranked = asked.logits, asked.ranked
    assert logits is not None
    if ranked is None:
        return True  # it has a way of its own; what is kept is checked against its choice at every step
    same = (logits, logits.softmax(-1), logits.float().softmax(-1), logits.sigmoid(), logits.float().sigmoid())
    return any(torch.allclose(ranked.float(), values.float(), rtol=1e-5, atol=1e-7) for values in same)


def _extras(gate: torch.nn.Module, asked: Asked, fixed: set[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = (*asked.args[1:], *asked.kwargs.values())
    if not asked.args or any(isinstance(value, torch.Tensor) and id(value) not in fixed for value in given):
        raise InputError(
            f"--lookahead: {type(gate).__name__} decides by more than hidden states, so it cannot be asked ahead; "
            "record without --lookahead"
        )
    return asked.args[1:], asked.kwargs


def gate_choice(gate: torch.nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Expert ids [n, k] that a gate would choose on hidden states [n, hidden], past any hook on it.

    Raises InputError for a gate that does not say its choice itself.
    """
    output = gate.forward(hidden, *args, **kwargs)
    choices = [t for t in output if not t.is_floating_point()] if isinstance(output, tuple) else []
    if len(choices) != 1:
        raise InputError(f"--lookahead: {type(gate).__name__} returns no expert choice; record without --lookahead")
    return choices[0].reshape(-1, choices[0].shape[-1])


def half_scores(values: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    """Values [n, L, E] in float16 whose top-k is still the router's choice, ids [n, L, k].

    Rounding can tie or swap the last chosen expert with the first one left out: a chosen value at or below the best of
    the others is lifted to the next float16 above it. Raises InputError where the values do not rank the choice first
    by more than rounding explains.
    """
    exact = values.float()
    chosen = torch.zeros_like(exact, dtype=torch.bool).scatter_(-1, ids, True)
    worst, best = exact.masked_fill(~chosen, torch.inf).amin(-1), exact.masked_fill(chosen, -torch.inf).amax(-1)
    if bool((best - worst > HALF_ROUNDING * best.abs().clamp(min=1e-4)).any()):
        raise InputError("--scores full: a router's choice is not the top-k of its scores; record with --scores topk")
    rounded = exact.half()
    best_other = rounded.masked_fill(chosen, -torch.inf).amax(-1, keepdim=True)
    above = torch.from_numpy(np.nextafter(best_other.cpu().numpy(), np.float16(np.inf)))
    low = chosen.cpu() & (rounded <= best_other).cpu()
    return torch.where(low, above, rounded.cpu()).numpy()
