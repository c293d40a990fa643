"""Imports the expert-fingerprint traces of gpt-oss-20b (decode only, as numpy arrays with a JSON-lines file beside).

Source: github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, commit 72b368f6, Apache-2.0.
"""

import json
import zipfile
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


def import_gpt_oss(src: str | Path, out: str | Path, weights: bool = True) -> None:
    """Convert `X.npz` with `X_meta.jsonl` beside it into the trace file `out`; every row becomes a decode step.

    The archive holds expert_ids [T, 24, 4] best first, expert_probs_u8 [T, 24, 4] (softmax over the chosen four,
    times 255) and seq_offsets [S+1]. InputError if it does not.
    """
    src = Path(src)
    arrays = _load_arrays(src)
    experts, offsets = arrays["expert_ids"], arrays["seq_offsets"]
    about = _load_sequences(src, np.diff(offsets))
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
    drafted = np.zeros(1, bool)
    with TraceWriter(out, header) as writer:
        for sequence, record in enumerate(about):
            for t in range(offsets[sequence], offsets[sequence + 1]):
                position = np.array([record["first_position"] + t - offsets[sequence]], np.int32)
                applied = arrays["expert_probs_u8"][t : t + 1].astype(np.float16) / np.float16(255) if weights else None
                token = np.full(1, -1, np.int32)
                writer.append(Step(sequence, 0, Kind.DECODE, position, token, drafted, 0, experts[t : t + 1], applied))


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
    ordered = np.sort(experts, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise InputError(f"{src}: expert_ids names an expert twice for one token in one layer")
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
