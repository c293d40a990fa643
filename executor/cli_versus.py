"""`spac-exec versus`: simulator against live on this machine."""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import check_folder, say, show_json, show_table, starting, tell
from ..traces.errors import InputError
from .cli_options import AsJson, link_of, policy_of

if TYPE_CHECKING:
    from .versus import Cell, Row, Stage

POLICIES = ["ar-lru", "hybrimoe", "moe-spac", "marginal", "static"]
PAIR = {"slots": "6,10,16", "links": "100MB/s,400MB/s", "title": "The embedded pair, whole"}
RIG = {
    "slots": "12,16,24",
    "links": "1GB/s,3GB/s",
    "title": "Experts of the size of Qwen3-30B-A3B's, replayed",
    "like": "qwen3-30b-a3b",
}


def versus(
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the page there.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help=f"Default: {', '.join(POLICIES)}.")] = None,
    repetitions: Annotated[int, typer.Option("-r", min=1, help="Of every run; medians count.")] = 5,
    pair: Annotated[bool, typer.Option(help="Real inference with the embedded pair.")] = True,
    rig: Annotated[bool, typer.Option(help="A replay with experts of a real model's size.")] = True,
    slots: Annotated[str | None, typer.Option(metavar="N,N", help="Slots a layer, instead of the page's.")] = None,
    link: Annotated[str | None, typer.Option(metavar="RATE,RATE", help="Of the emulated link, likewise.")] = None,
    form: Annotated[str, typer.Option("--format", help="Of the replay's experts.")] = "q8",
    layers: Annotated[int, typer.Option(min=1, help="Of the replay.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of a prompt of the pair.")] = 64,
    limit_steps: Annotated[int, typer.Option(min=8, help="Of the replay.")] = 60,
    json: AsJson = False,
) -> int:
    """Run policies live and simulated on this machine, and compare hit rates, time per token, and their order.

    Calibration and runs take turns. Exit code 1 if a row is off by more than a point of hit rate or 10 % of time, or
    two policies that differ by more than 10 % come in the other order.
    """
    check_folder("-o", out)
    names = policy or POLICIES
    for name in names:
        policy_of(name)
    with starting(), tempfile.TemporaryDirectory(prefix="spac-") as folder:
        from .memory import settle
        from .versus import contest, orders
        from .versus_report import document, page, table, verdict

        found: list[tuple[str, Any, list[Row]]] = []
        for wanted, make, default in ((pair, _pair, PAIR), (rig, _rig, RIG)):
            if wanted:
                stage = make(Path(folder), form, layers, max_new_tokens, limit_steps)
                settle()
                cells = cells_of(slots or default["slots"], link or default["links"], names, stage)
                found.append((default["title"], stage, contest(stage, cells, repetitions, tell)))
    good = all(row.good() for _, _, rows in found for row in rows) and not any(orders(rows)[1] for _, _, rows in found)
    command = " ".join(["spac-exec versus", *sys.argv[2:]])
    text = page([(title, stage.name, rows) for title, stage, rows in found], command)
    if out is not None:
        out.write_text(text)
    if json:
        show_json(document([(title, stage.name, rows) for title, stage, rows in found]))
    for title, stage, rows in [] if json else found:
        if out is None:
            show_table(f"{title}: {stage.name}", table(rows))
        say(f"{title}: {verdict(rows)}")
    return 0 if good else 1


def cells_of(slots: str, links: str, policies: list[str], stage: "Stage") -> "list[Cell]":
    from ..simulator.capacity import check_size
    from .versus import Cell

    try:
        counts = [int(part) for part in slots.split(",")]
    except ValueError:
        raise InputError(f"--slots {slots}: takes numbers, for example 6,10,16") from None
    shape = stage.subject.shape
    for count in counts:
        check_size("--slots", count * len(shape.moe_layers), shape)
    emulated = [link_of(rate, "20us") for rate in links.split(",")]
    return [Cell(one, count, name) for one in emulated for count in counts for name in policies]


def _pair(folder: Path, form: str, layers: int, new_tokens: int, steps: int) -> "Stage":
    from ..traces.prompts import read_prompts
    from ..traces.speculate import Options
    from .models import load_models
    from .versus import PairStage

    return PairStage(load_models(), read_prompts(None)[::4], Options(new_tokens, 4), folder)


def _rig(folder: Path, form: str, layers: int, new_tokens: int, steps: int) -> "Stage":
    from ..traces.synth import synthesize
    from .memory import check_memory, free_ram
    from .replay import build, first_layers, in_format, memory_of, paused
    from .versus import RigStage

    made = synthesize(RIG["like"], 5 * steps, draft_length=4, acceptance=[0.7], prefill=8)
    trace = in_format(paused(first_layers(made, layers)), form)
    shape = trace.header.target
    needs = memory_of(shape, 4 * shape.top_k * layers, dense=True)  # slots of the calibration
    check_memory("host memory", "versus", needs, free_ram(), "give fewer --layers, a smaller --format, or --no-rig")
    name = f"{shape.name}, {layers} of its layers, {form}; {trace.header.provenance} routing"
    return RigStage(build(trace, form), trace, steps, name)
