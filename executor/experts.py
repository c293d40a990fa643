"""From a checkpoint's tensors to the records of a store, one layer at a time."""

from dataclasses import dataclass

import torch

from ..traces.errors import InputError
from ..traces.schema import ModelShape
from .checkpoint import Checkpoint, stacked
from .formats import Format
from .names import Recipe
from .store import Record

PARTS = {
    "gate_up_proj": "up",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj_bias": "up_bias",
    "up_proj_bias": "up_bias",
    "down_proj_bias": "down_bias",
}


@dataclass
class Loss:
    """Squared error of stored numbers against the checkpoint's, and these numbers' own squares."""

    error: float = 0.0
    size: float = 0.0

    @property
    def relative(self) -> float:
        return (self.error / self.size) ** 0.5 if self.size else 0.0


def record_of(found: Checkpoint, shape: ModelShape, format: Format) -> Record:
    """How one expert of this model lies in a store. Raises InputError: its rows cannot be cut into groups."""
    path = next(iter(found.layers))
    experts = found.model.get_submodule(path)
    try:
        for columns in (shape.hidden, shape.expert_width):
            format.row_bytes(columns)
    except ValueError as error:
        raise InputError(f"--store {format.name}: {found.source.name}: {error}; use --store exact") from None
    return Record(shape.hidden, shape.expert_width, format, found.dtype, experts.has_gate, experts.has_bias)


def fill_layer(found: Checkpoint, layer: int, record: Record, raw: torch.Tensor) -> Loss:
    """Write all experts of a layer into `raw` [E, record.size]; what quantising them cost."""
    loss = Loss()
    for recipe in found.plan.recipes.values():
        place = found.experts_of(recipe.targets[0])
        if place is None or place[0] != layer:
            continue
        transposed = _transposed(found, layer)
        if recipe.stacked and not transposed:
            _fill_stacked(found, recipe, PARTS[place[1]], record, raw, loss)
            continue
        for target, expert, one in stacked(found, recipe):
            _, last = found.experts_of(target) or place
            put(record, raw[expert], PARTS[last], 0, one.T if transposed and one.ndim == 2 else one, loss)
    found.files.close()
    return loss


def _fill_stacked(found: Checkpoint, recipe: Recipe, part: str, record: Record, raw: torch.Tensor, loss: Loss) -> None:
    for pattern, name in recipe.sources:
        expert, place = recipe.piece(pattern, name)
        row = place * found.files.shapes[name][0]
        blocks = None if record.format.exact else found.files.blocks(name, record.format.name)
        if blocks is not None:
            matrix = record.up(raw[expert]) if part == "up" else record.down(raw[expert])
            matrix[row : row + len(blocks)].copy_(blocks)
        else:
            put(record, raw[expert], part, row, found.files.read(name), loss)


def _transposed(found: Checkpoint, layer: int) -> bool:
    path = next(path for path, number in found.layers.items() if number == layer)
    return found.model.get_submodule(path).is_transposed


def put(record: Record, flat: torch.Tensor, part: str, row: int, tensor: torch.Tensor, loss: Loss) -> None:
    """Store rows of a matrix, or a bias, in one expert's record `flat`, from `row` on."""
    if part.endswith("bias"):
        up, down = record.biases(flat)
        place = up if part == "up_bias" else down
        assert place is not None
        place[row : row + len(tensor)].copy_(tensor)
        return
    place = record.up(flat) if part == "up" else record.down(flat)
    encoded = record.format.encode(tensor)
    place[row : row + len(tensor)].copy_(encoded)
    if not record.format.exact:
        numbers = tensor.float()
        loss.error += float((record.format.decode(encoded, torch.float32) - numbers).square().sum())
        loss.size += float(numbers.square().sum())
