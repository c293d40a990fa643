"""`spac-sim`: replay a routing trace under several policies on the model of a machine."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import parse_size, run_app, say, show_json, show_table
from ..traces.errors import InputError
from .cli_sweep import sweep

if TYPE_CHECKING:
    from ..policies.interface import Policy
    from ..traces.schema import ModelShape
    from .compare import Job, Outcome, Source
    from .machine import Machine

app = typer.Typer(
    help="Replay a routing trace under several policies on the model of a machine.",
    no_args_is_help=True,
    add_completion=False,
)

DEFAULT_POLICIES = ("ar-lru", "hybrimoe", "moe-spac", "static")
DEFAULT_MACHINE = "rtx4090-pcie4"
PAPER_FRACTION = "0.17"  # of the experts on the GPU: the setting of the MoE-SpAc paper

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def run(
    ctx: typer.Context,
    trace: Annotated[str, typer.Argument(metavar="T", help="A trace file, or a bundled trace's name (gpt-oss-20b).")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="name, name:key=value,…, file.py:Class or a policy file; repeat to compare."),
    ] = None,
    machine: Annotated[str, typer.Option(help="A preset (see machines) or a profile's file.")] = DEFAULT_MACHINE,
    slots: Annotated[str | None, typer.Option(metavar="N[,N…]", help="Expert slots per layer.")] = None,
    cache_fraction: Annotated[
        str | None, typer.Option(metavar="F[,F…]", help=f"Slots as a share of all experts. Default {PAPER_FRACTION}.")
    ] = None,
    vram: Annotated[str | None, typer.Option(metavar="SIZE", help="Slots that fit in this, e.g. 12GiB.")] = None,
    mode: Annotated[str, typer.Option(help="sd (as recorded), ar (without speculation) or both.")] = "both",
    limit_steps: Annotated[int, typer.Option(min=0, help="Only the first N steps of the trace; 0: all.")] = 0,
    window: Annotated[int, typer.Option(min=0, help="Assume a draft of K tokens on a trace without one.")] = 0,
    acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="With --window: chance that a drafted token is accepted.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of policies and of assumed acceptance.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of results. Default runs/TRACE-MACHINE.")] = None,
    save_winner: Annotated[Path | None, typer.Option(metavar="W.toml", help="Write the winner's policy file.")] = None,
    json: AsJson = False,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw plots into the folder of results.")] = True,
    optimum: Annotated[bool, typer.Option("--optimum/--no-optimum", help="Add the offline optimum.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side; results are the same.")] = 1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 unless all runs are ok; refuse a cut trace.")
    ] = False,
) -> int:
    """Compare policies on a trace: speeds, hits, distance to the optimum, and whether speculation pays."""
    from ..policies.load import load_policy
    from ..traces.reader import open_trace
    from ..traces.report import warn_if_unfinished
    from .compare import Job, cases_for, loads_for, run_cases
    from .machine import load_machine

    specs = list(dict.fromkeys(policy or DEFAULT_POLICIES))
    loaded = {spec: load_policy(spec) for spec in specs}
    profile = load_machine(machine)
    opened = open_trace(trace, strict)
    warn_if_unfinished(opened)
    source = source_for(opened, limit_steps, window, acceptance, seed)
    modes = modes_for(mode, source)
    loads = loads_for(source, modes)
    if not any(load.decodes for load in loads.values()):
        raise InputError(f"{trace}: no decode steps among those taken; give a longer trace or a larger --limit-steps")
    job = Job(source, profile, loads, seed)
    totals, words = sizes_for(slots, cache_fraction, vram, job, list(loaded.values()))
    cases = cases_for(specs, totals, modes, optimum)
    with progress_bar(sum(loads[c.mode].steps for c in cases)) as progress:
        outcomes = run_cases(job, cases, jobs, progress)
    name = Path(trace).stem
    folder = out or Path("runs") / f"{name}-{profile.name}"
    command = command_of(ctx)
    written = write(folder, job, name, outcomes, command, plots)
    saved = save(save_winner, loaded, job, trace, outcomes, command) if save_winner else None
    tell(job, name, outcomes, json, [*([words] if words else []), *told(folder, written, plots, saved, totals)])
    return exit_code(outcomes, strict)


def source_for(trace: Any, limit: int, window: int, acceptance: float | None, seed: int) -> "Source":
    """Which steps to take. InputError for --window without --acceptance, the reverse, or on a trace with drafts."""
    from .compare import Source

    if (window > 0) != (acceptance is not None):
        raise InputError("--window and --acceptance go together: give both, for example --window 4 --acceptance 0.7")
    source = Source(trace, limit, window, acceptance or 0.0, seed)
    if window and trace.header.acceptance != "none":
        raise InputError(f"--window: {trace.path} has recorded drafts; leave --window out, or use --mode ar")
    return source


def modes_for(mode: str, source: "Source") -> list[str]:
    if mode not in ("both", "sd", "ar"):
        raise InputError(f"--mode {mode}: unknown; choose both, sd or ar")
    if not source.speculates:
        if mode == "sd":
            raise InputError("--mode sd: the trace has no drafts; use --mode ar, or --window 4 --acceptance 0.7")
        return ["ar"]
    return ["sd", "ar"] if mode == "both" else [mode]


def sizes_for(
    slots: str | None, fraction: str | None, vram: str | None, job: "Job", policies: "Sequence[Policy]"
) -> tuple[list[int], str]:
    """Cache sizes in slots over all layers, and for --vram the sum in words. InputError names the flag."""
    from .capacity import check_size

    shape = job.source.trace.header.target
    layers = len(shape.moe_layers)
    given = [flag for flag, text in (("--slots", slots), ("--cache-fraction", fraction), ("--vram", vram)) if text]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: give one of them")
    if vram:
        return _fitting(vram, job, shape, policies)
    if slots:
        totals = [int(n) * layers for n in _numbers("--slots", slots, whole=True)]
        flag = "--slots"
    else:
        flag = "--cache-fraction"
        parts = _numbers(flag, fraction or PAPER_FRACTION)
        totals = [max(round(part * layers * shape.experts), part > 0) for part in parts]
        if fraction is None:  # of few experts the paper's share may be less than one token needs
            totals = [max(totals[0], layers * shape.top_k)]
    for total in totals:
        check_size(flag, total, shape)
    return totals, ""


def _numbers(flag: str, text: str, whole: bool = False) -> list[float]:
    values: list[float] = [-1]
    with suppress(ValueError):
        values = [int(part) if whole else float(part) for part in text.split(",")]
    if not all(0 <= v < float("inf") for v in values):
        example = "6 or 6,10,16" if whole else "0.17 or 0.1,0.25,0.5"
        raise InputError(f"{flag} {text}: not a list of numbers of at least 0; write for example {example}")
    return values


def _fitting(vram: str, job: "Job", shape: "ModelShape", policies: "Sequence[Policy]") -> tuple[list[int], str]:
    from .capacity import check_size, fit_in

    budget = parse_size(vram, "--vram")
    context = max(load.context for load in job.loads.values())
    pooled = any(p.scope == "global" for p in policies)
    fit = fit_in(budget, job.machine, shape, job.source.trace.header.draft, context, pooled)
    check_size("--vram", fit.slots, shape)
    return [fit.slots], f"--vram: {fit.words}"


@contextmanager
def progress_bar(steps: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=steps)
        yield lambda done: bar.update(task, completed=done)


def write(folder: Path, job: "Job", name: str, outcomes: "Sequence[Outcome]", command: str, plots: bool) -> list[Path]:
    from .report import provenance, write_run

    layers = len(job.source.trace.header.target.moe_layers)

    def draw(where: Path) -> None:
        from .plots import draw_all

        assumed = f", assumed acceptance {job.source.acceptance:g}, drafting free" if job.source.window else ""
        origin = f"{provenance(job.source.trace.header, name)}{assumed}; machine {job.machine.name}"
        draw_all(where, outcomes, layers, origin)

    return write_run(folder, job, name, outcomes, command, draw if plots else None)


def save(
    path: Path, loaded: "dict[str, Policy]", job: "Job", trace: str, outcomes: "Sequence[Outcome]", command: str
) -> str:
    """Write the winner's policy file and say so; InputError if there is no winner or the file cannot be written."""
    from ..policies.load import save_policy
    from .report import choice

    best = choice(outcomes)
    if best is None:
        raise InputError(f"--save-winner {path}: no policy ran with the status ok, so there is no winner to save")
    shape = job.source.trace.header.target
    chosen = {
        "trace": trace,
        "machine": job.machine.name,
        "slots": best.slots,
        "slots_per_layer": best.slots / len(shape.moe_layers),
        "mode": best.mode,
        "tokens_per_s": best.speed,
        "command": command,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_policy(path, loaded[best.policy], chosen)
    except OSError as error:
        raise InputError(f"--save-winner {path}: cannot be written ({error.strerror})") from None
    return f"{path}: {best.policy} with {chosen['slots_per_layer']:.3g} slots a layer, {best.mode} mode"


def told(folder: Path, written: Sequence[Path], plots: bool, saved: str | None, totals: Sequence[int]) -> list[str]:
    said = [f"{folder}: {', '.join(p.name for p in written)}"]
    if plots and len(totals) == 1:
        said.append("give several sizes, as in --slots 6,10,16, for the plot against slots")
    return said + ([saved] if saved else [])


def tell(job: "Job", name: str, outcomes: "Sequence[Outcome]", json: bool, more: Sequence[str]) -> None:
    from .report import metrics_document, show

    if json:
        show_json(metrics_document(outcomes))
        return
    show(job, name, outcomes, len(job.source.trace.header.target.moe_layers))
    for line in more:
        say(line)


def exit_code(outcomes: "Sequence[Outcome]", strict: bool) -> int:
    """1 if nothing ran, or with `strict` if anything is not ok."""
    bad = [o for o in outcomes if o.status != "ok"]
    own = [o for o in outcomes if not o.reference] or outcomes
    return 1 if all(o.failed for o in own) or (strict and bad) else 0


def command_of(ctx: typer.Context) -> str:
    """The command line that gives this run again, without options at their defaults or of who does the work."""
    words = ["spac-sim", str(ctx.info_name)]
    for option in ctx.command.params:
        if option.name in ("jobs", "dask"):
            continue
        value = ctx.params.get(str(option.name))
        if option.param_type_name == "argument":
            words += map(str, value if isinstance(value, list | tuple) else [value])
        elif isinstance(value, bool) and value != option.default:
            words.append(option.opts[0] if value else (option.secondary_opts or option.opts)[0])
        elif value not in (None, [], option.default) and not isinstance(value, bool):
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0], str(one)]
    return shlex.join(words)


app.command("sweep")(sweep)


@app.command()
def machines(json: AsJson = False) -> None:
    """List the machine presets."""
    from .machine import load_machine, machine_names

    found = [load_machine(name) for name in machine_names()]
    if json:
        show_json([machine_row(m) | {"assumed": m.assumed} for m in found])
    else:
        show_table("Machine presets", [machine_row(m) for m in found])


def machine_row(m: "Machine") -> dict[str, Any]:
    return {
        "name": m.name,
        "title": m.title,
        "vram_gib": round(m["gpu.vram"] / 2**30, 1),
        "gpu_gb_per_s": m["gpu.bandwidth"] / 1e9,
        "link_gb_per_s": m["link.bandwidth"] / 1e9,
        "cpu_gb_per_s": m["cpu.bandwidth"] / 1e9,
        "assumed_entries": f"{len(m.assumed)} of {len(m.quantities)}",
    }


@app.command()
def policies(json: AsJson = False) -> None:
    """List the policies that can be named."""
    from ..policies.load import policy_names

    rows = [{"name": name, "about": about} for name, about in sorted(policy_names().items())]
    if json:
        show_json(rows)
    else:
        show_table("Policies", rows)


def main() -> None:
    run_app(app)
