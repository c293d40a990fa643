"""A layer's attention in one compiled call: against the lean forward's own operations on the same packed weights."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig, Qwen2Config, Qwen3Config

from moe_spac.executor import kernels
from moe_spac.executor.attention import MOST_ROWS
from moe_spac.executor.dense import pack_dense
from moe_spac.executor.formats import QUANTISED
from moe_spac.traces.lean import LeanModel

pytestmark = pytest.mark.skipif(not kernels.ready(), reason="the kernels are not built")

VOCAB = 96
SHAPE: Any = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0,
}  # fmt: skip


def packed(config: Any, name: str = "q8") -> Any:
    torch.manual_seed(1)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_config(config).eval()
        for module in model.modules():  # norms of ones would hide that they are not applied
            if "Norm" in type(module).__name__:
                module.weight.uniform_(0.5, 1.5)
        pack_dense(model, QUANTISED[name])
    return model


def both(config: Any) -> tuple[LeanModel, LeanModel]:
    model = packed(config)
    fused, plain = LeanModel(model, VOCAB), LeanModel(model, VOCAB)
    for attention, *_ in plain._layers:
        attention.fused = None
    return fused, plain


def ids(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize("width", [16, 48, 80, 128])
def test_it_is_what_the_small_operations_give(width):
    """Widths of one register, of four and of some left over; caches from one place to more than a tile."""
    fused, plain = both(Qwen3Config(**SHAPE, head_dim=width))
    assert all(attention.fused is not None for attention, *_ in fused._layers)
    tokens, at = ids(300), 0
    for n in (1, 1, 5, MOST_ROWS + 1, MOST_ROWS, 200, 9, 1):
        got, expected = (model.feed(tokens[at : at + n], n) for model in (fused, plain))
        off = (got - expected).abs()
        assert off.median() < 1e-6, n
        assert off.norm() < 5e-3 * expected.norm(), n  # the rounding of one of many activations may tip over
        at += n
    for got, expected in ((fused._keys, plain._keys), (fused._values, plain._values)):
        assert torch.allclose(got[0, :at], expected[0, :at], rtol=1e-5, atol=1e-6)


def test_rows_do_not_depend_on_how_many_there_are():
    model = packed(Qwen3Config(**SHAPE, head_dim=32))
    one, many = LeanModel(model, VOCAB), LeanModel(model, VOCAB)
    tokens = ids(60)
    for model in (one, many):
        model.feed(tokens[:40], 1)
    apart = torch.cat([one.feed([token], 1) for token in tokens[40:49]])
    assert torch.equal(many.feed(tokens[40:49], 9), apart)
    many.crop(5)
    assert torch.equal(many.feed(tokens[44:49], 5), apart[4:])


def test_no_instruction_set_and_no_number_of_threads_changes_a_bit(monkeypatch):
    model = packed(Qwen3Config(**SHAPE, head_dim=48), "q4")
    tokens, found = ids(700), {}
    try:
        for isa in ("scalar", "avx2", "avx512"):
            library = kernels.chosen().library
            assert library is not None
            if library.spac_isa_name(isa.encode()) is None:
                continue
            kernels.choose(isa)
            for threads in ("1", "3"):
                monkeypatch.setenv("SPAC_THREADS", threads)
                lean = LeanModel(model, VOCAB)
                for at in range(0, 640, MOST_ROWS):  # 640 tokens of 16 rows are worth several threads
                    lean.feed(tokens[at : at + MOST_ROWS], 1)
                found[isa, threads] = lean.feed(tokens[640:650], 10)
    finally:
        kernels.choose("auto")
    first = found["scalar", "1"]
    assert all(torch.equal(one, first) for one in found.values())


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SHAPE, head_dim=24),  # no whole registers
        Qwen2Config(**{**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1}),  # biases
        OlmoeConfig(
            **{**SHAPE, "num_attention_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1}
        ),  # norms of all heads together
    ],
    ids=["width", "biases", "norms"],
)
def test_what_it_does_not_know_is_left_to_the_small_operations(config):
    lean = LeanModel(packed(config), VOCAB)
    assert all(attention.fused is None for attention, *_ in lean._layers)
    assert lean.feed([1, 2, 3], 3).isfinite().all()


def test_llama_has_no_norms_of_heads():
    fused, plain = both(LlamaConfig(**{**SHAPE, "num_attention_heads": 4}))
    assert all(attention.fused is not None for attention, *_ in fused._layers)
    for n in (3, 1, 7):
        got, expected = (model.feed(ids(n), n) for model in (fused, plain))
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-5)
