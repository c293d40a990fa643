"""`spac-exec bench`: speed under several policies."""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import check_folder, say, show_json, show_size, show_table, starting, tell
from ..traces.errors import InputError
from .cli_options import (
    AllowLossy,
    AsJson,
    DraftLength,
    PairOptions,
    SizeOptions,
    draft_length_of,
    live_policy,
    machine_of,
    policy_of,
    prompts_of,
    slots_for,
    spread,
)

if TYPE_CHECKING:
    from ..traces.prompts import Prompt
    from .models import Models

FORMS = ("table", "md", "json")


@spread
def bench(
    policy: Annotated[list[str] | None, typer.Option(help="Give it again for more. Default: ar-lru.")] = None,
    prompt_sizes: Annotated[
        str, typer.Option("-p", metavar="N,N", help="Tokens of prompt to process; 0: none.")
    ] = "64",
    new_tokens: Annotated[int, typer.Option("-n", min=0, help="Tokens to generate from every prompt.")] = 64,
    repetitions: Annotated[int, typer.Option("-r", min=1, help="Of everything; a warm-up comes before.")] = 3,
    form: Annotated[str, typer.Option("-o", help="table, md or json.")] = "table",
    prompts: Annotated[str | None, typer.Option(help="A .txt or .jsonl file, or a bundled set's name.")] = None,
    prompt_limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    record: Annotated[Path | None, typer.Option(metavar="T", help="Keep the routing trace (with one policy).")] = None,
    draft_length: DraftLength = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of the policy.")] = 0,
    allow_lossy: AllowLossy = False,
    json: AsJson = False,
    *,
    pair: PairOptions,
    size: SizeOptions,
) -> None:
    """Measure prompt processing (pp) and generation (tg) as llama-bench does, and what the time of a token went to.

    Every policy gets the same texts. Beside each measured speed stands the simulator's for this very run.
    """
    form = "json" if json else form
    names = policy or ["ar-lru"]
    sizes = sizes_of(prompt_sizes)
    _check(names, form, record, allow_lossy)
    size.check()
    given = prompts_of(None, prompts, prompt_limit)

    with starting():
        from ..traces.speculate import Options
        from .bench import bench as measure
        from .bench import plan_of, rows
        from .session import Settings

    length, adaptive = draft_length_of(draft_length, {})
    needed = partial(longest_of, prompts=given, sizes=sizes, new_tokens=new_tokens)
    models = pair.load(length > 0, needed)
    plan = plan_of(models, given, sizes, new_tokens, repetitions)
    profile = machine_of(size.machine, "real", models)
    options = Options(new_tokens, length, temperature, seed=seed, adaptive=adaptive, draft_invariant=adaptive)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="spac-") as folder:
        for name in names:
            one, chosen = policy_of(name)
            total = slots_for(size, chosen, models, profile, one, needed(models.pair.tokenizer))
            settings = Settings(profile, total, "real", options, seed, size.budget)
            trace = record or Path(folder) / "run.spac"
            timed = measure(models, one, lambda name=name: policy_of(name)[0], settings, plan, trace, _progress(name))
            per_layer = total / len(models.pair.shape.moe_layers)
            found[name] = {"slots_per_layer": per_layer, "rows": rows(timed, models.pair.shape.expert_bytes)}
    _show(about(models, profile.name), found, form)


def sizes_of(text: str) -> list[int]:
    """Prompt sizes of "64,256"; "0" is none."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"-p {text}: takes numbers of tokens, for example 64,256") from None
    return [] if sizes == [0] else sizes


def longest_of(tokenizer: Any, prompts: "list[Prompt]", sizes: list[int], new_tokens: int) -> int:
    """Tokens of the longest text that is measured."""
    from ..traces.prompts import encode

    return max([*sizes, *(len(encode(tokenizer, p)[0]) + new_tokens for p in prompts)])


def _check(names: list[str], form: str, record: Path | None, allow_lossy: bool) -> None:
    if form not in FORMS:
        raise InputError(f"-o {form}: unknown; choose {', '.join(FORMS)}")
    for name in names:
        live_policy(name, allow_lossy)
    if record is not None and len(names) > 1:
        raise InputError(f"--record {record}: takes one --policy, because every one writes a trace of its own")
    check_folder("--record", record)


def _progress(name: str):
    """A line on a terminal that says how far it is; silent in a pipe."""
    return lambda done, of: tell(f"{name}: {done} of {of} texts" if done < of else "")


def about(models: "Models", machine: str) -> dict[str, Any]:
    """What was measured, and on what: a table of speeds is worth nothing without it."""
    import os
    import platform

    import torch

    from .floor import dispatch_floor, forwards
    from .kernels import describe

    shape, parts = models.pair.shape, models.pair
    return {
        "model": shape.name,
        "draft": parts.draft_shape.name if parts.draft_shape else None,
        "size_bytes": shape.dense_bytes + models.store.size,
        "experts": models.store.record.format.name,
        "backend": str(models.device) if models.device.type == "cuda" else "cpu (GPU emulated)",
        "machine": machine,
        "cores": os.cpu_count(),
        "kernels": describe()["kernels"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "floor_ms": dispatch_floor(models),
        "forward": forwards(models),
    }


def _show(facts: dict[str, Any], found: dict[str, Any], form: str) -> None:
    if form == "json":
        show_json({**facts, "policies": found})
    elif form == "md":
        sys.stdout.write(markdown(facts, found))
    else:
        _show_tables(facts, found)


def markdown(facts: dict[str, Any], found: dict[str, Any]) -> str:
    """llama-bench's table, with the policy and what was predicted."""
    head = ("model", "size", "experts", "backend", "kernels", "policy", "slots", "test", "t/s", "predicted")
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" if i < 6 else "---:" for i in range(10)) + " |"]
    for policy, one in found.items():
        for row in one["rows"]:
            cells = (
                facts["model"], show_size(facts["size_bytes"]), facts["experts"], facts["backend"], facts["kernels"],
                policy, f"{one['slots_per_layer']:g}", row["test"],
                f"{row['tokens_per_s']:.2f} ± {row['deviation']:.2f}", f"{row['predicted']:.2f}",
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _show_tables(facts: dict[str, Any], found: dict[str, Any]) -> None:
    every = [(policy, one, row) for policy, one in found.items() for row in one["rows"]]
    name = f"{facts['model']}, {show_size(facts['size_bytes'])}, {facts['backend']}, kernels {facts['kernels']}"
    show_table(name, [_speed(*entry) for entry in every])
    generated = [(policy, row) for policy, _, row in every if "ttft_ms" in row]
    show_table("ms to the first token and between tokens; shares of experts", [_tokens(*entry) for entry in generated])
    show_table("ms of a token that the fast device waited or decided", [_stalls(*entry) for entry in generated])
    parts = ", ".join(f"{name.replace('_', ' ')} {ms:.2f}" for name, ms in facts["floor_ms"].items())
    say(f"floor, ms a forward pass without experts: {parts}")
    say("forward: " + ", ".join(f"{name} {how}" for name, how in facts["forward"].items()))


def _speed(policy: str, one: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": policy,
        "slots": f"{one['slots_per_layer']:g}",
        "test": row["test"],
        "n": row["samples"],
        "t/s": f"{row['tokens_per_s']:.2f} ± {row['deviation']:.2f}",
        "predicted": f"{row['predicted']:.2f}",
        "error": None if row["error"] is None else f"{row['error']:+.1%}",
    }


def _tokens(policy: str, row: dict[str, Any]) -> dict[str, Any]:
    gaps = [row[f"tpot_ms_p{p}"] for p in (50, 95, 99)]
    return {
        "policy": policy,
        "TTFT": f"{row['ttft_ms']:.0f}",
        "TPOT p50/p95/p99": "/".join("-" if ms is None else f"{ms:.1f}" for ms in gaps),
        "drafts kept": f"{row['draft_n_accepted']}/{row['draft_n']}",
        "hit": _percent(row["hit_rate"]),
        "on CPU": _percent(row["experts_on_cpu"]),
    }


def _stalls(policy: str, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": policy,
        "for copies": f"{row['stall_copy_ms']:.2f}",
        "for the CPU": f"{row['stall_cpu_ms']:.2f}",
        "deciding": f"{row['decide_ms']:.2f}",
        "bytes a token": show_size(row["bytes_per_token"]),
        "link hidden": _percent(row["link_hidden"]),
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
