"""`spac-sim fit`: what of a model fits on a machine, and how fast it will be. Offline and instant."""

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..traces.console import parse_size, warn
from ..traces.errors import InputError

if TYPE_CHECKING:
    from .cards import Box
    from .fit import Plan
    from .fit_speed import Drafting, Sample
    from .ranges import Profile

POLICIES = ("ar-lru", "static", "hybrimoe", "moe-spac")


def fit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known model's name, a config.json or its folder.")],
    vram: Annotated[str | None, typer.Option(metavar="SIZE", help="Card memory to use. Default: all of it.")] = None,
    ram: Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory.")] = None,
    ctx: Annotated[int, typer.Option(min=1, help="Tokens of context to hold.")] = 4096,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="A drafting model, as MODEL.")] = None,
    machine: Annotated[
        str, typer.Option(metavar="NAME", help="A preset, a profile's file, or any other card's name.")
    ] = "rtx4090-pcie4",
    quant: Annotated[
        str, typer.Option(metavar="FORMAT", help="published, or one for all weights: bf16, q8, q4, 4.5bit.")
    ] = "published",
    kv: Annotated[Literal["fp16", "q8_0"], typer.Option(help="Format of keys and values.")] = "fp16",
    platform: Annotated[Literal["linux", "windows"], typer.Option(help="Windows charges pins to the card.")] = "linux",
    pin: Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory to pin. Default: all experts.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Slots per layer. Default: as many as fit.")] = None,
    reserved: Annotated[str | None, typer.Option(metavar="SIZE", help="For driver, desktop and workspace.")] = None,
    headroom: Annotated[str | None, typer.Option(metavar="SIZE", help="Card memory that is to stay free.")] = None,
    gpu_bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help="The card's memory, as on its box.")] = None,
    link: Annotated[str | None, typer.Option(metavar="LINK", help='"gen4 x16", or its raw rate.')] = None,
    ram_bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help="Host memory, as on its box.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="As in run; repeat for more.")] = None,
    draft_length: Annotated[int, typer.Option(min=1, help="Tokens drafted at a time.")] = 4,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Chance that a drafted token is accepted.")] = 0.7,
    trace: Annotated[str | None, typer.Option(metavar="T", help="Routing to time with. Default: synthetic.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens (of a trace: steps) to time with. Default: a second of work."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of synthetic routing and of policies.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """What of a model fits: slots, host memory, draft, what limits, and the speed to expect with each policy."""
    from .cards import Box
    from .fit import Wanted, plan
    from .fit_report import Report, show_document, show_plan, show_speeds
    from .fit_speed import Drafting, speeds
    from .sizing import find_size, format_for

    box = Box(size_of("--vram", vram), gpu_bandwidth, link, ram_bandwidth)
    profile = with_taken(profile_for(machine, box), {"gpu.reserved": reserved, "gpu.headroom": headroom})
    size = find_size(model, "MODEL")
    wanted = Wanted(
        model=size,
        form=format_for(quant, size),
        vram=box.vram or round(profile.machine["gpu.vram"]),
        context=ctx,
        ram=size_of("--ram", ram),
        draft=find_size(draft, "--draft") if draft else None,
        kv=kv,
        platform=platform,
        pin=size_of("--pin", pin),
        slots=slots,
    )
    report = Report(plan(wanted, profile.machine), profile, Drafting(draft_length, acceptance))
    if not json:
        show_plan(report)
    if report.plan.slots:
        report.sample = sample_for(report.plan, trace, tokens, seed, report.drafting)
        with progress() as tell:
            found = speeds(report.plan, profile, report.sample, policy or POLICIES, seed, tell)
        report.speeds, report.verdicts = found
    (show_document if json else show_speeds)(report)
    return 1 if report.plan.problems else 0


def size_of(flag: str, text: str | None) -> int | None:
    """Bytes, None where not given. A bare number is refused: it would be taken for bytes."""
    if text is None:
        return None
    if text.strip().replace(".", "", 1).isdigit():
        raise InputError(f"{flag} {text}: bytes? give a unit, for example {flag} {text.strip()}GiB")
    return parse_size(text, flag)


def profile_for(name: str, box: "Box") -> "Profile":
    """The machine by name, with what its box says. A name that is neither preset nor file is an uncalibrated card."""
    from .cards import adapted, missing, uncalibrated
    from .machine import load_machine, machine_names

    if name in machine_names() or name.endswith(".toml") or "/" in name or Path(name).is_file():
        return adapted(load_machine(name), box)
    near = difflib.get_close_matches(name.lower().replace(" ", ""), machine_names(), n=3, cutoff=0.5)
    presets = f"; presets near that name: {', '.join(near)}" if near else ""
    if box.vram is None:
        raise InputError(f"--machine {name}: no preset or file; give that card's --vram{presets}")
    narrower = f"; {', '.join(missing(box))} would narrow the range" if missing(box) else ""
    warn(f"--machine {name}: no preset or file, so it is an uncalibrated card{narrower}{presets}")
    return uncalibrated(name, box)


def with_taken(profile: "Profile", given: Mapping[str, str | None]) -> "Profile":
    """The profile with sizes that flags replace, by entry."""
    from .fit import with_entry

    machine = profile.machine
    for entry, text in given.items():
        flag = "--" + entry.split(".")[1]
        if (size := size_of(flag, text)) is not None:
            machine = with_entry(machine, entry, size, flag)
    return replace(profile, machine=machine)


def sample_for(p: "Plan", trace: str | None, tokens: int | None, seed: int, drafting: "Drafting") -> "Sample":
    from ..traces.reader import open_trace
    from .fit_speed import enough_tokens, synthetic_sample, traced_sample

    tokens = tokens or enough_tokens(p)
    if trace is None:
        return synthetic_sample(p, tokens, seed, drafting)
    return traced_sample(open_trace(trace), trace, p, tokens, drafting, seed)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Which run of how many is going on, on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("timing")
        yield lambda name, done, total: bar.update(task, description=f"timing {name}", completed=done, total=total)
