"""`spac-exec chat`: talk to a model under a policy."""

import sys
from contextlib import ExitStack
from typing import Annotated

import typer

from ..traces.console import starting
from .cli_options import (
    AllowLossy,
    DraftLength,
    LogOptions,
    PairOptions,
    PolicyName,
    SizeOptions,
    spread,
)


@spread
def chat(
    policy: PolicyName = "ar-lru",
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.001, max=1, help="Sample from this share of the mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of the policy.")] = 0,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens whose keys and values memory is left for.")] = None,
    draft_length: DraftLength = None,
    allow_lossy: AllowLossy = False,
    *,
    pair: PairOptions,
    size: SizeOptions,
    log: LogOptions,
) -> None:
    """Talk to a model. /policy NAME switches the policy, /reset forgets, Ctrl-C stops an answer, Ctrl-D leaves.

    On a terminal the last line says how many experts were resident. In a pipe, one line in is one answer out.
    """
    with starting():
        from .chat import Chat, StatusLine, lines_of
        from .opening import Opening

    opening = Opening(
        policy, pair, size, log, context, draft_length, max_new_tokens, temperature, seed, allow_lossy
    )  # fmt: skip
    opening.check()
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with ExitStack() as stack:
        session = stack.enter_context(opening.open())
        status = stack.enter_context(StatusLine(sys.stdout)) if terminal else None
        talk = Chat(session, opening.checked_policy, sys.stdout, status, system, top_p)
        for line in lines_of(terminal):
            if not talk.take(line):
                break
