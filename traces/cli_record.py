"""`spac-trace record`: run a pair on prompts and write what its routers chose."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .console import check_folder, measuring, say, show_json, show_size, show_table, starting
from .errors import InputError
from .prompts import describe, read_prompts

if TYPE_CHECKING:
    from .recorder import Summary


def one_at_a_time(size: int) -> int:
    if size != 1:
        raise typer.BadParameter(
            f"{size} is not supported: a trace holds sequences one after another; give several prompts instead"
        )
    return size


def record(
    out: Path = typer.Option(..., "-o", "--out", help="Trace file to write; an old one is replaced."),
    target: str | None = typer.Option(None, help="Folder or Hugging Face name (default: the embedded pair)."),
    draft: str | None = typer.Option(None, help="Draft model; ngram: from the text itself; none: plain decoding."),
    prompts: str | None = typer.Option(None, help="A .txt or .jsonl file, held-out, or one of its domains."),
    prompt_limit: int | None = typer.Option(None, help="Use only the first N prompts."),
    max_new_tokens: int = typer.Option(64, min=1, help="New tokens of each turn."),
    draft_length: str = typer.Option("4", metavar="N|auto", help="Tokens to draft a step; auto: as many as pay."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 is greedy."),
    top_p: float = typer.Option(1.0, min=0.01, max=1.0, help="Sample among the top tokens with this much mass."),
    seed: int = typer.Option(0, min=0, help="Sequence i samples with seed + i."),
    scores: str = typer.Option("topk", help="topk, or full: all experts, by the values that the router ranks."),
    lookahead: int = typer.Option(0, min=0, help="Also ask the gates of the next J layers on this layer's input."),
    draft_out: Path | None = typer.Option(
        None, help="A second trace file, for the routing of a draft that is a mixture of experts itself."
    ),
    prefill_chunk: int = typer.Option(512, min=1, help="Most prompt tokens in one forward pass."),
    dtype: str | None = typer.Option(
        None, help="auto, float32, bfloat16 or float16 (default: float32 for the embedded pair, else auto)."
    ),
    device: str = typer.Option("cpu", help="Where to run, for example cuda."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on after an end token."),
    compare: bool = typer.Option(False, "--compare-plain", help="Also decode without the draft; report differences."),
    require_exact: bool = typer.Option(False, "--require-exact", help="The same, and exit 1 if there are any."),
    batch_size: int = typer.Option(1, callback=one_at_a_time, help="Only 1: sequences are recorded one by one."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Record the expert routing of a target model, with a draft (speculative) or without."""
    compare = compare or require_exact
    if scores not in ("topk", "full"):
        raise InputError(f"--scores {scores}: choose topk or full")
    if compare and temperature > 0:
        raise InputError("--require-exact: only greedy output can be compared; leave out --temperature")
    check_folder("-o", out)
    check_folder("--draft-out", draft_out)
    if draft_out is not None and draft_out.absolute() == out.absolute():
        raise InputError(f"--draft-out {draft_out}: the target's trace goes there; give another file")
    chosen = read_prompts(prompts, prompt_limit)
    if draft_length != "auto" and not (draft_length.isdecimal() and int(draft_length)):
        raise InputError(f"--draft-length {draft_length}: give a number of tokens, or auto; --draft none drafts none")

    with starting():
        from .draft_length import LONGEST
        from .models import EMBEDDED, load_pair
        from .recorder import record as run
        from .speculate import Options

    default_dtype = "float32" if target in (None, EMBEDDED) else "auto"
    with measuring("loading"):
        pair = load_pair(target, draft, dtype or default_dtype, device)
    if compare and pair.draft is None:
        raise InputError("--require-exact: there is no draft to compare with; give --draft")
    stops = () if ignore_eos else pair.stop_tokens
    adaptive = draft_length == "auto"
    longest = LONGEST if adaptive else int(draft_length)
    options = Options(max_new_tokens, longest, temperature, top_p, seed, stops, prefill_chunk, adaptive, adaptive)
    expected = sum(len(prompt.turns) for prompt in chosen) * max_new_tokens
    with _stoppable() as stop, _progress(expected) as progress:
        summary = run(
            pair, chosen, out, options, source=describe(prompts), scores=scores == "full", lookahead=lookahead,
            draft_out=draft_out, compare=compare, stop=stop, progress=progress,
        )  # fmt: skip
    _report(summary, out, as_json)
    if summary.interrupted:
        raise typer.Exit(130)
    if require_exact and summary.differences:
        raise typer.Exit(1)


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """A question that Ctrl-C (or SIGTERM) answers with yes; a second one ends the process at once."""
    asked = False

    def note(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(tokens: int) -> Iterator[Callable[[int, int], None]]:
    """A bar with tokens/s and the time left on a terminal; nothing in a pipe."""
    console = Console(stderr=True)
    columns = (TextColumn("recording"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=tokens, rate="")
        begin, read, done = time.monotonic(), 0, 0

        def advance(prompt: int, new: int) -> None:
            nonlocal read, done
            read, done = read + prompt, done + new
            rate = done / max(time.monotonic() - begin, 1e-9)
            shown = f"{done}/{tokens} tokens, {rate:.1f}/s, {read} of prompts"
            bar.update(task, completed=done, rate=shown)

        yield advance


def _report(summary: "Summary", out: Path, as_json: bool) -> None:
    size = out.stat().st_size
    facts = {
        "file": str(out),
        "sequences": summary.prompts,
        "prompt_tokens": summary.prompt_tokens,
        "new_tokens": summary.new_tokens,
        "rows": summary.rows,
        "drafted": summary.total("drafted"),
        "accepted": summary.total("accepted"),
        "acceptance": summary.acceptance,
        "tokens_per_verify": summary.tokens_per_verify,
        "acceptance_by_position": summary.acceptance_by_position,
        "draft_probability": summary.draft_probability,
        "seconds": round(summary.seconds, 3),
        "file_bytes": size,
        "bytes_per_row": size / summary.rows if summary.rows else None,
        "interrupted": summary.interrupted,
    }
    if as_json:
        same = {"identical_to_plain": not summary.differences} if summary.compared else {}
        differences = [{"prompt": d.prompt, "position": d.position, "margin": d.margin} for d in summary.differences]
        show_json(facts | same | {"differences": differences})
        return
    shown = {"acceptance": ".3f", "tokens_per_verify": ".2f", "seconds": ".1f", "bytes_per_row": ".0f"}
    row = {k: v if v is None or k not in shown else format(v, shown[k]) for k, v in facts.items()}
    row["file_bytes"] = show_size(size)
    for name in ("interrupted", "file", "drafted", "accepted", "acceptance_by_position", "draft_probability"):
        del row[name]
    show_table(f"recorded {out}", [{k.replace("_", " "): v for k, v in row.items()}])
    _report_draft(summary)
    _report_differences(summary)
    if summary.interrupted:
        sys.stderr.write(f"interrupted; {out} holds everything up to here\n")


def _report_draft(summary: "Summary") -> None:
    if not summary.total("drafted"):
        return
    kept = ", ".join(f"{share:.2f}" for share in summary.acceptance_by_position)
    mean = {name: "none" if p is None else f"{p:.2f}" for name, p in summary.draft_probability.items()}
    say(
        f"drafts kept by position in the window: {kept}; the draft's own probability of them: {mean['kept']}, of those "
        f"refused: {mean['refused']}"
    )


def _report_differences(summary: "Summary") -> None:
    if not summary.compared or summary.interrupted:
        return
    if not summary.differences:
        say("the tokens are identical to plain greedy decoding")
    for d in summary.differences:
        say(
            f"prompt {d.prompt}: differs from plain greedy decoding at position {d.position} ({d.speculative} instead "
            f"of {d.plain}); there the plain run's two best logits are {d.margin:.4g} apart"
        )
