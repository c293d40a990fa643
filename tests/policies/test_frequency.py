"""Caches by counts: published toy results, an independent event-atomic replay, another library, and each other."""

from itertools import pairwise

import libcachesim
import numpy as np
import pytest
from hand import decode, setup, step
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_loop import Host, make_setup, one_by_one, random_routing

from moe_spac.policies.load import load_policy
from moe_spac.simulator.replay import count, count_sequential

CYCLE = [0, 1, 2] * 4
MIXED = [0, 1, 2, 0, 1, 3, 0, 1, 2, 3]
HOT = [0, 0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    ("keys", "slots", "hits"), [(MIXED, 2, 1), (MIXED, 3, 4), (HOT, 2, 4), (HOT, 3, 4), (CYCLE, 3, 9)]
)
def test_lfu_on_toy_sequences_o15(keys, slots, hits):
    driver = count(decode(*([k] for k in keys)), load_policy("lfu"), setup(1, 8, [slots], top_k=1))
    assert (driver.total.hits, driver.total.needed) == (hits, len(keys))


def retained(routing, slots, scope, rank):
    """Hits if after every event the best `slots` of residents and needed experts stay; rank(count, last, now).

    Written from the definition. Of equals residents stay before fetched ones, residents with high ids before those
    with low ones (which would be evicted first), fetched ones with low ids before those with high ones.
    """
    layers = routing[0].shape[1]
    size = slots * layers if scope == "global" else slots
    cache, uses, last, hits, now = set(), {}, {}, 0, 0
    for ids in routing:
        for layer in range(layers):
            needed = {(layer, e) for e in ids[:, layer].ravel().tolist()}
            now += 1
            hits += len(needed & cache)
            for key in needed:
                uses[key], last[key] = uses.get(key, 0) + 1, now
            group = {k for k in cache if scope == "global" or k[0] == layer}

            def value(key, group=group, now=now):
                resident = key in group
                tie = key if resident else (-key[0], -key[1])
                return (rank(uses[key], last[key], now), last[key], resident, tie)

            kept = sorted(group | needed, key=value, reverse=True)[:size]
            cache = (cache - group) | set(kept)
    return hits


RANKS = {
    "ar-lru": lambda uses, last, now: last,
    "lfu:bypass=true": lambda uses, last, now: uses,
    "lfru": lambda uses, last, now: uses / (now - last + 1),
}


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("spec", RANKS)
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_event_atomic_retention_as_defined(spec, scope, seed, slots):
    routing = random_routing(np.random.default_rng(seed), 30, 3, 8, 2)
    policy = load_policy(spec + ("," if ":" in spec else ":") + f"scope={scope}")
    total = Host(policy, make_setup(policy, 3, 8, slots), routing).play().total
    assert total.hits == retained(routing, slots, scope, RANKS[spec])


@pytest.mark.parametrize("slots", [10, 30])
@pytest.mark.parametrize(
    ("spec", "theirs"),
    [("ar-lru", libcachesim.LRU), ("fifo", libcachesim.FIFO), ("lfu-in-cache", libcachesim.LFU)],
)
def test_another_library_counts_the_same(spec, theirs, slots):
    keys = ((np.random.default_rng(slots).zipf(1.1, 800) - 1) % 90).tolist()
    cache, expected = theirs(slots), 0
    for at, key in enumerate(keys):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = key, 1, at
        expected += cache.get(request)
    policy = load_policy(spec)
    assert Host(policy, make_setup(policy, 1, 90, slots, 1), one_by_one(*keys)).play().total.hits == expected
    sequential = count_sequential(decode(*([k] for k in keys)), load_policy(spec), setup(1, 90, [slots], top_k=1))
    assert sequential.total.hits == expected


def record(spec, slots=4, seed=0, scope="layer"):
    policy = load_policy(spec + ("," if ":" in spec else ":") + f"scope={scope}")
    routing = random_routing(np.random.default_rng(seed), 60, 3, 10, 2, tokens=1)
    host = Host(policy, make_setup(policy, 3, 10, slots), routing)
    host.play()
    return host.record


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("decayed-lfu:period=0", "lfu"),  # C4
        ("lrfu:half_life=inf", "lfu"),
        ("lfu-in-cache:reset=false", "lfu"),
    ],
)
def test_limits_that_are_lfu(spec, same, scope):
    assert record(spec, scope=scope) == record(same, scope=scope)
    assert record(spec, scope=scope) != record("ar-lru", scope=scope)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_short_half_life_is_lru(scope):
    assert record("lrfu:half_life=0.001", scope=scope) == record("ar-lru", scope=scope)


def test_decay_forgets_a_topic():
    # 0 is used 8 times, then 1 and 2 alternate with 3 now and then: plain counts hold 0 until 1 and 2 have caught up.
    keys = [0] * 8 + [1, 2] * 6
    plain, decayed = (
        count(decode(*([k] for k in keys)), load_policy(spec), setup(1, 4, [2], top_k=1)).total.hits
        for spec in ("lfu", "decayed-lfu:period=4")
    )
    # Plain: 7 hits of 0, and then 1 and 2 displace each other until one of them has more than 8 uses: never here.
    assert plain == 7
    # Halved at steps 4, 8, 12, ...: 0 has 4/2 + 4 = 6, then 3 at step 8; 1 and 2 displace each other until step 12,
    # when 0 has 1.5 and each of them 2/2 = 1. Step 12: 1 (2). Step 13: 2 (2) displaces 0, and from then on all hit.
    assert decayed == 7 + 6


def test_uses_by_rejected_drafts_count_or_not_c10():
    drafted = [step([[[0]], [[1]]], at, drafted=1, accepted=0) for at in (0, 1)]
    steps = [*drafted, *decode([2], [0])]
    hits = {
        spec: count(steps, load_policy(spec), setup(1, 4, [2], top_k=1)).total.hits
        for spec in ("lfu", "lfu:accepted_only=true")
    }
    # Both warm the cache: 2 hits in the second verify. Counted, 0 and 1 tie at 2 uses and 0 goes for 2, so that 0
    # misses. Not counted, 1 goes for 2, and 0 hits.
    assert hits == {"lfu": 2, "lfu:accepted_only=true": 3}


def test_lfru_by_hand():
    # 2 slots. 0 0 0 1 then 2: 0 has 3 uses, age 3 -> 1; 1 has 1 use, age 2 -> 0.5; 1 goes. Then 0 hits.
    # Then 2 2 2 2, at whose end 0 has 4 / 5 and 2 has 5 / 1; 3 (1 / 1) displaces 0 (4 / 6).
    keys = [0, 0, 0, 1, 2, 0, 2, 2, 2, 2, 3]
    driver = count(decode(*([k] for k in keys)), load_policy("lfru"), setup(1, 4, [2], top_k=1))
    assert driver.total.hits == 2 + 1 + 4
    assert sorted(driver.cache.resident) == [(0, 2), (0, 3)]


def test_the_lrfu_score_by_hand():
    # Half-life 1 step. At the last step 0 is worth 2^-3 + 2^-2 = 0.375 and 1 is worth 2^-1 = 0.5: 0 goes.
    keys = [0, 0, 1, 2]
    driver = count(decode(*([k] for k in keys)), load_policy("lrfu:half_life=1"), setup(1, 4, [2], top_k=1))
    assert sorted(driver.cache.resident) == [(0, 1), (0, 2)]
    # One more use of 0 makes it 2^-4 + 2^-3 + 2^-2 + ... > 0.5 with a half-life of 4 steps.
    slow = count(decode([0], [0], [1], [2]), load_policy("lrfu:half_life=4"), setup(1, 4, [2], top_k=1))
    assert sorted(slow.cache.resident) == [(0, 0), (0, 2)]


def test_frequency_beats_recency_and_the_reverse():
    rng = np.random.default_rng(0)
    zipf = one_by_one(*((rng.zipf(1.4, 600) - 1) % 60).tolist())
    drift = one_by_one(*((i // 40 * 3 + int(rng.integers(0, 6))) % 60 for i in range(600)))
    rates = {}
    for name, routing in (("zipf", zipf), ("drift", drift)):
        for spec in ("ar-lru", "lfu"):
            policy = load_policy(spec)
            rates[name, spec] = Host(policy, make_setup(policy, 1, 60, 8, 1), routing).play().total.hits / 600
    assert rates["zipf", "lfu"] > rates["zipf", "ar-lru"] + 0.05
    assert rates["drift", "ar-lru"] > rates["drift", "lfu"] + 0.2


def test_more_slots_never_hurt_lru():
    routing = random_routing(np.random.default_rng(4), 60, 2, 12, 2)
    hits = []
    for slots in range(13):
        policy = load_policy("ar-lru")
        hits.append(Host(policy, make_setup(policy, 2, 12, slots), routing).play().total.hits)
    assert all(a <= b for a, b in pairwise(hits))
