"""Records what a target's routers decide while the draft/verify loop runs.

Hooks sit on the modules that hold a layer's routed experts and take the choice that the router hands to them, so the
record does not depend on how experts are computed. A draft with experts of its own is recorded into a file of its own.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
import torch

from .errors import InputError
from .models import Pair, model_shape, moe_blocks
from .outcome import Summary, find_difference
from .prompts import Prompt, encode
from .routers import Asked, Routers, asking, gate_choice, half_scores, read_routers
from .schema import Header, Kind, ModelShape, Provenance, Step, id_dtype
from .speculate import Observer, Options, Speculation
from .writer import TraceWriter

FLUSH_SECONDS = 5.0
DRAFT_NOTE = (
    "Routing of the draft, not of the target. A step is one drafting round and stands beside the target's verify step "
    "of the same positions; its rows were passes one after another, and the last proposal of a round has none."
)


@dataclass(slots=True)
class Layer:
    """What one MoE layer chose in one pass: ids, weights [n, k]; ranked [n, E]; ahead [n, J, k]."""

    ids: torch.Tensor
    weights: torch.Tensor
    ranked: torch.Tensor | None = None
    ahead: torch.Tensor | None = None


class RouterRecorder(Observer):
    """Makes a Step of every pass of the target and hands it to `write`.

    Use within `with recorder.watching():`; set `sequence` and `turn` before each generation. `scores` keeps the values
    by which routers rank their experts (`routers.scores` names them), `lookahead` J the choices of the gates of the
    next J layers on this layer's gate input. Raises InputError where a family's gates do not allow one of them.
    """

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        write: Callable[[Step], None],
        scores: bool = False,
        lookahead: int = 0,
        routers: Routers | None = None,
    ) -> None:
        self.blocks = moe_blocks(model)
        self.shape = shape
        self.write = write
        self.scores = scores
        self.lookahead = lookahead
        self.routers = routers or read_routers(model, self.blocks, shape.experts, scores, lookahead > 0)
        self.sequence = 0
        self.turn = 0
        self._asked: dict[int, Asked] = {}
        self._layers: dict[int, Layer] = {}
        self._pass: tuple[Kind, np.ndarray, np.ndarray, np.ndarray] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks are on the model inside this context, and gone after it."""
        with ExitStack() as stack:
            for order, block in enumerate(self.blocks):
                stack.callback(block.experts.register_forward_pre_hook(self._choice_hook(order)).remove)
            if self.scores or self.lookahead:
                stack.enter_context(asking(self.blocks, self._asked, self.shape.experts, self.scores))
            yield

    def step_begins(self, kind: Kind, tokens: np.ndarray, positions: np.ndarray, drafted: np.ndarray) -> None:
        self._layers = {}
        self._pass = (kind, tokens, positions, drafted)

    def step_ends(self, accepted: int, emitted: Sequence[int]) -> None:
        assert self._pass is not None
        kind, tokens, positions, drafted = self._pass
        self._pass = None
        self._save(kind, tokens, positions, drafted, accepted, [self._layers])

    def _save(
        self,
        kind: Kind,
        tokens: np.ndarray,
        positions: np.ndarray,
        drafted: np.ndarray,
        accepted: int,
        passes: Sequence[dict[int, Layer]],
    ) -> None:
        """Write one step; its rows are those of all `passes`, one after another."""
        ids = self._rows(passes, "ids")
        assert ids is not None
        ranked, ahead, weights = (self._rows(passes, name) for name in ("ranked", "ahead", "weights"))
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
                weights=None if weights is None else weights.half().cpu().numpy(),
                scores=None if ranked is None else half_scores(ranked, ids),
                ahead=None if ahead is None else ahead.cpu().numpy().astype(small),
            )
        )

    def _rows(self, passes: Sequence[dict[int, Layer]], name: str) -> torch.Tensor | None:
        """[n, L, ...]: one field of all layers, so that a step costs one copy from the device and not one a layer."""
        layers = range(len(self.blocks))
        columns = [[getattr(one[order], name) for order in layers] for one in passes]
        if columns[0][0] is None:
            return None
        parts = [torch.stack(column, 1) for column in columns]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _choice_hook(self, order: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            _, ids, weights = args
            layer = self._layers[order] = Layer(ids, weights)
            if self.scores or self.lookahead:
                asked = self._asked.pop(order)  # it holds hidden states, which are large in prefill
                layer.ranked = self.routers.ranking(asked) if self.scores else None
                layer.ahead = self._ahead(order, asked.args[0]) if self.lookahead else None

        return hook

    def _ahead(self, order: int, hidden: torch.Tensor) -> torch.Tensor:
        """[n, J, k]: what the gates of the next layers say of this layer's gate input; the last one repeats."""
        last = len(self.blocks) - 1
        choices: dict[int, torch.Tensor] = {}
        for later in (min(order + j, last) for j in range(1, self.lookahead + 1)):
            if later not in choices:
                args, kwargs = self.routers.extras[later]
                choices[later] = gate_choice(self.blocks[later].gate, hidden, *args, **kwargs)
        return torch.stack([choices[min(order + j, last)] for j in range(1, self.lookahead + 1)], 1)


class DraftRecorder(RouterRecorder):
    """Makes Steps of a draft that is a mixture of experts itself: a stream of its own, never a part of the target's.

    One drafting round is one step, so that it stands beside the verify step it was made for: same sequence, turn and
    positions. Its rows are the text that the draft had not read yet (one token, or two after a step that kept every
    draft) and the tokens that it proposed and read again; each was a pass of its own. The last proposal is not read, so
    it has no row. Kept rows are those of the text, each position once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._passes: list[tuple[Kind, list[int], int, dict[int, Layer]]] = []

    def draft_begins(self, kind: Kind, tokens: Sequence[int], position: int) -> None:
        self._write_prefill()
        self._layers = {}
        self._passes.append((kind, list(tokens), position, self._layers))

    def step_begins(self, kind: Kind, tokens: np.ndarray, positions: np.ndarray, drafted: np.ndarray) -> None:
        self._layers = {}  # the target may be the same model

    def step_ends(self, accepted: int, emitted: Sequence[int]) -> None:
        self._write_prefill()
        drafting, self._passes = self._passes, []
        if drafting:
            ids = [token for _, tokens, _, _ in drafting for token in tokens]
            drafts = len(drafting) - 1
            kind = Kind.VERIFY if len(ids) > 1 else Kind.DECODE
            self._write_rows(kind, ids, drafting[0][2], drafts, min(accepted, drafts), [p[3] for p in drafting])

    def _write_prefill(self) -> None:
        """Write the last pass at once where it only read text, so that a long prompt does not pile up."""
        if self._passes and self._passes[-1][0] is Kind.PREFILL:
            kind, ids, position, layers = self._passes.pop()
            self._write_rows(kind, ids, position, 0, 0, [layers])

    def _write_rows(
        self, kind: Kind, ids: list[int], first: int, drafts: int, accepted: int, passes: list[dict[int, Layer]]
    ) -> None:
        positions = np.arange(first, first + len(ids), dtype=np.int32)
        drafted = np.arange(len(ids)) >= len(ids) - drafts
        self._save(kind, np.array(ids, dtype=np.int32), positions, drafted, accepted, passes)


class Session(Observer):
    """The loop's observer: tells the target's recorder and the draft's, can be stopped, and tells how far it is."""

    def __init__(
        self, recorders: Sequence[RouterRecorder], stop: Callable[[], bool], progress: Callable[[int, int], None]
    ) -> None:
        self.recorders = recorders
        self._stop = stop
        self._progress = progress
        self._read = 0

    @contextmanager
    def watching(self, sequence: int, turn: int) -> Iterator[None]:
        with ExitStack() as stack:
            for recorder in self.recorders:
                recorder.sequence, recorder.turn = sequence, turn
                stack.enter_context(recorder.watching())
            yield

    def stop(self) -> bool:
        return self._stop()

    def draft_begins(self, kind: Kind, tokens: Sequence[int], position: int) -> None:
        for recorder in self.recorders:
            recorder.draft_begins(kind, tokens, position)

    def step_begins(self, kind: Kind, tokens: np.ndarray, positions: np.ndarray, drafted: np.ndarray) -> None:
        self._read = len(tokens) if kind is Kind.PREFILL else 0
        for recorder in self.recorders:
            recorder.step_begins(kind, tokens, positions, drafted)

    def step_ends(self, accepted: int, emitted: Sequence[int]) -> None:
        for recorder in self.recorders:
            recorder.step_ends(accepted, emitted)
        self._progress(self._read, len(emitted))


def record(
    pair: Pair,
    prompts: Sequence[Prompt],
    out: str | Path,
    options: Options,
    *,
    source: str = "",
    scores: bool = False,
    lookahead: int = 0,
    draft_out: str | Path | None = None,
    compare: bool = False,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda read, written: None,
) -> Summary:
    """Run every prompt, one after another, and write the trace `out` as it goes.

    Sequence i samples with seed `options.seed + i`. `draft_out` takes the routing of a draft with experts, see
    `DraftRecorder`. `compare` runs plain greedy decoding as well and reports where it differs. `stop` is asked before
    every forward pass; `progress` is told after each step how many prompt
    tokens it read and how many new ones it gave. Raises InputError: a prompt too long for the model, a file
    that cannot be written, a pair that cannot speculate, gates that do not give `scores` or `lookahead`.
    """
    turns = [encode(pair.tokenizer, prompt) for prompt in prompts]
    _check_lengths(pair, prompts, turns, options)
    header = make_header(pair, prompts, turns, options, source, False, lookahead)
    summary = Summary(compared=compare)
    begin = monotonic()
    with ExitStack() as stack:
        streams = _open(pair, out, draft_out, header, scores, stack)
        session = Session([recorder for recorder, _ in streams], stop, progress)
        for index, (prompt, ids) in enumerate(zip(prompts, turns, strict=True)):
            own = replace(options, seed=options.seed + index)
            _run(pair, prompt, ids, index, own, session, summary)
            for _, writer in streams:
                writer.flush()
            if summary.interrupted:
                break
        summary.rows = streams[0][1].tokens
        for _, writer in streams:
            writer.close(interrupted=summary.interrupted)
    summary.seconds = monotonic() - begin
    return summary


def _open(
    pair: Pair, out: str | Path, draft_out: str | Path | None, header: Header, scores: bool, stack: ExitStack
) -> list[tuple[RouterRecorder, TraceWriter]]:
    """The target's stream and the draft's if it has one. No file is touched before all gates are found readable."""
    wanted: list[tuple[type[RouterRecorder], Any, Header, str | Path]] = [(RouterRecorder, pair.target, header, out)]
    if draft_out is not None:
        about = replace(header, target=_draft_shape(pair), draft=None, notes=DRAFT_NOTE)
        wanted.append((DraftRecorder, pair.draft, about, draft_out))
    ahead = header.lookahead
    routers = [read_routers(m, moe_blocks(m), h.target.experts, scores, ahead > 0) for _, m, h, _ in wanted]
    streams = []
    for (kind, model, about, path), read in zip(wanted, routers, strict=True):
        writer = stack.enter_context(TraceWriter(path, replace(about, scores=read.scores)))
        streams.append((kind(model, about.target, _saving(writer), scores, ahead, read), writer))
    return streams


def _draft_shape(pair: Pair) -> ModelShape:
    if not isinstance(pair.draft, torch.nn.Module) or pair.draft_shape is None or not moe_blocks(pair.draft):
        name = "none" if pair.draft_shape is None else pair.draft_shape.name
        raise InputError(f"--draft-out: the draft ({name}) has no routed experts; leave it out")
    draft: Any = pair.draft
    return model_shape(draft.config, pair.draft_shape.name, str(draft.dtype).removeprefix("torch."))


def _run(
    pair: Pair,
    prompt: Prompt,
    turns: list[list[int]],
    sequence: int,
    options: Options,
    session: Session,
    summary: Summary,
) -> None:
    """One sequence, all its turns, into `summary`."""
    speculation = Speculation(pair.target, pair.draft, options, session)
    summary.texts.append(speculation.text)
    summary.prompts += 1
    for turn, ids in enumerate(turns):
        with session.watching(sequence, turn):
            result = speculation.generate(ids)
        summary.generations.append(result)
        summary.prompt_tokens += len(ids)
        summary.interrupted = result.interrupted
        if result.interrupted:
            return
    if summary.compared:
        found = find_difference(pair, prompt.name, turns, options, speculation.text)
        summary.differences += [found] if found else []


def make_header(
    pair: Pair,
    prompts: Sequence[Prompt],
    turns: Sequence[list[list[int]]],
    options: Options,
    source: str,
    scores: str | Literal[False],
    lookahead: int,
) -> Header:
    """All that a trace says about itself; nothing in it depends on the time or the machine's name.

    `scores` names the router quantity that is stored (see `routers.Routers`), if there is one.
    """
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
        scores=scores or None,
        lookahead=lookahead,
        sequences=tuple(
            {"name": prompt.name, "domain": prompt.domain, "prompt_tokens": sum(map(len, ids))}
            for prompt, ids in zip(prompts, turns, strict=True)
        ),
        tools=tools | {"python": platform.python_version()},
    )


def _check_lengths(pair: Pair, prompts: Sequence[Prompt], turns: Sequence[list[list[int]]], options: Options) -> None:
    limit = min(m.config.get_text_config().max_position_embeddings for m in pair.models)
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
