"""`spac-exec calibrate`: measure this machine."""

from pathlib import Path
from typing import Annotated

import typer

from ..traces.console import check_folder, measuring
from ..traces.errors import InputError
from .cli_options import (
    AsJson,
    Bandwidth,
    Device,
    Draft,
    Dtype,
    Latency,
    StoreFolder,
    StoreFormat,
    StoreMemory,
    Target,
    Tokenizer,
    default_device,
    link_of,
)


def calibrate(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The profile to write (TOML).")],
    target: Target = None,
    draft: Draft = None,
    link_bandwidth: Bandwidth = "100MB/s",
    link_latency: Latency = "20us",
    rounds: Annotated[int, typer.Option(min=1, help="Of all measurements; medians over them, and their spread.")] = 3,
    store: StoreFormat = "auto",
    store_memory: StoreMemory = "auto",
    store_folder: StoreFolder = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = "float32",
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Measure this machine for a pair of models and write a machine profile for spac-sim and spac-exec.

    Expert times by tokens on each tier alone and on both at once, a layer's other work by tokens and context, drafting,
    what a layer on two tiers costs, waking up after a copy, and on CUDA copies by size. Cold caches apart from warm.
    """
    from ..simulator.machine import show_machine
    from .calibrate import calibrate as measure
    from .models import load_models
    from .probe import PairSubject
    from .report import calibrated
    from .stores import Choice

    link = link_of(link_bandwidth, link_latency)
    check_folder("-o", out)
    kept = Choice(store, store_memory, store_folder)
    models = load_models(target, draft, dtype, device or default_device(), kept, tokenizer)
    with measuring("measuring this machine"):
        profile = measure(PairSubject(models), link, out.stem, rounds)
    try:
        out.write_text(show_machine(profile))
    except OSError as error:
        raise InputError(f"-o {out}: cannot be written ({error.strerror})") from None
    calibrated(profile, models.pair, out, json)
