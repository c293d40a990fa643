"""How steps lie in a trace file: one row per token, in columns of an Arrow stream, whose schema carries the header.

| column | type | |
| --- | --- | --- |
| step | int64 | which forward pass, counted from 0; the rows of one step are together |
| sequence, turn | int32 | |
| kind | string | prefill, decode or verify |
| position, token | int32 | token -1: not known |
| drafted | bool | proposed by the draft |
| accepted | int32 | of the step: how many of its drafted tokens were kept |
| experts | L*k unsigned | ids in the router's order, layer after layer |
| weights | L*k float16 | if the header says so |
| scores | L*E float16 | if the header says so |
| ahead | L*J*k unsigned | if the header says so |
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa

from .errors import InputError
from .schema import FORMAT_VERSION, Header, Kind, Step, id_dtype

HEADER_KEY = b"spac.header"
HEADER_CRC_KEY = b"spac.header.crc32"
CRC_KEY = b"spac.crc32"
END_KEY = b"spac.end"
STEPS_KEY = b"spac.steps"
TOKENS_KEY = b"spac.tokens"

KINDS = tuple(Kind)
CODES = {str(kind): code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole steps as columns over n tokens; names as in `Step`. `kind` [n] uint8 counts in `KINDS`."""

    step: np.ndarray
    sequence: np.ndarray
    turn: np.ndarray
    kind: np.ndarray
    position: np.ndarray
    token: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    experts: np.ndarray
    weights: np.ndarray | None = None
    scores: np.ndarray | None = None
    ahead: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.step)

    @property
    def starts(self) -> np.ndarray:
        """Row at which each step begins."""
        return np.flatnonzero(np.r_[True, np.diff(self.step) != 0]) if len(self) else np.empty(0, np.int64)

    def steps(self) -> Iterator[Step]:
        """The steps; their arrays are views of these columns."""
        starts = self.starts
        of_step = [getattr(self, name)[starts].tolist() for name in ("sequence", "turn", "kind", "accepted")]
        ends = [*starts[1:].tolist(), len(self)]
        for a, b, sequence, turn, kind, accepted in zip(starts.tolist(), ends, *of_step, strict=True):
            yield Step(
                sequence=sequence,
                turn=turn,
                kind=KINDS[kind],
                positions=self.position[a:b],
                tokens=self.token[a:b],
                drafted=self.drafted[a:b],
                accepted=accepted,
                experts=self.experts[a:b],
                weights=None if self.weights is None else self.weights[a:b],
                scores=None if self.scores is None else self.scores[a:b],
                ahead=None if self.ahead is None else self.ahead[a:b],
            )


def rows_of(steps: Sequence[Step], first: int) -> Rows:
    """Join steps, the first of which has the number `first`. At least one step."""
    sizes = [len(s) for s in steps]

    def repeated(values: Sequence[int], dtype: type) -> np.ndarray:
        return np.repeat(np.array(values, dtype), sizes)

    def joined(name: str) -> np.ndarray | None:
        parts = [getattr(s, name) for s in steps]
        return None if parts[0] is None else np.concatenate(parts)

    return Rows(
        step=repeated(range(first, first + len(steps)), np.int64),
        sequence=repeated([s.sequence for s in steps], np.int32),
        turn=repeated([s.turn for s in steps], np.int32),
        kind=repeated([KINDS.index(s.kind) for s in steps], np.uint8),
        position=np.concatenate([s.positions for s in steps]),
        token=np.concatenate([s.tokens for s in steps]),
        drafted=np.concatenate([s.drafted for s in steps]),
        accepted=repeated([s.accepted for s in steps], np.int32),
        experts=np.concatenate([s.experts for s in steps]),
        weights=joined("weights"),
        scores=joined("scores"),
        ahead=joined("ahead"),
    )


def columns_of(header: Header) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Type and shape of one token's entry in each column that the routers fill."""
    target = header.target
    ids, half = id_dtype(target.experts), np.dtype(np.float16)
    layers, k = len(target.moe_layers), target.top_k
    columns: dict[str, tuple[np.dtype, tuple[int, ...]]] = {"experts": (ids, (layers, k))}
    if header.weights:
        columns["weights"] = (half, (layers, k))
    if header.scores is not None:
        columns["scores"] = (half, (layers, target.experts))
    if header.lookahead:
        columns["ahead"] = (ids, (layers, header.lookahead, k))
    return columns


PLAIN = {
    "step": pa.int64(),
    "sequence": pa.int32(),
    "turn": pa.int32(),
    "kind": pa.utf8(),
    "position": pa.int32(),
    "token": pa.int32(),
    "drafted": pa.bool_(),
    "accepted": pa.int32(),
}


def schema_of(header: Header) -> pa.Schema:
    columns = [pa.field(name, kind, nullable=False) for name, kind in PLAIN.items()]
    for name, (dtype, shape) in columns_of(header).items():
        item = pa.field("item", pa.from_numpy_dtype(dtype), nullable=False)
        columns.append(pa.field(name, pa.list_(item, int(np.prod(shape))), nullable=False))
    text = json.dumps(header.to_dict(), separators=(",", ":")).encode()
    return pa.schema(columns, metadata={HEADER_KEY: text, HEADER_CRC_KEY: str(zlib.crc32(text))})


def header_of(schema: pa.Schema, name: str) -> Header:
    """The header in a schema. InputError, naming the file `name`, if it is no trace, newer than us, or damaged."""
    metadata = schema.metadata or {}
    text = metadata.get(HEADER_KEY)
    if text is None:
        raise InputError(f"{name}: an Arrow stream, but not a trace (no spac.header in it); record or import one")
    if str(zlib.crc32(text)).encode() != metadata.get(HEADER_CRC_KEY):
        raise InputError(f"{name}: the header is damaged (checksum differs); take the file from its source again")
    header = parse_header(text, name)
    if not schema.equals(schema_of(header)):
        raise InputError(f"{name}: the columns are not those that the header promises; the file is damaged")
    return header


def parse_header(text: str | bytes, name: str) -> Header:
    """The header in its JSON. InputError, naming the file `name`, if it is of a newer format or lacks a field."""
    try:
        content: dict[str, Any] = json.loads(text)
        _refuse_newer(content, name)
        return Header.from_dict(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{name}: the header does not have the fields of its format version: {error}") from error


def _refuse_newer(content: dict[str, Any], name: str) -> None:
    version = content.get("format_version", 0)
    if version > FORMAT_VERSION:
        writer = content.get("tools", {}).get("moe-spac")
        newer = f"moe-spac {writer}, which wrote it" if writer else "a moe-spac that reads it"
        raise InputError(
            f"{name}: trace format version {version} is needed, this one reads up to {FORMAT_VERSION}; install {newer}"
        )


def to_batch(rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for field in schema:
        values = getattr(rows, field.name)
        if field.name == "kind":
            arrays.append(pa.DictionaryArray.from_arrays(values, [str(k) for k in KINDS]).dictionary_decode())
        elif field.name in PLAIN:
            arrays.append(pa.array(values, field.type))
        else:
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def from_batch(batch: pa.RecordBatch, header: Header) -> Rows:
    """Inverse of `to_batch`; ValueError where a value is missing."""
    batch.validate(full=True)
    shapes = columns_of(header)
    values: dict[str, np.ndarray] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in shapes:
            column = column.flatten()
        if column.null_count:
            raise ValueError(f"column {name} has missing values")
        if name == "kind":
            values[name] = np.array([CODES.get(kind, len(CODES)) for kind in column.to_pylist()], np.uint8)
        else:
            array = column.to_numpy(zero_copy_only=False)
            values[name] = array.reshape(-1, *shapes[name][1]) if name in shapes else array
    return Rows(**values)


def crc_of(rows: Rows) -> bytes:
    """CRC32 over the values of all columns in order, independent of how Arrow packs or compresses them."""
    crc = 0
    for field in fields(rows):
        values = getattr(rows, field.name)
        if values is not None:
            crc = zlib.crc32(np.ascontiguousarray(values).data, crc)
    return str(crc).encode()


def flaw_in(rows: Rows, header: Header, first: int) -> str | None:
    """What is wrong with the values of whole steps, the first of which must be number `first`; None if nothing."""
    if not len(rows):
        return None
    starts = rows.starts
    sizes = np.diff(np.r_[starts, len(rows)])
    if rows.kind.max() >= len(KINDS):
        return "it holds a kind of step that this format does not have"
    if not np.array_equal(rows.step[starts], np.arange(first, first + len(starts))):
        return f"steps do not count on from {first}"
    for name in ("sequence", "turn", "kind", "accepted"):
        values = getattr(rows, name)
        if not np.array_equal(values, np.repeat(values[starts], sizes)):
            return f"{name} differs inside a step"
    drafts = np.add.reduceat(rows.drafted.astype(np.int64), starts)
    kinds = rows.kind[starts]
    bad = (rows.accepted[starts] < 0) | (rows.accepted[starts] > drafts)
    bad |= (drafts > 0) & (kinds != KINDS.index(Kind.VERIFY))
    bad |= (sizes > 1) & (kinds == KINDS.index(Kind.DECODE))
    if bad.any():
        step = first + int(np.argmax(bad))
        return f"step {step}: accepted, drafted and the number of tokens do not fit its kind"
    if min(rows.sequence.min(), rows.turn.min(), rows.position.min()) < 0:
        return "a sequence, turn or position is negative"
    return _flaw_in_ids(rows, header.target.experts) or _flaw_in_weights(rows)


def _flaw_in_ids(rows: Rows, experts: int) -> str | None:
    for name, ids in (("expert", rows.experts), ("looked-ahead expert", rows.ahead)):
        if ids is None:
            continue
        if ids.max(initial=0) >= experts:
            row = int(np.argmax((ids >= experts).reshape(len(ids), -1).any(axis=1)))
            return f"step {rows.step[row]}: {name} id {ids[row].max()}, but the model has {experts} experts"
        ordered = np.sort(ids, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]).reshape(len(ids), -1).any(axis=1)
        if twice.any():
            return f"step {rows.step[np.argmax(twice)]}: an {name} is chosen twice by one token in one layer"
    return None


def _flaw_in_weights(rows: Rows) -> str | None:
    if rows.weights is not None and not np.isfinite(rows.weights).all():
        return "a routing weight is not a finite number"
    return None
