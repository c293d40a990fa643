"""The draft/verify loop, once for everybody: the recorder watches it, the executor runs it.

A draft model proposes K tokens, the target checks them in one forward of K+1 rows, keeps the longest prefix it agrees
with and adds one token of its own (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023,
arXiv 2302.01318). Batch 1. Between rounds the target's cache holds all of the text but its last token, which is the
first row of the next step; so prefill covers the prompt but its last token and settles no output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch

from .cached import Cached, open_cached, reads_in_parts
from .errors import InputError
from .schema import Kind


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate. `temperature` 0 is greedy, `stop_tokens` end a turn, `prefill_chunk` bounds a prompt forward."""

    max_new_tokens: int = 64
    draft_length: int = 4
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    prefill_chunk: int = 512


class Observer:
    """Told what the loop does and asked how to go on. Everything has a default that changes nothing."""

    def draft_length(self, planned: int) -> int:
        """How many tokens to draft for the next step; 0 makes it a decode step. `planned` is what fits."""
        return planned

    def draft_begins(self, kind: Kind, tokens: Sequence[int], position: int) -> None:
        """A forward pass of the draft begins over `tokens`, the first of them at `position` of the text.

        PREFILL brings it up to the text, DECODE proposes one more token.
        """

    def drafted(self, token: int) -> None:
        """The draft proposed one more token; the step that will verify it has not begun."""

    def step_begins(self, kind: Kind, tokens: np.ndarray, positions: np.ndarray, drafted: np.ndarray) -> None:
        """A forward pass of the target begins over these rows: tokens, positions [n] int32, drafted [n] bool."""

    def step_ends(self, accepted: int, emitted: Sequence[int]) -> None:
        """It ended: `accepted` drafts stay, `emitted` are the new tokens of the text (none in prefill)."""

    def stop(self) -> bool:
        """Asked before every forward pass, of the draft too: True ends the generation as interrupted."""
        return False


@dataclass(slots=True)
class Generation:
    """What one turn produced. `seconds` is the wall time by phase: prefill, draft_prefill, draft, decode, verify.

    `drafted_at` and `accepted_at` count by position in the window, from its first draft; `sure_kept` and `sure_refused`
    are sums of the draft's own probability of a token that it proposed, over those kept and those not.
    """

    tokens: list[int] = field(default_factory=list)
    decodes: int = 0
    verifies: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    sure_kept: float = 0.0
    sure_refused: float = 0.0
    interrupted: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that the target kept."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_verify(self) -> float | None:
        """Output tokens of a verify step, its own token included: 1..K+1."""
        return 1 + self.accepted / self.verifies if self.verifies else None

    def judged(self, sure: Sequence[float], accepted: int) -> None:
        """Count one step's drafts: the draft's probability of each, and how many the target kept."""
        self.drafted += len(sure)
        self.accepted += accepted
        self.drafted_at += [0] * (len(sure) - len(self.drafted_at))
        self.accepted_at += [0] * (len(sure) - len(self.accepted_at))
        for position in range(len(sure)):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted
        self.sure_kept += sum(sure[:accepted])
        self.sure_refused += sum(sure[accepted:])

    def spend(self, phase: str, since: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - since


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


@dataclass(slots=True)
class Proposal:
    """Drafted tokens, the draft's probability of each, and in sampled mode the laws [V] they were drawn from."""

    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    laws: list[torch.Tensor] = field(default_factory=list)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common from their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Speculation:
    """One sequence: its text, and both models' caches. `generate` may be called again for the next turn.

    Raises InputError where a draft is given and one of the two caches cannot be rolled back (recurrent layers).
    """

    def __init__(self, target: Any, draft: Any | None, options: Options, observer: Observer | None = None) -> None:
        models = [target] if draft is None else [target, draft]
        # Padding rows of a vocabulary differ between models of one family; no real token is among them.
        vocab = min(m.config.get_text_config().vocab_size for m in models)
        self.target = open_cached(target, vocab)
        self.draft = None if draft is None else open_cached(draft, vocab)
        self.options = options
        self.observer = observer or Observer()
        self.text: list[int] = []
        self._rng = torch.Generator().manual_seed(options.seed)
        if self.draft is not None:
            for role, model in (("target", self.target), ("draft", self.draft)):
                if not model.can_crop:
                    raise InputError(
                        f"--draft: the {role} ({type(model.model).__name__}) has layers whose state cannot be rolled "
                        "back after a rejected draft; use --draft none"
                    )

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int]) -> Generation:
        """Append `prompt` to the text and generate until a stop token, `max_new_tokens`, or the observer's stop."""
        self.text += prompt
        if not self.text:
            raise InputError("the prompt has no tokens; give at least one")
        self._check_parts()
        result = Generation()
        if self._prefill(result) and self.draft is not None:
            self.target.expect_crops()
            self.draft.expect_crops()
        while len(result.tokens) < self.options.max_new_tokens and not result.interrupted:
            proposed = self._propose(result)
            if result.interrupted:
                if self.draft is not None:  # it has read its own proposals, which nobody will judge
                    self.draft.crop(max(0, self.draft.length - (len(self.text) - 1)))
                break
            self._step(result, proposed)
            if result.tokens[-1] in self.options.stop_tokens:
                break
        return result

    def continue_from(
        self, text: Sequence[int], options: Options | None = None, observer: Observer | None = None
    ) -> int:
        """Take `text` as the text, which `generate(())` then continues. Returns how many tokens are not read again.

        A client that sends a whole conversation pays for what is new in it: both caches keep the longest beginning that
        they have in common with `text`, less its last token, which is the next step's first row. A cache that cannot be
        cut back so far begins anew. `options` (their seed too) and `observer` replace those of before, if given. `text`
        becomes a list of its own; that of before stays as it is. Raises InputError for an empty text.
        """
        if not text:
            raise InputError("the prompt has no tokens; give at least one")
        common = _common(text, self.text)
        if self.draft is not None:
            self.draft = self._cut(self.draft, min(common, len(text) - 1))
        self.target = self._cut(self.target, min(common, len(text) - 1))
        self.text = list(text)
        if options is not None:
            self.options = options
            self._rng = torch.Generator().manual_seed(options.seed)
        self.observer = observer or self.observer
        return self.target.length

    def _cut(self, cached: Cached, length: int) -> Cached:
        """The cache with at most `length` tokens, or an empty one."""
        surplus = max(0, cached.length - length)
        if not cached.can_forget(surplus):
            return open_cached(cached.model, cached.vocab)
        if surplus:
            cached.crop(surplus)
        return cached

    def _check_parts(self) -> None:
        """Raise InputError where the text has to be read in parts and a recurrent target would lose its state."""
        begin, end = self.target.length, len(self.text) - 1
        at_once = end - begin <= (self.options.prefill_chunk if begin == 0 else 1)
        if not at_once and not self.target.can_crop and not reads_in_parts(self.target.model):
            raise InputError(
                f"the target ({type(self.target.model).__name__}) loses its state where transformers reads a text in "
                f"parts; give prompts of one turn and a --prefill-chunk of at least {end}"
            )

    def _interrupted(self, result: Generation) -> bool:
        result.interrupted = result.interrupted or self.observer.stop()
        return result.interrupted

    def _prefill(self, result: Generation) -> bool:
        """Feed the target all of the text but its last token, in chunks; False if interrupted."""
        begin = perf_counter()
        while self.target.length < len(self.text) - 1:
            if self._interrupted(result):
                break
            first = self.target.length
            ids = self.text[first : min(first + self.options.prefill_chunk, len(self.text) - 1)]
            self._announce(Kind.PREFILL, ids, 0)
            self.target.feed(ids, keep=1)
            self.observer.step_ends(0, ())
        result.spend("prefill", begin)
        return not result.interrupted

    def _announce(self, kind: Kind, ids: Sequence[int], drafts: int) -> None:
        positions = np.arange(self.target.length, self.target.length + len(ids), dtype=np.int32)
        drafted = np.arange(len(ids)) >= len(ids) - drafts
        self.observer.step_begins(kind, np.array(ids, dtype=np.int32), positions, drafted)

    def _propose(self, result: Generation) -> Proposal:
        """Draft up to K tokens.

        A stop token is not proposed, for nothing after it could be kept: drafting ends there, and the distribution
        leaves it out.
        """
        room = self.options.max_new_tokens - len(result.tokens) - 1
        planned = min(self.options.draft_length, room) if self.draft is not None else 0
        wanted = min(self.observer.draft_length(planned), room) if planned > 0 else 0
        proposed = Proposal()
        if self._interrupted(result) or wanted <= 0 or self.draft is None:
            return proposed
        self._catch_up(result, self.draft)
        begin = perf_counter()
        ids = self.text[self.draft.length :]
        while len(proposed.tokens) < wanted and not self._interrupted(result):
            self.observer.draft_begins(Kind.DECODE, ids, self.draft.length)
            token, sure, probs = self._pick(self.draft.feed(ids, keep=1)[0])
            if token in self.options.stop_tokens:
                break
            if probs is not None:
                probs[list(self.options.stop_tokens)] = 0.0
                proposed.laws.append(probs / probs.sum())
            proposed.tokens.append(token)
            proposed.sure.append(sure)
            ids = [token]
            self.observer.drafted(token)
        result.spend("draft", begin)
        return proposed

    def _catch_up(self, result: Generation, draft: Cached) -> None:
        """Bring the draft's cache up to the text's last token after a prefill or after steps without drafting.

        A lag of two tokens is the ordinary one, after a step that kept every draft; it costs no forward of its own.
        """
        begin = perf_counter()
        lags = len(self.text) - draft.length > 2
        while lags and draft.length < len(self.text) - 1 and not self._interrupted(result):
            last = min(draft.length + self.options.prefill_chunk, len(self.text) - 1)
            self.observer.draft_begins(Kind.PREFILL, self.text[draft.length : last], draft.length)
            draft.feed(self.text[draft.length : last], keep=1)
        if lags:
            result.spend("draft_prefill", begin)

    def _pick(self, logits: torch.Tensor) -> tuple[int, float, torch.Tensor | None]:
        """A token, the probability it was given, and in sampled mode the distribution [V] it was drawn from."""
        if self.options.temperature == 0:
            best, token = logits.max(-1)
            return int(token), float((best - logits.logsumexp(-1)).exp()), None
        probs = distribution(logits, self.options.temperature, self.options.top_p)
        token = draw(probs, self._rng)
        return token, float(probs[token]), probs

    def _step(self, result: Generation, proposed: Proposal) -> None:
        """One decode or verify step of the target, and the rollback of what it refused."""
        drafts, q = proposed.tokens, proposed.laws
        ids = [self.text[-1], *drafts]
        self._announce(Kind.VERIFY if drafts else Kind.DECODE, ids, len(drafts))
        begin = perf_counter()
        logits = self.target.feed(ids, keep=len(ids))
        if self.options.temperature == 0:
            accepted, own = judge_greedy(logits.argmax(-1).tolist(), drafts)
        else:
            p = distribution(logits, self.options.temperature, self.options.top_p)
            accepted, own = judge_sampled(p, torch.stack(q) if q else p[:0], drafts, self._rng)
        emitted = [*drafts[:accepted], own]
        self.text += emitted
        if self.draft is not None:
            self.target.crop(len(drafts) - accepted)
            self.draft.crop(max(0, self.draft.length - (len(self.text) - 1)))
        result.spend("verify" if drafts else "decode", begin)
        result.tokens += emitted
        result.judged(proposed.sure, accepted)
        result.verifies += bool(drafts)
        result.decodes += not drafts
        self.observer.step_ends(accepted, emitted)
