import json
import shutil

import pytest
import torch
from tiny import tiny_config

from moe_spac.traces.errors import InputError
from moe_spac.traces.models import check_tokenizers, find_model, load_pair, measure_draft, model_shape, moe_blocks


def test_shape_by_hand():
    shape = model_shape(tiny_config(), "t")
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16  # queries, keys and values, output, two head norms
    dense = 2 * 320 * 64 + 2 * (attention + 2 * 64 + 8 * 64) + 64  # both tables, two layers with norms and gate, norm
    assert (shape.layers, shape.moe_layers, shape.experts, shape.top_k) == (2, (0, 1), 8, 2)
    assert (shape.hidden, shape.expert_width, shape.dtype) == (64, 32, "float32")
    assert shape.expert_bytes == 3 * 64 * 32 * 4
    assert shape.dense_bytes == dense * 4
    assert shape.embedding_bytes == 320 * 64 * 4
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert model_shape(tiny_config(tie_word_embeddings=True), "t").embedding_bytes == 0


def test_shape_in_half_precision():
    full, half = model_shape(tiny_config(), "t"), model_shape(tiny_config(), "t", "bfloat16")
    for field in ("expert_bytes", "dense_bytes", "kv_bytes_per_token"):
        assert getattr(full, field) == 2 * getattr(half, field)


def test_qwen3_30b_a3b_from_its_published_configuration():
    from transformers import Qwen3MoeConfig

    fields = {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    config = Qwen3MoeConfig(**fields)
    shape = model_shape(config, "Qwen/Qwen3-30B-A3B", "bfloat16")
    assert shape.expert_bytes == 9_437_184  # 9 MiB
    assert shape.kv_bytes_per_token == 98_304  # 96 KiB
    assert (shape.all_expert_bytes + shape.dense_bytes) / 2 == pytest.approx(30.53e9, rel=1e-3)  # 30.5 B parameters


@pytest.mark.parametrize(
    ("changes", "layers"),
    [({"mlp_only_layers": [0]}, (1,)), ({"decoder_sparse_step": 2, "num_hidden_layers": 4}, (1, 3))],
)
def test_dense_layers_are_not_in_the_layer_map(changes, layers):
    assert model_shape(tiny_config(**changes), "t").moe_layers == layers


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_blocks_of_other_families(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 32, "vocab_size": 320, "num_experts_per_tok": 2,
    }  # fmt: skip
    extra = {"first_k_dense_replace": 1} if family == "deepseek_v3" else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields, **extra))
    blocks = moe_blocks(model)
    assert [b.layer for b in blocks] == ([1] if family == "deepseek_v3" else [0, 1])
    assert all("Experts" in type(b.experts).__name__ for b in blocks)


def test_draft_shape_counts_every_weight(tiny_draft):
    shape = measure_draft(find_model("--draft", tiny_draft, "draft").config, "d")
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16
    assert shape.layers == 1
    assert shape.dense_bytes == 4 * (2 * 320 * 64 + attention + 3 * 64 * 96 + 3 * 64)


def test_dense_target_is_refused(tiny_draft):
    with pytest.raises(InputError, match=r"--target .*no routed experts.*Qwen/Qwen3-30B-A3B"):
        load_pair(tiny_draft)


def test_family_outside_the_experts_registry_is_refused():
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, intermediate_size_mlp=16, num_local_experts=4,
    )  # fmt: skip
    with pytest.raises(InputError, match="Llama4TextExperts is outside the experts registry"):
        model_shape(config, "t")


@pytest.mark.parametrize(
    ("fields", "bytes_a_token"),
    [
        # DeepSeek-V3: 61 layers keep a vector of 512 and a rotary key of 64 (arXiv 2412.19437, section 4.2)
        ({"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 70_272),
        # gpt-oss-20b: 12 of 24 layers attend to everything, 8 heads of 64 (its model card)
        ({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_key_value_heads": 8, "head_dim": 64}, 24_576),
    ],
)
def test_keys_and_values_of_published_models(fields, bytes_a_token):
    from transformers import AutoConfig

    from moe_spac.traces.models import _kv_numbers

    assert _kv_numbers(AutoConfig.for_model(**fields)) * 2 == bytes_a_token


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder"])
def test_missing_folder(name):
    with pytest.raises(InputError, match=f"--target {name}: no such folder"):
        load_pair(name)


def test_folder_that_is_no_model(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        load_pair(tmp_path)


def test_unreachable_hub_name_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"--target nobody/no-such-model: cannot be read here") as error:
        load_pair("nobody/no-such-model")
    assert "\n" not in str(error.value)


def other_tokenizer(tiny_draft, folder):
    """TINY-D without its weights, and with two ordinary tokens of its vocabulary exchanged."""
    shutil.copytree(tiny_draft, folder)
    (folder / "model.safetensors").unlink()
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    by_id = {i: s for s, i in vocab.items()}
    vocab[by_id[300]], vocab[by_id[310]] = 310, 300
    path.write_text(json.dumps(data))
    return by_id[300], by_id[310]


def test_tokenizer_mismatch_is_found_before_weights_are_read(tiny_target, tiny_draft, tmp_path):
    """O02: the draft's weights do not even exist here."""
    ours, theirs = other_tokenizer(tiny_draft, tmp_path / "d")
    with pytest.raises(InputError) as error:
        load_pair(tiny_target, tmp_path / "d")
    message = str(error.value)
    assert "has 320 tokens" in message
    assert f"id 300 is {ours!r} in the target and {theirs!r} in the draft" in message
    assert "Qwen/Qwen3-0.6B for Qwen/Qwen3-30B-A3B" in message


def test_added_tokens_at_the_end_need_rows_in_both(tiny_target, tiny_draft, tmp_path):
    shutil.copytree(tiny_draft, tmp_path / "d")
    source = find_model("--draft", tiny_draft, "draft")
    source.tokenizer.add_tokens(["<extra>"])
    target = find_model("--target", tiny_target, "target")
    with pytest.raises(InputError, match="320 rows where 321 are needed"):
        check_tokenizers(target, source)
    target.config.vocab_size = source.config.vocab_size = 352
    check_tokenizers(target, source)


def test_damaged_weights(tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "t")
    weights = tmp_path / "t" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(InputError, match="the weights cannot be read"):
        load_pair(tmp_path / "t")


def test_missing_weights_are_not_filled_with_random_numbers(tiny_target, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_target, tmp_path / "t")
    weights = load_file(tmp_path / "t" / "model.safetensors")
    del weights["model.layers.1.mlp.gate.weight"]
    save_file(weights, tmp_path / "t" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"1 weights with missing keys, first model\.layers\.1\.mlp\.gate\.weight"):
        load_pair(tmp_path / "t")


def test_precision_of_the_loaded_pair(tiny_target, tiny_draft):
    pair = load_pair(tiny_target, tiny_draft, "bfloat16")
    assert pair.draft is not None
    assert pair.target.dtype is pair.draft.dtype is torch.bfloat16
    assert pair.shape.dtype == "bfloat16"
    assert load_pair(tiny_target, "none", "auto").shape.dtype == "float32"
    with pytest.raises(InputError, match="--dtype int3"):
        load_pair(tiny_target, "none", "int3")
