"""`spac-sim report`: one page about a folder of results."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..traces.console import say, warn
from ..traces.errors import InputError
from .cli_run import progress_bar

if TYPE_CHECKING:
    from .page import Findings
    from .results import Slice

SIMULATED = 3  # traces and machines whose changes are simulated; a sweep may have many


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What spac-sim run or sweep wrote.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Default: DIR/report.html.")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Simulate again what more memory, link, RAM would bring.")
    ] = True,
) -> int:
    """Write one self-contained page: the verdict, what limits, what would help most, and how sure that is."""
    from .page import page
    from .results import read_slices
    from .sweep import write_whole

    parts, out = read_slices(folder), out or folder / "report.html"
    findings = []
    for at, part in enumerate(parts):
        why = "" if simulate else "--no-simulate was given"
        if simulate and at >= SIMULATED:
            why = f"changes are simulated for the first {SIMULATED} traces and machines only"
        with progress_bar(f"simulating changes, {part.machine.name}", 100) as tell:
            findings.append(_find(folder, part, why, tell))
    with progress_bar("drawing", 100) as tell:
        text = page(f"{parts[0].trace}: {folder.name}", findings, tell)
    write_whole(out, text.encode())
    for reason in dict.fromkeys(f.why_not for f in findings if f.why_not and simulate):
        warn(f"what would help most is not in the page: {reason}")
    say(f"{out}: {len(text) / 1e6:.1f} MB, opens without a network")
    return 0 if any(f.best for f in findings) else 1


def _find(folder: Path, part: "Slice", why_not: str, tell: "Callable[[int], None] | None") -> "Findings":
    from .page import Findings
    from .whatif import chosen, what_if

    best = chosen(part)
    if best is None:
        return Findings(part, None, None, "no run has the status ok")
    if why_not:
        return Findings(part, best, None, why_not)
    try:
        return Findings(part, best, what_if(folder, part, best, tell))
    except InputError as error:
        return Findings(part, best, None, str(error))
