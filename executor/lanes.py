"""The two threads beside the main one: the link that copies experts, and the CPU tier that computes them.

All of them share one lock, under which every call of the driver is made, and the first error of any of them, which the
main thread raises. Waiting is sleeping, never spinning.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

import torch

from ..policies.driver import Driver, Plan
from ..policies.interface import Key
from .host import RING
from .moe import Call
from .store import Arena, HostStore

JOIN_SECONDS = 2.0
LOOK_AGAIN_SECONDS = 0.5  # a signal that another thread caught is acted upon no later


class Shared:
    """The lock, the word that all is over, and the first error. `progress` is notified when something is done."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.progress = threading.Condition(self.lock)
        self.closing = threading.Event()
        self.error: BaseException | None = None
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

    def wait_for(self, thing: "Copy | Job") -> int:
        """Sleep until `thing` is done; ns of that. Raises the error of another thread."""
        if thing.done:
            return 0
        begin = perf_counter_ns()
        with self.lock:
            while not thing.done:
                self.check()
                self.progress.wait(LOOK_AGAIN_SECONDS)
        return perf_counter_ns() - begin

    def close(self) -> None:
        self.closing.set()
        with self.lock:
            for wake in self._wakes:
                wake.notify_all()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)


@dataclass(slots=True, eq=False)
class Copy:
    """One expert on its way to a slot. `asked` is when the link could have begun (ns)."""

    key: Key
    slot: int
    asked: int
    passing: bool = False
    started: bool = False
    done: bool = False


class Link:
    """Copies demand in order, and whenever none waits what the policy wants to prefetch.

    On an emulated device a copy takes `fixed_ns + bytes_ns`, counted from when the link was free, so that late wake-ups
    do not add up. On CUDA it takes what it takes, on a stream of its own that waits for the compute stream's last
    event (`fence`) before it overwrites a slot.
    """

    def __init__(self, shared: Shared, driver: Driver, store: HostStore, arena: Arena, ns: int) -> None:
        self._shared, self._driver, self._store, self._arena = shared, driver, store, arena
        self._ns = ns
        self._work = threading.Condition(shared.lock)
        self._demand: deque[Copy] = deque()
        self._prefetch: Copy | None = None
        first = driver.cache.physical_slots
        self._ring = list(range(first, first + RING))
        self._free_at = 0
        self._idle = False
        self._stream = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None
        self.fence: torch.cuda.Event | None = None
        shared.start("link", self._loop, self._work)

    def order(self, plan: Plan) -> list[Copy]:
        """What a layer waits for, in the order of arrival: copies on the wire already, then new ones. Lock held."""
        layer = plan.demand.layer
        now = perf_counter_ns()
        arrivals = [self._on_the_wire(Key(layer, e)) for e in plan.joins]
        for expert in plan.copies:
            key = Key(layer, expert)
            kept = expert in plan.kept
            copy = Copy(key, self._driver.cache.slot(key) if kept else -1, now, passing=not kept)
            self._demand.append(copy)
            arrivals.append(copy)
        if plan.copies:
            self._work.notify()
        return arrivals

    def kick(self) -> None:
        """Something has changed: if the link is idle, ask the policy again. Lock held.

        The thread is woken only if there is something to copy: two threads that take turns at one lock cost more than
        the question.
        """
        if self._idle and not self._demand and self._prefetch is None and self._pull(perf_counter_ns()):
            self._work.notify()

    def release(self, copy: Copy) -> None:
        """A passing expert has been computed; its place is free again."""
        with self._shared.lock:
            if not self._ring and self._idle and self._demand:
                self._demand[0].asked = perf_counter_ns()  # it had to wait for this place
                self._work.notify()
            self._ring.append(copy.slot)

    def _loop(self) -> None:
        copy: Copy | None = None
        while not self._shared.closing.is_set():
            with self._shared.lock:
                if copy is not None:
                    self._land(copy)
                    if not self._demand:
                        self._pull(self._free_at)
                self._idle = True
                while (copy := self._next()) is None and not self._shared.closing.is_set():
                    self._work.wait()
                self._idle = False
            if copy is not None:
                self._carry(copy)

    def _on_the_wire(self, key: Key) -> Copy:
        assert self._prefetch is not None
        assert self._prefetch.key == key
        return self._prefetch

    def _pull(self, now: int) -> bool:
        """Ask the policy for a prefetch; it goes on the wire at once. True if there is one."""
        key = self._driver.next_fetch()
        if key is not None:
            self._prefetch = Copy(key, self._driver.cache.slot(key), now)
        return key is not None

    def _next(self) -> Copy | None:
        """What to carry now. A prefetch that has been granted is on the wire already, so it goes first."""
        prefetch = self._prefetch
        if prefetch is not None and not prefetch.started:
            prefetch.started = True
            return prefetch
        if not self._demand:
            return None
        copy = self._demand[0]
        if copy.passing:
            if not self._ring:
                return None
            copy.slot = self._ring.pop()
        return self._demand.popleft()

    def _carry(self, copy: Copy) -> None:
        begin = max(copy.asked, self._free_at)
        source = self._store.flat(copy.key)
        if self._stream is None:
            self._arena.load(copy.slot, source)
            due = begin + self._ns
            left = due - perf_counter_ns()
            if left > 0:
                self._shared.closing.wait(left / 1e9)
            self._free_at = due if left > 0 else perf_counter_ns()
            return
        with torch.cuda.stream(self._stream):
            if self.fence is not None:
                self._stream.wait_event(self.fence)
            self._arena.load(copy.slot, source)
            landed = torch.cuda.Event(blocking=True)
            landed.record()
        landed.synchronize()
        self._free_at = perf_counter_ns()

    def _land(self, copy: Copy) -> None:
        if copy is self._prefetch:
            self._prefetch = None
        self._driver.landed(copy.key, perf_counter_ns() - copy.asked)
        copy.done = True
        self._shared.progress.notify()


@dataclass(slots=True, eq=False)
class Job:
    """One layer's experts for the CPU tier; `work` gets (tokens, ns) of each, in order."""

    call: Call
    experts: Sequence[int]
    work: list[tuple[int, int]] = field(default_factory=list)
    done: bool = False


class CpuTier:
    """Computes experts from host memory in a thread of its own."""

    def __init__(self, shared: Shared, store: HostStore, threads: int) -> None:
        self._shared, self._store, self._threads = shared, store, threads
        self._work = threading.Condition(shared.lock)
        self._jobs: deque[Job] = deque()
        shared.start("cpu", self._loop, self._work)

    def submit(self, call: Call, experts: Sequence[int]) -> Job:
        """Begin with a layer's experts. Lock held."""
        job = Job(call, experts)
        self._jobs.append(job)
        self._work.notify()
        return job

    def _loop(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            with self._shared.lock:
                while not self._jobs and not self._shared.closing.is_set():
                    self._work.wait()
                if self._shared.closing.is_set():
                    return
                job = self._jobs.popleft()
            job.work = job.call.compute_on_host(job.experts, self._store, self._threads)
            with self._shared.lock:
                job.done = True
                self._shared.progress.notify()
