"""What a forward pass costs that no policy can save: everything but the experts, at batch 1 mostly calls."""

from statistics import median
from time import perf_counter

import torch

from ..traces.cached import open_cached
from ..traces.lean import refusal
from .live import routers_of
from .models import Models

CONTEXT = 64
PASSES = 15


@torch.inference_mode()
def dispatch_floor(models: Models, rows: int = 5) -> dict[str, float]:
    """ms of one pass after 64 tokens, the median of 15: of the target for one row and for `rows`, its experts doing
    nothing, and of the draft for one token. By the forward that live runs use."""
    routers_of(models, 0)  # leaves experts that do nothing
    pair = models.pair
    found = {"target": _pass_ms(pair.target, 1), f"target_of_{rows}_rows": _pass_ms(pair.target, rows)}
    if isinstance(pair.draft, torch.nn.Module):
        found["draft"] = _pass_ms(pair.draft, 1)
    return found


def forwards(models: Models) -> dict[str, str]:
    """By which forward target and draft run: "lean", or why by transformers' own."""
    named = zip(("target", "draft"), models.pair.models, strict=False)
    return {role: f"transformers': {why}" if (why := refusal(model)) else "lean" for role, model in named}


def _pass_ms(model: torch.nn.Module, rows: int) -> float:
    vocab = model.config.get_text_config().vocab_size  # type: ignore[union-attr]
    one = open_cached(model, vocab)
    one.expect_crops()
    one.feed([i % vocab for i in range(CONTEXT)], keep=1)
    taken = []
    for _ in range(PASSES):
        begin = perf_counter()
        one.feed([1 % vocab] * rows, keep=1)[0].argmax().item()
        taken.append((perf_counter() - begin) * 1e3)
        one.crop(rows)
    return median(taken[1:])
