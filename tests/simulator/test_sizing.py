"""Sizes of models: published totals, transformers' own layout, and every way of writing which layers are dense."""

import json

import pytest

from moe_spac.simulator.parameters import count
from moe_spac.simulator.sizing import MODELS, Format, find_size, format_for, known_models
from moe_spac.traces.errors import InputError

# Published parameters in 10^9, total and active, and what the publisher leaves out of the active ones. Sources: model
# cards, the gpt-oss model card (table 1), the GLM-4.5 report (without word embeddings and head).
PUBLISHED = {
    "qwen3-30b-a3b": (30.5, 3.3, "nothing"),
    "qwen3-235b-a22b": (235, 22, "nothing"),
    "qwen3-next-80b-a3b": (80, 3, "embedding and head"),
    "gpt-oss-20b": (20.91, 3.61, "embedding"),
    "gpt-oss-120b": (116.83, 5.13, "embedding"),
    "mixtral-8x7b": (46.7, 12.9, "nothing"),
    "deepseek-v2-lite": (15.7, 2.4, "embedding"),
    "olmoe": (6.9, 1.3, "nothing"),
    "glm-4.5-air": (106, 12, "embedding and head"),
}
DRAFTS = {"qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name):
    size = find_size(name, "MODEL")
    total, active, without = PUBLISHED[name]
    left_out = {"nothing": 0, "embedding": size.embedding, "embedding and head": size.embedding + size.head}[without]
    assert size.total / 1e9 == pytest.approx(total, rel=0.02)
    # "3B" (3.25) and "2.4B" (2.45) are figures of one and two digits, the others come within 2 %.
    unit = 10 ** -len(str(active).partition(".")[2])
    mine = (size.active - left_out) / 1e9
    assert mine == pytest.approx(active, rel=0.02) or active <= mine < active + unit / 2 + 1e-2


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_are_as_large_as_their_names(name):
    assert find_size(name, "--draft").total / 1e9 == pytest.approx(DRAFTS[name], rel=0.02)


def test_every_model_that_is_shipped_was_checked():
    assert known_models() == sorted([*PUBLISHED, *DRAFTS])


@pytest.mark.parametrize("name", known_models())
def test_counts_are_those_of_transformers(name):
    """Every kind of layer of every model, laid out by transformers, a few layers of each to be quick."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((MODELS / f"{name}.json").read_text())["config"]
    config = config | {"num_hidden_layers": 4, "vocab_size": 1000}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:4]
    for field in ("quantization_config", "torch_dtype"):
        config.pop(field, None)
    size = count(config, name, "test")
    fields = dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size.total, rel=1e-3)
    routed = sum(p.numel() for path, p in model.named_parameters() if ".experts." in path)
    assert routed == size.routed


def test_active_for_speed_and_total_for_room_o28():
    size = find_size("Qwen/Qwen3-30B-A3B", "MODEL")
    assert size.routed / 1e9 == pytest.approx(28.99, abs=0.005)
    assert size.routed_active / 1e9 == pytest.approx(1.812, abs=0.0005)
    assert size.active / 1e9 == pytest.approx(3.353, abs=0.0005)
    shape = size.shape(format_for("bf16", size))
    assert (shape.expert_bytes, shape.dtype) == (9 * 2**20, "bfloat16")


def test_keys_and_values_from_heads_o36():
    size = find_size("Qwen3-30B-A3B", "MODEL")
    assert size.kv_bytes(1) == 98_304
    assert size.kv_bytes(32_768) == 3 * 2**30
    assert size.kv_bytes(1, "q8_0") == 52_224
    assert find_size("Qwen3-235B-A22B", "MODEL").kv_bytes(32_768) == 6016 * 2**20
    assert find_size("Qwen3-0.6B", "--draft").kv_bytes(1) == 114_688


def test_layers_with_windows_states_and_latents_keep_less():
    gpt = find_size("gpt-oss-20b", "MODEL")
    # 12 layers keep 2 x 8 x 64 numbers of two bytes for every token, 12 for at most 128 of them.
    assert gpt.kv_bytes(100) == 24 * 2048 * 100
    assert gpt.kv_bytes(10_000) == 12 * 2048 * 10_000 + 12 * 2048 * 128
    assert gpt.kv_bytes(10_000) == gpt.kv_bytes(128) + gpt.shape(gpt.published).kv_bytes_per_token * 9_872
    # DeepSeek-V2-Lite: 27 layers of 512 + 64 numbers.
    assert find_size("deepseek-v2-lite", "MODEL").kv_bytes(1) == 27 * 576 * 2
    # Qwen3-Next: 12 layers with 2 x 2 heads of 256; 36 with a float32 state of 32 x 128 x 128 and a convolution.
    state = 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)
    assert find_size("qwen3-next-80b-a3b", "MODEL").kv_bytes(10) == 12 * 1024 * 2 * 10 + state


def test_names_are_found_however_they_are_written():
    assert find_size("qwen/qwen3-coder-30b-a3b-instruct", "MODEL").name == "Qwen3-Coder-30B-A3B-Instruct"
    with pytest.raises(InputError, match=r"--draft Qwen9: .*known: .*qwen3-0.6b"):
        find_size("Qwen9", "--draft")


def test_fp8_keeps_the_tables_in_bf16():
    plain, fp8 = find_size("Qwen3-4B", "--draft"), find_size("Qwen/Qwen3-4B-FP8", "--draft")
    assert fp8.as_draft().dense_bytes == plain.as_draft().dense_bytes - plain.body
    assert plain.as_draft().dense_bytes == 2 * plain.total


def test_formats():
    size = find_size("gpt-oss-20b", "MODEL")
    assert (size.published.name, size.published.experts, size.published.body) == ("mxfp4", 4.25, 16)
    assert format_for("4.5bit", size) == Format("4.5bit", 4.5, 4.5, 4.5)
    with pytest.raises(InputError, match="--quant q99"):
        format_for("q99", size)


# Which of six layers have experts, in the ways in which families write it.
BASE = {
    "model_type": "any",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("fields", "moe"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"mlp_only_layers": [0, 3]}, (1, 2, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"interleave_moe_layer_step": 3}, (2, 5)),
        ({"moe_layers": [1, 4]}, (1, 4)),
        ({"moe_layer_freq": 2}, (0, 2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 1, 0, 0]}, (1, 2, 3)),
    ],
)
def test_which_layers_are_dense(fields, moe):
    size = count(BASE | fields, "m", "config.json")
    assert size.moe_layers == moe
    # Attention 64 x 16 x (2 x 4 + 2 x 2), router 64 x 8, dense 3 x 64 x 128, norms 2 x 64 a layer and 64.
    dense = 6 - len(moe)
    assert size.body == 6 * (64 * 16 * 12 + 128) + 64 + len(moe) * 64 * 8 + dense * 3 * 64 * 128


def test_head_size_shared_experts_and_tied_tables_are_honoured():
    plain = count(BASE, "m", "config.json")
    wide = count(BASE | {"head_dim": 32}, "m", "config.json")
    assert (wide.kv_bytes(1), plain.kv_bytes(1)) == (6 * 2 * 2 * 32 * 2, 6 * 2 * 2 * 16 * 2)
    shared = count(BASE | {"n_shared_experts": 2}, "m", "config.json")
    assert shared.body - plain.body == 6 * 2 * 3 * 64 * 32
    tied = count(BASE | {"tie_word_embeddings": True}, "m", "config.json")
    assert (plain.total - tied.total, tied.shape(tied.published).embedding_bytes) == (6400, 0)


def test_a_local_configuration_is_read_and_what_is_wrong_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": BASE, "model_type": "vision"}))
    assert find_size(str(tmp_path), "MODEL").moe_layers == tuple(range(6))
    broken = {k: v for k, v in BASE.items() if k != "num_attention_heads"}
    (tmp_path / "config.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r"config\.json: num_attention_heads is missing"):
        find_size(str(tmp_path), "MODEL")
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"layer_types": ["mamba"] * 6}))
    with pytest.raises(InputError, match="'mamba' is not understood"):
        find_size(str(tmp_path / "config.json"), "MODEL")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        find_size(str(tmp_path), "MODEL")


def test_an_unknown_quantisation_needs_a_word(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"quantization_config": {"quant_method": "odd"}}))
    size = find_size(str(tmp_path), "MODEL")
    with pytest.raises(InputError, match="'odd' is not understood; give --quant"):
        format_for("published", size)
    assert format_for("q8", size).experts == 8.5
