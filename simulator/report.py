"""What a comparison says: a table and lines for people, documents and files for machines."""

import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..traces.console import say, show_table, warn
from ..traces.errors import InputError
from ..traces.schema import Header, Provenance
from .capacity import FITS, card_with
from .compare import AR, SD, Job, Outcome, verdicts, winner
from .metrics import BOTTLENECKS, INACTIVE, OK, TOO_FEW, UNROUTED
from .occupancy import need_shares, table_of
from .prefetch_metrics import layer_rows
from .steptimes import KINDS
from .tables import fitted, length_rows, more_rows, share_of, sizes_of, table_rows

MODES = {SD: "speculative", AR: "plain"}
WHY = {
    INACTIVE: "nothing was ever resident or copied",
    TOO_FEW: "one token needs more experts than a layer has slots",
    UNROUTED: "the trace has layers without routing",
}


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
            "(ref): min knows the future; the fluid bound, layer by layer, is what no lossless policy can exceed. "
            "closed: the share of the misses that MIN saves over ar-lru; in time: of the time that the bound saves"
        )
    cut = max((o.draft_length for o in outcomes if o.cut), default=0)
    if cut and not job.source.window:
        said.append(f"draft length {cut}: {job.source.view(SD, cut).header.acceptance}")
    said += list(dict.fromkeys(f"{o.policy} {_bad(o)}" for o in outcomes if o.status != OK))
    top_k = job.source.trace.header.target.top_k
    for slots in sizes_of(outcomes):
        first, *rest = _size_lines(job, outcomes, slots)
        said += [
            f"{share_of(slots, layers)} slots a layer ({slots / layers / top_k:.3g}x top-k): {first}",
            *(f"  {r}" for r in [*rest, *_beyond_the_card(job, outcomes, slots)]),
        ]
    return said


def _beyond_the_card(job: Job, outcomes: Sequence[Outcome], slots: int) -> list[str]:
    """A warning if slots that were asked for do not fit a real card beside everything else."""
    machine, header = job.machine, job.source.view(outcomes[0].mode).header
    if machine.quantities["gpu.vram"].basis == "emulated":
        return []
    context = max(load.context for load in job.loads.values())
    card = card_with(slots, machine, header.target, header.draft, context, job.pooled)
    return [] if card.status == FITS else [f"{card.status}: {card.words}"]


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
    if job.source.batch > 1:
        each = best.metrics["tokens_per_s_per_sequence"]
        said.append(f"up to {job.source.batch} sequences at once: {each:.1f} tokens/s for each of them")
    said.append(f"bottleneck: {BOTTLENECKS[label]}, {milliseconds:.2f} of {1e3 / best.speed:.2f} ms a token")
    return said


def _lead(outcomes: Sequence[Outcome], best: Outcome) -> str:
    others = [o for o in outcomes if o.size == best.size and o.policy != best.policy and not (o.reference or o.cut)]
    second = max(others, key=lambda o: o.speed, default=None)
    return f", {best.speed / second.speed:.2f}x the next, {second.policy}" if second and second.speed else ""


def show(job: Job, name: str, outcomes: Sequence[Outcome], layers: int, wide: bool = False, width: int = 80) -> None:
    """Tables and lines on the terminal. The main table leaves out what does not fit into `width` columns; `wide` shows
    all of it, and a second one."""
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
    names = ("policy", "size", "slots", "mode", "draft_length", "cut", "status", "reference", "lossless")
    return {n: getattr(o, n) for n in names}


def run_document(job: Job, trace: str, outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """All inputs as resolved, with versions and the trace's hash, and how every run ended."""
    path = getattr(job.source.trace, "path", None)
    taken = {n: getattr(job.source, n) for n in ("limit", "window", "acceptance", "seed", "batch")}
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


def write_residency(path: Path, job: Job, outcomes: Sequence[Outcome]) -> None:
    """Every expert of every run but those at other draft lengths; columns as in `occupancy.table_of`."""
    import pyarrow.parquet

    runs = [o for o in outcomes if not o.cut]
    needs = {mode: need_shares(job.source.view(mode)) for mode in dict.fromkeys(o.mode for o in runs)}
    pyarrow.parquet.write_table(table_of(runs, needs), path, compression="zstd")


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
        if job.occupancy:
            write_residency(hidden / "residency.parquet", job, outcomes)
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
