"""One expert, one token, on the CPU: with its weights in the caches and with none of them there."""

from statistics import median
from time import perf_counter_ns

import torch

from .moe import Call
from .probe import Subject
from .store import HostStore

FLUSH = 96 * 2**20  # bytes that are written in between: more than caches hold
PASSES = 9


@torch.inference_mode()
def cold_and_warm(subject: Subject) -> tuple[float, float]:
    """Median ns after other memory was written, and right after the same expert was computed."""
    shape, store = subject.shape, subject.store
    hidden = torch.randn((1, shape.hidden), dtype=store.record.dtype)
    call = Call(0, subject.module, hidden, [[0]], torch.ones((1, 1), dtype=hidden.dtype))
    other = torch.zeros(FLUSH, dtype=torch.uint8)
    cold, warm = [], []
    for _ in range(PASSES):
        other += 1
        cold.append(_ns(call, store))
        warm.append(_ns(call, store))
    return median(cold), median(warm)


def _ns(call: Call, store: HostStore) -> int:
    begin = perf_counter_ns()
    call.compute_on_host([0], store)
    return perf_counter_ns() - begin
