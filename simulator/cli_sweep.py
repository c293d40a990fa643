"""`spac-sim sweep`: many runs into one table."""

import json as json_text
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import say, show_json, show_table
from ..traces.errors import InputError

if TYPE_CHECKING:
    from ..policies.interface import Policy
    from .machine import Machine
    from .sweep import Cell, Replay, Row

TABLE, MANIFEST = "sweep.parquet", "manifest.json"


def sweep(
    ctx: typer.Context,
    traces: Annotated[list[str], typer.Argument(metavar="T…", help="Trace files, or bundled traces' names.")],
    policy: Annotated[list[str] | None, typer.Option(help="As in run; repeat for more.")] = None,
    machine: Annotated[list[str] | None, typer.Option(help="A preset or a profile's file; repeat for more.")] = None,
    slots: Annotated[str | None, typer.Option(metavar="N[,N…]", help="Expert slots per layer.")] = None,
    cache_fraction: Annotated[
        str | None, typer.Option(metavar="F[,F…]", help="Slots as a share of all experts. Default 0.17.")
    ] = None,
    vram: Annotated[str | None, typer.Option(metavar="SIZE[,SIZE…]", help="Slots that fit in this.")] = None,
    draft_lengths: Annotated[
        str | None,
        typer.Option(
            metavar="K[,K…]", help='Tokens drafted at a time; 0: none, "recorded": as in the trace. Default 0,recorded.'
        ),
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="Assumed chance of a draft's token, for traces without drafts.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="With --acceptance: whose drafting is charged, e.g. Qwen3-0.6B."),
    ] = None,
    limit_steps: Annotated[int, typer.Option(min=0, help="Only the first N steps of each trace; 0: all.")] = 0,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Also run policies that change the model's output.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of policies and of assumed acceptance.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of results; finished cells in it are not done again.")] = Path(
        "runs/sweep"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Cells side by side; results are the same.")] = 1,
    dask: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Work on this Dask cluster, whose workers reach the traces by path."),
    ] = None,
    optimum: Annotated[
        bool, typer.Option("--optimum/--no-optimum", help="Add the references: offline optimum, AR-LRU, fluid bound.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 unless all cells are ok.")] = False,
) -> int:
    """Run every policy on every trace, machine, cache size and draft length; one table of all, resumable."""
    from .cli_run import DEFAULT_MACHINE, DEFAULT_POLICIES, command_of
    from .machine import load_machine
    from .sweep import plan

    wanted = list(dict.fromkeys(policy or DEFAULT_POLICIES))
    loaded = _policies(wanted, allow_lossy)
    profiles = _distinct([load_machine(name) for name in dict.fromkeys(machine or [DEFAULT_MACHINE])])
    replays = _replays(traces, draft_lengths, acceptance, draft, limit_steps, seed)

    def sizes(replay: "Replay", profile: "Machine") -> dict[str, int]:
        return _sizes(replay, profile, loaded, (slots, cache_fraction, vram))

    cells = plan(replays, profiles, wanted, sizes, seed, optimum)
    _work(out, cells, jobs, dask)
    rows = _rows(out, cells)
    manifest = _manifest(command_of(ctx), replays, profiles, wanted, rows)
    _write(out, rows, manifest)
    if json:
        show_json(rows)
    else:
        _tell(out, rows)
    own = [r for r in rows if not r["reference"]] or rows
    return 1 if all(_failed(r) for r in own) or (strict and any(r["status"] != "ok" for r in rows)) else 0


def _failed(row: "Row") -> bool:
    return row["status"].startswith("failed")


def _policies(specs: Sequence[str], allow_lossy: bool) -> "list[Policy]":
    from ..policies.load import load_policy

    return [load_policy(spec, allow_lossy) for spec in specs]


def _distinct(machines: "list[Machine]") -> "list[Machine]":
    """InputError where the table could not tell two machines apart."""
    twice = [name for name, count in Counter(m.name for m in machines).items() if count > 1]
    if twice:
        raise InputError(f"--machine: two profiles have the name {twice[0]!r}; give one of them another name")
    return machines


def _replays(
    traces: Sequence[str], lengths: str | None, acceptance: float | None, draft: str | None, limit: int, seed: int
) -> "list[Replay]":
    from .sizing import find_size
    from .sweep import replays_of

    wanted = _lengths(lengths)
    drafter = find_size(draft, "--draft").as_draft() if draft else None
    found = [r for t in dict.fromkeys(traces) for r in replays_of(t, wanted, limit, acceptance, drafter, seed)]
    given = "--acceptance" if acceptance is not None else "--draft" if draft else ""
    if given and not any(r.acceptance is not None for r in found):
        raise InputError(f"{given}: no draft is assumed; give a trace without drafts and --draft-lengths above 0")
    return found


def _lengths(text: str | None) -> list[int | None]:
    """None stands for "recorded"."""
    words = [word.strip() for word in (text or "0,recorded").split(",")]
    if not all(word == "recorded" or word.isdecimal() for word in words):
        raise InputError(f"--draft-lengths {text}: not a list of whole numbers; write for example 0,2,4 or 0,recorded")
    return [None if word == "recorded" else int(word) for word in words]


def _sizes(
    replay: "Replay", machine: "Machine", policies: "Sequence[Policy]", flags: tuple[str | None, str | None, str | None]
) -> dict[str, int]:
    """Slots over all layers by what was asked for. --vram alone needs to know how long the texts get."""
    from .cli_sizes import sizes_for
    from .compare import Job
    from .sweep import load_for, source_of

    slots, fraction, vram = flags
    job = Job(source_of(replay), machine, {replay.mode: load_for(replay)} if vram else {})
    if vram and not slots and not fraction:
        budgets = [budget.strip() for budget in vram.split(",")]
        return {b: sizes_for(None, None, b, job, policies, replay.mode)[0][0] for b in budgets}
    layers = len(job.source.trace.header.target.moe_layers)
    return {f"{n / layers:.4g} a layer": n for n in sizes_for(slots, fraction, vram, job, policies, replay.mode)[0]}


def _work(out: Path, cells: "Sequence[Cell]", jobs: int, dask: str | None) -> None:
    """Do the cells that nobody has finished yet. Ctrl-C leaves the finished ones."""
    from .sweep import finished, keep, load_for, run_cells

    todo = [cell for cell in cells if finished(out, cell) is None]
    steps = {cell.key: load_for(cell.replay).steps for cell in todo}
    before = len(cells) - len(todo)
    keys: list[str] = []

    def done() -> int:
        return sum(steps[key] for key in keys)

    try:
        with _progress(len(cells), before, sum(steps.values())) as tell:
            for row in run_cells(todo, jobs, dask, lambda inside: tell(len(keys), done() + inside)):
                keep(out, row)
                keys.append(row["cell"])
                tell(len(keys), done())
    except KeyboardInterrupt:
        words = f"{before + len(keys)} of {len(cells)} cells are finished; the same command goes on from there"
        sys.stderr.write(f"interrupted: {words}\n")
        raise


@contextmanager
def _progress(cells: int, before: int, steps: int) -> Iterator[Callable[[int, int], None]]:
    """On a terminal a bar over steps with the time left, told cells and steps done; nothing in a pipe."""
    if not sys.stderr.isatty() or not steps:
        yield lambda done, inside: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # A cell may take minutes and be the only thing told meanwhile, so the estimate looks back over an hour.
    with Progress(console=Console(stderr=True), transient=True, speed_estimate_period=3600) as bar:
        task = bar.add_task(f"cells {before} of {cells}", total=steps)
        yield lambda done, inside: bar.update(task, completed=inside, description=f"cells {before + done} of {cells}")


def _rows(out: Path, cells: "Sequence[Cell]") -> "list[Row]":
    """All cells from their files, also those just finished, so that every sweep writes what a resumed one would."""
    from .sweep import add_gaps, finished

    rows = [row for cell in cells if (row := finished(out, cell)) is not None]
    if len(rows) < len(cells):
        raise InputError(f"--out {out}: finished cells have disappeared while the sweep ran; run it again")
    add_gaps(rows)
    return rows


def _manifest(
    command: str, replays: "Sequence[Replay]", machines: "Sequence[Machine]", policies: Sequence[str], rows: "list[Row]"
) -> dict[str, Any]:
    """All inputs as resolved, and what is in the table."""
    from .report import versions
    from .sweep import code_sha256, header_of, policy_identity

    traces = {r.name: {"trace": r.name, "sha256": r.sha256, "header": header_of(r).to_dict()} for r in replays[::-1]}
    return {
        "command": command,
        "table": TABLE,
        "cells": len(rows),
        "statuses": dict(sorted(Counter(row["status"].split(":")[0] for row in rows).items())),
        "traces": list(traces.values())[::-1],
        "machines": [asdict(machine) for machine in machines],
        "policies": [policy_identity(spec) for spec in policies],
        "versions": versions(),
        "code_sha256": code_sha256(),
    }


def _write(out: Path, rows: "list[Row]", manifest: dict[str, Any]) -> None:
    from .sweep import table_bytes, write_whole

    write_whole(out / TABLE, table_bytes(rows))
    write_whole(out / MANIFEST, json_text.dumps(manifest, indent=1).encode() + b"\n")


def _tell(out: Path, rows: "list[Row]") -> None:
    from .sweep import best_rows
    from .tables import Number

    def number(row: "Row", name: str, digits: int) -> Number | None:
        return None if row.get(name) is None else Number(row[name], digits)

    table = [
        {
            "trace": Path(row["trace"]).stem,
            "machine": row["machine"],
            "size": row["size"],
            "slots/layer": number(row, "slots_per_layer", 0 if row["slots_per_layer"].is_integer() else 1),
            "best policy": row["policy"],
            "draft": row["draft"],
            "tok/s": number(row, "tokens_per_s", 1),
            "hit": number(row, "hit_rate_assignment", 3),
            "to optimum": number(row, "gap_to_optimum", 3),
            "bound tok/s": number(row, "fluid_bound_tokens_per_s", 1),
        }
        for row in best_rows(rows)
    ]
    show_table("Fastest of each trace, machine and size", table)
    for policy, status, count in _bad(rows):
        say(f"{policy}: {count} of its cells {'has' if count == 1 else 'have'} the status {status}")
    assumed = [row for row in rows if row["draft"].startswith("assumed")]
    if assumed:
        free = "" if assumed[0]["draft_model"] else ", and costs nothing"
        said = dict.fromkeys(row["trace"] for row in assumed)
        say(f"no draft ran: what would be accepted is assumed{free}: {', '.join(said)}")
    synthetic = dict.fromkeys(row["trace"] for row in rows if row["provenance"] == "synthetic")
    if synthetic:
        say(f"SYNTHETIC, no model ran: {', '.join(synthetic)}")
    say(f"{out}: {TABLE} with {len(rows)} cells, {MANIFEST}")


def _bad(rows: "list[Row]") -> list[tuple[str, str, int]]:
    """Policy, the first status of its kind, and how many cells have one of this kind."""
    found: dict[tuple[str, str], tuple[str, int]] = {}
    for row in rows:
        if row["status"] != "ok":
            kind = (row["policy"], row["status"].split(":")[0])
            first, count = found.get(kind, (row["status"], 0))
            found[kind] = (first, count + 1)
    return [(policy, status, count) for (policy, _), (status, count) in found.items()]
