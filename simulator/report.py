"""What a comparison says: a table and lines for people, documents and files for machines."""

import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..traces.console import say, show_table, warn
from ..traces.errors import InputError
from ..traces.schema import Header, Provenance
from .compare import AR, SD, Job, Outcome, by_length, verdicts, winner
from .metrics import BOTTLENECKS, INACTIVE, KINDS, OK, TOO_FEW, UNROUTED
from .prefetch_metrics import layer_rows

MODES = {SD: "speculative", AR: "plain"}
WHY = {
    INACTIVE: "nothing was ever resident or copied",
    TOO_FEW: "one token needs more experts than a layer has slots",
    UNROUTED: "the trace has layers without routing",
}


@dataclass(frozen=True, slots=True)
class Number:
    """A number as the table shows it; a table puts what is not text to the right."""

    value: float
    digits: int
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.value:.{self.digits}f}{self.unit}"


def _number(value: Any, digits: int, unit: str = "", scale: float = 1.0) -> Number | None:
    return None if value is None else Number(value * scale, digits, unit)


def sizes_of(outcomes: Sequence[Outcome]) -> list[int]:
    """Cache sizes by the name they have in the comparison: the slots of the first mode."""
    return list(dict.fromkeys(o.size for o in outcomes))


def names_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Policies in the order of the comparison, references last."""
    return [o.policy for o in sorted({o.policy: o for o in outcomes}.values(), key=lambda o: o.reference)]


Row = dict[str, Any]


def table_rows(outcomes: Sequence[Outcome], layers: int) -> list[Row]:
    """One row for each cache size and policy, and the bound of each size. Hits and bytes are of the speculative run
    where there is one. Columns that would be empty in every row are left out."""
    rows = []
    for size in sizes_of(outcomes):
        rows += [_row(runs, layers) for runs in _by_policy(outcomes, size)]
        rows += _bound_row(outcomes, size, layers, rows[0])
    return _filled(rows)


def more_rows(outcomes: Sequence[Outcome], layers: int) -> list[Row]:
    """What `--wide` adds, for each cache size and policy that ran: rarer numbers, of the same runs."""
    rows = [
        _more(runs.get(SD) or runs[AR], layers)
        for size in sizes_of(outcomes)
        for runs in _by_policy(outcomes, size)
        if all(o.status == OK for o in runs.values())
    ]
    return _filled(rows)


def _by_policy(outcomes: Sequence[Outcome], size: int) -> list[dict[str, Outcome]]:
    """For every policy its runs of one cache size by mode."""
    found = [{o.mode: o for o in outcomes if (o.policy, o.size, o.cut) == (p, size, False)} for p in names_of(outcomes)]
    return [runs for runs in found if runs]


def _filled(rows: Sequence[Row]) -> list[Row]:
    return [{k: v for k, v in row.items() if any(r[k] is not None for r in rows)} for row in rows]


def _name(o: Outcome) -> str:
    """A policy from a file without its folders."""
    file, colon, kind = o.policy.rpartition(".py:")
    return (f"{Path(file).name}{colon}{kind}" if colon else o.policy) + (" (ref)" if o.reference else "")


def _row(runs: Mapping[str, Outcome], layers: int) -> Row:
    main = runs.get(SD) or runs[AR]
    bad = [o.status for o in runs.values() if o.status != OK]
    m: Mapping[str, Any] = {} if bad else main.metrics
    sd, ar = ((runs[mode].speed or None) if mode in runs and not bad else None for mode in (SD, AR))
    return {
        "policy": _name(main),
        "slots": " / ".join(dict.fromkeys(_share(o.slots, layers) for o in runs.values())),
        "status": bad[0].split(":")[0] if bad else OK,
        "SD tok/s": _number(sd, 1),
        "AR tok/s": _number(ar, 1),
        "SD/AR": _number(sd / ar if sd and ar else None, 2, "x"),
        "hit": _number(m.get("hit_rate_unique"), 3),
        "MB/token": _number(m.get("h2d_bytes_per_token"), 2, scale=1e-6),
        "to MIN": _number(m.get("gap_to_optimum"), 3),
        "closed": _percent(m.get("gap_closed")),
        "in time": _percent(m.get("gap_closed_time")),
    }


def _more(o: Outcome, layers: int) -> Row:
    m = o.metrics
    return {
        "policy": _name(o),
        "slots": _share(o.slots, layers),
        "hit by token": _number(m["hit_rate_assignment"], 3),
        "prefill hit": _number(m["prefill_hit_rate_unique"], 3),
        "copy wait": _percent(_part(m, "wait_copy")),
        "CPU wait": _percent(_part(m, "wait_cpu")),
        "CPU MB/token": _number(m["cpu_bytes_per_token"], 2, scale=1e-6),
        "wasted": _percent(m["wasted_share"]),
        "timely": _percent(m["prefetch_timely_recall"]),
        "TPOT p95 ms": _number(m["tpot_ms_p95"], 2),
        "TTFT ms": _number(m["ttft_ms_mean"], 1),
        "regret": _number(m.get("victim_regret_events_mean"), 0),
        "optimal victims": _percent(m.get("victim_optimal_share")),
    }


def _bound_row(outcomes: Sequence[Outcome], size: int, layers: int, like: Row) -> list[Row]:
    """The fluid bound as a row: what no lossless policy can exceed at this size."""
    found = {o.mode: o.bound for o in outcomes if o.size == size and o.bound}
    if not found:
        return []
    speeds = {mode: bound.tokens_per_s(bound.fluid_ns) for mode, bound in found.items()}
    sd, ar = speeds.get(SD), speeds.get(AR)
    return [
        {
            **dict.fromkeys(like),
            "policy": "fluid bound (ref)",
            "slots": " / ".join(dict.fromkeys(_share(b.slots, layers) for b in found.values())),
            "status": OK,
            "SD tok/s": _number(sd, 1),
            "AR tok/s": _number(ar, 1),
            "SD/AR": _number(sd / ar if sd and ar else None, 2, "x"),
        }
    ]


def _share(slots: int, layers: int) -> str:
    return str(slots // layers) if slots % layers == 0 else f"{slots / layers:.1f}"


def _percent(share: float | None) -> Number | None:
    return None if share is None else Number(100 * share, 0, "%")


def _part(m: Mapping[str, Any], label: str) -> float | None:
    """Share of decode time that the GPU's timeline spends on one thing."""
    return m[f"gpu_{label}_ns"] / m["decode_wall_ns"] if m and m["decode_wall_ns"] else None


def fitted(rows: Sequence[Mapping[str, Any]], width: int) -> list[dict[str, Any]]:
    """The table without what a reader misses least, as far as it must be to fit into `width` columns."""
    spare = ["MB/token", "to MIN", "slots", "SD/AR"]
    if all(r.get("status") == OK for r in rows):
        spare.insert(0, "status")
    left = [dict(r) for r in rows]
    while spare and left and _width(left) > width:
        name = spare.pop(0)
        left = [{k: v for k, v in r.items() if k != name} for r in left]
    return left


def _width(rows: Sequence[Mapping[str, Any]]) -> int:
    """Columns of a terminal that the table takes: a bar and a space on either side of every cell."""
    cells = {k: max(len(k), *(len("-" if r[k] is None else str(r[k])) for r in rows)) for k in rows[0]}
    return 1 + sum(n + 3 for n in cells.values())


def length_rows(outcomes: Sequence[Outcome], layers: int) -> list[dict[str, Any]]:
    """Speed by draft length: a row for each size and policy of which more than one length was run."""
    pairs = [(size, policy) for size in sizes_of(outcomes) for policy in names_of(outcomes)]
    found = {pair: by_length(outcomes, pair[1], pair[0]) for pair in pairs}
    found = {pair: runs for pair, runs in found.items() if len(runs) > 2}
    tried = sorted({n for runs in found.values() for n in runs})
    rows = []
    for (size, policy), runs in found.items():
        best = max(runs, key=lambda n: runs[n].speed)
        speeds = {f"K={n}" if n else "AR": _number(runs[n].speed, 1) if n in runs else None for n in tried}
        rows.append({"policy": policy, "slots": _share(size, layers), **speeds, "best": Number(best, 0)})
    return rows


def provenance(header: Header, name: str) -> str:
    """What the trace is, so that nobody takes synthetic or modelled data for recorded."""
    words = {
        Provenance.RECORDED: "recorded trace",
        Provenance.IMPORTED: "imported trace (recorded by others)",
        Provenance.SYNTHETIC: "SYNTHETIC trace (no model ran)",
    }
    return f"{name}: {words[header.provenance]} of {header.target.name}"


def lines(job: Job, name: str, outcomes: Sequence[Outcome], layers: int) -> list[str]:
    """What stands under the table: origin of the numbers, failures, and a verdict for every cache size."""
    header, machine = job.source.view(outcomes[0].mode).header, job.machine
    assumed = f"{len(machine.assumed)} of its {len(machine.quantities)} entries assumed, see run.json"
    known = assumed if machine.assumed else "no entry assumed"
    said = [f"{provenance(header, name)}; simulated machine {machine.name} ({known})"]
    if job.source.window:
        draft = job.source.draft
        cost = f"drafting costs what {draft.name} would" if draft else "drafting is free here; --draft MODEL charges it"
        said.append(
            f"assumed speculation: draft length {job.source.window}, each drafted token accepted with probability "
            f"{job.source.acceptance:g}; {cost}"
        )
    if any(o.bound for o in outcomes):
        said.append(
            "(ref): min knows the future; the fluid bound is what no lossless policy can exceed. closed: the share of "
            "the misses that MIN saves over ar-lru; in time: of the time that the fluid bound saves"
        )
    cut = next((o for o in outcomes if o.cut), None)
    if cut and not job.source.window:
        said.append(f"other draft lengths: {job.source.view(SD, cut.draft_length).header.acceptance}")
    said += list(dict.fromkeys(f"{o.policy} {_bad(o)}" for o in outcomes if o.status != OK))
    for slots in sizes_of(outcomes):
        first, *rest = _size_lines(job, outcomes, slots)
        said += [
            f"{_share(slots, layers)} slots a layer: {first}",
            *(f"  {r}" for r in rest),
        ]
    return said


def _bad(o: Outcome) -> str:
    return o.status if o.failed else f"has the status {o.status}: its numbers are not those of a working cache"


def _size_lines(job: Job, outcomes: Sequence[Outcome], slots: int) -> list[str]:
    best = winner(outcomes, slots)
    if best is None:
        return ["no winner, for no policy ran with the status ok"]
    said = [f"{best.policy} wins with {MODES[best.mode]} decoding, {best.speed:.1f} tokens/s{_lead(outcomes, best)}"]
    verdict = next((v for v in verdicts(outcomes) if (v.policy, v.size) == (best.policy, slots)), None)
    if verdict:
        said.append(verdict.words())
    elif not job.source.speculates:
        said.append("no verdict on speculation, the trace has no drafts; assume some with --window 4 --acceptance 0.7")
    label = str(best.metrics["bottleneck"])
    milliseconds = best.metrics[f"gpu_{label}_ms_per_token"]
    said.append(f"bottleneck: {BOTTLENECKS[label]}, {milliseconds:.2f} of {1e3 / best.speed:.2f} ms a token")
    return said


def _lead(outcomes: Sequence[Outcome], best: Outcome) -> str:
    others = [o for o in outcomes if o.size == best.size and o.policy != best.policy and not (o.reference or o.cut)]
    second = max(others, key=lambda o: o.speed, default=None)
    return f", {best.speed / second.speed:.2f}x the next, {second.policy}" if second and second.speed else ""


def show(job: Job, name: str, outcomes: Sequence[Outcome], layers: int, wide: bool = False, width: int = 100) -> None:
    """Tables and lines on the terminal. The main table fits into `width` columns; `wide` leaves it whole and adds a
    second one."""
    rows = table_rows(outcomes, layers)
    of = "speculative runs (SD)" if any(o.mode == SD for o in outcomes) else "plain runs (AR)"
    title = f"{name} on {job.machine.name}, decode; hits and bytes of the {of}"
    show_table(title, rows if wide else fitted(rows, width))
    if wide:
        show_table(f"More of the {of}", more_rows(outcomes, layers))
    show_table("Decode tokens/s by draft length K", length_rows(outcomes, layers))
    for line in lines(job, name, outcomes, layers):
        say(line)
    warn_of(outcomes)


def warn_of(outcomes: Sequence[Outcome]) -> None:
    """One line on stderr for every status but "ok" that is not a failure: rows that look like results and are none."""
    for status in dict.fromkeys(o.status for o in outcomes if o.status != OK and not o.failed):
        slots = sorted({o.slots for o in outcomes if o.status == status})
        warn(f"{status}: the numbers of {_list(slots)} slots in all are not those of a working cache ({WHY[status]})")


def _list(values: Sequence[int]) -> str:
    return " and ".join([", ".join(map(str, values[:-1]))] * (len(values) > 1) + [str(values[-1])])


def metrics_document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All numbers: `runs` (their names: `definitions.METRICS`), `bounds`, `verdicts`, `winners`. The same inputs give
    the same bytes."""
    winners = [(size, winner(outcomes, size)) for size in sizes_of(outcomes)]
    bounds = {(o.size, o.mode): o.bound for o in outcomes if o.bound}
    return {
        "runs": [_about(o) | o.metrics for o in outcomes],
        "bounds": [{"size": size, "mode": mode, **asdict(b)} for (size, mode), b in bounds.items()],
        "verdicts": [asdict(v) | {"best_draft_length": v.best_draft_length} for v in verdicts(outcomes)],
        "winners": [
            {"size": size, "slots": w.slots, "policy": w.policy, "mode": w.mode, "tokens_per_s": w.speed}
            for size, w in winners
            if w
        ],
    }


def _about(o: Outcome) -> dict[str, Any]:
    names = ("policy", "slots", "mode", "draft_length", "cut", "status", "reference", "lossless")
    return {n: getattr(o, n) for n in names}


def run_document(job: Job, trace: str, outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """All inputs as resolved, with versions and the trace's hash, and how every run ended."""
    path = getattr(job.source.trace, "path", None)
    taken = {n: getattr(job.source, n) for n in ("limit", "window", "acceptance", "seed")}
    taken["draft"] = asdict(job.source.draft) if job.source.draft else None
    return {
        "command": command,
        "trace": {
            "name": trace,
            "sha256": sha256(path) if path else None,
            "header": job.source.trace.header.to_dict(),
            "taken": taken,
        },
        "machine": {
            "name": job.machine.name,
            "title": job.machine.title,
            "quantities": {entry: asdict(q) for entry, q in job.machine.quantities.items()},
        },
        "seed": job.seed,
        "protect_decode": job.protect,
        "loads": {mode: asdict(load) for mode, load in job.loads.items()},
        "versions": versions(),
        "runs": [_about(o) for o in outcomes],
    }


def versions() -> dict[str, str]:
    names = ("moe-spac", "numpy", "pyarrow", "simpy")
    return {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_steps(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Every step of every run as a row: the run, the step's counts, and its time by resource in ns."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        done = [o for o in outcomes if not o.failed]
        names = list(done[0].steps) if done else []
        writer.writerow(["policy", "slots", "mode", "draft_length", "step", *names])
        for o in done:
            kinds = [str(KINDS[k]) for k in o.steps["kind"].tolist()]
            columns = [kinds if name == "kind" else o.steps[name].tolist() for name in names]
            for step, row in enumerate(zip(*columns, strict=True)):
                writer.writerow([o.policy, o.slots, o.mode, o.draft_length, step, *row])


def write_layers(path: Path, outcomes: Sequence[Outcome], moe_layers: tuple[int, ...]) -> None:
    """Every MoE layer of every run as a row: the run, and decode's counts and times in that layer."""
    with path.open("w", newline="") as file:
        writer: Any = None
        for o in outcomes:
            if o.failed:
                continue
            assignments = round(o.metrics["assignments"] / len(moe_layers))
            for row in layer_rows(o.layers, assignments, moe_layers):
                row = {"policy": o.policy, "slots": o.slots, "mode": o.mode, "draft_length": o.draft_length, **row}
                if writer is None:
                    writer = csv.DictWriter(file, list(row))
                    writer.writeheader()
                writer.writerow(row)


def write_run(
    folder: Path,
    job: Job,
    trace: str,
    outcomes: Sequence[Outcome],
    command: str,
    draw: Callable[[Path], None] | None = None,
) -> list[Path]:
    """Write the run folder; `draw` adds plots. Files appear when all are complete, so that an interrupt leaves none.

    InputError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be written ({error.strerror}); give another folder") from None
    try:
        (hidden / "run.json").write_text(_json(run_document(job, trace, outcomes, command)))
        (hidden / "metrics.json").write_text(_json(metrics_document(outcomes)))
        write_steps(hidden / "steps.csv", outcomes)
        write_layers(hidden / "layers.csv", outcomes, job.source.trace.header.target.moe_layers)
        if draw:
            draw(hidden)
        written = sorted(hidden.iterdir())
        for path in written:
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return [folder / path.name for path in written]


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def choice(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The winner to save: the fastest of all cache sizes."""
    best = [w for slots in sizes_of(outcomes) if (w := winner(outcomes, slots))]
    return max(best, key=lambda o: o.speed, default=None)
