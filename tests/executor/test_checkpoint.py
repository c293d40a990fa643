"""The loader takes every layout, loses nothing, and says by name what does not fit."""

import json
import shutil

import pytest
import torch
from from_host import logits_of, reference_logits
from safetensors.torch import load_file, save_file
from tiny import save_tiny_target

from moe_spac.executor.models import load_models
from moe_spac.policies.interface import Key
from moe_spac.traces.errors import InputError

UP = "model.layers.1.mlp.experts.5.up_proj.weight"


def load(folder):
    models = load_models(folder, "none")
    return models.pair.target, models.store


@pytest.fixture(scope="module")
def expected(tiny_target):
    return reference_logits(tiny_target)


@pytest.fixture
def folder(tiny_target, tmp_path):
    return shutil.copytree(tiny_target, tmp_path / "model")


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def fuse(tensors) -> None:
    """As newer official checkpoints have it: [E, 2I, H] and [E, H, I]."""
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        parts = {
            p: torch.stack([tensors.pop(f"{path}.{e}.{p}_proj.weight") for e in range(8)])
            for p in ("gate", "up", "down")
        }
        tensors[f"{path}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{path}.down_proj"] = parts["down"]


def test_one_by_one_and_fused_experts_give_transformers_logits(folder, expected):
    assert UP in load_file(folder / "model.safetensors")
    torch.testing.assert_close(logits_of(load_models(folder, "none")), expected, rtol=0, atol=1e-6)
    rewrite(folder, fuse)
    torch.testing.assert_close(logits_of(load_models(folder, "none")), expected, rtol=0, atol=1e-6)


def test_an_expert_may_lie_in_two_shards(folder, expected):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        shards["ab"[i % 2] + ".safetensors"][name] = tensor
    for name, content in shards.items():
        save_file(content, folder / name)
    weight_map = {name: file for file, content in shards.items() for name in content}
    assert len({weight_map[f"model.layers.0.mlp.experts.3.{p}_proj.weight"] for p in ("gate", "up", "down")}) == 2
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.testing.assert_close(logits_of(load_models(folder, "none")), expected, rtol=0, atol=1e-6)
    (folder / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"b\.safetensors is not there"):
        load(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_only_experts_stay_on_meta(tied, tmp_path):
    model, store = load(save_tiny_target(tmp_path / "model", tie_word_embeddings=tied))
    meta = {name for name, p in model.named_parameters() if p.is_meta}
    assert meta == {f"model.layers.{i}.mlp.experts.{p}_proj" for i in (0, 1) for p in ("gate_up", "down")}
    assert not any(b.is_meta for b in model.buffers())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert store.record.size == 3 * 64 * 32 * 4


def test_half_precision_checkpoints_are_widened(folder):
    rewrite(folder, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    model, store = load(folder)
    assert {p.dtype for p in model.parameters() if not p.is_meta} == {torch.float32}
    saved = load_file(folder / "model.safetensors")[UP].float()
    assert torch.equal(store.weights(Key(1, 5))[0][32:], saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(UP), f"{UP} missing"),
        (lambda t: t.pop("model.layers.1.mlp.gate.weight"), r"layers\.1\.mlp\.gate\.weight missing"),
        (lambda t: t.update({"model.layers.1.mlp.experts.8.up_proj.weight": t[UP] + 1}), r"experts\.8\.up.*unexpected"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), r"model\.extra\.weight unexpected"),
        (lambda t: t.update({UP: torch.zeros(32, 63)}), r"shape \(32, 63\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(63)}), r"model\.norm\.weight has the shape \(63,\)"),
        (lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(8, 64, 32)}), "given twice"),
        (lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(7, 64, 32)}), "given twice"),
    ],
)  # fmt: skip
def test_every_tensor_is_accounted_for(change, said, folder):
    rewrite(folder, change)
    with pytest.raises(InputError, match=said):
        load(folder)


def test_damaged_and_absent_weights_are_refused(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:2000])
    with pytest.raises(InputError, match="cannot be read"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="is not there"):
        load(folder)


def test_a_model_without_experts_is_refused(tiny_draft):
    with pytest.raises(InputError, match="no routed experts"):
        load_models(tiny_draft)
