import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_spac.simulator.verdict import acceptance_for, expected_tokens, judge, speedup


def test_flat_cost_o19():
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert speedup(0.8, 4, verify_ns=100, draft_ns=0, token_ns=100) == pytest.approx(3.3616)


def test_drafting_and_wider_steps_cost():
    # 3.3616 tokens for a step of 250 and four drafts of 25 each, where a token costs 100: 336.16 / 350.
    assert speedup(0.8, 4, verify_ns=250, draft_ns=25, token_ns=100) == pytest.approx(0.96046, abs=1e-5)


@pytest.mark.parametrize(("acceptance", "tokens"), [(0, 1), (0.5, 1.875), (1, 4)])
def test_expected_tokens(acceptance, tokens):
    assert expected_tokens(acceptance, 3) == tokens


@given(st.floats(0, 1), st.integers(1, 16))
def test_break_even_inverts_the_expectation(acceptance, drafted):
    assert acceptance_for(expected_tokens(acceptance, drafted), drafted) == pytest.approx(acceptance, abs=1e-6)


def test_no_acceptance_is_enough_beyond_all_drafts_and_any_for_a_free_step():
    assert acceptance_for(5.01, 4) is None
    assert acceptance_for(5, 4) == pytest.approx(1)
    assert acceptance_for(0.9, 4) == 0


def runs(verify_ms, tokens, drafted=4.0, token_ms=10.0):
    sd = {"verify_steps": 9, "verify_ms_mean": verify_ms, "tokens_per_verify": tokens, "drafted_per_verify": drafted}
    return sd | {"tokens_per_s": 1e3 * tokens / verify_ms}, {"tokens_per_s": 1e3 / token_ms, "step_ms_mean": token_ms}


def test_it_pays():
    verdict = judge("p", 8, *runs(verify_ms=20, tokens=3.3616))
    assert verdict is not None
    assert verdict.pays
    assert verdict.speedup == pytest.approx(1.6808)
    assert verdict.cost == 2
    assert verdict.acceptance == pytest.approx(0.8)
    # 1 + a + a^2 + a^3 + a^4 = 2 has its root at 0.5188.
    assert verdict.break_even_acceptance == pytest.approx(0.5188, abs=1e-4)
    assert verdict.words().startswith("speculative decoding pays here: 1.68x with p.")


def test_it_does_not_pay():
    verdict = judge("p", 8, *runs(verify_ms=60, tokens=4.8))
    assert verdict is not None
    assert not verdict.pays
    assert verdict.words().startswith("do not use speculative decoding here: 0.80x with p.")
    assert "no acceptance would be enough" in verdict.words()


def test_the_best_draft_length_is_named():
    sd, ar = runs(verify_ms=60, tokens=4.8)  # 80 tokens/s at length 4, against 100
    shorter = judge("p", 8, sd, ar, {0: 100, 1: 110, 2: 120, 4: 80}, 4)
    assert shorter is not None
    assert (shorter.pays, shorter.best_draft_length) == (False, 2)
    assert shorter.words().startswith("do not use speculative decoding here with drafts of 4: 0.80x with p.")
    assert shorter.words().endswith("Best draft length of 0, 1, 2, 4: 2 (1.20x)")
    none = judge("p", 8, sd, ar, {0: 100, 1: 100, 2: 90, 4: 80}, 4)
    assert none is not None
    assert none.best_draft_length == 0
    assert none.words().startswith("do not use speculative decoding here: 0.80x")
    assert none.words().endswith("Best draft length of 0, 1, 2, 4: 0, none pays")
    alone = judge("p", 8, sd, ar, {0: 100, 4: 80}, 4)
    assert alone is not None
    assert alone.best_draft_length is None


def test_no_verdict_without_verify_steps():
    sd, ar = runs(20, 3)
    assert judge("p", 8, sd | {"verify_steps": 0}, ar) is None
