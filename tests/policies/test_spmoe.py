"""SP-MoE: the cutoff by hand, what drafting hides, and that forecasts are for verification only."""

import numpy as np
import pytest
from by_hand import begin, info, serve
from hand import rates, step, trace
from policy_loop import make_setup

from moe_spac.policies.driver import Driver
from moe_spac.policies.future import Future
from moe_spac.policies.interface import Key
from moe_spac.policies.load import describe, load_policy
from moe_spac.policies.spmoe import DraftTime
from moe_spac.simulator.engine import Engine, replay_step, setup_for
from moe_spac.traces.schema import Kind

PERFECT = "sp-moe:recall=1,precision=1"


def routing(steps, layers=3):
    """Every step needs two experts in every layer that it never needed before."""
    return [np.array([[[2 * i, 2 * i + 1]] * layers]) for i in range(steps)]


def drafted(driver, ns=0, most=99):
    """What the link brings in between two passes, each copy taking `ns`."""
    driver.step_ends(0, np.array([True, False]))
    return fetched(driver, ns, most)


def fetched(driver, ns=0, most=99):
    keys = []
    while len(keys) < most and (key := driver.next_fetch()) is not None:
        keys.append(tuple(key))
        driver.landed(key, ns)
    return keys


def test_the_cutoff_by_hand():
    """A copy takes 100 us, layers 150. Two copies of 125 us while drafting and more to do: drafting takes 250. Then
    layer 0 needs 200 of 250, layer 1 400 of 250 + 150, and layer 2 600 of 250 + 300: two layers come in."""
    driver = begin(load_policy(PERFECT), 3, 12, 8, routing=routing(5))
    for layer in range(3):
        serve(driver, layer, 0, 1, wall=150_000)
    assert drafted(driver, 125_000, most=2) == [(0, 2), (0, 3)]  # no limit is known yet
    driver.step_begins(info(1))
    for layer in range(3):
        serve(driver, layer, 2, 3, wall=150_000)
    assert drafted(driver) == [(0, 4), (0, 5), (1, 4), (1, 5)]


def test_the_cutoff_keeps_within_the_slots():
    # Four slots hold what two layers need, whatever the time.
    policy = load_policy(PERFECT)
    driver = Driver(policy, setup := make_setup(policy, 4, 12, 1, draft_length=3), Future.of(4, 12, routing(3, 4)))
    assert setup.slots == (4,)
    driver.step_begins(info(0))
    assert drafted(driver) == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_a_fixed_cutoff():
    for cutoff in range(4):
        driver = begin(load_policy(f"{PERFECT},cutoff={cutoff}"), 3, 12, 8, routing=routing(3))
        assert drafted(driver) == [(layer, e) for layer in range(cutoff) for e in (2, 3)]


def test_forecasts_are_for_drafts_only():
    driver = begin(load_policy(PERFECT), 3, 12, 8, draft=0, routing=routing(3))
    assert drafted(driver) == []  # nothing drafts
    driver.step_begins(info(1, Kind.DECODE))
    assert fetched(driver) == []
    driver = begin(load_policy(PERFECT), 3, 12, 8, routing=routing(3))
    assert len(drafted(driver, most=1)) == 1
    driver.step_begins(info(1, Kind.PREFILL))
    assert fetched(driver) == []
    late = begin(load_policy(f"{PERFECT},known=verify,cutoff=3"), 3, 12, 8, routing=routing(3))
    fetched(late)  # the first pass, known as it begins
    assert drafted(late) == []
    late.step_begins(info(1))
    assert fetched(late)[0] == (0, 2)


def test_draft_time_is_what_the_link_did():
    time = DraftTime()
    for copies, wishes, expected in [
        ([], True, None),  # nothing was asked for: nothing is known
        ([100, 100], True, 200.0),
        ([50], False, 200.0),  # it had nothing more to do
        ([300], False, 220.0),  # but drafting took at least so long: 200 + .2 * 100
        ([120], True, 200.0),
    ]:
        time.begins()
        for ns in copies:
            time.asked(Key(0, 0))
            time.landed(ns)
        time.ends(wishes)
        assert time.ns == pytest.approx(expected)
    time.begins()
    time.asked(Key(0, 0))
    time.landed(0)  # a host without time
    time.ends(True)
    assert time.ns == pytest.approx(200.0)


def test_copies_hide_behind_the_draft():
    """One layer, a new pair of experts each time, two tokens. A pass: 2 copies of 100, 2 experts of 10, of which
    the first runs during the second copy. Drafting takes 500, which hides all copies but those of the first pass."""
    steps = [step([[[2 * i, 2 * i + 1]]] * 2, position=2 * i, drafted=1, accepted=1) for i in range(5)]
    waits = {}
    for spec in ("ar-lru:scope=global", PERFECT, f"{PERFECT},known=verify", "sp-moe:recall=0,precision=1"):
        policy = load_policy(spec)
        made = trace(steps, 10)
        speed = rates(copy=100, gpu=10, draft_token_ns=500)
        setup = setup_for(made.header.target, speed, policy, 4, 1)
        engine = Engine(Driver(policy, setup, Future.of(1, 10, [s.experts for s in steps])), speed)
        for index, one in enumerate(steps):
            replay_step(engine, index, one)
        waits[spec] = [one.gpu.get("wait_copy", 0) for one in engine.steps]
    assert waits["ar-lru:scope=global"] == [190] * 5
    assert waits["sp-moe:recall=0,precision=1"] == [190] * 5
    assert waits[PERFECT] == [190, 0, 0, 0, 0]
    assert waits[f"{PERFECT},known=verify"] == [190] * 5  # a layer's own copies cannot be earlier than its gate


def test_it_says_that_its_forecasts_are_modelled():
    for name in ("sp-moe", "moe-speq", "promoe"):
        about = describe(name)
        assert about["clairvoyant"]
        assert "MODELLED" in about["about"]
