"""How much of the machine other processes took while something was measured."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TAKEN = 0.08  # cores that others may take of a measurement that counts
TRIES = 8  # then it is taken as it is
PAUSE_SECONDS = 1.0


def undisturbed(measure: Callable[[], T], tries: int = TRIES) -> tuple[T, float]:
    """Measure, again while others take more than `TAKEN` cores meanwhile; what came out, and the cores they took.

    The least disturbed of the tries counts. Where the system does not say how busy it is, the first does.
    """
    best: tuple[T, float] | None = None
    for attempt in range(tries):
        if attempt:
            time.sleep(PAUSE_SECONDS)
        before, begin = others_seconds(), time.perf_counter()
        found = measure()
        taken = (others_seconds() - before) / max(1e-9, time.perf_counter() - begin)
        if best is None or taken < best[1]:
            best = found, taken
        if taken <= TAKEN:
            break
    assert best is not None
    return best


def others_seconds() -> float:
    """CPU seconds, since the system began, of all processes but this one, and those that a host took from a virtual
    machine; 0.0 where /proc does not say."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, soft, steal = (int(x) for x in file.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    own = os.times()
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK") - own.user - own.system
