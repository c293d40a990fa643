"""The two threads beside the main one: the link that copies experts, and the CPU tier that computes them.

All of them share one lock, under which every call of the driver is made, and the first error of any of them, which the
main thread raises. Waiting is sleeping, never spinning.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple

import torch

from ..policies.driver import Driver, Plan
from ..policies.interface import Key
from ..simulator.machine import Rates
from .device import LOOK_AGAIN_SECONDS, Device, Ticket
from .host import RING
from .moe import Call
from .store import Arena, HostStore

JOIN_SECONDS = 2.0
AHEAD = 4  # wanted copies given to the device before the first of them has landed


class Shared:
    """The lock, the word that all is over, and the first error. `progress` is notified when the main thread sleeps."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.progress = threading.Condition(self.lock)
        self.closing = False
        self.error: BaseException | None = None
        self._waiting = False
        self._wakes: list[threading.Condition] = []
        self._threads: list[threading.Thread] = []

    def start(self, name: str, loop: Callable[[], None], wake: threading.Condition) -> None:
        """Run `loop` in a thread; it must return soon after `closing` is set and `wake` notified."""

        def guarded() -> None:
            try:
                with torch.inference_mode():
                    loop()
            except BaseException as error:
                with self.lock:
                    self.error = self.error or error
                    self.progress.notify_all()

        self._wakes.append(wake)
        thread = threading.Thread(target=guarded, name=f"spac-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def check(self) -> None:
        """Raise what went wrong in another thread."""
        if self.error is not None:
            raise self.error

    def wait_for(self, done: Callable[[], bool]) -> None:
        """The main thread sleeps until `done`. Raises the error of another thread."""
        if done():
            return
        with self.lock:
            self._waiting = True
            while not done():
                self.check()
                self.progress.wait(LOOK_AGAIN_SECONDS)
            self._waiting = False

    def tell(self) -> None:
        """Something is done, and that can be seen already: wake the main thread if it sleeps. Lock not held.

        Whoever is about to sleep says so before he looks, so nothing is missed.
        """
        if self._waiting:
            with self.lock:
                self.progress.notify()

    def close(self) -> None:
        with self.lock:
            self.closing = True
            for wake in self._wakes:
                wake.notify_all()
        self.device.stop()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)


@dataclass(slots=True, eq=False)
class Copy:
    """One expert on its way to a slot. `asked` is when the link could have begun (ns), `sent` counts bytes.

    `ticket` is that of its last piece, as soon as it has one; then nothing can hold it up any more.
    """

    key: Key
    slot: int
    asked: int
    demand: bool = True
    passing: bool = False
    fresh: bool = True  # the fixed cost is to be paid, again after an interruption
    sent: int = 0
    begun: int = -1
    ticket: Ticket | None = None

    def on_its_way(self) -> bool:
        return self.ticket is not None


class Piece(NamedTuple):
    """A range of a copy's bytes, as given to the device; `ns` is its price on an emulated link."""

    copy: Copy
    begin: int
    end: int
    ticket: Ticket
    ns: int


@dataclass(slots=True)
class Meter:
    """ns that a lane was busy, by what with; and the periods themselves, if they are kept."""

    spent: dict[str, int]
    periods: list[tuple[str, int, int, object]] | None = None

    def add(self, label: str, begin: int, end: int, what: object) -> None:
        self.spent[label] += end - begin
        if self.periods is not None:
            self.periods.append((label, begin, end, what))


class Link:
    """Copies demand in order, and whenever none waits what the policy wants to prefetch; as the simulator's link does.

    A prefetch goes in pieces, and makes way for demand between them; then the policy is asked whether it goes on. What
    a layer waits for goes in one piece, several given to the device at once. A copy's first piece, and the first after
    an interruption, pays the fixed cost. On an emulated device the times are the profile's, counted from when the link
    was free, so that late wake-ups do not add up. Whoever notices first that a piece has landed does what is to be done
    then.
    """

    def __init__(self, shared: Shared, driver: Driver, rates: Rates, store: HostStore, arena: Arena) -> None:
        self._shared, self._driver, self._rates, self._store, self._arena = shared, driver, rates, store, arena
        self._device = arena.device
        self._size = store.record.size
        self._work = threading.Condition(shared.lock)
        self._demand: deque[Copy] = deque()
        self._current: Copy | None = None  # has bytes that were not sent yet
        self._aside: Copy | None = None
        self._prefetches: dict[Key, Copy] = {}
        self._flying: deque[Piece] = deque()
        first = driver.cache.physical_slots
        self._ring = list(range(first, first + RING))
        self._free_at = 0
        self._idle, self._woken = True, 0
        self.meter = Meter({"demand": 0, "prefetch": 0})
        self.own_ns = self.asked_ns = 0  # that this thread worked; the latter on prefetches, asking for them included
        self.prefetched = 0  # experts
        self.held_ns = 0  # that prefetches took on an emulated link beyond their price: this thread came to them late
        self.last_use: dict[int, object] = {}  # slot -> the moment after which it may be overwritten
        shared.start("link", self._loop, self._work)

    # The main thread's side; the lock is held unless it is said otherwise

    def order(self, plan: Plan) -> list[Copy]:
        """What a layer waits for, in the order of arrival: copies under way already, then new ones."""
        layer, cache = plan.demand.layer, self._driver.cache
        arrivals = [self._join(Key(layer, e)) for e in plan.joins]
        if plan.copies:
            now = perf_counter_ns()
            for expert in plan.copies:
                key, kept = Key(layer, expert), expert in plan.kept
                arrivals.append(Copy(key, cache.slot(key) if kept else -1, now, passing=not kept))
            self._demand.extend(arrivals[len(plan.joins) :])
        self._send_demand()
        if arrivals:
            self._work.notify()
        return arrivals

    def settle(self) -> None:
        """Land what is there, so that the driver knows it before it is asked."""
        while self._flying and self._device.passed(self._flying[0].ticket.end):
            self._land(self._flying.popleft())

    def kick(self) -> None:
        """Something has changed: if the link is idle, ask the policy again. It is woken only if there is work."""
        if self._idle and self._current is None and not (self._demand or self._flying):
            self._current = self._choose()
            if self._current is not None:
                self._work.notify()

    def arrive(self, copy: Copy) -> None:
        """What is computed from now on finds the copy in its slot. Lock not held."""
        self._shared.wait_for(copy.on_its_way)
        assert copy.ticket is not None
        self._device.await_copy(copy.ticket)

    def release(self, copy: Copy) -> None:
        """A passing expert has been computed; its place is free again. Lock not held."""
        with self._shared.lock:
            if not self._ring and self._demand:
                self._demand[0].asked = perf_counter_ns()  # it had to wait for this place
                self._work.notify()
            self._ring.append(copy.slot)
            self._send_demand()

    def _join(self, key: Key) -> Copy:
        copy = self._prefetches[key]
        copy.demand = True
        if copy is self._aside:
            self._aside = None
            copy.asked = perf_counter_ns()
            self._demand.append(copy)
        return copy

    # The link's side

    def _loop(self) -> None:
        self._device.enter()
        copy: Copy | None = None
        with self._shared.lock:
            while not (self._current or self._demand or self._shared.closing):  # no policy is asked before a step
                self._work.wait()
            self._idle, self._woken = False, perf_counter_ns()
        while True:
            with self._shared.lock:
                while not self._shared.closing and (copy := self._next()) is None and not self._flying:
                    self._idle = True
                    self._work.wait()
                    self._idle, self._woken = False, perf_counter_ns()
                if self._shared.closing:
                    return
            if copy is not None:
                self._send(copy)
                if len(self._flying) < (AHEAD if copy.demand else self._device.depth):
                    continue
            self._await()

    def _await(self) -> None:
        """Sleep until something has landed that asks for a decision: a piece of a prefetch, or all that is wanted.

        Whoever waits for one of several wanted copies sees by himself when it is there.
        """
        with self._shared.lock:
            if not self._flying:
                return
            first, last = self._flying[0], self._flying[-1]
        self._device.landed((last if first.copy.demand and last.copy.demand else first).ticket)
        with self._shared.lock:
            if not self._shared.closing:
                begin = thread_time_ns()
                self.settle()
                self._note(begin, first.copy.demand)

    def _next(self) -> Copy | None:
        """The copy of which a piece may be sent now. Lock held."""
        copy = self._current
        if copy is not None and not copy.demand and self._wanted():
            self._aside, copy.fresh = copy, True
            copy = None
        if copy is None:
            begin = thread_time_ns()
            copy = self._choose()
            self._note(begin, copy is not None and copy.demand)
        self._current = copy
        return copy

    def _note(self, begin: int, demand: bool) -> None:
        """This thread has worked since `begin`, on what a layer waits for or on prefetches."""
        ns = thread_time_ns() - begin
        self.own_ns += ns
        if not demand:
            self.asked_ns += ns

    def _wanted(self) -> bool:
        """Whether a layer waits for something else."""
        return bool(self._demand) or any(piece.copy.demand for piece in self._flying)

    def _choose(self) -> Copy | None:
        """Demand; else what was pushed aside, if the policy keeps it; else what the policy wants to prefetch."""
        if self._demand:
            first = self._demand[0]
            if first.passing and first.slot < 0:
                if not self._ring:
                    return None
                first.slot = self._ring.pop()
            return self._demand.popleft()
        if self._flying:
            return None
        if self._aside is not None:
            copy, self._aside = self._aside, None
            if self._driver.keep_fetch(copy.key):
                return copy
            del self._prefetches[copy.key]
            self._driver.cancelled(copy.key, copy.sent)
        key = self._driver.next_fetch()
        if key is None:
            return None
        now = perf_counter_ns() if self._idle else self._woken
        copy = Copy(key, self._driver.cache.slot(key), now, demand=False)
        self._prefetches[key] = copy
        return copy

    def _send_demand(self) -> None:
        """Where sending takes no time, as from pinned memory, what is wanted is sent by whoever wants it. Lock held."""
        store, queues = self._store, self._device.queues
        while queues and self._demand and store.pins.holds(store.flat(self._demand[0].key)):
            copy = self._choose()
            if copy is None:
                return
            self._send(copy)

    def _send(self, copy: Copy) -> None:
        """Give the device the rest of a copy, or of a prefetch its next piece."""
        called, begin, end, size = thread_time_ns(), copy.sent, self._size, self._size
        chunks = self._rates.chunks
        if not copy.demand and chunks > 1:
            end = (begin * chunks // size + 1) * size // chunks
        source, target = self._store.flat(copy.key), self._arena.flat(copy.slot)
        if end - begin < size:
            source, target = source[begin:end], target[begin:end]
        start = max(copy.asked, self._free_at)
        ns = self._price(copy.key, copy.fresh, end - begin)
        self._note(called, copy.demand)
        ticket = self._device.send(target, source, self._store.pins, self.last_use.get(copy.slot), start, ns)
        copy.fresh, copy.sent = False, end
        self._flying.append(Piece(copy, begin, end, ticket, ns))
        if end == size:
            if copy is self._current:
                self._current = None
            copy.ticket = ticket
            self._shared.tell()

    def _price(self, key: Key, fresh: bool, size: int) -> int:
        """ns of some bytes of an expert on an emulated link."""
        rates, costs = self._rates, self._rates.costs
        fixed, whole = costs.copy_fixed_ns, costs.copy_bytes_ns
        if 0 <= rates.pinned_experts <= key.layer * self._store.experts + key.expert:
            fixed, whole = rates.pageable_fixed_ns, rates.pageable_bytes_ns
        return fixed * fresh + whole * size // self._size

    def _land(self, piece: Piece) -> None:
        """A piece is there; if it was the last of its copy, the driver is told. Lock held."""
        copy, device = piece.copy, self._device
        begin, now = max(self._free_at, device.clock(piece.ticket.begin)), device.clock(piece.ticket.end)
        self.meter.add("demand" if copy.demand else "prefetch", begin, now, piece)
        if not (copy.demand or device.queues):
            self.held_ns += max(0, now - begin - piece.ns)
        self._free_at = now
        if not piece.begin:
            copy.begun = begin
        if piece.end == self._size:
            self.prefetched += self._prefetches.pop(copy.key, None) is not None
            self._driver.landed(copy.key, now - copy.begun)


@dataclass(slots=True, eq=False)
class Job:
    """One layer's experts for the CPU tier; `work` gets (tokens, ns) of each, in order.

    `own`: whoever submits it has nothing else to do and runs it himself, which spares two changes of threads.
    """

    call: Call
    experts: Sequence[int]
    own: bool = False
    work: list[tuple[int, int]] = field(default_factory=list)
    done: bool = False

    def is_done(self) -> bool:
        return self.done


class CpuTier:
    """Computes experts from host memory in a thread of its own."""

    def __init__(self, shared: Shared, store: HostStore, threads: int) -> None:
        self._shared, self._store, self._threads = shared, store, threads
        self._work = threading.Condition(shared.lock)
        self._jobs: deque[Job] = deque()
        self.meter = Meter({"busy": 0})
        shared.start("cpu", self._loop, self._work)

    def submit(self, call: Call, experts: Sequence[int], own: bool = False) -> Job:
        """Begin with a layer's experts, or leave it to the caller to `run` them. Lock held."""
        job = Job(call, experts, own)
        if not own:
            self._jobs.append(job)
            self._work.notify()
        return job

    def run(self, job: Job) -> None:
        """Lock not held."""
        begin = perf_counter_ns()
        job.work = job.call.compute_on_host(job.experts, self._store, self._threads)
        self.meter.add("busy", begin, perf_counter_ns(), job)
        job.done = True

    def _loop(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            with self._shared.lock:
                while not self._jobs and not self._shared.closing:
                    self._work.wait()
                if self._shared.closing:
                    return
                job = self._jobs.popleft()
            self.run(job)
            self._shared.tell()
