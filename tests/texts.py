"""Small texts in memory whose rows can be told apart, for views of traces."""

from dataclasses import dataclass

import numpy as np

from moe_spac.traces.schema import Header, Kind, ModelShape, Provenance, Step

SHAPE = ModelShape("tiny", 2, (0, 1), 6, 2, 8, 4, "float32", 384, 1000, 64)
SEQUENCES = tuple({"name": f"s{i}", "domain": "d"} for i in range(3))
PLAIN = Header(SHAPE, Provenance.SYNTHETIC, "made for a test", sequences=SEQUENCES)
ARRAYS = ("positions", "tokens", "drafted", "experts", "weights", "scores", "ahead")


@dataclass
class InMemory:
    header: Header
    content: list[Step]

    def steps(self):
        return iter(self.content)


def some_step(kind: Kind, first: int, n: int = 1, sequence: int = 0, turn: int = 0, accepted: int = 0) -> Step:
    """Everything in a row follows from its position, so that rows can be told apart."""
    positions = np.arange(first, first + n)
    rng = np.random.default_rng(first)
    experts = np.argsort(rng.random((n, 2, 6)), axis=-1)[..., :2].astype(np.uint8)
    drafted = np.arange(n) > 0 if kind is Kind.VERIFY else np.zeros(n, bool)
    weights = rng.random((n, 2, 2)).astype(np.float16)
    return Step(sequence, turn, kind, positions, positions + 100, drafted, accepted, experts, weights)


def plain_text(*lengths: int) -> InMemory:
    """Sequences of a prefill of 3 and the given numbers of decoded tokens."""
    steps = []
    for sequence, length in enumerate(lengths):
        steps.append(some_step(Kind.PREFILL, 0, 3, sequence))
        steps += [some_step(Kind.DECODE, 3 + i, sequence=sequence) for i in range(length)]
    return InMemory(PLAIN, steps)


def equal(a: Step, b: Step) -> bool:
    plain = (a.sequence, a.turn, a.kind, a.accepted) == (b.sequence, b.turn, b.kind, b.accepted)
    return plain and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ARRAYS if getattr(a, n) is not None)


def positions_and_kinds(trace) -> list[tuple[str, list[int], int]]:
    return [(str(s.kind), s.positions.tolist(), s.accepted) for s in trace.steps()]
