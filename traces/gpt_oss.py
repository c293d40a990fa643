"""Imports the expert-fingerprint traces of gpt-oss-20b (decode only): the published JSON of one or more texts, or all
of them packed as numpy arrays with a JSON-lines file beside.

Source: github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, commit 72b368f6, Apache-2.0.
"""

import json
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError
from .schema import Header, Kind, ModelShape, Provenance, Step
from .writer import TraceWriter

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH, VOCABULARY = 24, 32, 4, 2880, 2880, 201_088
HEADS, KV_HEADS, HEAD_SIZE = 64, 8, 64

SOURCE = (
    "github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting at 72b368f60045221f21eeb65debb27d58de92e565 "
    "(Apache-2.0): MMLU, MMLU-Pro and Tulu-3 prompts"
)
NOTES = (
    "Decode steps only: prompts were not recorded, a sequence begins at its first generated token. "
    "Token ids are not known (-1). Generation was cut at 512 tokens."
)


def gpt_oss_20b() -> ModelShape:
    """Shape and bytes of openai/gpt-oss-20b, from its published configuration.

    Expert weights are MXFP4 (4 bits and an 8-bit scale for each 32, so 4.25 bits), their biases and all else bf16.
    """
    expert = 3 * HIDDEN * WIDTH * 17 // 32 + 2 * (2 * WIDTH + HIDDEN)
    queries, keys = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    attention = (HIDDEN + 1) * (queries + 2 * keys) + (queries + 1) * HIDDEN + HEADS  # one sink a head
    router, norms = (HIDDEN + 1) * EXPERTS, 2 * HIDDEN
    dense = LAYERS * (attention + router + norms) + HIDDEN + 2 * VOCABULARY * HIDDEN
    return ModelShape(
        name="openai/gpt-oss-20b",
        layers=LAYERS,
        moe_layers=tuple(range(LAYERS)),
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        expert_width=WIDTH,
        dtype="mxfp4",
        expert_bytes=expert,
        dense_bytes=2 * dense,
        kv_bytes_per_token=LAYERS * 2 * keys * 2,
        embedding_bytes=2 * VOCABULARY * HIDDEN,  # the head has a table of its own
    )


def import_gpt_oss(
    src: str | Path, out: str | Path, weights: bool = True, progress: Callable[[int], None] = lambda tokens: None
) -> Header:
    """Convert `X.npz` with `X_meta.jsonl` beside it into the trace file `out`; every row becomes a decode step.

    The archive holds expert_ids [T, 24, 4] best first, expert_probs_u8 [T, 24, 4] (softmax over the chosen four,
    times 255) and seq_offsets [S+1]. InputError if it does not.
    """
    src = Path(src)
    arrays = _load_arrays(src)
    offsets = arrays["seq_offsets"]
    about = _load_sequences(src, np.diff(offsets))

    def sequences() -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for record, a, b in zip(about, offsets[:-1], offsets[1:], strict=True):
            applied = arrays["expert_probs_u8"][a:b].astype(np.float16) / np.float16(255)
            yield record["first_position"], arrays["expert_ids"][a:b], applied

    return _write(out, about, sequences(), weights, progress)


def import_fingerprints(
    src: str | Path,
    records: list[Any],
    out: str | Path,
    weights: bool = True,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Header:
    """Convert the parsed records of a published `*_examples.json` file, a text each, into the trace file `out`.

    A record has `router_data`, a list of {"token_<position>": {"layer_<l>": {"selected_experts", "selected_probs"}}}.
    InputError where it has not.
    """
    found = []
    about = []
    for number, record in enumerate(records):
        where = f"{src}: record {number}"
        position, experts, applied = _fingerprint(record, where)
        found.append((position, experts, applied))
        about.append(
            {
                "dataset": record.get("dataset", "unknown"),
                "category": record.get("category", "unknown"),
                "row_index": record.get("row_index", number),
                "prompt_tokens": position,
                "finished": record.get("finished_successfully"),
            }
        )
    return _write(out, about, iter(found), weights, progress)


def _fingerprint(record: dict[str, Any], where: str) -> tuple[int, np.ndarray, np.ndarray]:
    """First position, ids and weights [T, 24, 4] of one text."""
    ids, probabilities, positions = [], [], []
    try:
        for entry in record["router_data"]:
            ((name, layers),) = entry.items()
            positions.append(int(name.removeprefix("token_")))
            chosen = [layers[f"layer_{layer}"] for layer in range(LAYERS)]
            ids.append([layer["selected_experts"] for layer in chosen])
            probabilities.append([layer["selected_probs"] for layer in chosen])
        experts, applied = np.array(ids, np.int64), np.array(probabilities, np.float16)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where}: not the routing of gpt-oss-20b ({error!r})") from None
    if not positions or positions != list(range(positions[0], positions[0] + len(positions))):
        raise InputError(f"{where}: its tokens are not one after another")
    if experts.shape != applied.shape or experts.shape[1:] != (LAYERS, TOP_K):
        raise InputError(f"{where}: router_data must hold {TOP_K} experts and weights in each of {LAYERS} layers")
    _check_ids(experts, where)
    return positions[0], experts, applied


def _check_ids(experts: np.ndarray, where: str) -> None:
    if experts.min(initial=0) < 0 or experts.max(initial=0) >= EXPERTS:
        raise InputError(f"{where}: expert ids must be 0..{EXPERTS - 1}")
    ordered = np.sort(experts, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise InputError(f"{where}: expert_ids names an expert twice for one token in one layer")


def _write(
    out: str | Path,
    about: list[dict[str, Any]],
    sequences: Iterator[tuple[int, np.ndarray, np.ndarray]],
    weights: bool,
    progress: Callable[[int], None],
) -> Header:
    """A sequence: position of its first token, ids and weights [T, 24, 4]."""
    header = Header(
        target=gpt_oss_20b(),
        provenance=Provenance.IMPORTED,
        source=SOURCE,
        sampling={"temperature": None, "seed": None},
        weights=weights,
        sequences=tuple(_describe(record) for record in about),
        tools={"moe-spac": version("moe-spac")},
        notes=NOTES + ("" if weights else " Routing weights left out."),
    )
    drafted, token = np.zeros(1, bool), np.full(1, -1, np.int32)
    with TraceWriter(out, header) as writer:
        for sequence, (first, experts, applied) in enumerate(sequences):
            for t in range(len(experts)):
                position = np.array([first + t], np.int32)
                kept = applied[t : t + 1] if weights else None
                writer.append(Step(sequence, 0, Kind.DECODE, position, token, drafted, 0, experts[t : t + 1], kept))
            progress(len(experts))
    return header


def _load_arrays(src: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(src, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("expert_ids", "expert_probs_u8", "seq_offsets")}
    except FileNotFoundError:
        raise InputError(f"{src}: no such file; give the .npz of a gpt-oss-20b routing trace") from None
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"{src}: not a gpt-oss-20b routing archive: {error}") from error
    experts, offsets = arrays["expert_ids"], arrays["seq_offsets"]
    shape = (len(experts), LAYERS, TOP_K)
    if experts.shape != shape or arrays["expert_probs_u8"].shape != shape or experts.max(initial=0) >= EXPERTS:
        raise InputError(f"{src}: expert_ids must be [tokens, {LAYERS}, {TOP_K}] of 0..{EXPERTS - 1}, like its weights")
    _check_ids(experts, str(src))
    if (
        offsets.ndim != 1
        or len(offsets) < 2
        or offsets[0] != 0
        or offsets[-1] != len(experts)
        or (np.diff(offsets) < 1).any()
    ):
        raise InputError(f"{src}: seq_offsets must rise from 0 to the {len(experts)} tokens of expert_ids")
    return arrays


def _load_sequences(src: Path, tokens: np.ndarray) -> list[dict[str, Any]]:
    path = src.with_name(src.stem + "_meta.jsonl")
    try:
        about = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        counts = [record["tokens"] for record in about]
        complete = all(
            key in record for record in about for key in ("dataset", "category", "row_index", "first_position")
        )
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; it belongs beside {src.name} and describes its sequences") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: cannot read it as one JSON record a line: {error!r}") from error
    if not complete or counts != tokens.tolist():
        raise InputError(f"{path}: its records do not describe the {len(tokens)} sequences of {src.name}")
    return about


def _describe(record: dict[str, Any]) -> dict[str, Any]:
    domain = f"{record['dataset']}/{record['category']}"
    return {
        "name": f"{domain}/{record['row_index']}",
        "domain": domain,
        "dataset": record["dataset"],
        "prompt_tokens": record.get("prompt_tokens"),
        "finished": record.get("finished"),
    }
