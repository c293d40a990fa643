import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_spac.simulator.capacity import fit_in, staging_for
from moe_spac.simulator.machine import load_machine, parse_machine, show_machine
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import DraftShape, ModelShape

MB = 10**6
# Two MoE layers of 8 experts of 10 MB; 100 MB of other weights; 1 MB of keys and values for each token.
SHAPE = ModelShape("m", 2, (0, 1), 8, 2, 64, 64, "bfloat16", 10 * MB, 100 * MB, MB)
DRAFT = DraftShape("d", 1, 30 * MB, MB // 2)
MACHINE = parse_machine(
    re.sub(r"reserved = \{ value = \S+ MB", 'reserved = { value = "50 MB', show_machine(load_machine("rtx4090-pcie4"))),
    "m",
)


def test_what_fits_by_hand():
    # 400 - 50 reserved - 100 weights - 100 x 1 keys and values = 150 MB, 15 experts: 10 to keep and 5 to stage.
    fit = fit_in(400 * MB, MACHINE, SHAPE, None, 100, pooled=False)
    assert fit.slots == 10
    assert "15 slots, 5 of them for staging, 5.0 a layer" in fit.words
    # A pool may fetch all 8 experts of a layer at once: 7 to keep and 7 to stage.
    assert fit_in(400 * MB, MACHINE, SHAPE, None, 100, pooled=True).slots == 7


def test_a_draft_costs_slots_o37():
    # 30 MB of weights and 50 MB of keys and values less: 7 experts, 4 to keep (2 a layer) and 2 to stage, or 5 and 3.
    fit = fit_in(400 * MB, MACHINE, SHAPE, DRAFT, 100, pooled=False)
    assert fit.slots == 4
    assert "draft" in fit.words


def test_keys_and_values_grow_with_the_context_o36():
    assert fit_in(400 * MB, MACHINE, SHAPE, None, 0, pooled=False).slots == 16
    assert "keys and values of 100 tokens" in fit_in(400 * MB, MACHINE, SHAPE, None, 100, pooled=False).words


def test_the_card_is_the_limit_and_that_is_said():
    fit = fit_in(10**12, MACHINE, replace(SHAPE, expert_bytes=2 * 10**9), None, 0, pooled=False)
    assert "the card has no more than 24.00 GiB" in fit.words
    assert fit.slots == 8  # 25.6 GB hold 12 experts of 2 GB


def test_nothing_fits():
    with pytest.raises(InputError, match=r"--vram: .*not one slot fits"):
        fit_in(200 * MB, MACHINE, SHAPE, None, 100, pooled=False)


@given(st.integers(260, 700), st.booleans())
def test_no_slot_more_would_fit(budget, pooled):
    room = (budget - 250) // 10
    try:
        slots = fit_in(budget * MB, MACHINE, SHAPE, None, 100, pooled).slots
    except InputError:
        slots = 0
    fitting = [n for n in range(17) if n + staging_for(n, SHAPE, pooled) <= room]
    assert slots == max(fitting)
