"""A pair loaded for live runs: the target's experts in host memory, everything else on the fast device."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..traces.models import (
    MoeBlock,
    Pair,
    check_rollback,
    check_tokenizers,
    dtype_of,
    find_pair,
    measure_draft,
    model_shape,
    moe_blocks,
    quiet,
    read_weights,
    stop_tokens,
    suit_threads,
)
from .checkpoint import load_target
from .store import HostStore


@dataclass(frozen=True, slots=True)
class Models:
    """A pair whose target computes experts through us: `attach` a listener to `experts` before use."""

    pair: Pair
    store: HostStore
    blocks: list[MoeBlock]
    place: str  # folder or hub name of the target

    @property
    def device(self) -> torch.device:
        return self.pair.target.device

    @property
    def experts(self) -> list[torch.nn.Module]:
        return [block.experts for block in self.blocks]


def load_models(
    target: str | Path | None = None, draft: str | Path | None = None, dtype: str = "float32", device: str = "cpu"
) -> Models:
    """As `load_pair`, the target by our own loader. InputError: no model, no experts, or parts that do not fit."""
    with quiet():
        big, small = find_pair(target, draft)
        shape = model_shape(big.config, big.name, dtype_of(big.config, dtype))
        helper = draft_shape = None
        if small is not None:
            check_rollback(big, small)
            check_tokenizers(big, small)
            draft_dtype = dtype_of(small.config, dtype)
            draft_shape = measure_draft(small.config, small.name, draft_dtype)
            helper = read_weights(small, draft_dtype, device)
        model, store = load_target(big, shape, device, pinned=device != "cpu")
    suit_threads(shape, device)
    pair = Pair(model, helper, big.tokenizer, shape, draft_shape, stop_tokens(model))
    return Models(pair, store, moe_blocks(model), big.place)
