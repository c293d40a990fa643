"""Small trace files of random steps."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from moe_spac.traces.schema import Header, Kind, ModelShape, Provenance, Step
from moe_spac.traces.writer import TraceWriter

FIXTURES = Path(__file__).parent / "traces" / "fixtures"
ARRAYS = ("positions", "tokens", "drafted", "experts", "weights", "scores", "ahead")


def small_header(experts: int = 6, layers: int = 2, top_k: int = 2, **more) -> Header:
    shape = ModelShape("tiny", layers + 1, tuple(range(1, layers + 1)), experts, top_k, 8, 4, "float32", 384, 1000, 64)
    return replace(Header(shape, Provenance.SYNTHETIC, "made for a test"), **more)


def random_step(rng: np.random.Generator, header: Header, kind: Kind = Kind.DECODE, n: int = 1, **more) -> Step:
    layers, experts, k = len(header.target.moe_layers), header.target.experts, header.target.top_k

    def top(*shape: int) -> np.ndarray:
        return np.argsort(rng.random((*shape, experts)), axis=-1)[..., :k]

    step = Step(
        sequence=0,
        turn=0,
        kind=kind,
        positions=np.arange(n),
        tokens=rng.integers(0, 1000, n),
        drafted=np.arange(n) > 0 if kind is Kind.VERIFY else np.zeros(n, bool),
        accepted=int(rng.integers(0, n)) if kind is Kind.VERIFY else 0,
        experts=top(n, layers),
        weights=rng.random((n, layers, k)) if header.weights else None,
        scores=rng.random((n, layers, experts)) if header.scores else None,
        ahead=top(n, layers, header.lookahead) if header.lookahead else None,
    )
    return replace(step, **more)


def write(path: Path, header: Header, steps: list[Step], flush_each: bool = False) -> Path:
    with TraceWriter(path, header) as writer:
        for step in steps:
            writer.append(step)
            if flush_each:
                writer.flush()
    return path


def same(a: Step, b: Step) -> bool:
    if (a.sequence, a.turn, a.kind, a.accepted) != (b.sequence, b.turn, b.kind, b.accepted):
        return False
    pairs = [(getattr(a, name), getattr(b, name)) for name in ARRAYS]
    return all(
        (x is None) == (y is None) and (x is None or np.array_equal(x, np.asarray(y, x.dtype))) for x, y in pairs
    )
