"""Views: the same text with another step structure."""

from dataclasses import replace

import numpy as np
import pytest
from texts import PLAIN, SEQUENCES, InMemory, plain_text, positions_and_kinds, some_step

from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import DraftShape, Kind
from moe_spac.traces.views import autoregressive, only_sequences


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


def test_only_sequences_selects_and_keeps_ids():
    view = only_sequences(plain_text(1, 2, 1), [1])
    assert [(s.sequence, len(s)) for s in view.steps()] == [(1, 3), (1, 1), (1, 1)]
    assert view.header.sequences == SEQUENCES


def test_wrong_views_are_refused():
    with pytest.raises(InputError, match=r"sequence 3: the trace has sequences 0 to 2"):
        only_sequences(plain_text(1), [0, 3])
