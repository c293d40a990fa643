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

from ..traces.console import say, show_table
from ..traces.errors import InputError
from ..traces.schema import Header, Provenance
from .compare import AR, SD, Job, Outcome, verdicts, winner
from .metrics import BOTTLENECKS, KINDS, OK

MODES = {SD: "speculative", AR: "plain"}


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
    return list(dict.fromkeys(o.slots for o in outcomes))


def names_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Policies in the order of the comparison, references last."""
    return [o.policy for o in sorted({o.policy: o for o in outcomes}.values(), key=lambda o: o.reference)]


def table_rows(outcomes: Sequence[Outcome], layers: int) -> list[dict[str, Any]]:
    """One row for each cache size and policy. Hits, bytes and waits are of the speculative run where there is one."""
    rows = []
    for slots in sizes_of(outcomes):
        for policy in names_of(outcomes):
            runs = {o.mode: o for o in outcomes if (o.policy, o.slots) == (policy, slots)}
            if runs:
                rows.append(_row(policy, slots / layers, runs))
    return rows


def _row(policy: str, share: float, runs: Mapping[str, Outcome]) -> dict[str, Any]:
    main = runs.get(SD) or runs[AR]
    bad = [o.status for o in runs.values() if o.status != OK]
    m: Mapping[str, Any] = {} if bad else main.metrics
    sd, ar = ((runs[mode].speed or None) if mode in runs and not bad else None for mode in (SD, AR))
    return {
        "policy": f"{policy} (reference)" if main.reference else policy,
        "slots/layer": Number(share, 0 if share.is_integer() else 1),
        "status": bad[0].split(":")[0] if bad else OK,
        "SD tok/s": _number(sd, 1),
        "AR tok/s": _number(ar, 1),
        "SD/AR": _number(sd / ar if sd and ar else None, 2, "x"),
        "hit": _number(m.get("hit_rate_assignment"), 3),
        "hit unique": _number(m.get("hit_rate_unique"), 3),
        "MB/token": _number(m.get("h2d_bytes_per_token"), 2, scale=1e-6),
        "copy wait": _share(m, "wait_copy"),
        "CPU wait": _share(m, "wait_cpu"),
        "to optimum": _number(m.get("gap_to_optimum"), 3),
    }


def _share(m: Mapping[str, Any], label: str) -> Number | None:
    """Share of decode time that the GPU's timeline spends on one thing."""
    part = m.get(f"gpu_{label}_ms_per_token")
    return None if part is None else Number(part * m["tokens_per_s"] / 10, 0, " %")


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
        said.append(
            f"assumed speculation: draft length {job.source.window}, each drafted token accepted with probability "
            f"{job.source.acceptance:g}; no draft ran, so drafting itself costs nothing here"
        )
    said += list(dict.fromkeys(f"{o.policy} {_bad(o)}" for o in outcomes if o.status != OK))
    for slots in sizes_of(outcomes):
        first, *rest = _size_lines(job, outcomes, slots)
        said += [
            f"{Number(slots / layers, 0 if slots % layers == 0 else 1)} slots a layer: {first}",
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
    verdict = next((v for v in verdicts(outcomes) if (v.policy, v.slots) == (best.policy, slots)), None)
    if verdict:
        said.append(verdict.words())
    elif not job.source.speculates:
        said.append("no verdict on speculation, the trace has no drafts; assume some with --window 4 --acceptance 0.7")
    label = str(best.metrics["bottleneck"])
    milliseconds = best.metrics[f"gpu_{label}_ms_per_token"]
    said.append(f"bottleneck: {BOTTLENECKS[label]}, {milliseconds:.2f} of {1e3 / best.speed:.2f} ms a token")
    return said


def _lead(outcomes: Sequence[Outcome], best: Outcome) -> str:
    others = [o for o in outcomes if o.slots == best.slots and o.policy != best.policy and not o.reference]
    second = max(others, key=lambda o: o.speed, default=None)
    return f", {best.speed / second.speed:.2f}x the next, {second.policy}" if second and second.speed else ""


def show(job: Job, name: str, outcomes: Sequence[Outcome], layers: int) -> None:
    rows = table_rows(outcomes, layers)
    modes = {o.mode for o in outcomes}
    of = "speculative runs (SD)" if SD in modes else "plain runs (AR)"
    show_table(f"{name} on {job.machine.name}, decode; hits, bytes and waits of the {of}", rows)
    for line in lines(job, name, outcomes, layers):
        say(line)


def metrics_document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All numbers: `runs`, `verdicts`, `winners`. The same inputs give the same bytes."""
    winners = [(slots, winner(outcomes, slots)) for slots in sizes_of(outcomes)]
    return {
        "runs": [
            {
                "policy": o.policy,
                "slots": o.slots,
                "mode": o.mode,
                "status": o.status,
                "reference": o.reference,
                "lossless": o.lossless,
                **o.metrics,
            }
            for o in outcomes
        ],
        "verdicts": [asdict(v) for v in verdicts(outcomes)],
        "winners": [
            {"slots": slots, "policy": w.policy, "mode": w.mode, "tokens_per_s": w.speed} for slots, w in winners if w
        ],
    }


def run_document(job: Job, trace: str, outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """All inputs as resolved, with versions and the trace's hash, and how every run ended."""
    path = getattr(job.source.trace, "path", None)
    taken = {n: getattr(job.source, n) for n in ("limit", "window", "acceptance", "seed")}
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
        "loads": {mode: asdict(load) for mode, load in job.loads.items()},
        "versions": versions(),
        "runs": [{"policy": o.policy, "slots": o.slots, "mode": o.mode, "status": o.status} for o in outcomes],
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
        writer.writerow(["policy", "slots", "mode", "step", *names])
        for o in done:
            kinds = [str(KINDS[k]) for k in o.steps["kind"].tolist()]
            columns = [kinds if name == "kind" else o.steps[name].tolist() for name in names]
            for step, row in enumerate(zip(*columns, strict=True)):
                writer.writerow([o.policy, o.slots, o.mode, step, *row])


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
