"""Which token each row of the bundled gpt-oss-20b trace was: numbers that tell equal tokens, not the vocabulary's ids.

The trace itself has no ids, because its source gives tokens as text. `python -m moe_spac.traces.gpt_oss_tokens
TOKENS.jsonl.gz OUT.npz` made the numbers: one line a sequence, in the trace's order, with "generated_tokens", the texts
of the source's records; the last one of a sequence was never fed in and has no row.
"""

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from .errors import InputError
from .reader import DATA, open_trace
from .schema import Step
from .views import Steps, View

FILE = DATA / "gpt-oss-20b-tokens.npz"


def with_token_numbers() -> Steps:
    """The bundled trace with a number for each distinct token text, by first appearance, as its `token`."""
    trace = open_trace("gpt-oss-20b")
    with np.load(FILE, allow_pickle=False) as archive:
        numbers = archive["numbers"].astype(np.int32)
    note = f"{trace.header.notes} Token numbers tell equal texts; they are not the vocabulary's ids."

    def steps() -> Iterator[Step]:
        at = 0
        for step in trace.steps():
            yield replace(step, tokens=numbers[at : at + len(step)])
            at += len(step)

    return View(replace(trace.header, notes=note), steps)


def number(source: Path, out: Path) -> None:
    """Write the numbers of the texts in `source`. InputError for another number of them than the trace has rows."""
    known: dict[str, int] = {}
    numbers: list[int] = []
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        for line in lines:
            texts = json.loads(line)["generated_tokens"]
            numbers += [known.setdefault(text, len(known)) for text in texts[:-1]]
    rows = sum(len(step) for step in open_trace("gpt-oss-20b").steps())
    if len(numbers) != rows:
        raise InputError(f"{source}: {len(numbers)} tokens for the {rows} rows of the trace")
    np.savez_compressed(out, numbers=np.array(numbers, np.uint16))


if __name__ == "__main__":
    number(*map(Path, sys.argv[1:]))
