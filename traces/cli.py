"""`spac-trace`: record, look at, import and export routing traces."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_record import record
from .cli_synth import synth
from .console import run_app, say, show_json, show_table
from .errors import InputError

app = typer.Typer(help="Record, look at, import and export routing traces.", no_args_is_help=True, add_completion=False)

app.command("record")(record)
app.command("synth")(synth)

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
def stats(trace: TraceName, json: AsJson = False) -> None:
    """Print locality, skew, LRU hit rates and acceptance, for each layer and in all."""
    from .reader import open_trace
    from .report import layer_rows, statistics, total_rows, warn_if_unfinished

    opened = open_trace(trace)
    warn_if_unfinished(opened)
    found = statistics(opened)
    if not found["tokens"]:
        raise InputError(f"{opened.path}: no generated tokens to describe (prefill only)")
    if json:
        show_json(found)
    else:
        show_table("By layer", layer_rows(found))
        show_table("In all", total_rows(found))


@app.command("import")
def import_(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="X.npz of gpt-oss-20b routing, with X_meta.jsonl beside it.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The trace file to write.")],
    weights: Annotated[bool, typer.Option(help="Keep the routing weights.")] = True,
) -> None:
    """Convert another project's routing data into a trace."""
    from .gpt_oss import import_gpt_oss
    from .reader import open_trace

    import_gpt_oss(src, out, weights)
    summary = open_trace(out).summary()
    say(f"{out}: {summary.tokens:,} tokens in {summary.sequences} sequences, {summary.file_bytes:,} bytes")


@app.command()
def export(
    trace: TraceName,
    out: Annotated[Path, typer.Option("-o", "--out", help="The Parquet file to write.")],
) -> None:
    """Write a trace as one Parquet table, a row for each token; the header goes into its metadata."""
    from .export import export_parquet
    from .reader import open_trace
    from .report import warn_if_unfinished

    opened = open_trace(trace)
    warn_if_unfinished(opened)
    say(f"{out}: {export_parquet(opened, out):,} rows")


def main() -> None:
    run_app(app)
