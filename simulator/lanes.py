"""The resources that take time: host DRAM shared by several flows, and the link between host and device.

Assumptions: DRAM is shared max-min fairly among flows, each with a rate of its own that it cannot exceed; a copy pays
its fixed cost when it starts and again when it goes on after an interruption; a prefetch can be interrupted between
its chunks (and before the first, at no cost but the time), a demand copy cannot; both directions have lanes of their
own, and while data flows back the way to the device is slower. Time is integer ns.

Everything here happens at the environment's time, in callbacks: a process for each copy would cost three times as much.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import simpy

from ..policies.interface import Key

_FULL = 1 << 20  # speed of an undisturbed flow; work is counted in ns * _FULL, so that it stays exact


@dataclass(slots=True)
class Meter:
    """Busy time of one resource, by what it was busy with; readable in the middle of a busy period."""

    spent: dict[str, int] = field(default_factory=dict)
    _label: str = ""
    _since: int = -1

    def begin(self, label: str, now: int) -> None:
        self._label, self._since = label, now

    def end(self, now: int) -> None:
        self.add(self._label, now - self._since)
        self._since = -1

    def add(self, label: str, ns: int) -> None:
        """A period that is over already."""
        self.spent[label] = self.spent.get(label, 0) + ns

    def read(self, now: int) -> dict[str, int]:
        if self._since < 0:
            return dict(self.spent)
        return {**self.spent, self._label: self.spent.get(self._label, 0) + now - self._since}


@dataclass(slots=True, eq=False)
class Flow:
    """Work that uses DRAM: `work` in all and what is `left` of it, in ns * _FULL; `share` of its rate is its limit."""

    work: int
    left: int
    rate: int  # bytes a second that it takes when alone
    done: Callable[[], None]
    share: float = 1.0
    speed: int = _FULL


class Dram:
    """Host memory bandwidth. A flow that alone takes `ns` takes longer while the flows together want too much."""

    def __init__(self, env: simpy.Environment, bytes_per_s: int) -> None:
        self._env, self._capacity = env, bytes_per_s
        self.flows: list[Flow] = []
        self._then = 0
        self._version = 0
        self.meter = Meter()

    @property
    def idle(self) -> bool:
        return not self.flows

    def carries(self, size: int, ns: int) -> bool:
        """Whether `size` bytes in `ns` are no more than a flow may have that is alone."""
        return size * 10**9 <= self._capacity * ns

    def flow(self, size: int, ns: int, done: Callable[[], None], share: float = 1.0, left: int = -1) -> Flow:
        """Move `size` bytes, which takes `ns` undisturbed; `done` is called when it is over.

        `left`: how much of it is still to do, as a flow that was taken off counts it.
        """
        work = ns * _FULL
        flow = Flow(work, work if left < 0 else left, max(1, size * 10**9 // max(1, ns)), done, share)
        self._settle()
        if not self.flows:
            self.meter.begin("busy", int(self._env.now))
        self.flows.append(flow)
        self._share()
        return flow

    def limit(self, flow: Flow, share: float) -> None:
        """From now on a flow may have only this share of its rate."""
        self._settle()
        flow.share = share
        self._share()

    def stop_at(self, flow: Flow, chunks: int) -> int:
        """End a flow at the next boundary of its chunks; what will be left of it then (0: it ends as it would)."""
        if not flow.work:
            return 0
        self._settle()
        done = flow.work - flow.left
        boundary = min(flow.work, -(-done * chunks // flow.work) * flow.work // chunks)
        rest = flow.work - boundary
        flow.left -= rest
        self._share()
        return rest

    def _settle(self) -> None:
        """Account for the time since the last change."""
        now = int(self._env.now)
        elapsed, self._then = now - self._then, now
        if elapsed:
            for flow in self.flows:
                flow.left -= elapsed * flow.speed

    def _share(self) -> None:
        """Max-min fair rates, smallest wish first, and the wake-up for the next flow to finish."""
        self._version += 1
        if not self.flows:
            return
        capacity, waiting = self._capacity, len(self.flows)
        if waiting == 1 and (flow := self.flows[0]).share == 1.0 and flow.rate <= capacity:  # as nearly always
            flow.speed = _FULL
            _after(self._env, max(0, -(-flow.left // _FULL)), self._wake, self._version)
            return
        for flow in sorted(self.flows, key=lambda f: f.rate * f.share):
            wish = flow.rate if flow.share == 1.0 else int(flow.rate * flow.share)
            granted = min(wish, capacity // waiting)
            flow.speed = _FULL if granted == flow.rate else max(1, granted * _FULL // flow.rate)
            capacity -= granted
            waiting -= 1
        soonest = min(-(-f.left // f.speed) for f in self.flows)
        _after(self._env, max(0, soonest), self._wake, self._version)

    def _wake(self, event: simpy.Event) -> None:
        if event.value != self._version:
            return  # the shares have changed since
        self._settle()
        finished = [f for f in self.flows if f.left <= 0]
        self.flows = [f for f in self.flows if f.left > 0]
        if not self.flows:
            self.meter.end(int(self._env.now))
        self._share()
        for flow in finished:
            flow.done()


def _after(env: simpy.Environment, ns: int, call: Callable[[simpy.Event], None], value: object = None) -> None:
    env.timeout(ns, value).callbacks.append(call)  # type: ignore[union-attr]


class CopyPrice(NamedTuple):
    """One expert over the link: ns before the first byte, ns for its bytes, and pieces between which it may stop.

    Before the first byte of a prefetch `prefetch_ns` more pass. `back_ns` are for its bytes from device to host;
    `both_ways` the share of its speed that a copy to the device has meanwhile.
    """

    size: int
    fixed_ns: int
    bytes_ns: int
    chunks: int = 1
    back_ns: int = 0
    both_ways: float = 1.0
    prefetch_ns: int = 0


@dataclass(slots=True, eq=False)
class Copy:
    """One expert on its way to the device; `at` is when it landed, -1 until then."""

    key: Key
    fixed_ns: int
    bytes_ns: int
    demand: bool
    pageable: bool = False
    at: int = -1
    begun: int = -1
    left: int = -1  # of its work; -1: all
    flow: Flow | None = None


class Link:
    """Host to device: demand copies in order, prefetches pulled one by one whenever no demand waits; and back.

    pull: asks for a prefetch; keep: whether one that was pushed aside goes on; landed: told key and duration;
    cancelled: told key and bytes moved.
    """

    def __init__(
        self,
        env: simpy.Environment,
        dram: Dram,
        price: CopyPrice,
        pull: Callable[[], Key | None],
        keep: Callable[[Key], bool],
        landed: Callable[[Key, int], None],
        cancelled: Callable[[Key, int], None],
    ) -> None:
        self._env, self._dram, self._price = env, dram, price
        self._pull, self._keep, self._landed, self._cancelled = pull, keep, landed, cancelled
        self._pageable, self._is_pageable = (0, 0), None
        self._demand: deque[Copy] = deque()
        self._aside: Copy | None = None
        self.current: Copy | None = None
        self._turn = 0  # of the link, so that a fixed cost that was called off is recognised
        self._back: deque[int] = deque()
        self._backing = False
        self._clear = not price.bytes_ns or dram.carries(price.size, price.bytes_ns)
        self.meter = Meter()
        self.back_meter = Meter()
        self._copied = 0  # in closed form, not metered yet

    def set_pageable(self, fixed_ns: int, bytes_ns: int, which: Callable[[Key], bool]) -> None:
        """Experts that lie in pageable memory, and what their copies take."""
        self._pageable, self._is_pageable = (fixed_ns, bytes_ns), which

    @property
    def idle(self) -> bool:
        return self.current is None

    @property
    def undisturbed(self) -> bool:
        """Whether demand copies that are begun now land one after the other without anything in between."""
        return (
            self.current is None
            and not self._backing
            and self._clear
            and self._is_pageable is None
            and not self._dram.flows
        )

    def at_once(self, copies: int) -> None:
        """Serve so many undisturbed demand copies in closed form.

        The link is busy until the last one lands, though the environment is not told.
        """
        self._copied += copies

    def settle(self) -> None:
        """Account for copies served in closed form, before the meters are read."""
        if self._copied:
            price = self._price
            self.meter.add("demand", (price.fixed_ns + price.bytes_ns) * self._copied)
            self._dram.meter.add("busy", price.bytes_ns * self._copied)
            self._copied = 0

    def demand(self, key: Key) -> Copy:
        """Queue a copy that a layer waits for; a prefetch on the wire makes way as soon as it can."""
        copy = self._copy(key, demand=True)
        self._demand.append(copy)
        self._make_way()
        return copy

    def join(self, key: Key) -> Copy:
        """A layer waits for a prefetch on its way: it is not pushed aside any more. KeyError if there is none."""
        if self.current is not None and self.current.key == key:
            self.current.demand = True
            return self.current
        if self._aside is None or self._aside.key != key:
            raise KeyError(key)
        copy, self._aside = self._aside, None
        copy.demand = True
        self._demand.append(copy)
        return copy

    def prefetch(self, key: Key) -> None:
        """Begin a prefetch; the link must be idle."""
        self._begin(self._copy(key, demand=False))

    def write_back(self) -> None:
        """Queue one expert's bytes from device to host."""
        self._back.append(self._price.back_ns or self._price.bytes_ns)
        if not self._backing:
            self._next_back()

    def wake(self, _: object = None) -> None:
        """Look for work if there is none at hand."""
        if self.current is None:
            self._next()

    def _copy(self, key: Key, demand: bool) -> Copy:
        if self._is_pageable is not None and self._is_pageable(key):
            return Copy(key, *self._pageable, demand, pageable=True)
        price = self._price
        return Copy(key, price.fixed_ns + (0 if demand else price.prefetch_ns), price.bytes_ns, demand)

    def _make_way(self) -> None:
        copy = self.current
        if copy is None:
            self._next()
        elif copy.demand or copy.pageable:
            return
        elif copy.flow is None:  # nothing has moved since it started or went on
            self.meter.end(int(self._env.now))
            self._set_aside(copy)
        elif copy.left < 0:
            copy.left = self._dram.stop_at(copy.flow, self._price.chunks)

    def _set_aside(self, copy: Copy) -> None:
        self._turn += 1
        self._aside, self.current, copy.flow = copy, None, None
        self._next()

    def _next(self) -> None:
        if self._demand:
            self._begin(self._demand.popleft())
        elif self._aside is not None:
            copy, self._aside = self._aside, None
            if self._keep(copy.key):
                self._begin(copy)
            else:
                work = copy.bytes_ns * _FULL
                moved = 0 if copy.left < 0 else (work - copy.left) * self._price.size // work
                self._cancelled(copy.key, moved)
                self._next()
        elif (key := self._pull()) is not None:
            self._begin(self._copy(key, demand=False))

    def _begin(self, copy: Copy) -> None:
        now = int(self._env.now)
        self.current = copy
        if copy.begun < 0:
            copy.begun = now
        self.meter.begin("demand" if copy.demand else "prefetch", now)
        if copy.fixed_ns:
            _after(self._env, copy.fixed_ns, self._moves, self._turn)
        else:
            self._move(copy)

    def _moves(self, event: simpy.Event) -> None:
        if event.value == self._turn and self.current is not None:
            self._move(self.current)

    def _move(self, copy: Copy) -> None:
        share = self._price.both_ways if self._backing else 1.0
        left, copy.left = copy.left, -1
        copy.flow = self._dram.flow(self._price.size, copy.bytes_ns, self._moved, share, left)

    def _moved(self) -> None:
        """The copy is complete, or has come to the boundary at which it makes way."""
        copy, now = self.current, int(self._env.now)
        assert copy is not None
        self.meter.end(now)
        if copy.left > 0:
            self._set_aside(copy)
            return
        self._turn += 1
        self.current, copy.at = None, now
        self._landed(copy.key, now - copy.begun)
        if self.current is None:
            self._next()

    def _next_back(self) -> None:
        """Begin or end the way back, and with it the slower way there."""
        self._backing = bool(self._back)
        if self._backing:
            self.back_meter.begin("write_back", int(self._env.now))
            self._dram.flow(self._price.size, self._back.popleft(), self._went_back)
        if self.current is not None and self.current.flow is not None:
            self._dram.limit(self.current.flow, self._price.both_ways if self._backing else 1.0)

    def _went_back(self) -> None:
        self.back_meter.end(int(self._env.now))
        self._next_back()
