"""Timelines of live runs: spans are the times that the steps tell, and simulated and measured go into one file."""

import json

import pytest
from typer.testing import CliRunner

from moe_spac.executor.cli import app
from moe_spac.executor.predict import compare_lanes
from moe_spac.executor.session import Settings, run
from moe_spac.executor.times import LayerTimes, StepTimes, exposed
from moe_spac.policies.load import load_policy
from moe_spac.simulator.timeline import MEASURED, SIMULATED, busy_ns, check_timeline, read_timeline
from moe_spac.traces.schema import Kind
from moe_spac.traces.speculate import Options

SLOTS = 10


@pytest.fixture(scope="module")
def recorded(load_live, live_prompts, live_machine, tmp_path_factory):
    trace = tmp_path_factory.mktemp("spans") / "run.spac"
    options = Options(max_new_tokens=12, draft_length=4)
    settings = Settings(live_machine, SLOTS, "real", options, record=trace, timeline=True)
    return trace, run(load_live("own"), load_policy("hybrimoe"), live_prompts, settings)


def lane(result, name: str, *categories: str) -> list:
    return [s for s in result.spans if s.lane == name and (not categories or s.category in categories)]


def test_spans_add_up_to_the_times_of_the_steps(recorded):
    _, result = recorded
    check_timeline({MEASURED: result.spans})
    layers = [layer for step in result.times for layer in step.layers]
    assert len(lane(result, "GPU", "step")) == len(result.times)
    assert len(lane(result, "GPU", "layer")) == len(layers)
    assert len(lane(result, "GPU", "expert")) == sum(len(x.work) for x in layers)
    assert sum(s.ns for s in lane(result, "GPU", "expert")) == sum(x.expert for x in layers)
    assert sum(s.ns for s in lane(result, "GPU", "wait")) == sum(x.wait_copy + x.wait_cpu for x in layers)
    assert sum(s.ns for s in lane(result, "GPU", "attention")) == sum(x.before for x in layers)
    assert busy_ns(result.spans, "CPU") == sum(s.busy["cpu"] for s in result.times)


def test_copies_are_on_the_link_and_lead_to_their_first_use(recorded, live_machine):
    _, result = recorded
    copies = lane(result, "H2D")
    count = result.prefill + result.decode
    assert len(copies) == count.copies
    assert sum(s.args["bytes"] for s in copies) == len(copies) * copies[0].args["bytes"]
    fetches = [s for s in copies if s.category == "fetch_demand"]
    assert sum(s.ns for s in fetches) >= sum(s.busy["demand"] for s in result.times)  # the last may end after a step
    uses = {s.flow: s for s in lane(result, "GPU", "expert") if s.flow is not None}
    arrows = [s for s in copies if s.flow is not None]
    assert len(arrows) == len(uses) >= count.fetches + count.streams
    for copy in arrows:
        use = uses[copy.flow]
        assert (use.args["layer"], use.args["expert"]) == (copy.args["copied_layer"], copy.args["expert"])
        assert use.begin_ns >= copy.end_ns


def test_simulated_and_measured_lanes_have_the_same_work(recorded, live_machine):
    trace, result = recorded
    both = compare_lanes(trace, load_policy("hybrimoe"), live_machine, result)
    check_timeline(both)
    for start in ("step ", "L0", "L1", "attention"):
        names = ([s.name for s in both[n] if s.lane == "GPU" and s.category != "expert"] for n in (SIMULATED, MEASURED))
        counts = [sum(name.startswith(start) for name in of) for of in names]
        assert counts[0] == counts[1] > 0


def test_nothing_is_kept_unless_it_is_asked_for(load_live, live_prompts, live_machine):
    result = run(load_live("none"), load_policy("ar-lru"), live_prompts[:1], Settings(live_machine, SLOTS))
    assert result.spans == []


def test_exposed_is_the_share_that_was_waited_for():
    layers = [LayerTimes(10, 100, wait_copy=30, wait_cpu=5), LayerTimes(10, 100, wait_copy=20)]
    busy = {"demand": 150, "prefetch": 50, "cpu": 20}
    step = StepTimes(Kind.DECODE, 1, 0, layers, busy=busy)
    assert step.exposed() == {"link": 200, "link_exposed": 50, "cpu": 20, "cpu_exposed": 5}
    assert exposed([step, step]) == {"link_hidden": 0.75, "cpu_hidden": 0.75}
    assert exposed([StepTimes(Kind.DECODE, 1, 0)]) == {"link_hidden": None, "cpu_hidden": None}


def test_generate_writes_both_into_one_file(tiny_target, tiny_draft, tmp_path):
    file = tmp_path / "run.json"
    command = ["generate", "To be", "--target", str(tiny_target), "--draft", str(tiny_draft), "--slots", "4"]
    command += ["--policy", "moe-spac", "--machine", "rtx4060-laptop", "--max-new-tokens", "4"]
    done = CliRunner().invoke(app, [*command, "--timeline", str(file)], catch_exceptions=False)
    assert done.exit_code == 0
    assert set(read_timeline(file)) == {SIMULATED, MEASURED}
    assert json.loads(file.read_text())["otherData"]["policy"] == "moe-spac"


def test_a_timeline_needs_the_real_clock(tiny_target, tmp_path):
    command = ["generate", "To be", "--target", str(tiny_target), "--clock", "virtual", "--timeline"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "x.json")])
    assert "real clock" in str(done.exception)
