"""HybriMoE's planner on cases worked out by hand, its scores, and its prefetch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_loop import Host, make_setup, random_routing

from moe_spac.policies.driver import Driver
from moe_spac.policies.hss import RELEASE_COSTS, Planner, Schedule, paper_schedule, release_schedule
from moe_spac.policies.hybrimoe import HybriMoe, MrsScores, top_scores
from moe_spac.policies.interface import Costs, Demand, Forecast, Key, LayerReport, Setup, StepInfo
from moe_spac.policies.load import load_policy
from moe_spac.traces.schema import Kind

# GPU 10 an expert, CPU 20 a token and 5 more for the first expert, a copy 30.
HAND = Costs(10, 0, 0.0, 5, 0, 0, 20.0, 0, 0, 30)
EQUAL = Costs(10, 0, 0.0, 0, 10, 0, 0.0, 0, 0, 30)


@pytest.mark.parametrize("plan", [paper_schedule, release_schedule])
def test_cases_on_which_both_agree(plan):
    # Nothing resident: the CPU takes load 1 (0-25) and 2 (25-65); load 3 lands at 30 and ends at 40.
    assert plan([], [3, 2, 1], HAND) == Schedule((), (0,), (2, 1), 65)
    # One of each: GPU 0-10; the copy would end at 40, the CPU ends at 25.
    assert plan([1], [1], HAND) == Schedule((0,), (), (1,), 25)
    # Equal speeds: one each side.
    assert plan([1, 1], [], EQUAL) == Schedule((0,), (), (1,), 10)
    # Three residents: the CPU ends the lightest at 25, before the GPU would (30).
    assert plan([4, 2, 1], [], HAND) == Schedule((0, 1), (), (2,), 25)
    # ... but not one of load 2, at 45.
    assert plan([4, 2, 2], [], HAND) == Schedule((0, 1, 2), (), (), 30)
    assert plan([], [], HAND) == Schedule((), (), (), 0)
    # Without a CPU: copies land at 30 and 60.
    assert plan([1], [2, 1], HAND, cpu=False) == Schedule((0,), (1, 2), (), 70)


def test_the_paper_keeps_a_slow_link_busy_where_the_release_does_not():
    slow = replace(HAND, copy_bytes_ns=100)
    assert paper_schedule([], [1, 1], slow) == Schedule((), (0,), (1,), 110)
    assert release_schedule([], [1, 1], slow) == Schedule((), (), (1, 0), 45)


def test_paper_lets_a_landed_expert_in_at_its_load():
    # Loads 2, 1 resident, 5 missing, no CPU, copy 15: GPU 0-10 load 2, 10-20 load 1 (5 is not there), 20-30 load 5.
    fast = replace(HAND, copy_bytes_ns=15)
    assert paper_schedule([2, 1], [5], fast, cpu=False).makespan_ns == 30
    # With five of load 1 it goes third, before the other three, and nothing waits: 6 * 10.
    assert paper_schedule([1] * 5, [5], fast, cpu=False).makespan_ns == 60


def test_paper_counts_what_is_on_the_link():
    # The first is coming and lands at 30; the CPU takes the other at once.
    assert paper_schedule([], [1, 1], HAND, coming=1) == Schedule((), (0,), (1,), 40)


def test_release_constants():
    # Milliseconds: CPU 1.79 for one token, GPU 0.5, copy 0.41791: a copied expert ends at 0.91791 < 1.79.
    assert release_schedule([], [1], RELEASE_COSTS) == Schedule((), (0,), (), 917_910)
    # The second: 0.91791 + 0.5 (its copy ended at 0.83582).
    assert release_schedule([], [1, 1], RELEASE_COSTS) == Schedule((), (0, 1), (), 1_417_910)


LOADS = st.lists(st.integers(1, 9), max_size=8).map(lambda loads: sorted(loads, reverse=True))


@given(LOADS, LOADS, st.booleans(), st.sampled_from([HAND, EQUAL, RELEASE_COSTS]))
def test_everything_is_planned_once(resident, missing, cpu, costs):
    for plan in (paper_schedule, release_schedule):
        schedule = plan(resident, missing, costs, cpu)
        everything = [*schedule.gpu, *schedule.copies, *schedule.cpu]
        assert sorted(everything) == list(range(len(resident) + len(missing)))
        assert all(i < len(resident) for i in schedule.gpu)
        assert all(i >= len(resident) for i in schedule.copies)
        assert cpu or not schedule.cpu


@given(LOADS, LOADS, st.booleans(), st.sampled_from([HAND, EQUAL, RELEASE_COSTS]), st.sampled_from([1, 7, 30, 200]))
def test_a_makespan_is_that_of_the_plan(resident, missing, cpu, costs, copy):
    planner = Planner(replace(costs, copy_bytes_ns=copy), cpu)
    assert planner.makespan(resident, missing) == planner.plan(tuple(resident), tuple(missing)).makespan_ns


class Forgetful(HybriMoe):
    """Weighs everything anew whenever the link asks."""

    def next_fetch(self, view):
        self._best.clear()
        return super().next_fetch(view)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_remembered_of_a_layer_is_still_true(seed):
    records = []
    for policy in (HybriMoe(), Forgetful()):
        rng = np.random.default_rng(seed)
        routing = random_routing(rng, 25, 4, 12, 3, tokens=5)
        host = Host(policy, make_setup(policy, 4, 12, 4, top_k=3), routing, rng=rng, slow=True)
        host.play(ahead=3, slots={12: (3,) * 4, 18: (4,) * 4})
        records.append(host.record)
    assert records[0] == records[1]
    assert any(note[1] == "prefetch" for note in records[0])


def demand(ids, weights=None, scores=None):
    experts, loads = np.unique(ids, return_counts=True)
    return Demand(0, tuple(experts.tolist()), tuple(loads.tolist()), np.array(ids), weights, scores)


def test_scores_fall_back_to_weights_and_to_equal_shares():
    assert top_scores(demand([[1, 3]]), 4, 4).tolist() == [[0, 0.5, 0, 0.5]]
    assert top_scores(demand([[3, 1]], np.array([[0.75, 0.25]], np.float16)), 4, 4).tolist() == [[0, 0.25, 0, 0.75]]
    full = np.array([[0.5, 0.25, 0.125, 0.125]], np.float16)
    assert top_scores(demand([[0, 1]], scores=full), 3, 4).tolist() == [[0.5, 0.25, 0.125, 0]]
    logits = np.log(full) * 1.0
    assert np.allclose(top_scores(demand([[0, 1]], scores=logits), 2, 4), [[0.5, 0.25, 0, 0]], atol=1e-3)


def test_minus_recent_scores():
    all_rows, first_row = MrsScores(1, 4, 0.5, 2), MrsScores(1, 4, 0.5, 2)
    batch = demand([[0, 1], [0, 2]])
    all_rows.update(batch, first_row=False)
    first_row.update(batch, first_row=True)
    assert all_rows.scores[0].tolist() == [0.25, 0.125, 0.125, 0]
    assert first_row.scores[0].tolist() == [0.25, 0.25, 0, 0]
    all_rows.update(demand([[0, 3]]), first_row=False)
    assert all_rows.scores[0].tolist() == [0.375, 0.0625, 0.0625, 0.25]
    assert all_rows.ascending(0, [0, 1, 2, 3]) == [1, 2, 3, 0]


def test_prefetch_brings_the_expert_that_saves_most():
    # Layer 1 will need load 4 (expert 6) and load 1 (expert 5). As it is: CPU takes 5 (25), 6 lands at 30, ends at 40.
    # With 6 resident: 25. With 5 resident: the CPU would start 6 at once and end at 85.
    driver = Driver(load_policy("hybrimoe"), Setup(2, 8, 2, 1, (2, 2), HAND))
    driver.step_begins(StepInfo(0, Kind.DECODE, np.zeros(1, np.int32), np.zeros(1, bool)))
    driver.forecast(Forecast("next-gate", 1, {5: 1.0, 6: 4.0}))
    driver.forecast(Forecast("oracle", 1, {7: 9.0}))
    driver.gate(0, np.array([[0, 1]]))
    assert driver.next_fetch() == Key(1, 6)
    assert driver.next_fetch() == Key(1, 5)  # saves 5: the CPU would need 25, the GPU both in 20
    assert driver.next_fetch() is None


def test_prefetch_does_not_evict_what_is_forecast():
    driver = Driver(load_policy("hybrimoe:start=first"), Setup(2, 8, 2, 1, (2, 2), HAND))
    driver.step_begins(StepInfo(0, Kind.DECODE, np.zeros(1, np.int32), np.zeros(1, bool)))
    driver.forecast(Forecast("next-gate", 1, {0: 2.0, 1: 3.0, 6: 4.0}))
    driver.gate(0, np.array([[0, 1]]))
    assert driver.next_fetch() is None
    assert driver.next_fetch() is None
    assert driver.cache.residents(1) == [0, 1]


def test_release_prefetch_takes_the_next_layers_best_scores():
    driver = Driver(load_policy("hybrimoe-release:prefetch_size=2"), Setup(2, 8, 2, 1, (2, 2), HAND))
    for index, ids in enumerate(([[3, 4]], [[0, 1]])):
        driver.step_begins(StepInfo(index, Kind.DECODE, np.zeros(1, np.int32), np.zeros(1, bool)))
        for layer in range(2):
            plan = driver.gate(layer, np.array(ids))
            if index == 1 and layer == 0:
                # One of 3 and 4 was copied in step 0, the other ran on the CPU; both score highest in layer 1.
                assert len(plan.copies) + len(plan.gpu) > 0
                wanted = {driver.next_fetch(), driver.next_fetch()} - {None}
                assert wanted == {Key(1, 3), Key(1, 4)} - set(driver.cache.resident)
            driver.layer_ends(LayerReport(layer, 0, 0, 0, 0, 0))


def test_release_prefill_streams_and_keeps_nothing():
    driver = Driver(load_policy("hybrimoe-release"), Setup(1, 8, 2, 1, (2,), HAND))
    driver.step_begins(StepInfo(0, Kind.PREFILL, np.zeros(3, np.int32), np.zeros(3, bool)))
    plan = driver.gate(0, np.array([[0, 1], [0, 2], [3, 4]]))
    assert (plan.copies, plan.kept, plan.cpu) == ((0, 1, 2, 3, 4), frozenset(), ())


def test_true_forecasts_raise_hits():
    hits = []
    for spec in ("hybrimoe:prefetch=false", "hybrimoe"):
        policy = load_policy(spec)
        routing = random_routing(np.random.default_rng(4), 40, 4, 16, 2, tokens=3)
        hits.append(Host(policy, make_setup(policy, 4, 16, 4), routing).play(ahead=3).total.hits)
    assert hits[1] > 1.2 * hits[0]


def test_parts_switched_off():
    routing = random_routing(np.random.default_rng(4), 40, 4, 16, 2, tokens=3)
    totals = {}
    for spec in ("schedule=false,prefetch=false,cache=fixed", "prefetch=false,cache=fixed",
                 "schedule=false,cache=fixed", "schedule=false,prefetch=false", "prefetch=false"):  # fmt: skip
        policy = load_policy(f"hybrimoe:start=random,{spec}")
        totals[spec] = Host(policy, make_setup(policy, 4, 16, 4), routing).play(ahead=3).total
    none, scheduling, prefetching, caching, both = totals.values()
    assert none.copies == 0
    assert none.cpu == none.needed - none.hits
    assert (scheduling.hits, scheduling.fetches) == (none.hits, 0)  # the cache is what it was
    assert scheduling.streams > 0
    assert (prefetching.fetches, prefetching.streams) == (0, 0)
    assert prefetching.hits > none.hits
    assert (caching.fetches, caching.streams) == (0, 0)  # copies come in behind the layers
    assert caching.hits > none.hits
    assert both.fetches > 0


def test_lru_in_place_of_scores():
    # 3 is used twice and early, 4 once and late.
    evicted = []
    for order in ("mrs", "lru"):
        policy, record = load_policy(f"hybrimoe:cache={order},alpha=0.1"), []
        driver = Driver(policy, replace(Setup(1, 8, 1, 1, (2,), HAND), cpu=False), record=record)
        for expert in (3, 3, 4, 5):
            driver.gate(0, np.array([[expert]]))
            driver.layer_ends(LayerReport(0, 0, 0, 0, 0, 0))
        evicted += [note[2] for note in record if note[1] == "evict"]
    assert evicted == [Key(0, 4), Key(0, 3)]


def test_what_comes_in_behind_outranks_what_it_displaces():
    policy = load_policy("hybrimoe:schedule=false,prefetch=false,alpha=0.1")
    driver = Driver(policy, Setup(1, 8, 1, 1, (1,), HAND))
    seen = []
    for expert in (3, 3, 4, 4, 4):
        driver.gate(0, np.array([[expert]]))
        driver.layer_ends(LayerReport(0, 0, 0, 0, 0, 0))
        while (key := driver.next_fetch()) is not None:
            driver.landed(key, 0)
        seen += driver.cache.residents(0)
    # Scores of 3 and 4 after each: .1 0, .19 0, .171 .1, .154 .19: the second use of 4 brings it in.
    assert seen == [3, 3, 3, 4, 4]
