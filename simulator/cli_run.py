"""`spac-sim run`: compare policies on a trace."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import parse_size, room, say, show_json
from ..traces.errors import InputError
from .cli_sizes import PAPER_FRACTION, sizes_for

if TYPE_CHECKING:
    from ..policies.interface import Policy
    from ..traces.schema import DraftShape
    from .compare import Job, Outcome, Source

DEFAULT_POLICIES = ("ar-lru", "hybrimoe", "moe-spac", "static")
DEFAULT_MACHINE = "rtx4090-pcie4"

FIGURES = ("speed", "slots", "time", "lengths")  # that every run draws; the others are for spac-sim plot

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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
    kv_grows: Annotated[
        bool, typer.Option("--kv-grows", help="With --vram: keys and values take slots as the text gets longer.")
    ] = False,
    mode: Annotated[str, typer.Option(help="sd (as recorded), ar (without speculation) or both.")] = "both",
    draft_lengths: Annotated[
        str | None,
        typer.Option(metavar="K[,K…]", help="Try these for every policy. Without: 1,2,4,8 for the winner."),
    ] = None,
    limit_steps: Annotated[int, typer.Option(min=0, help="Only the first N steps of the trace; 0: all.")] = 0,
    window: Annotated[int, typer.Option(min=0, help="Assume a draft of K tokens on a trace without one.")] = 0,
    acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="With --window: chance that a drafted token is accepted.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --window: whose drafting is charged, e.g. Qwen3-0.6B.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that are decoded at once.")] = 1,
    protect_decode: Annotated[
        bool, typer.Option("--protect-decode", help="Prefill copies experts, use them once and leave the cache alone.")
    ] = False,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Also run policies that change the model's output.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of policies and of assumed acceptance.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of results. Default runs/TRACE-MACHINE.")] = None,
    save_winner: Annotated[Path | None, typer.Option(metavar="W.toml", help="Write the winner's policy file.")] = None,
    json: AsJson = False,
    wide: Annotated[bool, typer.Option("--wide", help="All columns, in several tables.")] = False,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw plots into the folder of results.")] = True,
    optimum: Annotated[
        bool, typer.Option("--optimum/--no-optimum", help="Add the references: offline optimum, AR-LRU, fluid bound.")
    ] = True,
    regret: Annotated[bool, typer.Option("--regret", help="Also judge every eviction by the future; slow.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what the winner does when, for ui.perfetto.dev.")
    ] = None,
    timeline_steps: Annotated[int, typer.Option(min=1, help="With --timeline: only the first N steps.")] = 32,
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
    loaded = {spec: load_policy(spec, allow_lossy) for spec in specs}
    profile = load_machine(machine)
    opened = open_trace(trace, strict)
    warn_if_unfinished(opened)
    source = source_for(opened, limit_steps, window, acceptance, seed, draft, batch)
    modes = modes_for(mode, source)
    lengths = lengths_for(draft_lengths, modes)
    loads = loads_for(source, modes)
    if not any(load.decodes for load in loads.values()):
        raise InputError(f"{trace}: no decode steps among those taken; give a longer trace or a larger --limit-steps")
    job = Job(source, profile, loads, seed, protect_decode, regret, bounded=optimum, occupancy=True)
    sizes, words = sizes_by_mode(slots, cache_fraction, vram, job, list(loaded.values()), modes, kv_grows)
    if kv_grows:
        job = replace(
            job, vram=parse_size(vram or "", "--vram"), pooled=any(p.scope == "global" for p in loaded.values())
        )
    cases = cases_for(specs, sizes, modes, optimum)
    with progress_bar("replaying", sum(loads[c.mode].steps for c in cases)) as progress:
        outcomes = run_cases(job, cases, jobs, progress)
    outcomes += other_lengths(job, outcomes, lengths, modes, jobs)
    name = Path(trace).stem
    folder = out or Path("runs") / f"{name}-{profile.name}"
    command = command_of(ctx)
    written = write(folder, job, name, outcomes, command, plots)
    saved = [save(save_winner, loaded, job, trace, outcomes, command)] if save_winner else []
    if timeline:
        saved.append(save_timeline(timeline, job, outcomes, timeline_steps, command))
    if json:
        tell_json(outcomes)
    else:
        tell(job, name, outcomes, wide, [*words, *told(folder, written, plots, saved, len(sizes))])
    return exit_code(outcomes, strict)


def source_for(
    trace: Any, limit: int, window: int, acceptance: float | None, seed: int, draft: str | None = None, batch: int = 1
) -> "Source":
    """Which steps to take. InputError for --window without --acceptance, the reverse, or on a trace with drafts."""
    from .compare import Source

    if (window > 0) != (acceptance is not None):
        raise InputError("--window and --acceptance go together: give both, for example --window 4 --acceptance 0.7")
    if window and trace.header.acceptance != "none":
        raise InputError(f"--window: {trace.path} has recorded drafts; leave --window out, or use --mode ar")
    if draft and not window:
        raise InputError("--draft: says what drafting costs that --window assumes; give --window and --acceptance too")
    return Source(trace, limit, window, acceptance or 0.0, seed, _draft_shape(draft) if draft else None, batch)


def _draft_shape(name: str) -> "DraftShape":
    from .sizing import find_size

    return find_size(name, "--draft").as_draft()


def modes_for(mode: str, source: "Source") -> list[str]:
    if mode not in ("both", "sd", "ar"):
        raise InputError(f"--mode {mode}: unknown; choose both, sd or ar")
    if not source.speculates:
        if mode == "sd":
            raise InputError("--mode sd: the trace has no drafts; use --mode ar, or --window 4 --acceptance 0.7")
        return ["ar"]
    return ["sd", "ar"] if mode == "both" else [mode]


def lengths_for(text: str | None, modes: Sequence[str]) -> list[int] | None:
    """The draft lengths asked for; None: nobody asked. InputError for what is no list, or without speculation."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--draft-lengths {text}: not a list of whole numbers; write for example 0,1,2,4,8")
    if "sd" not in modes:
        raise InputError("--draft-lengths: nothing is drafted here; use --mode both, and --window on a plain trace")
    return [int(part) for part in parts]


def sizes_by_mode(
    slots: str | None,
    fraction: str | None,
    vram: str | None,
    job: "Job",
    policies: "Sequence[Policy]",
    modes: Sequence[str],
    kv_grows: bool = False,
) -> tuple[list[dict[str, int]], list[str]]:
    """For every cache size the slots of each mode, which --vram gives more of to plain decoding; and lines to say.

    kv_grows: slots before the first token; InputError without --vram.
    """
    if kv_grows and not vram:
        raise InputError("--kv-grows: says how --vram is shared; give --vram too")
    context = 0 if kv_grows else None
    found = {mode: sizes_for(slots, fraction, vram, job, policies, mode, context) for mode in modes}
    sizes = [
        dict(zip(modes, each, strict=True)) for each in zip(*(totals for totals, _ in found.values()), strict=True)
    ]
    return sizes, [f"{mode.upper()} {words}" for mode, (_, words) in found.items() if words]


def other_lengths(
    job: "Job", outcomes: "Sequence[Outcome]", lengths: Sequence[int] | None, modes: Sequence[str], jobs: int
) -> "list[Outcome]":
    """Runs at other draft lengths: those asked for with all policies, else the usual ones with the winner alone."""
    from .compare import LENGTHS, length_cases, loads_of, run_cases
    from .report import choice

    best = choice(outcomes)
    if lengths is None and (best is None or len(modes) < 2):
        return []
    if lengths is None:
        recorded = {o.draft_length for o in outcomes}
        cases = length_cases(outcomes, [n for n in LENGTHS if n not in recorded], best)
    else:
        cases = length_cases(outcomes, lengths)
    job = replace(job, loads=loads_of(job.source, cases), bounded=False, occupancy=False)
    with progress_bar("other draft lengths", sum(job.loads[c.view].steps for c in cases)) as progress:
        return run_cases(job, cases, jobs, progress)


@contextmanager
def progress_bar(what: str, steps: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda done: bar.update(task, completed=done)


def write(folder: Path, job: "Job", name: str, outcomes: "Sequence[Outcome]", command: str, plots: bool) -> list[Path]:
    from .report import write_run

    def draw(where: Path) -> None:
        from .plots import draw_folder

        draw_folder(where, only=FIGURES)

    return write_run(folder, job, name, outcomes, command, draw if plots else None)


def save(
    path: Path, loaded: "dict[str, Policy]", job: "Job", trace: str, outcomes: "Sequence[Outcome]", command: str
) -> str:
    """Write the winner's policy file and say so; InputError if there is no winner or the file cannot be written."""
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
        "draft_length": best.draft_length,
        "tokens_per_s": best.speed,
        "command": command,
    }
    write_policy("--save-winner", path, loaded[best.policy], chosen)
    return f"{path}: {best.policy} with {chosen['slots_per_layer']:.3g} slots a layer, {best.mode} mode"


def save_timeline(path: Path, job: "Job", outcomes: "Sequence[Outcome]", steps: int, command: str) -> str:
    """Run the fastest policy (or the first, if none may win) again for its first steps, and write what its lanes do."""
    from ..policies.load import load_policy
    from .report import choice
    from .timeline import SIMULATED, write_timeline
    from .traced import spans_of

    chosen = choice(outcomes) or outcomes[0]
    trace = job.source.view(chosen.mode)
    more = {"protect": job.protect, "slots_at": job.slots_at(trace)}
    spans = spans_of(trace, load_policy(chosen.policy), job.machine, chosen.slots, steps, job.seed, **more)
    run = f"{chosen.policy}, {chosen.slots} slots, {chosen.mode}, first {steps} steps"
    write_timeline(path, {SIMULATED: spans}, {"run": run, "machine": job.machine.name, "command": command})
    return f"{path}: {len(spans)} spans of {run}; open it in ui.perfetto.dev"


def write_policy(flag: str, path: Path, policy: "Policy", chosen: dict[str, Any]) -> None:
    """Write a policy file, its folder too. InputError names the flag."""
    from ..policies.load import save_policy

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_policy(path, policy, chosen)
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def told(folder: Path, written: Sequence[Path], plots: bool, saved: Sequence[str], sizes: int) -> list[str]:
    said = [f"{folder}: {', '.join(p.name for p in written)}"]
    if plots and sizes == 1:
        said.append("give several sizes, as in --slots 6,10,16, for the plot against slots")
    said.append(f"more figures: spac-sim plot {folder}; a page that says what would help: spac-sim report {folder}")
    return [*said, *saved]


def tell(job: "Job", name: str, outcomes: "Sequence[Outcome]", wide: bool, more: Sequence[str]) -> None:
    from .report import show

    show(job, name, outcomes, len(job.source.trace.header.target.moe_layers), wide, room())
    for line in more:
        say(line)


def tell_json(outcomes: "Sequence[Outcome]") -> None:
    from .report import metrics_document, warn_of

    show_json(metrics_document(outcomes))
    warn_of(outcomes)


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
