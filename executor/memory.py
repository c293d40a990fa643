"""What the machine's memories have free, and the refusal to load what they cannot hold."""

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..traces.console import show_size
from ..traces.errors import InputError
from ..traces.schema import DraftShape, ModelShape
from .device import gpu_memory

ROOM = 300 * 2**20  # bytes of host memory left to the interpreter, its libraries and buffers of one tensor
CHUNK = 512  # tokens of a prompt that go through the model at once
CONTEXT = 4096  # tokens whose keys and values are reckoned with where nothing else is said
LEAST = 512  # and never fewer than these: caches begin with room for some hundred, and calibration takes as many
GROUP = Path("/sys/fs/cgroup")
ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def free_ram() -> int:
    """Bytes of host memory that can be had without pushing others out; a container's limit counts."""
    free = _of_system()
    limit, used = _number(GROUP / "memory.max"), _number(GROUP / "memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _of_system() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such limit, or "max"
        return None


def share_pool() -> None:
    """Let threads that are to come allocate from one pool, where the C library gives each its own (glibc).

    What is freed in a pool is used again only there, and lanes come and go with the policies: over days a server would
    take what no thread uses.
    """
    if (change := _of_glibc("mallopt")) is not None:
        change(ARENA_MAX, 1)


def trim() -> None:
    """Give the system back what the C library keeps of freed memory, where it knows how (glibc); takes 0.3 ms."""
    if (release := _of_glibc("malloc_trim")) is not None:
        release(0)


def settle() -> None:
    """Take all that is there out of the garbage collector's sight; for a command that has loaded what it runs for long.

    Libraries and models leave 400,000 objects that stay. Without this, every full collection walks them all, 0.2 s in
    the middle of a token.
    """
    gc.collect()
    gc.freeze()


def _of_glibc(name: str) -> Callable[..., Any] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def free_vram(device: str) -> int:
    """Bytes of GPU memory that are free now."""
    return gpu_memory(device)[0]


def prefill_reserve(shape: ModelShape, draft: DraftShape | None, context: int = CONTEXT) -> dict[str, int]:
    """What running needs beside weights, by name: keys and values, and the activations of one prompt chunk.

    Activations by rule of thumb: for each token of a chunk its top-k experts' input, inner state and output at once,
    and its logits of the whole vocabulary for the last token only.
    """
    kv = shape.kv_bytes_per_token + (draft.kv_bytes_per_token if draft else 0)
    number = torch.finfo(getattr(torch, shape.dtype)).bits // 8
    wide = shape.top_k * (2 * shape.hidden + 3 * shape.expert_width) + 16 * shape.hidden
    return {f"keys and values of {context} tokens": context * kv, f"prefill of {CHUNK} tokens": CHUNK * wide * number}


def check_memory(pool: str, flag: str, needs: Mapping[str, int], free: int, advice: str) -> None:
    """InputError if `needs` (bytes by name) are more than `free`: which pool, how much, and what to do."""
    needed = sum(needs.values())
    if needed > free:
        terms = " + ".join(f"{show_size(size)} {name}" for name, size in needs.items() if size)
        raise InputError(
            f"{flag}: {pool} has {show_size(free)} free and {show_size(needed)} are needed ({terms}); {advice}"
        )
