"""Modelled forecasts have the stated accuracy, and no prefetcher begins or keeps what comes too late."""

import numpy as np
import pytest
from by_hand import begin
from policy_loop import Host, make_setup, random_routing, sets

from moe_spac.policies.driver import Driver
from moe_spac.policies.future import Future
from moe_spac.policies.interface import Forecast, Key, Setup
from moe_spac.policies.load import load_policy
from moe_spac.policies.predictors import Ahead, Modelled, PatientLru, spoiled


@pytest.mark.parametrize(("recall", "precision"), [(1.0, 1.0), (0.8, 1.0), (0.7, 0.5), (1.0, 0.75), (0.847, None)])
def test_recall_and_precision_are_as_stated(recall, precision):
    rng = np.random.default_rng(0)
    needed = np.array([2, 5, 7, 11])
    right = wrong = 0
    for _ in range(1500):
        seen, others = spoiled(needed, 32, recall, precision, rng)
        assert np.isin(seen, needed).all()
        assert not np.isin(others, needed).any()
        assert len(np.unique(others)) == len(others)
        assert precision is not None or len(seen) + len(others) == 4
        right, wrong = right + len(seen), wrong + len(others)
    assert abs(right / 6_000 - recall) < 0.02
    assert abs(right / (right + wrong) - (recall if precision is None else precision)) < 0.02


def test_a_predictor_says_the_same_of_a_step_whenever_it_is_asked():
    routing = random_routing(np.random.default_rng(1), 30, 3, 16, 3)
    made = []
    for steps in (range(30), reversed(range(30))):
        predictor = Modelled(0.7, None)
        predictor.reveal(setup_of(3, 16, seed=5), Future.of(3, 16, routing))
        made.append({step: predictor.forecasts(step) for step in steps})
    assert made[0] == made[1]
    other = Modelled(0.7, None)
    other.reveal(setup_of(3, 16, seed=6), Future.of(3, 16, routing))
    assert [other.forecasts(step) for step in range(30)] != [made[0][step] for step in range(30)]


def test_a_perfect_predictor_says_what_is_needed():
    routing = random_routing(np.random.default_rng(2), 20, 3, 16, 3)
    predictor = Modelled(1.0, 1.0)
    predictor.reveal(setup_of(3, 16), Future.of(3, 16, routing))
    for step, ids in enumerate(routing):
        assert predictor.forecasts(step) == [np.unique(ids[:, layer]).tolist() for layer in range(3)]
    assert predictor.forecasts(20) == [[], [], []]


def setup_of(layers: int, experts: int, seed: int = 0) -> Setup:
    return make_setup(load_policy("ar-lru"), layers, experts, 4, 2, seed=seed)


class Told(Ahead):
    """Forecasts as the test gives them."""


AHEAD = [
    *("gate-lookahead:layers=3", "gate-lookahead:layers=2,exact=true", "gate-lookahead:layers=3,top=2,most=1"),
    *("dali:u=0", "moe-infinity:request=2", "moe-infinity-release:prefetch=true,request=2"),
    *("promoe", "promoe:stride=1,recall=0.5,precision=0.3", "sp-moe", "sp-moe:known=verify", "moe-speq:sure=0"),
]


@pytest.mark.parametrize("spec", AHEAD)
def test_nothing_is_begun_for_a_layer_that_has_passed(spec):
    """Whatever the moment at which the link asks: a stale wish is dropped."""
    rng = np.random.default_rng(3)
    policy = load_policy(spec)
    routing = random_routing(rng, 30, 5, 12, 2)
    host = Host(policy, make_setup(policy, 5, 12, 4, draft_length=3), routing, rng, slow=True)
    host.wall_ns = 600_000
    host.play(ahead=3)
    layer, seen = -1, 0
    for _, what, which, *_ in host.record:
        if what == "gate":
            layer = which
        elif what == "prefetch":
            assert which.layer > layer
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("spec", ["gate-lookahead", "promoe:stride=1,recall=0,precision=none"])
def test_a_wrong_prefetch_that_is_pushed_aside_is_given_up_once_its_layer_has_begun(spec):
    policy = load_policy(spec)
    routing = sets([0], layers=3)
    driver = begin(policy, 3, 2, 2, routing=routing)
    driver.forecast(Forecast("next-gate", 1, {1: 1.0}))
    plan = driver.gate(0, np.array([[0]]))
    wrong = driver.next_fetch()
    assert wrong is not None
    assert (plan.copies, wrong) == ((0,), Key(1, 1))
    assert driver.keep_fetch(wrong)  # its layer is still to come
    driver.landed(Key(0, 0), 0)
    driver.layer_ends(None)
    driver.gate(1, np.array([[0]]))
    assert not driver.keep_fetch(wrong)
    driver.cancelled(wrong, 300)
    assert (driver.total.cancelled, driver.total.cancelled_bytes) == (1, 300)
    assert driver.next_fetch() is None or driver.cache.flying  # the next layer's turn


def test_a_prefetch_displaces_nothing_that_is_awaited():
    """Layer 1 has slots for 0 and 1, 0 the older; 0 is forecast, so 1 makes room for 2. If both are, nothing does.
    What the layer itself copies when it has begun displaces the older one."""
    ahead = Told()
    lru = PatientLru(ahead)
    setup = make_setup(load_policy("ar-lru"), 2, 4, 2)
    ahead.setup(setup)
    lru.setup(setup)
    lru.placed([Key(1, 0), Key(1, 1)])
    ahead.name(1, [0, 2])
    driver = Driver(load_policy("ar-lru"), setup)
    view = driver.cache_view
    for key in (Key(1, 0), Key(1, 1)):
        driver.cache.place(key)
    there = driver.cache.evictable[1]
    assert lru.first(1, there, view) == Key(1, 1)
    assert ahead.replaces(Key(1, 2), Key(1, 1), view)
    ahead.name(1, [0, 1, 2])
    assert lru.first(1, there, view) == Key(1, 0)
    assert not ahead.replaces(Key(1, 2), Key(1, 0), view)
    ahead.name(1, [0])
    ahead.layer = 1
    assert lru.first(1, there, view) == Key(1, 0)


def test_a_full_layer_does_not_hold_up_the_others():
    """Layer 1 has one slot, which holds what is forecast for it: the link goes on with layer 2 at once."""
    policy = load_policy("gate-lookahead:layers=2")
    driver = begin(policy, 3, 4, 1)
    driver.cache.place(Key(1, 0))
    for layer in (1, 2):
        driver.forecast(Forecast("next-gate", layer, {0: 1.0, 1: 1.0}))
    driver.gate(0, np.array([[3]]))
    assert driver.next_fetch() == Key(2, 0)
    assert driver.cache.resident.keys() == {Key(1, 0)}
