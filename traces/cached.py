"""A causal language model with its key/value cache: fed tokens, gives logits, forgets refused drafts."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from .lean import LeanModel, refusal


class CachedModel:
    """A model run by transformers' own forward; `length` counts the tokens in the cache."""

    def __init__(self, model: Any, vocab: int) -> None:
        self.model = model
        self.vocab = vocab
        self.length = 0
        self.cache = DynamicCache(config=model.config)
        # transformers renames `past_key_values` to `cache` between 5.20 and 5.40.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def feed(self, ids: Sequence[int], keep: int) -> torch.Tensor:
        """Append `ids`; logits of the last `keep` of them, [keep, vocab] float32 on the model's device."""
        rows = torch.tensor([list(ids)], device=self.model.device)
        out = self.model(input_ids=rows, use_cache=True, logits_to_keep=keep, **{self._cache_name: self.cache})
        self.length += len(ids)
        return out.logits[0, -keep:, : self.vocab].float()

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens. Called with 0 too: sliding windows trim what they kept for a rollback."""
        if self.length:  # an empty sliding window cannot be cropped
            self.cache.crop(-count)
        self.length -= count

    def expect_crops(self) -> None:
        """Make sliding-window layers keep what a rollback needs."""
        self.cache.activate_past_recording()

    @property
    def can_crop(self) -> bool:
        return self.cache.is_croppable

    def can_forget(self, count: int) -> bool:
        """Whether the last `count` tokens can be forgotten at any time, not only right after they were fed.

        A sliding window that is full has dropped what it would need again.
        """
        if count <= 0:
            return count == 0
        layers: list[Any] = self.cache.layers
        full = any(getattr(layer, "is_sliding", False) and self.length >= layer.sliding_window for layer in layers)
        return count <= self.length and self.can_crop and not full


Cached = CachedModel | LeanModel


def open_cached(model: Any, vocab: int) -> Cached:
    """The model with an empty cache; the lean forward runs it where it knows it (`lean.refusal` says why not)."""
    return CachedModel(model, vocab) if refusal(model) else LeanModel(model, vocab)


def reads_in_parts(model: Any) -> bool:
    """Whether a text that is fed in parts gives the logits of the whole, but for rounding.

    In transformers 5.24 that of Jamba does not: its Mamba layers begin anew with every part of more than one token. How
    much rounding changes is seen by feeding single tokens, which every model supports.
    """
    vocab = model.config.get_text_config().vocab_size
    ids = [token % vocab for token in range(16)]

    def fed(sizes: Sequence[int]) -> torch.Tensor:
        cached = CachedModel(model, vocab)
        return torch.cat([cached.feed(ids[cached.length : cached.length + size], keep=size) for size in sizes])

    with torch.inference_mode():
        whole = fed([16])
        parts, singles = ((fed(sizes) - whole).abs().max() for sizes in ([8, 8], [8, *[1] * 8]))
    return bool(parts <= 10 * singles + 1e-4 * whole.abs().max())
