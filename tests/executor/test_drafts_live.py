"""Where drafts come from and how many, live: the text is the target's whatever is drafted, greedily and sampled."""

from dataclasses import replace

import pytest
import torch
from tiny import save_tiny_draft
from transformers import AutoModelForCausalLM

from moe_spac.executor.models import Models, load_models
from moe_spac.executor.session import Session, Settings, run
from moe_spac.policies.load import load_policy
from moe_spac.traces.prompts import Prompt
from moe_spac.traces.speculate import Options

AGAIN = "the expert that the router chose; the expert that the router"  # a text that n-grams know
TOKENS = 24


@pytest.fixture(scope="module")
def by_ngram(tiny_target) -> Models:
    return load_models(tiny_target, "ngram")


@pytest.fixture(scope="module")
def wide(tiny_target, tmp_path_factory) -> Models:
    """A draft with more rows in its vocabulary than the target. They are of no token, and one of them always wins."""
    folder = save_tiny_draft(tmp_path_factory.mktemp("wide") / "draft")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(400, mean_resizing=False)
    model.lm_head.weight.data[320:360], model.lm_head.weight.data[360:] = 50.0, -50.0
    model.save_pretrained(folder)
    return load_models(tiny_target, folder)


@pytest.mark.parametrize("policy", ["ar-lru", "moe-spac", "governed"])
@pytest.mark.parametrize("draft", ["by_ngram", "wide"])
def test_greedy_text_is_transformers_own(policy, draft, request, live_prompts, live_machine, greedy_texts):
    options = Options(max_new_tokens=12, draft_length=3)
    models = request.getfixturevalue(draft)
    result = run(models, load_policy(policy), live_prompts, Settings(live_machine, 10, "virtual", options))
    assert result.texts == greedy_texts


def test_an_ngram_drafts_for_nothing_and_is_kept_where_the_text_repeats_itself(by_ngram, live_machine):
    assert by_ngram.pair.draft_shape is not None
    assert by_ngram.pair.draft_shape.dense_bytes == by_ngram.pair.draft_shape.kv_bytes_per_token == 0
    options = Options(max_new_tokens=TOKENS, draft_length=4)
    settings = Settings(live_machine, 10, "virtual", options)
    (found,) = run(by_ngram, load_policy("ar-lru"), [Prompt("p", "", (AGAIN,))], settings).generations
    assert found.drafted > 0


@pytest.mark.parametrize("draft", ["own", "tiny"])
def test_a_measured_draft_length_changes_no_text(draft, load_live, live_prompts, live_machine, greedy_texts):
    options = Options(max_new_tokens=12, draft_length=8, adaptive=True)
    result = run(load_live(draft), load_policy("ar-lru"), live_prompts, Settings(live_machine, 10, options=options))
    assert result.texts == greedy_texts
    kinds = {(g.verifies > 0, g.decodes > 0) for g in result.generations}
    assert (True, True) in kinds  # it has tried some length, and none


def test_a_seeds_text_is_one_whatever_is_drafted(load_live, by_ngram, wide, live_machine):
    """Also under a policy that sets the draft's length by what it has measured, on the real clock."""
    options = Options(max_new_tokens=TOKENS, draft_length=4, temperature=1.0, top_p=0.9, seed=7, draft_invariant=True)
    ids = by_ngram.pair.tokenizer.encode(AGAIN)
    found = []
    for models in (load_live("none"), load_live("own"), load_live("tiny"), by_ngram, wide):
        for policy, length in (("ar-lru", 4), ("governed", 6), ("static", 1)):
            own = replace(options, draft_length=length)
            with Session(models, load_policy(policy), Settings(live_machine, 10, options=own)) as session:
                found.append(session.generate(ids).generation.tokens)
    assert all(tokens == found[0] for tokens in found)
    assert len(set(found[0])) > 4


def test_experts_stay_warm_from_turn_to_turn(load_live, live_machine):
    """O45: the second turn's experts are at least as often where they are needed, and its positions go on."""
    settings = Settings(live_machine, 12, options=Options(max_new_tokens=TOKENS, draft_length=3))
    with Session(load_live("tiny"), load_policy("ar-lru"), settings) as session:
        tokenizer = session.models.pair.tokenizer
        first = session.generate(tokenizer.encode(AGAIN))
        second = session.generate([*session.text, *tokenizer.encode("; the expert that")])
        whole = session.text
        session.forget()
        anew = session.generate(whole[: second.prompt])
    assert second.reused == first.prompt + len(first.generation.tokens) - 1
    assert second.decode.hits / second.decode.needed >= first.decode.hits / first.decode.needed
    assert anew.generation.tokens == second.generation.tokens
    assert anew.reused == 0


@torch.inference_mode()
def test_padding_rows_are_never_drafted(wide):
    logits = wide.pair.draft(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape[-1] == 400
    assert int(logits[0, -1].argmax()) >= 320
