"""`python -m moe_spac`: the whole story on the embedded pair, offline, printing every command it stands for.

record a real routing trace → measure this machine → replay the trace under several policies → run the winner live.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import typer

from .traces.console import run_app, say

POLICIES = ("ar-lru", "hybrimoe", "moe-spac", "static")


def story(out: Path) -> list[tuple[str, list[str]]]:
    """The commands, each with a line on what it is for."""
    trace, machine, winner = (str(out / name) for name in ("trace.spac", "this-machine.toml", "winner.toml"))
    compare = [flag for p in POLICIES for flag in ("--policy", p)]
    return [
        (
            "Record what the routers of the embedded Qwen3-MoE target decide while a draft speculates",
            ["spac-trace", "record", "-o", trace, "--max-new-tokens", "32", "--draft-length", "4", "--lookahead", "3"],
        ),
        (
            "Measure this machine: the GPU is emulated by slots in RAM, the link by its transfer time",
            ["spac-exec", "calibrate", "-o", machine],
        ),
        (
            "Replay the trace under every policy on the model of this machine, and keep the winner",
            ["spac-sim", "run", trace, "--machine", machine, *compare, "--slots", "6,10,16", "--jobs", "2",
             "--out", str(out / "compare"), "--save-winner", winner],
        ),
        (
            "The same, for a real model on a laptop: gpt-oss-20b's own routing (imported), 4 assumed draft tokens",
            ["spac-sim", "run", "gpt-oss-20b", "--machine", "rtx4060-laptop", *compare, "--slots", "8",
             "--limit-steps", "40", "--window", "4", "--acceptance", "0.7", "--out", str(out / "gpt-oss-20b")],
        ),
        (
            "Run real inference under the winning policy; the tokens are checked against transformers' own",
            ["spac-exec", "generate", "--policy", winner, "--machine", machine, "--max-new-tokens", "48", "--check"],
        ),
    ]  # fmt: skip


def app_of(command: str) -> typer.Typer:
    if command == "spac-trace":
        from .traces.cli import app
    elif command == "spac-sim":
        from .simulator.cli import app
    else:
        from .executor.cli import app
    return app


def tell(out: Path) -> None:
    """Run every command of the story in this process, so that the libraries are loaded once."""
    begin = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for number, (why, command) in enumerate(story(out), 1):
        say(f"\n[bold]{number}. {why}[/]\n[dim]$ {shlex.join(command)}[/]")
        step = time.monotonic()
        code = app_of(command[0])(command[1:], prog_name=command[0], standalone_mode=False)
        if code:
            raise typer.Exit(code)
        say(f"[dim]({time.monotonic() - step:.0f} s)[/]")
    plots = sorted(out.rglob("*.png"))
    say(f"\n[bold]Done in {time.monotonic() - begin:.0f} s.[/] Plots (PNG, with SVG beside them):")
    for plot in plots:
        say(f"  {plot}")


def main() -> None:
    about = "Record, simulate, choose, run live: the whole story on the embedded pair."
    parser = argparse.ArgumentParser(prog="python -m moe_spac", description=about)
    parser.add_argument("--out", type=Path, default=Path("spac-demo"), help="folder for the trace, runs and plots")
    out = parser.parse_args(sys.argv[1:]).out
    story_app = typer.Typer(add_completion=False)
    story_app.command()(lambda: tell(out))
    sys.argv = sys.argv[:1]
    run_app(story_app)


if __name__ == "__main__":
    main()
