"""Writes traces in the formats of other tools, the header with them: Parquet, CSV, JSON lines, numpy; and the
oracleGeneral format of libCacheSim, which has no place for one.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from .errors import InputError
from .layout import HEADER_KEY, KINDS, PLAIN, Rows, columns_of, schema_of, to_batch
from .reader import Trace
from .schema import Header
from .stats import next_use

BATCHES_A_GROUP = 64
COMMENT = f"# {HEADER_KEY.decode()} "
ACCESS = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
NEVER = -1

Progress = Callable[[int], None]


def export(trace: Trace, out: str | Path, form: str | None = None, progress: Progress = lambda tokens: None) -> int:
    """Write the whole trace to `out`; returns how many rows (of a table), tokens (npz) or accesses it has.

    `form`: parquet, csv, jsonl, npz or oracleGeneral; None takes it from the file's suffix. `progress` is told of
    tokens. A run that fails leaves no file. Raises InputError: unknown form, a file that cannot be written, damage.
    """
    form = form or form_of(Path(out))
    if form not in FORMS:
        raise InputError(f"--format {form}: unknown; choose {', '.join(FORMS)}")
    with replacing(out, trace.path) as part:
        return FORMS[form](trace, part, progress)


def form_of(out: Path) -> str:
    """The format that a file's suffix stands for. InputError if it stands for none."""
    for form in FORMS:
        if out.suffix.lower() == f".{form.lower()}":
            return form
    raise InputError(f"-o {out}: no format has this suffix; use .{', .'.join(FORMS)}, or give --format")


@contextmanager
def replacing(out: str | Path, src: str | Path) -> Iterator[Path]:
    """A file to write beside `out`, which it becomes if all goes well. InputError if it cannot, or is the source."""
    out = Path(out)
    if out.exists() and Path(src).exists() and out.samefile(src):
        raise InputError(f"-o {out}: this is the file that is read; write to another")
    if not out.parent.is_dir():
        raise InputError(f"{out}: cannot write: no such folder {out.parent}; make it first")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(out)
    except OSError as error:
        raise InputError(f"{out}: cannot write: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def export_parquet(trace: Trace, out: Path, progress: Progress) -> int:
    """A row for each token, in the columns of the trace; the header is in the schema's metadata."""
    schema = schema_of(trace.header)
    total = 0
    with pq.ParquetWriter(str(out), schema, compression="zstd") as writer:
        batches = trace.batches()
        while group := list(islice(batches, BATCHES_A_GROUP)):
            table = pa.Table.from_batches([to_batch(rows, schema) for rows in group])
            writer.write_table(table, row_group_size=len(table))
            total += len(table)
            progress(len(table))
    return total


def export_csv(trace: Trace, out: Path, progress: Progress) -> int:
    """A row for each expert of each layer of each token, best first; the header is a comment in the first line.

    `token` counts the tokens of the trace, `token_id` is the vocabulary's, `layer` the model's number. Scores and the
    gates of the next layers do not fit in such rows and are left out.
    """
    header = replace(trace.header, scores=None, lookahead=0)
    layers, k = header.target.moe_layers, header.target.top_k
    width, tokens = len(layers) * k, 0
    with out.open("wb") as file:
        file.write((COMMENT + _text(header) + "\n").encode())
        writer = None
        for rows in trace.batches():
            n = len(rows)
            of_token = {"token": np.arange(tokens, tokens + n), **_plain(rows)}
            columns: dict[str, Any] = {name: np.repeat(values, width) for name, values in of_token.items()}
            columns["layer"] = np.tile(np.repeat(layers, k), n)
            columns["rank"] = np.tile(np.arange(k), n * len(layers))
            columns["expert"] = rows.experts.reshape(-1)
            if rows.weights is not None:
                columns["weight"] = rows.weights.reshape(-1).astype(np.float32)
            table = pa.table(columns)
            writer = writer or pc.CSVWriter(file, table.schema, write_options=pc.WriteOptions(quoting_style="none"))
            writer.write_table(table)
            tokens += n
            progress(n)
        if writer is not None:
            writer.close()
    return tokens * width


def export_jsonl(trace: Trace, out: Path, progress: Progress) -> int:
    """The header in the first line, then an object for each layer of each token; `token` as in `export_csv`."""
    layers, tokens = trace.header.target.moe_layers, 0
    extras = {"experts": "ids"} | {name: name for name in columns_of(trace.header) if name != "experts"}
    with out.open("w", encoding="utf-8") as file:
        file.write(f'{{"{HEADER_KEY.decode()}":{_text(trace.header)}}}\n')
        for rows in trace.batches():
            plain = {name: values.tolist() for name, values in _plain(rows).items()}
            values = {key: getattr(rows, name).tolist() for name, key in extras.items()}
            for i in range(len(rows)):
                about = {name: column[i] for name, column in plain.items()}
                for at, layer in enumerate(layers):
                    row = {"token": tokens + i, **about, "layer": layer, **{key: v[i][at] for key, v in values.items()}}
                    file.write(json.dumps(row, separators=(",", ":")) + "\n")
            tokens += len(rows)
            progress(len(rows))
    return tokens * len(layers)


def export_npz(trace: Trace, out: Path, progress: Progress) -> int:
    """An array for each column: experts and weights [tokens, layers, k], the rest as in the trace; the header as text.

    All of the trace is in memory at once.
    """
    columns: dict[str, list[np.ndarray]] = {}
    for rows in trace.batches():
        for name in (*PLAIN, *columns_of(trace.header)):
            values = getattr(rows, name)
            columns.setdefault(name, []).append(_kind_names(values) if name == "kind" else values)
        progress(len(rows))
    empty = {name: np.empty((0, *shape), dtype) for name, (dtype, shape) in columns_of(trace.header).items()}
    empty |= {name: np.empty(0, "<U7" if name == "kind" else kind.to_pandas_dtype()) for name, kind in PLAIN.items()}
    arrays = {name: np.concatenate(columns.get(name, [empty[name]])) for name in empty}
    with out.open("wb") as file:
        named: dict[str, Any] = {HEADER_KEY.decode(): np.array(_text(trace.header)), **arrays}
        np.savez_compressed(file, **named)
    return len(arrays["step"])


def export_oracle(trace: Trace, out: Path, progress: Progress) -> int:
    """Every expert that a step needs in a layer as one 24-byte access of libCacheSim's oracleGeneral format, ascending
    in its layer: time (the step's number, u32), id (MoE layer * E + expert, u64), size (bytes of an expert, u32), and
    which access (counted from 0) is the next to the same id, or -1 (i64). Some 40 bytes of memory an access.
    """
    target = trace.header.target
    if target.expert_bytes >= 2**32:
        raise InputError(
            f"{trace.path}: an expert has {target.expert_bytes} bytes; oracleGeneral holds less than 4 GiB"
        )
    ids, times = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for rows in trace.batches():
        keys = rows.experts + np.arange(len(target.moe_layers), dtype=np.int64)[:, None] * target.experts
        place = len(target.moe_layers) * target.experts
        needed = np.unique(rows.step[:, None, None] * place + keys)
        ids.append(needed % place)
        times.append(needed // place)
        progress(len(rows))
    accesses = np.zeros(sum(map(len, ids)), ACCESS)
    accesses["id"], accesses["time"], accesses["size"] = np.concatenate(ids), np.concatenate(times), target.expert_bytes
    following = next_use(np.concatenate(ids)[:, None])[:, 0] if len(accesses) else np.empty(0, np.int64)
    accesses["next"] = np.where(following == len(accesses), NEVER, following)
    accesses.tofile(out)
    return len(accesses)


FORMS: dict[str, Callable[[Trace, Path, Progress], int]] = {
    "parquet": export_parquet,
    "csv": export_csv,
    "jsonl": export_jsonl,
    "npz": export_npz,
    "oracleGeneral": export_oracle,
}


def _plain(rows: Rows) -> dict[str, np.ndarray]:
    """Per-token columns in the trace's order, with words for kinds and `token_id` for the vocabulary's number."""
    columns = {"token_id" if name == "token" else name: getattr(rows, name) for name in PLAIN}
    return {name: _kind_names(values) if name == "kind" else values for name, values in columns.items()}


def _kind_names(codes: np.ndarray) -> np.ndarray:
    return np.array([str(kind) for kind in KINDS])[codes]


def _text(header: Header) -> str:
    return json.dumps(header.to_dict(), separators=(",", ":"))
