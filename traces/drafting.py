"""Where drafts come from: a smaller model, or the text itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch

from .cached import Cached
from .sampling import distribution
from .schema import Kind


@dataclass(slots=True)
class Proposal:
    """Drafted tokens, the draft's probability of each, and in sampled mode the laws [V] they were drawn from.

    `seconds` is what they took, without the text that the draft had to read first.
    """

    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    laws: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0


class Watcher(Protocol):
    """What of `speculate.Observer` drafting tells."""

    def draft_begins(self, kind: Kind, tokens: Sequence[int], position: int) -> None: ...

    def drafted(self, token: int) -> None: ...


@dataclass(slots=True)
class Round:
    """One round of drafting: up to `wanted` tokens to follow `text`.

    `draw` takes a law [V] and a position of the text and gives a token. `stopped` is asked before every forward pass;
    `spend` is told a phase and when it began. A stop token is never
    proposed, for nothing after it could be kept: drafting ends there, and the law that is drawn from leaves it out.
    """

    text: Sequence[int]
    wanted: int
    stop_tokens: tuple[int, ...]
    temperature: float
    top_p: float
    prefill_chunk: int
    draw: Callable[[torch.Tensor, int], int]
    watcher: Watcher
    stopped: Callable[[], bool]
    spend: Callable[[str, float], None]


class Draft(Protocol):
    """Proposes continuations of one sequence's text."""

    def propose(self, round: Round) -> Proposal:
        """Up to `round.wanted` tokens; fewer where a stop token would follow, nothing is known, or it is stopped."""
        ...

    def keep(self, length: int) -> None:
        """Of all that was read or proposed only the first `length` tokens are still the text's."""
        ...

    def ready(self) -> None:
        """The prompt has been read by the target; from now on proposals may be refused."""
        ...


class ModelDraft:
    """A smaller model with its own cache, which is brought up to the text when it is asked."""

    def __init__(self, cached: Cached) -> None:
        self.cached = cached

    def propose(self, round: Round) -> Proposal:
        self._catch_up(round)
        proposed, begin, cached = Proposal(), perf_counter(), self.cached
        ids = round.text[cached.length :]
        while len(proposed.tokens) < round.wanted and not round.stopped():
            round.watcher.draft_begins(Kind.DECODE, ids, cached.length)
            logits = cached.feed(ids, keep=1)[0]
            token, sure, law = self._pick(logits, round, len(round.text) + len(proposed.tokens))
            if token in round.stop_tokens:
                break
            if law is not None:
                law[list(round.stop_tokens)] = 0.0
                proposed.laws.append(law / law.sum())
            proposed.tokens.append(token)
            proposed.sure.append(sure)
            ids = [token]
            round.watcher.drafted(token)
        proposed.seconds = perf_counter() - begin
        round.spend("draft", begin)
        return proposed

    def keep(self, length: int) -> None:
        self.cached.crop(max(0, self.cached.length - length))

    def ready(self) -> None:
        self.cached.expect_crops()

    def _catch_up(self, round: Round) -> None:
        """Bring the cache up to the text's last token after a prefill or after steps without drafting.

        A lag of two tokens is the ordinary one, after a step that kept every draft; it costs no forward of its own.
        """
        begin, text, cached = perf_counter(), round.text, self.cached
        lags = len(text) - cached.length > 2
        while lags and cached.length < len(text) - 1 and not round.stopped():
            last = min(cached.length + round.prefill_chunk, len(text) - 1)
            round.watcher.draft_begins(Kind.PREFILL, text[cached.length : last], cached.length)
            cached.feed(text[cached.length : last], keep=1)
        if lags:
            round.spend("draft_prefill", begin)

    @staticmethod
    def _pick(logits: torch.Tensor, round: Round, position: int) -> tuple[int, float, torch.Tensor | None]:
        """A token for `position`, the probability it was given, and in sampled mode the law [V] it was drawn from."""
        if round.temperature == 0:
            best, token = logits.max(-1)
            return int(token), float((best - logits.logsumexp(-1)).exp()), None
        law = distribution(logits, round.temperature, round.top_p)
        token = round.draw(law, position)
        return token, float(law[token]), law


@dataclass(frozen=True, slots=True)
class Ngram:
    """A draft for nothing: what followed the last time the text's last tokens stood there (prompt lookup, Saxena 2023,
    github.com/apoorvumang/prompt-lookup-decoding).

    The longest match of `longest` down to `shortest` tokens counts, of these the latest. Its proposals are certain of
    themselves, so in sampled mode a token x is kept with the target's own p(x) (arXiv 2211.17192 with q(x) = 1).
    """

    longest: int = 4
    shortest: int = 2

    @property
    def name(self) -> str:
        return f"n-gram of {self.longest} to {self.shortest} tokens"

    def open(self, vocab: int) -> "NgramDraft":
        return NgramDraft(self, vocab)


class NgramDraft:
    """The index of one sequence's text: where each run of tokens was last followed by another."""

    def __init__(self, source: Ngram, vocab: int) -> None:
        self.source, self.vocab = source, vocab
        self._after: dict[tuple[int, ...], int] = {}  # a run of tokens -> the position after its latest end
        self._read = 0  # positions that are indexed as the end of a run

    def propose(self, round: Round) -> Proposal:
        begin, proposed = perf_counter(), Proposal()
        text = list(round.text)
        at = self._find(text)
        while at is not None and len(proposed.tokens) < round.wanted and text[at] not in round.stop_tokens:
            token = text[at]
            proposed.tokens.append(token)
            proposed.sure.append(1.0)
            if round.temperature > 0:
                law = torch.zeros(self.vocab, dtype=torch.float64)
                law[token] = 1.0
                proposed.laws.append(law)
            text.append(token)  # a run that reaches the end goes on with its own proposals
            at += 1
            round.watcher.drafted(token)
        proposed.seconds = perf_counter() - begin
        round.spend("draft", begin)
        return proposed

    def keep(self, length: int) -> None:
        if length < self._read:
            self._after.clear()
            self._read = 0

    def ready(self) -> None:
        """Nothing to do."""

    def _find(self, text: list[int]) -> int | None:
        """The position after the latest earlier occurrence of the longest run that ends the text."""
        sizes = range(self.source.longest, self.source.shortest - 1, -1)
        for end in range(self._read, len(text) - 1):
            for size in sizes:
                if end + 1 >= size:
                    self._after[tuple(text[end + 1 - size : end + 1])] = end + 1
        self._read = max(self._read, len(text) - 1)
        ends = (tuple(text[-size:]) for size in sizes if len(text) > size)
        return next((self._after[run] for run in ends if run in self._after), None)
