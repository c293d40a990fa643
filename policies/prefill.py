"""Prefill of experts that are not on the GPU: copy them all, or compute them on the CPU?"""

from collections.abc import Sequence
from itertools import repeat

from .interface import Costs, Where


def expected_union(experts: int, top_k: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens need if each chooses its `top_k` of `experts` evenly and independently:
    N (1 - ((N - k) / N)^B). Text repeats itself, so a recorded union is smaller and is to be preferred.
    """
    return experts * (1 - ((experts - top_k) / experts) ** tokens)


def stream_ns(loads: Sequence[int], costs: Costs) -> int:
    """Copy experts one after another and compute each on the GPU as it lands, while the next one is copied."""
    copied = done = 0
    for load in loads:
        copied += costs.copy_ns
        done = max(done, copied) + costs.gpu_ns(load)
    return done


def cpu_ns(loads: Sequence[int], costs: Costs) -> int:
    """The CPU computes the experts one after another, and the layer is joined."""
    return costs.hybrid_ns + sum(costs.cpu_ns(load, first=i == 0) for i, load in enumerate(loads))


def cheaper_absent(loads: Sequence[int], costs: Costs) -> Where:
    """Where the absent experts of a layer go, `loads` being the tokens that chose each: STREAM or CPU, as a tie is.

    All go one way, as in llama.cpp; that CPU and link share the host's memory is left out.
    """
    return Where.STREAM if stream_ns(loads, costs) < cpu_ns(loads, costs) else Where.CPU


def crossing(experts: int, top_k: int, costs: Costs, longest: int = 1 << 16) -> int | None:
    """Fewest tokens in a batch from which streaming all of a layer's experts is the cheaper way, routing being even.

    None if it is not up to `longest` tokens. More tokens make a larger share of the CPU's time computation and leave
    that of the copies as it is, so beyond the crossing streaming stays the cheaper one.
    """
    if _even(experts, top_k, longest, costs) is Where.CPU:
        return None
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _even(experts, top_k, middle, costs) is Where.STREAM else (middle, high)
    return high


def _even(experts: int, top_k: int, tokens: int, costs: Costs) -> Where:
    needed = min(experts, tokens * top_k, max(1, round(expected_union(experts, top_k, tokens))))
    each, more = divmod(tokens * top_k, needed)
    loads = [*repeat(each + 1, more), *repeat(each, needed - more)]
    return cheaper_absent(loads, costs)
