"""What a recording came to: its texts, counts over them, and where they part from plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .models import Pair
from .speculate import Generation, Options, Speculation


@dataclass(frozen=True, slots=True)
class Difference:
    """Where speculative and plain greedy output part: `margin` is the plain run's top-2 logit distance there."""

    prompt: str
    position: int
    speculative: int | None
    plain: int | None
    margin: float


@dataclass(slots=True)
class Summary:
    """What a recording was: text of each sequence, counts over all of them, and differences if they were looked for."""

    prompts: int = 0
    prompt_tokens: int = 0
    rows: int = 0
    texts: list[list[int]] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    interrupted: bool = False
    compared: bool = False
    differences: list[Difference] = field(default_factory=list)
    seconds: float = 0.0

    def total(self, name: str) -> int:
        return sum(getattr(g, name) for g in self.generations)

    @property
    def new_tokens(self) -> int:
        return sum(len(g.tokens) for g in self.generations)

    @property
    def acceptance(self) -> float | None:
        return self.total("accepted") / self.total("drafted") if self.total("drafted") else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts kept at each position of the window, of those drafted there."""
        longest = max((len(g.drafted_at) for g in self.generations), default=0)
        columns = [
            [(g.accepted_at[i], g.drafted_at[i]) for g in self.generations if i < len(g.drafted_at)]
            for i in range(longest)
        ]
        return [sum(kept for kept, _ in c) / sum(tried for _, tried in c) for c in columns]

    @property
    def draft_probability(self) -> dict[str, float | None]:
        """Mean probability that the draft itself gave to the tokens it proposed: of those kept, of those refused."""
        kept, refused = self.total("accepted"), self.total("drafted") - self.total("accepted")
        sums = sum(g.sure_kept for g in self.generations), sum(g.sure_refused for g in self.generations)
        return {"kept": sums[0] / kept if kept else None, "refused": sums[1] / refused if refused else None}

    @property
    def tokens_per_verify(self) -> float | None:
        return 1 + self.total("accepted") / self.total("verifies") if self.total("verifies") else None


def find_difference(
    pair: Pair, name: str, turns: Sequence[Sequence[int]], options: Options, text: Sequence[int]
) -> Difference | None:
    """First token where `text` parts from what the target writes without a draft, in absolute position.

    In float32 there is none. In bfloat16 a forward of K+1 rows rounds differently from one of 1 row, and near-ties
    flip: the margin tells.
    """
    plain = Speculation(pair.target, None, options)
    for ids in turns:
        plain.generate(ids)
    if plain.text == list(text):
        return None
    at = next(i for i in range(max(len(text), len(plain.text))) if text[i : i + 1] != plain.text[i : i + 1])
    replay = Speculation(pair.target, None, options)
    with torch.inference_mode():
        top = replay.target.feed(plain.text[:at], keep=1)[0].topk(2).values
    ours, theirs = text[at : at + 1], plain.text[at : at + 1]
    return Difference(name, at, ours[0] if ours else None, theirs[0] if theirs else None, float(top[0] - top[1]))
