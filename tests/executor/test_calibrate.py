"""A calibrated profile gives back what was measured, and the prediction adds up."""

import pytest

from moe_spac.executor.calibrate import EmulatedLink, _blank, _fit_cpu, _fit_gpu, calibrate, typical
from moe_spac.executor.predict import predict
from moe_spac.executor.session import Settings, run
from moe_spac.executor.times import LayerTimes, StepTimes
from moe_spac.policies.load import load_policy
from moe_spac.simulator.machine import Machine, parse_machine, rates_for, show_machine
from moe_spac.traces.schema import Kind
from moe_spac.traces.speculate import Options


def synthetic(kind: Kind, rows: int, dense: int, work=(), cpu_work=()) -> StepTimes:
    """Two layers: `dense` ns before each, the embedding 300 ns more, a tail of 700 ns, 50 ns of policy."""
    layers = []
    for first in (True, False):
        layer = LayerTimes(dense + 300 * first, work=list(work), cpu_work=list(cpu_work))
        layer.wall = layer.expert + 50
        layers.append(layer)
    return StepTimes(kind, rows, draft=0, layers=layers, tail=700)


def test_fitted_times_are_the_measured_ones(load_live):
    models = load_live("none")
    entries = _blank(models, EmulatedLink(1e8, 20e3))
    # By hand: a layer is 10,000 ns + 500 a row; an expert 2,000 ns + 300 a row; top-2.
    one = [synthetic(Kind.DECODE, 1, 10_500, [(1, 2_300)] * 2)] * 4
    many = [synthetic(Kind.VERIFY, 5, 12_500, [(1, 2_300), (2, 2_600), (3, 2_900), (4, 3_200)])] * 4
    _fit_gpu(models, entries, one, many)
    rates = rates_for(Machine("", "", entries), models.pair.shape)
    layer = [
        rates.dense_ns(n, 0) + sum(rates.costs.gpu_ns(k) for k in loads)
        for n, loads in ((1, (1, 1)), (5, (1, 2, 3, 4)))
    ]
    assert layer == pytest.approx([10_500 + 4_600, 12_500 + 11_000], rel=0.03)
    assert rates.step_ns == 1_000
    assert rates.policy_ns == 50
    assert rates.costs.copy_fixed_ns == 20_000
    assert rates.costs.copy_bytes_ns == models.pair.shape.expert_bytes * 10


def test_cpu_times_are_the_measured_ones(load_live):
    models = load_live("none")
    machine = Machine("", "", _blank(models, EmulatedLink()))
    steps = [synthetic(Kind.DECODE, 2, 0, cpu_work=[(1, 5_400), (1, 4_400), (2, 4_800)])] * 4
    _fit_cpu(models, machine, steps)
    costs = rates_for(machine, models.pair.shape).costs
    assert [costs.cpu_ns(1), costs.cpu_ns(2), costs.cpu_first_ns] == pytest.approx([4_400, 4_800, 1_000], abs=2)


def test_one_freak_in_a_hundred_does_not_count_and_all_else_does():
    assert typical([10] * 198 + [10_000, 0]) == 10
    assert typical([10] * 9 + [110]) == 20
    assert typical([]) == 0


@pytest.fixture(scope="module")
def measured(load_live) -> Machine:
    return calibrate(load_live("own"), EmulatedLink(bandwidth=50e6, latency_ns=10e3), name="here")


def test_a_measured_profile_can_be_written_and_read(measured, load_live):
    assert parse_machine(show_machine(measured), "here.toml") == measured
    bases = {name: q.basis for name, q in measured.quantities.items()}
    assert {bases["link.bandwidth"], bases["link.copy_fixed"], bases["gpu.vram"]} == {"emulated"}
    for entry in ("gpu.launch", "gpu.expert_fixed", "gpu.step_fixed", "cpu.expert_fixed", "policy.layer"):
        assert bases[entry] == "measured"
    for entry in ("gpu.launch", "gpu.step_fixed", "policy.layer"):
        assert measured[entry] > 0
    # Of an expert's time only the sum is sure to be positive: noise may shift all of it into the part that grows.
    costs = rates_for(measured, load_live("own").pair.shape).costs
    assert costs.gpu_ns(1) > 0
    assert costs.cpu_ns(1) > 0


def test_prediction_and_measurement_are_split_to_the_last_microsecond(measured, load_live, live_prompts, tmp_path):
    trace = tmp_path / "run.spac"
    options = Options(max_new_tokens=12, draft_length=4)
    result = run(
        load_live("own"), load_policy("ar-lru"), live_prompts, Settings(measured, 10, options=options, record=trace)
    )
    found = predict(trace, load_policy("ar-lru"), measured, result)
    assert sum(found.predicted_split.values()) == pytest.approx(1e3 / found.predicted, rel=1e-9)
    drafts_prompt = sum(g.seconds.get("draft_prefill", 0) for g in result.generations) * 1e3 / result.new_tokens
    assert sum(found.measured_split.values()) - drafts_prompt == pytest.approx(1e3 / found.measured, rel=1e-6)
    assert found.predicted_split["policy"] == pytest.approx(found.measured_split["policy"], rel=0.05)
    assert found.error == pytest.approx(found.predicted / found.measured - 1)
