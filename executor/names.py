"""Which tensors of a checkpoint make up which of the model's, by transformers' own renamings and conversions.

A checkpoint may call its tensors what it likes, keep experts one by one, fused, or gate apart from up; transformers
knows for every family (its `conversion_mapping`). Asked here before anything is read, so that every tensor is
accounted for from the files' headers alone.
"""

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.loading_report import LoadStateDictInfo

EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass
class Recipe:
    """The checkpoint's tensors that one of the model's is made of: (pattern that it matched, name), in order.

    Without a converter it is one tensor, taken as it is. `targets`: all that the conversion gives.
    """

    targets: tuple[str, ...]
    converter: WeightConverter | None = None
    sources: list[tuple[str | None, str]] = field(default_factory=list)

    @property
    def stacked(self) -> bool:
        """One matrix for each expert and pattern; their rows lie below one another in the order of the patterns."""
        if self.converter is None:
            return False
        kinds = [(type(op), getattr(op, "dim", None)) for op in self.converter.operations]
        patterns = len(self.converter.source_patterns)
        return kinds == [(MergeModulelist, 0), (Concatenate, 1)] or (kinds == [(MergeModulelist, 0)] and patterns == 1)

    def piece(self, pattern: str | None, name: str) -> tuple[int, int]:
        """Expert and place among the patterns of a stacked recipe's source. ValueError: no expert in its name."""
        assert self.converter is not None
        number = EXPERT.search(name)
        if number is None:
            raise ValueError("names no expert")
        return int(number[1]), self.converter.source_patterns.index(pattern or "")

    def convert(self, model: Any, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors by name, from the sources' in order."""
        if self.converter is None:
            (tensor,) = tensors
            return {self.targets[0]: tensor}
        converter = copy.deepcopy(self.converter)
        for (pattern, name), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.targets[0], name, pattern, tensor)  # pyright: ignore[reportArgumentType]
        made = converter.convert(self.targets[0], model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class Plan:
    """`recipes` by the first of the model's tensors that they make; what the model lacks, or does not want (twice)."""

    recipes: dict[str, Recipe]
    missing: list[str]
    unexpected: list[str]
    twice: list[str]


def plan(model: Any, names: Iterable[str]) -> Plan:
    """Where every tensor of the checkpoint goes. `model` is a skeleton on meta."""
    mapping = get_model_conversion_mapping(model)
    renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    found = Plan({}, [], [], [])
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted:
            found.unexpected.append(name)
            continue
        _add(found, target, by_pattern.get(pattern or ""), pattern, name)
    made = {target for recipe in found.recipes.values() for target in recipe.targets}
    _excuse(model, found, set(wanted) - made)
    return found


def _add(found: Plan, target: str, converter: WeightConverter | None, pattern: str | None, name: str) -> None:
    recipe = found.recipes.get(target)
    if recipe is None:
        first, *others = converter.target_patterns if converter else [target]
        targets = (target, *(target.replace(first, other) for other in others))
        recipe = found.recipes[target] = Recipe(targets, converter)
    elif converter is None or recipe.converter is None:
        found.twice.append(name)
        return
    recipe.sources.append((pattern, name))


def _excuse(model: Any, found: Plan, missing: set[str]) -> None:
    """What the family says may be missing or left over is neither; nor is what is tied to another tensor."""
    info = LoadStateDictInfo(missing - set(model.all_tied_weights_keys), set(found.unexpected), set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(info)
    found.missing = sorted(info.missing_keys, key=dot_natural_key)
    found.unexpected = sorted(info.unexpected_keys, key=dot_natural_key)
