"""`spac-exec calibrate`: measure this machine."""

from pathlib import Path
from typing import Annotated

import typer

from ..traces.console import check_folder, measuring, starting
from ..traces.errors import InputError
from .cli_options import AsJson, Bandwidth, Latency, PairOptions, link_of, spread


@spread
def calibrate(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The profile to write (TOML).")],
    link_bandwidth: Bandwidth = "100MB/s",
    link_latency: Latency = "20us",
    rounds: Annotated[int, typer.Option(min=1, help="Of all measurements; medians over them, and their spread.")] = 3,
    json: AsJson = False,
    *,
    pair: PairOptions,
) -> None:
    """Measure this machine for a pair of models and write a machine profile for spac-sim and spac-exec.

    Expert times by tokens on each tier alone and on both at once, a layer's other work by tokens and context, drafting,
    what a layer on two tiers costs, waking up after a copy, and on CUDA copies by size. Cold caches apart from warm.
    """
    from ..simulator.machine import show_machine

    check_folder("-o", out)
    with starting():
        from .calibrate import calibrate as measure
        from .probe import PairSubject
        from .report import calibrated

    link = link_of(link_bandwidth, link_latency)
    models = pair.load()
    with measuring("measuring this machine"):
        profile = measure(PairSubject(models), link, out.stem, rounds)
    try:
        out.write_text(show_machine(profile))
    except OSError as error:
        raise InputError(f"-o {out}: cannot be written ({error.strerror})") from None
    calibrated(profile, models.pair, out, json)
