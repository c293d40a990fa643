"""Build the host store of a checkpoint: in memory, or in files that are kept and mapped.

Quantised experts, and exact ones that are to be mapped, are written once, a file a layer, and used from then on. A file
appears under its name only when it is whole and on the disk, so a run that was killed goes on where it was.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..traces.console import show_size
from ..traces.errors import InputError
from ..traces.schema import ModelShape
from .checkpoint import Checkpoint
from .experts import fill_layer, record_of
from .formats import EXACT, QUANTISED
from .ggufs import BLOCKS
from .memory import ROOM, check_memory, free_ram
from .pages import moved
from .store import HostStore, Record

FORMATS = ("auto", "exact", *QUANTISED)
MEMORIES = ("auto", "ram", "mmap", "pinned")
LAYOUT = 1  # of the files; a new one makes new files
KEY = "store.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are stored: format, memory, and the folder for stores that are kept (None: the user's cache)."""

    format: str = "auto"
    memory: str = "auto"
    folder: Path | None = None


def check_choice(choice: Choice) -> None:
    for flag, value, known in (
        ("--store", choice.format, FORMATS),
        ("--store-memory", choice.memory, MEMORIES),
    ):
        if value not in known:
            raise InputError(f"{flag} {value}: unknown; choose {', '.join(known)}")


def build_store(
    found: Checkpoint, shape: ModelShape, choice: Choice, device: str, beside: Mapping[str, int]
) -> HostStore:
    """All experts of `found` as `choice` says. Raises InputError: unfit formats, too little memory or disk.

    `beside`: bytes by name that this process will need in host memory as well.
    """
    name = _format(found, choice)
    format = QUANTISED.get(name) or EXACT[shape.dtype]
    record = record_of(found, shape, format)
    layers, experts = len(shape.moe_layers), shape.experts
    total = layers * experts * record.size
    rest = {**beside, "interpreter and buffers": ROOM}
    memory = _memory(choice, total + sum(rest.values()), device)
    native = found.files.expert_types and {BLOCKS.get(kind) for kind in found.files.expert_types} == {name}
    kept = memory == "mmap" or not (format.exact or native)
    held = {} if memory == "mmap" else {f"experts ({name})": total}
    check_memory("host memory", f"--store-memory {memory}", held | rest, free_ram(), _advice(shape, memory))
    if kept:
        return _open(_keep(found, record, layers, experts, choice), record, layers, experts, memory)
    store = HostStore(layers, experts, record, memory == "pinned")
    losses = [fill_layer(found, layer, record, store.slab(layer)).relative for layer in range(layers)]
    store.losses = () if format.exact else tuple(losses)
    return store


def _format(found: Checkpoint, choice: Choice) -> str:
    """Left to us, it is what the checkpoint has. InputError where that is no format of a store."""
    types = found.files.expert_types
    if choice.format != "auto" or types <= {"F32", "F16", "BF16"}:
        return "exact" if choice.format == "auto" else choice.format
    if len(types) == 1 and (name := BLOCKS.get(*types)):
        return name
    raise InputError(
        f"{found.source.flag} {found.source.name}: its experts are in {' and '.join(sorted(types))}, which would "
        "have to be converted; say into what with --store q8 (or q4, exact), or give a file in Q8_0 or Q4_0"
    )


def _memory(choice: Choice, total: int, device: str) -> str:
    """Left to us, experts are mapped where `total` bytes are more than is free."""
    if choice.memory != "auto":
        return choice.memory
    if total > free_ram():
        return "mmap"
    return "ram" if device == "cpu" else "pinned"


def _advice(shape: ModelShape, memory: str) -> str:
    """What smaller stores would need."""
    if memory == "mmap":
        return "close other programs, or use a smaller draft or --draft none"
    numbers = len(shape.moe_layers) * shape.experts * 3 * shape.hidden * shape.expert_width
    sizes = ", ".join(f"--store {n} ({show_size(numbers * f.row_bytes(32) / 32)})" for n, f in QUANTISED.items())
    return f"use {sizes} or --store-memory mmap"


def default_folder() -> Path:
    """Where stores are kept: moe-spac/stores in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moe-spac" / "stores"


def _keep(found: Checkpoint, record: Record, layers: int, experts: int, choice: Choice) -> Path:
    """The folder with every layer's file; what is missing is made."""
    key = _key(found, record, layers, experts)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", found.source.name).strip("-.")[-60:]
    folder = (choice.folder or default_folder()) / f"{name}-{record.format.name}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        absent = [layer for layer in range(layers) if not _file(folder, layer).is_file()]
        if absent:
            with _locked(folder):
                _make(found, record, experts, folder, key, absent)
    except OSError as error:
        raise InputError(f"--store-cache {folder}: cannot be written ({error}); give another folder") from None
    return folder


def _key(found: Checkpoint, record: Record, layers: int, experts: int) -> dict[str, Any]:
    """What a kept store depends on: the files' commit, or their sizes and times, and how experts are laid out."""
    folder = found.files.folder
    files: Any = folder.name
    if folder.parent.name != "snapshots":  # of a hub cache, whose folders are commits
        files = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in found.files.paths]
    return {
        "layout": LAYOUT,
        "files": files,
        "format": record.format.name,
        "dtype": str(record.dtype),
        "size": record.size,
        "layers": layers,
        "experts": experts,
    }


def _file(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:03d}.bin"


def _make(
    found: Checkpoint, record: Record, experts: int, folder: Path, key: dict[str, Any], absent: list[int]
) -> None:
    size = experts * record.size
    free = shutil.disk_usage(folder).free
    check_memory("disk", f"--store-cache {folder}", {"experts": size * len(absent)}, free, "give another folder")
    (folder / KEY).write_text(json.dumps(key | {"model": found.source.name}, indent=1))
    for layer in absent:
        part = folder / "layer.part"
        part.unlink(missing_ok=True)
        raw = torch.from_file(str(part), shared=True, size=size, dtype=torch.uint8).view(experts, record.size)
        loss = fill_layer(found, layer, record, raw)
        del raw
        _to_disk(part)
        note = _file(folder, layer).with_suffix(".json")
        note.write_text(json.dumps({"relative_error": loss.relative}))
        _to_disk(note)
        part.rename(_file(folder, layer))
        _to_disk(folder)


def _to_disk(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes a store; the lock goes with the process."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes that start at once would both do the work
        yield
        return
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"--store-cache {folder}: another process is making this store; wait for it, or give another folder"
            ) from None
        yield


def _open(folder: Path, record: Record, layers: int, experts: int, memory: str) -> HostStore:
    losses, slabs = [], []
    for layer in range(layers):
        file, size = _file(folder, layer), experts * record.size
        if file.stat().st_size != size:
            raise InputError(f"--store-cache: {file} is damaged; delete the folder {folder}")
        mapped = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8).view(experts, record.size)
        slabs.append(mapped if memory == "mmap" else moved(mapped))
        losses.append(json.loads(file.with_suffix(".json").read_text())["relative_error"])
    losses = [] if record.format.exact else losses
    return HostStore(layers, experts, record, slabs=slabs, losses=losses, memory=memory)
