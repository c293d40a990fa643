"""`spac-sim ablate`: a policy with its parts switched off."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import say, show_json, show_table
from ..traces.errors import InputError
from .cli_run import DEFAULT_MACHINE, AsJson, progress_bar, source_for

if TYPE_CHECKING:
    from .ablate import Row, Study

Forecast = Annotated[
    str | None,
    typer.Option(metavar="P[,P…]", help="Assume next-gate forecasts: chance of being right 1, 2, … layers ahead."),
]


def ablate(
    trace: Annotated[str, typer.Argument(metavar="T", help="A trace file, or a bundled trace's name.")],
    policy: Annotated[str, typer.Option(help="moe-spac or hybrimoe, with parameters as in run.")] = "moe-spac",
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
    seed: Annotated[int, typer.Option(help="Seed of policies and of what is assumed.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side; results are the same.")] = 1,
    json: AsJson = False,
) -> int:
    """Run a policy with its parts switched off, one arm a row, beside the published factors where there are any."""
    from ..traces.reader import open_trace
    from .ablate import ablate as run_arms
    from .ablate import document, study_of
    from .cli_run import modes_for
    from .cli_sizes import sizes_for
    from .compare import Job, loads_for
    from .foretold import foretold
    from .machine import load_machine
    from .report import provenance

    study = study_of(policy)
    profile = load_machine(machine)
    opened = open_trace(trace)
    source = source_for(foretold(opened, forecast, seed), limit_steps, window, acceptance, seed, draft)
    how = modes_for(mode or ("sd" if source.speculates else "ar"), source)[0]
    job = Job(source, profile, loads_for(source, [how]), seed)
    sizes, _ = sizes_for(slots, cache_fraction, None, job, [], how)
    if len(sizes) != 1:
        raise InputError("--slots, --cache-fraction: give one cache size")
    arms = len({str(sorted(arm.switches.items())) for arm in study.arms})
    with progress_bar("replaying", job.loads[how].steps * arms) as progress:
        rows = run_arms(job, policy, sizes[0], how, jobs, progress)
    header = source.trace.header
    origin = f"{provenance(header, trace)}; simulated machine {profile.name}, {sizes[0]} slots in all, {how} mode"
    if json:
        show_json({"origin": origin, "notes": header.notes, "published": study.source, "arms": document(rows)})
    else:
        tell(study, rows, origin, header.notes, deaf=not header.lookahead and study.policy == "hybrimoe")
    return 1 if all(row.outcome.failed for row in rows) else 0


def tell(study: "Study", rows: "list[Row]", origin: str, notes: str, deaf: bool) -> None:
    show_table(f"Parts of {study.policy}", table(rows))
    say(origin)
    if notes:
        say(notes)
    say(f"published: {study.source}")
    if deaf:
        say("the trace has no next-gate forecasts, so that nothing is prefetched; assume some with --forecast 0.8,0.7")
    for row in rows:
        if row.outcome.status != "ok":
            say(f"{row.arm.name} {row.outcome.status}")


def table(rows: "list[Row]") -> list[dict[str, Any]]:
    """Columns that would be empty in every row are left out."""
    from .tables import Number

    def number(value: float | None, digits: int) -> Number | None:
        return None if value is None else Number(value, digits)

    found = []
    for row in rows:
        m = row.outcome.metrics
        moved = m.get("h2d_bytes_per_token")
        found.append(
            {
                "arm": row.arm.name,
                "what": row.arm.about,
                "tok/s": number(m.get("tokens_per_s"), 2),
                "hit": number(m.get("hit_rate_assignment"), 3),
                "on CPU": number(m.get("cpu_share_unique"), 3),
                "MB/token": number(None if moved is None else moved / 1e6, 1),
                "x full": number(row.to_full, 3),
                "x none": number(row.to_base, 2),
                "published": number(row.arm.published, 2),
            }
        )
    return [{k: v for k, v in row.items() if any(r[k] is not None for r in found)} for row in found]
