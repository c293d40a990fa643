"""Every number of a run by name: its unit and what it means. The keys are those of `metrics.json` and `--json`.

Decode means all steps after prefill, verify steps included. An event is one MoE layer of one step; an assignment is one
of a token's top-k choices, before repeated experts of an event are counted as one. None: the number has no meaning in
that run (acceptance without a draft).
"""

from typing import Any

Metrics = dict[str, Any]  # numbers, None where one has no meaning, and the name of the bottleneck

# The GPU's timeline is the run's: every nanosecond goes to one of these.
GPU_PARTS = {
    "dense": "attention, norms, router and dense weights",
    "expert": "experts computed on the GPU",
    "draft": "draft model",
    "step": "fixed cost of a step (head, sampling, host loop)",
    "wait_copy": "exposed transfer: the GPU waits solely for a copy",
    "wait_cpu": "exposed CPU: the GPU waits solely for the CPU's experts",
    "hybrid": "joining CPU and GPU (submit, synchronise, merge)",
    "policy": "the policy decides (a constant of the machine profile here; measured by a live run)",
}


def per(total: float, count: float) -> float | None:
    return float(total / count) if count else None


def _spread(name: str, unit: str, what: str) -> dict[str, tuple[str, str]]:
    marks = {f"{name}_p{p}": (unit, f"{what}; percentile {p}") for p in (50, 95, 99)}
    return {f"{name}_mean": (unit, f"{what}; mean"), **marks}


METRICS: dict[str, tuple[str, str]] = {
    # Speed and latency
    "tokens": ("tokens", "output tokens of decode"),
    "decode_steps": ("steps", "forward passes of the target after prefill"),
    "decode_wall_ns": ("ns", "time of all decode steps, drafting included"),
    "tokens_per_s": ("tokens/s", "output tokens over decode time"),
    "tokens_per_s_per_sequence": ("tokens/s", "output tokens over decode time that sequences spent in steps: what one "
                                              "of a batch gets"),
    "tokens_per_s_end_to_end": ("tokens/s", "output tokens over all time, prefill included"),
    "prefill_tokens": ("tokens", "prompt tokens fed"),
    "prefill_wall_ns": ("ns", "time of all prefill steps"),
    "prefill_tokens_per_s": ("tokens/s", "prompt tokens over prefill time"),
    "ttft_ms_mean": ("ms", "from a prompt's first chunk to the end of the first step after it; mean over prompts"),
    **_spread("step_ms", "ms", "time of a decode step: the gap between bursts of tokens under speculation"),
    **_spread("tpot_ms", "ms", "time per output token: a step's time shared evenly among the tokens it gave"),
    **_spread("verify_ms", "ms", "time of a verify step with its drafting"),
    # Hits
    "assignments": ("assignments", "of decode"),
    "needed": ("experts", "distinct experts of every event of decode, added up"),
    "hit_rate_assignment": ("share", "assignments whose expert was resident at the gate, over all assignments"),
    "hit_rate_unique": ("share", "resident distinct experts of an event over all distinct ones: what the link sees"),
    "prefill_hit_rate_assignment": ("share", "as hit_rate_assignment, prefill"),
    "prefill_hit_rate_unique": ("share", "as hit_rate_unique, prefill"),
    "cpu_share_unique": ("share", "distinct experts of an event that the CPU computed, over all distinct"),
    "hit_rate_layer_min": ("share", "hit_rate_unique of the layer with the lowest"),
    "hit_rate_layer_max": ("share", "hit_rate_unique of the layer with the highest"),
    "effective_miss_fraction": ("share", "experts copied over assignments (before repeats are joined)"),
    "prefill_effective_miss_fraction": ("share", "as effective_miss_fraction, prefill"),
    # Bytes
    "h2d_bytes_per_token": ("bytes", "host to device per output token: copies, and what cancelled ones had moved"),
    "h2d_demand_bytes_per_token": ("bytes", "of these: copied for the running layer and offered a slot"),
    "h2d_stream_bytes_per_token": ("bytes", "of these: copied for the running layer and dropped after it"),
    "h2d_prefetch_bytes_per_token": ("bytes", "of these: copied ahead of need"),
    "cpu_bytes_per_token": ("bytes", "weights that the CPU read to compute experts, per output token"),
    "write_back_bytes_per_token": ("bytes", "device to host: victims copied back, per output token"),
    "h2d_bytes_per_accepted_draft": ("bytes", "host to device in decode over drafted tokens that were accepted"),
    "cpu_bytes_per_accepted_draft": ("bytes", "read by the CPU's experts over drafted tokens that were accepted"),
    "prefill_h2d_bytes": ("bytes", "host to device in prefill"),
    "prefill_cpu_bytes": ("bytes", "read by the CPU's experts in prefill"),
    "evictions": ("experts", "evicted in decode"),
    "write_backs": ("experts", "victims copied back to the host in decode"),
    "fallbacks": ("decisions", "decisions that the policy left out, in decode"),
    # Prefetching, prefill and decode together
    "prefetches": ("experts", "prefetches begun, prefill and decode together"),
    "prefetch_precision": ("share", "prefetches used before eviction (in time or late), over prefetches"),
    "prefetch_recall": ("share", "coverage: needs served by a prefetch (in time or late), over needs that would have "
                                 "missed without prefetching"),
    "prefetch_timely_recall": ("share", "as prefetch_recall, only those that had landed at the gate"),
    "prefetch_in_time_share": ("share", "prefetches used that had landed at the gate"),
    "prefetch_late_share": ("share", "prefetches used that were still on the wire at the gate"),
    "prefetch_evicted_unused_share": ("share", "prefetches evicted before any use: too early, or wrong"),
    "prefetch_cancelled_share": ("share", "prefetches given up before they had landed"),
    "prefetch_unused_at_end_share": ("share", "prefetches still waiting for a use when the trace ends"),
    "wasted_bytes": ("bytes", "of prefetches evicted unused, and what cancelled ones had moved"),
    "wasted_share": ("share", "wasted_bytes and write-backs over all bytes on the link, both directions"),
    "wasted_bytes_per_token": ("bytes", "wasted_bytes of decode per output token"),
    "forecast_accuracy": ("share", "experts that the next layer's gate named one layer ahead and that were then "
                                   "needed, over named; for policies that hear such forecasts"),
    "fetch_rate": ("share", "prefetches of decode over experts so named (resident ones need none)"),
    "good_pred": ("share", "forecast_accuracy x fetch_rate (ProMoE's GOODPRED)"),
    # Time on the GPU's timeline
    **{f"gpu_{part}_ns": ("ns", f"decode: {what}; the parts add up to decode_wall_ns") for part, what in
       GPU_PARTS.items()},
    **{f"gpu_{part}_ms_per_token": ("ms", f"decode, per output token: {what}; the parts add up to tpot_ms_mean")
       for part, what in GPU_PARTS.items()},
    "bottleneck": ("name", "the largest part"),
    "policy_us_per_event": ("us", "planning overhead of an event: a constant of the profile; live runs measure it"),
    # Resources, decode
    "gpu_utilisation": ("share", "1 - waiting/wall"),
    "gpu_bubble": ("share", "waiting/wall"),
    "cpu_utilisation": ("share", "busy/wall"),
    "cpu_bubble": ("share", "1 - busy/wall"),
    "link_utilisation": ("share", "busy/wall, host to device"),
    "back_utilisation": ("share", "busy/wall, device to host: victims copied back"),
    "dram_utilisation": ("share", "time with any flow, over wall"),
    "link_bandwidth_utilisation": ("share", "time that the bytes alone need at the link's rate, over wall: small "
                                            "copies lower it"),
    # Speculation
    "verify_steps": ("steps", "decode steps with drafted tokens"),
    "drafted_per_verify": ("tokens", "drafted tokens of a verify step, mean"),
    "tokens_per_verify": ("tokens", "acceptance length: output tokens of a verify step, the target's own included"),
    "acceptance_rate": ("share", "drafted tokens accepted, over drafted"),
    "accepted_drafts": ("tokens", "drafted tokens accepted"),
    "draft_overhead": ("share", "drafting time over the time of verify steps with their drafting"),
    "union_ratio": ("share", "distinct experts of an event over its assignments"),
    "union_ratio_layer_min": ("share", "union_ratio of the layer with the lowest"),
    "union_ratio_layer_max": ("share", "union_ratio of the layer with the highest"),
    # Pressure
    "slots_least": ("slots", "fewest in all while keys and values took some"),
    "slots_most": ("slots", "most in all"),
    "slots_per_layer": ("slots", "slots over MoE layers"),
    "slots_per_layer_over_top_k": ("ratio", "slots of a layer over the experts that one token needs"),
    "pressure_mean": ("ratio", "r: distinct experts of an event over a layer's slots; mean"),
    "pressure_share_above_1": ("share", "events with r above 1, which cannot be held at once"),
    "vram_bytes": ("bytes", "of the card in use: weights that stay there, the draft's too, keys and values of the "
                            "longest text, expert slots with staging, what driver and desktop hold"),
    # Bounds
    "gap_to_optimum": ("share", "hit_rate_unique of MIN less this; below 0 where prefetching hits more"),
    "gap_closed": ("share", "in misses, (LRU - this) / (LRU - MIN)"),
    "fluid_bound_tokens_per_s": ("tokens/s", "what no lossless policy can exceed here (bounds.py)"),
    "gap_closed_time": ("share", "in time, (T_LRU - T) / (T_LRU - T_fluid), the fluid bound taken layer by layer"),
    # Evictions, with --regret
    "victim_picks": ("picks", "evictions that a policy chose among several residents"),
    "victim_optimal_share": ("share", "picks among the residents whose next use is farthest, ties included"),
    "victim_regret_events_mean": ("events", "how much sooner a victim is used again than the farthest; the end of the "
                                            "trace stands for never"),
}  # fmt: skip
