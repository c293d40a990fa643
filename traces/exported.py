"""Reads back what `spac-trace export` wrote. The header comes along, so nothing is lost and nothing is relabelled."""

import io
import json
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from .errors import InputError
from .export import COMMENT
from .layout import CODES, HEADER_KEY, PLAIN, Rows, columns_of, from_batch, header_of, parse_header, schema_of
from .schema import Header, Step

MARK = HEADER_KEY.decode()
TOKENS_AT_ONCE = 1024
OWN_NAMES = {"token": "token_id"}  # in CSV and JSON lines `token` counts rows, as other programs have it


def read_exported(src: Path, kind: str) -> tuple[Header, Iterator[Step]] | None:
    """Header and steps of an exported file of that kind (its suffix without the dot); None if it has no header of ours.

    InputError if it is damaged or was changed, so that rows do not fit the header.
    """
    reader = {"parquet": _parquet, "npz": _npz, "jsonl": _jsonl, "csv": _csv}.get(kind)
    try:
        found = reader(src) if reader else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, pa.ArrowException, zipfile.BadZipFile) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{src}: an exported trace that was cut, damaged or changed ({why}); export it again"
        ) from None
    if found is None:
        return None
    header, rows = found
    return header, rows.steps()


def _parquet(src: Path) -> tuple[Header, Rows] | None:
    table = pq.read_table(src)
    if HEADER_KEY not in (table.schema.metadata or {}):
        return None
    header = header_of(table.schema, str(src))
    whole = table.combine_chunks().to_batches()
    batch = whole[0] if whole else pa.RecordBatch.from_pylist([], schema_of(header))
    return header, from_batch(batch, header)


def _npz(src: Path) -> tuple[Header, Rows] | None:
    with src.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        if MARK not in archive.files:
            return None
        header = parse_header(str(archive[MARK]), str(src))
        return header, _fitted({name: archive[name] for name in (*PLAIN, *columns_of(header))})


def _jsonl(src: Path) -> tuple[Header, Rows] | None:
    with src.open(encoding="utf-8") as lines:
        first = next(lines, "")
        if MARK not in first:
            return None
        header = parse_header(json.dumps(json.loads(first)[MARK]), str(src))
        parts: dict[str, list[np.ndarray]] = {name: [] for name in (*PLAIN, *columns_of(header))}
        while True:  # parsed rows take a hundred times the memory of their arrays
            records = [json.loads(line) for line in islice(lines, len(header.target.moe_layers) * TOKENS_AT_ONCE)]
            for name, values in _columns_of_objects(records, header).items():
                parts[name].append(values)
            if not records:
                return header, _fitted({name: np.concatenate(arrays) for name, arrays in parts.items()})


def _columns_of_objects(records: list[dict[str, Any]], header: Header) -> dict[str, np.ndarray]:
    layers = header.target.moe_layers
    whole = [*layers] * (len(records) // len(layers))
    _expect([r["layer"] for r in records] == whole, "its rows are not as exported")
    columns: dict[str, np.ndarray] = {}
    for name in PLAIN:
        values = [r[OWN_NAMES.get(name, name)] for r in records[:: len(layers)]]
        columns[name] = np.array(values, "<U7" if name == "kind" else PLAIN[name].to_pandas_dtype())
    for name, (dtype, shape) in columns_of(header).items():
        key = {"experts": "ids"}.get(name, name)
        kind = np.float32 if dtype.kind == "f" else np.int64  # for the writer to see ids that do not fit
        columns[name] = np.array([r[key] for r in records], kind).reshape(-1, *shape)
    return columns


def _csv(src: Path) -> tuple[Header, Rows] | None:
    with src.open("rb") as file:
        first = file.readline()
        if not first.startswith(COMMENT.encode()):
            return None
        header = parse_header(first.decode()[len(COMMENT) :], str(src))
        table = pc.read_csv(io.BytesIO(file.read()))
    target = header.target
    width = len(target.moe_layers) * target.top_k
    layer, rank = (table[name].to_numpy() for name in ("layer", "rank"))
    whole = len(table) // width
    _expect(
        len(table) == whole * width
        and np.array_equal(layer, np.tile(np.repeat(target.moe_layers, target.top_k), whole))
        and np.array_equal(rank, np.tile(np.arange(target.top_k), whole * len(target.moe_layers))),
        "its rows are not as exported",
    )
    tokens = np.arange(whole) * width
    columns: dict[str, Any] = {name: table[OWN_NAMES.get(name, name)].take(tokens).to_pylist() for name in PLAIN}
    for name, (dtype, shape) in columns_of(header).items():
        key = {"experts": "expert", "weights": "weight"}[name]
        columns[name] = table[key].to_numpy().astype(np.float32 if dtype.kind == "f" else np.int64).reshape(-1, *shape)
    return header, _fitted(columns)


def _fitted(columns: dict[str, Any]) -> Rows:
    """The columns of a trace, but for ids, which the writer puts into their type and refuses if they do not fit."""
    fitted: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        if name == "kind":
            fitted[name] = np.array([CODES[str(kind)] for kind in values], np.uint8)
        elif name in PLAIN:
            fitted[name] = np.asarray(values, PLAIN[name].to_pandas_dtype())
        else:
            fitted[name] = np.asarray(values)
    lengths = {len(values) for values in fitted.values()}
    _expect(len(lengths) == 1, "its columns are not of one length")
    return Rows(**fitted)


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise ValueError(otherwise)
