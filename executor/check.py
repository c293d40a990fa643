"""Are the tokens those that transformers itself would have written?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..traces.speculate import Generation
from .models import Models
from .whole import reference


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that differs; `margin` is how far transformers' two best logits are apart there."""

    sequence: int
    position: int
    ours: int | None
    theirs: int | None
    margin: float


@torch.inference_mode()
def find_difference(
    models: Models,
    prompts: Sequence[Sequence[int]],
    generations: Sequence[Generation],
    stops: Sequence[int],
    limit: int,
) -> Difference | None:
    """Compare greedy output with `generate` of transformers on the same weights, prompt by prompt; None if identical.

    prompts: token ids; `limit` is the run's max_new_tokens. The reference is loaded anew, whole, by transformers; for
    experts that are stored quantised, or that it cannot read, it runs on the numbers that they are stored as.
    """
    model = reference(models)
    for index, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        theirs = _greedy(model, prompt, stops, limit)
        if theirs != generation.tokens:
            return _first(model, index, prompt, generation.tokens, theirs)
    return None


def _greedy(model: Any, prompt: Sequence[int], stops: Sequence[int], limit: int) -> list[int]:
    rows = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=list(stops) or None,
        pad_token_id=stops[0] if stops else 0,
    )
    return out[0, len(prompt) :].tolist()


def _first(model: Any, index: int, prompt: Sequence[int], ours: list[int], theirs: list[int]) -> Difference:
    at = next(i for i in range(max(len(ours), len(theirs))) if ours[i : i + 1] != theirs[i : i + 1])
    rows = torch.tensor([[*prompt, *theirs[:at]]], device=model.device)
    best = model(rows).logits[0, -1].float().topk(2).values
    return Difference(
        sequence=index,
        position=len(prompt) + at,
        ours=ours[at] if at < len(ours) else None,
        theirs=theirs[at] if at < len(theirs) else None,
        margin=float(best[0] - best[1]),
    )
