"""`spac-exec chat`: talk to a model under a policy."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import (
    AllowLossy,
    CacheFraction,
    Device,
    Draft,
    DraftLength,
    Dtype,
    MachineName,
    PolicyName,
    Slots,
    StoreFolder,
    StoreFormat,
    StoreMemory,
    Target,
    Tokenizer,
    Vram,
)


def chat(
    policy: PolicyName = "ar-lru",
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.001, max=1, help="Sample from this share of the mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of the policy.")] = 0,
    target: Target = None,
    draft: Draft = None,
    machine: MachineName = None,
    slots: Slots = None,
    cache_fraction: CacheFraction = None,
    vram: Vram = None,
    context: Annotated[int | None, typer.Option(min=2, help="With --vram: tokens to leave room for.")] = None,
    draft_length: DraftLength = None,
    allow_lossy: AllowLossy = False,
    events: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Log all that the policy is told and asked.")
    ] = None,
    store: StoreFormat = "auto",
    store_memory: StoreMemory = "auto",
    store_folder: StoreFolder = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = "float32",
    device: Device = None,
) -> None:
    """Talk to a model. /policy NAME switches the policy, /reset forgets, Ctrl-C stops an answer, Ctrl-D leaves.

    On a terminal the last line says how many experts were resident. In a pipe, one line in is one answer out.
    """
    from .chat import Chat, StatusLine, lines_of
    from .opening import Opening

    opening = Opening(
        policy, target, draft, machine, slots, cache_fraction, vram, context, draft_length, max_new_tokens,
        temperature, seed, store, store_memory, store_folder, tokenizer, dtype, device, allow_lossy, events,
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
