"""Count-only, driver and event-level replay give the same counts (C1, C3; O15; simulator ladder)."""

from dataclasses import replace

import numpy as np
import pytest
from hand import Trace, decode, rates, step, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.policies.driver import Counters, Driver
from moe_spac.policies.load import load_policy
from moe_spac.simulator.accesses import Accesses
from moe_spac.simulator.counting import FAST, Counts, count_fast, equal_slots
from moe_spac.simulator.engine import Engine, future_of, replay_step, setup_for
from moe_spac.simulator.machine import Rates
from moe_spac.simulator.metrics import Limited
from moe_spac.simulator.replay import count
from moe_spac.traces.errors import InputError
from moe_spac.traces.reader import open_trace
from moe_spac.traces.schema import Kind, Step
from moe_spac.traces.views import Steps

POLICIES = [*FAST, "static"]


@st.composite
def traces(draw) -> tuple[Trace, int]:
    """A trace with prompts and verify steps, and slots from none to more than there are experts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(2, 8))
    top_k = draw(st.integers(1, min(experts, 4)))
    share = np.log(rng.dirichlet(np.full(experts, 0.5), size=layers) + 1e-3)
    listed: list[Step] = []
    for position in range(draw(st.integers(1, 40))):
        n = int(rng.integers(1, 5))
        ids = np.argsort(share + rng.gumbel(size=(n, layers, experts)))[:, :, -top_k:]
        one = step(ids.tolist(), position, drafted=n - 1)
        listed.append(replace(one, kind=Kind.PREFILL) if rng.random() < 0.2 else one)
    return trace(listed, experts), draw(st.integers(0, layers * experts + 2))


def by_driver(of: Steps, policy: str, slots: int) -> Driver:
    loaded = load_policy(policy)
    return count(of.steps(), loaded, setup_for(of.header.target, rates(), loaded, slots, 0))


def by_engine(of: Steps, policy: str, slots: int, prices: Rates) -> Driver:
    loaded = load_policy(policy)
    setup = setup_for(of.header.target, prices, loaded, slots, 0)
    driver = Driver(loaded, setup, future_of(of.header.target, of.steps()) if loaded.clairvoyant else None)
    engine = Engine(driver, prices)
    for index, one in enumerate(of.steps()):
        replay_step(engine, index, one)
    return driver


def of_counters(c: Counters) -> tuple[int, ...]:
    return c.needed, c.hits, c.assignments, c.hit_assignments


def of_counts(c: Counts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    columns = c.needed, c.hits, c.assignments, c.hit_assignments
    return tuple(map(c.in_prefill, columns)), tuple(map(c.in_decode, columns))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12, deadline=None)
@given(traces())
def test_equals_the_driver_at_any_number_of_slots(policy, case):
    of, slots = case
    driver = by_driver(of, policy, slots)
    assert of_counts(count_fast(of, policy, slots)) == (of_counters(driver.prefill), of_counters(driver.decode))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=4, deadline=None)
@given(traces())
def test_time_does_not_change_what_on_demand_policies_hit(policy, case):
    """Nothing is prefetched, so the event-level run counts the same with a free link, a slow one and none at all."""
    of, slots = case
    counted = of_counts(count_fast(of, policy, slots))
    for prices in (rates(), rates(gpu=7, cpu=30, dense=5), rates(copy=100, gpu=7, cpu=30, dense=5, copy_fixed=3)):
        run = by_engine(of, policy, slots, prices)
        assert (of_counters(run.prefill), of_counters(run.decode)) == counted


@pytest.mark.parametrize("policy", POLICIES)
def test_a_real_trace_by_layer(policy):
    of = Limited(open_trace("gpt-oss-20b"), 30)
    counts = count_fast(of, policy, 250)
    assert of_counts(counts)[1] == of_counters(by_driver(of, policy, 250).decode)
    assert counts.needed.shape == (30, 24)
    assert (counts.by_layer(counts.needed) == 30 * 4).all()
    assert counts.by_layer(counts.hits).sum() == counts.in_decode(counts.hits)


def test_toy_sequences_o15():
    def hits(keys: list[int], policy: str, slots: int) -> int:
        counts = count_fast(trace(decode(*([k] for k in keys)), 5), policy, slots)
        return int(counts.hits.sum())

    mixed, hot = [0, 1, 2, 0, 1, 3, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    assert [hits([0, 1, 2] * 4, p, c) for p, c in (("ar-lru", 2), ("min:bypass=false", 2), ("ar-lru", 3))] == [0, 5, 9]
    assert [hits(mixed, p, 2) for p in ("ar-lru", "lfu", "min:bypass=false")] == [0, 1, 3]
    assert [hits(mixed, p, 3) for p in ("ar-lru", "lfu", "min:bypass=false")] == [4, 4, 5]
    assert [hits(hot, p, 2) for p in ("ar-lru", "lfu", "min:bypass=false")] == [2, 4, 4]
    assert [hits(hot, p, 3) for p in ("ar-lru", "lfu", "min:bypass=false")] == [2, 4, 6]


def test_event_atomic_lru_c1():
    counts = count_fast(trace(decode([0, 1], [0, 2], [0, 1], [0, 3], [0, 1], layers=3), 4), "ar-lru", 6)
    assert (int(counts.hits.sum()), int(counts.misses.sum())) == (12, 18)
    assert counts.slots == (2, 2, 2)


def test_accesses_by_hand():
    """Two tokens of two layers: loads, order, neighbours in time."""
    first = replace(step([[[1, 0], [2, 3]], [[1, 2], [3, 0]]]), kind=Kind.PREFILL)
    a = Accesses.of(trace([first, step([[[2, 1], [0, 1]]])], 4))
    assert a.keys.tolist() == [0, 1, 2, 4, 6, 7, 1, 2, 4, 5]
    assert a.loads.tolist() == [1, 2, 1, 1, 1, 2, 1, 1, 1, 1]
    assert a.events.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert a.following.tolist() == [0, 6, 7, 8, 0, 0, 0, 0, 0, 0]
    assert a.uses.tolist() == [1, 1, 1, 1, 1, 1, 2, 2, 2, 1]
    assert a.first_from(2).tolist() == [2, 3, 4, 5, 6, 9]
    assert a.run_starts.tolist() == [False, True]
    assert a.only_decode().keys.tolist() == [1, 2, 4, 5]
    assert a.assignments.tolist() == [4, 2]


def test_slots_are_shared_out_as_in_a_run():
    assert equal_slots(7, 3, 4) == (3, 2, 2)
    assert equal_slots(99, 3, 4) == (4, 4, 4)


def test_refuses_what_needs_a_driver():
    with pytest.raises(InputError, match="moe-spac: cannot be counted"):
        count_fast(trace(decode([0]), 2), "moe-spac", 1)


def test_an_empty_trace():
    some = trace(decode([0]), 2)
    nothing = count_fast(Trace(some.header, []), "min", 1)
    assert nothing.in_decode(nothing.needed) == 0
