"""What the fast device does for the executor: memory, copies, moments in time. Nothing else in this folder calls CUDA.

Two devices with one face. `Cuda` is a GPU. `Emulated` stands for one: its memory is RAM with a budget, its link takes
the time that a profile says, and its kernels are those of the calling thread, so a moment of it is one of the clock.
The CUDA half is written against torch's documentation and has not been run: there was no GPU where it was written.
"""

import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import torch

from ..traces.console import show_size
from ..traces.errors import InputError
from . import kernels
from .pages import roomy

PIN_CHUNK = 256 * 2**20  # bytes page-locked at once
PIN_LEAST = 16 * 2**20  # where that much is refused, no more is asked for
STAGE = 4 * 2**20  # bytes of one of the page-locked buffers through which pageable memory is copied
STAGES = 2
LOOK_AGAIN_SECONDS = 0.5  # a signal that another thread caught is acted upon no later

# A pool of memory and what leaves it more room.
ADVICE = {
    "dense weights": "use --dtype bfloat16 or a smaller model",
    "expert slots": "lower --slots or --vram",
    "keys, values and activations": "lower --slots or --vram, or give shorter prompts",
    "host memory": "use --store q8, --store q4 or --store-memory mmap",
    "pinned host memory": "use --store-memory ram",
}

Stamp = Any  # a moment in the device's own order of work: ns on the emulated one, an event on CUDA


class PoolError(InputError):
    """A pool has not enough room; the message says which, how much was wanted and was free, and what to lower."""

    exit_code = 3

    def __init__(self, pool: str, wanted: int | None, free: int) -> None:
        self.pool = pool
        need = "" if wanted is None else f" and {show_size(wanted)} are needed"
        super().__init__(f"out of memory for {pool}: {show_size(free)} free{need}; {ADVICE[pool]}")


class Memory(NamedTuple):
    """Bytes of the device's memory: free, in all, and what this process has taken."""

    free: int
    total: int
    taken: int


class Ticket(NamedTuple):
    """A piece on its way: when it begins on the link and when it has landed."""

    begin: Stamp
    end: Stamp


@dataclass(slots=True)
class Pins:
    """Page-locked parts of host memory by address, ascending. A copy must not reach from one into the next."""

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    refused: bool = False  # the system gave less than was asked for

    @property
    def size(self) -> int:
        return sum(self.ends) - sum(self.begins)

    def add(self, begin: int, size: int) -> None:
        at = bisect_right(self.begins, begin)
        self.begins.insert(at, begin)
        self.ends.insert(at, begin + size)

    def holds(self, memory: torch.Tensor) -> bool:
        """Whether all of a contiguous tensor is page-locked."""
        return all(pinned for _, _, pinned in self.parts(memory))

    def parts(self, memory: torch.Tensor) -> Iterator[tuple[int, int, bool]]:
        """Ranges of a flat uint8 tensor, each in one page-locked part (True) or in none."""
        base, size = memory.data_ptr(), memory.numel()
        at = 0
        while at < size:
            index = bisect_right(self.begins, base + at) - 1
            if index >= 0 and base + at < self.ends[index]:
                upto, pinned = min(size, self.ends[index] - base), True
            else:
                more = index + 1 < len(self.begins)
                upto, pinned = min(size, self.begins[index + 1] - base) if more else size, False
            yield at, upto, pinned
            at = upto


class Device(Protocol):
    """The fast device. `depth`: pieces of a prefetch that may be on the link at once; `queues`: work and copies are
    given to it and done later, else by whoever calls."""

    place: torch.device
    depth: int
    queues: bool

    def enter(self) -> None:
        """First in every thread that uses the device."""
        ...

    def allocate(self, size: int, pool: str) -> torch.Tensor:
        """uint8 [size]. Raises PoolError."""
        ...

    def memory(self) -> Memory: ...

    def trouble(self) -> str | None:
        """What can be seen from here to be wrong with the device, in words, or None."""
        ...

    def pin(self, memory: torch.Tensor, pins: Pins, limit: int | None = None) -> bool:
        """Page-lock host memory from its beginning, until `limit` bytes in all or a refusal; False if less than all."""
        ...

    def unpin(self, pins: Pins) -> None: ...

    def stamp(self) -> Stamp:
        """Now: after all that was given to the device so far."""
        ...

    def passed(self, stamp: Stamp) -> bool: ...

    def finish(self, stamp: Stamp) -> None:
        """Sleep until it has passed."""
        ...

    def elapsed(self, begin: Stamp, end: Stamp) -> int:
        """ns between two moments that have passed."""
        ...

    def clock(self, stamp: Stamp) -> int:
        """A moment that has passed, on the host's clock (ns)."""
        ...

    def align(self) -> None:
        """The device has nothing to do: a good time to compare clocks."""
        ...

    def send(
        self, target: torch.Tensor, source: torch.Tensor, pins: Pins, after: Stamp | None, begin: int, ns: int
    ) -> Ticket:
        """Copy bytes to the device, behind what was sent before and not before `after` has passed.

        begin, ns: when an emulated link takes it up (0: now), and for how long at least.
        """
        ...

    def landed(self, ticket: Ticket) -> None:
        """Sleep until the piece is there; at once if the device is stopped."""
        ...

    def await_copy(self, ticket: Ticket) -> None:
        """What is computed from now on finds the piece there."""
        ...

    def start(self) -> None:
        """Before the first copy, and again after `stop`."""
        ...

    def stop(self) -> None:
        """Wake whoever sleeps here. May be called twice."""
        ...


class Emulated:
    """RAM for device memory, of which `vram` bytes may be taken; at most `pin_limit` bytes may be page-locked."""

    place = torch.device("cpu")
    depth = 1
    queues = False

    def __init__(self, vram: int | None = None, pin_limit: int | None = None) -> None:
        self._vram, self._pin_limit = vram, pin_limit
        self._taken = self._pinned = self._busy_until = 0
        self._stopped = threading.Event()

    def enter(self) -> None:
        torch.set_num_threads(1)  # the engine that copies is no pool of threads

    def allocate(self, size: int, pool: str) -> torch.Tensor:
        free, _, _ = self.memory()
        if size > free:
            raise PoolError(pool, size, free)
        with naming(pool, self.place):
            memory = roomy(size).zero_()  # a device's memory is there; a copy is not to wait for pages
        self._taken += size
        return memory

    def memory(self) -> Memory:
        total = sys.maxsize if self._vram is None else self._vram
        return Memory(total - self._taken, total, self._taken)

    def trouble(self) -> None:
        return None

    def pin(self, memory: torch.Tensor, pins: Pins, limit: int | None = None) -> bool:
        wanted = _within(memory, pins, limit)
        got = wanted if self._pin_limit is None else min(wanted, self._pin_limit - self._pinned)
        if got:
            pins.add(memory.data_ptr(), got)
        self._pinned += got
        pins.refused |= got < wanted
        return got == memory.numel()

    def unpin(self, pins: Pins) -> None:
        self._pinned -= pins.size
        pins.begins, pins.ends = [], []

    def stamp(self) -> int:
        return perf_counter_ns()

    def passed(self, stamp: int) -> bool:
        return stamp <= perf_counter_ns()

    def finish(self, stamp: int) -> None:
        """Work is done when it is given."""

    def elapsed(self, begin: int, end: int) -> int:
        return end - begin

    def clock(self, stamp: int) -> int:
        return stamp

    def align(self) -> None:
        """There is one clock only."""

    def send(
        self, target: torch.Tensor, source: torch.Tensor, pins: Pins, after: Stamp | None, begin: int, ns: int
    ) -> Ticket:
        now = perf_counter_ns()
        begin = max(begin or now, self._busy_until)
        taken = kernels.move(target, source)  # whoever holds the interpreter when that is over does not make it later
        self._busy_until = max(begin + ns, now + taken)
        return Ticket(begin, self._busy_until)

    def landed(self, ticket: Ticket) -> None:
        while (left := ticket.end - perf_counter_ns()) > 0 and not self._stopped.is_set():
            self._stopped.wait(min(left / 1e9, LOOK_AGAIN_SECONDS))

    def await_copy(self, ticket: Ticket) -> None:
        self.landed(ticket)

    def start(self) -> None:
        self._busy_until = 0
        self._stopped.clear()

    def stop(self) -> None:
        self._stopped.set()


class Cuda:
    """A GPU: copies on a stream of their own, moments are events, waiting for a copy is the compute stream's."""

    depth = 2  # the next piece is queued while one is on its way
    queues = True

    def __init__(self, place: torch.device) -> None:
        self.place = torch.device("cuda", place.index if place.index is not None else torch.cuda.current_device())
        self._link = torch.cuda.Stream(self.place)
        self._stages: list[tuple[torch.Tensor, torch.cuda.Event]] | None = None
        self._staging = threading.Lock()
        self._next_stage = 0
        self.align()

    def enter(self) -> None:
        torch.set_num_threads(1)
        torch.cuda.set_device(self.place)

    def allocate(self, size: int, pool: str) -> torch.Tensor:
        with naming(pool, self.place, size):
            return torch.empty(size, dtype=torch.uint8, device=self.place)

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.place)
        return Memory(free, total, torch.cuda.memory_reserved(self.place))

    def trouble(self) -> str | None:
        _, total, taken = self.memory()
        why = paging(taken, total)
        return why and f"the driver is paging GPU memory, which makes everything slow: {why}; lower --slots or --vram"

    def pin(self, memory: torch.Tensor, pins: Pins, limit: int | None = None) -> bool:
        """Each chunk is registered for itself, because systems refuse large amounts long before they have to."""
        if pins.refused:
            return False
        wanted, at, chunk = _within(memory, pins, limit), 0, PIN_CHUNK
        runtime: Any = torch.cuda.cudart()
        while at < wanted and chunk >= PIN_LEAST:
            size = min(chunk, wanted - at)
            if int(runtime.cudaHostRegister(memory.data_ptr() + at, size, 1)) == 0:  # 1: for all contexts
                pins.add(memory.data_ptr() + at, size)
                at += size
            else:
                self._forget_error()
                chunk //= 2
        pins.refused |= at < wanted
        return at == memory.numel()

    def unpin(self, pins: Pins) -> None:
        torch.cuda.synchronize(self.place)
        runtime: Any = torch.cuda.cudart()
        for begin in pins.begins:
            runtime.cudaHostUnregister(begin)
        pins.begins, pins.ends = [], []

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.place))
        return event

    def passed(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def finish(self, stamp: torch.cuda.Event) -> None:
        stamp.synchronize()

    def elapsed(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
        return round(begin.elapsed_time(end) * 1e6)

    def clock(self, stamp: torch.cuda.Event) -> int:
        zero, then = self._base
        return then + self.elapsed(zero, stamp)

    def align(self) -> None:
        """An event's time is a float of milliseconds since another event, so that one must not be long ago."""
        zero = self.stamp()
        zero.synchronize()
        self._base = zero, perf_counter_ns()

    def send(
        self, target: torch.Tensor, source: torch.Tensor, pins: Pins, after: Stamp | None, begin: int, ns: int
    ) -> Ticket:
        with torch.cuda.stream(self._link):
            if after is not None:
                self._link.wait_event(after)
            started = torch.cuda.Event(enable_timing=True)
            started.record()
            for at, upto, pinned in pins.parts(source):
                if pinned:
                    target[at:upto].copy_(source[at:upto], non_blocking=True)
                else:
                    self._copy_staged(target[at:upto], source[at:upto])
            ended = torch.cuda.Event(enable_timing=True, blocking=True)  # whoever waits sleeps
            ended.record()
        return Ticket(started, ended)

    def landed(self, ticket: Ticket) -> None:
        ticket.end.synchronize()

    def await_copy(self, ticket: Ticket) -> None:
        torch.cuda.current_stream(self.place).wait_event(ticket.end)

    def start(self) -> None:
        """Nothing has to be made ready."""

    def stop(self) -> None:
        """Copies on their way end by themselves."""

    def _copy_staged(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """From pageable memory through page-locked buffers in turn; without them, as the driver does it."""
        with self._staging:
            stages = self._stages = self._stages if self._stages is not None else _stages()
            if not stages:
                target.copy_(source)
                return
            for at in range(0, source.numel(), STAGE):
                buffer, free = stages[self._next_stage % len(stages)]
                self._next_stage += 1
                free.synchronize()
                part = source[at : at + STAGE]
                buffer[: part.numel()].copy_(part)
                target[at : at + STAGE].copy_(buffer[: part.numel()], non_blocking=True)
                free.record()

    def _forget_error(self) -> None:
        """A refused registration leaves an error behind that the next launch, whichever it is, would raise
        (vllm#50070); so let it be this one."""
        try:
            torch.zeros(1, device=self.place)
        except RuntimeError:
            torch.zeros(1, device=self.place)


def _stages() -> "list[tuple[torch.Tensor, torch.cuda.Event]]":
    try:
        buffers = [torch.empty(STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]
    except RuntimeError:
        return []
    return [(buffer, torch.cuda.Event(blocking=True)) for buffer in buffers]


def _within(memory: torch.Tensor, pins: Pins, limit: int | None) -> int:
    return memory.numel() if limit is None else max(0, min(memory.numel(), limit - pins.size))


def device_of(place: torch.device | str) -> Device:
    """The GPU at `place`; the emulated device for "cpu"."""
    place = torch.device(place)
    return Cuda(place) if place.type == "cuda" else Emulated()


def has_gpu() -> bool:
    return torch.cuda.is_available()


def gpu_memory(place: torch.device | str) -> tuple[int, int]:
    """Bytes of a GPU's memory: free and in all."""
    return torch.cuda.mem_get_info(place)


def gpu_name(place: torch.device | str) -> str:
    return torch.cuda.get_device_name(place)


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """Room in host memory from which `place` is reached without anybody waiting; torch keeps it until that is over."""
    return torch.empty(shape, dtype=dtype, pin_memory=place.type == "cuda")


def indices(values: Sequence[int], place: torch.device) -> torch.Tensor:
    """int64 on `place`, without waiting for what it does."""
    return torch.tensor(values, pin_memory=place.type == "cuda").to(place, non_blocking=True)


def release_unused(place: str) -> None:
    """Give memory back that torch keeps for later, so that what is taken can be counted."""
    if place == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def naming(pool: str, place: torch.device, wanted: int | None = None) -> Iterator[None]:
    """A refusal of memory inside is a PoolError that names `pool`."""
    try:
        yield
    except PoolError:
        raise
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and "allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        on_gpu = isinstance(error, torch.OutOfMemoryError) and place.type == "cuda"
        free = gpu_memory(place)[0] if on_gpu else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        raise PoolError(pool, wanted, free) from None


def paging(taken: int, total: int, read_rate: float = 0.0, link_rate: float = 0.0) -> str | None:
    """Why the driver seems to keep device memory in host memory (Windows and WSL do so silently), or None.

    Either more bytes are taken than the device has; or reading the slots on the device (`read_rate`, bytes/s) is less
    than twice as fast as the link: device memory is ten times as fast as any link, shared memory never faster than it.
    """
    if taken > total:
        return f"{show_size(taken)} are taken of {show_size(total)}"
    if read_rate and link_rate and read_rate < 2 * link_rate:
        return f"slots are read at {read_rate / 1e9:.1f} GB/s, and the link alone reaches {link_rate / 1e9:.1f} GB/s"
    return None
