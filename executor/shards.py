"""The safetensors files of a checkpoint, read one tensor at a time and never held mapped for long."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from ..traces.errors import InputError
from ..traces.models import Source

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WIDTH = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I64": 8}  # bytes of a number; others: 1
MAPPED = 64 * 2**20  # bytes that may have been read of a mapped file before it is let go


class Files(Protocol):
    """A checkpoint: safetensors shards, as they are or decoded, or a GGUF file.

    `shapes`: of all tensors by name; `stored`: bytes that they take in the files. `twice`: names that more than one
    file has. `bits`: of a number, where the checkpoint says that it is quantised. `expert_types`: ggml's, of experts.
    `on_read` hears the size of every tensor that is read.
    """

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    stored: dict[str, int]
    twice: list[str]
    bits: int | None
    expert_types: set[str]
    on_read: Callable[[int], None] | None

    @property
    def paths(self) -> Sequence[Path]: ...

    @property
    def size(self) -> int:
        """Bytes of all files."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor's numbers, possibly a view that keeps a file mapped."""
        ...

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The same tensor along its first dimension, so that no more than one is decoded at a time."""
        ...

    def blocks(self, name: str, format: str) -> torch.Tensor | None:
        """Bytes [r, row bytes] of a matrix, if it is in this quantised format already."""
        ...

    def close(self) -> None: ...


class Shards:
    """Names, shapes and contents of all tensors of a checkpoint. Raises InputError for files that are not whole.

    `files`: where each tensor lies.
    """

    bits: int | None = None

    def __init__(self, source: Source) -> None:
        self.source = source
        self.folder = _folder(source)
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.stored: dict[str, int] = {}
        self.twice: list[str] = []
        self.expert_types: set[str] = set()
        self._open: tuple[Path, safe_open] | None = None
        self._read = 0
        self.on_read: Callable[[int], None] | None = None
        for file in _shards(source, self.folder):
            with self._whole(file), safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    if name in self.files:
                        self.twice.append(name)
                    header = shard.get_slice(name)
                    self.files[name], self.shapes[name] = file, tuple(header.get_shape())
                    self.stored[name] = math.prod(self.shapes[name]) * WIDTH.get(header.get_dtype(), 1)

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return sorted(set(self.files.values()))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.paths)

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapped file; the file stays mapped as long as the view is kept."""
        file = self.files[name]
        with self._whole(file):
            if self._open is None or self._open[0] != file or self._read > MAPPED:
                self._open = (file, safe_open(file, framework="pt"))
                self._read = 0
            tensor = self._open[1].get_tensor(name)
        self._read += tensor.nbytes
        if self.on_read is not None:
            self.on_read(tensor.nbytes)
        return tensor

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Views along the first dimension."""
        yield from self.read(name)

    def blocks(self, name: str, format: str) -> torch.Tensor | None:
        """Safetensors have no blocks of a store's formats."""
        return None

    def close(self) -> None:
        """Let go of the mapped file, as soon as no view of it is kept."""
        self._open = None

    @contextmanager
    def _whole(self, file: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{self.source.flag} {self.source.name}: {file.name} cannot be read ({error}); fetch it again"
            ) from None


def _folder(source: Source) -> Path:
    if Path(source.place).is_dir():
        return Path(source.place)
    try:
        return Path(snapshot_download(source.place, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise InputError(f"{source.flag} {source.name}: cannot be fetched ({error})") from None


def _shards(source: Source, folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        files = sorted({folder / name for name in index["weight_map"].values()})
    else:
        files = [folder / SINGLE]
    for file in files:
        if not file.is_file():
            raise InputError(
                f"{source.flag} {source.name}: {file.name} is not there; fetch the model again (safetensors)"
            )
    return files
