"""`marginal`: its prices by hand, what it learns and moves in small runs, and that numpy and C decide the same."""

import copy
import pickle
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_loop import Host, make_setup, random_routing, sets
from twins import built

from moe_spac.policies import marginal, pool, reuse, split
from moe_spac.policies.interface import Costs, Demand, Forecast, Key, LayerReport, StepInfo
from moe_spac.policies.marginal import Marginal, saved_by_a_hit, slowing_of_cpu
from moe_spac.policies.pool import ABSENT, AWAY, RESIDENT
from moe_spac.traces.schema import Kind

# Copy 100, CPU 40 an expert, 20 for the first and 5 to join, GPU 10; host memory gives an expert in 25 ns.
BY_HAND = Costs(10, 0, 0.0, 20, 10, 30, 0.0, 5, 0, 100, host_bytes_ns=25)


def test_what_a_hit_saves_by_hand():
    """CPU (40 ns) and link (100) do one in 40 * 100 / 140 = 28.6 ns, which host memory allows; the GPU takes 10."""
    assert saved_by_a_hit(BY_HAND, cpu=True) == pytest.approx(4000 / 140 - 10)
    assert saved_by_a_hit(BY_HAND, cpu=False) == 100  # the GPU computes it either way
    slow_memory = Costs(10, 0, 0.0, 20, 10, 30, 0.0, 5, 0, 100, host_bytes_ns=35)
    assert saved_by_a_hit(slow_memory, cpu=True) == 25
    slow_gpu = Costs(200, 0, 0.0, 20, 10, 30, 0.0, 5, 0, 100)
    assert saved_by_a_hit(slow_gpu, cpu=True) == 0


def test_what_a_copy_costs_the_cpu_by_hand():
    """Memory gives 40 experts a us, the link takes 10 of them for 100 ns, the CPU could read 33.3 and gets 30: it
    loses a tenth of the time."""
    assert slowing_of_cpu(BY_HAND, cpu=True) == pytest.approx(10)
    assert slowing_of_cpu(BY_HAND, cpu=False) == 0
    unlimited = Costs(10, 0, 0.0, 20, 10, 30, 0.0, 5, 0, 100)
    assert slowing_of_cpu(unlimited, cpu=True) == 0


def started(layers=2, experts=8, slots=2, drafts=True, **more):
    policy = Marginal(drafts=drafts)
    policy.setup(make_setup(policy, layers, experts, slots, **more))
    return policy


class All:
    """Everything named is resident and may be evicted; `coming` is on its way, `room` slots are free."""

    def __init__(self, keys=(), coming=None, room=0):
        self.keys, self.coming, self.room = sorted(keys), coming, room

    def __contains__(self, key):
        return key in self.keys

    def __iter__(self):
        return iter(self.keys)

    def __len__(self):
        return len(self.keys)

    def resident(self, key):
        return key in self.keys

    def in_flight(self, key):
        return key == self.coming

    def residents(self, layer):
        return [key.expert for key in self.keys if key.layer == layer]

    def free(self, layer):
        return self.room


def begin(policy, kind=Kind.DECODE, n=1):
    policy.step_begins(StepInfo(0, kind, np.zeros(n, np.int32), np.arange(n) > 0))


def test_a_forecast_is_fetched_if_it_is_worth_the_copy():
    """An expert that the next gate names is worth one use times 0.5, however cold it is; a use saves 18.6 ns, and a
    copy costs a CPU that is always busy 10."""
    policy = started(layers=3, costs=BY_HAND)
    held = set(policy.placement())
    begin(policy)
    assert policy.next_fetch(All(held)) is None
    policy.forecast(Forecast("next-gate", 1, {6: 2.0}))
    assert policy.next_fetch(All(held)) == Key(1, 6)  # between passes copies cost the CPU nothing
    policy.transfer_dropped(Key(1, 6))
    policy._layer = 0  # within a pass
    policy.forecast(Forecast("next-gate", 2, {6: 2.0}))
    assert policy._busy * policy._slowing / policy._saved == pytest.approx(10 / (4000 / 140 - 10))
    assert policy.next_fetch(All(held)) is None  # 0.5 uses, at a price of 0.54
    policy._right[1] = 0.6
    policy.forecast(Forecast("next-gate", 2, {6: 2.0}))
    assert policy.next_fetch(All(held)) == Key(2, 6)


def nothing_to_ask_for():
    """All experts are resident but one that is copied for the running layer, and a look for work has seen that."""
    policy = started(layers=1, experts=4, slots=3, costs=BY_HAND)
    held = set(policy.placement())
    begin(policy)
    policy.reuse.demand[0] = 0.5
    policy._price(0)
    assert policy.next_fetch(All(held, room=1)) == Key(0, 3)
    view = All(held, coming=Key(0, 3))
    assert policy.next_fetch(view) is None
    policy._pool.put(Key(0, 3), ABSENT)  # as if its copy were the running layer's
    policy.reuse.demand[0] = 0.5
    policy._price(0)
    assert policy.next_fetch(view) is None
    return policy, held


def test_nothing_is_asked_for_when_all_are_there_or_coming():
    nothing_to_ask_for()


def test_what_was_copied_for_a_layer_only_may_be_fetched_later():
    policy, held = nothing_to_ask_for()
    policy.layer_ends(LayerReport(0, 100, 0, 0, 0, 0))  # nobody gave it a slot
    assert policy.next_fetch(All(held, room=1)) == Key(0, 3)


def test_what_took_a_free_slot_may_be_evicted():
    """Hosts give free slots without asking whom to evict for them."""
    policy = started(layers=1, experts=4, slots=3, costs=BY_HAND)
    held, everything = set(policy.placement()), {Key(0, e) for e in range(4)}
    begin(policy)

    def ask(needed, resident, room):
        there = frozenset(e for e in needed if Key(0, e) in resident)
        policy.dispatch(Demand(0, needed, (1,) * len(needed), np.array([needed]), held=there), All(resident, room=room))

    ask((2, 3), held, room=1)
    for _ in range(3):
        ask((0, 1, 2), everything, room=0)
    assert policy.surrender(0, All(everything), All(everything)) == Key(0, 3)


def test_how_often_forecasts_are_right_is_learnt_by_distance():
    policy = Marginal()
    rng = np.random.default_rng(1)
    host = Host(policy, make_setup(policy, 6, 16, 4), random_routing(rng, 120, 6, 16, 2))
    host.play(ahead=2)  # true ones
    assert policy._right[1] > 0.9
    assert policy._right[2] == 0.5  # the last forecast before its gate is the one that counts


def test_with_nothing_to_gain_nothing_moves():
    """Where the GPU takes longer than the CPU, no copy is worth its time."""
    policy = Marginal()
    costs = Costs(200_000, 0, 0.0, 0, 1000, 1000, 0.0, 0, 0, 90_000)
    host = Host(policy, make_setup(policy, 2, 8, 2, costs=costs), sets([5, 6], [5, 7], [5, 6], layers=2))
    total = host.play().total
    assert (total.copies, total.cpu) == (0, total.needed - total.hits)


@pytest.mark.parametrize(("decide_ns", "copies"), [(36, True), (38, False)])
def test_it_moves_nothing_where_deciding_takes_longer_than_all_that_can_be_saved(decide_ns, copies):
    """Two experts a token, 18.6 ns each."""
    policy = Marginal()
    setup = make_setup(policy, 2, 8, 2, costs=BY_HAND, decide_ns=decide_ns)
    host = Host(policy, setup, sets(*[[5, 6], [5, 7]] * 10, layers=2))
    assert (host.play().total.copies > 0) is copies


def test_without_a_cpu_every_miss_is_fetched():
    policy = Marginal()
    setup = make_setup(policy, 1, 8, 4, cpu=False, decide_ns=10**9)  # there is no other way, however long it takes
    host = Host(policy, setup, sets([4, 5], [4, 5], [4, 5], [4, 5]))
    total = host.play().total
    assert (total.cpu, total.fetches) == (0, total.needed - total.hits)
    assert total.hits > 0


def test_nothing_is_fetched_for_a_prompt_to_stay():
    policy = Marginal(background=False)
    host = Host(policy, make_setup(policy, 2, 8, 2), random_routing(np.random.default_rng(0), 3, 2, 8, 2, tokens=6))
    before = set(host.driver.cache.resident)
    host.play([Kind.PREFILL] * 3)
    assert set(host.driver.cache.resident) == before


def test_slots_that_come_back_are_used():
    """After two slots went and came back, what takes them is known as resident to the policy, too."""
    policy = Marginal()
    routing = random_routing(np.random.default_rng(3), 40, 2, 12, 3)
    host = Host(policy, make_setup(policy, 2, 12, 4, top_k=3), routing)
    host.play(slots={5: (5,), 12: (8,)})
    host.driver.cache.check()
    assert len(host.driver.cache.resident) == 8
    resident = {Key(*map(int, k)) for k in np.argwhere(policy._pool.array[AWAY] == RESIDENT)}
    assert resident <= set(host.driver.cache.resident) | set(host.driver.cache.staged)


def test_drafting_that_does_not_pay_is_given_up():
    """Each draft costs as much as a pass and is never kept."""
    policy = started(draft_length=4, draft_token_ns=100_000, pass_ns=100_000)
    lengths = []
    for _ in range(40):
        n = policy.draft_length(4)
        lengths.append(n)
        begin(policy, Kind.VERIFY if n else Kind.DECODE, n + 1)
        policy.layer_ends(LayerReport(1, 50_000, 0, 0, 0, 0))
        policy.step_ends(0, np.arange(n + 1) == 0)
    assert lengths[:6] == [4, 4, 0, 4, 0, 2]
    assert sum(lengths[8:]) <= 4


def test_it_leaves_draft_lengths_alone_when_told_to_or_when_there_are_none():
    assert "draft_length" not in started(draft_length=4).deaf
    assert "draft_length" in started(draft_length=4, drafts=False).deaf
    assert "draft_length" in started().deaf


def test_a_layer_without_misses_asks_nothing():
    policy = Marginal()
    host = Host(policy, make_setup(policy, 1, 4, 4), sets([0, 1], [2, 3]))
    total = host.play().total
    assert (total.needed, total.hits, total.copies) == (4, 4, 0)


def test_what_is_wanted_most_ends_up_resident():
    """Two of eight experts are needed in every pass, beside two that change: the two stay, in both layers."""
    rng = np.random.default_rng(5)
    passes = [[6, 7, *rng.choice(6, 2, replace=False).tolist()] for _ in range(60)]
    policy = Marginal()
    host = Host(policy, make_setup(policy, 2, 8, 3, top_k=4), sets(*passes, layers=2))
    host.play()
    assert {Key(layer, e) for layer in (0, 1) for e in (6, 7)} <= set(host.driver.cache.resident)


@built
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_it_decides_the_same_without_the_compiled_part(seed):
    """Prompts, forecasts, prefetches that take time, and slots that go and come back."""
    records = []
    for compiled in (True, False):
        with ExitStack() as stack:
            if not compiled:
                stack.enter_context(mock.patch.object(reuse, "compiled", None))
                stack.enter_context(mock.patch.object(marginal, "Pool", pool.Pool))
                stack.enter_context(mock.patch.object(marginal, "split", split.split))
            rng, policy = np.random.default_rng(seed), Marginal()
            routing = random_routing(rng, 12, 3, 12, 3)
            host = Host(policy, make_setup(policy, 3, 12, 4, top_k=3), routing, rng)
            host.play([Kind.PREFILL, *[Kind.VERIFY] * 11], ahead=2, slots={5: (9,), 8: (12,)})
            records.append(host.record)
    assert records[0] == records[1]


def test_copies_of_a_running_policy_go_on_alike():
    policy = Marginal()
    Host(policy, make_setup(policy, 2, 8, 3), random_routing(np.random.default_rng(2), 20, 2, 8, 2)).play()
    copies = [policy, copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))]
    for one in copies:
        for i in range(12):
            one.reuse.seen(i % 2, [i % 3, 3 + i % 5])
            one._price(i % 2)
    assert copies[0]._pool.array.tobytes() == copies[1]._pool.array.tobytes() == copies[2]._pool.array.tobytes()
