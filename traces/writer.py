"""Writes a trace as it is recorded: whole steps, in batches that are on their way to disk at once."""

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from .errors import InputError
from .layout import (
    CRC_KEY,
    END_KEY,
    STEPS_KEY,
    TOKENS_KEY,
    columns_of,
    crc_of,
    flaw_in,
    rows_of,
    schema_of,
    to_batch,
)
from .schema import Header, Step

ROWS_A_BATCH = 256


class TraceWriter:
    """Appends steps to a new trace file (an old one of that name is replaced).

    A batch is written after some 256 tokens and whenever `flush` is called, so a killed recorder loses no more than
    those. Leaving the context by an exception closes the file as "interrupted"; it stays readable.
    Raises InputError if the file cannot be written, ValueError for a step that does not fit the header.
    """

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path = Path(path)
        self.header = header
        self.steps = 0
        self.tokens = 0
        self._columns = columns_of(header)
        self._schema = schema_of(header)
        self._waiting: list[Step] = []
        self._waiting_rows = 0
        self._closed = False
        try:
            self._file = self.path.open("wb")
        except OSError as error:
            raise InputError(f"{self.path}: cannot write: {error.strerror}") from error
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        self._stream = pa.ipc.new_stream(self._file, self._schema, options=options)
        self._write(self._empty(), {})  # Arrow holds the header back until the first batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(interrupted=kind is not None)

    def append(self, step: Step) -> None:
        """Take one step; its arrays are copied."""
        if not len(step):
            raise ValueError(f"step {self.steps + len(self._waiting)} has no tokens")
        self._waiting.append(self._fitted(step))
        self._waiting_rows += len(step)
        if self._waiting_rows >= ROWS_A_BATCH:
            self.flush()

    def flush(self) -> None:
        """Write what waits; when this returns it is with the operating system."""
        if not self._waiting:
            return
        rows = rows_of(self._waiting, self.steps)
        taken, self._waiting, self._waiting_rows = len(self._waiting), [], 0
        flaw = flaw_in(rows, self.header, self.steps)
        if flaw:
            raise ValueError(flaw)
        self._write(to_batch(rows, self._schema), {CRC_KEY: crc_of(rows)})
        self.steps += taken
        self.tokens += len(rows)

    def close(self, interrupted: bool = False) -> None:
        """Write the rest and the end mark, which says that nothing is missing or that the run was cut short."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
            end = b"interrupted" if interrupted else b"complete"
            counts = {STEPS_KEY: str(self.steps).encode(), TOKENS_KEY: str(self.tokens).encode()}
            self._write(self._empty(), {END_KEY: end, **counts})
            self._stream.close()
        finally:
            self._file.close()

    def _fitted(self, step: Step) -> Step:
        """The step in the types of the file; ValueError if a shape or an id is wrong."""
        n = len(step)
        number = self.steps + len(self._waiting)
        arrays: dict[str, np.ndarray | None] = {
            "positions": _vector(step.positions, n, np.int32, f"step {number}: positions"),
            "tokens": _vector(step.tokens, n, np.int32, f"step {number}: tokens"),
            "drafted": _vector(step.drafted, n, np.bool_, f"step {number}: drafted"),
        }
        for name in ("experts", "weights", "scores", "ahead"):
            value = getattr(step, name)
            if (name in self._columns) != (value is not None):
                raise ValueError(f"step {number}: {name} given or missing against the header")
            if value is not None:
                arrays[name] = self._routing(name, value, n, number)
        return Step(step.sequence, step.turn, step.kind, accepted=step.accepted, **arrays)  # pyright: ignore

    def _routing(self, name: str, value: np.ndarray, n: int, number: int) -> np.ndarray:
        dtype, shape = self._columns[name]
        value = np.asarray(value)
        if value.shape != (n, *shape):
            raise ValueError(f"step {number}: {name} has shape {value.shape}, expected {(n, *shape)}")
        if dtype.kind == "u" and value.dtype != dtype:
            experts = self.header.target.experts
            if value.min() < 0 or value.max() >= experts:
                raise ValueError(f"step {number}: {name} ids {value.min()}..{value.max()}, expected 0..{experts - 1}")
        return value.astype(dtype)

    def _empty(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([], self._schema)

    def _write(self, batch: pa.RecordBatch, metadata: dict[bytes, bytes]) -> None:
        try:
            self._stream.write_batch(batch, custom_metadata=metadata)
            self._file.flush()
        except OSError as error:
            raise InputError(f"{self.path}: cannot write: {error.strerror or error}") from error


def _vector(value: np.ndarray, n: int, dtype: type, what: str) -> np.ndarray:
    value = np.asarray(value)
    if value.shape != (n,):
        raise ValueError(f"{what} has shape {value.shape}, expected {(n,)}")
    return value.astype(dtype)
