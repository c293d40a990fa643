"""Are the tokens those that transformers itself would have written?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..traces.cached import CachedModel
from ..traces.speculate import Generation
from .models import Models
from .whole import reference

SINGLES, TOGETHER = 16, 5  # tokens read one by one, and rows at a time, to see what rounding does to logits


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that differs.

    `margin` is how far transformers' two best logits are apart there, `lead` how far its own token lies above ours, and
    `rounding` how far apart two logits can move in transformers itself by the number of rows in a pass, measured on
    this text. Below float32 a difference that it explains is no fault: a pass of K + 1 rows is not rounded as one of
    1 row is, and near ties flip.
    """

    sequence: int
    position: int
    ours: int | None
    theirs: int | None
    margin: float
    lead: float
    rounding: float
    precision: str

    @property
    def explained(self) -> bool:
        return self.precision != "float32" and abs(self.lead) <= self.rounding

    def __str__(self) -> str:
        said = (
            f"sequence {self.sequence} differs from transformers' greedy generate at position {self.position} "
            f"({self.ours} instead of {self.theirs}); there its two best logits are {self.margin:.4g} apart, and these "
            f"two {self.lead:.4g}"
        )
        if self.precision == "float32":
            return said
        verdict = "within" if self.explained else "more than"
        return f"{said}: {verdict} what rounding in {self.precision} does to two logits here ({self.rounding:.4g})"


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
    experts that are stored quantised, or that it cannot read, it runs on the numbers that they are stored as. Returns
    the first difference that rounding does not explain; if it explains all, the first of them.
    """
    model, found = reference(models), None
    for index, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        theirs = _greedy(model, prompt, stops, limit)
        if theirs != generation.tokens:
            one = _first(model, index, prompt, generation.tokens, theirs)
            if not one.explained:
                return one
            found = found or one
    return found


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
    text = [*prompt, *theirs[:at]]
    whole = model(torch.tensor([text], device=model.device)).logits[0].float()
    best = whole[-1].topk(2).values
    own, other = (tokens[at] if at < len(tokens) else None for tokens in (ours, theirs))
    known = own is not None and other is not None
    return Difference(
        sequence=index,
        position=len(text),
        ours=own,
        theirs=other,
        margin=float(best[0] - best[1]),
        lead=float(whole[-1, other] - whole[-1, own]) if known else float("inf"),
        rounding=2 * _rounding(model, text, whole),
        precision=str(model.dtype).removeprefix("torch."),
    )


def _rounding(model: Any, text: Sequence[int], whole: torch.Tensor) -> float:
    """How far one logit moves with the number of rows in a pass: the last tokens one by one, and some at a time.

    whole: [n, V] logits of one pass over `text`. At least the spacing of numbers at the largest of them.
    """
    vocab, first = whole.shape[1], max(0, len(text) - SINGLES)
    moved = float(whole[first:].abs().max()) * torch.finfo(model.dtype).eps
    for rows in (1, TOGETHER):
        cached = CachedModel(model, vocab)
        if first:
            cached.feed(text[:first], keep=1)
        for begin in range(first, len(text), rows):
            part = text[begin : begin + rows]
            logits = cached.feed(part, keep=len(part))
            moved = max(moved, float((logits - whole[begin : begin + len(part)]).abs().max()))
    return moved
