"""Measure beside a yardstick, and see how much of the machine other processes took meanwhile.

A shared machine's speed changes by the second, and what disturbs it comes in bursts. So a piece of fixed work is timed
before and after every measurement, long enough to meet as many bursts as what stands beside it; and both count or
neither does, or the quieter of the two would make the other look slow.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")

TAKEN = 0.08  # cores that others may take of a measurement that counts
TRIES = 4  # then the least disturbed one counts
PAUSE_SECONDS = 1.0
FREAK = 10  # times the median or, if that is more, what lies between the quartiles


class Beside(NamedTuple, Generic[T]):
    """What was measured, ns of the yardstick beside it (mean of before and after), cores that others took of all."""

    found: T
    yard: float
    taken: float


class _Reading(NamedTuple):
    """One yardstick: ns, and `others_seconds` and the clock (s) at its beginning and end."""

    ns: int
    begin: tuple[float, float]
    end: tuple[float, float]


class Pace:
    """How fast the machine is, by `yardstick`: ns that a fixed piece of work takes now."""

    def __init__(self, yardstick: Callable[[], int], tries: int = TRIES) -> None:
        self._yardstick, self._tries, self._hope = yardstick, tries, True
        yardstick()  # what is done for the first time takes longer
        self._last = self._read()

    @property
    def yard(self) -> int:
        """ns of the last yardstick."""
        return self._last.ns

    def beside(self, measure: Callable[[], T]) -> Beside[T]:
        """Measure between two yardsticks, of which the first may be that after the last measurement.

        Again while others take more than `TAKEN` cores of the time from the first's beginning to the second's end; the
        least disturbed of the tries counts. Where all were disturbed, the next measurement is tried once; and where the
        system does not say how busy it is, the first counts.
        """
        best: Beside[T] | None = None
        for attempt in range(self._tries if self._hope else 1):
            if attempt:
                time.sleep(PAUSE_SECONDS)
                self._last = self._read()
            before = self._last
            found = measure()
            self._last = after = self._read()
            (others, clock), (others_then, clock_then) = before.begin, after.end
            taken = (others_then - others) / max(1e-9, clock_then - clock)
            if best is None or taken < best.taken:
                best = Beside(found, (before.ns + after.ns) / 2, taken)
            if taken <= TAKEN:
                break
        assert best is not None
        self._hope = best.taken <= TAKEN
        return best

    def _read(self) -> _Reading:
        begin = others_seconds(), time.perf_counter()
        return _Reading(self._yardstick(), begin, (others_seconds(), time.perf_counter()))


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


def freaks(values: np.ndarray) -> np.ndarray:
    """Which are far beyond their median: the machine stood still. All else counts, for a run's time is a sum, and what
    seldom takes long is part of it."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return np.abs(values - middle) > FREAK * max(abs(middle), high - low)


def steady(taken: Sequence[int]) -> int:
    """The sum (ns), each freak being one of the others' mean."""
    told = np.array(taken, float)
    return round(float(told[~freaks(told)].mean()) * len(told)) if len(told) else 0
