"""`spac-sim plot`: figures of a folder of results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..traces.console import say, show_json, show_table
from ..traces.errors import InputError
from .cli_run import progress_bar

if TYPE_CHECKING:
    from .plots import Drawn


def plot(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What spac-sim run or sweep wrote.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where to. Default: DIR itself.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this figure; repeat for more.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Draw every figure that the results can give, as PNG and SVG, one column of a paper wide."""
    from .plots import NAMES, draw_folder

    unknown = [name for name in only or () if name not in NAMES]
    if unknown:
        raise InputError(f"--only {unknown[0]}: no such figure; there are {', '.join(NAMES)}")
    where = out or folder
    with progress_bar("drawing", 100) as progress:
        try:
            drawn = draw_folder(folder, where, only or (), progress)
        except OSError as error:
            raise InputError(f"--out {where}: cannot be written ({error.strerror}); give another folder") from None
    if json:
        show_json(
            [{"figure": d.figure, "of": d.of, "files": list(map(str, d.files)), "why_not": d.why_not} for d in drawn]
        )
    else:
        tell(where, drawn)
    return 0 if any(d.files for d in drawn) else 1


def tell(where: Path, drawn: "list[Drawn]") -> None:
    done = [d for d in drawn if d.files]
    for of in dict.fromkeys(d.of for d in done):
        names = [d.figure for d in done if d.of == of]
        say(f"{where / of}: {', '.join(names)} (.png and .svg)")
    rows = [{"left out": d.figure, "because": d.why_not} for d in drawn if not d.files]
    show_table("What these results cannot give", [dict(pair) for pair in dict.fromkeys(tuple(r.items()) for r in rows)])
