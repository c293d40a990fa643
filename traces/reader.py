"""Reads trace files, streaming: a batch is in memory at a time, however long the trace."""

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from .errors import InputError
from .layout import CRC_KEY, END_KEY, KINDS, STEPS_KEY, TOKENS_KEY, Rows, crc_of, flaw_in, from_batch, header_of
from .schema import Header, Kind, Step

DATA = Path(__file__).parent / "data"
BUNDLED = {"gpt-oss-20b": DATA / "gpt-oss-20b.spac"}

MAGIC = b"\xff\xff\xff\xff"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
OTHERS = {
    b"\x28\xb5\x2f\xfd": "zstd-compressed; decompress it first (zstd -d)",
    b"\x1f\x8b": "gzip-compressed; decompress it first (gunzip)",
    b"\xfd7zXZ": "xz-compressed; decompress it first (unxz)",
    b"BZh": "bzip2-compressed; decompress it first (bunzip2)",
    b"PK\x03\x04": "a zip or npz archive; convert it with spac-trace import",
    b"\x93NUMPY": "a numpy array; convert it with spac-trace import",
    b"PAR1": "a Parquet file, which a trace can be exported to, but not read from",
    b"ARROW1": "an Arrow file; a trace is an Arrow stream",
}


def resolve(name: str | Path) -> Path:
    """The file of a bundled trace's name or of a path. A file of that name in the working folder goes first."""
    path = Path(name)
    if path.is_file():
        return path
    if str(name) in BUNDLED:
        return BUNDLED[str(name)]
    why = "is a folder, not a trace" if path.is_dir() else "no such file"
    raise InputError(f"{name}: {why}; give a trace file or a bundled trace ({', '.join(BUNDLED)})")


def open_trace(path: str | Path, strict: bool = False) -> "Trace":
    """Open a trace file or a bundled trace by name; its header is read and checked now.

    Raises InputError if it is missing, not a trace, of a newer format or damaged; with `strict`, which reads the
    whole file once, also if its tail is missing. Damage further in is found (and refused) when it is read.
    """
    path = resolve(path)
    try:
        with path.open("rb") as file:
            _refuse_others(path, file.read(512))
        with pa.OSFile(str(path)) as source:
            schema = pa.ipc.open_stream(source).schema
    except (pa.ArrowException, MemoryError) as error:
        raise InputError(f"{path}: the file ends or is damaged inside its header; nothing can be read") from error
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error
    trace = Trace(path, header_of(schema, str(path)))
    if strict and (state := trace.summary().state).startswith("incomplete"):
        raise InputError(f"{path}: {state}; record it again, or leave out --strict to use what is there")
    return trace


def _refuse_others(path: Path, start: bytes) -> None:
    if start.startswith(MAGIC):
        return
    for magic, what in OTHERS.items():
        if start.startswith(magic):
            raise InputError(f"{path}: not a trace: {what}")
    if not start:
        raise InputError(f"{path}: not a trace: the file is empty")
    text = all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)
    what = "text" if text else f"it begins with the bytes {start[:4].hex(' ')}"
    raise InputError(f"{path}: not a trace: {what}; record one with spac-trace record")


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts over a trace. `tokens` are rows (what the target computed), `emitted` what came out as text.

    state: "complete", "interrupted" (closed early, nothing lost) or "incomplete: N steps, tail dropped".
    """

    steps: dict[str, int]
    tokens: int
    drafted: int
    accepted: int
    emitted: int
    sequences: int
    file_bytes: int
    state: str

    @property
    def bytes_per_token(self) -> float:
        return self.file_bytes / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file. `steps` may be called again and again, also by several readers at once."""

    path: Path
    header: Header

    def steps(self) -> Iterator[Step]:
        """Every step from the first. Ends early, without an error, where an unfinished file ends: see `summary`."""
        for rows in self.batches():
            yield from rows.steps()

    def batches(self) -> Iterator[Rows]:
        """The same in columns, some hundred tokens at a time. InputError names a damaged batch."""
        with pa.OSFile(str(self.path)) as source:
            yield from _Pass(self, source).rows()

    @property
    def finished(self) -> bool:
        """Whether the file was closed; a glance at its last bytes."""
        with self.path.open("rb") as file:
            file.seek(-len(END_OF_STREAM), 2)
            return file.read() == END_OF_STREAM

    def summary(self) -> Summary:
        """Read through the file and count."""
        kinds: Counter[int] = Counter()
        sequences: set[int] = set()
        tokens = drafted = accepted = emitted = 0
        with pa.OSFile(str(self.path)) as source:
            reading = _Pass(self, source)
            for rows in reading.rows():
                starts = rows.starts
                kinds.update(rows.kind[starts].tolist())
                sequences.update(rows.sequence[starts].tolist())
                tokens += len(rows)
                drafted += int(rows.drafted.sum())
                accepted += int(rows.accepted[starts].sum())
                emitted += int((rows.accepted[starts] + 1)[rows.kind[starts] != KINDS.index(Kind.PREFILL)].sum())
        steps = {str(kind): kinds[i] for i, kind in enumerate(KINDS)}
        size = self.path.stat().st_size
        return Summary(steps, tokens, drafted, accepted, emitted, len(sequences), size, reading.state)


class _Pass:
    """One pass through the file. When `rows` is exhausted, `state` tells how the file ended."""

    def __init__(self, trace: Trace, source: pa.OSFile) -> None:
        self.trace = trace
        self.source = source
        self.state = ""
        self.size = trace.path.stat().st_size
        self.steps = 0
        self.tokens = 0
        self.batch = 0

    def rows(self) -> Iterator[Rows]:
        # A batch is small: handing its columns to other threads costs more than unpacking them.
        stream = pa.ipc.open_stream(self.source, options=pa.ipc.IpcReadOptions(use_threads=False))
        while True:
            start = self.source.tell()
            try:
                batch, metadata = stream.read_next_batch_with_custom_metadata()
            except (StopIteration, pa.ArrowException, OSError, MemoryError) as error:
                self._ends_early(start, error)
                return
            if metadata is not None and END_KEY in metadata:
                self._ends(batch, metadata)
                return
            if batch.num_rows:
                yield self._checked(batch, metadata)
            self.batch += 1

    def _checked(self, batch: pa.RecordBatch, metadata: Any) -> Rows:
        try:
            rows = from_batch(batch, self.trace.header)
        except (pa.ArrowException, ValueError) as error:
            raise self._damage(str(error)) from error
        if metadata is None or CRC_KEY not in metadata or metadata[CRC_KEY] != crc_of(rows):
            raise self._damage("its checksum differs")
        flaw = flaw_in(rows, self.trace.header, self.steps)
        if flaw:
            raise self._damage(flaw)
        self.steps += len(rows.starts)
        self.tokens += len(rows)
        return rows

    def _ends(self, batch: pa.RecordBatch, metadata: Any) -> None:
        counts = (str(self.steps).encode(), str(self.tokens).encode())
        if batch.num_rows or (metadata.get(STEPS_KEY), metadata.get(TOKENS_KEY)) != counts:
            raise self._damage("its end mark promises other counts than the file holds")
        states = {state.encode(): state for state in ("complete", "interrupted")}
        if metadata[END_KEY] not in states:
            raise self._damage("its end mark is not readable")
        self.state = states[metadata[END_KEY]]
        left = self.size - self.source.tell()
        if left > len(END_OF_STREAM):
            raise InputError(
                f"{self.trace.path}: {left} bytes follow the end; traces cannot be joined by concatenation"
            )

    def _ends_early(self, start: int, error: BaseException) -> None:
        """The stream breaks off after byte `start`: a tail that was never written, or damage with more behind it?"""
        if start < self.size:
            with self.trace.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                finished = content[-len(END_OF_STREAM) :] == END_OF_STREAM
                first = _find_mark(content, start)
                # A cut batch still has its own mark; a second one belongs to a batch after it.
                more = first >= 0 and _find_mark(content, first + 1) >= 0
            if finished or more:
                raise self._damage(" ".join(str(error).split()) or "the stream ends in the middle of the file")
        self.state = f"incomplete: {self.steps} steps, tail dropped"

    def _damage(self, why: str) -> InputError:
        return InputError(
            f"{self.trace.path}: batch {self.batch} is damaged ({why}); take the file from its source again"
        )


def _find_mark(content: mmap.mmap, start: int) -> int:
    return min((at for key in (CRC_KEY, END_KEY) if (at := content.find(key, start)) >= 0), default=-1)
