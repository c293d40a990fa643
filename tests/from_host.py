"""A model whose experts are computed from the host store, without slots or a policy."""

from moe_spac.policies.interface import Key


class AllFromHost:
    """Computes every expert of a layer in torch, from the numbers that the store stands for."""

    def __init__(self, store) -> None:
        self.store = store

    def layer(self, call) -> None:
        for expert in call.places:
            call._run(expert, self.store.weights(Key(call.layer, expert)), call.hidden, call.rows)


def logits_of(models, model=None):
    """Logits of ids 0 to 39 by the target, or by `model`."""
    import torch

    from moe_spac.executor.moe import attach

    attach(models.experts, AllFromHost(models.store))
    with torch.no_grad():
        return (model or models.pair.target)(torch.arange(40)[None]).logits


def reference_logits(folder, dtype="float32"):
    """The same by transformers' plainest implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", dtype=dtype)
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits
