"""Prefetch by later gates: the nearest layer first, no more than asked for."""

import numpy as np
import pytest
from hand import decode, setup
from policy_loop import Host, make_setup, random_routing, sets

from moe_spac.policies.load import load_policy
from moe_spac.simulator.replay import count

NEW = [[e] for e in range(6)]  # every step needs something new in every layer


def played(spec, routing, slots=2, ahead=3, experts=8):
    policy = load_policy(spec)
    host = Host(policy, make_setup(policy, routing[0].shape[1], experts, slots), routing)
    host.play(ahead=ahead)
    return host


def test_all_but_the_first_layer_are_there_in_time():
    routing = sets(*NEW, layers=3)
    assert played("ar-lru", routing).driver.total.hits == 0
    total = played("gate-lookahead", routing).driver.total
    assert (total.needed, total.hits, total.prefetches, total.prefetches_used) == (18, 12, 12, 12)


def test_exact_gates_need_no_channel():
    pregated = count(decode(*NEW, layers=3), load_policy("gate-lookahead:exact=true"), setup(3, 6, [1, 1, 1])).total
    assert (pregated.hits, pregated.prefetches, pregated.prefetches_used) == (12, 12, 12)
    told = count(decode(*NEW, layers=3), load_policy("gate-lookahead"), setup(3, 6, [1, 1, 1])).total
    assert (told.hits, told.prefetches) == (0, 0)
    assert load_policy("gate-lookahead:exact=true").clairvoyant
    assert not load_policy("gate-lookahead").clairvoyant


def fetched(host):
    return [(step, *note[1]) for step, *note in host.record if note[0] == "prefetch"]


def test_the_nearest_layer_comes_first_and_in_it_what_most_tokens_chose():
    # Two tokens: expert 3 is chosen by both, 1 and 5 by one each.
    routing = [np.array([[[1, 3]] * 4, [[3, 5]] * 4])]
    assert fetched(played("gate-lookahead:layers=3", routing, slots=3))[:9] == [
        (0, layer, e) for layer in (1, 2, 3) for e in (3, 1, 5)
    ]
    assert fetched(played("gate-lookahead:layers=1,top=1", routing, slots=3)) == [(0, la, 3) for la in (1, 2, 3)]


def test_one_missing_expert_a_gate_and_further_on_where_all_of_the_next_are_there():
    """AdapMoE: layer 0's gate brings in one of layer 1's two, and the other is missed; layer 1's one of layer 2's."""
    routing = sets([0, 1], [0, 1], layers=3)
    host = played("gate-lookahead:layers=3,top=2,most=1", routing)
    assert fetched(host) == [(0, 1, 0), (0, 2, 0)]
    total = host.driver.total
    assert (total.hits, total.fetches, total.prefetches_used) == (2 + 6, 4, 2)
    # Layer 1 has what it needs and layer 2 does not: the gate of layer 0 looks past the one to the other.
    mixed = [*sets([0, 1], layers=3), np.array([[[0, 1], [0, 1], [4, 5]]])]
    assert fetched(played("gate-lookahead:layers=3,top=2,most=1", mixed))[2:] == [(1, 2, 4), (1, 2, 5)]
    assert fetched(played("gate-lookahead:layers=1,top=2,most=1", mixed))[2:] == [(1, 2, 4)]


def test_without_the_channel_it_is_ar_lru():
    routing = random_routing(np.random.default_rng(4), 40, 3, 8, 2)
    assert played("gate-lookahead", routing, ahead=0).driver.total == played("ar-lru", routing).driver.total


@pytest.mark.parametrize("bad", ["layers=0", "layers=4", "top=-1", "most=-1"])
def test_refuses_nonsense(bad):
    with pytest.raises(Exception, match="must be"):
        load_policy(f"gate-lookahead:{bad}")
