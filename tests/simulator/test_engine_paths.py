"""What the engine does beside the plain cases: closed form against events, interrupted prefetches, pageable memory,
victims that go back, and slots that the keys and values take."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
from hand import decode, rates, setup, step, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from wander import Wander

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Key, Policy, Where
from moe_spac.policies.recency import ArLru
from moe_spac.simulator.engine import LAYER_COLUMNS, Engine, replay_step, shares
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.run import simulate
from moe_spac.traces.schema import Kind


class Fetch(Policy):
    """Every miss is copied and kept if there is room."""

    name: ClassVar[str] = "fetch"


def play(steps, policy, times, experts=8, slots=None, exact=False, **more):
    layers = steps[0].experts.shape[1]
    record = []
    driver = Driver(policy, setup(layers, experts, slots or [experts] * layers, times.costs), record=record)
    engine = Engine(driver, times, exact=exact, **more)
    for index, one in enumerate(steps):
        replay_step(engine, index, one)
    return engine, record


routing = st.lists(
    st.lists(
        st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=2), min_size=3, max_size=3), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=6,
)
WAYS = [(Where.FETCH,), (Where.CPU,), (Where.FETCH, Where.STREAM), (Where.FETCH, Where.CPU, Where.STREAM)]


@settings(max_examples=120, deadline=None)
@given(
    routing,
    st.sampled_from(WAYS),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 4),
)
def test_closed_form_and_events_agree_to_the_nanosecond(
    tokens, ways, prefetch, serial, back, copy, cpu, slots, dram, chunks
):
    steps = [step([[sorted(layer) for layer in token] for token in t], drafted=len(t) - 1) for t in tokens]
    times = rates(copy=copy, cpu=cpu, gpu=7, dense=11, hybrid=3, dram=dram * 10**9, copy_fixed=2, chunks=chunks)
    times = replace(times, back_bytes_ns=130, both_ways=0.5)
    runs = [
        play(steps, Wander(prefetch, ways, serial, back), times, experts=6, slots=[slots] * 3, exact=exact)
        for exact in (False, True)
    ]
    (short, record), (long, same) = runs
    assert short.steps == long.steps
    for s in short.steps:
        assert sum(s.gpu.values()) == s.wall_ns
        assert all(0 <= sum(lane.values()) <= s.wall_ns for lane in (s.cpu, s.link, s.dram, s.back))
    assert record == same
    assert short.driver.total == long.driver.total
    for name in LAYER_COLUMNS:
        assert np.array_equal(short.layers[name], long.layers[name])


def test_layers_add_up_to_the_counts():
    steps = decode([0, 1], [1, 2], [2, 3], layers=2)
    engine, _ = play(steps, Fetch(), rates(copy=100, gpu=30, dense=5), slots=[3, 3])
    count, layers = engine.driver.decode, engine.layers
    assert {n: layers[n].sum() for n in ("needed", "hits", "copies")} == {
        "needed": count.needed,
        "hits": count.hits,
        "copies": count.copies,
    }
    waits = sum(s.gpu.get("wait_copy", 0) for s in engine.steps)
    assert layers["wait_copy_ns"].sum() == waits
    assert layers["wall_ns"].sum() == engine.now - 2 * 3 * 5  # all but the dense part of two layers in three steps


class Prefetches7(Policy):
    """Brings expert 7 of layer 0 in, once, and evicts nothing."""

    name: ClassVar[str] = "seven"

    def __init__(self, keep: bool) -> None:
        self.keep = keep

    def next_fetch(self, view):
        key = Key(0, 7)
        return None if view.resident(key) or view.in_flight(key) else key

    def keep_fetch(self, key, view):
        return self.keep


def test_demand_interrupts_a_prefetch_between_chunks():
    # Dense 30, prefetch on the wire since 0 in 4 chunks of 25: demand at 30 waits until 50, lands at 150, GPU 10.
    engine, _ = play(decode([0]), Prefetches7(keep=True), rates(copy=100, gpu=10, dense=30, chunks=4))
    assert engine.now == 160
    assert engine.steps[0].link == {"prefetch": 50 + 10, "demand": 100}
    assert engine.driver.cache.flying == {Key(0, 7): engine.driver.cache.slot(Key(0, 7))}


def test_a_policy_may_cancel_what_was_interrupted():
    policy = Prefetches7(keep=False)
    engine, record = play(decode([0]), policy, rates(copy=100, gpu=10, dense=30, chunks=4))
    count = engine.driver.decode
    assert (count.cancelled, count.cancelled_bytes) == (1, 500)
    assert count.copies == 2  # the demand and the prefetch begun anew when the link was free
    assert [what[1] for what in record] == ["prefetch", "gate", "cancel", "prefetch", "admit"]


def test_pageable_copies_keep_the_host_from_launching():
    # Step 1 makes 0 resident. Step 2 needs 0 and 1: pinned, 30 ns of GPU work hide part of the copy; pageable, none.
    steps = decode([0, 0], [0, 1])
    pinned, _ = play(steps, Fetch(), rates(copy=100, gpu=30))
    times = rates(copy=100, gpu=30, pinned_experts=0, pageable_fixed_ns=40, pageable_bytes_ns=260)
    pageable, _ = play(steps, Fetch(), times)
    assert pinned.steps[1].gpu == {"expert": 60, "wait_copy": 70}
    assert pageable.steps[1].gpu == {"expert": 60, "wait_copy": 300}


def test_only_what_is_not_pinned_is_slow():
    times = rates(copy=100, pinned_experts=3, pageable_fixed_ns=0, pageable_bytes_ns=300)
    assert play(decode([2]), Fetch(), times)[0].now == 100
    assert play(decode([3]), Fetch(), times)[0].now == 300


def test_a_pageable_prefetch_is_waited_for():
    times = rates(copy=100, gpu=10, dense=30, pinned_experts=0, pageable_bytes_ns=300)
    engine, _ = play(decode([7]), Prefetches7(keep=True), times)
    assert engine.steps[0].gpu == {"wait_copy": 300, "dense": 30, "expert": 10}


def test_victims_that_go_back_use_the_other_lane_and_slow_the_link():
    # One slot. Each of steps 2 and 3 fetches one expert and sends one back; step 3's copy runs beside step 2's victim,
    # whose 100 ns leave it half its speed: 50 ns of work by then, and 50 more.
    steps = decode([0], [1], [2])
    times = rates(copy=100, both_ways=0.5)
    plain, _ = play(steps, ArLru(), times, slots=[1])
    swap, _ = play(steps, ArLru(write_back=True), times, slots=[1])
    assert plain.now == 300
    assert swap.now == 350
    assert swap.driver.decode.write_backs == swap.driver.decode.evictions == 2
    assert swap.steps[2].back == {"write_back": 100}


def test_growing_keys_and_values_take_slots_and_a_new_text_gives_them_back():
    steps = decode([0, 1], [2, 3], [0, 1], [2, 3])
    steps.append(step([[[0, 1]]], position=0))
    engine, _ = play(steps, ArLru(), rates(copy=10), slots=[4], slots_at=lambda context: (max(2, 5 - context),))
    # Contexts 1 to 4 leave 4, 3, 2, 2 slots; a context of 1 again 4. Evicted: 0 for 3; 1, its slot being taken away;
    # 2 and 3 for 0 and 1; these for 2 and 3.
    assert engine.driver.decode.evictions == 6
    assert engine.driver.cache.capacity == (4,)
    assert engine.driver.cache.residents(0) == [0, 1, 2, 3]
    engine.driver.cache.check()


def test_simulate_says_how_many_slots_there_were():
    t = trace(decode([0, 1], [2, 3], [0, 1]), 8)
    run = simulate(t, ArLru(), load_machine("rtx4090-pcie4"), slots=6, slots_at=lambda context: 7 - context)
    assert run.slots_seen == (4, 6)


def test_a_protected_cache_outlives_a_prompt_o33():
    chunks = [replace(step([[[e]] for e in chunk] * 8), kind=Kind.PREFILL) for chunk in ((2, 3, 4), (5, 6, 7))]
    steps = [*decode([0, 1], [0, 1]), *chunks, *decode(*[[0, 1]] * 10)]
    counts = {}
    for protect in (False, True):
        driver = Driver(ArLru(), setup(1, 8, [3], rates().costs), protect=protect)
        engine = Engine(driver, rates(copy=10))
        for index, one in enumerate(steps):
            replay_step(engine, index, one)
        counts[protect] = driver.prefill, driver.decode
    for prefill, _ in counts.values():
        assert (prefill.needed, prefill.hits, prefill.copies) == (6, 0, 6)  # each expert once a chunk
    assert counts[True][1].copies == 2  # the first step's; the prompt displaced nothing
    assert counts[False][1].copies == 4


def test_slots_are_shared_evenly_or_pooled():
    class Pool(Fetch):
        scope = "global"

    assert shares(7, 3, Fetch()) == (3, 2, 2)
    assert shares(7, 3, Pool()) == (7,)
