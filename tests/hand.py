"""Hand-made traces and constant-cost machines, so that answers can be worked out on paper."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_spac.policies.interface import Costs, Setup
from moe_spac.simulator.machine import Rates
from moe_spac.traces.schema import Header, Kind, ModelShape, Provenance, Step


def shape(layers: int, experts: int, top_k: int, expert_bytes: int = 1000) -> ModelShape:
    return ModelShape("hand", layers, tuple(range(layers)), experts, top_k, 8, 8, "float32", expert_bytes, 1000, 8)


def rates(
    copy: int = 0, gpu: int = 0, cpu: int = 0, dense: int = 0, hybrid: int = 0, dram: int = 10**15, **more: Any
) -> Rates:
    """Times in ns; an expert costs the same for any number of tokens."""
    costs = Costs(gpu, 0, 0.0, 0, 0, cpu, 0.0, hybrid, more.pop("copy_fixed", 0), copy)
    around = {"step_ns": 0, "draft_token_ns": 0, "policy_ns": 0} | more
    return Rates(costs, dense, 0, 0.0, 0.0, dram_bytes_per_s=dram, **around)


def setup(layers: int, experts: int, slots: Sequence[int], costs: Costs | None = None, top_k: int = 2) -> Setup:
    return Setup(layers, experts, top_k, 1000, tuple(slots), costs or rates().costs)


def step(routing: Sequence[Sequence[Sequence[int]]], position: int = 0, drafted: int = 0, accepted: int = 0) -> Step:
    """`routing[token][layer]` lists the experts."""
    n = len(routing)
    marks = np.arange(n) >= n - drafted
    return Step(
        0,
        0,
        Kind.VERIFY if drafted else Kind.DECODE,
        np.arange(position, position + n, dtype=np.int32),
        np.zeros(n, np.int32),
        marks,
        accepted,
        np.array(routing, np.uint8),
    )


def decode(*sets: Sequence[int], layers: int = 1) -> list[Step]:
    """One decode step for each set of experts, the same in every layer."""
    return [step([[list(s)] * layers], position) for position, s in enumerate(sets)]


@dataclass
class Trace:
    header: Header
    listed: list[Step]

    def steps(self) -> list[Step]:
        return self.listed


def trace(steps: list[Step], experts: int, expert_bytes: int = 1000) -> Trace:
    _, layers, top_k = steps[0].experts.shape
    header = Header(shape(layers, experts, top_k, expert_bytes), Provenance.SYNTHETIC, "by hand")
    return Trace(header, steps)
