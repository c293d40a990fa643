"""Host memory in large pages."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from moe_spac.executor.pages import LARGE, roomy


@pytest.mark.parametrize("shape", [(3, 7), (5, LARGE), (LARGE + 1,), (0, 4)])
def test_it_is_memory_like_any_other(shape):
    room = roomy(*shape)
    assert (room.shape, room.dtype, room.is_contiguous()) == (shape, torch.uint8, True)
    copy = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(room.copy_(copy), copy)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists() or not hasattr(mmap, "MADV_HUGEPAGE"), reason="not Linux")
def test_the_system_is_asked_for_large_pages():
    """Whether it has any to give is its own affair; the range is marked."""
    place, found, begin, end = roomy(8, LARGE), {}, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if first := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(part, 16) for part in first.groups())
        elif line.startswith("VmFlags:"):
            found[begin, end] = line.split()
    mine = [flags for (begin, end), flags in found.items() if begin <= place.data_ptr() < end]
    assert "hg" in mine[0]


def test_where_there_are_none_it_is_ordinary(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert roomy(2, LARGE).shape == (2, LARGE)
