"""A timeline is the run itself, seen from the side: the same decisions and times, and lanes that add up to them."""

import csv
import json
from dataclasses import replace

import pytest
from hand import rates, setup, step
from hypothesis import given, settings
from hypothesis import strategies as st
from result_folders import call
from speculated import BROKEN, speculated, write
from wander import Wander

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Where
from moe_spac.policies.load import load_policy
from moe_spac.simulator.engine import Engine, replay_step
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.run import simulate
from moe_spac.simulator.timeline import LANES, busy_ns, check_timeline, read_timeline
from moe_spac.simulator.traced import TracedEngine, spans_of
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import Kind


class Mixed(Wander):
    """Prefetches, and evicts whoever comes first, so that a resident is evicted as often as can be."""

    name = "mixed"

    def __init__(self, ways: tuple[Where, ...], serial: bool, back: bool) -> None:
        super().__init__(True, ways, serial, back)

    def victim(self, incoming, candidates, view):
        return next(iter(candidates), None)


def play(make, steps, policy, times, pageable=-1):
    times = replace(times, pinned_experts=pageable, pageable_fixed_ns=9, pageable_bytes_ns=times.costs.copy_bytes_ns)
    record = []
    driver = Driver(policy, setup(2, 6, [3, 2], times.costs), record=record)
    engine = make(driver, times)
    for index, one in enumerate(steps):
        replay_step(engine, index, one)
    return engine, record


layer = st.sets(st.integers(0, 5), min_size=2, max_size=2).map(sorted)
passes = st.lists(st.lists(st.lists(layer, min_size=2, max_size=2), min_size=1, max_size=4), min_size=1, max_size=5)
WAYS = [(Where.FETCH,), (Where.CPU,), (Where.FETCH, Where.CPU, Where.STREAM)]
times = st.builds(
    rates,
    copy=st.sampled_from([0, 300, 1000]),
    copy_fixed=st.sampled_from([0, 20]),
    gpu=st.sampled_from([0, 100]),
    cpu=st.sampled_from([0, 400]),
    dense=st.sampled_from([0, 50]),
    hybrid=st.sampled_from([0, 30]),
    policy_ns=st.sampled_from([0, 7]),
    ending_ns=st.sampled_from([0, 9]),
    landing_ns=st.sampled_from([0, 11]),
    prefetch_ns=st.sampled_from([0, 40]),
    step_ns=st.sampled_from([0, 60]),
    draft_token_ns=st.sampled_from([0, 90]),
    dram=st.sampled_from([10**15, 4 * 10**9]),
    chunks=st.sampled_from([1, 4]),
)


@settings(max_examples=60, deadline=None)
@given(passes, st.sampled_from(WAYS), st.booleans(), st.booleans(), times, st.sampled_from([-1, 5]))
def test_lanes_add_up_to_the_times_of_an_untraced_run(routing, ways, serial, back, machine, pageable):
    steps = [step(tokens, at * 9, drafted=len(tokens) - 1) for at, tokens in enumerate(routing)]
    plain, decided = play(Engine, steps, Mixed(ways, serial, back), machine, pageable)
    traced, decided_too = play(TracedEngine, steps, Mixed(ways, serial, back), machine, pageable)
    assert decided == decided_too
    assert list(plain.steps) == list(traced.steps)
    traced.close()
    spans = traced.spans
    check_timeline({"simulated": spans})
    assert {s.lane for s in spans} <= set(LANES)

    def logged(lane, *labels):
        return sum(getattr(one, lane).get(label, 0) for one in traced.steps for label in labels)

    def seen(lane, *categories):
        return sum(s.ns for s in spans if s.lane == lane and s.category in categories)

    assert busy_ns(spans, "H2D") == logged("link", "demand", "prefetch")
    assert seen("H2D", "fetch_prefetch") == logged("link", "prefetch")
    assert busy_ns(spans, "CPU") == logged("cpu", "busy")
    assert busy_ns(spans, "D2H") == logged("back", "write_back")
    assert busy_ns(spans, "draft") == logged("gpu", "draft")
    assert busy_ns(spans, "policy") == logged("gpu", "policy")
    assert seen("GPU", "expert") == logged("gpu", "expert")
    assert seen("GPU", "wait") == logged("gpu", "wait_copy", "wait_cpu")
    assert seen("GPU", "attention") == logged("gpu", "dense")
    assert seen("GPU", "hybrid") == logged("gpu", "hybrid")
    titles = [s for s in spans if s.name.startswith("step ")]
    assert [s.ns + seen_in(spans, s) for s in titles] == [one.wall_ns for one in traced.steps]


def seen_in(spans, title):
    """The draft before a step is part of it."""
    return sum(s.ns for s in spans if s.lane == "draft" and s.args["step"] == title.args["step"])


def test_a_copy_points_at_the_first_work_that_used_it():
    """Two decode steps need experts 1 and 2 of both layers: copied in the first, resident in the second."""
    steps = [replace(step([[[1, 2], [1, 2]]], at), kind=Kind.DECODE) for at in range(2)]
    traced, _ = play(TracedEngine, steps, Mixed((Where.FETCH,), False, False), rates(copy=1000, gpu=100))
    arrows = {}
    for span in traced.spans:
        if span.flow is not None:
            arrows.setdefault(span.flow, []).append(span)
    for source, use in arrows.values():
        assert (source.lane, use.lane, source.name) == ("H2D", "GPU", use.name)
        earlier = [s for s in traced.spans if s.lane == "GPU" and s.name == use.name and s.begin_ns < use.begin_ns]
        assert not any(s.begin_ns >= source.end_ns for s in earlier)
    assert {(use.name, use.args["step"]) for _, use in arrows.values()} >= {("L0 E1", 0), ("L0 E2", 0)}


def test_the_first_steps_of_a_run_as_it_is_simulated():
    trace, machine = speculated(6), load_machine("rtx4090-pcie4")
    spans = spans_of(trace, load_policy("hybrimoe"), machine, 8, steps=3)
    run = simulate(trace, load_policy("hybrimoe"), machine, 8)
    assert {s.args["step"] for s in spans} == {0, 1, 2}
    assert busy_ns(spans, "GPU") + busy_ns(spans, "draft") == sum(one.wall_ns for one in run.steps[:3])
    whole = spans_of(trace, load_policy("min"), machine, 8)
    assert [s for s in whole if s.args["step"] < 2] == spans_of(trace, load_policy("min"), machine, 8, steps=2)


def test_a_policy_that_fails_leaves_no_timeline(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    policy = load_policy(f"{tmp_path / 'mine.py'}:Broken")
    with pytest.raises(InputError, match=r"--timeline: policy .* is needed now"):
        spans_of(speculated(6), policy, load_machine("rtx4090-pcie4"), 4)


def test_run_writes_a_timeline_of_the_winner(tmp_path, monkeypatch, capsys):
    """Its lanes last as long as steps.csv says of the winner's first steps."""
    monkeypatch.chdir(tmp_path)
    write(speculated(6), tmp_path / "t.spac")
    words = ("run", "t.spac", "--policy", "ar-lru", "--policy", "static", "--slots", "3,4", "--no-plots", "--out", "r")
    assert call(*words, "--timeline", "deep/t.json", "--timeline-steps", "3") == 0
    spans = read_timeline(tmp_path / "deep" / "t.json")["simulated"]
    best = max(json.loads((tmp_path / "r/metrics.json").read_text())["winners"], key=lambda w: w["tokens_per_s"])
    assert f"{best['policy']}, {best['slots']} slots, {best['mode']}, first 3 steps" in capsys.readouterr().out
    named = {"policy": best["policy"], "slots": str(best["slots"]), "mode": best["mode"]}
    with (tmp_path / "r" / "steps.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if named.items() <= r.items() and r["draft_length"] in ("0", "3")][:3]
    assert busy_ns(spans, "GPU") + busy_ns(spans, "draft") == sum(int(r["wall_ns"]) for r in rows)
    assert busy_ns(spans, "H2D") == sum(int(r["link_demand_ns"]) + int(r["link_prefetch_ns"]) for r in rows)
    assert call(*words, "--timeline", "t.spac/x.json") == 2
    assert "the timeline cannot be written" in capsys.readouterr().err
