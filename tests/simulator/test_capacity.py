from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_spac.simulator.capacity import (
    EXCEEDED,
    FITS,
    NEAR_FULL,
    card_with,
    check_pin,
    fit_in,
    slots_for_context,
    staging_for,
)
from moe_spac.simulator.fit import with_entry
from moe_spac.simulator.machine import load_machine
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import DraftShape, ModelShape

MB = 10**6
# Two MoE layers of 8 experts of 10 MB; 100 MB of other weights; 1 MB of keys and values for each token.
SHAPE = ModelShape("m", 2, (0, 1), 8, 2, 64, 64, "bfloat16", 10 * MB, 100 * MB, MB)
DRAFT = DraftShape("d", 1, 30 * MB, MB // 2)
MACHINE = with_entry(with_entry(load_machine("rtx4090-pcie4"), "gpu.reserved", 50 * MB, ""), "gpu.headroom", 0, "")


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


def test_headroom_takes_slots():
    roomy = with_entry(MACHINE, "gpu.headroom", 30 * MB, "")
    # 120 MB, 12 experts: 8 to keep and 4 to stage.
    assert fit_in(400 * MB, roomy, SHAPE, None, 100, pooled=False).slots == 8


@pytest.mark.parametrize("pooled", [False, True])
def test_a_growing_context_takes_slots(pooled):
    found = [slots_for_context(400 * MB, MACHINE, SHAPE, None, context, pooled) for context in range(0, 260, 10)]
    assert found == sorted(found, reverse=True)
    assert found[10] == fit_in(400 * MB, MACHINE, SHAPE, None, 100, pooled).slots
    assert found[-1] == 0  # 400 - 50 - 100 - 250 leaves nothing; that is an answer here and no error


def test_explicit_slots_against_the_card_by_hand():
    """A card of 400 MB: 150 MB are left for experts, ten slots and five for staging fill it to the last byte."""
    card = with_entry(with_entry(MACHINE, "gpu.vram", 400 * MB, ""), "gpu.headroom", 40 * MB, "")
    full, near, fine = (card_with(n, card, SHAPE, None, 100, pooled=False) for n in (10, 8, 6))
    assert (full.status, full.free) == (NEAR_FULL, 0)
    assert (near.status, near.free) == (NEAR_FULL, 30 * MB)  # 8 and 4 take 120 MB
    assert (fine.status, fine.free) == (FITS, 60 * MB)
    over = card_with(11, card, SHAPE, None, 100, pooled=False)  # 11 and 6 for staging
    assert (over.status, over.free) == (EXCEEDED, -20 * MB)
    assert "19.07 MiB more" in over.words


MIB = 2**20
PINNED = [(15360, 8192), (17408, 6656), (19456, 3840), (21504, 2816), (22528, 1536)]  # ninfer-3090#45


@pytest.mark.parametrize(("resident", "most"), PINNED)
def test_windows_charges_pins_to_the_card_o38(resident, most):
    """What was pinned on the 24,576 MiB card is let through, and no pin of over 1.25 GiB more than the most seen."""
    card = load_machine("rtx3090-pcie4-ddr4")
    assert check_pin(most * MIB, resident * MIB, card, "windows").fits
    assert not check_pin((most + 1281) * MIB, resident * MIB, card, "windows").fits
    sure = check_pin((24576 - 1280 - resident) * MIB, resident * MIB, card, "windows")
    assert (sure.fits, sure.sure) == (True, True)


def test_windows_refuses_with_the_reason_o38():
    card = load_machine("rtx3090-pcie4-ddr4")
    pin = check_pin(8192 * MIB, 19456 * MIB, card, "windows")
    assert not pin.fits
    assert "Windows charges pinned memory to the card" in pin.words
    assert check_pin(8192 * MIB, 19456 * MIB, card, "linux").fits


def test_a_probed_pin_limit_holds_on_linux():
    card = with_entry(load_machine("rtx3090-pcie4-ddr4"), "host.pin_limit", 1024 * MIB, "probe")
    assert check_pin(1024 * MIB, 0, card, "linux").fits
    assert not check_pin(1025 * MIB, 0, card, "linux").fits
