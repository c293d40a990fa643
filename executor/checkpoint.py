"""Load a model with its experts apart: they go straight to the host store and stay on meta in the model for ever.

The skeleton is built on torch's meta device and the safetensors shards are read here, so that no expert is held twice
or touches the fast device outside the arena. Experts may lie in the checkpoint one by one
(`experts.E.{gate,up,down}_proj.weight`) or fused (`experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I]).
Every tensor is accounted for: what is missing, unexpected or given twice is an InputError that names it.
"""

import copy
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from ..policies.interface import Key
from ..traces.errors import InputError
from ..traces.models import Source, moe_blocks, quiet
from ..traces.schema import ModelShape
from .formats import EXACT
from .moe import IMPLEMENTATION, register
from .store import HostStore, Record

PER_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
PARTS = ("gate", "up", "down")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def load_target(source: Source, shape: ModelShape, device: str = "cpu", pinned: bool = False) -> tuple[Any, HostStore]:
    """The target without experts on `device`, and the experts in host memory. Both in `shape.dtype`."""
    register()
    dtype = getattr(torch, shape.dtype)
    with quiet():
        model = _skeleton(source, dtype)
    _check_family(source, model)
    store = HostStore(
        len(shape.moe_layers),
        shape.experts,
        Record(shape.hidden, shape.expert_width, EXACT[shape.dtype], dtype),
        pinned=pinned,
    )
    _fill(source, model, dtype, device, ExpertFill(store, _expert_paths(model)))
    return model, store


@dataclass
class ExpertFill:
    """Copies expert tensors into the store and knows which parts have arrived. `layers`: module path to MoE layer."""

    store: HostStore
    layers: dict[str, int]
    arrived: set[tuple[str, int, str]] = field(default_factory=set)

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """True if `name` is an expert's tensor of this model, given for the first time. ValueError: wrong shape."""
        single, fused = PER_EXPERT.fullmatch(name), FUSED.fullmatch(name)
        if single and single[1] in self.layers and int(single[2]) < self.store.experts:
            return self._put(single[1], int(single[2]), single[3], tensor)
        if fused and fused[1] in self.layers:
            if len(tensor) != self.store.experts:
                raise ValueError(f"has {len(tensor)} experts, the configuration {self.store.experts}")
            taken = [self._put(fused[1], e, fused[2], tensor[e]) for e in range(self.store.experts)]
            return all(taken)
        return False

    def _put(self, path: str, expert: int, part: str, tensor: torch.Tensor) -> bool:
        width = self.store.record.width
        weights = self.store.weights(Key(self.layers[path], expert))
        up = weights.up
        place = {"gate": up[:width], "up": up[width:], "gate_up": up, "down": weights.down}[part]
        if place.shape != tensor.shape:
            raise ValueError(f"has the shape {tuple(tensor.shape)}, the configuration {tuple(place.shape)}")
        parts = {(path, expert, p) for p in (("gate", "up") if part == "gate_up" else (part,))}
        if parts & self.arrived:
            return False
        self.arrived |= parts
        place.copy_(tensor)
        return True

    def missing(self) -> Iterator[str]:
        for path in self.layers:
            for expert in range(self.store.experts):
                for part in PARTS:
                    if (path, expert, part) not in self.arrived:
                        yield f"{path}.{expert}.{part}_proj.weight"


def _skeleton(source: Source, dtype: torch.dtype) -> Any:
    config = copy.deepcopy(source.config)  # from_config writes its choices into it
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=IMPLEMENTATION)
    return model.eval()


def _check_family(source: Source, model: Any) -> None:
    """Refuse layouts of experts that the store does not have yet."""
    for block in moe_blocks(model):
        e = block.experts
        odd = [n for n in ("is_transposed", "has_bias", "has_post_expert_norm") if getattr(e, n, False)]
        odd += [f"no {n}" for n in ("has_gate", "is_concatenated") if not getattr(e, n, False)]
        if odd:
            raise InputError(
                f"{source.flag} {source.name}: the experts of {type(model).__name__} are laid out in a way that is not "
                f"supported ({', '.join(odd)}); use a model such as Qwen/Qwen3-30B-A3B"
            )


def _expert_paths(model: Any) -> dict[str, int]:
    order = {id(block.experts): i for i, block in enumerate(moe_blocks(model))}
    return {path: order[id(module)] for path, module in model.named_modules() if id(module) in order}


def _fill(source: Source, model: Any, dtype: torch.dtype, device: str, experts: ExpertFill) -> None:
    """Put every tensor of the checkpoint where it belongs; afterwards only experts are on meta."""
    folder = _folder(source)
    wanted = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected = []
    for name, tensor in _tensors(source, folder):
        try:
            if experts.take(name, tensor):
                continue
            if name in wanted and ".experts." not in name:
                _set(model, name, tensor, wanted[name].shape, dtype, device)
            elif not any(p.search(name) for p in ignored):
                unexpected.append(name)
        except ValueError as error:
            raise InputError(f"{source.flag} {source.name}: {name} {error}; the checkpoint does not fit") from None
    model.tie_weights()
    _rebuild_buffers(model, device)
    missing = [*experts.missing(), *(n for n, p in _held(model) if p.is_meta and ".experts." not in n)]
    _report(source, missing, unexpected)
    _take_generation_config(model, folder)


def _held(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _report(source: Source, missing: list[str], unexpected: list[str]) -> None:
    for names, what in ((missing, "missing"), (unexpected, "unexpected or given twice")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"{source.flag} {source.name}: the checkpoint does not fit its config.json: {names[0]}{more} {what}; "
                "fetch the model again"
            )


def _set(model: Any, name: str, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"has the shape {tuple(tensor.shape)}, the configuration {tuple(shape)}")
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    # A copy, so that nothing keeps the file mapped.
    value = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
    if last in module._parameters:
        module._parameters[last] = torch.nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[last] = value


def _rebuild_buffers(model: Any, device: str) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) were left empty by meta: make their modules anew."""
    for path, module in list(model.named_modules()):
        if module._non_persistent_buffers_set and any(b.is_meta for b in module.buffers(recurse=False)):
            with torch.device(device):
                fresh = type(module)(module.config)
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, fresh)


def _folder(source: Source) -> Path:
    if Path(source.place).is_dir():
        return Path(source.place)
    try:
        return Path(snapshot_download(source.place, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise InputError(f"{source.flag} {source.name}: cannot be fetched ({error})") from None


def _tensors(source: Source, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, views of the mapped files; each file's are used before the next is opened."""
    for file in _watched(_shards(source, folder)):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    yield name, shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{source.flag} {source.name}: {file.name} cannot be read ({error}); fetch it again"
            ) from None


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


def _watched(files: list[Path]) -> Iterable[Path]:
    quiet = len(files) < 2 or not sys.stderr.isatty()
    return files if quiet else track(files, "loading", console=Console(stderr=True), transient=True)


def _take_generation_config(model: Any, folder: Path) -> None:
    """Several end tokens stand only there."""
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
