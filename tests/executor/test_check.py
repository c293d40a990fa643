"""`--check`: what counts as a difference, in float32 and below it."""

from dataclasses import replace

import pytest
import torch

from moe_spac.executor.check import find_difference
from moe_spac.executor.models import load_models
from moe_spac.executor.whole import reference
from moe_spac.traces.speculate import Generation

PROMPT = "To be, or not"
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def written(request, tiny_target):
    """Models in one precision, a prompt, what transformers writes after it, and the logits it goes by [12, V]."""
    models = load_models(tiny_target, dtype=request.param)
    ids = models.pair.tokenizer.encode(PROMPT)
    model = reference(models)
    with torch.inference_mode():
        rows = torch.tensor([ids])
        out = model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=NEW_TOKENS,
                             eos_token_id=None)  # fmt: skip
        logits = model(out).logits[0, len(ids) - 1 : -1].float()
    return request.param, models, ids, out[0, len(ids) :].tolist(), logits


def checked(models, ids, tokens):
    return find_difference(models, [ids], [Generation(tokens)], (), NEW_TOKENS)


def test_the_same_tokens_are_no_difference(written):
    _, models, ids, tokens, _ = written
    assert checked(models, ids, tokens) is None


def test_a_wrong_token_is_never_explained(written):
    dtype, models, ids, tokens, logits = written
    worst = int(logits[5].argmin())
    found = checked(models, ids, [*tokens[:5], worst, *tokens[6:]])
    assert found is not None
    assert (found.position, found.ours, found.theirs) == (len(ids) + 5, worst, tokens[5])
    best = logits[5].topk(2).values
    assert found.margin == pytest.approx(float(best[0] - best[1]), abs=0.1)
    assert found.lead == pytest.approx(float(logits[5].max() - logits[5].min()), abs=0.1)
    assert not found.explained
    assert ("more than what rounding in bfloat16" in str(found)) == (dtype == "bfloat16")


def test_a_near_tie_is_explained_below_float32_only(written):
    dtype, models, ids, tokens, logits = written
    found = checked(models, ids, [*tokens[:5], int(logits[5].argmin())])
    assert found is not None
    assert 0 < found.rounding < (4.0 if dtype == "bfloat16" else 1e-3)
    tie = replace(found, lead=found.rounding * 0.9)
    assert tie.explained == (dtype == "bfloat16")
    assert not replace(found, lead=found.rounding * 1.1).explained
    if dtype == "bfloat16":
        assert f"within what rounding in bfloat16 does to two logits here ({found.rounding:.4g})" in str(tie)


def test_a_text_that_ends_early_is_not_explained(written):
    _, models, ids, tokens, _ = written
    found = checked(models, ids, tokens[:8])
    assert found is not None
    assert (found.ours, found.theirs, found.explained) == (None, tokens[8], False)
