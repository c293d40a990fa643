"""`spac-trace synth`: write a synthetic trace that is shaped like a named model."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .console import check_folder, say, show_json, show_size, show_table
from .errors import InputError

if TYPE_CHECKING:
    from .views import Steps


def synth(
    like: str | None = typer.Option(None, help="The model to be like; --list shows which there are."),
    out: Path | None = typer.Option(None, "-o", "--out", help="Trace file to write; an old one is replaced."),
    tokens: int = typer.Option(4096, help="Generated tokens in all."),
    sequences: int | None = typer.Option(None, help="Sequences that share them (default: one for each 512 tokens)."),
    domains: str | None = typer.Option(None, help="Kinds of text that take turns, as coding,math (default: all)."),
    prefill: int = typer.Option(0, help="Prompt tokens before each sequence."),
    draft_length: int = typer.Option(0, help="Tokens drafted for each verify step; 0 is plain decoding."),
    acceptance: str | None = typer.Option(
        None, help="Chance that a drafted token is accepted: 0.8, or by place 0.9,0.8,0.7 (the last for the rest)."
    ),
    seed: int = typer.Option(0, help="Another seed is another sample of the same model."),
    dtype: str | None = typer.Option(None, help="Weight format, which sets the byte sizes (default: the first)."),
    draft: str | None = typer.Option(None, help="Draft model, which sets its byte sizes (default: the first)."),
    list_: bool = typer.Option(False, "--list", help="Show the models, their formats, drafts and domains."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Write a synthetic trace: made up, with a named model's shape and published routing statistics."""
    if list_:
        _list(as_json)
        return
    if like is None or out is None:
        raise InputError("synth: give --like MODEL and -o FILE, or --list")
    check_folder("-o", out)

    from .synth import synthesize

    trace = synthesize(
        like,
        tokens,
        seed,
        draft_length,
        _chances(acceptance),
        sequences=sequences,
        domains=domains.split(",") if domains else None,
        prefill=prefill,
        dtype=dtype,
        draft=draft,
    )
    begin = time.perf_counter()
    steps, rows = _write(trace, out, tokens)
    facts = {
        "file": str(out),
        "provenance": str(trace.header.provenance),
        "model": trace.header.target.name,
        "sequences": len(trace.header.sequences),
        "tokens": tokens,
        "steps": steps,
        "rows": rows,
        "seconds": round(time.perf_counter() - begin, 3),
        "file_bytes": out.stat().st_size,
    }
    if as_json:
        show_json(facts)
    else:
        title = f"{facts.pop('provenance')} trace {facts.pop('file')}"
        facts["file_bytes"] = show_size(facts["file_bytes"])
        show_table(title, [{name.replace("_", " "): value for name, value in facts.items()}])
        say(f"made up, not recorded; how close it comes: python -m moe_spac.traces.synth_fit --check {like}")


def _chances(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--acceptance {text}: write a chance, or chances with commas between them") from None


def _write(trace: "Steps", out: Path, tokens: int) -> tuple[int, int]:
    """Steps and rows written, with a bar on a terminal; nothing in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from .writer import TraceWriter

    console = Console(stderr=True)
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar,
        TraceWriter(out, trace.header) as writer,
    ):
        task, rows = bar.add_task("", total=tokens), 0
        for step in trace.steps():
            writer.append(step)
            rows += len(step)
            bar.advance(task, step.emitted)
    return writer.steps, rows


def _list(as_json: bool) -> None:
    from .synth import load, models, published

    def row(name: str) -> dict[str, Any]:
        about = published(name)
        return {
            "like": name,
            "model": about["model"]["name"],
            "formats": list(about["bits"]),
            "drafts": list(about.get("drafts", {})),
            "domains": list(load(name)["domains"]),
            "fitted to": load(name)["basis"],
        }

    rows = [row(name) for name in models()]
    if as_json:
        show_json(rows)
    else:
        show_table(
            "Models", [{k: ", ".join(v) if isinstance(v, list) else v for k, v in found.items()} for found in rows]
        )
