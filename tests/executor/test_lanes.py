"""The link on a device whose pieces land when the test says so: what goes when, as the simulator has it."""

import threading
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import simpy

from moe_spac.executor.device import Emulated, Ticket
from moe_spac.executor.device_checks import Ahead, Rig, rig_of
from moe_spac.policies.interface import Key, StepInfo, Where
from moe_spac.simulator.lanes import CopyPrice, Dram
from moe_spac.simulator.lanes import Link as SimulatedLink
from moe_spac.traces.schema import Kind

CHUNKS = 4
ROWS = 8
A, B, C, D = (Key(0, e) for e in range(4))


class Gated(Emulated):
    """Copies at once; a piece has landed when the test opens its gate."""

    def __init__(self):
        super().__init__()
        self.sent: list[tuple[int, threading.Event]] = []
        self.priced: list[int] = []
        self._now = 0

    def send(self, target, source, pins, after, begin, ns):
        target.copy_(source)
        self.priced.append(ns)
        gate = threading.Event()
        self.sent.append((source.numel(), gate))
        return Ticket(gate, gate)

    def passed(self, stamp: threading.Event):  # pyright: ignore[reportIncompatibleMethodOverride]
        return stamp.is_set()

    def clock(self, stamp):
        self._now += 1
        return self._now

    def landed(self, ticket):
        while not (ticket.end.wait(0.05) or self._stopped.is_set()):
            pass


def until(true) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.001)


class Log(Ahead):
    """Tells what it is asked and told."""

    def setup(self, setup):
        super().setup(setup)
        self.told: list[tuple[str, Key]] = []
        self.where = Where.FETCH

    def keep_fetch(self, key, view):
        self.told.append(("keep?", key))
        return self.keep

    def transfer_done(self, key, size, ns):
        self.told.append(("landed", key))

    def transfer_dropped(self, key):
        self.told.append(("dropped", key))

    def dispatch(self, demand, view):
        return self.where


@pytest.fixture
def bench():
    rigs = []

    def make(keep=True, chunks=CHUNKS):
        device = Gated()
        rig = rig_of(device, Log(keep), ROWS, chunks, 0)
        rigs.append(rig)
        none = np.zeros(1, np.int64)
        with rig.shared.lock:
            rig.driver.step_begins(StepInfo(0, Kind.DECODE, none, none > 0))
        return rig, device

    yield make
    for rig in rigs:
        rig.shared.close()
        rig.driver.cache.check()


def prefetch(rig: Rig, *keys: Key) -> None:
    with rig.shared.lock:
        rig.policy.wanted.extend(keys)
        rig.link.kick()


def demand(rig: Rig, *experts: int):
    with rig.shared.lock:
        return rig.link.order(rig.needs(*experts))


def open_next(device: Gated, number: int) -> int:
    """Let the piece of this number land; its size."""
    until(lambda: len(device.sent) > number)
    size, gate = device.sent[number]
    gate.set()
    return size


def test_a_prefetch_goes_in_pieces_and_a_demand_in_one(bench):
    rig, device = bench()
    prefetch(rig, A)
    sizes = [open_next(device, i) for i in range(CHUNKS)]
    until(lambda: A in rig.driver.cache.resident)
    (copy,) = demand(rig, 1)
    sizes.append(open_next(device, CHUNKS))
    rig.link.arrive(copy)
    size = rig.store.record.size
    assert sizes == [size // CHUNKS] * CHUNKS + [size]
    assert rig.intact(A)
    assert rig.intact(B)


def test_demand_goes_between_the_pieces_of_a_prefetch_which_then_goes_on(bench):
    rig, device = bench()
    prefetch(rig, A)
    open_next(device, 0)
    until(lambda: len(device.sent) == 2)  # the second piece is on the wire
    demand(rig, 1, 2)
    sizes = [open_next(device, i) for i in (1, 2, 3, 4, 5)]
    until(lambda: A in rig.driver.cache.resident)
    size = rig.store.record.size
    assert sizes == [size // 4, size, size, size // 4, size // 4]
    assert rig.policy.told == [("landed", B), ("landed", C), ("keep?", A), ("landed", A)]
    assert all(rig.intact(key) for key in (A, B, C))
    assert rig.driver.decode.cancelled == 0


@pytest.mark.parametrize("pieces", [0, 1, 2, 3])
def test_a_prefetch_that_is_not_kept_ends_where_it_was_pushed_aside(pieces, bench):
    rig, device = bench(keep=False)
    with rig.shared.lock:  # so that none of it is on the wire if `pieces` is 0
        rig.policy.wanted.append(A)
        rig.link.kick()
        if not pieces:
            rig.link.order(rig.needs(1))
    for i in range(pieces - 1):
        open_next(device, i)
    if pieces:
        until(lambda: len(device.sent) == pieces)
        demand(rig, 1)
        open_next(device, pieces - 1)
    open_next(device, pieces)
    until(lambda: rig.policy.told[-1:] == [("dropped", A)])
    assert rig.policy.told == [("landed", B), ("keep?", A), ("dropped", A)]
    count = rig.driver.decode
    assert (count.cancelled, count.cancelled_bytes) == (1, pieces * rig.store.record.size // CHUNKS)
    assert rig.driver.cache.flying == {}
    assert rig.policy.told == simulated(pieces, keep=False)
    prefetch(rig, A)  # it can be asked for again, whole
    sizes = [open_next(device, pieces + 1 + i) for i in range(CHUNKS)]
    until(lambda: A in rig.driver.cache.resident)
    assert sum(sizes) == rig.store.record.size
    assert rig.intact(A)


def simulated(pieces: int, keep: bool) -> list[tuple[str, Key]]:
    """The same through the simulator's link: a demand in the middle of the last of so many pieces."""
    env, told = simpy.Environment(), []
    dram = Dram(env, 10**12)
    pulled = [A]

    def kept(key):
        told.append(("keep?", key))
        return keep

    link = SimulatedLink(
        env, dram, CopyPrice(4000, 10, 4000, CHUNKS),
        lambda: pulled.pop() if pulled else None, kept,
        lambda key, ns: told.append(("landed", key)),
        lambda key, moved: told.append(("dropped", key)) if moved == pieces * 1000 else told.append(("moved", moved)),
    )  # fmt: skip
    link.wake()
    env.run(until=10 + pieces * 1000 - 500 if pieces else 5)
    link.demand(B)
    env.run()
    return told


def test_what_a_layer_joins_is_not_pushed_aside_any_more(bench):
    rig, device = bench()
    prefetch(rig, A)
    until(lambda: len(device.sent) == 1)
    arrivals = demand(rig, 0, 1)
    assert [copy.key for copy in arrivals] == [A, B]
    sizes = [open_next(device, i) for i in range(3)]
    for copy in arrivals:
        rig.link.arrive(copy)
    size = rig.store.record.size
    assert sizes == [size // 4, size * 3 // 4, size]
    assert [what for what in rig.policy.told if what[0] == "keep?"] == []


def test_what_was_pushed_aside_can_be_joined(bench):
    rig, device = bench()
    prefetch(rig, A)
    until(lambda: len(device.sent) == 1)
    demand(rig, 1)
    open_next(device, 0)
    until(lambda: len(device.sent) == 2)  # B is on the wire, A aside
    with rig.shared.lock:
        rig.driver.layer_ends(None)
    (copy,) = demand(rig, 0)
    open_next(device, 1)
    assert open_next(device, 2) == rig.store.record.size * 3 // 4
    rig.link.arrive(copy)
    assert rig.intact(A)
    assert ("keep?", A) not in rig.policy.told


def test_what_is_not_kept_passes_through_two_places(bench):
    rig, device = bench()
    rig.policy.where = Where.STREAM
    arrivals = demand(rig, 0, 1, 2, 3)
    seen = []
    for number, copy in enumerate(arrivals):
        open_next(device, number)
        rig.link.arrive(copy)
        assert (rig.arena.flat(copy.slot) == rig.store.flat(copy.key)).all()
        if number == 0:  # two are there, and the others wait for a place
            open_next(device, 1)
            until(lambda: not rig.link._flying)
            assert len(device.sent) == 2
        seen.append(copy.slot)
        rig.link.release(copy)
    assert seen[0] != seen[1]
    assert set(seen[2:]) <= set(seen[:2])  # which of them depends on how soon the link's thread comes to it


def test_the_main_thread_lands_what_is_there_before_it_asks(bench):
    rig, device = bench(chunks=1)
    prefetch(rig, A)
    until(lambda: len(device.sent) == 1)
    with rig.shared.lock:
        device.sent[0][1].set()  # landed, but the link's thread cannot tell while we hold the lock
        rig.link.settle()
        plan = rig.needs(0)
    assert plan.gpu == (0,)
    assert rig.policy.told == [("landed", A)]


def test_meters_tell_demand_from_prefetch_and_lose_nothing(bench):
    rig, device = bench()
    periods = rig.link.meter.periods = []
    prefetch(rig, A)
    open_next(device, 0)
    until(lambda: len(device.sent) == 2)
    demand(rig, 1)
    for number in range(1, 5):
        open_next(device, number)
    until(lambda: A in rig.driver.cache.resident)
    labels = [label for label, *_ in periods]
    assert labels == ["prefetch", "prefetch", "demand", "prefetch", "prefetch"]
    for (_, _, end, _), (_, begin, _, _) in pairwise(periods):
        assert begin >= end
    assert SimpleNamespace(**rig.link.meter.spent).demand == periods[2][2] - periods[2][1]


def test_experts_in_pageable_memory_have_a_price_of_their_own_and_pieces_pay_the_fixed_part_once(bench):
    rig, device = bench()
    rates = rig.link._rates
    costs = replace(rates.costs, copy_fixed_ns=7, copy_bytes_ns=400)
    rig.link._rates = replace(rates, costs=costs, pinned_experts=2, pageable_fixed_ns=50, pageable_bytes_ns=1000)
    prefetch(rig, A)
    open_next(device, 0)
    until(lambda: len(device.sent) == 2)
    demand(rig, 1, 2)  # the second of them is pageable
    for number in range(1, 6):
        open_next(device, number)
    until(lambda: A in rig.driver.cache.resident)
    assert device.priced == [107, 100, 407, 1050, 107, 100]  # A pays again after the interruption
