"""Parts are told and asked what belongs to them, and a policy is what its parts say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hand import decode, setup
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_loop import Host, make_setup, one_by_one, random_routing, sets

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Key, Scope, Setup
from moe_spac.policies.orders import Lru, Ranked
from moe_spac.policies.parts import (
    Admission,
    Composed,
    DecodeOnly,
    Dispatcher,
    DraftControl,
    FirstIds,
    IfBetter,
    Never,
    OnCpu,
    Part,
    Parts,
    Prefetcher,
    VictimOrder,
    even,
)
from moe_spac.simulator.replay import count
from moe_spac.traces.schema import Kind


@dataclass
class Made(Composed):
    """A policy of given parts; `how` makes them anew for every run."""

    name: ClassVar[str] = "made"
    how: Callable[[], Parts] = Parts
    scope: Scope = "layer"

    def parts(self, setup: Setup) -> Parts:
        return self.how()


def played(how, routing, slots, experts=8, scope: Scope = "layer", **more):
    policy = Made(how, scope)
    host = Host(policy, make_setup(policy, routing[0].shape[1], experts, slots), routing)
    host.play(**more)
    return host


def test_a_part_in_two_places_is_told_once():
    heard = []

    class Both(VictimOrder, Dispatcher):
        def used(self, demand, view):
            heard.append(("used", demand.layer))

        def step_begins(self, step):
            heard.append(("step", step.index))

    def how():
        both = Both()
        return Parts(both, dispatch=both)

    played(how, sets([0, 1], layers=2), 2)
    assert heard == [("step", 0), ("used", 0), ("used", 1)]


def test_hosts_are_spared_the_calls_that_no_part_hears():
    class Hears(Part):
        def layer_ends(self, report): ...

    class Asks(Prefetcher): ...

    class Ends(Hears, Admission): ...

    plain, ends, asks = Made(Parts), Made(lambda: Parts(admission=Ends())), Made(lambda: Parts(prefetch=[Asks()]))
    for policy in (plain, ends, asks):
        policy.setup(make_setup(policy, 1, 4, 2))
    assert plain.deaf == {"transfer_done", "layer_ends", "next_fetch", "draft_length"}
    assert ends.deaf == {"transfer_done", "next_fetch", "draft_length"}
    assert asks.deaf == {"layer_ends", "draft_length"}


def test_admission_streams_what_it_does_not_want_and_freezes_in_prefill():
    routing = sets([0, 1], [0, 1], [0, 1])
    assert played(lambda: Parts(admission=Never()), routing, 2).driver.total.streams == 6
    kinds = [Kind.PREFILL, Kind.DECODE, Kind.DECODE]
    total = played(lambda: Parts(admission=DecodeOnly()), routing, 2, kinds=kinds).driver.total
    assert (total.streams, total.fetches, total.hits) == (2, 2, 2)


def test_a_better_admission_never_lets_a_sibling_be_evicted():
    def how():
        lru = Lru()
        return Parts(lru, IfBetter(lru))

    total = played(how, sets([0, 1, 2], [0, 1, 2]), 2).driver.total
    assert (total.hits, total.evictions) == (2, 0)


def test_the_prefetcher_that_asked_is_asked_about_the_victim():
    class Wants(Prefetcher):
        def __init__(self, expert, yes):
            self.expert, self.yes = expert, yes

        def next_fetch(self, view):
            key = Key(0, self.expert)
            return None if view.resident(key) or view.in_flight(key) else key

        def replaces(self, incoming, victim, view):
            return self.yes

    def how(yes):
        return lambda: Parts(admission=Never(), placement=FirstIds(), prefetch=[Wants(2, yes)], dispatch=OnCpu())

    assert sorted(played(how(True), sets([3, 4]), 2).driver.cache.resident) == [(0, 1), (0, 2)]
    assert sorted(played(how(False), sets([3, 4]), 2).driver.cache.resident) == [(0, 0), (0, 1)]


def test_the_prefetcher_that_asked_says_whether_its_copy_goes_on():
    class Wants(Prefetcher):
        def next_fetch(self, view):
            key = Key(0, 2)
            return None if view.resident(key) or view.in_flight(key) else key

        def keep_fetch(self, key, view) -> bool:
            return False

    class Keeps(Wants):
        def keep_fetch(self, key, view):
            return super(Wants, self).keep_fetch(key, view)

    for wants, goes_on in ((Wants, False), (Keeps, True)):
        policy = Made(lambda wants=wants: Parts(prefetch=[wants()]))
        driver = Driver(policy, make_setup(policy, 1, 4, 2))
        assert driver.next_fetch() == (0, 2)
        assert driver.keep_fetch(Key(0, 2)) == goes_on
        driver.cancelled(Key(0, 2), 10)
        assert driver.next_fetch() == (0, 2)  # it may ask again


def test_prefetchers_are_asked_in_turn_and_drafts_controlled():
    class Nothing(Prefetcher): ...

    class Once(Prefetcher):
        channels = frozenset({"next-gate"})
        done = False

        def next_fetch(self, view):
            self.done, key = True, None if self.done else Key(0, 5)
            return key

    class Two(DraftControl):
        def draft_length(self, longest):
            return min(2, longest)

    host = played(lambda: Parts(prefetch=[Nothing(), Once()], draft=Two()), sets([0, 1]), 4)
    assert (0, 5) in host.driver.cache.resident
    assert [host.driver.draft_length(n) for n in (1, 5)] == [1, 2]
    assert host.driver.policy.channels == {"next-gate"}


def test_quotas_of_a_pool_are_even():
    assert even(setup(3, 8, [5])) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert even(setup(3, 2, [1, 0, 30])) == [(0, 0), (2, 0), (2, 1)]


class Scored(Ranked):
    """A score that jumps about, to try the order against a search of all candidates."""

    def used(self, demand, view):
        super().used(demand, view)
        self.scores[demand.layer, list(demand.experts)] += (self.now * 7) % 5 - 2


class Checked(VictimOrder):
    """Asks `order`, and compares with the least of all candidates by its own definition."""

    def __init__(self, order, rank):
        self.order, self.rank, self.asked = order, rank, 0
        for event in ("setup", "used", "placed", "transfer_done", "step_begins"):
            setattr(self, event, getattr(order, event))

    def first(self, layer, candidates, view):
        found = self.order.first(layer, candidates, view)
        assert found == min(candidates, key=lambda key: (*self.rank(self.order, key), key), default=None)
        self.asked += found is not None
        return found


def _checked(order, rank):
    class Heard(Checked):
        def setup(self, setup): ...
        def used(self, demand, view): ...
        def placed(self, keys): ...
        def transfer_done(self, key, size, ns): ...
        def step_begins(self, step): ...

    return Heard(order, rank)


class Fetches(Prefetcher):
    """Brings in the expert after each one used, so that some arrive unused."""

    def __init__(self, experts):
        self._experts, self._next = experts, None

    def used(self, demand, view):
        self._next = Key(demand.layer, (demand.experts[0] + 1) % self._experts)

    def next_fetch(self, view):
        key, self._next = self._next, None
        return None if key is None or view.resident(key) or view.in_flight(key) else key


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 4), st.sampled_from(["layer", "global"]), st.booleans())
def test_orders_name_the_least_of_all_candidates(seed, slots, scope, streamed):
    routing = random_routing(np.random.default_rng(seed), 25, 3, 6, 2)
    kinds = [Kind.PREFILL if i % 5 == 0 else Kind.VERIFY for i in range(25)]
    for order, rank in (
        (Scored, lambda o, k: (o.scores[k], o.last[k])),
        (Lru, lambda o, k: (list(o._uses[k.layer]).index(o._base[k.layer] + k.expert),)),
    ):
        made = []

        def how(order=order, rank=rank, made=made):
            made.append(_checked(order(), rank))
            return Parts(made[-1], DecodeOnly() if streamed else None, FirstIds(), [Fetches(6)])

        played(how, routing, slots, 6, scope, kinds=kinds)
        assert made[0].asked or slots in (0, 4)


def test_the_base_parts_are_a_whole_policy():
    seen = count(decode([0, 1], [0, 2], [0, 1]), Made(Parts), setup(1, 4, [2])).total
    # The lowest id goes first: 0, 1 in; 2 displaces 0; 0 and 1: 1 hits, 0 displaces 1.
    assert (seen.needed, seen.hits, seen.fetches) == (6, 2, 4)


def test_parts_are_new_for_every_run():
    policy = Made(Parts)
    first = count(decode([0, 1], [1, 2]), policy, setup(1, 4, [2])).total
    assert count(decode([0, 1], [1, 2]), policy, setup(1, 4, [2])).total == first


@pytest.mark.parametrize("tokens", [1, 32])
def test_misses_on_the_cpu_or_streamed(tokens):
    routing = [np.tile(ids, (tokens, 1, 1)) for ids in one_by_one(1)]
    for cpu in (True, False):
        policy = Made(lambda: Parts(dispatch=OnCpu()))
        host = Host(policy, make_setup(policy, 1, 4, 2, 1, cpu=cpu), routing)
        host.play()
        assert host.driver.total.cpu == (cpu and tokens < 32)
