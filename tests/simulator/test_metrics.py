from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hand import decode, rates, setup, shape, step, trace

from moe_spac.policies.driver import Counters, Driver
from moe_spac.policies.interface import Policy
from moe_spac.simulator.engine import GPU_LABELS, Engine, Run, replay_step
from moe_spac.simulator.metrics import Limited, Load, check_times, gaps, load_of, measure, status_of, table_of
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
    return Run("fetch", 2 * slots, engine.steps, driver.prefill, driver.decode)


def measured(steps, times=TIMES, slots=4):
    run = play(steps, times, slots)
    return measure(run, table_of(run.steps), SHAPE, times, load_of(trace(steps, 4)))


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


def test_bytes_by_kind():
    m = measured(three_steps())
    assert m["h2d_bytes_per_token"] == m["h2d_demand_bytes_per_token"] == pytest.approx(2000 / 3)
    assert m["h2d_stream_bytes_per_token"] == m["h2d_prefetch_bytes_per_token"] == 0
    assert m["prefill_h2d_bytes"] == 5000


def test_where_a_token_s_time_goes_adds_up():
    m = measured(three_steps())
    parts = {label: m[f"gpu_{label}_ms_per_token"] * 3e6 for label in GPU_LABELS}
    by_hand = {"dense": 40, "expert": 300, "draft": 100, "step": 10, "wait_copy": 110, "policy": 4}
    assert parts == pytest.approx({label: by_hand.get(label, 0) for label in GPU_LABELS})
    assert sum(parts.values()) == pytest.approx(3e6 * m["tpot_ms_mean"])
    assert m["bottleneck"] == "expert"


def test_utilisation():
    m = measured(three_steps())
    assert m["link_utilisation"] == m["link_bandwidth_utilisation"] == pytest.approx(200 / 564)
    assert m["gpu_utilisation"] == pytest.approx((564 - 110) / 564)
    assert m["cpu_utilisation"] == 0
    fixed = measured(three_steps(), replace(TIMES, costs=replace(TIMES.costs, copy_fixed_ns=50, copy_bytes_ns=50)))
    assert fixed["link_bandwidth_utilisation"] == pytest.approx(100 / 564)  # half of the busy time moves no bytes


def test_speculation():
    m = measured(three_steps())
    assert (m["verify_steps"], m["drafted_per_verify"], m["tokens_per_verify"]) == (1, 2, 2)
    assert m["acceptance_rate"] == 0.5
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
    counts = Counters(prefetches=10, prefetches_used=4, prefetches_late=2, prefetches_wasted=3)
    run = replace(play(three_steps()), decode=replace(counts, events=1), prefill=Counters(prefetches=2))
    m = measure(run, table_of(run.steps), SHAPE, TIMES, load_of(trace(three_steps(), 4)))
    assert m["prefetches"] == 12
    assert m["prefetch_precision"] == 0.5
    assert m["prefetch_late_share"] == pytest.approx(1 / 6)
    assert m["prefetch_wasted_bytes"] == 3000
    assert m["prefetch_wasted_bytes_per_token"] == 1000


def test_a_nanosecond_that_is_lost_is_noticed():
    table = table_of(play(three_steps()).steps)
    check_times(table)
    with pytest.raises(AssertionError, match="add up"):
        check_times({**table, "gpu_expert_ns": table["gpu_expert_ns"] + 1})
    with pytest.raises(AssertionError, match="link is busy"):
        check_times({**table, "link_demand_ns": table["wall_ns"] + 1})


def test_gaps():
    got = gaps({"hit_rate_unique": 0.7}, {"hit_rate_unique": 0.8}, {"hit_rate_unique": 0.6})
    assert got == pytest.approx({"gap_to_optimum": 0.1, "gap_closed": 0.5})
    assert gaps({"hit_rate_unique": 0.8}, {"hit_rate_unique": 0.8}, None)["gap_closed"] is None


@pytest.mark.parametrize(
    ("slots", "error", "status"),
    [(8, None, "ok"), (4, None, "ok"), (0, None, "CACHE_INACTIVE"), (3, None, "SLOTS_LT_TOPK"), (8, "x", "failed: x")],
)
def test_status(slots, error, status):
    assert status_of(Run("p", slots, error=error), SHAPE) == status


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
