from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hand import decode, rates, setup, shape, step, trace

from moe_spac.policies.driver import Counters, Driver
from moe_spac.policies.interface import Policy
from moe_spac.simulator.definitions import METRICS
from moe_spac.simulator.engine import Engine, Run, replay_step
from moe_spac.simulator.metrics import Limited, Load, check_times, gaps, load_of, measure, status_of, time_gap
from moe_spac.simulator.prefetch_metrics import forecasting, layer_rows, layer_spread
from moe_spac.simulator.steptimes import GPU_LABELS
from moe_spac.traces.schema import Kind

TIMES = rates(copy=100, gpu=30, dense=10, step_ns=5, policy_ns=1, draft_token_ns=50)
SHAPE = shape(2, 4, 2)


class Fetch(Policy):
    """Every miss is copied and kept if there is room."""

    name: ClassVar[str] = "fetch"


def three_steps():
    """A prompt of two tokens, a plain token, and a verify step that keeps one draft of two. 2 layers x 4 experts."""
    prompt = step([[[0, 1], [0, 1]], [[0, 2], [0, 1]]])
    plain = step([[[0, 1], [0, 2]]], position=2)
    verify = step([[[0, 1], [0, 2]], [[0, 3], [0, 1]], [[0, 1], [1, 2]]], position=3, drafted=2, accepted=1)
    return [replace(prompt, kind=Kind.PREFILL), plain, verify]


def play(steps, times=TIMES, slots=4):
    driver = Driver(Fetch(), setup(2, 4, [slots, slots], times.costs))
    engine = Engine(driver, times)
    for index, one in enumerate(steps):
        replay_step(engine, index, one)
    return Run("fetch", 2 * slots, engine.steps, driver.prefill, driver.decode, engine.layers)


def measured(steps, times=TIMES, slots=4):
    run = play(steps, times, slots)
    return measure(run, run.steps.table(), SHAPE, times, load_of(trace(steps, 4)))


# By hand, in ns. Prompt: 5 fixed, 2 x (10 dense + 1 policy), layer 0 copies 3 experts (waits 100 + 70 + 70, works
# 3 x 30), layer 1 copies 2 (waits 100 + 70, works 60): 5 + 22 + 330 + 230 = 587. Plain: 5 + 22, two hits (60), one hit
# and one copy (works 30, waits 70, works 30): 217. Verify: 100 for two drafted tokens, 5 + 22, two hits and a copy
# (works 60, waits 40, works 30), three hits (90): 347.


def test_decode_and_prefill_are_apart():
    m = measured(three_steps())
    assert (m["tokens"], m["decode_steps"], m["decode_wall_ns"]) == (3, 2, 217 + 347)
    assert m["tokens_per_s"] == pytest.approx(3e9 / 564)
    assert (m["prefill_tokens"], m["prefill_wall_ns"]) == (2, 587)
    assert m["prefill_tokens_per_s"] == pytest.approx(2e9 / 587)
    assert m["tokens_per_s_end_to_end"] == pytest.approx(3e9 / (587 + 564))


def test_latencies():
    m = measured(three_steps())
    assert m["ttft_ms_mean"] == pytest.approx(804e-6)  # prompt and the step after it
    assert m["step_ms_mean"] == pytest.approx(282e-6)
    assert m["step_ms_p50"] == pytest.approx(282e-6)
    assert m["tpot_ms_mean"] == pytest.approx(188e-6)
    # Tokens take 173.5, 173.5 and 217; the 95th percentile lies 0.9 of the way from the second to the third.
    assert m["tpot_ms_p50"] == pytest.approx(173.5e-6)
    assert m["tpot_ms_p95"] == pytest.approx((173.5 + 0.9 * 43.5) * 1e-6)


def test_hits_are_counted_per_assignment_and_per_expert():
    m = measured(three_steps())
    assert m["hit_rate_assignment"] == pytest.approx((3 + 11) / 16)
    assert m["hit_rate_unique"] == pytest.approx((3 + 5) / 10)
    assert m["prefill_hit_rate_assignment"] == 0
    assert m["prefill_hit_rate_unique"] == 0
    assert m["effective_miss_fraction"] == pytest.approx(2 / 16)
    assert m["prefill_effective_miss_fraction"] == pytest.approx(5 / 8)


def test_bytes_by_kind():
    m = measured(three_steps())
    assert m["h2d_bytes_per_token"] == m["h2d_demand_bytes_per_token"] == pytest.approx(2000 / 3)
    assert m["h2d_stream_bytes_per_token"] == m["h2d_prefetch_bytes_per_token"] == 0
    assert m["prefill_h2d_bytes"] == 5000
    assert m["h2d_bytes_per_accepted_draft"] == 2000
    assert m["cpu_bytes_per_token"] == m["cpu_bytes_per_accepted_draft"] == m["prefill_cpu_bytes"] == 0


def test_bytes_of_the_cpu_of_cancelled_copies_and_of_victims_going_back():
    counts = Counters(fetches=2, streams=1, prefetches=4, cancelled=1, cancelled_bytes=300, cpu=6, write_backs=3)
    run = replace(play(three_steps()), decode=counts)
    m = measure(run, run.steps.table(), SHAPE, TIMES, load_of(trace(three_steps(), 4)))
    assert m["h2d_bytes_per_token"] == pytest.approx((2 + 1 + 3) * 1000 / 3 + 100)
    assert m["h2d_prefetch_bytes_per_token"] == pytest.approx(3300 / 3)
    assert m["cpu_bytes_per_token"] == pytest.approx(2000)
    assert m["cpu_bytes_per_accepted_draft"] == 6000
    assert m["write_back_bytes_per_token"] == 1000


def test_where_a_token_s_time_goes_adds_up():
    m = measured(three_steps())
    parts = {label: m[f"gpu_{label}_ms_per_token"] * 3e6 for label in GPU_LABELS}
    by_hand = {"dense": 40, "expert": 300, "draft": 100, "step": 10, "wait_copy": 110, "policy": 4}
    assert parts == pytest.approx({label: by_hand.get(label, 0) for label in GPU_LABELS})
    assert sum(parts.values()) == pytest.approx(3e6 * m["tpot_ms_mean"])
    exact = {label: m[f"gpu_{label}_ns"] for label in GPU_LABELS}
    assert exact == {label: by_hand.get(label, 0) for label in GPU_LABELS}
    assert sum(exact.values()) == m["decode_wall_ns"]  # to the nanosecond
    assert m["bottleneck"] == "expert"
    assert m["policy_us_per_event"] == pytest.approx(1e-3)


def test_utilisation():
    m = measured(three_steps())
    assert m["link_utilisation"] == m["link_bandwidth_utilisation"] == pytest.approx(200 / 564)
    assert m["gpu_utilisation"] == pytest.approx((564 - 110) / 564)
    assert m["gpu_bubble"] == pytest.approx(110 / 564)
    assert (m["cpu_utilisation"], m["cpu_bubble"]) == (0, 1)
    assert m["back_utilisation"] == 0
    fixed = measured(three_steps(), replace(TIMES, costs=replace(TIMES.costs, copy_fixed_ns=50, copy_bytes_ns=50)))
    assert fixed["link_bandwidth_utilisation"] == pytest.approx(100 / 564)  # half of the busy time moves no bytes


def test_victims_that_go_back_to_the_host_take_time_on_their_own_lane():
    """2 slots: the second token copies expert 2 in both layers, whose victim, expert 1, goes back in 40 ns."""

    class GoesBack(Lru):
        write_back = True

    times = replace(TIMES, back_bytes_ns=40)
    driver = Driver(GoesBack(), setup(2, 4, [2, 2], times.costs))
    engine = Engine(driver, times)
    for index, one in enumerate(decode([0, 1], [0, 2], layers=2)):
        replay_step(engine, index, one)
    run = Run("back", 4, engine.steps, driver.prefill, driver.decode, engine.layers)
    m = measure(run, run.steps.table(), SHAPE, times, load_of(trace(decode([0, 1], [0, 2], layers=2), 4)))
    assert (m["write_backs"], m["evictions"]) == (2, 2)
    assert m["write_back_bytes_per_token"] == 1000
    assert m["wasted_share"] == pytest.approx(2 / (6 + 2))
    # Only the first of the two ends before the trace does.
    assert m["back_utilisation"] == pytest.approx(40 / m["decode_wall_ns"])


class Lru(Fetch):
    """As `Fetch`, and what is not needed goes."""

    def victim(self, incoming, candidates, view):
        return next(iter(candidates), None)


def test_speculation():
    m = measured(three_steps())
    assert (m["verify_steps"], m["drafted_per_verify"], m["tokens_per_verify"]) == (1, 2, 2)
    assert (m["acceptance_rate"], m["accepted_drafts"]) == (0.5, 1)
    assert m["draft_overhead"] == pytest.approx(100 / 347)
    assert m["verify_ms_p50"] == m["verify_ms_p99"] == pytest.approx(347e-6)
    assert m["union_ratio"] == pytest.approx(10 / 16)
    plain = measured(three_steps()[:2])
    assert plain["acceptance_rate"] is None
    assert plain["tokens_per_verify"] is None


def test_pressure():
    load = load_of(trace(three_steps(), 4))
    assert load == Load(steps=3, decodes=2, context=6, unions=(0, 0, 2, 2, 0))
    m = measured(three_steps())
    assert (m["slots_per_layer"], m["slots_per_layer_over_top_k"]) == (4, 2)
    assert m["pressure_mean"] == pytest.approx(10 / 16)
    assert m["pressure_share_above_1"] == 0
    small = measured(three_steps(), slots=2)
    assert small["pressure_mean"] == pytest.approx(10 / 8)
    assert small["pressure_share_above_1"] == 0.5


def test_a_prompt_in_two_chunks_is_one_time_to_first_token():
    prompt, plain, _ = three_steps()
    # Chunks of 587 and (all hits) 27 + 90 + 60, then 27 + 60 + 130; the second prompt alone is 177, then 27 + 120.
    m = measured([prompt, prompt, plain, prompt, plain])
    assert m["ttft_ms_mean"] == pytest.approx(((587 + 177 + 217) + (177 + 147)) / 2 / 1e6)


def test_a_trace_without_prefill_has_no_time_to_first_token():
    assert measured(three_steps()[1:])["ttft_ms_mean"] is None


def test_prefetches():
    """12 prefetches: 4 used in time, 2 late, 3 evicted unused, 1 cancelled after 400 of its 1000 bytes, 2 left over."""
    counts = Counters(
        events=1, needed=20, hits=10, joins=2, fetches=5, prefetches=10, prefetches_used=4, prefetches_late=2,
        prefetches_wasted=3, cancelled=1, cancelled_bytes=400, write_backs=2,
    )  # fmt: skip
    run = replace(play(three_steps()), decode=counts, prefill=Counters(prefetches=2))
    m = measure(run, run.steps.table(), SHAPE, TIMES, load_of(trace(three_steps(), 4)))
    assert m["prefetches"] == 12
    assert m["prefetch_precision"] == 0.5
    # 20 needed, 10 there and 2 on the wire leave 8 misses; with the 6 that prefetches served, 14 would have missed.
    assert m["prefetch_recall"] == pytest.approx(6 / 14)
    assert m["prefetch_timely_recall"] == pytest.approx(4 / 14)
    ends = {"in_time": 4, "late": 2, "evicted_unused": 3, "cancelled": 1, "unused_at_end": 2}
    assert {end: m[f"prefetch_{end}_share"] * 12 for end in ends} == pytest.approx(ends)
    assert m["wasted_bytes"] == 3400
    assert m["wasted_bytes_per_token"] == pytest.approx(3400 / 3)
    # Of 5 + 12 - 1 whole copies, 400 bytes and 2 victims on the way back.
    assert m["wasted_share"] == pytest.approx((3400 + 2000) / (16_400 + 2000))


def test_no_prefetches_no_recall():
    m = measured(three_steps())
    assert m["prefetch_precision"] is m["prefetch_recall"] is m["good_pred"] is None
    assert m["wasted_share"] == 0


def test_forecasts_of_the_next_layer():
    """Layer 0 names {1, 2} and {2, 3} of layer 1, that is 3 experts; {0, 1} and {0, 2} are needed: 2 are right."""
    one = step([[[0, 1], [0, 1]], [[0, 2], [0, 2]]])
    ahead = np.array([[[[1, 2]], [[1, 2]]], [[[2, 3]], [[2, 3]]]], np.uint8)
    load = load_of(trace([replace(one, ahead=ahead)], 4))
    assert (load.forecast, load.right) == (3, 2)
    got = forecasting(6, 12, 8)
    assert got == pytest.approx({"forecast_accuracy": 2 / 3, "fetch_rate": 0.5, "good_pred": 1 / 3})
    run = play(three_steps())
    heard = [measure(run, run.steps.table(), SHAPE, TIMES, load, channels) for channels in ((), ("next-gate",))]
    assert [m["forecast_accuracy"] for m in heard] == [None, pytest.approx(2 / 3)]


def test_layers():
    """Of three steps by hand, decode alone: the plain token and the verify step."""
    run = play(three_steps())
    rows = layer_rows(run.layers, assignments=8, moe_layers=(3, 5))
    assert [(r["layer"], r["model_layer"]) for r in rows] == [(0, 3), (1, 5)]
    assert [(r["needed"], r["hits"], r["copies"], r["cpu"]) for r in rows] == [
        (2 + 3, 2 + 2, 1, 0),
        (2 + 3, 1 + 3, 1, 0),
    ]
    assert [r["wait_copy_ns"] for r in rows] == [40, 70]
    assert [r["union_ratio"] for r in rows] == [5 / 8, 5 / 8]
    assert [r["hit_rate"] for r in rows] == [4 / 5, 4 / 5]
    serving = sum(r["wall_ns"] for r in rows)
    assert serving == 564 - 100 - 2 * 5 - 4 * 11  # all but drafts, steps, dense parts and decisions
    assert layer_spread(run.layers, 8)["union_ratio_layer_max"] == 5 / 8


def test_every_number_is_defined():
    m = measured(three_steps()) | layer_spread(play(three_steps()).layers, 8)
    assert set(m) <= set(METRICS)
    assert all(unit and meaning for unit, meaning in METRICS.values())


def test_a_nanosecond_that_is_lost_is_noticed():
    table = play(three_steps()).steps.table()
    check_times(table)
    with pytest.raises(AssertionError, match="add up"):
        check_times({**table, "gpu_expert_ns": table["gpu_expert_ns"] + 1})
    with pytest.raises(AssertionError, match="link is busy"):
        check_times({**table, "link_demand_ns": table["wall_ns"] + 1})


def test_gaps():
    got = gaps({"hit_rate_unique": 0.7}, {"hit_rate_unique": 0.8}, {"hit_rate_unique": 0.6})
    assert got == pytest.approx({"gap_to_optimum": 0.1, "gap_closed": 0.5})
    assert gaps({"hit_rate_unique": 0.8}, {"hit_rate_unique": 0.8}, None)["gap_closed"] is None


def test_the_gap_in_time():
    mine, base = {"tokens": 10, "decode_wall_ns": 700}, {"decode_wall_ns": 1000}
    got = time_gap(mine, base, 400)
    assert got == pytest.approx({"fluid_bound_tokens_per_s": 10e9 / 400, "gap_closed_time": 0.5})
    assert time_gap(mine, None, 400)["gap_closed_time"] is None
    assert time_gap(mine, base, 1000)["gap_closed_time"] is None


WORKED, IDLE = Counters(hits=1), Counters(cpu=3)


@pytest.mark.parametrize(
    ("slots", "error", "counts", "unrouted", "status"),
    [
        (8, None, WORKED, (), "ok"),
        (4, None, WORKED, (), "ok"),
        (0, None, WORKED, (), "CACHE_INACTIVE"),
        (8, None, IDLE, (), "CACHE_INACTIVE"),  # everything on the CPU: the policy has disabled itself
        (3, None, WORKED, (), "SLOTS_LT_TOPK"),
        (8, None, WORKED, (1,), "LAYER_WITHOUT_ROUTING"),
        (8, "x", WORKED, (), "failed: x"),
    ],
)
def test_status_o32(slots, error, counts, unrouted, status):
    run = Run("p", slots, decode=counts, error=error)
    assert status_of(run, SHAPE, Load(1, 1, 1, (), unrouted=unrouted)) == status


def test_a_layer_that_nobody_recorded_is_noticed_o32():
    """An importer that fills a missing layer's ids with zeros gives a token one expert instead of two."""
    assert load_of(trace(three_steps(), 4)).unrouted == ()
    assert load_of(trace([*three_steps(), step([[[0, 1], [0, 0]]])], 4)).unrouted == (1,)


def test_unions_equal_a_set_count():
    rng = np.random.default_rng(3)
    steps = [step([[sorted(rng.choice(6, 2, replace=False)) for _ in range(3)] for _ in range(n)]) for n in (1, 1)]
    steps.append(step([[sorted(rng.choice(6, 2, replace=False)) for _ in range(3)] for _ in range(4)], drafted=3))
    sizes = [len(set(s.experts[:, layer].ravel().tolist())) for s in steps for layer in range(3)]
    assert load_of(trace(steps, 6)).unions == tuple(sizes.count(m) for m in range(7))


def test_limit():
    hand = trace(decode([0], [1], [2]), 4)
    assert len(list(Limited(hand, 2).steps())) == 2
    assert len(list(Limited(hand, 0).steps())) == 3
