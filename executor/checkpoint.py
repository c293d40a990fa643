"""Load a model with its experts apart: they go straight to the host store and stay on meta in the model for ever.

The skeleton is built on torch's meta device and the checkpoint is read here, tensor by tensor, so that nothing is held
twice and no expert touches the fast device outside the arena. Every tensor is accounted for before one is read: what is
missing, unexpected or given twice is an InputError that names it.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.core_model_loading import build_glob_alternation

from ..traces.console import show_size
from ..traces.errors import InputError
from ..traces.models import Source, moe_blocks, quiet
from .ggufs import SUFFIX, Gguf
from .moe import IMPLEMENTATION, register
from .names import Plan, Recipe, plan
from .packed import shards_of
from .shards import Files

SLACK = 1.8  # times the bytes of experts without scales and zero points; 8 bits in place of 4 would be 2 and more


@dataclass
class Checkpoint:
    """A model on meta, the files with its weights, and what goes where. `layers`: path of experts to MoE layer."""

    source: Source
    model: Any
    files: Files
    plan: Plan
    dtype: torch.dtype
    layers: dict[str, int]

    def experts_of(self, target: str) -> tuple[int, str] | None:
        """MoE layer and parameter name, if `target` belongs to routed experts that are kept apart."""
        path, _, last = target.rpartition(".")
        return (self.layers[path], last) if path in self.layers else None

    def fail(self, name: str, what: str) -> InputError:
        return InputError(f"{self.source.flag} {self.source.name}: {name} {what}; the checkpoint does not fit")


def open_checkpoint(source: Source, dtype: torch.dtype, apart: bool) -> Checkpoint:
    """Skeleton, files and plan; raises InputError for all that does not fit together. No weight is read.

    `apart`: routed experts are computed through us and stay on meta; else the model is an ordinary one.
    """
    register()
    with quiet():
        model = _skeleton(source, dtype, IMPLEMENTATION if apart else None)
    layers = {}
    if apart:
        _check_family(source, model)
        order = {id(block.experts): i for i, block in enumerate(moe_blocks(model))}
        layers = {path: order[id(module)] for path, module in model.named_modules() if id(module) in order}
    files = Gguf(source) if source.place.endswith(SUFFIX) else shards_of(source)
    found = Checkpoint(source, model, files, plan(model, files.shapes), dtype, layers)
    _account(found)
    _check_quantised(found)
    return found


def fill_dense(found: Checkpoint, device: str) -> Any:
    """Read everything but the experts that are apart; the model, ready to run on `device`."""
    model, files = found.model, found.files
    exact = _kept_exact(model, found.dtype)
    for recipe in found.plan.recipes.values():
        if found.experts_of(recipe.targets[0]) is not None:
            continue
        for target, tensor in convert(found, recipe).items():
            _set(found, target, tensor, exact, device)
    files.close()
    with quiet():
        model.tie_weights()
        _compute_buffers(model, device)
    _take_generation_config(found)
    for name, tensor in model.state_dict().items():
        if tensor.is_meta and found.experts_of(name) is None:
            raise found.fail(name, "was not made from anything")
    return model


def convert(found: Checkpoint, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The model's tensors by name that a recipe makes; InputError where its sources do not go together."""
    with _converting(found, recipe):
        return recipe.convert(found.model, (found.files.read(name) for _, name in recipe.sources))


def stacked(found: Checkpoint, recipe: Recipe) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The model's tensors of experts by name, cut into experts: of one that is taken as it is, decoded one by one."""
    if recipe.converter is None:
        with _converting(found, recipe):
            for expert, one in enumerate(found.files.pieces(recipe.sources[0][1])):
                yield recipe.targets[0], expert, one
        return
    for target, tensor in convert(found, recipe).items():
        for expert, one in enumerate(tensor):
            yield target, expert, one


@contextmanager
def _converting(found: Checkpoint, recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise found.fail(recipe.sources[0][1], f"cannot be converted ({first})") from None


def _skeleton(source: Source, dtype: torch.dtype, implementation: str | None) -> Any:
    config = copy.deepcopy(source.config)  # from_config writes its choices into it
    choice = {"experts_implementation": implementation} if implementation else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **choice)
    return model.eval()


def _check_family(source: Source, model: Any) -> None:
    """Refuse arithmetic of experts that we do not have."""
    for block in moe_blocks(model):
        if getattr(block.experts, "has_post_expert_norm", False):
            raise InputError(
                f"{source.flag} {source.name}: {type(model).__name__} normalises the output of every expert, which is "
                "not supported here; use a model such as Qwen/Qwen3-30B-A3B"
            )


def _account(found: Checkpoint) -> None:
    """Every tensor of the model has its sources, of the right shape, and every source is used once."""
    odd = [*found.plan.unexpected, *found.plan.twice, *found.files.twice]
    missing = list(found.plan.missing)
    wanted = found.model.state_dict()
    for recipe in found.plan.recipes.values():
        shape = tuple(wanted[recipe.targets[0]].shape)
        if recipe.converter is None:
            _check_shape(found, recipe.sources[0][1], shape)
        elif recipe.stacked:
            more, absent = _account_stacked(found, recipe, shape)
            odd += more
            missing += absent
    for names, what in ((missing, "missing"), (odd, "unexpected or given twice")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"{found.source.flag} {found.source.name}: the checkpoint does not fit its config.json: {names[0]}"
                f"{more} {what}; fetch the model again"
            )


def _check_quantised(found: Checkpoint) -> None:
    """Experts of a checkpoint that says it is quantised are so: other tools have been seen to skip stacked ones."""
    bits = found.files.bits
    names = [n for r in found.plan.recipes.values() if found.experts_of(r.targets[0]) for _, n in r.sources]
    if bits is None or not names:
        return
    actual = sum(found.files.stored[n] for n in names)
    expected = sum(math.prod(found.files.shapes[n]) for n in names) * bits // 8
    if actual > expected * SLACK:
        raise InputError(
            f"{found.source.flag} {found.source.name}: config.json says {bits} bits a weight, which makes "
            f"{show_size(expected)} of experts, and the files have {show_size(actual)}: they were not quantised; "
            "fetch another version of the model"
        )


def _account_stacked(found: Checkpoint, recipe: Recipe, shape: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """Unexpected and missing matrices of stacked experts of `shape` [E, rows, columns]."""
    assert recipe.converter is not None
    patterns = len(recipe.converter.source_patterns)
    odd, seen = [], {}
    for pattern, name in recipe.sources:
        piece = recipe.piece(pattern, name)
        if piece in seen or piece[0] >= shape[0]:
            odd.append(name)
            continue
        seen[piece] = name
        _check_shape(found, name, (shape[1] // patterns, *shape[2:]))
    absent = [(e, p) for e in range(shape[0]) for p in range(patterns) if (e, p) not in seen]
    return odd, [_name_of(seen, recipe, e, p) for e, p in absent]


def _name_of(seen: dict[tuple[int, int], str], recipe: Recipe, expert: int, place: int) -> str:
    """What a missing matrix would be called, after one that is there."""
    assert recipe.converter is not None
    for (other, p), name in seen.items():
        if p == place:
            return name.replace(f".experts.{other}.", f".experts.{expert}.")
    return f"{recipe.targets[0]} (expert {expert}, {recipe.converter.source_patterns[place]})"


def _check_shape(found: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    if found.files.shapes[name] != shape:
        raise found.fail(name, f"has the shape {found.files.shapes[name]}, the configuration {shape}")


def _kept_exact(model: Any, dtype: torch.dtype) -> Any:
    """What the family keeps in float32 whatever the model's type is: a pattern, or None."""
    names = list(model._get_dtype_plan(dtype))
    return build_glob_alternation(names)[0] if names else None


def _set(found: Checkpoint, name: str, tensor: torch.Tensor, exact: Any, device: str) -> None:
    """Put a tensor in its place, in a copy, so that nothing keeps a file mapped."""
    path, _, last = name.rpartition(".")
    module = found.model.get_submodule(path)
    where = module._parameters if last in module._parameters else module._buffers
    if tensor.shape != where[last].shape:
        raise found.fail(name, f"has the shape {tuple(tensor.shape)}, the configuration {tuple(where[last].shape)}")
    dtype = tensor.dtype
    if tensor.is_floating_point():
        dtype = torch.float32 if exact is not None and exact.search(name) else where[last].dtype
    value = tensor.to(device=device, dtype=dtype, copy=True)
    where[last] = torch.nn.Parameter(value, requires_grad=False) if where is module._parameters else value


def _compute_buffers(model: Any, device: str) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) were left empty by meta: the family computes them anew."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._buffers[last] = torch.empty_like(buffer, device=device)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # everything that was read, and experts on meta, is left alone
    model.initialize_weights()


def _take_generation_config(found: Checkpoint) -> None:
    """Several end tokens stand only there."""
    folder = found.files.folder
    if (folder / "generation_config.json").is_file():
        found.model.generation_config = GenerationConfig.from_pretrained(folder)
