"""What a run comes to: pure functions from a run to flat numbers whose names carry their units.

Conventions: decode means everything after prefill, verify steps included; rates come from summed times, never from
averaged rates; a number that has no meaning in a run (acceptance without a draft) is None.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..policies.driver import Counters
from ..traces.schema import Header, Kind, ModelShape, Step
from ..traces.views import Steps
from .engine import GPU_LABELS, Run, StepTime
from .machine import Rates

KINDS = tuple(Kind)
LANES = {"cpu": ("busy",), "link": ("demand", "prefetch"), "dram": ("busy",)}
Metrics = dict[str, Any]  # numbers, None where one has no meaning, and the name of the bottleneck
Table = dict[str, np.ndarray]

OK, INACTIVE, TOO_FEW = "ok", "CACHE_INACTIVE", "SLOTS_LT_TOPK"

BOTTLENECKS = {
    "dense": "GPU (attention and dense weights)",
    "expert": "GPU (expert computation)",
    "draft": "draft model",
    "step": "fixed cost of a step (head, sampling, host loop)",
    "wait_copy": "link (GPU waits for copies)",
    "wait_cpu": "CPU (GPU waits for its experts)",
    "hybrid": "joining CPU and GPU (submit, synchronise, merge)",
    "policy": "policy (time to decide)",
}


@dataclass(frozen=True, slots=True)
class Limited:
    """The first `limit` forward passes of a trace, prefill included; 0: all."""

    trace: Steps
    limit: int

    @property
    def header(self) -> Header:
        return self.trace.header

    def steps(self) -> Iterator[Step]:
        return islice(self.trace.steps(), self.limit or None)


@dataclass(frozen=True, slots=True)
class Load:
    """What a trace asks of a cache, whatever the policy.

    `unions[m]` counts the decode events (one layer of one step) that need m distinct experts; `context` is the longest
    text in tokens, rejected drafts included; `decodes` the steps that are not prefill.
    """

    steps: int
    decodes: int
    context: int
    unions: tuple[int, ...]


def load_of(trace: Steps) -> Load:
    """Read through the trace once."""
    unions = np.zeros(trace.header.target.experts + 1, np.int64)
    steps = decodes = context = 0
    for step in trace.steps():
        steps += 1
        context = max(context, int(step.positions.max()) + 1)
        if step.kind is not Kind.PREFILL:
            decodes += 1
            ordered = np.sort(np.moveaxis(step.experts, 1, 0).reshape(step.experts.shape[1], -1), axis=1)
            np.add.at(unions, 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1), 1)
    return Load(steps, decodes, context, tuple(unions.tolist()))


def table_of(steps: Sequence[StepTime]) -> Table:
    """One int64 column for every time and count of a step; `kind` counts in `KINDS`."""
    table = {
        "kind": _column(KINDS.index(s.kind) for s in steps),
        "tokens": _column(s.tokens for s in steps),
        "drafted": _column(s.drafted for s in steps),
        "emitted": _column(s.emitted for s in steps),
        "wall_ns": _column(s.wall_ns for s in steps),
    }
    for label in GPU_LABELS:
        table[f"gpu_{label}_ns"] = _column(s.gpu.get(label, 0) for s in steps)
    for lane, labels in LANES.items():
        for label in labels:
            table[f"{lane}_{label}_ns"] = _column(getattr(s, lane).get(label, 0) for s in steps)
    return table


def _column(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def check_times(table: Table) -> None:
    """The accounting identity: the GPU's labels add up to every step's wall time, no other lane is busy for longer."""
    gpu = sum(table[f"gpu_{label}_ns"] for label in GPU_LABELS)
    assert np.array_equal(gpu, table["wall_ns"]), "GPU time does not add up to wall time"
    for lane, labels in LANES.items():
        busy = sum(table[f"{lane}_{label}_ns"] for label in labels)
        assert np.all((busy >= 0) & (busy <= table["wall_ns"])), f"{lane} is busy for longer than the step takes"


def status_of(run: Run, shape: ModelShape) -> str:
    """ "ok", or why the numbers of this run are not to be read as those of a working cache."""
    if run.error is not None:
        return f"failed: {run.error}"
    if run.slots == 0:
        return INACTIVE
    return OK if run.slots >= shape.top_k * len(shape.moe_layers) else TOO_FEW


def measure(run: Run, table: Table, shape: ModelShape, rates: Rates, load: Load) -> Metrics:
    """All metrics of one finished run. Definitions stand at the functions below."""
    check_times(table)
    decode = {name: column[table["kind"] != KINDS.index(Kind.PREFILL)] for name, column in table.items()}
    return {
        **_speed(table, decode),
        **_latency(table, decode),
        **_hits(run),
        **_traffic(run, decode, shape.expert_bytes),
        **_prefetching(run, decode, shape.expert_bytes),
        **_gpu_time(decode),
        **_utilisation(run, decode, rates),
        **_speculation(run.decode, decode),
        **_pressure(run.slots, shape, load),
    }


def per(total: float, count: float) -> float | None:
    return float(total / count) if count else None


def _speed(table: Table, decode: Table) -> Metrics:
    """Decode alone: output tokens and the time of the steps that gave them, drafting included."""
    tokens, wall = int(decode["emitted"].sum()), int(decode["wall_ns"].sum())
    prefill_wall = int(table["wall_ns"].sum()) - wall
    prefill_tokens = int(table["tokens"].sum() - decode["tokens"].sum())
    return {
        "tokens": tokens,
        "decode_steps": len(decode["wall_ns"]),
        "decode_wall_ns": wall,
        "tokens_per_s": per(tokens * 1e9, wall),
        "prefill_tokens": prefill_tokens,
        "prefill_wall_ns": prefill_wall,
        "prefill_tokens_per_s": per(prefill_tokens * 1e9, prefill_wall),
    }


def _latency(table: Table, decode: Table) -> Metrics:
    """TTFT: from a prompt's first chunk to the end of the first step after it, mean over prompts. A step's time is
    the gap between bursts of tokens; TPOT shares it evenly among the burst's tokens, each of which counts once."""
    step_ms = decode["wall_ns"] / 1e6
    token_ms = np.repeat(step_ms / np.maximum(decode["emitted"], 1), decode["emitted"])
    return {"ttft_ms_mean": _ttft_ms(table), **_spread("step_ms", step_ms), **_spread("tpot_ms", token_ms)}


def _spread(name: str, values: np.ndarray) -> Metrics:
    marks = {f"{name}_p{p}": float(np.percentile(values, p)) if len(values) else None for p in (50, 95, 99)}
    return {f"{name}_mean": per(float(values.sum()), len(values)), **marks}


def _ttft_ms(table: Table) -> float | None:
    prefill = table["kind"] == KINDS.index(Kind.PREFILL)
    before = np.r_[False, prefill[:-1]] if len(prefill) else prefill
    starts, firsts = np.flatnonzero(prefill & ~before), np.flatnonzero(~prefill & before)
    ends = np.cumsum(table["wall_ns"])
    starts = starts[: len(firsts)]  # a trace may be cut inside its last prompt
    return per(float((ends[firsts] - ends[starts] + table["wall_ns"][starts]).sum()) / 1e6, len(firsts))


def _hits(run: Run) -> Metrics:
    """Per assignment: of all tokens x top-k choices, those whose expert was resident when the layer's gate spoke.
    Per unique expert: the same over the distinct experts of each layer event, which is what the link sees."""
    d, p = run.decode, run.prefill
    return {
        "hit_rate_assignment": per(d.hit_assignments, d.assignments),
        "hit_rate_unique": per(d.hits, d.needed),
        "prefill_hit_rate_assignment": per(p.hit_assignments, p.assignments),
        "prefill_hit_rate_unique": per(p.hits, p.needed),
        "cpu_share_unique": per(d.cpu, d.needed),
    }


def _traffic(run: Run, decode: Table, size: int) -> Metrics:
    """Bytes from host to device for each output token: to keep, to use once, ahead of need."""
    d, tokens = run.decode, int(decode["emitted"].sum())
    return {
        "h2d_bytes_per_token": per(d.copies * size, tokens),
        "h2d_demand_bytes_per_token": per(d.fetches * size, tokens),
        "h2d_stream_bytes_per_token": per(d.streams * size, tokens),
        "h2d_prefetch_bytes_per_token": per(d.prefetches * size, tokens),
        "prefill_h2d_bytes": run.prefill.copies * size,
        "evictions": d.evictions,
        "fallbacks": d.fallbacks,
    }


def _prefetching(run: Run, decode: Table, size: int) -> Metrics:
    """Over the whole run, because a prefetch of prefill may serve decode. precision: used before eviction, of those
    issued; late: used, but still on the wire at the gate; wasted: evicted unused."""
    both = run.prefill + run.decode
    used = both.prefetches_used + both.prefetches_late
    return {
        "prefetches": both.prefetches,
        "prefetch_precision": per(used, both.prefetches),
        "prefetch_late_share": per(both.prefetches_late, both.prefetches),
        "prefetch_wasted_bytes": both.prefetches_wasted * size,
        "prefetch_wasted_bytes_per_token": per(run.decode.prefetches_wasted * size, int(decode["emitted"].sum())),
    }


def _gpu_time(decode: Table) -> Metrics:
    """Where a token's time goes on the GPU's timeline, which is the run's; the parts add up to `tpot_ms_mean`."""
    tokens = int(decode["emitted"].sum())
    totals = {label: int(decode[f"gpu_{label}_ns"].sum()) for label in GPU_LABELS}
    parts: Metrics = {f"gpu_{label}_ms_per_token": per(ns / 1e6, tokens) for label, ns in totals.items()}
    return {**parts, "bottleneck": max(totals, key=lambda label: totals[label]) if sum(totals.values()) else None}


def _utilisation(run: Run, decode: Table, rates: Rates) -> Metrics:
    """Busy time over wall time; for the link also bytes over what it could have moved, which small copies lower."""
    wall = int(decode["wall_ns"].sum())
    waits = sum(int(decode[f"gpu_{label}_ns"].sum()) for label in ("wait_copy", "wait_cpu"))
    busy: Metrics = {"gpu_utilisation": per(wall - waits, wall)}
    for lane, labels in LANES.items():
        busy[f"{lane}_utilisation"] = per(sum(int(decode[f"{lane}_{label}_ns"].sum()) for label in labels), wall)
    return {**busy, "link_bandwidth_utilisation": per(run.decode.copies * rates.costs.copy_bytes_ns, wall)}


def _speculation(counts: Counters, decode: Table) -> Metrics:
    """Acceptance is of drafted tokens; the union ratio is distinct experts over tokens x top-k, over all layers."""
    verify = decode["kind"] == KINDS.index(Kind.VERIFY)
    steps, drafted = int(verify.sum()), int(decode["drafted"][verify].sum())
    emitted = int(decode["emitted"][verify].sum())
    return {
        "verify_steps": steps,
        "verify_ms_mean": per(float(decode["wall_ns"][verify].sum()) / 1e6, steps),
        "drafted_per_verify": per(drafted, steps),
        "tokens_per_verify": per(emitted, steps),
        "acceptance_rate": per(emitted - steps, drafted),
        "union_ratio": per(counts.needed, counts.assignments),
    }


def _pressure(slots: int, shape: ModelShape, load: Load) -> Metrics:
    """Pressure r of an event: its distinct experts over the slots of a layer. Above 1 it cannot be held at once."""
    share = slots / len(shape.moe_layers)
    sizes, counts = np.arange(len(load.unions)), np.array(load.unions)
    return {
        "slots_per_layer": share,
        "slots_per_layer_over_top_k": share / shape.top_k,
        "pressure_mean": per(float((sizes * counts).sum()), share * counts.sum()),
        "pressure_share_above_1": per(int(counts[sizes > share].sum()), int(counts.sum())) if slots else None,
    }


def gaps(mine: Mapping[str, Any], best: Mapping[str, Any], base: Mapping[str, Any] | None) -> Metrics:
    """Distance to the offline optimum of on-demand caching, by distinct experts. It is below 0 where a policy hits
    more by prefetching, or by experts that it placed before the first step.

    gap_to_optimum: difference in hit rate; gap_closed: what share of the way from `base` (AR-LRU) to the optimum is
    gone, in misses, (m_base - m) / (m_base - m_min).
    """
    gap = best["hit_rate_unique"] - mine["hit_rate_unique"]
    whole = best["hit_rate_unique"] - base["hit_rate_unique"] if base else 0.0
    return {"gap_to_optimum": gap, "gap_closed": 1 - gap / whole if whole else None}
