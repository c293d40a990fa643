"""MoE-Infinity: matching by hand, priorities, and a request that is known again."""

import numpy as np
import pytest
from policy_loop import Host, make_setup, random_routing, sets

from moe_spac.policies.infinity import Collection, Matched
from moe_spac.policies.interface import Demand, Key, StepInfo
from moe_spac.policies.load import load_policy
from moe_spac.traces.schema import Kind


def collection(*matrices, capacity=8, by_layer=False):
    first = np.array(matrices[0], float)
    layers, experts = first.shape
    made = Collection(layers, experts, capacity, by_layer)
    for matrix in matrices:
        made.add(np.array(matrix, float))
    made.begin()
    return made


def nearest(made, *rows):
    for layer, row in enumerate(rows):
        made.see(layer, np.array(row, float))
    return made[made.nearest()].tolist()


A, B = [[4, 0, 0], [0, 4, 0]], [[0, 4, 0], [0, 0, 4]]


def test_the_nearest_by_cosine_of_what_was_seen_so_far():
    assert nearest(collection(A, B), [1, 0, 0]) == A
    assert nearest(collection(A, B), [0, 3, 0]) == B
    assert nearest(collection(A, B), [2, 1, 0], [0, 0, 3]) == B  # 8 against 4 + 12, the norms being equal
    assert nearest(collection(B, A), [1, 1, 0]) == B  # equals: the older one
    assert collection(A).nearest() is None  # nothing seen
    assert nearest(collection(A, B), [0, 0, 1], [0, 0, 1]) == B  # half of it
    blank = collection(A)
    blank.see(0, np.array([0.0, 2, 1]))
    assert blank.nearest() is None  # nothing in common


def test_together_and_layer_by_layer_differ():
    """[1 1] twice against [10 0][1 1] and [3 3][0 0]. Together 12 / (2 * 10.1) = .594 and 6 / (2 * 4.24) = .707; by
    layer (.707 + 1) / 2 and (1 + 0) / 2."""
    one, other = [[10, 0], [1, 1]], [[3, 3], [0, 0]]
    assert nearest(collection(one, other), [1, 1], [1, 1]) == other
    assert nearest(collection(one, other, by_layer=True), [1, 1], [1, 1]) == one


def test_a_full_collection_gives_up_what_is_most_alike():
    made = collection(A, B, [[0, 5, 0], [0, 1, 4]], capacity=2)
    assert nearest(made, [0, 1, 0]) == [[0, 5, 0], [0, 1, 4]]
    made.begin()
    assert nearest(made, [1, 0, 0]) == A


def test_priority_and_worth_by_hand():
    """Four layers; the request that is over chose expert 0 three times of four, and 1 once, in every layer. At layer 1
    p = .75 and .25, so layer 2 is worth 3/4 of p and layer 3 half of it: .5625 .1875 .375 .125."""
    part = Matched(4, 1)
    setup = make_setup(load_policy("moe-infinity"), 4, 3, 2)
    part.setup(setup)
    for step in range(2):
        part.step_begins(StepInfo(step, Kind.DECODE, np.zeros(4, np.int32), np.zeros(4, bool)))
        for layer in range(4 if step == 0 else 2):
            part.used(Demand(layer, (0, 1), (3, 1), np.zeros((4, 1))), None)  # type: ignore[arg-type]
    order = []
    while (key := part.next_fetch(Empty())) is not None:  # type: ignore[arg-type]
        order.append(tuple(key))
    assert order == [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert part.worth[:, 0] == pytest.approx([0.75, 0.75 * 3 / 4, 0.75 / 2, 0.75 / 4])


class Empty:
    def resident(self, key):
        return False

    def in_flight(self, key):
        return False

    def residents(self, layer):
        return []


def test_a_request_is_known_again():
    """Three layers, room for three experts. A needs 0 1 2 by layer, B 3 4 5. When A comes back, everything of B is
    in the cache; its first gate says A, and the rest is brought in."""
    a, b = np.array([[[0], [1], [2]]]), np.array([[[3], [4], [5]]])
    routing = [x for x in (a, b, a) for _ in range(3)]
    kinds = [Kind.PREFILL, Kind.DECODE, Kind.DECODE] * 3
    policy = load_policy("moe-infinity")
    host = Host(policy, make_setup(policy, 3, 6, 1, 1), routing)
    host.play(kinds)
    # Prompts fetch and keep, by recency as nothing is known yet; within a request all else hits.
    assert (host.driver.decode.hits, host.driver.decode.needed) == (18, 18)
    part = [x for x in (a, b) for _ in range(3)] + [a]
    policy = load_policy("moe-infinity:request=3")
    host = Host(policy, make_setup(policy, 3, 6, 1, 1), part)
    host.play([Kind.DECODE] * 7)
    back = [note[2] for note in host.record if note[0] == 6 and note[1] == "prefetch"]
    assert back == [Key(1, 1), Key(2, 2)]
    assert host.driver.total.prefetches_used == 2


def test_the_release_is_lfu_in_one_pool():
    routing = random_routing(np.random.default_rng(6), 60, 3, 8, 2)
    totals = []
    for spec in ("moe-infinity-release", "lfu-in-cache:reset=false,scope=global"):
        policy = load_policy(spec)
        totals.append(Host(policy, make_setup(policy, 3, 8, 3), routing).play().total)
    assert totals[0] == totals[1]
    assert totals[0].prefetches == 0


def test_prompts_are_not_counted():
    policy = load_policy("moe-infinity")
    host = Host(policy, make_setup(policy, 2, 8, 3), sets(*[[0, 1]] * 6, layers=2))
    host.play([Kind.PREFILL] * 6)
    assert host.driver.total.prefetches == 0


@pytest.mark.parametrize("bad", ["capacity=0", "request=0"])
def test_refuses_nonsense(bad):
    with pytest.raises(Exception, match="must be at least 1"):
        load_policy(f"moe-infinity:{bad}")
