"""What this machine has for running experts, what was chosen because of it, and what would limit a model on it."""

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..traces.console import show_size
from ..traces.schema import ModelShape
from .device import device_of, gpu_memory, gpu_name, has_gpu
from .kernels import describe, physical_cores
from .memory import free_ram

READ_BYTES = 256 * 2**20  # far beyond any cache
COLUMNS = 8192
READ_SECONDS = 0.3  # with one thread, and again with all
LOW_DISK = 20 * 2**30
NOTE, WARN, FAIL = "note", "warning", "failure"
Finding = tuple[str, str]  # how bad, and a sentence


def read_bandwidth(threads: int, seconds: float = READ_SECONDS, size: int = READ_BYTES) -> float:
    """Bytes/s at which `threads` threads read memory that is in no cache, by a product of a matrix and a vector: the
    best of the passes in `seconds`."""
    matrix, vector = torch.ones((size // 4 // COLUMNS, COLUMNS)), torch.ones(COLUMNS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best, end = float("inf"), perf_counter() + seconds
        while best == float("inf") or perf_counter() < end:
            begin = perf_counter()
            torch.mv(matrix, vector)
            best = min(best, perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    return matrix.nbytes / best


def examine(cache: Path) -> dict[str, Any]:
    """Facts of this machine; bytes and bytes/s. `cache` is where stores are kept. Takes about a second."""
    cores = physical_cores()
    found: dict[str, Any] = {
        "processor": _processor(),
        "logical_cores": os.cpu_count() or 1,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "ram": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "ram_free": free_ram(),
        "read_one_thread": read_bandwidth(1),
        "read_all_threads": read_bandwidth(cores),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        **describe(),
        "cache_folder": str(cache),
        "cache_disk_free": shutil.disk_usage(_existing(cache)).free,
        "gpu": None,
    }
    return found | _gpu() if has_gpu() else found


def _gpu() -> dict[str, Any]:
    from .copies import copy_times, fit_copies

    device = device_of("cuda")
    free, total = gpu_memory("cuda")
    facts: dict[str, Any] = {"gpu": gpu_name("cuda"), "vram": total, "vram_free": free}
    for pinned in (True, False):
        points = copy_times(device, pinned)
        if points:
            facts[f"copy_{'pinned' if pinned else 'pageable'}"] = fit_copies(points)[1]
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next((p for p in (path, *path.parents) if p.exists()), Path.cwd())


def findings(facts: Mapping[str, Any]) -> list[Finding]:
    """What a user should know of the machine itself."""
    logical, cores, threads = facts["logical_cores"], facts["cores"], facts["torch_threads"]
    found: list[Finding] = []
    if facts["gpu"] is None:
        found.append((NOTE, "no CUDA GPU: slots are emulated in RAM, and the link takes the time that a profile says"))
    elif facts.get("copy_pinned") is None:
        found.append((WARN, "no memory can be page-locked: copies go through pageable memory and are slower"))
    if facts["kernels"] == "torch":
        found.append((WARN, f"experts on the CPU are computed by torch: {facts['why']}"))
    if facts["load"] is not None and facts["load"] > logical:
        found.append((WARN, f"load {facts['load']:.1f} on {logical} cores: what is measured now will be too slow"))
    if threads > cores:
        found.append((WARN, f"torch uses {threads} threads on {cores} cores; set OMP_NUM_THREADS={cores}"))
    if facts["cache_disk_free"] < LOW_DISK:
        free = show_size(facts["cache_disk_free"])
        found.append((WARN, f"{free} of disk are free at {facts['cache_folder']}, where quantised stores are kept"))
    return found


def needs(shape: ModelShape, slots: int, facts: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """What a model with `slots` slots a layer takes here, and what limits it.

    A token's experts that are no hits must be read from host memory by the CPU, or cross the link: the time of both for
    a token all of whose experts miss says which of them is the way, and how bad it is.
    """
    layers = len(shape.moe_layers)
    experts, held = shape.all_expert_bytes, slots * layers * shape.expert_bytes
    token = layers * shape.top_k * shape.expert_bytes
    wanted = {
        "model": shape.name,
        "experts_bytes": experts,
        "slots_bytes": held,
        "dense_bytes": shape.dense_bytes,
        "expert_bytes_a_token": token,
        "cpu_ms_all_missing": token / facts["read_all_threads"] * 1e3,
    }
    on_gpu = facts["gpu"] is not None
    ram = experts + (0 if on_gpu else held + shape.dense_bytes)
    found: list[Finding] = []
    if ram > facts["ram_free"]:
        how = "a smaller --store makes them fewer; --store-memory mmap reads experts from disk when they are needed"
        found.append((FAIL, f"needs {show_size(ram)} of RAM, {show_size(facts['ram_free'])} are free: {how}"))
    if on_gpu and held + shape.dense_bytes > facts["vram_free"]:
        both = show_size(held + shape.dense_bytes)
        found.append((FAIL, f"needs {both} of GPU memory, {show_size(facts['vram_free'])} are free: lower --slots"))
    if 0 < slots < shape.top_k:
        found.append((FAIL, f"{slots} slots a layer are fewer than the {shape.top_k} experts of one token"))
    if facts.get("copy_pinned"):
        wanted["link_ms_all_missing"] = token / facts["copy_pinned"] * 1e3
    found.append((NOTE, _limit(wanted)))
    return wanted, found


def _limit(wanted: Mapping[str, Any]) -> str:
    cpu, link = wanted["cpu_ms_all_missing"], wanted.get("link_ms_all_missing")
    read = show_size(wanted["expert_bytes_a_token"])
    text = f"a token without a hit reads {read} of experts, which takes {cpu:.1f} ms on the CPU"
    if link is None:
        return f"{text}, at the memory's speed"
    return f"{text} and {link:.1f} ms over the link: {'the link' if link < cpu else 'the CPU'} is the way for misses"
