"""`spac-sim planning`: what each policy's decisions cost."""

from typing import Annotated, Any

import typer

from ..traces.console import say, show_json, show_table
from ..traces.errors import InputError
from .cli_run import DEFAULT_MACHINE, AsJson, progress_bar
from .cli_sizes import sizes_for


def planning(
    trace: Annotated[
        str | None, typer.Argument(metavar="[T]", help="A trace; without: synthetic, 48 x 128 top-8, 9-token verifies.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="As in run; repeat for more. Default: all.")] = None,
    machine: Annotated[str, typer.Option(help="Whose costs the policies plan with.")] = DEFAULT_MACHINE,
    slots: Annotated[str | None, typer.Option(metavar="N", help="Expert slots per layer.")] = None,
    cache_fraction: Annotated[
        str | None, typer.Option(metavar="F", help="Slots as a share of all experts. Default 0.17.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to replay.")] = 12,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Replays of each policy, of which the cheapest is shown. Default 10; without --policy 2."
        ),
    ] = None,
    json: AsJson = False,
) -> int:
    """Measure the CPU time that policies take to decide, on this machine, beside what the simulator charges."""
    from ..policies.load import load_policy, policy_names
    from ..traces.reader import open_trace
    from .compare import Job, Source
    from .machine import load_machine
    from .metrics import Limited
    from .planning import SHAPE, planning_trace
    from .planning import planning as measure

    repeats = repeats or (10 if policy else 2)
    specs = list(dict.fromkeys(policy or sorted(policy_names())))
    for spec in specs:
        load_policy(spec)
    profile = load_machine(machine)
    taken = Limited(open_trace(trace) if trace else planning_trace(steps * 9), steps)
    sizes, _ = sizes_for(slots, cache_fraction, None, Job(Source(taken), profile, {}), [])
    if len(sizes) != 1:
        raise InputError("--slots, --cache-fraction: give one cache size")
    with progress_bar("measuring", len(specs)) as progress:
        found = measure(specs, taken, profile, sizes[0], repeats, progress)
    charged = profile["policy.layer"] / 1e3
    about = f"{trace or SHAPE}; {steps} steps, {sizes[0]} slots in all, planning for {profile.name}"
    if json:
        rows = [{"policy": f.policy, "us_per_layer": f.total, "by_call": f.us, "error": f.error} for f in found]
        show_json({"about": about, "least_of_replays": repeats, "charged_us_per_layer": charged, "policies": rows})
    else:
        show_table("us of CPU time a layer, in Python on this machine", [_row(f) for f in found])
        say(f"{about}; the least of {repeats} replays each. Other work on this machine makes them dearer.")
        say(f"the simulator charges {charged:g} us a layer for every policy (policy.layer of {profile.name})")
        for f in found:
            if f.error:
                say(f"{f.policy}: failed: {f.error}")
    return 1 if all(f.error for f in found) else 0


def _row(found: Any) -> dict[str, Any]:
    from .planning import ASKED
    from .tables import Number

    if found.us is None:
        return {"policy": found.policy} | dict.fromkeys([*ASKED, "rest", "all"])
    calls = {call: Number(found.us.get(call, 0.0), 1) for call in ASKED}
    return {"policy": found.policy, **calls, "rest": Number(found.rest, 1), "all": Number(found.total, 1)}
