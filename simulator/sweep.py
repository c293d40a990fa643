"""Many runs: the product of traces, draft lengths, machines, cache sizes and policies, resumable, on any workers.

A cell is one run with everything resolved. A finished one is a small file of its own, named by a hash of all that can
change its numbers, so a sweep that was killed goes on where it was, and one that grew does only what is new. The table
is put together from these files, in the order of the plan: who computed a cell, and when, leaves no trace in it.
"""

import hashlib
import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..policies.interface import Policy
from ..policies.load import load_policy
from ..traces.errors import InputError
from ..traces.reader import open_trace
from ..traces.redraft import redrafted
from ..traces.schema import DraftShape, Header
from .bounds import bounds
from .compare import AR, BASE, OPTIMUM, SD, Case, Job, Source, run_case
from .machine import Machine, rates_for
from .metrics import OK, Limited, Load, gaps, load_of, time_gap
from .report import sha256, versions

ROOT = Path(__file__).parents[1]
IDLE_S = 10  # a worker that nobody gives work ends after this long
Row = dict[str, Any]  # one cell of the table: inputs, status, metrics; plain numbers, text and None


@dataclass(frozen=True, slots=True)
class Replay:
    """What is replayed: a trace and how much is drafted. `length` None: as recorded; 0: nothing; K: K tokens at a time.

    `name` is what the user gave, `path` and `sha256` are the file's; `limit` > 0 takes the first steps only. Of a trace
    without drafts K are assumed: accepted with the chance `acceptance`, at the costs of `drafter` (None: free).
    """

    name: str
    path: str
    sha256: str
    length: int | None = None
    limit: int = 0
    acceptance: float | None = None
    drafter: DraftShape | None = None
    seed: int = 0

    @property
    def mode(self) -> str:
        return AR if self.length == 0 else SD

    @property
    def words(self) -> str:
        if not self.length:
            return "recorded" if self.length is None else "none"
        return f"cut to {self.length}" if self.acceptance is None else f"assumed {self.length}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `inputs` are its columns in the table, `spec` names the policy from any folder, `code` the program;
    reference: not to be ranked; bounded: works out the fluid bound as well."""

    key: str
    inputs: Row
    replay: Replay
    machine: Machine
    spec: str
    slots: int
    seed: int
    code: str
    reference: bool = False
    bounded: bool = False


def replays_of(
    trace: str,
    lengths: Sequence[int | None],
    limit: int = 0,
    acceptance: float | None = None,
    drafter: DraftShape | None = None,
    seed: int = 0,
) -> list[Replay]:
    """One trace with each draft length, without repeats: a trace that has no drafts is "as recorded" without them.

    InputError for a file that is not a trace, and for K > 0 on a trace without drafts if no acceptance is given.
    """
    opened = open_trace(trace)
    has_drafts = opened.header.acceptance != "none"
    wanted = dict.fromkeys(0 if n is None and not has_drafts else n for n in lengths)
    if acceptance is None and not has_drafts and any(wanted):
        raise InputError(f"--draft-lengths: {trace} has no drafts; say how many would be accepted, as --acceptance 0.7")
    file = {"name": trace, "path": str(opened.path.resolve()), "sha256": sha256(opened.path)}
    assumed = {} if has_drafts else {"acceptance": acceptance, "drafter": drafter}
    return [Replay(**file, length=n, limit=limit, seed=seed, **(assumed if n else {})) for n in wanted]


@cache
def source_of(replay: Replay) -> Source:
    """The trace as it is to be replayed. InputError if the file is not the one that was planned with."""
    trace = open_trace(replay.path)
    if sha256(trace.path) != replay.sha256:
        raise InputError(f"{replay.path}: not the file that the sweep was planned with; give all workers the same")
    if not replay.length:
        return Source(trace, replay.limit)
    if replay.acceptance is None:  # cut once, not for every cell: it reads the trace
        return Source(redrafted(Limited(trace, replay.limit), replay.length, replay.seed))
    return Source(trace, replay.limit, replay.length, replay.acceptance, replay.seed, replay.drafter)


def header_of(replay: Replay) -> Header:
    return source_of(replay).view(replay.mode).header


@cache
def load_for(replay: Replay) -> Load:
    """Reads the trace once. InputError if it is damaged or has no decode steps."""
    load = load_of(source_of(replay).view(replay.mode))
    if not load.decodes:
        raise InputError(f"{replay.name}: no decode steps among those taken; give a longer trace or more steps")
    return load


@cache
def code_sha256() -> str:
    """Of the sources that results come from: cells of an earlier state of the program are not taken for today's."""
    digest = hashlib.sha256()
    for folder in ("traces", "policies", "simulator"):
        for path in sorted((ROOT / folder).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def policy_identity(spec: str) -> Row:
    """What a policy's name stands for: class, every parameter and, for a class from elsewhere, its source's hash."""
    policy = load_policy(spec)
    cls = type(policy)
    own = cls.__module__.startswith(Policy.__module__.removesuffix("interface"))
    values = {f.name: getattr(policy, f.name) for f in fields(policy) if f.init} if is_dataclass(policy) else {}
    source = None if own else sha256(Path(inspect.getfile(cls)))
    return {"policy": spec, "class": cls.__qualname__, "parameters": values, "source_sha256": source}


def anywhere(spec: str) -> str:
    """The same policy for a worker in another folder: files by their whole path."""
    if spec.endswith(".toml"):
        return str(Path(spec).resolve())
    path, dot, rest = spec.partition(".py:")
    return f"{Path(path).expanduser().resolve()}{dot}{rest}" if dot else spec


def plan(
    replays: Sequence[Replay],
    machines: Sequence[Machine],
    policies: Sequence[str],
    sizes: Callable[[Replay, Machine], Mapping[str, int]],
    seed: int = 0,
    optimum: bool = False,
) -> list[Cell]:
    """Every cell, in the order of the table. `sizes` gives slots over all layers by what was asked for, which is what
    drafts are compared at: a draft takes memory, and so slots. `optimum` adds what is missing of the references, MIN
    with the fluid bound and AR-LRU."""
    asked = dict.fromkeys(policies)
    added = [p for p in (BASE, OPTIMUM) if optimum and p not in asked]
    return [
        _cell(replay, machine, policy, (size, slots), seed, policy in added, optimum and policy == OPTIMUM)
        for replay in replays
        for machine in machines
        for size, slots in sizes(replay, machine).items()
        for policy in [*asked, *added]
    ]


def _cell(
    replay: Replay, machine: Machine, policy: str, size: tuple[str, int], seed: int, reference: bool, bounded: bool
) -> Cell:
    header = header_of(replay)
    shape, (asked, slots) = header.target, size
    inputs = {
        "trace": replay.name,
        "trace_sha256": replay.sha256,
        "provenance": str(header.provenance),
        "model": shape.name,
        "machine": machine.name,
        "policy": policy,
        "size": asked,
        "slots": slots,
        "slots_per_layer": slots / len(shape.moe_layers),
        "mode": replay.mode,
        "draft_length": header.draft_length,
        "draft": replay.words,
        "draft_model": header.draft.name if header.draft else None,
        "acceptance_model": header.acceptance,
        "limit_steps": replay.limit,
        "seed": seed,
    }
    all_inputs = {
        "inputs": inputs,
        "machine": {entry: [q.value, q.basis, q.source] for entry, q in machine.quantities.items()},
        "policy": policy_identity(policy),
        "reference": reference,
        "bounded": bounded,
        "assumed": [replay.acceptance, replay.drafter and asdict(replay.drafter)],
        "code": code_sha256(),
        "versions": versions(),
    }
    key = hashlib.sha256(json.dumps(all_inputs, sort_keys=True).encode()).hexdigest()[:32]
    return Cell(key, inputs, replay, machine, anywhere(policy), slots, seed, code_sha256(), reference, bounded)


_turn = threading.Lock()  # threads of one process gain nothing over Python, and policies' files load one at a time


def run_cell(cell: Cell, load: Load, progress: Callable[[int], None] | None = None) -> Row:
    """Run one cell, here or on a worker. InputError if the worker has other files or another program.

    A policy's own failure is the row's status.
    """
    with _turn:
        if code_sha256() != cell.code:
            raise InputError("a worker runs another version of moe-spac than this one; install the same on all")
        mode = cell.replay.mode
        job = Job(source_of(cell.replay), cell.machine, {mode: load}, cell.seed)
        outcome = run_case(job, Case(cell.spec, cell.slots, mode, reference=cell.reference), progress)
        bound = _fluid_bound(cell) if cell.bounded and cell.slots else {}
    flat = {k: v for k, v in outcome.metrics.items() if v is None or isinstance(v, bool | int | float | str)}
    known = {"status": outcome.status, "lossless": outcome.lossless, "reference": outcome.reference}
    return {"cell": cell.key, **cell.inputs, **known, **flat, **bound}


def _fluid_bound(cell: Cell) -> Row:
    trace = source_of(cell.replay).view(cell.replay.mode)
    rates = rates_for(cell.machine, trace.header.target, trace.header.draft)
    return {"fluid_bound_ns": bounds(trace, rates, cell.slots).layered_ns}


# Finished cells


def finished(folder: Path, cell: Cell) -> Row | None:
    """The row of a cell that an earlier sweep into `folder` finished."""
    with suppress(OSError, ValueError):
        row = json.loads(_file(folder, cell.key).read_text())
        if isinstance(row, dict) and row.get("cell") == cell.key:
            return row
    return None


def keep(folder: Path, row: Row) -> None:
    """Write a finished cell, whole or not at all. InputError if it cannot be written."""
    write_whole(_file(folder, row["cell"]), json.dumps(row, indent=1, allow_nan=False).encode() + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, its folder too, so that nobody ever sees a part of it."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden.write_bytes(content)
        os.replace(hidden, path)
    except OSError as error:
        raise InputError(f"--out: {path} cannot be written ({error.strerror}); give another folder") from None


def _file(folder: Path, key: str) -> Path:
    return folder / "cells" / f"{key}.json"


# Who works


def run_cells(
    cells: Sequence[Cell], jobs: int = 1, dask: str | None = None, progress: Callable[[int], None] | None = None
) -> Iterator[Row]:
    """Rows as they are finished, in any order. `progress` hears of the steps inside a cell if the work is done here.

    Leaving the iterator, also by Ctrl-C, ends the workers at once; on a Dask cluster it takes back what has not begun.
    """
    work = [(cell, load_for(cell.replay)) for cell in cells]
    if dask:
        return _on_dask(dask, work)
    if jobs > 1 and len(work) > 1:
        return _side_by_side(work, min(jobs, len(work)))
    return (run_cell(cell, load, progress) for cell, load in work)


def _side_by_side(work: Sequence[tuple[Cell, Load]], jobs: int) -> Iterator[Row]:
    from joblib import Parallel, delayed

    # A batch of one, so that a kill costs no finished cell.
    options: dict[str, Any] = {"return_as": "generator_unordered", "batch_size": 1, "max_nbytes": None}
    workers: Any = Parallel(jobs, backend="loky", initializer=_start_worker, idle_worker_timeout=IDLE_S, **options)
    rows = workers(delayed(run_cell)(cell, load) for cell, load in work)
    try:
        yield from rows
    except BrokenProcessPool:
        raise InputError(
            f"--jobs {jobs}: a worker process was killed, perhaps for want of memory; finished cells are kept; give "
            "the same command with fewer"
        ) from None
    finally:
        rows.close()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends the workers
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """A parent that was killed can end nobody: then the worker ends itself."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _on_dask(address: str, work: Sequence[tuple[Cell, Load]]) -> Iterator[Row]:
    try:
        from distributed import Client, KilledWorker, as_completed
    except ImportError:
        raise InputError("--dask: distributed is not installed; pip install 'moe-spac[dask]'") from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise InputError(f"--dask {address}: no scheduler answers there ({error}); write tcp://HOST:PORT") from None
    with client:
        futures = [client.submit(run_cell, cell, load, key=f"spac-{cell.key}", pure=False) for cell, load in work]
        try:
            for future in as_completed(futures):
                yield future.result()
        except KilledWorker as error:
            raise InputError(f"--dask {address}: {error}; finished cells are kept") from None
        finally:
            client.cancel(futures)


# The table


def add_gaps(rows: Sequence[Row]) -> None:
    """Distance to the optimum and to the fluid bound, where they ran on the same trace, machine, size and draft."""
    ran = {(*_place(row), row["policy"]): row for row in rows if not row["status"].startswith("failed")}
    for (*place, _), row in ran.items():
        best, base = ran.get((*place, OPTIMUM)), ran.get((*place, BASE))
        if best is not None and row.get("hit_rate_unique") is not None:
            row |= gaps(row, best, base)
        if best is not None and best.get("fluid_bound_ns"):
            row |= {"fluid_bound_ns": best["fluid_bound_ns"]} | time_gap(row, base, best["fluid_bound_ns"])


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("trace_sha256", "trace", "machine", "size", "draft"))


def table_bytes(rows: Sequence[Row]) -> bytes:
    """The tidy table as a Parquet file: inputs, status, then metrics; a metric that a row lacks is null."""
    import pyarrow as pa
    import pyarrow.parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: pa.array((row.get(name) for row in rows), _type(row.get(name) for row in rows)) for name in names}
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _type(values: Iterator[Any]) -> Any:
    """One Arrow type for a column, whichever of its rows have a value."""
    import pyarrow as pa

    kinds = {type(v) for v in values if v is not None}
    for kind, arrow in ((str, pa.string()), (float, pa.float64()), (int, pa.int64()), (bool, pa.bool_())):
        if kind in kinds:
            return arrow
    return pa.float64()


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """The fastest row of each trace, machine and size, with any draft, among those that `run` would let win."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        fit = row["status"] == OK and row["lossless"] and not row["reference"] and row.get("tokens_per_s")
        place = (row["trace"], row["machine"], row["size"])
        if fit and (place not in best or row["tokens_per_s"] > best[place]["tokens_per_s"]):
            best[place] = row
    return list(best.values())
