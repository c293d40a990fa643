"""`spac-sim tune`: search a policy's parameters, judged on what was held out."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import say, show_json, show_table, warn
from ..traces.errors import InputError
from .cli_ablate import Forecast
from .cli_run import DEFAULT_MACHINE, AsJson, command_of, modes_for, progress_bar, source_for, write_policy

if TYPE_CHECKING:
    from .tune import Search, Tuned


def tune(
    ctx: typer.Context,
    trace: Annotated[str, typer.Argument(metavar="T", help="A trace file, or a bundled trace's name.")],
    policy: Annotated[str, typer.Option(help="name, with parameters to hold fixed, as in run.")],
    param: Annotated[
        list[str] | None, typer.Option(metavar="K=…", help="key=a,b,c or key=lo..hi:n; repeat for a grid.")
    ] = None,
    tries: Annotated[int, typer.Option(min=0, help="Draw so many settings from the grid; 0: all.")] = 0,
    train: Annotated[float, typer.Option(help="Share of the steps to search on; the rest is held out.")] = 0.5,
    metric: Annotated[str, typer.Option(help="What to maximise: tokens_per_s, hit_rate_unique.")] = "tokens_per_s",
    machine: Annotated[str, typer.Option(help="A preset (see machines) or a profile's file.")] = DEFAULT_MACHINE,
    slots: Annotated[str | None, typer.Option(metavar="N", help="Expert slots per layer.")] = None,
    cache_fraction: Annotated[
        str | None, typer.Option(metavar="F", help="Slots as a share of all experts. Default 0.17.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="sd or ar. Default: sd if there are drafts.")] = None,
    limit_steps: Annotated[int, typer.Option(min=0, help="Only the first N steps of the trace; 0: all.")] = 0,
    window: Annotated[int, typer.Option(min=0, help="Assume a draft of K tokens on a trace without one.")] = 0,
    acceptance: Annotated[float | None, typer.Option(min=0, max=1, help="With --window: a draft's chance.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="With --window: whose drafting counts.")] = None,
    forecast: Forecast = None,
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Also tune what changes the output.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of policies, of --tries and of what is assumed.")] = 0,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="W.toml", help="The winner's policy file.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side; results are the same.")] = 1,
    json: AsJson = False,
) -> int:
    """Search parameters on a training part of a trace; the result is what the winner does on the held-out part."""
    from ..policies.load import load_policy
    from ..traces.reader import open_trace
    from .cli_sizes import sizes_for
    from .compare import Job
    from .foretold import foretold
    from .machine import load_machine
    from .metrics import Limited
    from .report import provenance
    from .tune import Search, settings
    from .tune import tune as search_for

    load_policy(policy, allow_lossy)
    tried = settings(policy, param or [], tries, seed)
    profile = load_machine(machine)
    opened = open_trace(trace)
    source = source_for(foretold(Limited(opened, limit_steps), forecast, seed), 0, window, acceptance, seed, draft)
    how = modes_for(mode or ("sd" if source.speculates else "ar"), source)[0]
    sizes, _ = sizes_for(slots, cache_fraction, None, Job(source, profile, {}), [], how)
    if len(sizes) != 1:
        raise InputError("--slots, --cache-fraction: give one cache size")
    search = Search(source, profile, sizes[0], how, train, metric, seed)
    with progress_bar("tuning", 1000) as bar:
        tuned = search_for(search, policy, tried, jobs, _permille(bar))
    record = chosen(tuned, search, trace, command_of(ctx))
    if out is not None:
        write_policy("-o", out, load_policy(tuned.winner), record)
    if json:
        show_json(document(tuned, record))
        return 0
    tell(tuned, f"{provenance(opened.header, trace)}; simulated machine {profile.name}, {sizes[0]} slots in all, {how}")
    if out is not None:
        say(f"written: {out}")
    return 0


def _permille(bar: Callable[[int], None] | None) -> Callable[[int, int], None] | None:
    if bar is None:
        return None
    return lambda done, total: bar(done * 1000 // total)


def chosen(tuned: "Tuned", search: "Search", trace: str, command: str) -> dict[str, Any]:
    """How the winner was chosen, for its policy file."""
    shape = search.source.trace.header.target
    return {
        "trace": trace,
        "machine": search.machine.name,
        "slots": search.slots,
        "slots_per_layer": search.slots / len(shape.moe_layers),
        "mode": search.mode,
        "metric": tuned.metric,
        "settings_tried": len(tuned.tried),
        "held_out": tuned.parts[1],
        "held_out_score": tuned.held_out,
        "held_out_score_of_default": tuned.held_out_default,
        "default": tuned.policy,
        "training": tuned.parts[0],
        "training_score_not_a_result": tuned.training_score,
        "seed": search.seed,
        "command": command,
    }


def document(tuned: "Tuned", record: dict[str, Any]) -> dict[str, Any]:
    """For `--json`: the result, and apart from it what the search saw."""
    result = {
        "metric": tuned.metric,
        "held_out": tuned.held_out,
        "default": tuned.held_out_default,
        "gain": tuned.gain,
    }
    tried = [(tuned.policy, tuned.training_default), *zip(tuned.tried, tuned.training, strict=True)]
    search = [{"policy": policy, "training_score": score} for policy, score in tried]
    return {"winner": tuned.winner, "result": result, "chosen": record, "search": search}


def tell(tuned: "Tuned", origin: str) -> None:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    rows = [
        {"policy": tuned.winner, f"held out: {tuned.metric}": shown(tuned.held_out)},
        {"policy": f"{tuned.policy} (as it was)", f"held out: {tuned.metric}": shown(tuned.held_out_default)},
    ]
    show_table(f"{tuned.policy} tuned: {len(tuned.tried)} settings", rows)
    say(f"result, on the held-out part ({tuned.parts[1]}): {shown(tuned.gain)} times the score of {tuned.policy}")
    before = f"{shown(tuned.training_score)} against {shown(tuned.training_default)}"
    say(f"in training ({tuned.parts[0]}), which chose it and is no result: {before}")
    say(origin)
    if tuned.gain is not None and tuned.gain < 1:
        warn(f"the winner is worse than {tuned.policy} on the held-out part: the search found nothing that lasts")
