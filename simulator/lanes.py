"""The resources that take time: host DRAM shared by two kinds of flow, and the host-to-device link.

Assumptions: DRAM is shared max-min fairly among flows, each with a rate of its own that it cannot exceed; a copy
that has begun is not interrupted (a wrong prefetch on the wire delays the demand behind it); waiting demand goes
before prefetches; an idle link asks the policy for a prefetch whenever something has changed. Time is integer ns.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from ..policies.interface import Key

_FULL = 1 << 20  # speed of an undisturbed flow; work is counted in ns * _FULL, so that it stays exact


@dataclass
class Meter:
    """Busy time of one resource, by what it was busy with; readable in the middle of a busy period."""

    spent: dict[str, int] = field(default_factory=dict)
    _label: str = ""
    _since: int = -1

    def begin(self, label: str, now: int) -> None:
        self._label, self._since = label, now

    def end(self, now: int) -> None:
        self.spent[self._label] = self.spent.get(self._label, 0) + now - self._since
        self._since = -1

    def read(self, now: int) -> dict[str, int]:
        if self._since < 0:
            return dict(self.spent)
        return {**self.spent, self._label: self.spent.get(self._label, 0) + now - self._since}


@dataclass
class _Flow:
    left: int  # ns * _FULL
    rate: int  # bytes a second that it takes when alone
    done: simpy.Event
    speed: int = _FULL


class Dram:
    """Host memory bandwidth. A flow that alone takes `ns` takes longer while the flows together want too much."""

    def __init__(self, env: simpy.Environment, bytes_per_s: int) -> None:
        self._env, self._capacity = env, bytes_per_s
        self._flows: list[_Flow] = []
        self._then = 0
        self._version = 0
        self.meter = Meter()

    def flow(self, size: int, ns: int) -> simpy.Event:
        """Move `size` bytes, which takes `ns` undisturbed; the event fires when it is done."""
        done = self._env.event()
        if ns <= 0:
            return done.succeed()
        self._settle()
        if not self._flows:
            self.meter.begin("busy", int(self._env.now))
        self._flows.append(_Flow(ns * _FULL, max(1, size * 10**9 // ns), done))
        self._share()
        return done

    def _settle(self) -> None:
        """Account for the time since the last change."""
        elapsed = int(self._env.now) - self._then
        self._then = int(self._env.now)
        for flow in self._flows:
            flow.left -= elapsed * flow.speed

    def _share(self) -> None:
        """Max-min fair rates, smallest wish first, and the wake-up for the next flow to finish."""
        capacity, waiting = self._capacity, len(self._flows)
        for flow in sorted(self._flows, key=lambda f: f.rate):
            granted = min(flow.rate, capacity // waiting)
            flow.speed = _FULL if granted == flow.rate else max(1, granted * _FULL // flow.rate)
            capacity -= granted
            waiting -= 1
        self._version += 1
        if self._flows:
            soonest = min(-(-f.left // f.speed) for f in self._flows)
            self._env.timeout(max(0, soonest), self._version).callbacks.append(self._wake)  # type: ignore[union-attr]

    def _wake(self, event: simpy.Event) -> None:
        if event.value != self._version:
            return  # the shares have changed since
        self._settle()
        finished = [f for f in self._flows if f.left <= 0]
        self._flows = [f for f in self._flows if f.left > 0]
        if not self._flows:
            self.meter.end(int(self._env.now))
        self._share()
        for flow in finished:
            flow.done.succeed()


@dataclass(slots=True)
class _Copy:
    key: Key
    done: simpy.Event


class Link:
    """Host to device: demand copies in order, prefetches pulled one by one whenever no demand waits."""

    def __init__(
        self,
        env: simpy.Environment,
        dram: Dram,
        size: int,
        fixed_ns: int,
        bytes_ns: int,
        pull: Callable[[], Key | None],
        landed: Callable[[Key, int], None],
    ) -> None:
        self._env, self._dram = env, dram
        self._size, self._fixed_ns, self._bytes_ns = size, fixed_ns, bytes_ns
        self._pull, self._landed = pull, landed
        self._demand: deque[_Copy] = deque()
        self._prefetching: _Copy | None = None
        self._idle: simpy.Event | None = None
        self.meter = Meter()
        env.process(self._serve())

    def demand(self, key: Key) -> simpy.Event:
        """Queue a copy that a layer waits for."""
        copy = _Copy(key, self._env.event())
        self._demand.append(copy)
        self.kick()
        return copy.done

    def arrival(self, key: Key) -> simpy.Event:
        """When the prefetch that is on the wire lands; KeyError if `key` is not on the wire."""
        if self._prefetching is None or self._prefetching.key != key:
            raise KeyError(key)
        return self._prefetching.done

    def kick(self) -> None:
        """Something has changed: an idle link looks again for work."""
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle.succeed()

    def _next(self) -> tuple[_Copy | None, str]:
        if self._demand:
            return self._demand.popleft(), "demand"
        key = self._pull()
        if key is None:
            return None, ""
        self._prefetching = _Copy(key, self._env.event())
        return self._prefetching, "prefetch"

    def _serve(self) -> Generator[simpy.Event, Any, None]:
        while True:
            copy, label = self._next()
            if copy is None:
                self._idle = self._env.event()
                yield self._idle
                continue
            begin = int(self._env.now)
            self.meter.begin(label, begin)
            if self._fixed_ns:
                yield self._env.timeout(self._fixed_ns)
            yield self._dram.flow(self._size, self._bytes_ns)
            self.meter.end(int(self._env.now))
            if copy is self._prefetching:
                self._prefetching = None
            self._landed(copy.key, int(self._env.now) - begin)
            copy.done.succeed()
