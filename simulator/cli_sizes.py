"""Cache sizes from the command line: slots a layer, a share of all experts, or what fits into a memory."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..traces.console import parse_size
from ..traces.errors import InputError

if TYPE_CHECKING:
    from ..policies.interface import Policy
    from ..traces.schema import ModelShape
    from .compare import Job

PAPER_FRACTION = "0.17"  # of the experts on the GPU: the setting of the MoE-SpAc paper


def sizes_for(
    slots: str | None,
    fraction: str | None,
    vram: str | None,
    job: "Job",
    policies: "Sequence[Policy]",
    mode: str = "sd",
    context: int | None = None,
) -> tuple[list[int], str]:
    """Cache sizes in slots over all layers, and for --vram the sum in words. InputError names the flag.

    mode: a draft takes room from experts under --vram, plain decoding needs none. context: tokens whose keys and
    values --vram holds beside the experts (None: the longest text of the trace). Fewer slots than top-k are let
    through, to be shown with that status.
    """
    shape = job.source.trace.header.target
    layers = len(shape.moe_layers)
    given = [flag for flag, text in (("--slots", slots), ("--cache-fraction", fraction), ("--vram", vram)) if text]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: give one of them")
    if vram:
        return _fitting(vram, job, shape, policies, mode, context)
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
        _check(flag, total, shape)
    return totals, ""


def _check(flag: str, slots: int, shape: "ModelShape") -> None:
    layers = len(shape.moe_layers)
    if slots > layers * shape.experts:
        each = f"{slots / layers:.3g} slots a layer"
        raise InputError(f"{flag}: {each}, but {shape.name} has {shape.experts} experts a layer; give at most that")


def _numbers(flag: str, text: str, whole: bool = False) -> list[float]:
    values: list[float] = [-1]
    with suppress(ValueError):
        values = [int(part) if whole else float(part) for part in text.split(",")]
    if not all(0 <= v < float("inf") for v in values):
        example = "6 or 6,10,16" if whole else "0.17 or 0.1,0.25,0.5"
        raise InputError(f"{flag} {text}: not a list of numbers of at least 0; write for example {example}")
    return values


def _fitting(
    vram: str, job: "Job", shape: "ModelShape", policies: "Sequence[Policy]", mode: str, context: int | None
) -> tuple[list[int], str]:
    from .capacity import fit_in

    budget = parse_size(vram, "--vram")
    if context is None:
        context = max(load.context for load in job.loads.values())
    pooled = any(p.scope == "global" for p in policies)
    fit = fit_in(budget, job.machine, shape, job.source.view(mode).header.draft, context, pooled)
    return [fit.slots], f"--vram: {fit.words}"
