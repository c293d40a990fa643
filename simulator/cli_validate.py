"""`spac-sim validate`: published measurements against predictions."""

from pathlib import Path
from typing import Annotated

import typer

from ..traces.console import say, show_json, show_table
from ..traces.errors import InputError
from .cli_run import progress_bar


def validate(
    study: Annotated[
        list[str] | None, typer.Argument(metavar="[STUDY]…", help="Only studies whose names begin so; default: all.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="F.md", help="Write the page of Markdown.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Replay published measurements and say how far off the simulator is, row by row."""
    from .validate import validate as replay
    from .validate_cases import studies
    from .validate_report import document, groups, markdown, table, verdict

    found = studies()
    chosen = [s for s in found if not study or s.name.startswith(tuple(study))]
    if not chosen:
        raise InputError(f"STUDY {' '.join(study or [])}: no such study; studies: {', '.join(s.name for s in found)}")
    if out is not None and len(chosen) < len(found):
        raise InputError("-o: the page has all studies; leave STUDY out")
    with progress_bar("replaying measurements", sum(len(s.rows) for s in chosen)) as progress:
        report = replay(chosen, progress)
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(markdown(report, chosen), encoding="utf-8")
        except OSError as error:
            raise InputError(f"-o {out}: cannot be written ({error.strerror})") from None
    if json:
        show_json(document(report))
        return 0
    show_table("Predicted and measured", table(report))
    show_table(
        "Orders and shapes", [{"claim": c.claim, "comes out": "yes" if c.holds else "no"} for c in report.checks]
    )
    if counted := groups(report):
        show_table("Summary", [{k: f"{v:+.1%}" if isinstance(v, float) else v for k, v in g.items()} for g in counted])
        say(verdict(report))
    if out is not None:
        say(f"written: {out}")
    return 0
