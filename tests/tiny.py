"""Tiny random models: real architectures and file formats at a size that runs anywhere."""

from pathlib import Path

TINY_VOCAB = 320
TINY_TEXT = (
    "the expert that the router chose is the expert that computes; the other experts wait in memory. "
    "To be, or not to be, that is the question. def add(first, second): return first + second. "
    "Question: how many apples are there? Answer: there are 12 apples. And God said, let there be light. "
) * 4


def save_tiny_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 320 tokens, learned from a few lines."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [TINY_TEXT], vocab_size=TINY_VOCAB, min_frequency=1, special_tokens=["<|endoftext|>"], show_progress=False
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


def tiny_config(**changes):
    """TINY-T: Qwen3-MoE, hidden 64, 2 layers, 8 experts, top-2, expert width 32."""
    from transformers import Qwen3MoeConfig

    fields = {
        "vocab_size": TINY_VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 16384,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
        "initializer_range": 0.2,
    }  # fmt: skip
    return Qwen3MoeConfig(**{**fields, **changes})


_COMMON = {
    "vocab_size": TINY_VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.2,
    "num_experts_per_tok": 2,
}  # fmt: skip
_SHARED = {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_GROUPED = {"n_group": 4, "topk_group": 2}
_WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

FAMILIES: dict[str, dict] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    "qwen2_moe": {**_SHARED, "decoder_sparse_step": 2},
    "qwen3_next": {**_SHARED, **_LINEAR},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v2": {**_ROUTED, **_LATENT, **_GROUPED, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_ROUTED, **_LATENT, **_GROUPED},
    "gpt_oss": {"num_local_experts": 8, **_WINDOWED},
    "glm4_moe": {**_ROUTED, "n_group": 1, "topk_group": 1},
    "phimoe": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "afmoe": {
        "num_experts": 8, "moe_intermediate_size": 16, "num_dense_layers": 1, "num_shared_experts": 1, **_WINDOWED,
    },
    "lfm2_moe": {
        "num_experts": 8, "moe_intermediate_size": 16, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "gemma4_text": {
        "num_experts": 8, "moe_intermediate_size": 16, "enable_moe_block": True, "top_k_experts": 2,
        "global_head_dim": 16, "sliding_window": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
    },
    "jamba": {
        "num_experts": 8, "attn_layer_period": 2, "attn_layer_offset": 0, "expert_layer_period": 2,
        "expert_layer_offset": 0, "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "deepseek_v4": {"n_routed_experts": 8, "moe_intermediate_size": 16, "sliding_window": 8},
}  # fmt: skip


def family_config(family: str, **changes):
    """A configuration of 3 layers, hidden 32, 8 experts and top-2 of one of FAMILIES."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **changes})


def family_model(family: str, **changes):
    """The model of `family_config`, seed 0; a bias that only ranking sees is random, not the zeros of a new model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family, **changes)).eval()
    state = model.state_dict()
    for name in state:
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            state[name].copy_(torch.randn(state[name].shape) * 0.2)
    return model


def save_tiny_target(folder: Path, **changes) -> Path:
    """Save TINY-T, seed 0, with its tokenizer; `changes` overrides fields of its configuration."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(tiny_config(**changes)).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


def save_tiny_draft(folder: Path) -> Path:
    """Save TINY-D: dense Qwen3 with 1 layer, seed 0, the target's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=TINY_VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, max_position_embeddings=16384, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder
