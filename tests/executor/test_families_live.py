"""Every family that the recorder takes decodes live as transformers itself does, loaded by our own loader."""

import pytest
from from_host import logits_of, reference_logits
from tiny import FAMILIES, family_model, save_tiny_tokenizer

from moe_spac.executor.check import find_difference
from moe_spac.executor.models import load_models
from moe_spac.executor.session import Settings, run
from moe_spac.policies.load import load_policy
from moe_spac.traces.errors import InputError
from moe_spac.traces.models import load_pair
from moe_spac.traces.prompts import Prompt, encode
from moe_spac.traces.speculate import Options

NEW_TOKENS = 6


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers_own(family, live_machine, tmp_path):
    """From a checkpoint as the family names and shapes it; a few slots, so that experts move."""
    model = family_model(family)
    model.save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    models = load_models(tmp_path, "none")
    prompts = [Prompt("p", "", ("the expert that",))]
    options = Options(NEW_TOKENS, draft_length=0)
    settings = Settings(live_machine, 3 * len(models.blocks), "virtual", options)
    result = run(models, load_policy("ar-lru"), prompts, settings)
    ids = [encode(models.pair.tokenizer, p)[0] for p in prompts]
    assert result.new_tokens == NEW_TOKENS
    assert find_difference(models, ids, result.generations, (), NEW_TOKENS) is None


def test_experts_without_a_gate(tmp_path):
    """Nemotron-H's: one matrix up, an activation, one down; the model has recurrent layers as well in real life."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    layers = ["moe", "attention", "moe"]
    config = AutoConfig.for_model(
        "nemotron_h", vocab_size=320, hidden_size=32, layers_block_type=layers, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
        moe_shared_expert_intermediate_size=16, topk_group=1, eos_token_id=0, pad_token_id=0, initializer_range=0.2,
        intermediate_size=48, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=8, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    models = load_models(tmp_path, "none")
    assert not models.store.record.gated
    torch.testing.assert_close(logits_of(models), reference_logits(tmp_path), rtol=0, atol=2e-5)


def test_models_that_cannot_roll_back_take_no_draft(tmp_path, tiny_draft):
    family_model("qwen3_next").save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(InputError, match="cannot be rolled back after a rejected draft; use --draft none"):
        load_models(tmp_path, tiny_draft)


def test_a_cache_that_is_not_ours_is_refused(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("minimax", hidden_size=32, num_hidden_layers=2, vocab_size=320).save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    for load in (load_models, load_pair):
        with pytest.raises(InputError, match="MiniMax-Text-01 keeps its state in a cache of its own"):
            load(tmp_path, "none")
