"""From logits to tokens: the laws that are sampled from, and what is kept of a draft."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch


def distribution(logits: torch.Tensor, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """Sampling distribution [..., V] float64 on the CPU: softmax at `temperature`, then the smallest set of top tokens
    with at least `top_p` of the mass, renormalised. Target and draft must go through the same."""
    probs = (logits.double() / temperature).softmax(-1).cpu()
    if top_p >= 1.0:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0.0
    kept = torch.zeros_like(probs).scatter_(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def draw(probs: torch.Tensor, rng: torch.Generator) -> int:
    return int(torch.multinomial(probs, 1, generator=rng))


class Race:
    """Draws that hang on a seed and a position of the text alone: target and draft draw alike without a word.

    A token x of law p wins with p(x)/E(x) the highest, where the E are standard exponential; so it follows p (it is the
    Gumbel trick). With the same E, target and draft choose the same token with probability at least
    (1 - d)/(1 + d) where d is the distance of their laws in total variation, against the 1 - d of `judge_sampled`; and
    what the target chooses does not depend on what was drafted (Daliri, Musco, Suresh 2024, arXiv 2408.07978).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed % 2**64
        self._variates = lru_cache(maxsize=16)(self._make)  # a position is asked for by the draft and by the target

    def draw(self, probs: torch.Tensor, position: int) -> int:
        """The token at `position` of the text, of a law [V]."""
        return int((probs / self._variates(position, len(probs))).argmax())

    def _make(self, position: int, vocab: int) -> torch.Tensor:
        random = np.random.Generator(np.random.Philox(key=[self._seed, position]))
        return torch.from_numpy(random.standard_exponential(vocab))


def judge_sampled(p: torch.Tensor, q: torch.Tensor, drafts: Sequence[int], rng: torch.Generator) -> tuple[int, int]:
    """How many of n drafts to keep, and the token that follows them.

    p: [n+1, V] target and q: [n, V] draft distributions, row by row; `drafts` were drawn from q. Draft x is kept with
    probability min(1, p(x)/q(x)); the first one refused is replaced by a draw from max(0, p - q), renormalised; so
    every token follows p (arXiv 2211.17192, algorithm 1 and appendix A.1).
    """
    for row, token in enumerate(drafts):
        chance = p[row, token] / q[row, token]
        if torch.rand(1, generator=rng, dtype=torch.float64) < chance:
            continue
        rest = (p[row] - q[row]).clamp(min=0.0)
        return row, draw(rest if rest.sum() > 0 else p[row], rng)
    return len(drafts), draw(p[len(drafts)], rng)


def judge_greedy(choices: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """How many drafts equal the target's own n+1 `choices`, and the choice that follows them."""
    for row, token in enumerate(drafts):
        if choices[row] != token:
            return row, choices[row]
    return len(drafts), choices[len(drafts)]
