"""What a fast device has to do for us, tried on the device itself: each check takes a place, "cuda" or "cpu".

On "cpu" the emulated device runs, whose link takes the time of `LINK`; that proves the checks, not a GPU.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns, sleep
from typing import Any, ClassVar

import numpy as np
import torch

from ..policies.driver import Driver, Plan
from ..policies.interface import Costs, Key, Policy, Setup, StepInfo, Where
from ..simulator.machine import Rates
from ..traces.errors import InputError
from ..traces.schema import Kind
from .copies import copy_times
from .device import Device, Pins, PoolError, device_of, paging
from .formats import EXACT
from .lanes import Link, Shared
from .pcie import link_limit
from .store import Arena, HostStore, Record

Found = dict[str, Any]
LINK = 400e6  # bytes/s of the emulated link
CHUNK = 2 * 2**20
SLACK_NS = 3_000_000  # of waking up on a busy machine


def copy_bandwidth(place: str) -> Found:
    """Copies by size from page-locked and pageable memory, one at a time; against the link as it is trained."""
    device = device_of(place)
    sizes = [2**n for n in range(16, 29 if place == "cuda" else 24, 2)]
    rates: Found = {}
    for pinned in (True, False):
        points = copy_times(device, pinned, sizes)
        rates["pinned" if pinned else "pageable"] = {str(size): size / ns if ns else None for size, ns in points}
    best = max((rate for rate in rates["pinned"].values() if rate), default=0.0)
    limit = link_limit(device.place.index or 0) if place == "cuda" else None
    found: Found = {"ok": bool(best), "gb_per_s": rates, "best_gb_per_s": best}
    if limit is not None:
        found |= {"link": limit._asdict(), "share_of_link": best * 1e9 / limit.rate if limit.rate else None}
    return found


def overlap(place: str) -> Found:
    """Copies and matrix products alone and together: the share of the shorter one's time that is hidden, best of 3."""
    device = device_of(place)
    large = place == "cuda"
    size, count, side = (32 * 2**20, 24, 4096) if large else (4 * 2**20, 6, 384)
    host = torch.zeros(size, dtype=torch.uint8)
    pins = Pins()
    device.pin(host, pins)
    target = device.allocate(size, "expert slots")
    a = torch.randn((side, side), device=device.place)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a)

    def copy() -> None:
        _copies(device, target, host, pins, count)

    copies = min(_timed(device, copy) for _ in range(3))
    one = min(_timed(device, lambda: compute(4)) for _ in range(3)) // 4
    times = max(1, copies // max(1, one))
    alone = min(_timed(device, lambda: compute(times)) for _ in range(3))
    both = min(_timed(device, lambda: _beside(device, copy, lambda: compute(times))) for _ in range(3))
    device.unpin(pins)
    hidden = min(1.0, (copies + alone - both) / min(copies, alone))
    return {
        "ok": hidden > 0.5,
        "copies_ms": copies / 1e6,
        "compute_ms": alone / 1e6,
        "both_ms": both / 1e6,
        "hidden": hidden,
        "gb_per_s_under_load": count * size / both,
    }


def _copies(device: Device, target: torch.Tensor, host: torch.Tensor, pins: Pins, count: int) -> None:
    for _ in range(count):
        ns = round(len(host) / LINK * 1e9)
        device.landed(device.send(target, host, pins, None, perf_counter_ns(), ns))


def _beside(device: Device, work: Callable[[], None], mine: Callable[[], None]) -> None:
    def other() -> None:
        device.enter()
        work()

    thread = threading.Thread(target=other)
    thread.start()
    mine()
    thread.join()


def _timed(device: Device, work: Callable[[], object]) -> int:
    device.finish(device.stamp())
    begin = perf_counter_ns()
    work()
    device.finish(device.stamp())
    return perf_counter_ns() - begin


class Ahead(Policy):
    """Prefetches expert 0 and fetches what is needed."""

    name: ClassVar[str] = "ahead"

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep

    def setup(self, setup: Setup) -> None:
        self.wanted: list[Key] = []
        self.dropped: list[Key] = []

    def next_fetch(self, view: Any) -> Key | None:
        return self.wanted.pop(0) if self.wanted else None

    def keep_fetch(self, key: Key, view: Any) -> bool:
        return self.keep

    def transfer_dropped(self, key: Key) -> None:
        self.dropped.append(key)

    def dispatch(self, demand: Any, view: Any) -> Any:
        return Where.FETCH


@dataclass
class Rig:
    """One layer of random experts, a link that copies them, and the driver of `policy`; no model."""

    device: Device
    policy: Any
    driver: Driver
    store: HostStore
    arena: Arena
    shared: Shared
    link: Link

    def needs(self, *experts: int) -> Plan:
        return self.driver.gate(0, np.array([experts]))

    def intact(self, key: Key) -> bool:
        slot = self.driver.cache.slot(key)
        return torch.equal(self.arena.flat(slot).cpu(), self.store.flat(key))


def rig_of(device: Device, policy: Policy, rows: int, chunks: int, ns: int, fixed_ns: int = 0, experts: int = 6) -> Rig:
    """Experts of 12 * `rows` KiB; a copy takes `fixed_ns` and `ns` on an emulated link, in `chunks` pieces."""
    record = Record(rows, 1024, EXACT["float32"], torch.float32)
    costs = Costs(0, 0, 0.0, 0, 0, 0, 0.0, 0, fixed_ns, ns)
    rates = Rates(costs, 0, 0, 0.0, 0.0, 0, 0, 0, 10**12, chunks=chunks)
    driver = Driver(policy, Setup(1, experts, 1, record.size, (experts - 1,), costs))
    store = HostStore(1, experts, record, pinned=True)
    store.slab(0).copy_(torch.randint(0, 256, store.slab(0).shape, dtype=torch.uint8))
    arena = Arena(driver.cache.physical_slots + 2, record, device)
    device.start()
    store.pin(device)
    shared = Shared(device)
    return Rig(device, policy, driver, store, arena, shared, Link(shared, driver, rates, store, arena))


def preemption(place: str) -> Found:
    """A layer asks for an expert while another is prefetched: it waits for the pieces on the wire, not for all."""
    rows = 16384 if place == "cuda" else 1024
    size = 12 * 1024 * rows
    rig = rig_of(device_of(place), Ahead(), rows, size // CHUNK, round(size / LINK * 1e9))
    tokens = np.zeros(1, np.int64)
    try:
        alone = _fetch(rig, 0, 1)
        with rig.shared.lock:
            rig.driver.step_begins(StepInfo(1, Kind.DECODE, tokens, tokens > 0))
            rig.policy.wanted.append(Key(0, 2))
            rig.link.kick()
        sleep(alone / 4e9)
        waited = _fetch(rig, 2, 3)
        deadline = perf_counter_ns() + 20 * alone
        while Key(0, 2) in rig.driver.cache.flying and perf_counter_ns() < deadline:
            sleep(alone / 1e9)
        with rig.shared.lock:
            rig.link.settle()
        whole = [rig.intact(Key(0, e)) for e in (1, 2, 3)]
    finally:
        rig.shared.close()
    chunk = alone * CHUNK // size
    limit = alone + (rig.device.depth + 1) * chunk + SLACK_NS
    return {
        "ok": waited < limit and all(whole),
        "intact": whole,
        "alone_ms": alone / 1e6,
        "with_prefetch_ms": waited / 1e6,
        "limit_ms": limit / 1e6,
        "without_preemption_ms": 1.75 * alone / 1e6,
    }


def _fetch(rig: Rig, step: int, expert: int) -> int:
    """Fetch an expert as a layer does; ns until it can be computed."""
    tokens = np.zeros(1, np.int64)
    begin = perf_counter_ns()
    with rig.shared.lock:
        if not step:
            rig.driver.step_begins(StepInfo(step, Kind.DECODE, tokens, tokens > 0))
        arrivals = rig.link.order(rig.needs(expert))
    for copy in arrivals:
        rig.link.arrive(copy)
    rig.device.finish(rig.device.stamp())
    taken = perf_counter_ns() - begin
    with rig.shared.lock:
        rig.driver.layer_ends(None)
    return taken


def arena_budget(place: str) -> Found:
    """The slots take what was reckoned, once; more than the budget is refused before anything is taken."""
    device = device_of(place)
    record = Record(1024, 1024, EXACT["float32"], torch.float32)
    before = device.memory()
    arena = Arena(8, record, device, budget=8 * record.size)
    taken = device.memory().taken - before.taken
    refused = ""
    try:
        Arena(9, record, device, budget=8 * record.size)
    except InputError as error:
        refused = str(error)
    after = device.memory().taken - before.taken
    rounding = 2 * 2**20  # of torch's allocator
    ok = arena.size <= taken <= arena.size + rounding and taken == after and "--vram" in refused
    return {"ok": ok, "wanted": arena.size, "taken": taken, "refused": refused}


def out_of_memory(place: str) -> Found:
    """More slots than the device has memory: the message names the pool and what to lower."""
    device = device_of(place)
    if place == "cpu":
        device = type(device)(64 * 2**20)  # pyright: ignore[reportCallIssue]
    record = Record(1024, 1024, EXACT["float32"], torch.float32)
    slots = device.memory().total // record.size + 1
    try:
        Arena(slots, record, device)
    except PoolError as error:
        return {"ok": error.pool == "expert slots" and "--slots" in str(error), "message": str(error)}
    return {"ok": False, "message": "nothing was refused"}


def pin_probe(place: str, most: int | None = None) -> Found:
    """How much host memory can be page-locked, up to a quarter of what is free and 16 GiB."""
    from .memory import free_ram

    device = device_of(place)
    most = min(most or 16 * 2**30, free_ram() // 4)
    host = torch.empty(most, dtype=torch.uint8)
    pins = Pins()
    begin = perf_counter_ns()
    device.pin(host, pins)
    seconds = (perf_counter_ns() - begin) / 1e9
    found = {"ok": pins.size > 0, "asked": most, "pinned": pins.size, "refused": pins.refused, "seconds": seconds}
    device.unpin(pins)
    return found


def paged(place: str) -> Found:
    """Whether the driver seems to keep device memory in host memory; the rule is `paging`'s."""
    device = device_of(place)
    size = 256 * 2**20 if place == "cuda" else 16 * 2**20
    slots = device.allocate(size, "expert slots").view(torch.float32).zero_()
    read = min(_timed(device, lambda: slots.sum()) for _ in range(5))
    (_, ns), *_ = copy_times(device, True, (size // 4,), 3) or [(0, 0)]
    link = size / 4 / ns * 1e9 if ns and place == "cuda" else LINK
    rate = size / read * 1e9
    _, total, taken = device.memory()
    why = paging(taken, total, rate, link)
    return {"ok": why is None, "read_gb_per_s": rate / 1e9, "link_gb_per_s": link / 1e9, "why": why}
