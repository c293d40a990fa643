"""A pair loaded for live runs: the target's experts in host memory, everything else on the fast device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from ..traces.errors import InputError
from ..traces.models import (
    MoeBlock,
    Pair,
    Source,
    check_cache,
    check_rollback,
    check_tokenizers,
    dtype_of,
    find_model,
    find_pair,
    measure_draft,
    model_shape,
    moe_blocks,
    quiet,
    stop_tokens,
    suit_threads,
    text_draft,
)
from ..traces.schema import DraftShape, ModelShape
from .checkpoint import fill_dense, open_checkpoint
from .device import naming
from .ggufs import SUFFIX, find_gguf
from .loading import Watch, watching
from .memory import CONTEXT, LEAST, check_memory, free_vram, prefill_reserve
from .store import HostStore
from .stores import Choice, build_store, check_choice

Context = int | Callable[[Any], int] | None  # tokens, or how many they are by the target's tokenizer


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
    target: str | Path | None = None,
    draft: str | Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    store: Choice = Choice(),
    tokenizer: str | Path | None = None,
    watch: Watch | None = None,
    context: Context = None,
) -> Models:
    """Load a pair by our own loader; `target`, `draft` and `dtype` as `load_pair` has them.

    `tokenizer`: a folder or name to take it from instead of the target's. `watch` is told how many bytes of the
    checkpoints have been read, and of how many; None shows progress on a terminal. `context`: tokens whose keys and
    values memory must be left for; at least 512, and 4,096 if nothing is said.

    Raises InputError: no model, no experts, parts that do not fit together, or too little memory for them. All but
    damaged weights is found out before a weight is read.
    """
    check_choice(store)
    with quiet():
        big, small = find_pair(target, draft, lambda *asked: find_source(*asked, tokenizer=tokenizer))
        check_cache(big)
        shape = model_shape(big.config, big.name, dtype_of(big.config, dtype))
        opened, (helper, draft_shape) = None, text_draft(big, draft)
        if small is not None:
            check_rollback(big, small)
            check_tokenizers(big, small)
            draft_dtype = dtype_of(small.config, dtype)
            draft_shape = measure_draft(small.config, small.name, draft_dtype)
            opened = open_checkpoint(small, getattr(torch, draft_dtype), apart=False)
        found = open_checkpoint(big, getattr(torch, shape.dtype), apart=True)
    tokens = context(big.tokenizer) if callable(context) else context or CONTEXT
    beside = _beside(shape, draft_shape, device, max(LEAST, tokens))
    with watching(watch, [found.files, *([opened.files] if opened else [])]):
        with naming("host memory", torch.device("cpu")):
            experts = build_store(found, shape, store, device, beside)
        with naming("dense weights", torch.device(device)):
            model = fill_dense(found, device)
            helper = helper if opened is None else fill_dense(opened, device)
    if not experts.record.format.exact:
        shape = replace(shape, expert_bytes=experts.record.size)  # what is moved
    suit_threads(shape, device)
    pair = Pair(model, helper, big.tokenizer, shape, draft_shape, stop_tokens(model))
    return Models(pair, experts, moe_blocks(model), big.place)


def _beside(shape: ModelShape, draft: DraftShape | None, device: str, context: int) -> dict[str, int]:
    """Bytes of host memory that are needed beside experts, by name; InputError if a GPU cannot hold what it must."""
    needs = {"dense weights": shape.dense_bytes, "draft": draft.dense_bytes if draft else 0}
    needs |= prefill_reserve(shape, draft, context)
    if device == "cpu":
        return needs
    advice = "use a smaller draft or --draft none, --dtype bfloat16, or --device cpu"
    check_memory("GPU memory", f"--device {device}", needs, free_vram(device), advice)
    return {}


def find_source(flag: str, name: str | Path | None, role: str, tokenizer: str | Path | None = None) -> Source:
    """A folder, a hub name or a GGUF file; the target's tokenizer from elsewhere if that is said."""
    own = tokenizer if role == "target" else None
    if name is not None and str(name).endswith(SUFFIX):
        return find_gguf(flag, str(name), tokenizer)  # a file's own may not be readable: one will do for both
    found = find_model(flag, name, role)
    return found if own is None else replace(found, tokenizer=_tokenizer(own))


def _tokenizer(place: str | Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(place))
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"--tokenizer {place}: cannot be read ({first}); give a folder with one") from None
