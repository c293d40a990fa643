"""Views: the same text with another step structure."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import DraftShape, Header, Kind, ModelShape, Provenance, Step
from moe_spac.traces.views import autoregressive, only_sequences, windowed

SHAPE = ModelShape("tiny", 2, (0, 1), 6, 2, 8, 4, "float32", 384, 1000, 64)
SEQUENCES = tuple({"name": f"s{i}", "domain": "d"} for i in range(3))
PLAIN = Header(SHAPE, Provenance.SYNTHETIC, "made for a test", sequences=SEQUENCES)
ARRAYS = ("positions", "tokens", "drafted", "experts", "weights", "scores", "ahead")


@dataclass
class InMemory:
    header: Header
    content: list[Step]

    def steps(self):
        return iter(self.content)


def some_step(kind: Kind, first: int, n: int = 1, sequence: int = 0, turn: int = 0, accepted: int = 0) -> Step:
    """Everything in a row follows from its position, so that rows can be told apart."""
    positions = np.arange(first, first + n)
    rng = np.random.default_rng(first)
    experts = np.argsort(rng.random((n, 2, 6)), axis=-1)[..., :2].astype(np.uint8)
    drafted = np.arange(n) > 0 if kind is Kind.VERIFY else np.zeros(n, bool)
    weights = rng.random((n, 2, 2)).astype(np.float16)
    return Step(sequence, turn, kind, positions, positions + 100, drafted, accepted, experts, weights)


def plain_text(*lengths: int) -> InMemory:
    """Sequences of a prefill of 3 and the given numbers of decoded tokens."""
    steps = []
    for sequence, length in enumerate(lengths):
        steps.append(some_step(Kind.PREFILL, 0, 3, sequence))
        steps += [some_step(Kind.DECODE, 3 + i, sequence=sequence) for i in range(length)]
    return InMemory(PLAIN, steps)


def equal(a: Step, b: Step) -> bool:
    plain = (a.sequence, a.turn, a.kind, a.accepted) == (b.sequence, b.turn, b.kind, b.accepted)
    return plain and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ARRAYS if getattr(a, n) is not None)


def positions_and_kinds(trace) -> list[tuple[str, list[int], int]]:
    return [(str(s.kind), s.positions.tolist(), s.accepted) for s in trace.steps()]


def test_autoregressive_view_keeps_accepted_rows_one_a_step():
    header = replace(PLAIN, draft=DraftShape("d", 1, 10, 2), draft_length=3, acceptance="measured", notes="Note.")
    prefill = some_step(Kind.PREFILL, 0, 3)
    steps = [prefill, some_step(Kind.VERIFY, 3, 4, accepted=2), some_step(Kind.VERIFY, 6, 4, accepted=0)]
    steps += [some_step(Kind.DECODE, 7), some_step(Kind.VERIFY, 8, 2, accepted=1)]
    view = autoregressive(InMemory(header, steps))
    decoded = [("decode", [p], 0) for p in (3, 4, 5, 6, 7, 8, 9)]
    assert positions_and_kinds(view) == [("prefill", [0, 1, 2], 0), *decoded]
    assert positions_and_kinds(view) == positions_and_kinds(view)  # can be started again
    third = list(view.steps())[3]
    assert np.array_equal(third.experts, steps[1].experts[2:3])
    assert third.weights is not None
    assert steps[1].weights is not None
    assert np.array_equal(third.weights, steps[1].weights[2:3])
    assert (view.header.draft, view.header.draft_length, view.header.acceptance) == (None, 0, "none")
    assert view.header.notes.startswith("Note. Autoregressive view")


def test_autoregressive_view_of_plain_decoding_is_the_trace_itself():
    trace = plain_text(2)
    assert autoregressive(trace) is trace


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


def test_only_sequences_selects_and_keeps_ids():
    view = only_sequences(plain_text(1, 2, 1), [1])
    assert [(s.sequence, len(s)) for s in view.steps()] == [(1, 3), (1, 1), (1, 1)]
    assert view.header.sequences == SEQUENCES


def test_wrong_views_are_refused():
    with pytest.raises(InputError, match=r"sequence 3: the trace has sequences 0 to 2"):
        only_sequences(plain_text(1), [0, 3])
    with pytest.raises(InputError, match="draft already"):
        windowed(windowed(plain_text(3), 2, 0.5), 2, 0.5)
    for length, probability in ((0, 0.5), (2, 1.5)):
        with pytest.raises(InputError, match="give at least 1, and 0 to 1"):
            windowed(plain_text(3), length, probability)
