"""Synthetic traces: routing as a named model's published statistics say it is, made up token by token.

A model `X` is two files in `synthetic/`: X.toml holds its shape and what is published of its routing, X.json the
parameters that `python -m moe_spac.traces.synth_fit X` fitted to that. The process is in `synth_process`.
Such a trace is always labelled synthetic: header, notes and every picture say so.
"""

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError
from .schema import DraftShape, Header, Kind, ModelShape, Provenance, Step
from .synth_process import BLOCK, Chain, Process, stream
from .views import Steps, View

FOLDER = Path(__file__).parent / "synthetic"
PREFILL_CHUNK = 512
TOKENS_A_SEQUENCE = 512
SOURCE = "a random process of moe-spac; no model was run"
PARTS = ("popularity", "domain", "sequence", "drift", "memory", "ceiling")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one synthetic trace. tokens: generated in all, shared out evenly; prefill: prompt tokens of each sequence;
    acceptance: chance of each drafted token, by its place in the window (the last holds for all places after it).
    """

    tokens: int
    seed: int
    sequences: int
    prefill: int
    draft_length: int
    acceptance: tuple[float, ...]

    def of_sequence(self, sequence: int) -> int:
        """Tokens that the sequence generates."""
        each, more = divmod(self.tokens, self.sequences)
        return each + (sequence < more)


def models() -> list[str]:
    """Names that `synthesize` knows."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))


def synthesize(
    like: str,
    tokens: int,
    seed: int = 0,
    draft_length: int = 0,
    acceptance: float | Sequence[float] | None = None,
    *,
    sequences: int | None = None,
    domains: Sequence[str] | None = None,
    prefill: int = 0,
    dtype: str | None = None,
    draft: str | None = None,
) -> Steps:
    """A trace of `tokens` generated tokens that routes like the model named (see `models`), generated while it is
    read: memory does not grow with its length, and the same arguments give the same steps each time.

    sequences: how many (default: one for each 512 tokens); their domains take turns through `domains` (default: all
    that the model's statistics tell apart). prefill: prompt tokens before each, routed by the same process. dtype and
    draft choose byte sizes that the model's file lists (default: its first). Tokens are not known (id -1).

    With a draft, windows are a decoded token and up to `draft_length` drafted ones; each is accepted with probability
    `acceptance` (one for each place, or one for all), up to the first that is not. Kept rows are those that the same
    seed gives without a draft. Rejected rows route like another text that goes on from the last token kept: the same
    popularity, domain, sequence and drift up to there, and independent chances from there on.

    Raises InputError for a name, a domain, a dtype, a draft or a number that does not fit.
    """
    about = load(like)
    settings = _settings(tokens, seed, sequences, prefill, draft_length, acceptance)
    known = about["domains"]
    chosen = list(domains or known)
    if strange := [d for d in chosen if d not in known]:
        raise InputError(f"--domains {strange[0]}: {like} has {', '.join(known)}")
    places = [known.index(chosen[i % len(chosen)]) for i in range(settings.sequences)]
    names = tuple(
        {"name": f"{known[place]}/{i}", "domain": known[place], "prompt_tokens": prefill}
        for i, place in enumerate(places)
    )
    header = Header(
        target=model_shape(like, dtype),
        provenance=Provenance.SYNTHETIC,
        source=SOURCE,
        draft=_draft_shape(like, draft) if draft_length else None,
        draft_length=draft_length,
        acceptance=_acceptance_note(settings),
        sampling={"temperature": None, "seed": seed},
        sequences=names,
        tools={"moe-spac": version("moe-spac")},
        notes=f"Synthetic: parameters of synthetic/{like}.json ({about['basis']}), seed {seed}; token ids are unknown.",
    )
    process = process_of(about)

    def steps() -> Iterator[Step]:
        for sequence, place in enumerate(places):
            yield from _sequence(Chain(process, place, seed, sequence), sequence, settings)

    return View(header, steps)


@cache
def published(like: str) -> dict[str, Any]:
    """The model's shape and published statistics: the content of its .toml. InputError for a name not known."""
    path = FOLDER / f"{like}.toml"
    if not path.is_file():
        raise InputError(f"--like {like}: not a known model; choose one of {', '.join(models())}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def load(like: str) -> dict[str, Any]:
    """The model's fitted parameters: the content of its .json. InputError for a name not known."""
    path = FOLDER / f"{like}.json"
    if not path.is_file():
        raise InputError(f"--like {like}: not a known model; choose one of {', '.join(models())}")
    return json.loads(path.read_text(encoding="utf-8"))


def process_of(parameters: dict[str, Any]) -> Process:
    """The random process of a parameter file's content."""
    arrays = {part: np.array(parameters["parameters"][part], np.float32) for part in PARTS}
    emphasis = tuple(parameters["emphasis"])
    return Process(
        parameters["experts"], parameters["top_k"], **arrays, emphasis=emphasis, seed=parameters["model_seed"]
    )


def model_shape(like: str, dtype: str | None = None) -> ModelShape:
    """Shape and bytes of the model in one of the formats that its file lists."""
    about = published(like)
    model, formats = about["model"], about["bits"]
    dtype = dtype or next(iter(formats))
    if dtype not in formats:
        raise InputError(f"--dtype {dtype}: {like} has {', '.join(formats)}")
    expert_bits, other_bits = formats[dtype]
    weights = 3 * model["hidden"] * model["expert_width"]
    return ModelShape(
        name=model["name"],
        layers=model["layers"],
        moe_layers=tuple(range(model["first_moe_layer"], model["layers"])),
        experts=model["experts"],
        top_k=model["top_k"],
        hidden=model["hidden"],
        expert_width=model["expert_width"],
        dtype=dtype,
        expert_bytes=round((weights * expert_bits + model.get("expert_biases", 0) * other_bits) / 8),
        dense_bytes=round(model["dense_parameters"] * other_bits / 8),
        kv_bytes_per_token=model["kv_bytes_per_token"],
        embedding_bytes=round(model["embedding_parameters"] * other_bits / 8),
    )


def _draft_shape(like: str, draft: str | None) -> DraftShape | None:
    known = published(like).get("drafts", {})
    if draft is None:
        return DraftShape(**next(iter(known.values()))) if known else None
    if draft not in known:
        raise InputError(f"--draft {draft}: {like} has {', '.join(known) or 'none'}")
    return DraftShape(**known[draft])


def _settings(
    tokens: int,
    seed: int,
    sequences: int | None,
    prefill: int,
    draft_length: int,
    acceptance: float | Sequence[float] | None,
) -> Settings:
    sequences = max(1, -(-tokens // TOKENS_A_SEQUENCE)) if sequences is None else sequences
    if tokens < 1 or not 1 <= sequences <= tokens:
        raise InputError(f"--tokens {tokens} --sequences {sequences}: give at least one token to each sequence")
    if seed < 0 or prefill < 0 or draft_length < 0:
        raise InputError(f"seed {seed}, prefill {prefill}, draft length {draft_length}: give 0 or more")
    chances = () if acceptance is None else tuple(np.atleast_1d(np.asarray(acceptance, float)).tolist())
    if bool(draft_length) != bool(chances):
        raise InputError("--draft-length and --acceptance go together: give both for verify windows, or neither")
    if not all(0 <= c <= 1 for c in chances):
        raise InputError(f"--acceptance {acceptance}: give chances from 0 to 1")
    return Settings(tokens, seed, sequences, prefill, draft_length, chances)


def _acceptance_note(settings: Settings) -> str:
    if not settings.draft_length:
        return "none"
    chances = ", ".join(f"{c:g}" for c in settings.acceptance)
    return (
        f"modelled: each drafted token accepted independently with probability {chances} by place (seed "
        f"{settings.seed}); rejected rows are made up as another continuation of the last kept token"
    )


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows start..start+length-1 of the text, of which 0..accepted are kept."""

    start: int
    length: int
    accepted: int


def _windows(settings: Settings, sequence: int) -> Iterator[_Window]:
    """The windows of a sequence's generated tokens, from 0; without a draft one token each."""
    end, start = settings.of_sequence(sequence), 0
    chance = stream("acceptance", settings.seed, sequence)
    places = np.minimum(np.arange(settings.draft_length), len(settings.acceptance) - 1)
    chances = np.array(settings.acceptance)[places] if settings.draft_length else np.empty(0)
    while start < end:
        length = min(settings.draft_length + 1, end - start)
        kept = chance.random(settings.draft_length) < chances
        accepted = int(np.argmin(np.r_[kept[: length - 1], False]))
        yield _Window(start, length, accepted)
        start += accepted + 1


def _sequence(chain: Chain, sequence: int, settings: Settings) -> Iterator[Step]:
    for start in range(0, settings.prefill, PREFILL_CHUNK):
        count = min(PREFILL_CHUNK, settings.prefill - start)
        parts = [chain.advance(min(BLOCK, count - i))[0] for i in range(0, count, BLOCK)]
        yield _step(Kind.PREFILL, sequence, start, np.concatenate(parts))
    windows = _windows(settings, sequence)
    window = next(windows)
    text, first = np.empty((0, 0, 0)), 0  # kept rows not yet in a step, from row `first` of the text on
    end = settings.of_sequence(sequence)
    for done in range(0, end, BLOCK):
        fresh, drift = chain.advance(min(BLOCK, end - done))
        text = np.concatenate([text, fresh]) if text.size else fresh
        reached = done + len(fresh)
        ready = []
        while window is not None and window.start + window.accepted < reached:
            ready.append(window)
            window = next(windows, None)
        rejected = _rejected(chain, ready, drift, done)
        for w, rows in zip(ready, rejected, strict=True):
            kept = text[w.start - first : w.start - first + w.accepted + 1]
            experts = np.concatenate([kept, *rows]) if rows else kept
            kind = Kind.VERIFY if len(experts) > 1 else Kind.DECODE
            yield _step(kind, sequence, settings.prefill + w.start, experts, w.accepted)
        if ready:
            start = ready[-1].start + ready[-1].accepted + 1
            text, first = text[start - first :], start


def _rejected(chain: Chain, windows: list[_Window], drift: np.ndarray, done: int) -> list[list[np.ndarray]]:
    """For each window its rejected rows [1, L, k]; drift [n, L, E] is that of the text's rows from `done` on."""
    rows: list[list[np.ndarray]] = [[] for _ in windows]
    left = [w.length - 1 - w.accepted for w in windows]
    active = [i for i, n in enumerate(left) if n]
    state = drift[[windows[i].start + windows[i].accepted - done for i in active]]
    while active:
        experts, state = chain.branch(state)
        for place, i in enumerate(active):
            rows[i].append(experts[place : place + 1])
        going = [place for place, i in enumerate(active) if len(rows[i]) < left[i]]
        active, state = [active[place] for place in going], state[going]
    return rows


def _step(kind: Kind, sequence: int, position: int, experts: np.ndarray, accepted: int = 0) -> Step:
    n = len(experts)
    return Step(
        sequence=sequence,
        turn=0,
        kind=kind,
        positions=np.arange(position, position + n, dtype=np.int32),
        tokens=np.full(n, -1, np.int32),
        drafted=(np.arange(n) > 0) & (kind is Kind.VERIFY),
        accepted=accepted,
        experts=experts,
    )
