"""From logits to tokens: the laws that are sampled from, and what is kept of a draft."""

from collections.abc import Sequence

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
