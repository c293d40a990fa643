"""The device module: pins, pools that run out, links, and that nothing else calls CUDA."""

import os
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moe_spac.executor
from moe_spac.executor import device as module
from moe_spac.executor import kernels
from moe_spac.executor.device import Cuda, Emulated, Pins, PoolError, naming, paging
from moe_spac.executor.formats import EXACT
from moe_spac.executor.pcie import link_limit
from moe_spac.executor.store import Arena, HostStore, Record
from moe_spac.policies.interface import Key

MIB = 2**20
RECORD = Record(64, 64, EXACT["float32"], torch.float32)  # 48 KiB


def test_cuda_is_called_in_one_module_only():
    folder = Path(moe_spac.executor.__file__).parent
    others = [f.name for f in folder.glob("*.py") if "torch.cuda" in f.read_text() and f.name != "device.py"]
    assert others == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9))), st.integers(0, 40), st.integers(1, 40))
def test_parts_of_a_copy_are_those_that_byte_by_byte_marking_gives(gaps, first, size):
    memory = torch.empty(200, dtype=torch.uint8)
    pins, marks, at = Pins(), [-1] * 200, 0
    for number, (gap, length) in enumerate(gaps):
        at += gap
        pins.add(memory.data_ptr() + at, length)
        marks[at : at + length] = [number] * length
        at += length
    marks = marks[:200]
    expected, begin = [], 0
    wanted = marks[first : first + size]
    for i in range(1, size + 1):
        if i == size or wanted[i] != wanted[begin]:
            expected.append((begin, i, wanted[begin] >= 0))
            begin = i
    part = memory[first : first + size]
    assert list(pins.parts(part)) == expected
    assert pins.holds(part) == (-1 not in wanted)


def test_a_system_that_pins_little_leaves_the_rest_pageable_and_says_so_once(capsys):
    store = HostStore(2, 4, RECORD, pinned=True)
    device = Emulated(pin_limit=6 * RECORD.size)
    store.pin(device)
    store.pin(device)
    told = capsys.readouterr().err
    assert told.count("page-locked") == 1
    assert "288.00 KiB" in told
    assert "last 25% of the experts" in told
    pinned = [store.pins.holds(store.flat(Key(layer, e))) for layer in range(2) for e in range(4)]
    assert pinned == [True] * 6 + [False] * 2
    device.unpin(store.pins)
    assert store.pins.size == 0


def test_a_store_in_memory_or_in_a_file_is_not_pinned():
    store = HostStore(1, 2, RECORD)
    store.pin(Emulated())
    assert store.pins.size == 0


class Runtime:
    """A CUDA runtime that registers so many bytes in all."""

    def __init__(self, most):
        self.most, self.registered = most, []

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        if sum(s for _, s in self.registered) + size > self.most:
            return 2
        self.registered.append((address, size))
        return 0


@pytest.mark.parametrize(("most", "calls"), [(10**12, [8, 8, 4]), (13 * MIB, [8, 4, 1]), (3 * MIB, [2, 1]), (0, [])])
def test_cuda_registers_in_chunks_and_smaller_ones_where_refused(most, calls, monkeypatch):
    monkeypatch.setattr(module, "PIN_CHUNK", 8 * MIB)
    monkeypatch.setattr(module, "PIN_LEAST", MIB)
    runtime = Runtime(most)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    forgotten = []
    monkeypatch.setattr(Cuda, "_forget_error", lambda self: forgotten.append(1))
    device = Cuda.__new__(Cuda)  # there is no GPU to make one of
    memory, pins = torch.empty(20 * MIB, dtype=torch.uint8), Pins()
    whole = device.pin(memory, pins)
    assert [size // MIB for _, size in runtime.registered] == calls
    at = memory.data_ptr()
    for address, size in runtime.registered:
        assert address == at
        at += size
    assert (whole, pins.refused, pins.size) == (sum(calls) == 20, sum(calls) < 20, sum(calls) * MIB)
    assert bool(forgotten) == pins.refused


def test_out_of_memory_names_the_pool_and_what_to_lower():
    device = Emulated(vram=10 * RECORD.size)
    Arena(7, RECORD, device)
    assert device.memory().free == 3 * RECORD.size
    with pytest.raises(PoolError, match=r"expert slots: 144\.00 KiB free and 192\.00 KiB are needed; lower --slots"):
        Arena(4, RECORD, device)
    assert PoolError.exit_code == 3


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("x")]
)
def test_refusals_of_memory_become_the_pools_own_error(error):
    with pytest.raises(PoolError, match=r"dense weights.*--dtype"), naming("dense weights", torch.device("cpu")):
        raise error


def test_other_errors_stay_what_they_are():
    for error in (RuntimeError("shape mismatch"), NotImplementedError("shape"), RecursionError("shape")):
        with pytest.raises(type(error), match="shape"), naming("host memory", torch.device("cpu")):
            raise error


def test_emulated_link_takes_its_time_from_when_it_was_free():
    device, source, target = Emulated(), torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    begin = time.perf_counter_ns()
    first = device.send(target, source, Pins(), None, begin, 30_000_000)
    assert torch.equal(target, source)
    assert (first.begin, first.end) == (begin, begin + 30_000_000)
    assert not device.passed(first.end)
    device.landed(first)
    assert time.perf_counter_ns() >= first.end
    late = device.send(target, source, Pins(), None, begin, 1)  # its time was over before it was moved
    assert late.end > first.end
    assert device.passed(late.end)


@pytest.mark.skipif(kernels.chosen().library is None, reason="the kernels are not built")
def test_a_copy_is_not_later_because_others_hold_the_interpreter():
    source, target = torch.ones(32 * MIB, dtype=torch.uint8), torch.zeros(32 * MIB, dtype=torch.uint8)
    interval, done, kept, late = sys.getswitchinterval(), False, False, []

    def hog():
        while not done:
            pass

    thread = threading.Thread(target=hog)
    sys.setswitchinterval(0.5)  # for so long the interpreter is gone if the other thread gets it while bytes are moved
    try:
        thread.start()
        while not kept and len(late) < 20:
            begin = time.perf_counter_ns()
            ticket = Emulated().send(target, source, Pins(), None, begin, 300_000_000)
            kept = time.perf_counter_ns() > ticket.end
            late.append(ticket.end - begin - 300_000_000)
    finally:
        sys.setswitchinterval(interval)
        done = True
        thread.join()
    assert kept
    assert not any(late)


def test_a_stopped_device_lets_nobody_sleep():
    device = Emulated()
    ticket = device.send(torch.zeros(8), torch.ones(8), Pins(), None, 0, 10**12)
    device.stop()
    device.landed(ticket)
    device.start()
    ticket = device.send(torch.zeros(8), torch.ones(8), Pins(), None, 0, 20_000_000)
    device.landed(ticket)
    assert device.passed(ticket.end)


@pytest.mark.parametrize(
    ("taken", "read", "link", "why"),
    [
        (23 * 2**30, 0, 0, None),
        (25 * 2**30, 0, 0, "25.00 GiB are taken of 24.00 GiB"),
        (2**30, 600e9, 25e9, None),
        (2**30, 26e9, 25e9, "read at 26.0 GB/s"),
    ],
)
def test_paging_is_seen_by_size_or_by_speed(taken, read, link, why):
    found = paging(taken, 24 * 2**30, read, link)
    assert found is None if why is None else why in (found or "")


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands for nvidia-smi")
@pytest.mark.parametrize(
    ("answer", "expected"),
    [("3, 8, 4, 16", (3, 8, 8 * 0.985e9, 16 * 1.969e9)), ("[N/A], 8, 4, 16", None), ("", None)],
)
def test_link_limit_is_what_nvidia_smi_says(answer, expected, tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{answer}'\n")
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert link_limit() == expected
