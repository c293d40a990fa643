"""What a checkpoint's files hold and what a loaded pair takes, counted on the tensors, against what it should be."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from ..traces.console import show_size
from ..traces.errors import InputError
from ..traces.models import dtype_of
from .checkpoint import open_checkpoint
from .ggufs import SUFFIX
from .models import Models, find_source


def on_disk(target: str) -> str | None:
    """The folder or file of a checkpoint whose weights are on this disk, the hub's cache included; else None."""
    path = Path(target).expanduser()
    if path.suffix == SUFFIX:
        return str(path) if path.is_file() else None
    if not path.is_dir():
        try:
            path = Path(snapshot_download(target, local_files_only=True))
        except (OSError, ValueError):
            return None
    return str(path) if any(path.glob("*.safetensors")) else None


def audit_files(target: str) -> dict[str, Any]:
    """Bytes of a checkpoint's experts and of all else in its files, against what its configuration makes of them.

    Only the files' headers are read. The configuration says how many numbers there are, and in how many bits each;
    quantised files have factors beside them, and a GGUF file says so itself, tensor by tensor. Raises InputError as
    loading does, for whatever does not fit together.
    """
    source = find_source("--target", target, "target")
    dtype = getattr(torch, dtype_of(source.config, "auto"))
    found = open_checkpoint(source, dtype, apart=True)
    files, bits = found.files, found.files.bits or 8 * dtype.itemsize
    try:
        apart = [r for r in found.plan.recipes.values() if found.experts_of(r.targets[0]) is not None]
        experts = sum(files.stored[name] for recipe in apart for _, name in recipe.sources)
        wanted = {name: t.numel() for name, t in found.model.state_dict().items()}
        numbers = sum(size for name, size in wanted.items() if found.experts_of(name) is not None)
        return {
            "files": len(files.paths),
            "tensors": len(files.shapes),
            "files_bytes": files.size,
            "experts_in_files_bytes": experts,
            "experts_expected_bytes": experts if files.expert_types else numbers * bits // 8,
            "bits_a_weight_in_files": experts * 8 / numbers,
            "other_in_files_bytes": sum(files.stored[name] for name in files.shapes) - experts,
        }
    finally:
        files.close()


def audit(models: Models) -> dict[str, Any]:
    """Bytes by kind of everything that is loaded, and what quantising the experts cost.

    Raises InputError if experts take other bytes than their format says, or are somewhere else as well: both were seen
    in other programs, where stacked experts were left in 16 bits without a word.
    """
    store, shape = models.store, models.pair.shape
    actual = sum(store.slab(layer).nbytes for layer in range(store.layers))
    numbers, expected = _expected(models)
    doubled = sum(p.nbytes for m in models.experts for p in m.parameters() if not p.is_meta)
    if actual != expected or doubled:
        raise InputError(
            f"--store {store.record.format.name}: experts should take {show_size(expected)} and take "
            f"{show_size(actual + doubled)}, {show_size(doubled)} of it in the model itself"
        )
    experts: dict[str, Any] = {
        "format": store.record.format.name,
        "memory": store.memory,
        "bytes": actual,
        "expected_bytes": expected,
        "bits_per_weight": actual * 8 / numbers,
    }
    if store.losses:
        experts["relative_error"] = {"mean": sum(store.losses) / len(store.losses), "by_layer": list(store.losses)}
    found = {"experts": experts, "dense": _by_type(models.pair.target), "dense_expected_bytes": shape.dense_bytes}
    return found | ({"draft": _by_type(models.pair.draft)} if models.pair.draft in models.pair.models else {})


def in_words(found: dict[str, Any]) -> str:
    """An audit in one line."""
    experts = found["experts"]
    words = (
        f"experts {experts['format']} ({experts['memory']}) {show_size(experts['bytes'])}, "
        f"{experts['bits_per_weight']:.2f} bits a weight"
    )
    error = experts.get("relative_error")
    if error:
        words += f", relative error {error['mean']:.4f}, worst layer {max(error['by_layer']):.4f}"
    for name in ("dense", "draft"):
        if name in found:
            words += f"; {name} " + " + ".join(f"{show_size(size)} {kind}" for kind, size in found[name].items())
    return words


def _expected(models: Models) -> tuple[int, int]:
    """Numbers of all experts' matrices, and bytes that they take in the store's format, with biases, line by line."""
    store, shape = models.store, models.pair.shape
    bits = store.record.format.bits
    group = 32 * store.record.dtype.itemsize if bits is None else 2 + 4 * bits  # bytes of 32 numbers
    rows = (2 if models.experts[0].has_gate else 1) * shape.expert_width
    up = down = 0
    if models.experts[0].has_bias:
        up, down = (n * store.record.dtype.itemsize for n in (rows, shape.hidden))
    parts = (rows * shape.hidden * group // 32, shape.hidden * shape.expert_width * group // 32, up, down)
    one = sum(-(-part // 64) * 64 for part in parts)
    count = len(shape.moe_layers) * shape.experts
    return count * (rows + shape.expert_width) * shape.hidden, count * one


def _by_type(model: Any) -> dict[str, int]:
    """Bytes of a model's tensors that are held, by number type; tied ones once."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return dict(found)
