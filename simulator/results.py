"""Reads a folder that `spac-sim run` or `sweep` wrote, for whoever shows it: plots and report.

Columns are taken by name; what a folder lacks is None there. A `Slice` is what can stand in one figure: one trace on
one machine.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..traces.errors import InputError
from ..traces.schema import Header, Provenance
from .compare import AR, SD
from .machine import DEFAULTS, Machine, Quantity
from .metrics import OK
from .report import provenance
from .verdict import Verdict, judge

Row = dict[str, Any]
HOW = "give a folder that spac-sim run or spac-sim sweep wrote"


@dataclass(frozen=True)
class Slice:
    """One trace on one machine. `rows`: every run as in metrics.json or sweep.parquet, with `size` (what runs are
    compared at, as text), `cut` (whether it stands beside the main runs only as another draft length) and `draft`.
    occupancy: columns of residency.parquet; assumed: words on acceptance, if nothing ran.
    """

    trace: str
    machine: Machine
    header: Header
    rows: list[Row]
    version: str
    command: str
    assumed: str = ""
    occupancy: dict[str, np.ndarray] | None = None

    @property
    def layers(self) -> int:
        return len(self.header.target.moe_layers)

    @property
    def synthetic(self) -> bool:
        return self.header.provenance is Provenance.SYNTHETIC

    @property
    def caption(self) -> str:
        """Whence the numbers are: trace, machine, kind of data, version."""
        guessed = f", {self.assumed}" if self.assumed else ""
        return f"{provenance(self.header, self.trace)}{guessed}; simulated {self.machine.name}; moe-spac {self.version}"

    @cached_property
    def main(self) -> list[Row]:
        """The rows at the trace's own draft length, and plain decoding."""
        return [r for r in self.rows if not r["cut"]]

    @property
    def sizes(self) -> list[str]:
        """What runs are compared at, smallest cache first."""
        return [r["size"] for r in sorted({r["size"]: r for r in self.main}.values(), key=lambda r: r["slots"])]

    @property
    def policies(self) -> list[str]:
        """In the order of the comparison, references last."""
        return [r["policy"] for r in sorted({r["policy"]: r for r in self.rows}.values(), key=lambda r: r["reference"])]

    @property
    def modes(self) -> list[str]:
        return [m for m in (SD, AR) if any(r["mode"] == m for r in self.main)]

    def at(self, size: str) -> list[Row]:
        return [r for r in self.main if r["size"] == size]

    def winner(self, size: str | None = None) -> Row | None:
        """The fastest row that may win, of one size or of all; at its own draft length."""
        return best_of([r for r in self.main if size in (None, r["size"])])

    def best(self) -> Row | None:
        """The fastest row that may win, of all sizes and draft lengths."""
        return best_of(self.rows)

    def by_length(self, policy: str, size: str) -> dict[int, Row]:
        """A policy's rows by draft length, plain decoding being 0."""
        mine = [r for r in self.rows if (r["policy"], r["size"]) == (policy, size) and speed(r)]
        return dict(sorted({r["draft_length"]: r for r in sorted(mine, key=lambda r: r["cut"])}.items()))

    def verdicts(self, size: str) -> list[Verdict]:
        """Whether speculation pays, for every policy that may be ranked and ran in both modes."""
        found = []
        for sd in self.at(size):
            runs = self.by_length(sd["policy"], size)
            if sd["mode"] == SD and speed(sd) and 0 in runs and not sd["reference"]:
                speeds = {n: speed(r) for n, r in runs.items()}
                found.append(judge(sd["policy"], sd["slots"], sd, runs[0], speeds, sd["draft_length"]))
        return [v for v in found if v is not None]


def speed(row: Row) -> float:
    """Tokens/s of a run that may be ranked, else 0."""
    return float(row.get("tokens_per_s") or 0.0) if row["status"] == OK else 0.0


def best_of(rows: Sequence[Row]) -> Row | None:
    fit = [r for r in rows if speed(r) and r["lossless"] and not r["reference"]]
    return max(fit, key=speed, default=None)


def read_slices(folder: Path) -> list[Slice]:
    """Every trace on every machine. InputError for a folder that holds neither a run nor a sweep."""
    try:
        if (folder / "run.json").is_file():
            return [_read_run(folder)]
        if (folder / "sweep.parquet").is_file():
            return _read_sweep(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder}: cannot be read as a run or sweep ({type(error).__name__}: {error}); {HOW}"
        ) from None
    there = "there is no such folder" if not folder.is_dir() else "neither run.json nor sweep.parquet is in it"
    raise InputError(f"{folder}: {there}; {HOW}")


def _read_run(folder: Path) -> Slice:
    run = json.loads((folder / "run.json").read_text())
    rows = json.loads((folder / "metrics.json").read_text())["runs"]
    header, taken = Header.from_dict(run["trace"]["header"]), run["trace"]["taken"]
    layers = len(header.target.moe_layers)
    for row in rows:
        row["size"] = _per_layer(row.get("size", row["slots"]), layers)
        row["draft"] = "none" if row["mode"] == AR else f"{row['draft_length']} tokens"
    assumed = ""
    if taken["window"]:
        cost = f"drafts by {taken['draft']['name']}" if taken["draft"] else "drafting free"
        assumed = f"assumed acceptance {taken['acceptance']:g}, {cost}"
    machine = _machine(run["machine"])
    version, occupancy = run["versions"]["moe-spac"], _occupancy(folder / "residency.parquet")
    return Slice(run["trace"]["name"], machine, header, rows, version, run["command"], assumed, occupancy)


def _per_layer(slots: int, layers: int) -> str:
    return f"{slots / layers:.4g} a layer"


def _machine(told: Row) -> Machine:
    """The profile that ran; entries that came after it was written are as if it had left them out."""
    since = {entry: Quantity(value, "assumed", source) for entry, (value, source) in DEFAULTS.items()}
    return Machine(told["name"], told["title"], since | {k: Quantity(**q) for k, q in told["quantities"].items()})


def _occupancy(path: Path) -> dict[str, np.ndarray] | None:
    if not path.is_file():
        return None
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return {name: np.asarray(table[name].to_numpy(zero_copy_only=False)) for name in table.column_names}


def _read_sweep(folder: Path) -> list[Slice]:
    import pyarrow.parquet

    manifest = json.loads((folder / "manifest.json").read_text())
    rows = pyarrow.parquet.read_table(folder / "sweep.parquet").to_pylist()
    machines = {m["name"]: _machine(m) for m in manifest["machines"]}
    headers = {t["trace"]: Header.from_dict(t["header"]) for t in manifest["traces"]}
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["trace"], row["machine"]), []).append(row)
    version, command = manifest["versions"]["moe-spac"], manifest["command"]
    return [
        Slice(_stem(trace), machines[machine], headers[trace], _with_cut(part), version, command, _assumed(part))
        for (trace, machine), part in found.items()
    ]


def _stem(trace: str) -> str:
    return Path(trace).stem if trace.endswith(".spac") else trace


def _with_cut(rows: list[Row]) -> list[Row]:
    """Of several draft lengths one is the main one: as recorded, or else that of the fastest run with a draft."""
    drafted = [r for r in rows if r["mode"] == SD]
    recorded = any(r["draft"] == "recorded" for r in drafted)
    best = best_of(drafted) or (drafted[0] if drafted else None)
    main = "recorded" if recorded or best is None else best["draft"]
    return [{**r, "cut": r["mode"] == SD and r["draft"] != main} for r in rows]


def _assumed(rows: Sequence[Row]) -> str:
    guessed = [r for r in rows if r["draft"].startswith("assumed")]
    if not guessed:
        return ""
    cost = f"drafts by {guessed[0]['draft_model']}" if guessed[0]["draft_model"] else "drafting free"
    model = guessed[0]["acceptance_model"].partition(" (seed")[0]
    return f"acceptance {model}, {cost}"


def many(parts: Sequence[Slice]) -> Slice:
    """The first of several, whose caption names all traces and machines."""
    machines = ", ".join(dict.fromkeys(p.machine.name for p in parts))
    traces = ", ".join(dict.fromkeys(p.trace for p in parts))
    return replace(parts[0], trace=traces, machine=replace(parts[0].machine, name=machines))
