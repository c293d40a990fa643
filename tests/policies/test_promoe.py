"""ProMoE: forecasts a stride ahead, at stated accuracy; what is there first runs first."""

import numpy as np
from hand import decode, setup
from policy_loop import make_setup

from moe_spac.policies.interface import Demand, Key, Where
from moe_spac.policies.load import load_policy
from moe_spac.policies.promoe import NearestFirst
from moe_spac.simulator.replay import count

NEW = [[e] for e in range(6)]


def counted(spec, layers=4, slots=2, steps=None):
    return count(steps or decode(*NEW, layers=layers), load_policy(spec), setup(layers, 6, [slots] * layers)).total


def test_the_first_stride_of_layers_cannot_be_foreseen():
    for stride in (1, 2, 3, 4):
        total = counted(f"promoe:stride={stride},recall=1")
        assert (total.hits, total.prefetches_used) == (6 * (4 - stride), 6 * (4 - stride))


def test_accuracy_is_what_it_says():
    steps = decode(*[[e % 6] for e in range(300)], layers=4)
    seen = counted("promoe:stride=1", steps=steps, slots=1)
    assert abs(seen.prefetches_used / (3 * 300) - 0.847) < 0.03  # one of one is forecast, and 84.7 % are right
    blind = counted("promoe:stride=1,recall=0,precision=1", steps=steps, slots=1)
    assert (blind.hits, blind.prefetches) == (0, 0)


class Flying:
    """A view in which one expert is on its way."""

    def __init__(self, key):
        self._key = key

    def in_flight(self, key):
        return key == self._key


def test_residents_then_what_is_coming_then_the_rest():
    part = NearestFirst()
    part.setup(make_setup(load_policy("promoe"), 1, 8, 2))
    demand = Demand(0, (1, 3, 5), (1, 1, 1), np.array([[1, 3, 5]]), held=frozenset({5}))
    answer = part.dispatch(demand, Flying(Key(0, 3)))  # type: ignore[arg-type]
    assert answer == [(5, Where.GPU), (3, Where.FETCH), (1, Where.FETCH)]
