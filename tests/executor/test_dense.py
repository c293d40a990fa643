"""Packed dense weights: products by the kernels, for modules and for the lean forward alike."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe_spac.executor import kernels
from moe_spac.executor.dense import Packed, pack_dense
from moe_spac.executor.formats import QUANTISED

pytestmark = pytest.mark.skipif(not kernels.ready(), reason="the kernels are not built")


@pytest.mark.parametrize("name", QUANTISED)
def test_linear_layers_multiply_their_packed_weights(name):
    """Against the decoded weights: what is left is the rounding of the activations (see test_kernels)."""
    layers = [torch.nn.Linear(96, 40), torch.nn.Linear(64, 7, bias=False), torch.nn.Linear(6, 6)]
    fmt = QUANTISED[name]
    with torch.inference_mode():
        decoded = [fmt.decode(fmt.encode(m.weight), torch.float32) for m in layers[:2]]
        assert pack_dense(torch.nn.ModuleList(layers), fmt) == 2
        for layer, weight in zip(layers[:2], decoded, strict=True):
            x = torch.randn(2, 3, layer.in_features)
            expected, got = F.linear(x, weight, layer.bias), layer(x)
            assert (got - expected).norm() < 0.02 * expected.norm()
            out = torch.empty_like(got)
            linear: Any = F.linear  # its `out` is missing from the stubs
            linear(x, layer.weight, layer.bias, out=out)
            assert torch.equal(out, got)
            assert layer(x.bfloat16()).dtype == torch.bfloat16
            with pytest.raises(TypeError):
                layer.weight.clone()
    assert isinstance(layers[0].weight, Packed)
    assert not isinstance(layers[2].weight, Packed)


def test_joined_matrices_are_one_and_the_parts_are_views_of_it():
    fmt = QUANTISED["q4"]
    with torch.inference_mode():
        parts: list[Any] = [Packed(fmt.encode(torch.randn(rows, 64)), fmt, 64) for rows in (40, 8, 16)]
        x = torch.randn(3, 64)
        apart = [F.linear(x, part) for part in parts]
        both: Any = torch.cat(parts)
        whole = F.linear(x, both)
        assert torch.equal(whole, torch.cat(apart, 1))
        assert torch.equal(torch.cat([F.linear(x, part) for part in parts], 1), whole)
        storage = both.raw.untyped_storage().data_ptr()
        assert {part.raw.untyped_storage().data_ptr() for part in parts} == {storage}
        again: Any = torch.cat(parts)
        assert again.raw.data_ptr() == both.raw.data_ptr()
        swapped: Any = torch.cat(parts[::-1])
        assert torch.equal(F.linear(x, swapped), torch.cat(apart[::-1], 1))
        with pytest.raises(TypeError, match="joined by rows"):
            torch.cat(parts, 1)
        with pytest.raises(TypeError, match="their like"):
            torch.cat([parts[0], torch.randn(3, 64)])


def test_a_whole_model_runs_on_packed_weights_with_either_forward(tiny_target):
    from transformers import AutoModelForCausalLM

    from moe_spac.traces.lean import LeanModel, refusal

    model = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    ids = list(range(3, 23))
    with torch.inference_mode():
        before = model(torch.tensor([ids])).logits[0]
        assert pack_dense(model, QUANTISED["q8"]) == 2 * 4 + 1
        after = model(torch.tensor([ids])).logits[0]
        assert 0 < (after - before).norm() < 0.25 * before.norm()  # random routers choose otherwise at near ties
        assert refusal(model) is None
        lean = LeanModel(model, before.shape[-1]).feed(ids, len(ids))
    torch.testing.assert_close(lean, after, rtol=0.02, atol=0.02 * float(after.abs().max()))
