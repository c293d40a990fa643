"""The placement that never changes."""

import numpy as np
from policy_loop import COSTS, Host, random_routing

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Key, Setup
from moe_spac.policies.load import load_policy


def placed(spec, slots, layers=3, experts=4):
    driver = Driver(load_policy(spec), Setup(layers, experts, 2, 1, (slots,), COSTS))
    return sorted(driver.cache.resident)


def test_last_layers_are_resident():
    assert placed("static", 8) == [Key(layer, e) for layer in (1, 2) for e in range(4)]


def test_a_partly_filled_layer():
    assert placed("static", 5) == [Key(1, 0), *[Key(2, e) for e in range(4)]]
    assert placed("static:partial=false", 5) == [Key(2, e) for e in range(4)]


def test_more_slots_than_experts():
    assert len(placed("static", 99)) == 12


def test_hits_are_the_share_of_the_placed_experts():
    routing = random_routing(np.random.default_rng(3), 30, 3, 4, 2)
    driver = Host(load_policy("static"), Setup(3, 4, 2, 1, (5,), COSTS), routing).play()
    there = {(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)}
    expected = sum((layer, e) in there for ids in routing for layer in range(3) for e in np.unique(ids[:, layer]))
    assert driver.total.hits == expected
    assert driver.total.evictions == driver.total.copies == 0


def test_large_batches_are_streamed():
    driver = Driver(load_policy("static"), Setup(1, 64, 2, 1, (2,), COSTS))
    small, large = np.array([[0, 5]] * 31), np.array([[0, 5]] * 32)
    assert driver.gate(0, small).cpu == (5,)
    plan = driver.gate(0, large)
    assert (plan.gpu, plan.copies, plan.kept, plan.cpu) == ((0,), (5,), frozenset(), ())
