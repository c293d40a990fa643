"""`spac-trace import` and `spac-trace export`: routing from other programs, and traces for them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .console import check_folder, parse_size, say
from .errors import InputError


def import_(
    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="Routed-experts arrays (.npy, .npz, .json of vLLM or SGLang), .csv (layer,expert), .jsonl rows, "
            "gpt-oss fingerprints, or what export wrote.",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The trace file to write.")],
    model: Annotated[
        str | None,
        typer.Option(help="Whose routing: a trace, a name of synth --list, a config.json or a Hugging Face name."),
    ] = None,
    experts: Annotated[int | None, typer.Option(min=2, help="Experts a layer.")] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Experts a token, where rows do not name their token.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="All layers of the model, with experts or not.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of the hidden state.")] = None,
    expert_width: Annotated[int | None, typer.Option(min=1, help="Width inside an expert.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the expert weights: bfloat16, int4, ... or a name.")] = None,
    expert_size: Annotated[str | None, typer.Option(help="Size of an expert, such as 9MiB.")] = None,
    dense_size: Annotated[str | None, typer.Option(help="Size of all other weights.")] = None,
    kv_size: Annotated[str | None, typer.Option(help="Keys and values of a token, all layers.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=0, help="Rows of each text that are prompt, where the file does not say.")
    ] = None,
    weights: Annotated[bool, typer.Option(help="Keep the routing weights.")] = True,
) -> None:
    """Convert routing that another program recorded, or that export wrote, into a trace."""
    from .importers import ImportOptions, import_routing
    from .reader import open_trace
    from .shapes import ShapeFlags

    sizes = {
        "expert_bytes": ("--expert-size", expert_size),
        "dense_bytes": ("--dense-size", dense_size),
        "kv_bytes": ("--kv-size", kv_size),
    }
    given = {name: None if text is None else parse_size(text, flag) for name, (flag, text) in sizes.items()}
    shape = ShapeFlags(model, experts, top_k, layers, hidden, expert_width, dtype, **given)
    with counting("importing") as progress:
        header = import_routing(src, out, ImportOptions(shape, prompt_tokens, weights), progress)
    summary = open_trace(out).summary()
    say(f"{out}: {summary.tokens:,} tokens in {summary.sequences} sequences, {summary.file_bytes:,} bytes")
    if header.notes:
        say(header.notes)


def export(
    trace: Annotated[str, typer.Argument(metavar="T", help="A trace file, or the name of a bundled trace.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")],
    form: Annotated[
        str | None,
        typer.Option("--format", help="parquet, csv, jsonl, npz or oracleGeneral (default: the file's suffix)."),
    ] = None,
) -> None:
    """Write a trace for other tools: Parquet, CSV, JSON lines, numpy, or libCacheSim's oracleGeneral."""
    from .export import export as write
    from .export import form_of
    from .reader import open_trace
    from .report import warn_if_unfinished

    form = form or form_of(out)
    opened = open_trace(trace)
    warn_if_unfinished(opened)
    with counting("exporting", lambda: opened.summary().tokens) as progress:
        count = write(opened, out, form, progress)
    say(f"{out}: {count:,} {'accesses' if form == 'oracleGeneral' else 'tokens' if form == 'npz' else 'rows'}")
    header = opened.header
    if form == "csv" and (header.scores is not None or header.lookahead):
        say("scores and the gates of the next layers do not fit in CSV rows and were left out")
    if form == "oracleGeneral":
        say(f"ids are MoE layer * {header.target.experts} + expert; the file cannot say that it is {header.provenance}")


@contextmanager
def counting(what: str, total: Callable[[], int] | None = None) -> Iterator[Callable[[int], None]]:
    """Tokens done, tokens/s and, if their number is known, the time left, on a terminal; nothing in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda tokens: None
        return
    known = total() if total is not None else None
    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=known, rate="")
        begin = shown = time.monotonic()
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done, shown
            done += tokens
            if (now := time.monotonic()) - shown > 0.1:
                shown = now
                bar.update(task, completed=done, rate=f"{done:,} tokens, {done / (now - begin):,.0f}/s")

        yield advance


def plot_stem(path: Path) -> Path:
    """Where a page of pictures goes: a .png or .svg names itself, anything else is a folder, made if missing."""
    if path.suffix.lower() in (".png", ".svg"):
        check_folder("--plot", path)
        return path.with_suffix("")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--plot {path}: cannot be made a folder: {error.strerror}") from error
    return path / "statistics"
