"""Draft lengths other than the recorded one, against a speculative loop on a text whose drafts are all known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import PLAIN, InMemory, equal, plain_text, positions_and_kinds, some_step

from moe_spac.traces.errors import InputError
from moe_spac.traces.redraft import drafted, redrafted, windowed
from moe_spac.traces.schema import DraftShape, Kind, Step
from moe_spac.traces.views import autoregressive, only_sequences

DRAFTED = replace(PLAIN, draft=DraftShape("d", 1, 10, 2), acceptance="measured")


def row(position: int, off: int = 0) -> Step:
    """The text's row at a position (off 0), or the draft's `off`-th wrong token in a row from there."""
    one = some_step(Kind.DECODE, position + 1000 * off)
    return replace(one, positions=np.array([position]), tokens=np.array([position + 1000 * off]))


def speculate(right: list[bool], length: int, start: int = 3) -> InMemory:
    """Greedy speculation over a text of len(right) rows; right[i]: a draft proposes the true token at row i."""
    steps, at, n = [some_step(Kind.PREFILL, 0, start)], 0, len(right)
    while at < n:
        k = min(length, n - 1 - at)
        accepted = 0
        while accepted < k and right[at + 1 + accepted]:
            accepted += 1
        rows = [row(start + at + i) for i in range(accepted + 1)]
        rows += [row(start + at + i, off=i - accepted) for i in range(accepted + 1, k + 1)]
        names = ("positions", "tokens", "experts", "weights")
        joined = {name: np.concatenate([getattr(r, name) for r in rows]) for name in names}
        kind = Kind.VERIFY if k else Kind.DECODE
        steps.append(replace(rows[0], kind=kind, drafted=np.arange(k + 1) > 0, accepted=accepted, **joined))
        at += accepted + 1
    return InMemory(replace(DRAFTED, draft_length=length), steps)


TEXTS = st.lists(st.booleans(), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(TEXTS, st.integers(1, 6))
def test_the_recorded_length_gives_the_recorded_trace(right, length):
    trace = speculate([*right, False], length)  # at least one draft
    if sum(len(s.drafted) > 1 for s in trace.steps()) == 0:
        return
    back = list(redrafted(trace, length, seed=1).steps())
    assert len(back) == len(trace.content)
    assert all(equal(a, b) for a, b in zip(back, trace.content, strict=True))


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 6), st.integers(1, 8))
def test_known_positions_are_cut_as_a_draft_of_that_length_would_have(right, length, other):
    """No window is accepted whole, so all fates are known; of rejected rows those within the recorded length are."""
    for i in range(len(right)):
        if all(right[max(0, i - length + 1) : i + 1]):
            right[i] = False
    right = [*right, False, False]
    found = list(redrafted(speculate(right, length), other).steps())
    wanted = list(speculate(right, other).steps())
    assert [(s.kind, s.accepted, len(s)) for s in found] == [(s.kind, s.accepted, len(s)) for s in wanted]
    recorded = {
        pair for s in speculate(right, length).steps() for pair in map(tuple, np.c_[s.positions, s.tokens].tolist())
    }
    for mine, true in zip(found, wanted, strict=True):
        assert np.array_equal(mine.positions, true.positions)
        for i, (position, token) in enumerate(zip(true.positions.tolist(), true.tokens.tolist(), strict=True)):
            stands_in = (position, token) not in recorded
            expected = row(position).experts[0] if stands_in else true.experts[i]
            assert mine.tokens[i] == (position if stands_in else token)
            assert np.array_equal(mine.experts[i], expected)


def test_by_hand():
    """Row 4 is wrong (3 wrong tokens were recorded), the window from 4 was accepted whole, so the fate of 9 is open."""
    right = [False, False, True, True, False, True, True, True, True, False, True]
    trace = speculate(right, 4, start=0)
    assert positions_and_kinds(trace)[1:] == [
        ("verify", [0, 1, 2, 3, 4], 0),
        ("verify", [1, 2, 3, 4, 5], 2),
        ("verify", [4, 5, 6, 7, 8], 4),
        ("verify", [9, 10], 1),
    ]
    # Of drafts that followed accepted ones 0 of 1, 2 of 3, 4 of 4 and 1 of 1 were accepted: 7 of 9. The fate of row 9
    # is drawn (accepted with this seed), so row 10 is a step of its own: 4 windows of 2 drafts.
    view = redrafted(trace, 2, seed=0)
    assert [(p, a) for _, p, a in positions_and_kinds(view)[1:4]] == [([0, 1, 2], 0), ([1, 2, 3], 2), ([4, 5, 6], 2)]
    assert view.header.draft_length == 2
    assert "probability 0.7778" in view.header.acceptance
    assert view.header.acceptance.startswith("measured at draft length 4, cut again at 2: of 8 drafted positions 1 ")
    assert "sampled" not in view.header.acceptance
    hot = InMemory(replace(trace.header, sampling={"temperature": 0.8, "seed": 0}), trace.content)
    assert "sampled, so that a draft once accepted" in redrafted(hot, 2).header.acceptance


def test_open_fates_follow_the_recorded_chance():
    """Drafts that are right with a chance of 0.7 give windows of 8 whose accepted drafts follow the geometric law,
    p (1 - p^8) / (1 - p), although a trace of windows of 2 leaves the fate of half the positions open."""
    trace = speculate((np.random.default_rng(1).random(3000) < 0.7).tolist(), 2)
    view = redrafted(trace, 8, seed=3)
    accepted = [s.accepted for s in view.steps() if len(s) == 9]
    assert np.mean(accepted) == pytest.approx(0.7 * (1 - 0.7**8) / 0.3, abs=0.15)
    assert view.header.acceptance == redrafted(trace, 8, seed=3).header.acceptance
    assert view.header.acceptance != redrafted(trace, 8, seed=4).header.acceptance


def test_length_0_is_plain_decoding():
    trace = speculate([False, True, False, True], 2)
    assert positions_and_kinds(redrafted(trace, 0)) == positions_and_kinds(autoregressive(trace))


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.integers(1, 5), st.integers(1, 8), st.integers(0, 99))
def test_the_text_stays_the_same(right, length, other, seed):
    trace = speculate([False, False, *right], length)
    texts = [positions_and_kinds(autoregressive(t)) for t in (trace, redrafted(trace, other, seed))]
    assert texts[0] == texts[1]


def test_a_policy_may_choose_every_length():
    trace = speculate([False, True, True, False, True, True, True, False], 3)
    asked = []

    def choose(longest: int) -> int:
        asked.append(longest)
        return min(longest, len(asked) % 3)

    steps = [s for s in drafted(trace, choose, 5) if s.kind is not Kind.PREFILL]
    lengths = [int(s.drafted.sum()) for s in steps]
    assert lengths[: len(asked)] == [min(longest, (i + 1) % 3) for i, longest in enumerate(asked)]
    left = 8
    for step, longest in zip(steps, asked, strict=False):
        assert longest == min(5, left - 1)
        left -= step.accepted + 1
    same = list(drafted(trace, lambda longest: longest, 2, seed=5))
    assert all(equal(a, b) for a, b in zip(same, redrafted(trace, 2, 5).steps(), strict=True))
    assert [s.kind for s in drafted(plain_text(5), lambda n: n, 2, acceptance=1.0)][1:] == [Kind.VERIFY, Kind.VERIFY]


def test_a_trace_without_drafts_needs_an_acceptance():
    with pytest.raises(InputError, match="no drafts to cut again"):
        redrafted(plain_text(4), 2)
    with pytest.raises(InputError, match="at least 0"):
        redrafted(plain_text(4), -1)
    assert positions_and_kinds(redrafted(plain_text(4), 0)) == positions_and_kinds(plain_text(4))


def test_windows_with_certain_acceptance_and_with_none():
    sure = positions_and_kinds(windowed(plain_text(7), 2, 1.0))
    assert sure == [
        ("prefill", [0, 1, 2], 0),
        ("verify", [3, 4, 5], 2),
        ("verify", [6, 7, 8], 2),
        ("decode", [9], 0),
    ]
    never = positions_and_kinds(windowed(plain_text(4), 2, 0.0))
    assert never[1:] == [("verify", [3, 4, 5], 0), ("verify", [4, 5, 6], 0), ("verify", [5, 6], 0), ("decode", [6], 0)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    draft_length=st.integers(1, 9),
    probability=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_autoregressive_view_of_windows_is_the_text(lengths, draft_length, probability, seed):
    trace = plain_text(*lengths)
    view = windowed(trace, draft_length, probability, seed)
    back = list(autoregressive(view).steps())
    assert len(back) == len(trace.content)
    assert all(equal(a, b) for a, b in zip(back, trace.content, strict=True))
    for step in view.steps():
        assert len(step) <= draft_length + 1 or step.kind is Kind.PREFILL
        assert step.accepted <= step.drafted.sum()


def test_windows_accept_with_the_given_probability():
    """Accepted drafts of a window of K: a geometric law cut at K, mean p (1 - p^K) / (1 - p)."""
    accepted = [s.accepted for s in windowed(plain_text(6_000), 4, 0.7, 5).steps() if len(s) == 5]
    assert np.mean(accepted) == pytest.approx(0.7 * (1 - 0.7**4) / 0.3, abs=0.05)
    shares = np.bincount(accepted, minlength=5) / len(accepted)
    assert shares == pytest.approx([0.3, 0.21, 0.147, 0.1029, 0.2401], abs=0.03)


def test_windows_say_that_acceptance_is_modelled():
    draft = DraftShape("assumed", 4, 100, 2)
    header = windowed(plain_text(3), 4, 0.7, 9, draft).header
    assert header.acceptance.startswith("modelled: each drafted token accepted independently with probability 0.7")
    assert "stands in" in header.acceptance
    assert (header.draft, header.draft_length) == (draft, 4)


def test_windows_are_reproducible_and_do_not_depend_on_other_sequences():
    trace = plain_text(9, 8, 7)
    assert positions_and_kinds(windowed(trace, 3, 0.5, 1)) == positions_and_kinds(windowed(trace, 3, 0.5, 1))
    assert positions_and_kinds(windowed(trace, 3, 0.5, 1)) != positions_and_kinds(windowed(trace, 3, 0.5, 2))
    alone = positions_and_kinds(windowed(only_sequences(trace, [1]), 3, 0.5, 1))
    assert alone == positions_and_kinds(only_sequences(windowed(trace, 3, 0.5, 1), [1]))


def test_windows_end_with_sequence_and_turn():
    steps = [some_step(Kind.DECODE, 0), some_step(Kind.DECODE, 1), some_step(Kind.DECODE, 2, turn=1)]
    assert positions_and_kinds(windowed(InMemory(PLAIN, steps), 3, 1.0)) == [("verify", [0, 1], 1), ("decode", [2], 0)]


def test_wrong_windows_are_refused():
    with pytest.raises(InputError, match="draft already"):
        windowed(windowed(plain_text(3), 2, 0.5), 2, 0.5)
    for length, probability in ((0, 0.5), (2, 1.5)):
        with pytest.raises(InputError, match="give at least 1, and 0 to 1"):
            windowed(plain_text(3), length, probability)
