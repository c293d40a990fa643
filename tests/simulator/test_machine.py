import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_spac.simulator.machine import (
    DEFAULTS,
    UNITS,
    Quantity,
    load_machine,
    machine_names,
    parse_machine,
    rates_for,
    show_machine,
)
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import DraftShape, ModelShape

PRESET = show_machine(load_machine("rtx4090-pcie4"))


def edited(old: str, new: str) -> str:
    assert old in PRESET
    return PRESET.replace(old, new, 1)


@pytest.mark.parametrize("name", machine_names())
def test_presets_are_complete_and_survive_a_round_trip(name):
    machine = load_machine(name)
    assert set(machine.quantities) == set(UNITS)
    assert all(q.source and q.value > 0 for name, q in machine.quantities.items() if name not in DEFAULTS)
    assert parse_machine(show_machine(machine), "again") == machine


def test_units_become_base_units():
    machine = load_machine("rtx4090-pcie4")
    assert machine["gpu.vram"] == 24 * 2**30
    assert machine["link.bandwidth"] == 25e9
    assert machine["link.copy_fixed"] == 8_000
    assert machine["gpu.compute"] == 80e12


def test_what_nobody_measured_is_listed():
    machine = load_machine("rtx4090-pcie4")
    assert "cpu.hybrid_layer" in machine.assumed
    assert "link.bandwidth" not in machine.assumed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (edited('"25000.0 MB/s"', '"25 GHz"'), ["link.bandwidth", "25 GHz", "GB/s"]),
        (edited('"25000.0 MB/s"', '"2.5.0 GB/s"'), ["link.bandwidth", "2.5.0 GB/s"]),
        (edited('"25000.0 MB/s"', '"0 GB/s"'), ["link.bandwidth is 0"]),
        (edited('vram = { value = "', 'vram = { value = "x'), ["gpu.vram", "GiB"]),
        (edited("copy_fixed =", "copy_fixd ="), ["link.copy_fixed is missing"]),
        (PRESET + '\n[disk]\nspeed = { value = "1 GB/s" }\n', ["unknown entry disk.speed"]),
        (edited('basis = "measured"', 'basis = "guessed"'), ["basis", "measured, spec, assumed"]),
        (edited('kernels_per_layer = { value = "9.0"', 'kernels_per_layer = { value = "9 us"'), ["a plain number"]),
        ("[gpu\n", ["not valid TOML"]),
    ],
)  # fmt: skip
def test_a_bad_profile_is_one_clear_line(text, words):
    with pytest.raises(InputError) as caught:
        parse_machine(text, "mine.toml")
    assert str(caught.value).startswith("mine.toml: ")
    for word in words:
        assert word in str(caught.value)


def test_any_text_survives_a_round_trip():
    odd = replace(load_machine("rtx4090-pcie4"), title='for "C:\\models"')
    assert parse_machine(show_machine(odd), "again") == odd


@given(st.dictionaries(st.sampled_from(sorted(UNITS)), st.floats(1e-9, 1e24)))
def test_any_number_survives_a_round_trip(values):
    machine = load_machine("rtx4090-pcie4")
    odd = replace(
        machine, quantities=machine.quantities | {e: Quantity(v, "measured", "here") for e, v in values.items()}
    )
    assert parse_machine(show_machine(odd), "again").quantities == odd.quantities


def test_what_a_profile_may_leave_out_is_assumed_and_says_so():
    short = re.sub(r"(?m)^(headroom|chunk|d2h_bandwidth|both_ways|pageable_\w+|pin_limit) = .*\n", "", PRESET)
    machine = parse_machine(short, "mine.toml")
    assert set(DEFAULTS) <= set(machine.assumed)
    assert machine["link.both_ways"] == 0.45


def test_a_file_that_is_no_text_is_one_clear_line(tmp_path):
    (tmp_path / "m.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as a machine profile"):
        load_machine(str(tmp_path / "m.toml"))


def test_an_unknown_machine_names_the_presets():
    with pytest.raises(InputError, match="rtx4060-laptop"):
        load_machine("rtx9999")


def test_a_profile_can_be_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text(PRESET)
    assert load_machine(str(tmp_path / "mine.toml")).name == "rtx4090-pcie4"


def test_rates_of_a_model_by_hand():
    # One expert of 3 x 2048 x 768 bf16 weights: 9,437,184 bytes; at 25 GB/s 377,487 ns, at 635 GB/s 14,862 ns.
    shape = ModelShape("m", 4, (0, 1, 2, 3), 128, 8, 2048, 768, "bfloat16", 9_437_184, 400_000_000, 8_000)
    rates = rates_for(load_machine("rtx4090-pcie4"), shape, DraftShape("d", 2, 92_000_000, 4_000))
    assert (rates.costs.copy_fixed_ns, rates.costs.copy_bytes_ns) == (8_000, 377_487)
    assert rates.costs.gpu_memory_ns == 14_862
    assert rates.costs.cpu_memory_ns == 188_744  # 50 GB/s
    assert rates.costs.gpu_token_ns == pytest.approx(9_437_184 * 1e9 / 80e12)  # 2 FLOP a weight
    # A layer: 9 kernels of 4.9 us, 100 MB at 635 GB/s, 2,000 bytes of keys and values for each token of context.
    assert rates.dense_ns(tokens=1, context=999) == 44_100 + 157_480 + 3_150
    # The draft: 150 us, two layers of 9 kernels, 92 MB at 635 GB/s.
    assert rates.draft_token_ns == 150_000 + 88_200 + 144_882
