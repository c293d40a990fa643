"""A calibrated profile gives back what was measured, and the prediction adds up."""

from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest

from moe_spac.executor.calibrate import EmulatedLink, blank, calibrate, profile
from moe_spac.executor.copies import fit_copies
from moe_spac.executor.fits import (
    Figures,
    Fitted,
    Round,
    arrival,
    contention,
    figures,
    fit,
    landing,
    plane,
    sharing,
    typical,
)
from moe_spac.executor.predict import predict
from moe_spac.executor.probe import PairSubject, Prefetching, Probe, Seen
from moe_spac.executor.session import Settings, run
from moe_spac.executor.times import Deciding, LayerTimes, StepTimes
from moe_spac.policies.load import load_policy
from moe_spac.simulator.machine import Machine, parse_machine, rates_for, show_machine
from moe_spac.traces.schema import Kind
from moe_spac.traces.speculate import Options

FIGURES = Figures(
    10_000, 500, 2, 1_000, 50, 150, 2_000, 300, 900, 4_000, 400, 700, 800, 0.25, 60, 5_000, 80_000, 900, 70
)


def seen(kind: Kind, rows: int, context: int, work=(), cpu_work=(), lost=0, wait_copy=0, draft=0, late=900) -> Seen:
    """Two layers as `FIGURES` says, the embedding 300 ns more, a tail of 700 ns, 50 ns of policy."""
    dense = 10_000 + 500 * rows + 2 * (context + rows) + late
    layers = []
    for first in (True, False):
        x = LayerTimes(dense + 300 * first, work=list(work), cpu_work=list(cpu_work), wait_copy=wait_copy)
        cpu = sum(ns for _, ns in cpu_work)
        x.wait_cpu = max(0, max(x.expert, cpu) + lost - x.expert) if cpu_work else 0
        x.wall = x.expert + x.wait_cpu + wait_copy + 50
        layers.append(x)
    return Seen(context, StepTimes(kind, rows, draft=draft, layers=layers, tail=700))


def one_round() -> Round:
    warm = partial(seen, late=0)
    alone = [warm(Kind.DECODE, 1, c, [(1, 2_375)] * 2) for c in (50, 60, 70, 80)]
    alone += [warm(Kind.DECODE, 1, c, [(1, 2_350)] * 3) for c in (50, 60, 70, 80)]
    alone += [warm(Kind.DECODE, 1, 60, [(1, 2_000_000)] * 3)]  # the machine stood still
    alone += [warm(Kind.PREFILL, 9, c, [(9, 4_775)] * 2) for c in (0, 9, 18, 90)]
    work = [(1, 2_338), (2, 2_637), (3, 2_938), (4, 3_237)]
    drafting = [seen(Kind.VERIFY, 5, c, work, draft=4 * 80_000) for c in (20, 90, 99)]
    asking = [seen(Kind.VERIFY, 5, c, work, draft=4 * 80_000, late=970) for c in (20, 90, 99)]
    # 900 to hand over and 700 to take back; 4,000 an expert and 400 a token.
    on_cpu = [
        seen(Kind.DECODE, 2, 0, cpu_work=work, lost=700)
        for work in ([(1, 5_300), (1, 4_400), (2, 4_800)], [(1, 5_300), (1, 4_400)], [(3, 6_100)])
    ]
    # Both tiers: 4,750 ns beside 900 + 5,200; 9,450 beside 900 + 4,400; 2,450 beside 900 + 8,800. Each loses a quarter
    # of the time in which both compute.
    both = [
        seen(Kind.DECODE, 1, 0, [(1, 2_375 + 1_188), (1, 2_375)], [(3, 6_100 + 1_188)], lost=700 + 800),
        seen(Kind.DECODE, 1, 0, [(1, 3_700), (1, 2_375), (9, 4_700)], [(1, 5_300 + 1_325)], lost=700 + 800),
        seen(Kind.DECODE, 1, 0, [(1, 2_450 + 612)], [(1, 5_300 + 612), (1, 4_400)], lost=700 + 800),
    ]
    # Three copies of 20,000, and 2,450 for the last one's work, and 60: the waits are all but 3 times 2,450.
    copying = [seen(Kind.DECODE, 1, 0, [(1, 2_450)] * 3, wait_copy=60_000 + 60 - 2 * 2_450)]
    copying = [replace(s, copy_ns=20_000) for s in copying]
    # The second step has two prefetches in it and the third one, which cost 5,000 each.
    late = (0, 2 * 5_000, 5_000)
    prefetching = [
        Seen(s.context, replace(s.times, tail=s.times.tail + ns, busy={"prefetch": (ns // 5_000) * 20_000}), 20_000)
        for s, ns in zip(both, late, strict=True)
    ]
    return Round(alone, drafting, asking, on_cpu, fifths=both, prefetching=prefetching, copying=copying)


def test_figures_are_those_of_the_steps():
    found = figures(one_round())
    for name in Figures.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(FIGURES, name), rel=0.02), name


def test_a_profile_gives_the_figures_back(load_live):
    subject = PairSubject(load_live("own"))
    start = Machine("here", "", blank(subject, EmulatedLink(1e8, 20e3)))
    made = profile(start, subject, Fitted(FIGURES, [FIGURES, FIGURES]))
    made = parse_machine(show_machine(made), "here.toml")
    shape = subject.shape
    rates = rates_for(made, shape, subject.draft_shape)
    costs = rates.costs
    assert rates.dense_ns(5, 100) == pytest.approx(10_000 + 2_500 + 210, abs=2)
    assert [costs.gpu_ns(n) for n in (1, 4)] == pytest.approx([2_300, 3_200], abs=2)
    assert [costs.cpu_ns(n) for n in (1, 4)] == pytest.approx([4_400, 5_600], abs=2)
    assert (rates.call_ns, costs.cpu_first_ns, costs.hybrid_ns) == (150, 900, 700)
    assert (rates.overlap, rates.beside_ns, rates.arrival_ns, rates.landing_ns) == (0.25, 800, 60, 5_000)
    assert (rates.step_ns, rates.policy_ns, rates.draft_token_ns) == (1_000, 50, 80_000)
    assert (rates.after_draft_ns, rates.ahead_ns) == (900, 70)
    assert (costs.copy_fixed_ns, costs.copy_bytes_ns) == (20_000, shape.expert_bytes * 10)
    assert "2 rounds" in made.quantities["gpu.launch"].source


def test_all_rounds_count_and_the_spread_of_each_is_told(load_live):
    subject = PairSubject(load_live("own"))
    start = Machine("here", "", blank(subject, EmulatedLink()))
    rounds = [replace(FIGURES, hybrid=ns) for ns in (700, 30_000, 900)]
    entry = profile(start, subject, Fitted(replace(FIGURES, hybrid=1_000), rounds)).quantities["cpu.hybrid_layer"]
    assert entry.value == 1_000
    assert "0.7 to 30 us" in entry.source


def test_rounds_are_fitted_together_at_one_speed():
    fast = one_round()
    slow = Round(**{f.name: [s.scaled(2) for s in getattr(fast, f.name)] for f in fields(Round)})
    found = fit([fast, Round(**{f.name: [s.scaled(0.5) for s in getattr(slow, f.name)] for f in fields(Round)})])
    assert found.all.draft == pytest.approx(80_000, rel=0.01)
    assert [one.landing for one in found.rounds] == pytest.approx([5_000, 5_000], rel=0.01)
    assert figures(slow).arrival == pytest.approx(2 * 60, rel=0.05)
    assert found.scaled(3).rounds[0].dense_fixed == pytest.approx(3 * found.rounds[0].dense_fixed)


def test_a_freak_does_not_count_and_all_else_does():
    assert typical([10] * 198 + [10_000, 12]) == pytest.approx(10.01, abs=0.001)
    assert typical([10] * 9 + [60]) == 15
    assert typical([]) == 0


def test_prefetches_that_cost_nothing_or_never_landed():
    steps = [Seen(0, StepTimes(Kind.VERIFY, 5, 0, tail=100), 10) for _ in range(3)]
    none = [replace(s, times=replace(s.times, busy={"prefetch": 10})) for s in steps]
    assert landing(steps, none) == 0.0
    assert landing(steps, []) == 0.0
    quicker = [replace(s, times=replace(s.times, tail=100 - i, busy={"prefetch": 10 * i})) for i, s in enumerate(steps)]
    assert landing(steps, quicker) == 0.0
    slower = [
        replace(s, times=replace(s.times, tail=100 + 8 * i, busy={"prefetch": 10 * i})) for i, s in enumerate(steps)
    ]
    assert landing(steps, slower) == 8.0


def test_what_asking_for_prefetches_costs_is_not_the_landings():
    """Of 60 ns of asking in a step of 150, those beside experts' 40 take the interpreter from nobody."""
    layers = [LayerTimes(before=60, wall=40, work=[(1, 40)])]
    before = [Seen(0, StepTimes(Kind.VERIFY, 5, 0, layers), 10)]
    asked = StepTimes(Kind.VERIFY, 5, 0, layers, tail=50, busy={"prefetch": 10, "asked": 60})
    assert landing(before, [Seen(0, asked, 10)]) == pytest.approx(50 - 60 * (1 - 40 / 150))


def test_growth_that_cannot_be_told_is_called_fixed():
    assert plane([(1, 10, 100), (5, 10, 140), (5, 20, 90)])[2] == 0  # not faster with more context
    assert plane([(1, 1, 100), (5, 5, 140)]) == pytest.approx((90, 10, 0))  # no context but the tokens themselves


def test_contention_without_a_layer_on_both_tiers_is_none():
    def price(tokens: int) -> float:
        return 0.0

    assert sharing([], (0.0, price), price) == 0.0
    assert contention([], (0.0, price), price, 0.0) == (0.0, 0.0, 0.0)
    assert arrival([], (0.0, 0.0, 0.0), (0.0, price)) == 0.0


def test_a_cpu_tier_without_a_price_contends_for_nothing():
    """On a disturbed machine the fit may find that its experts cost nothing."""
    both = LayerTimes(10, 100, work=[(1, 50)], cpu_work=[(1, 40)])
    assert sharing([both], (0.0, lambda n: 50.0), lambda n: 0.0) == 0.0
    assert contention([[(0.0, both)]], (0.0, lambda n: 50.0), lambda n: 0.0, 0.0) == (0.0, 0.0, 0.0)


def test_what_tiers_lose_to_each_other_is_seen_on_the_fast_device():
    """60 instead of 10 + 40, beside 60 on the CPU tier; where that has less to do, how much was beside is not told."""
    seen = [
        LayerTimes(0, work=[(1, 60), (2, 60)], cpu_work=[(1, 60)]),
        LayerTimes(0, work=[(1, 60)], cpu_work=[(1, 60)]),
    ]
    assert sharing(seen, (10.0, lambda n: 40.0), lambda n: 60.0) == pytest.approx(0.2)
    quicker = [LayerTimes(0, work=[(1, 10)], cpu_work=[(1, 60)])]
    assert sharing(quicker, (10.0, lambda n: 40.0), lambda n: 60.0) == 0.0


def test_copies_are_fitted_by_relative_error():
    rng = np.random.default_rng(0)
    points = [(size, round((12_000 + size / 20) * rng.normal(1, 0.01))) for size in (4**n for n in range(8, 14))]
    fixed, rate = fit_copies(points)
    assert fixed == pytest.approx(12_000, rel=0.05)
    assert rate == pytest.approx(20e9, rel=0.03)


@pytest.fixture(scope="module")
def measured(load_live) -> Machine:
    return calibrate(PairSubject(load_live("own"), 24), EmulatedLink(bandwidth=50e6, latency_ns=10e3), "here", rounds=1)


def test_a_measured_profile_can_be_written_and_read(measured, load_live):
    assert parse_machine(show_machine(measured), "here.toml") == measured
    bases = {name: q.basis for name, q in measured.quantities.items()}
    assert {bases["link.bandwidth"], bases["link.copy_fixed"], bases["gpu.vram"]} == {"emulated"}
    for entry in ("gpu.launch", "gpu.expert_fixed", "gpu.step_fixed", "cpu.expert_fixed", "policy.layer"):
        assert bases[entry] == "measured"
    for entry in ("gpu.launch", "gpu.step_fixed", "policy.layer"):
        assert measured[entry] > 0
    assert "from memory" in measured.quantities["cpu.expert_fixed"].source
    # Of an expert's time only the sum is sure to be positive: noise may shift all of it into the part that grows.
    costs = rates_for(measured, load_live("own").pair.shape).costs
    assert costs.gpu_ns(1) > 0
    assert costs.cpu_ns(1) > 0


def test_a_probe_sends_experts_where_its_pattern_says(load_live):
    subject = PairSubject(load_live("own"), 24)
    start = Machine("here", "", blank(subject, EmulatedLink(1e9, 0)))
    again, many = (subject.observe(Probe(p), start, brief=True) for p in ("gc", "c"))
    ones = [x for s in again if s.times.tokens == 1 for x in s.times.layers]
    assert {len(x.work) + len(x.cpu_work) for x in ones} == {2}  # top-2
    assert any(x.work for x in ones)
    assert any(x.cpu_work for x in ones)
    assert not any(x.work for s in many for x in s.times.layers)
    streamed = subject.observe(Probe("s"), start, brief=True)
    assert all(s.times.busy["demand"] > 0 for s in streamed)
    ahead = subject.observe(Prefetching("gc"), start, brief=True)
    assert sum(s.times.busy["prefetch"] for s in ahead[len(ahead) // 2 :]) > 0  # to the end
    homes = [[(len(x.work), len(x.cpu_work)) for s in steps for x in s.times.layers] for steps in (ahead, again)]
    assert homes[0] == homes[1]


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


def test_a_slower_machine_takes_longer_for_everything_but_shares_no_more():
    one = Figures(*range(1, 20))
    twice = one.scaled(2)
    assert (twice.dense_fixed, twice.draft, twice.overlap) == (2, 34, one.overlap)


def test_deciding_is_what_both_threads_spend_on_it():
    """Two layers of 50 ns beside 2,000 of experts, in one call each; of 26,104 ns in all, 22,004 lie between them."""
    step = replace(seen(Kind.DECODE, 1, 0, [(1, 2_000)], late=0).times, busy={"asked": 30})
    for layer, kept in zip(step.layers, (300, 100), strict=True):
        layer.calls, layer.kept, layer.decided = 1, kept, 30
    assert step.wall_ns == 26_104
    step.prefetches, step.busy["held"] = 3, 12
    deciding = Deciding.of([step])
    assert (deciding.layer, deciding.call, deciding.prefetch) == (30, 200, 4)
    assert deciding.ending == pytest.approx(20 + 30 / 2 * 22_004 / 26_104)
    assert Deciding.of([step.scaled(2)]) == deciding.scaled(2) == Deciding(60, 2 * deciding.ending, 400, 8)
    assert step.scaled(2).wall_ns == 2 * step.wall_ns
    assert Deciding.of([]) == Deciding()


def test_the_link_tells_how_long_it_asked(load_live, live_prompts, live_machine):
    options = Options(max_new_tokens=6, draft_length=3)
    settings = Settings(live_machine, 10, options=options)
    result = run(load_live("own"), load_policy("hybrimoe"), live_prompts[:1], settings)
    steps = [s for s in result.times if isinstance(s, StepTimes)]
    assert sum(s.busy["asked"] for s in steps) > 0
    assert result.decode.prefetches / 2 < sum(s.prefetches for s in steps[1:]) <= result.decode.prefetches
    assert all((x.calls > 0) == (x.expert > 0) for s in steps for x in s.layers)
    assert all(0 <= x.kept <= x.expert + x.wait_copy for s in steps for x in s.layers)
