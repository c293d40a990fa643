"""Routing as other programs return it, a text at a time, and the steps that it becomes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import InputError
from .schema import Kind, ModelShape, Step


@dataclass(slots=True)
class Text:
    """The routing of one sequence: experts [T, L, k] in the router's order, weights the same shape or None.

    `prompt_tokens`: how many of the T rows are prompt (None: not stated). `tokens` [T]: vocabulary ids or None.
    `passes`: kind and length of each forward pass, where the source shows them. `kinds` [T]: the kind of each row,
    where the source names it. `left_out`: tokens that the source does not have in every layer.
    """

    name: str
    experts: np.ndarray
    weights: np.ndarray | None = None
    prompt_tokens: int | None = None
    tokens: np.ndarray | None = None
    passes: Sequence[tuple[Kind, int]] | None = None
    kinds: Sequence[str] | None = None
    left_out: int = 0

    def lengths(self) -> list[tuple[Kind, int]]:
        """Kind and number of rows of each step."""
        total = len(self.experts)
        if self.kinds is not None:
            return _runs([Kind(kind) for kind in self.kinds])
        if self.passes is not None:
            return list(self.passes)
        prompt = min(self.prompt_tokens or 0, total)
        return ([(Kind.PREFILL, prompt)] if prompt else []) + [(Kind.DECODE, 1)] * (total - prompt)


def _runs(kinds: list[Kind]) -> list[tuple[Kind, int]]:
    found: list[tuple[Kind, int]] = []
    for kind in kinds:
        if kind is Kind.PREFILL and found and found[-1][0] is Kind.PREFILL:
            found[-1] = (kind, found[-1][1] + 1)
        else:
            found.append((kind, 1))
    return found


def steps_of(texts: Sequence[Text], weights: bool) -> Iterator[Step]:
    """The steps of all texts, one sequence after another; positions count from 0 in each."""
    for sequence, text in enumerate(texts):
        begin = 0
        for kind, n in text.lengths():
            rows = slice(begin, begin + n)
            tokens = np.full(n, -1, np.int32) if text.tokens is None else text.tokens[rows]
            applied = text.weights[rows] if weights and text.weights is not None else None
            yield Step(
                sequence=sequence,
                turn=0,
                kind=kind,
                positions=np.arange(begin, begin + n, dtype=np.int32),
                tokens=tokens,
                drafted=np.zeros(n, bool),
                accepted=0,
                experts=text.experts[rows],
                weights=applied,
            )
            begin += n


def check_texts(texts: Sequence[Text], shape: ModelShape, src: str) -> None:
    """InputError names the text, row, layer and id of the first value that this model cannot have chosen."""
    for text in texts:
        ids = text.experts
        wrong = (ids < 0) | (ids >= shape.experts)
        if wrong.any():
            row, layer, slot = np.argwhere(wrong)[0].tolist()
            value = ids[row, layer, slot]
            why = "routing of that token is missing" if value < 0 else f"the model has {shape.experts} experts"
            raise InputError(f"{src}: {text.name}, token {row}, layer {layer}: expert id {value}, but {why}")
        ordered = np.sort(ids, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
        if twice.any():
            row, layer = np.argwhere(twice)[0].tolist()
            raise InputError(
                f"{src}: {text.name}, token {row}, layer {layer}: an expert is chosen twice "
                f"({ids[row, layer].tolist()}); such rows are padding or damage, leave them out"
            )
        if text.weights is not None and not np.isfinite(text.weights).all():
            raise InputError(f"{src}: {text.name}: a weight is not a finite number")
