"""The lean forward against transformers' own, on tiny models of every family that it knows."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny import family_model

from moe_spac.traces import speculate
from moe_spac.traces.cached import CachedModel, open_cached
from moe_spac.traces.lean import CAPACITY, LeanModel, refusal
from moe_spac.traces.models import load_pair, model_shape
from moe_spac.traces.prompts import encode, read_prompts
from moe_spac.traces.recorder import RouterRecorder
from moe_spac.traces.speculate import Options, Speculation

DENSE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def model_of(case: str, **changes):
    """A model of a MoE family of `tiny`, or a dense one; seed 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if case in ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral"):
        return family_model(case, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case, **DENSE, **changes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # zeros and ones in a new model would hide a mistake
            parameter.data += torch.randn_like(parameter) * 0.3
    return model


CASES = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe with plain weights": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "olmoe": ("olmoe", {}),
    "mixtral": ("mixtral", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {"rope_parameters": LLAMA3, "mlp_bias": True, "hidden_act": "gelu"}),
}


def fed(cached) -> list[torch.Tensor]:
    """Logits of a prompt in two parts, decoding, verify steps with rollbacks, another turn, and beyond the capacity."""
    rng = np.random.default_rng(3)
    seen = []
    cached.expect_crops()
    for count, forget in (
        (20, 0),
        (7, 0),
        (1, 0),
        (5, 3),
        (5, 5),
        (1, 0),
        (2, 0),
        (40, 0),
        (4, 1),
        (CAPACITY, 9),
        (3, 3),
        (1, 0),
    ):
        seen.append(cached.feed(rng.integers(0, 320, count).tolist(), keep=min(count, 6)))
        cached.crop(forget)
    return seen


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    model = model_of(CASES[case][0], **CASES[case][1])
    assert refusal(model) is None
    with torch.inference_mode():
        ours, theirs = LeanModel(model, 320), CachedModel(model, 320)
        for a, b in zip(fed(ours), fed(theirs), strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()
        assert ours.length == theirs.length


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "qwen3"])
def test_lower_precision_rounds_as_transformers_does(case):
    model = model_of(case).to(torch.bfloat16)
    with torch.inference_mode():
        ours, theirs = LeanModel(model, 320), CachedModel(model, 320)
        ids = list(range(5, 45))
        a, b = ours.feed(ids, 40), theirs.feed(ids, 40)
    assert (a - b).abs().mean() <= 2**-8 * b.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_a_rollback_leaves_no_trace(case):
    """Bit-equal to never having been fed: between, longer drafts than what follows, and a growth of the cache."""
    model = model_of(CASES[case][0], **CASES[case][1])
    with torch.inference_mode():
        fresh, cropped = LeanModel(model, 320), LeanModel(model, 320)
        for cached in (fresh, cropped):
            cached.feed(list(range(30)), keep=1)
        for drafts in ([5, 6, 7, 8], list(range(CAPACITY))):
            cropped.feed(drafts, keep=1)
            cropped.crop(len(drafts))
            more = cropped.feed([9, 10], keep=2)
            assert torch.equal(fresh.feed([9, 10], keep=2), more)


class WithoutKind:
    """Changes of a model of a known family, each of which the lean forward cannot follow."""

    @staticmethod
    def windows(model):
        model.config.sliding_window = 8

    @staticmethod
    def layer_windows(model):
        model.config.layer_types = ["sliding_attention", "full_attention", "full_attention"]

    @staticmethod
    def clipped(model):
        model.config.clip_qkv = 1.0

    @staticmethod
    def training(model):
        model.train()

    @staticmethod
    def eager(model):
        model.set_attn_implementation("eager")

    @staticmethod
    def rotary(model):
        model.model.rotary_emb.rope_type = "dynamic"

    @staticmethod
    def projection(model):
        class Packed(torch.nn.Linear):
            pass

        model.model.layers[1].self_attn.k_proj = Packed(32, 16, bias=False)

    @staticmethod
    def part(model):
        model.model.layers[2].self_attn.sinks = torch.nn.Linear(1, 1)

    @staticmethod
    def replaced(model):
        layer = model.model.layers[0]
        layer.forward = layer.forward

    @staticmethod
    def mixed(model):
        model.lm_head.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (WithoutKind.windows, "sliding window"), (WithoutKind.layer_windows, "sliding window"),
        (WithoutKind.clipped, "clip_qkv"), (WithoutKind.training, "training"), (WithoutKind.eager, "eager"),
        (WithoutKind.rotary, "rotary.*dynamic"), (WithoutKind.projection, "k_proj"), (WithoutKind.part, "sinks"),
        (WithoutKind.replaced, "replaced"), (WithoutKind.mixed, "several kinds"),
    ],
)  # fmt: skip
def test_what_it_does_not_know_is_left_to_transformers(change, reason):
    import re

    model = model_of("qwen3_moe")
    change(model)
    found = refusal(model)
    assert found is not None
    assert re.search(reason, found)
    with pytest.raises(ValueError, match=reason):
        LeanModel(model, 320)


def test_a_new_option_of_a_known_family_is_not_guessed(monkeypatch):
    model = model_of("qwen3")
    kind = type(model.config)
    monkeypatch.setattr(kind, "__annotations__", {**kind.__annotations__, "attention_cap": float})
    assert "attention_cap" in (refusal(model) or "")


def test_other_families_run_as_before():
    assert isinstance(open_cached(family_model("gpt_oss"), 320), CachedModel)
    assert "GptOss" in (refusal(family_model("gpt_oss")) or "")


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_recorded_routing_is_that_of_transformers(case, monkeypatch):
    """Every array of every step, with scores and lookahead, through hooks on routers and experts."""
    model = model_of(case)
    shape = model_shape(model.config, case)

    def recorded() -> list:
        steps: list = []
        recorder = RouterRecorder(model, shape, steps.append, scores=True, lookahead=2)
        with recorder.watching():
            Speculation(model, model, Options(8, 3, prefill_chunk=9), recorder).generate(list(range(5, 25)))
        return steps

    ours = recorded()
    monkeypatch.setattr(speculate, "open_cached", CachedModel)
    theirs = recorded()
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        for name in ("tokens", "experts", "ahead"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("weights", "scores"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=2e-3)


def test_greedy_tokens_of_the_embedded_pair_are_those_of_transformers():
    pair = load_pair()
    prompt = read_prompts(None)[3]
    ids = encode(pair.tokenizer, prompt)[0]
    assert refusal(pair.target) is refusal(pair.draft) is None
    rows = torch.tensor([ids])
    theirs = pair.target.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert Speculation(pair.target, pair.draft, Options(40, 4)).generate(ids).tokens == theirs[0, len(ids) :].tolist()
