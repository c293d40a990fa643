"""The target once more, as transformers itself runs it: what live runs are held to."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..policies.interface import Key
from ..traces.models import moe_blocks, quiet
from .experts import PARTS
from .ggufs import SUFFIX
from .models import Models


@torch.no_grad()
def whole(models: Models) -> Any:
    """The target as transformers itself runs it, on the very numbers that are loaded.

    Everything but experts is shared with the loaded model; experts are decoded from the store, all of them, beside it.
    """
    target = models.pair.target
    config = copy.deepcopy(target.config)
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype, experts_implementation="eager").eval()
    for path, module in target.named_modules():
        if not any(module is experts for experts in models.experts):
            other = model.get_submodule(path)
            other._parameters, other._buffers = module._parameters, module._buffers
    for layer, block in enumerate(moe_blocks(model)):
        for name, parameter in list(block.experts.named_parameters()):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=target.device)
            for expert in range(models.store.experts):
                one = getattr(models.store.weights(Key(layer, expert)), PARTS[name])
                values[expert].copy_(one.T if block.experts.is_transposed and one.ndim == 2 else one)
            block.experts._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
    model.generation_config = target.generation_config
    return model


def reference(models: Models) -> Any:
    """What the output is to be compared with: transformers' own loading where it can read the same, else `whole`."""
    coded = models.place.endswith(SUFFIX) or getattr(models.pair.target.config, "quantization_config", None) is not None
    if coded or not models.store.record.format.exact:
        return whole(models)
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(models.place, dtype=models.pair.target.dtype)
    return model.to(models.device).eval()
