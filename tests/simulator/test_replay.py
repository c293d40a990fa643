"""Toy caches with answers known from outside (O15, O16 of the users' tests; C1, C3 of the conformance tests)."""

import numpy as np
import pytest
from hand import decode, setup, step
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.policies.load import load_policy
from moe_spac.simulator.replay import count, count_sequential

CYCLE = [0, 1, 2] * 4
MIXED = [0, 1, 2, 0, 1, 3, 0, 1, 2, 3]
HOT = [0, 0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    ("keys", "slots", "policy", "hits"),
    [
        (CYCLE, 2, "ar-lru", 0),
        (CYCLE, 2, "min:bypass=false", 5),
        (CYCLE, 3, "ar-lru", 9),
        (MIXED, 2, "ar-lru", 0),
        (MIXED, 2, "min:bypass=false", 3),
        (MIXED, 3, "ar-lru", 4),
        (MIXED, 3, "min:bypass=false", 5),
        (HOT, 2, "ar-lru", 2),
        (HOT, 2, "min:bypass=false", 4),
        (HOT, 3, "ar-lru", 2),
        (HOT, 3, "min:bypass=false", 6),
    ],
)
def test_toy_sequences_o15(keys, slots, policy, hits):
    driver = count(decode(*([k] for k in keys)), load_policy(policy), setup(1, 8, [slots], top_k=1))
    assert (driver.total.hits, driver.total.needed) == (hits, len(keys))


@pytest.mark.parametrize(
    ("scope", "slots", "hits"), [("global", 7, 0), ("global", 8, 32), ("layer", 1, 0), ("layer", 2, 32)]
)
def test_layer_order_thrashes_a_global_lru_one_slot_too_small_o16(scope, slots, hits):
    steps = decode(*[[0, 1]] * 5, layers=4)
    pool = [slots] if scope == "global" else [slots] * 4
    driver = count_sequential(steps, load_policy(f"ar-lru:scope={scope}"), setup(4, 4, pool))
    assert (driver.total.hits, driver.total.needed) == (hits, 40)


def test_event_atomic_lru_c1():
    steps = decode([0, 1], [0, 2], [0, 1], [0, 3], [0, 1], layers=3)
    total = count(steps, load_policy("ar-lru"), setup(3, 4, [2] * 3)).total
    assert (total.hits, total.copies, total.evictions, total.insertions) == (12, 18, 12, 18)


POLICIES = ["ar-lru", "hybrimoe", "hybrimoe-release", "min"]


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_all_every_fetching_policy_misses_each_expert_once_c3(policy):
    rng = np.random.default_rng(1)
    steps = [step([[sorted(rng.choice(6, 2, replace=False)) for _ in range(3)]], i) for i in range(40)]
    seen = {(la, e) for s in steps for la in range(3) for e in s.experts[0, la].tolist()}
    driver = count(steps, load_policy(policy), setup(3, 6, [6] * 3, costs=None))
    assert driver.total.evictions == 0
    assert driver.total.needed - driver.total.hits >= len(driver.cache.resident) - driver.total.prefetches
    assert set(driver.cache.resident) <= seen
    if policy in ("ar-lru", "min"):
        assert driver.total.needed - driver.total.hits == len(seen)


@pytest.mark.parametrize("policy", [*POLICIES, "moe-spac", "moe-spac-release", "static"])
def test_without_slots_everything_misses_c3(policy):
    spec = load_policy(policy)
    steps = decode([0, 1], [2, 3], [0, 1], layers=2)
    driver = count(steps, spec, setup(2, 4, [0] if spec.scope == "global" else [0, 0]))
    assert driver.total.hits == 0
    assert driver.total.needed == 12


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=25), st.integers(2, 5))
def test_the_optimum_is_never_beaten(sets, slots):
    steps = decode(*(sorted(s) for s in sets))
    best = count(steps, load_policy("min"), setup(1, 6, [slots])).total.hits
    for policy in ("ar-lru", "hybrimoe", "hybrimoe-release", "min:bypass=false"):
        assert count(steps, load_policy(policy), setup(1, 6, [slots])).total.hits <= best
