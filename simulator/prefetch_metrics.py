"""What moved and what for: bytes by kind, and what prefetching brought. Definitions: `definitions.METRICS`."""

from typing import Any

import numpy as np

from ..policies.driver import Counters
from .definitions import Metrics, per


def traffic(prefill: Counters, decode: Counters, size: int, tokens: int, accepted: int) -> Metrics:
    """Bytes of decode from host to device (whole copies and what cancelled ones had moved) and bytes that the CPU read
    to compute experts. size: bytes of an expert; tokens: output tokens; accepted: drafted tokens that were kept."""
    d = decode
    moved = d.copies * size + d.cancelled_bytes
    ahead = (d.prefetches - d.cancelled) * size + d.cancelled_bytes
    return {
        "h2d_bytes_per_token": per(moved, tokens),
        "h2d_demand_bytes_per_token": per(d.fetches * size, tokens),
        "h2d_stream_bytes_per_token": per(d.streams * size, tokens),
        "h2d_prefetch_bytes_per_token": per(ahead, tokens),
        "cpu_bytes_per_token": per(d.cpu * size, tokens),
        "write_back_bytes_per_token": per(d.write_backs * size, tokens),
        "h2d_bytes_per_accepted_draft": per(moved, accepted),
        "cpu_bytes_per_accepted_draft": per(d.cpu * size, accepted),
        "prefill_h2d_bytes": prefill.copies * size + prefill.cancelled_bytes,
        "prefill_cpu_bytes": prefill.cpu * size,
        "effective_miss_fraction": per(d.copies, d.assignments),
        "prefill_effective_miss_fraction": per(prefill.copies, prefill.assignments),
        "evictions": d.evictions,
        "write_backs": d.write_backs,
        "fallbacks": d.fallbacks,
    }


def prefetching(prefill: Counters, decode: Counters, size: int, tokens: int) -> Metrics:
    """Over the whole run, because a prefetch of prefill may serve decode.

    Every prefetch ends as one of: in time (used, and there at the gate), late (used, but on the wire at the gate),
    evicted unused, cancelled, or still unused when the trace ends.
    """
    both = prefill + decode
    used = both.prefetches_used + both.prefetches_late
    without = used + both.needed - both.hits - both.joins  # needs that would have missed without prefetching
    left = both.prefetches - used - both.prefetches_wasted - both.cancelled
    wasted = both.prefetches_wasted * size + both.cancelled_bytes
    moved = both.copies * size + both.cancelled_bytes
    return {
        "prefetches": both.prefetches,
        "prefetch_precision": per(used, both.prefetches),
        "prefetch_recall": per(used, without) if both.prefetches else None,
        "prefetch_timely_recall": per(both.prefetches_used, without) if both.prefetches else None,
        "prefetch_in_time_share": per(both.prefetches_used, both.prefetches),
        "prefetch_late_share": per(both.prefetches_late, both.prefetches),
        "prefetch_evicted_unused_share": per(both.prefetches_wasted, both.prefetches),
        "prefetch_cancelled_share": per(both.cancelled, both.prefetches),
        "prefetch_unused_at_end_share": per(left, both.prefetches),
        "wasted_bytes": wasted,
        "wasted_share": per(wasted + both.write_backs * size, moved + both.write_backs * size),
        "wasted_bytes_per_token": per(decode.prefetches_wasted * size + decode.cancelled_bytes, tokens),
    }


def forecasting(prefetches: int, forecast: int, right: int) -> Metrics:
    """How good the trace's forecasts of the next layer are and how many became prefetches (ProMoE's GoodPred).

    forecast: experts that the next layer's gate named on this layer's input, summed over decode events; right: those
    of them that the next layer then needed; prefetches: those begun in decode.
    """
    rate = per(prefetches, forecast)
    accuracy = per(right, forecast)
    return {
        "forecast_accuracy": accuracy,
        "fetch_rate": rate,
        "good_pred": None if rate is None or accuracy is None else min(rate, 1.0) * accuracy,
    }


Layers = dict[str, np.ndarray]


def layer_rows(layers: Layers, assignments: int, moe_layers: tuple[int, ...]) -> list[dict[str, Any]]:
    """Decode by MoE layer. `assignments`: of one layer, the same for all. Rates are per distinct expert."""
    rows = []
    for index, absolute in enumerate(moe_layers):
        counts = {name: int(column[index]) for name, column in layers.items()}
        rates = {"hit_rate": per(counts["hits"], counts["needed"]), "union_ratio": per(counts["needed"], assignments)}
        rows.append({"layer": index, "model_layer": absolute, **counts, **rates})
    return rows


def layer_spread(layers: Layers, assignments: int) -> Metrics:
    """The extremes of the layers; the rest stands in layers.csv."""
    if not assignments:
        return dict.fromkeys(("union_ratio_layer_min", "union_ratio_layer_max", "hit_rate_layer_min",
                              "hit_rate_layer_max"))  # fmt: skip
    needed, hits = layers["needed"], layers["hits"]
    rates = hits / np.maximum(needed, 1)
    return {
        "union_ratio_layer_min": float(needed.min() / assignments),
        "union_ratio_layer_max": float(needed.max() / assignments),
        "hit_rate_layer_min": float(rates.min()),
        "hit_rate_layer_max": float(rates.max()),
    }
