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
from .draft_length import LengthChooser
from .drafting import Draft, ModelDraft, Ngram, Proposal, Round
from .errors import InputError
from .sampling import Race, distribution, draw, judge_greedy, judge_sampled
from .schema import Kind


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate. `temperature` 0 is greedy, `stop_tokens` end a turn, `prefill_chunk` bounds a prompt forward.

    With `adaptive`, `draft_length` is the longest, and `LengthChooser` says how many tokens are drafted. It goes by the
    clock, so two runs draft alike only by chance. Greedy text is the same all the same; sampled text is with
    `draft_invariant`, which draws by `Race`: a seed's text is one, whatever is drafted, and fewer drafts are kept.
    """

    max_new_tokens: int = 64
    draft_length: int = 4
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    prefill_chunk: int = 512
    adaptive: bool = False
    draft_invariant: bool = False


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


class Speculation:
    """One sequence: its text, and what target and draft keep of it. `generate` may be called again for the next turn.

    `draft` is a model, an `Ngram`, or None. Raises InputError where a draft is given and a cache cannot be rolled back
    (recurrent layers).
    """

    def __init__(self, target: Any, draft: Any | None, options: Options, observer: Observer | None = None) -> None:
        models: list[Any] = [model for model in (target, draft) if hasattr(model, "config")]
        # Padding rows of a vocabulary differ between models of one family; no real token is among them.
        self.vocab = min(m.config.get_text_config().vocab_size for m in models)
        self.target = open_cached(target, self.vocab)
        self._source = draft
        self.draft = self._open_draft()
        self.text: list[int] = []
        self.chooser: LengthChooser | None = None
        self._set(options, observer or Observer())
        if draft is not None:
            caches = [self.target, self.draft.cached] if isinstance(self.draft, ModelDraft) else [self.target]
            for role, cached in zip(("target", "draft"), caches, strict=False):
                if not cached.can_crop:
                    raise InputError(
                        f"--draft: the {role} ({type(cached.model).__name__}) has layers whose state cannot be rolled "
                        "back after a rejected draft; use --draft none"
                    )

    def _open_draft(self) -> Draft | None:
        if self._source is None or isinstance(self._source, Ngram):
            return None if self._source is None else self._source.open(self.vocab)
        return ModelDraft(open_cached(self._source, self.vocab))

    def _set(self, options: Options, observer: Observer) -> None:
        self.options, self.observer = options, observer
        self._rng = torch.Generator().manual_seed(options.seed)
        self._race = Race(options.seed) if options.draft_invariant else None
        if not options.adaptive:
            self.chooser = None
        elif self.chooser is None or self.chooser.longest != options.draft_length:
            self.chooser = LengthChooser(options.draft_length)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int]) -> Generation:
        """Append `prompt` to the text and generate until a stop token, `max_new_tokens`, or the observer's stop.

        The observer's `step_ends` is told the new tokens as they come, for whoever streams them.
        """
        self.text += prompt
        if not self.text:
            raise InputError("the prompt has no tokens; give at least one")
        self._check_parts()
        result = Generation()
        if self._prefill(result) and self.draft is not None:
            self.target.expect_crops()
            self.draft.ready()
        while len(result.tokens) < self.options.max_new_tokens and not result.interrupted:
            proposed = self._propose(result)
            if result.interrupted:
                if self.draft is not None:
                    self.draft.keep(len(self.text) - 1)  # nobody will judge its proposals
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
        length = min(_common(text, self.text), len(text) - 1)
        if isinstance(self.draft, ModelDraft) and not _can_keep(self.draft.cached, length):
            self.draft = self._open_draft()
        if not _can_keep(self.target, length):
            self.target = open_cached(self.target.model, self.vocab)
        if self.draft is not None:
            self.draft.keep(length)
        if self.target.length > length:
            self.target.crop(self.target.length - length)
        self.text = list(text)
        if options is not None:
            self._set(options, observer or self.observer)
        self.observer = observer or self.observer
        return self.target.length

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
        """Draft as many tokens as options, observer and chooser all agree to, and as may still be written."""
        options, room = self.options, self.options.max_new_tokens - len(result.tokens) - 1
        planned = min(options.draft_length, room) if self.draft is not None else 0
        wanted = min(self.observer.draft_length(planned), room) if planned > 0 else 0
        if self.chooser is not None and wanted > 0:
            wanted = min(wanted, self.chooser.choose())
        if self._interrupted(result) or wanted <= 0 or self.draft is None:
            return Proposal()
        return self.draft.propose(
            Round(
                self.text, wanted, options.stop_tokens, options.temperature, options.top_p, options.prefill_chunk,
                self._draw, self.observer, lambda: self._interrupted(result), result.spend,
            )
        )  # fmt: skip

    def _step(self, result: Generation, proposed: Proposal) -> None:
        """One decode or verify step of the target, and the rollback of what it refused."""
        drafts = proposed.tokens
        ids = [self.text[-1], *drafts]
        self._announce(Kind.VERIFY if drafts else Kind.DECODE, ids, len(drafts))
        begin = perf_counter()
        accepted, own = self._judge(self.target.feed(ids, keep=len(ids)), proposed)
        emitted = [*drafts[:accepted], own]
        self.text += emitted
        if self.draft is not None:
            self.target.crop(len(drafts) - accepted)
            self.draft.keep(len(self.text) - 1)
        result.spend("verify" if drafts else "decode", begin)
        if self.chooser is not None:
            self.chooser.learn(len(drafts), accepted, proposed.seconds, perf_counter() - begin)
        result.tokens += emitted
        result.judged(proposed.sure, accepted)
        result.verifies += bool(drafts)
        result.decodes += not drafts
        self.observer.step_ends(accepted, emitted)

    def _judge(self, logits: torch.Tensor, proposed: Proposal) -> tuple[int, int]:
        """How many drafts the target keeps by its `logits` [n + 1, V], and the token that follows them."""
        drafts, q = proposed.tokens, proposed.laws
        if self.options.temperature == 0:
            return judge_greedy(logits.argmax(-1).tolist(), drafts)
        p = distribution(logits, self.options.temperature, self.options.top_p)
        if self._race is not None:
            return judge_greedy([self._race.draw(row, len(self.text) + i) for i, row in enumerate(p)], drafts)
        return judge_sampled(p, torch.stack(q) if q else p[:0], drafts, self._rng)

    def _draw(self, probs: torch.Tensor, position: int) -> int:
        return draw(probs, self._rng) if self._race is None else self._race.draw(probs, position)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common from their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _can_keep(cached: Cached, length: int) -> bool:
    """Whether all but the first `length` tokens can be forgotten."""
    return cached.can_forget(max(0, cached.length - length))
