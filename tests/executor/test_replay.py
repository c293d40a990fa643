"""Replays: a trace's routing on random experts of the right shape."""

import json
from dataclasses import replace

import pytest
import torch
from speculated import plain, speculated, write

from moe_spac.executor import kernels
from moe_spac.executor.cli import app
from moe_spac.executor.formats import EXACT
from moe_spac.executor.memory import check_memory
from moe_spac.executor.replay import build, compare, first_layers, first_steps, in_format, memory_of, paused, replay
from moe_spac.executor.session import Settings
from moe_spac.policies.interface import Key
from moe_spac.policies.load import load_policy
from moe_spac.simulator.run import simulate
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import Kind

SHAPE = {"hidden": 64, "expert_width": 32, "dense_bytes": 2 * 64 * 64 * 4}


def trace_of(form: str = "q8", layers: int | None = None, made=None):
    made = made or speculated(6)
    made.header = replace(made.header, target=replace(made.header.target, **SHAPE))
    return in_format(first_layers(made, layers), form)


@pytest.fixture
def rig():
    return build(trace_of(), "q8")


@pytest.mark.parametrize(("form", "size"), [("f32", 3 * 64 * 32 * 4), ("bf16", 3 * 64 * 32 * 2), ("q8", 204 * 32)])
def test_experts_have_the_bytes_of_their_format(form, size):
    trace = trace_of(form)
    made = build(trace, form)
    assert trace.header.target.expert_bytes == made.store.record.size == size
    assert made.store.flat(Key(1, 7)).count_nonzero() > size // 2
    assert torch.equal(made.store.flat(Key(1, 7)), made.store.flat(Key(0, 0)))


def test_the_first_layers_of_a_trace_are_a_smaller_model():
    trace = trace_of(layers=1)
    shape = trace.header.target
    assert (shape.layers, shape.moe_layers, shape.dense_bytes) == (1, (0,), 64 * 64 * 4)
    assert all(step.experts.shape[1] == 1 for step in trace.steps())
    assert "first 1 of 2" in trace.header.notes
    with pytest.raises(InputError, match=r"--layers 3.*2 layers"):
        trace_of(layers=3)


@pytest.mark.parametrize("name", ["torch", "auto"])
def test_the_stand_in_has_the_bytes_of_a_layer(name, monkeypatch):
    monkeypatch.setenv("SPAC_KERNELS", name)
    kernels.chosen.cache_clear()
    try:
        dense: list = build(trace_of(), "q8").dense
        assert [(m.raw if kernels.ready() else m).nbytes for m in dense] == [64 * 64 * 4] * 2
    finally:
        monkeypatch.undo()
        kernels.chosen.cache_clear()
    assert build(trace_of(), "q8", dense=False).dense == []


def test_a_replay_computes_every_expert_and_counts_as_the_simulator(rig, live_machine):
    trace = trace_of()
    found = replay(rig, trace, load_policy("ar-lru"), Settings(live_machine, 8))
    run = simulate(trace, load_policy("ar-lru"), live_machine, 8)
    assert found.decode == run.decode
    for times, step in zip(found.times, trace.steps(), strict=True):
        assert [len({*step.experts[:, la].ravel().tolist()}) for la in (0, 1)] == [len(x.work) for x in times.layers]
    assert found.emitted == [s.emitted for s in run.steps]


def test_a_replay_on_the_virtual_clock_decides_as_the_simulator(rig, live_machine):
    notes = []
    found = replay(rig, trace_of(), load_policy("moe-spac"), Settings(live_machine, 8, "virtual"))
    run = simulate(trace_of(), load_policy("moe-spac"), live_machine, 8, record=notes)
    assert found.decisions == notes
    assert found.decode == run.decode


@pytest.mark.parametrize("policy", ["marginal", "governed:shortest=0"])
def test_draft_lengths_are_chosen_within_the_same_steps_as_when_simulated(policy, rig, live_machine):
    """The first steps of the trace, cut anew: not as many of the new ones."""
    trace = first_steps(trace_of(), 5)
    told = simulate(trace, load_policy(policy), live_machine, 8)
    found = replay(rig, trace_of(), load_policy(policy), Settings(live_machine, 8, "virtual"), 5)
    assert found.decode == told.decode


def test_drafting_is_a_pause_as_long_as_the_profile_says(rig, live_machine):
    from moe_spac.simulator.machine import Quantity

    slow = replace(
        live_machine, quantities={**live_machine.quantities, "gpu.draft_fixed": Quantity(4e6, "assumed", "")}
    )
    trace = paused(trace_of())
    made = build(trace, "q8")
    times = replay(made, trace, load_policy("ar-lru"), Settings(slow, 8), limit=3).times
    assert [t.kind for t in times] == [Kind.PREFILL, Kind.VERIFY, Kind.VERIFY]
    assert all(t.draft >= 3 * 4e6 for t in times[1:])


def test_both_sides_are_split_to_the_last_nanosecond(rig, live_machine):
    both = compare(rig, trace_of(), lambda: load_policy("hybrimoe"), Settings(live_machine, 8), 7, warm_up=2)
    for side in (both.measured, both.simulated):
        assert sum(side["split_ms"].values()) == pytest.approx(side["tpot_ms"], rel=1e-6)
    assert both.tokens == sum(s.emitted for s in list(first_steps(trace_of(), 7).steps())[3:])
    with pytest.raises(InputError, match=r"--limit-steps 2.*--warm-up 3"):
        compare(rig, trace_of(), lambda: load_policy("ar-lru"), Settings(live_machine, 8), 2, warm_up=3)


def test_too_large_a_replay_is_refused_before_it_begins():
    needs = memory_of(trace_of("f32").header.target, 8, dense=True)
    assert needs["experts"] == 16 * 3 * 64 * 32 * 4
    assert needs["dense weights"] == 2 * 64 * 64 * 4
    with pytest.raises(InputError, match="experts"):
        check_memory("host memory", "replay", needs, 10**6, "give fewer --layers")


def test_groups_that_do_not_fit_are_refused():
    made = speculated(1)
    with pytest.raises(InputError, match=r"--format q4.*170.*f32 or bf16"):
        in_format(made, "q4")
    with pytest.raises(InputError, match="--format q2"):
        in_format(made, "q2")
    assert in_format(made, "bf16").header.target.dtype == EXACT["bfloat16"].name


def test_the_command_sets_measured_beside_simulated(tmp_path, capsys):
    made = plain(12)
    made.header = replace(made.header, target=replace(made.header.target, **SHAPE))
    trace = write(made, tmp_path / "t.spac")
    words = ["replay", str(trace), "--policy", "static", "--policy", "ar-lru", "--slots", "4", "--rounds", "1"]
    assert app([*words, "--window", "3", "--limit-steps", "8", "--warm-up", "1"], standalone_mode=False) in (0, None)
    shown = capsys.readouterr().out
    assert "static" in shown
    assert "stand-in" in shown
    assert app([*words, "--limit-steps", "8", "--dense", "none", "--json"], standalone_mode=False) in (0, None)
    found = json.loads(capsys.readouterr().out)
    one = found["policies"]["ar-lru"]
    assert one["error"] == pytest.approx(one["simulated"]["tpot_ms"] / one["measured"]["tpot_ms"] - 1)
    assert one["measured"]["hit_rate"] == one["simulated"]["hit_rate"]
    with pytest.raises(InputError, match="--dense half"):
        app([*words, "--dense", "half"], standalone_mode=False)
