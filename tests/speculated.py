"""A small speculative trace: 2 layers, 8 experts, top-2, a prompt and verify steps of up to 3 drafts; seeded."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from hand import Trace, shape, step

from moe_spac.traces.schema import DraftShape, Header, Kind, Provenance, Step
from moe_spac.traces.writer import TraceWriter

# 1 MB an expert: 48 us over the link of the default machine, 28 us on its CPU.
SHAPE = replace(shape(2, 8, 2, expert_bytes=10**6), name="tiny", hidden=512, expert_width=170)


def routing(rng: np.random.Generator, tokens: int) -> list[list[list[int]]]:
    """Low ids are preferred, so that a cache has something to keep."""
    share = np.arange(8, 0, -1) ** 2.0
    return [
        [sorted(rng.choice(8, 2, replace=False, p=share / share.sum()).tolist()) for _ in range(2)]
        for _ in range(tokens)
    ]


def speculated(verifies: int = 12, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    steps: list[Step] = [replace(step(routing(rng, 5)), kind=Kind.PREFILL)]
    position = 5
    for _ in range(verifies):
        accepted = int(rng.integers(0, 4))
        steps.append(step(routing(rng, 4), position, drafted=3, accepted=accepted))
        position += accepted + 1
    header = Header(SHAPE, Provenance.RECORDED, "by hand", DraftShape("draft", 1, 10**6, 8), 3, "measured",
                    sequences=({"name": "one", "domain": "test"},))  # fmt: skip
    return Trace(header, steps)


def plain(steps: int = 30, seed: int = 0) -> Trace:
    """The same without a draft."""
    rng = np.random.default_rng(seed)
    made = [step(routing(rng, 1), position) for position in range(steps)]
    return Trace(replace(speculated(1).header, draft=None, draft_length=0, acceptance="none"), made)


def write(trace: Trace, path: Path) -> Path:
    with TraceWriter(path, trace.header) as writer:
        for one in trace.listed:
            writer.append(one)
    return path


BROKEN = '''
from moe_spac.policies.interface import Key, Policy


class Broken(Policy):
    """Evicts an expert that the running layer needs."""

    def victim(self, incoming, candidates, view):
        return incoming


class Lossy(Policy):
    """As fast as can be, with other tokens."""

    lossless = False

    def dispatch(self, demand, view):
        return []
'''
