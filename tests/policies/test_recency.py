"""LRU and the offline optimum on toy caches whose answers are known, and against brute force."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_loop import COSTS, Host, make_setup, one_by_one, random_routing, sets

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Forecast, LayerReport, Setup, StepInfo
from moe_spac.policies.load import load_policy
from moe_spac.traces.schema import Kind

CYCLE = (0, 1, 2) * 4
MIXED = (0, 1, 2, 0, 1, 3, 0, 1, 2, 3)
HOT = (0, 0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0)


def total(spec, routing, experts, slots, top_k=2):
    policy = load_policy(spec)
    layers = routing[0].shape[1]
    return Host(policy, make_setup(policy, layers, experts, slots, top_k), routing).play().total


@pytest.mark.parametrize(
    ("keys", "slots", "lru", "forced"),
    [(CYCLE, 2, 0, 5), (CYCLE, 3, 9, 9), (MIXED, 2, 0, 3), (MIXED, 3, 4, 5), (HOT, 2, 2, 4), (HOT, 3, 2, 6)],
)
def test_toy_sequences(keys, slots, lru, forced):
    assert total("ar-lru", one_by_one(*keys), 5, slots, 1).hits == lru
    assert total("min:bypass=false", one_by_one(*keys), 5, slots, 1).hits == forced


def test_bypass_keeps_two_of_a_cycle_of_three():
    # 0 and 1 stay, 2 always passes by: 3 rounds of 2 hits.
    assert total("min", one_by_one(*CYCLE), 5, 2, 1).hits == 6


def test_lru_serves_a_layer_as_one_event():
    seen = total("ar-lru", sets([0, 1], [0, 2], [0, 1], [0, 3], [0, 1], layers=3), 4, 2)
    assert (seen.hits, seen.fetches, seen.evictions, seen.insertions) == (12, 18, 12, 18)


def test_lru_global_evicts_the_oldest_layer_first():
    policy = load_policy("ar-lru:scope=global")
    host = Host(policy, Setup(2, 4, 1, 1, (2,), make_setup(policy, 2, 4, 2).costs), sets([0], [1], layers=2))
    host.play()
    evicted = [tuple(note[2]) for note in host.record if note[1] == "evict"]
    assert evicted == [(0, 0), (1, 0)]


def test_lru_does_not_evict_what_the_same_layer_needed():
    # Three needed, two slots: 0 and 1 stay, 2 passes through; next time they hit.
    seen = total("ar-lru", sets([0, 1, 2], [0, 1, 2]), 4, 2, 3)
    assert (seen.hits, seen.evictions) == (2, 0)


FETCHING = [
    *("ar-lru", "fifo", "lfu", "lfu-in-cache", "lfru", "decayed-lfu", "lrfu", "least-stale:scope=layer", "slru"),
    *("s3-fifo", "hybrimoe:prefetch=false", "hybrimoe-release", "min:bypass=false"),
]


@pytest.mark.parametrize("spec", [*FETCHING, "min", "hindsight"])
def test_no_slots_no_hits(spec):
    assert total(spec, sets([0, 1], [1, 2], layers=2), 4, 0).hits == 0


@pytest.mark.parametrize(
    "spec", [*(s for s in FETCHING if "hybrimoe" not in s), "ar-lru:scope=global", "min:scope=global"]
)
def test_with_all_slots_only_first_uses_miss(spec):
    routing = random_routing(np.random.default_rng(1), 20, 2, 6, 2)
    seen = total(spec, routing, 6, 6)
    first_uses = sum(len(np.unique([e for ids in routing for e in ids[:, layer].ravel()])) for layer in range(2))
    assert seen.needed - seen.hits == first_uses


def best_by_brute_force(needed, slots):
    """Most hits over all ways to choose what stays after each event, out of residents and what was just served."""
    reach = {frozenset(): 0}
    for event in needed:
        after = {}
        for cache, hits in reach.items():
            hits += len(cache & event)
            pool = sorted(cache | event)
            for kept in combinations(pool, min(slots, len(pool))):
                after[frozenset(kept)] = max(after.get(frozenset(kept), 0), hits)
        reach = after
    return max(reach.values())


EVENTS = st.lists(st.sets(st.integers(0, 4), min_size=2, max_size=2).map(frozenset), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.integers(1, 4))
def test_min_equals_brute_force(events, slots):
    routing = sets(*(sorted(e) for e in events))
    assert total("min", routing, 5, slots).hits == best_by_brute_force(events, slots)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.sampled_from([0, 1, 2])] * 3), min_size=1, max_size=6), st.integers(1, 4))
def test_min_over_one_pool_equals_brute_force(steps, slots):
    routing = [np.array([[[e] for e in step]]) for step in steps]
    policy = load_policy("min:scope=global")
    setup = Setup(3, 3, 1, 1, (slots,), make_setup(policy, 1, 3, 1).costs)
    events = [frozenset([(layer, e)]) for step in steps for layer, e in enumerate(step)]
    assert Host(policy, setup, routing).play().total.hits == best_by_brute_force(events, slots)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_min_is_never_beaten_by_demand_caching(seed, slots):
    routing = random_routing(np.random.default_rng(seed), 30, 1, 8, 2)
    best = total("min", routing, 8, slots).hits
    placed = total("min:placed=true", routing, 8, slots).hits
    assert placed >= best
    for spec in FETCHING:
        assert total(spec, routing, 8, slots).hits <= best
    for spec in ("static", "hybrimoe-release:start=first", "hybrimoe:start=random,prefetch=false"):
        assert total(spec, routing, 8, slots).hits <= placed


@pytest.mark.parametrize(
    ("keys", "slots", "fifo"), [(CYCLE, 2, 0), (CYCLE, 3, 9), (MIXED, 2, 0), (MIXED, 3, 2), (HOT, 3, 2)]
)
def test_first_in_first_out(keys, slots, fifo):
    # The mixed one in 3 slots: 0 and 1 hit once each, then 3, 0, 1, 2 each displace the one that is needed next.
    assert total("fifo", one_by_one(*keys), 5, slots, 1).hits == fifo


def test_a_use_does_not_keep_what_came_first():
    # 0 came first and goes for 2, used or not; by recency 1 would go, and 0 would hit.
    keys = one_by_one(0, 1, 0, 2, 0)
    assert (total("fifo", keys, 5, 2, 1).hits, total("ar-lru", keys, 5, 2, 1).hits) == (1, 2)


def record(spec, scope, slots=4, ahead=0):
    policy = load_policy(spec + ("," if ":" in spec else ":") + f"scope={scope}")
    routing = random_routing(np.random.default_rng(8), 60, 3, 8, 2)
    host = Host(policy, make_setup(policy, 3, 8, slots), routing)
    host.play(ahead=ahead)
    return host.record


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_least_stale_without_prefetch_is_lru_c4(scope):
    assert record("least-stale", scope) == record("ar-lru", scope)
    assert record("least-stale:reading=interval", scope) != record("ar-lru", scope)


def test_the_lowest_layer_goes_first():
    routing = [np.array([[[0], [0], [0]]]), np.array([[[1], [0], [0]]])]
    policy = load_policy("least-stale:reading=layers")
    host = Host(policy, Setup(3, 4, 1, 1, (3,), COSTS), routing)
    host.play()
    assert [note[2] for note in host.record if note[1] == "evict"] == [(0, 0)]


def test_the_longest_interval_goes_first():
    # Events 1, 2, ...: 0 at 1 and 4 (interval 3), 1 at 2 and 3 (interval 1). Next uses 7 and 4 are foreseen: 0 goes,
    # where by recency 1 would. A second gap of 1 would make the mean of 0 0.75 * 3 + 0.25 * 1 = 2.5.
    keys = one_by_one(0, 1, 1, 0, 2)
    policy = load_policy("least-stale:reading=interval")
    host = Host(policy, make_setup(policy, 1, 4, 2, 1), keys)
    host.play()
    assert sorted(host.driver.cache.resident) == [(0, 1), (0, 2)]
    host = Host(policy, make_setup(policy, 1, 4, 2, 1), one_by_one(0, 1, 1, 0, 0))
    host.play()
    assert policy._parts.victims._interval[0, 0] == 2.5  # type: ignore[attr-defined]


def test_what_the_next_gate_names_is_loaded_ahead():
    # Layer 1 is named 3 (by two tokens), 0 and 2. One slot a layer each; `top` of them are brought in while it waits.
    forecast = Forecast("next-gate", 1, {0: 1.0, 2: 1.0, 3: 2.0})
    for top, expected in ((0, []), (1, [(1, 3)]), (2, [(1, 3), (1, 0)])):
        policy = load_policy(f"ar-lru:spec_topk={top}")
        driver = Driver(policy, Setup(2, 4, 1, 1, (3, 3), COSTS))
        driver.step_begins(StepInfo(0, Kind.VERIFY, np.zeros(2, np.int32), np.array([False, True])))
        driver.forecast(forecast)
        driver.gate(0, np.array([[1], [1]]))
        found = []
        while (key := driver.next_fetch()) is not None:
            driver.landed(key, 0)
            found.append(key)
        assert found == expected
    driver.forecast(forecast)
    driver.layer_ends(LayerReport(0, 0, 0, 0, 0, 0))
    driver.gate(1, np.array([[2], [1]]))
    assert driver.next_fetch() is None  # too late for layer 1
    assert record("ar-lru:spec_topk=2", "layer", ahead=1) != record("ar-lru", "layer", ahead=1)


def test_a_swap_copies_every_victim_back():
    routing = sets([0, 1], [0, 2], [0, 1], [0, 3], [0, 1], layers=3)
    plain, swap = (total(spec, routing, 4, 2) for spec in ("ar-lru", "ar-lru:write_back=true"))
    assert (plain.write_backs, swap.write_backs) == (0, 12)
    assert replace(swap, write_backs=0) == plain


def test_min_drops_old_bookkeeping():
    policy = load_policy("min")
    routing = random_routing(np.random.default_rng(2), 400, 1, 4, 2)
    Host(policy, make_setup(policy, 1, 4, 2), routing).play()
    assert len(policy._heaps[0]) <= policy._limit  # type: ignore[attr-defined]
