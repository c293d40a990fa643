"""Records what a target's routers decide while the draft/verify loop runs.

Hooks sit on the modules that hold a layer's routed experts and take the choice that is handed to them, so the record
does not depend on how experts are computed. Nothing is read from the draft.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from .errors import InputError
from .models import Pair, moe_blocks
from .prompts import Prompt, encode
from .schema import Header, Kind, ModelShape, Provenance, Step, id_dtype
from .speculate import Generation, Observer, Options, Speculation
from .writer import TraceWriter

FLUSH_SECONDS = 5.0


@dataclass(slots=True)
class Layer:
    """What one MoE layer chose in the pass under way: ids, weights [n, k]; logits [n, E]; ahead [n, J, k]."""

    ids: torch.Tensor
    weights: torch.Tensor
    ahead: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class RouterRecorder(Observer):
    """Makes a Step of every pass of the target and hands it to `write`.

    Use within `with recorder.watching():`; set `sequence` and `turn` before each generation. `scores` keeps the
    router's logits, `lookahead` J the choices of the gates of the next J layers on this layer's gate input.
    """

    def __init__(
        self, model: Any, shape: ModelShape, write: Callable[[Step], None], scores: bool = False, lookahead: int = 0
    ) -> None:
        self.blocks = moe_blocks(model)
        self.shape = shape
        self.write = write
        self.scores = scores
        self.lookahead = lookahead
        self.sequence = 0
        self.turn = 0
        self._logits: torch.Tensor | None = None
        self._layers: dict[int, Layer] = {}
        self._pass: tuple[Kind, np.ndarray, np.ndarray, np.ndarray] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks are on the model inside this context, and gone after it."""
        hooks = []
        for order, block in enumerate(self.blocks):
            hook = self._choice_hook(order)
            hooks.append(block.experts.register_forward_pre_hook(hook, with_kwargs=True))
            if self.scores:
                hooks.append(block.gate.register_forward_hook(self._keep_logits))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def step_begins(self, kind: Kind, tokens: np.ndarray, positions: np.ndarray, drafted: np.ndarray) -> None:
        self._layers.clear()
        self._pass = (kind, tokens, positions, drafted)

    def step_ends(self, accepted: int, emitted: Sequence[int]) -> None:
        assert self._pass is not None
        kind, tokens, positions, drafted = self._pass
        layers = [self._layers[order] for order in range(len(self.blocks))]
        ids = torch.stack([layer.ids for layer in layers], 1)
        ahead = [layer.ahead for layer in layers if layer.ahead is not None]
        small = id_dtype(self.shape.experts)
        self.write(
            Step(
                sequence=self.sequence,
                turn=self.turn,
                kind=kind,
                positions=positions,
                tokens=tokens,
                drafted=drafted,
                accepted=accepted,
                experts=ids.cpu().numpy().astype(small),
                weights=torch.stack([layer.weights for layer in layers], 1).half().cpu().numpy(),
                scores=_half_scores([layer.logits for layer in layers if layer.logits is not None], ids),
                ahead=torch.stack(ahead, 1).cpu().numpy().astype(small) if ahead else None,
            )
        )
        self._pass = None

    def _choice_hook(self, order: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, ids, weights = (*args, *kwargs.values())[:3]
            layer = Layer(ids.detach(), weights.detach(), logits=self._logits)
            if self.lookahead:
                last = len(self.blocks) - 1
                gates = [self.blocks[min(order + j, last)].gate for j in range(1, self.lookahead + 1)]
                layer.ahead = torch.stack([gate_choice(gate, hidden) for gate in gates], 1)
            self._layers[order] = layer

        return hook

    def _keep_logits(self, gate: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        self._logits = logits.detach().reshape(-1, logits.shape[-1])


def gate_choice(gate: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Expert ids [n, k] that a gate would choose on hidden states [n, hidden], past any hook on it.

    Raises InputError for a gate that does not say its choice itself.
    """
    output = gate.forward(hidden)
    choices = [t for t in output if not t.is_floating_point()] if isinstance(output, tuple) else []
    if len(choices) != 1:
        raise InputError(f"--lookahead: {type(gate).__name__} returns no expert choice; record without --lookahead")
    return choices[0]


def _half_scores(logits: Sequence[torch.Tensor], ids: torch.Tensor) -> np.ndarray | None:
    """Router logits [n, L, E] in float16 whose top-k is still the router's choice.

    Rounding can tie or swap the last chosen expert with the first one left out. Where the exact logits rank them right,
    a chosen score at or below the best of the others is lifted to the next float16 above it.
    """
    if not logits:
        return None
    exact = torch.stack(list(logits), 1).float()
    chosen = torch.zeros_like(exact, dtype=torch.bool).scatter_(-1, ids, True)
    ranked = exact.masked_fill(~chosen, torch.inf).amin(-1) >= exact.masked_fill(chosen, -torch.inf).amax(-1)
    rounded = exact.half()
    best_other = rounded.masked_fill(chosen, -torch.inf).amax(-1, keepdim=True)
    above = torch.from_numpy(np.nextafter(best_other.cpu().numpy(), np.float16(np.inf)))
    low = chosen.cpu() & (rounded <= best_other).cpu() & ranked.cpu()[..., None]
    return torch.where(low, above, rounded.cpu()).numpy()


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
    def tokens_per_verify(self) -> float | None:
        return 1 + self.total("accepted") / self.total("verifies") if self.total("verifies") else None


class Session(RouterRecorder):
    """A RouterRecorder that can be stopped and tells how far it is."""

    def __init__(self, stop: Callable[[], bool], progress: Callable[[int], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stop = stop
        self._progress = progress

    def stop(self) -> bool:
        return self._stop()

    def step_ends(self, accepted: int, emitted: Sequence[int]) -> None:
        super().step_ends(accepted, emitted)
        self._progress(len(emitted))


def record(
    pair: Pair,
    prompts: Sequence[Prompt],
    out: str | Path,
    options: Options,
    *,
    source: str = "",
    scores: bool = False,
    lookahead: int = 0,
    compare: bool = False,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Summary:
    """Run every prompt, one after another, and write the trace `out` as it goes.

    Sequence i samples with seed `options.seed + i`. `compare` runs plain greedy decoding as well and reports where it
    differs. `stop` is asked before every forward pass; `progress` is told of new tokens. Raises InputError: a prompt
    too long for the model, a file that cannot be written, a pair that cannot speculate.
    """
    turns = [encode(pair.tokenizer, prompt) for prompt in prompts]
    _check_lengths(pair, prompts, turns, options)
    header = make_header(pair, prompts, turns, options, source, scores, lookahead)
    summary = Summary(compared=compare)
    begin = monotonic()
    with TraceWriter(out, header) as writer:
        session = Session(stop, progress, pair.target, pair.shape, _saving(writer), scores, lookahead)
        for index, (prompt, ids) in enumerate(zip(prompts, turns, strict=True)):
            session.sequence = index
            own = replace(options, seed=options.seed + index)
            _run(pair, prompt, ids, own, session, summary)
            writer.flush()
            if summary.interrupted:
                break
        summary.rows = writer.tokens
        writer.close(interrupted=summary.interrupted)
    summary.seconds = monotonic() - begin
    return summary


def _run(
    pair: Pair, prompt: Prompt, turns: list[list[int]], options: Options, session: Session, summary: Summary
) -> None:
    """One sequence, all its turns, into `summary`."""
    speculation = Speculation(pair.target, pair.draft, options, session)
    summary.texts.append(speculation.text)
    summary.prompts += 1
    for turn, ids in enumerate(turns):
        session.turn = turn
        with session.watching():
            result = speculation.generate(ids)
        summary.generations.append(result)
        summary.prompt_tokens += len(ids)
        summary.interrupted = result.interrupted
        if result.interrupted:
            return
    if summary.compared:
        found = find_difference(pair, prompt.name, turns, options, speculation.text)
        summary.differences += [found] if found else []


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


def make_header(
    pair: Pair,
    prompts: Sequence[Prompt],
    turns: Sequence[list[list[int]]],
    options: Options,
    source: str,
    scores: bool,
    lookahead: int,
) -> Header:
    """All that a trace says about itself; nothing in it depends on the time or the machine's name."""
    tools = {name: version(name) for name in ("moe-spac", "torch", "transformers")}
    sampling = asdict(options) | {"stop_tokens": list(options.stop_tokens), "device": str(pair.target.device)}
    del sampling["draft_length"]
    return Header(
        target=pair.shape,
        draft=pair.draft_shape,
        provenance=Provenance.RECORDED,
        source=source,
        draft_length=options.draft_length if pair.draft is not None else 0,
        acceptance="measured" if pair.draft is not None else "none",
        sampling=sampling,
        weights=True,
        scores="logit" if scores else None,
        lookahead=lookahead,
        sequences=tuple(
            {"name": prompt.name, "domain": prompt.domain, "prompt_tokens": sum(map(len, ids))}
            for prompt, ids in zip(prompts, turns, strict=True)
        ),
        tools=tools | {"python": platform.python_version()},
    )


def _check_lengths(pair: Pair, prompts: Sequence[Prompt], turns: Sequence[list[list[int]]], options: Options) -> None:
    models = [m for m in (pair.target, pair.draft) if m is not None]
    limit = min(m.config.get_text_config().max_position_embeddings for m in models)
    for prompt, ids in zip(prompts, turns, strict=True):
        needed = sum(len(turn) + options.max_new_tokens for turn in ids)
        if needed > limit:
            raise InputError(
                f"prompt {prompt.name}: {needed} tokens with --max-new-tokens, but the model holds {limit}; shorten it "
                "or generate fewer"
            )
        if not ids[0]:
            raise InputError(f"prompt {prompt.name}: it has no tokens; give at least one")


def _saving(writer: TraceWriter) -> Callable[[Step], None]:
    """Append to the file; a slow model's steps do not wait long for their batch to fill."""
    last = monotonic()

    def save(step: Step) -> None:
        nonlocal last
        writer.append(step)
        if monotonic() - last > FLUSH_SECONDS:
            writer.flush()
            last = monotonic()

    return save
