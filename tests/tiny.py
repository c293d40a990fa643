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
