"""`spac-trace`: record, make up, look at, compare, import and export routing traces."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_convert import export, import_, plot_stem
from .cli_record import record
from .cli_synth import synth
from .console import run_app, say, show_json, show_table, working
from .errors import InputError

app = typer.Typer(
    help="Record, make up, look at, compare, import and export routing traces.",
    no_args_is_help=True,
    add_completion=False,
)

app.command("record")(record)
app.command("synth")(synth)
app.command("import")(import_)
app.command("export")(export)

TraceName = Annotated[
    str, typer.Argument(metavar="T", help="A trace file, or the name of a bundled trace (gpt-oss-20b).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def info(
    trace: TraceName,
    json: AsJson = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a trace whose tail is missing.")] = False,
) -> None:
    """Print a trace's header and counts, and whether anything is missing."""
    from dataclasses import asdict

    from .reader import open_trace
    from .report import info_rows

    opened = open_trace(trace, strict)
    summary = opened.summary()
    if json:
        counts = {**asdict(summary), "bytes_per_token": round(summary.bytes_per_token, 2)}
        show_json({"file": str(opened.path), "header": opened.header.to_dict(), "summary": counts})
    else:
        show_table("Trace", info_rows(opened, summary))


@app.command()
def stats(
    trace: TraceName,
    json: AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw pictures, into a folder or under a name (.png): .png, .svg, .md and .json are written."
        ),
    ] = None,
) -> None:
    """Print locality, skew, LRU hit rates and acceptance, for each layer and in all."""
    from .reader import open_trace
    from .report import layer_rows, markdown, statistics, total_rows, warn_if_unfinished

    opened = open_trace(trace)
    stem = None if plot is None else plot_stem(plot)
    warn_if_unfinished(opened)
    with working(f"reading {trace}"):
        found = statistics(opened)
    if not found["tokens"]:
        raise InputError(f"{opened.path}: no generated tokens to describe (prefill only)")
    if json:
        show_json(found)
    else:
        show_table("By layer", layer_rows(found))
        show_table("In all", total_rows(found))
    if stem is not None:
        from json import dumps

        from .stat_plots import draw

        try:
            files = draw(found, opened.header, stem)
            page = markdown(found, opened.header, files[0].name)
            files += [_written(stem, ".md", page), _written(stem, ".json", dumps(found) + "\n")]
        except OSError as error:
            raise InputError(f"--plot {plot}: cannot write: {error.strerror or error}") from error
        if not json:
            say("written: " + ", ".join(map(str, files)))


def _written(stem: Path, suffix: str, text: str) -> Path:
    path = stem.with_name(stem.name + suffix)
    path.write_text(text, encoding="utf-8")
    return path


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A trace.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    json: AsJson = False,
) -> None:
    """Say whether two traces are the same routing (exit 0) or where they first differ (exit 1)."""
    from .diff import compare, rows_of
    from .reader import open_trace
    from .report import warn_if_unfinished

    first, second = open_trace(a), open_trace(b)
    for trace in (first, second):
        warn_if_unfinished(trace)
    with working(f"reading {a} and {b}"):
        found = compare(first, second)
    if json:
        show_json(found)
    else:
        say(found["verdict"])
        show_table("Headers", found["header"])
        show_table("Statistics of the generated text", rows_of(found))
    raise typer.Exit(0 if found["same"] else 1)


def main() -> None:
    run_app(app)


if __name__ == "__main__":
    main()
