"""What a run comes to: pure functions from a run to flat numbers whose names carry their units.

Conventions: decode means everything after prefill, verify steps included; rates come from summed times, never from
averaged rates; a number that has no meaning in a run (acceptance without a draft) is None. `definitions.METRICS` has
the unit and the meaning of each.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..policies.driver import Counters
from ..traces.schema import Header, Kind, ModelShape, Step
from ..traces.views import Steps
from .definitions import Metrics, per
from .engine import Run
from .machine import Rates
from .prefetch_metrics import forecasting, prefetching, traffic
from .steptimes import GPU_LABELS, KINDS, LANES, Table

OK, INACTIVE, TOO_FEW, UNROUTED = "ok", "CACHE_INACTIVE", "SLOTS_LT_TOPK", "LAYER_WITHOUT_ROUTING"

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
    text in tokens, rejected drafts included; `decodes` the steps that are not prefill. Of the forecasts in the trace,
    `forecast` counts the experts named one layer ahead in decode and `right` those of them that were needed.
    `unrouted` lists layers where some token has fewer distinct experts than top-k: nobody recorded these.
    """

    steps: int
    decodes: int
    context: int
    unions: tuple[int, ...]
    forecast: int = 0
    right: int = 0
    unrouted: tuple[int, ...] = ()


def load_of(trace: Steps) -> Load:
    """Read through the trace once."""
    shape = trace.header.target
    unions = np.zeros(shape.experts + 1, np.int64)
    short = np.zeros(len(shape.moe_layers), bool)
    steps = decodes = context = forecast = right = 0
    for step in trace.steps():
        steps += 1
        context = max(context, int(step.positions.max()) + 1)
        if step.kind is not Kind.PREFILL:
            decodes += 1
            needed = _chosen(step.experts, shape.experts)
            sizes = needed.sum(axis=1)
            short |= sizes < shape.top_k
            np.add.at(unions, sizes, 1)
            if step.ahead is not None:
                named = _chosen(step.ahead[:, :-1, 0], shape.experts)
                forecast += int(named.sum())
                right += int((named & needed[1:]).sum())
    unrouted = tuple(np.flatnonzero(short).tolist())
    return Load(steps, decodes, context, tuple(unions.tolist()), forecast, right, unrouted)


def _chosen(ids: np.ndarray, experts: int) -> np.ndarray:
    """[L, E] bool: experts that any token chose; ids: [n, L, k]."""
    chosen = np.zeros((ids.shape[1], experts), bool)
    chosen[np.arange(ids.shape[1])[:, None], ids] = True
    return chosen


def check_times(table: Table) -> None:
    """The accounting identity: the GPU's labels add up to every step's wall time, no other lane is busy for longer."""
    gpu = sum(table[f"gpu_{label}_ns"] for label in GPU_LABELS)
    assert np.array_equal(gpu, table["wall_ns"]), "GPU time does not add up to wall time"
    for lane, labels in LANES.items():
        busy = sum(table[f"{lane}_{label}_ns"] for label in labels)
        assert np.all((busy >= 0) & (busy <= table["wall_ns"])), f"{lane} is busy for longer than the step takes"


def status_of(run: Run, shape: ModelShape, load: Load) -> str:
    """ "ok", or why the numbers of this run are not to be read as those of a working cache.

    A cache is inactive without slots, and where no expert was ever resident or copied: the policy did nothing.
    """
    if run.error is not None:
        return f"failed: {run.error}"
    if 0 < min(_slots_seen(run)) < shape.top_k * len(shape.moe_layers):
        return TOO_FEW
    both = run.prefill + run.decode
    if run.slots == 0 or both.hits + both.copies + both.joins == 0:
        return INACTIVE
    return UNROUTED if load.unrouted else OK


def _slots_seen(run: Run) -> tuple[int, int]:
    return run.slots_seen if run.slots_seen[1] else (run.slots, run.slots)


def measure(
    run: Run, table: Table, shape: ModelShape, rates: Rates, load: Load, channels: Iterable[str] = ()
) -> Metrics:
    """All metrics of one finished run. `channels`: forecasts that its policy hears."""
    check_times(table)
    decode = {name: column[table["kind"] != KINDS.index(Kind.PREFILL)] for name, column in table.items()}
    size, tokens = shape.expert_bytes, int(decode["emitted"].sum())
    speculation = _speculation(run.decode, decode)
    heard = load.forecast if "next-gate" in channels else 0
    return {
        **_speed(table, decode),
        **_latency(table, decode),
        **_hits(run),
        **traffic(run.prefill, run.decode, size, tokens, speculation["accepted_drafts"]),
        **prefetching(run.prefill, run.decode, size, tokens),
        **forecasting(run.decode.prefetches, heard, load.right),
        **_gpu_time(run.decode, decode),
        **_utilisation(run, decode, rates),
        **speculation,
        "slots_least": _slots_seen(run)[0],
        "slots_most": _slots_seen(run)[1],
        **_pressure(run.slots, shape, load),
    }


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
        "tokens_per_s_per_sequence": per(tokens * 1e9, int((decode["wall_ns"] * _sequences(decode)).sum())),
        "tokens_per_s_end_to_end": per(tokens * 1e9, wall + prefill_wall),
        "prefill_tokens": prefill_tokens,
        "prefill_wall_ns": prefill_wall,
        "prefill_tokens_per_s": per(prefill_tokens * 1e9, prefill_wall),
    }


def _sequences(decode: Table) -> np.ndarray:
    """Sequences in each step: every one brings a row that is not drafted."""
    return decode["tokens"] - decode["drafted"]


def _latency(table: Table, decode: Table) -> Metrics:
    """TTFT: from a prompt's first chunk to the end of the first step after it, mean over prompts. A step's time is
    the gap between bursts of tokens; TPOT shares it evenly among the burst's tokens, each of which counts once."""
    step_ms = decode["wall_ns"] / 1e6
    token_ms = np.repeat(step_ms / np.maximum(decode["emitted"], 1), decode["emitted"])
    verify_ms = step_ms[decode["kind"] == KINDS.index(Kind.VERIFY)]
    spreads = {"step_ms": step_ms, "tpot_ms": token_ms, "verify_ms": verify_ms}
    found: Metrics = {"ttft_ms_mean": _ttft_ms(table)}
    for name, values in spreads.items():
        found |= _spread(name, values)
    return found


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
        "assignments": d.assignments,
        "needed": d.needed,
        "hit_rate_assignment": per(d.hit_assignments, d.assignments),
        "hit_rate_unique": per(d.hits, d.needed),
        "prefill_hit_rate_assignment": per(p.hit_assignments, p.assignments),
        "prefill_hit_rate_unique": per(p.hits, p.needed),
        "cpu_share_unique": per(d.cpu, d.needed),
    }


def _gpu_time(counts: Counters, decode: Table) -> Metrics:
    """Where decode's time goes on the GPU's timeline, which is the run's; the parts add up, in ns and per token."""
    tokens = int(decode["emitted"].sum())
    totals = {label: int(decode[f"gpu_{label}_ns"].sum()) for label in GPU_LABELS}
    return {
        **{f"gpu_{label}_ns": ns for label, ns in totals.items()},
        **{f"gpu_{label}_ms_per_token": per(ns / 1e6, tokens) for label, ns in totals.items()},
        "bottleneck": max(totals, key=lambda label: totals[label]) if sum(totals.values()) else None,
        "policy_us_per_event": per(totals["policy"] / 1e3, counts.events),
    }


def _utilisation(run: Run, decode: Table, rates: Rates) -> Metrics:
    """Busy time over wall time; for the link also bytes over what it could have moved, which small copies lower."""
    wall = int(decode["wall_ns"].sum())
    waits = sum(int(decode[f"gpu_{label}_ns"].sum()) for label in ("wait_copy", "wait_cpu"))
    busy = {lane: sum(int(decode[f"{lane}_{label}_ns"].sum()) for label in labels) for lane, labels in LANES.items()}
    return {
        "gpu_utilisation": per(wall - waits, wall),
        "gpu_bubble": per(waits, wall),
        **{f"{lane}_utilisation": per(ns, wall) for lane, ns in busy.items()},
        "cpu_bubble": per(wall - busy["cpu"], wall),
        "link_bandwidth_utilisation": per(run.decode.copies * rates.costs.copy_bytes_ns, wall),
    }


def _speculation(counts: Counters, decode: Table) -> Metrics:
    """Acceptance is of drafted tokens; the union ratio is distinct experts over tokens x top-k, over all layers."""
    verify = decode["kind"] == KINDS.index(Kind.VERIFY)
    steps, drafted = int(verify.sum()), int(decode["drafted"][verify].sum())
    emitted, own = int(decode["emitted"][verify].sum()), int(_sequences(decode)[verify].sum())
    return {
        "verify_steps": steps,
        "drafted_per_verify": per(drafted, steps),
        "tokens_per_verify": per(emitted, steps),
        "acceptance_rate": per(emitted - own, drafted),
        "accepted_drafts": emitted - own,
        "draft_overhead": per(int(decode["gpu_draft_ns"][verify].sum()), int(decode["wall_ns"][verify].sum())),
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


def time_gap(mine: Mapping[str, Any], base: Mapping[str, Any] | None, bound_ns: int) -> Metrics:
    """Against the fluid bound of decode, `bound_ns`: its speed, and what share of the way from `base` (AR-LRU) to it
    is gone, in time, (T_base - T) / (T_base - T_bound)."""
    whole = base["decode_wall_ns"] - bound_ns if base else 0
    return {
        "fluid_bound_tokens_per_s": per(mine["tokens"] * 1e9, bound_ns),
        "gap_closed_time": (base["decode_wall_ns"] - mine["decode_wall_ns"]) / whole if base and whole > 0 else None,
    }
