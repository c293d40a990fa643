"""What every policy must do whatever the trace, the slots and the moments at which copies land."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_loop import Host, make_setup, random_routing

from moe_spac.policies.driver import Driver, PolicyError
from moe_spac.policies.interface import Key, Policy, StepInfo
from moe_spac.policies.load import load_policy, policy_names
from moe_spac.traces.schema import Kind

VARIANTS = [
    *policy_names(),
    "ar-lru:scope=global,spec_topk=1",
    "ar-lru:write_back=true,spec_topk=2",
    "dali:w=3,u=2,prefetch=2",
    "decayed-lfu:period=2,scope=global,accepted_only=true",
    "fiddler:release=true",
    "fifo:scope=global",
    "freetoken:memory=apart,offload_tokens=4",
    "gate-lookahead:layers=3,top=2,most=1",
    "gate-lookahead:exact=true,scope=global",
    "governed:misses=cpu,shortest=0,draft_ms=0.1",
    "hindsight:scope=global",
    "hybrimoe:start=random,horizon=1",
    "hybrimoe-release:prefetch_size=3,start=first,literal=true",
    "kt-dynamic:threshold=2",
    "least-stale:reading=interval,scope=layer,spec_topk=1",
    "least-stale:reading=layers",
    "lfru:scope=global",
    "lfu:bypass=true,scope=global",
    "lfu-in-cache:reset=false,scope=global",
    "llamacpp-cache:scope=global,order=lrfu,freeze_prefill=false,offload_tokens=4",
    "lrfu:scope=global,half_life=1",
    "min:scope=global",
    "min:bypass=false,placed=true",
    "moe-infinity:capacity=2,request=2",
    "moe-infinity-release:prefetch=true,request=2",
    "moe-spac:scale=false",
    "moe-spac:unified=false",
    "moe-spac:adaptive=false,discard_late=false",
    "moe-spac:balance=false,offload_tokens=3",
    "moe-spac-release:up=1,offload_tokens=4",
    "moe-spac-release:up=1,tau=2,balance=true",
    "moe-speq:fidelity=0.5,sure=0,known=verify",
    "n-cpu-moe:n=3",
    "promoe:recall=0.5,precision=0.3,stride=1,scope=global",
    "s3-fifo:scope=global,small=0.4",
    "slru:scope=global,protected=0.5",
    "sp-moe:known=verify,recall=0.5,precision=0.5",
    "sp-moe:cutoff=1,scope=layer",
    "static:offload_tokens=auto",
    "static:partial=false",
]


def play(spec, seed, slots, link=1, cpu=True, draft=3):
    rng = np.random.default_rng(seed)
    layers, experts, top_k = 3, 6, 2
    routing = random_routing(rng, 8, layers, experts, top_k)
    kinds = [Kind.PREFILL if rng.random() < 0.2 else Kind.VERIFY for _ in routing]
    policy = load_policy(spec)
    setup = make_setup(policy, layers, experts, slots, top_k, cpu=cpu, draft_length=draft, seed=seed)
    host = Host(policy, setup, routing, rng, link)
    host.wall_ns = int(rng.integers(0, 3)) * 100_000
    host.play(kinds, ahead=3, scores=bool(rng.integers(2)))
    return host


@pytest.mark.parametrize("spec", VARIANTS)
@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 7), st.integers(1, 2), st.booleans(), st.sampled_from([0, 3, 8]))
def test_serves_every_expert_once_within_the_slots_and_repeats_itself(spec, seed, slots, link, cpu, draft):
    host = play(spec, seed, slots, link, cpu, draft)
    total = host.driver.total
    assert total.fallbacks == 0
    assert total.hits + total.cpu + total.joins + total.fetches + total.streams >= total.needed
    assert total.cpu == 0 or cpu
    again = play(spec, seed, slots, link, cpu, draft)
    assert again.record == host.record
    assert again.driver.total == total


@pytest.mark.parametrize("spec", VARIANTS)
def test_slots_come_and_go(spec):
    """The host takes slots away between steps: what goes is the policy's own choice, and it goes on without them."""
    policy = load_policy(spec)
    asked = []

    def surrender(layer, candidates, view, own=policy.surrender):
        asked.append(key := own(layer, candidates, view))
        assert key in candidates
        return key

    routing = random_routing(np.random.default_rng(7), 24, 3, 6, 2)
    setup = make_setup(policy, 3, 6, 4, draft_length=3)
    host = Host(policy, setup, routing)
    policy.surrender = surrender  # type: ignore[method-assign]
    kinds = [Kind.PREFILL if at % 8 == 0 else Kind.VERIFY for at in range(24)]
    shares = {6: 0.5, 12: 0.0, 18: 0.75}
    host.play(kinds, ahead=1, slots={at: tuple(int(share * n) for n in setup.slots) for at, share in shares.items()})
    assert asked or not (host.driver.cache.resident or host.driver.total.evictions)


@pytest.mark.parametrize("spec", VARIANTS)
def test_one_object_serves_several_runs(spec):
    policy = load_policy(spec)
    routing = random_routing(np.random.default_rng(5), 15, 2, 6, 2)
    setup = make_setup(policy, 2, 6, 3, draft_length=3)
    records = []
    for _ in range(2):
        host = Host(policy, setup, routing)
        host.play(ahead=1)
        records.append(host.record)
    assert records[0] == records[1]


MOVES_WITH_ALL_SLOTS = ("static", "spac", "n-cpu-moe")


@pytest.mark.parametrize("spec", [s for s in VARIANTS if not any(word in s for word in MOVES_WITH_ALL_SLOTS)])
def test_with_a_slot_for_each_expert_nothing_is_evicted(spec):
    host = play(spec, 3, slots=6)
    assert host.driver.total.evictions == 0


ON_AND_OFF = [
    ("ar-lru", "ar-lru:spec_topk=1", 0),
    ("ar-lru:spec_topk=1", "ar-lru:spec_topk=2", 0),
    ("dali", "dali:w=4", 0),
    ("dali:w=4", "dali:w=4,u=3", 0),
    ("dali", "dali:prefetch=0", 0),
    ("decayed-lfu:period=4", "decayed-lfu:period=8", 8),
    ("fiddler", "fiddler:release=true", 40),
    ("freetoken", "freetoken:memory=apart", 8),
    ("freetoken", "freetoken:offload_tokens=5", 8),
    ("gate-lookahead", "gate-lookahead:layers=2", 3),
    ("gate-lookahead", "gate-lookahead:top=1", 3),
    ("gate-lookahead", "gate-lookahead:most=1", 3),
    ("kt-dynamic:threshold=1", "kt-dynamic:threshold=9", 0),
    ("kt-random", "kt-random:seed=1", 0),
    ("least-stale", "least-stale:reading=interval", 8),
    ("least-stale", "least-stale:reading=layers", 8),
    ("lfru", "lfru:bypass=false", 8),
    ("lfru", "lfru:accepted_only=true", 8),
    ("lfu", "lfu:bypass=true", 8),
    ("lfu", "lfu:accepted_only=true", 8),
    ("lfu-in-cache", "lfu-in-cache:reset=false", 8),
    ("llamacpp-cache", "llamacpp-cache:inserts=1", 8),
    ("llamacpp-cache", "llamacpp-cache:order=lrfu", 8),
    ("llamacpp-cache", "llamacpp-cache:freeze_prefill=false", 8),
    ("lrfu", "lrfu:half_life=2", 8),
    ("s3-fifo", "s3-fifo:small=0.5", 8),
    ("s3-fifo", "s3-fifo:promote=1", 8),
    ("slru", "slru:protected=0.2", 8),
    ("hybrimoe", "hybrimoe:prefetch=false", 8),
    ("hybrimoe", "hybrimoe:alpha=1.0", 8),
    ("hybrimoe-release", "hybrimoe-release:prefetch_size=2", 8),
    ("moe-infinity", "moe-infinity:request=4", 3),
    ("moe-infinity:request=4", "moe-infinity:request=4,capacity=1", 3),
    ("moe-infinity-release", "moe-infinity-release:prefetch=true", 3),
    ("moe-spac", "moe-spac:adaptive=false", 8),
    ("moe-spac", "moe-spac:balance=false", 8),
    ("moe-spac", "moe-spac:unified=false", 8),
    ("moe-spac:balance=false", "moe-spac:balance=false,discard_late=false", 8),
    ("moe-spac", "moe-spac:scale=false", 4),
    ("moe-spac-release:up=2", "moe-spac-release:up=1", 8),
    ("moe-speq", "moe-speq:prefetch=false", 3),
    ("moe-speq", "moe-speq:fidelity=0.5", 3),
    ("promoe", "promoe:recall=0.5", 3),
    ("promoe", "promoe:precision=0.5", 3),
    ("promoe", "promoe:stride=1", 3),
    ("sp-moe", "sp-moe:recall=0.5", 3),
    ("sp-moe", "sp-moe:precision=0.5", 3),
    ("sp-moe", "sp-moe:cutoff=2", 3),
    ("min", "min:bypass=false", 8),
    ("static", "static:offload_tokens=2", 8),
]


@pytest.mark.parametrize(("on", "off", "draft"), ON_AND_OFF)
def test_every_feature_changes_decisions(on, off, draft):
    records = []
    for spec in (on, off):
        rng = np.random.default_rng(11)
        policy = load_policy(spec)
        routing = random_routing(rng, 40, 3, 16, 3, tokens=draft + 1)
        setup = make_setup(policy, 3, 16, 5, 3, draft_length=draft)
        host = Host(policy, setup, routing, rng, slow=True)
        host.wall_ns = 600_000
        host.play([Kind.PREFILL, *[Kind.VERIFY] * 39], ahead=2)
        records.append(host.record)
    assert records[0] != records[1]


class Evicts(Policy):
    """Names an expert that the running layer needs."""

    name = "evicts"

    def next_fetch(self, view):
        return Key(0, 3)

    def victim(self, incoming, candidates, view):
        return Key(0, 1)


class Invents(Policy):
    """Brings in an expert that the model does not have."""

    name = "invents"

    def next_fetch(self, view):
        return Key(1, 9)


class Raises(Policy):
    name = "raises"

    def dispatch(self, demand, view):
        raise IndexError("seventh")


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Evicts(), "policy evicts, step 4, layer 0: evicts expert 1 of layer 0, which is needed now"),
        (Invents(), "policy invents, step 4, layer 0: named expert 9 of layer 1, which the model does not have"),
        (Raises(), "policy raises, step 4, layer 0: IndexError"),
    ],
)
def test_a_policy_that_misbehaves_is_named_o31(policy, says):
    driver = Driver(policy, make_setup(policy, 2, 4, 1))
    driver.cache.place(Key(0, 1))
    driver.step_begins(StepInfo(4, Kind.DECODE, np.zeros(1, np.int32), np.zeros(1, bool)))
    with pytest.raises(PolicyError, match=says):  # noqa: PT012 (either call may be the one that fails)
        driver.gate(0, np.array([[1]]))
        driver.next_fetch()


def test_nothing_is_resident_that_the_model_does_not_have():
    """A policy may look a layer ahead of the last one, or behind the first."""
    policy = load_policy("static")
    view = Driver(policy, make_setup(policy, 2, 4, 4)).cache_view
    assert [view.resident(Key(layer, 0)) for layer in (-1, 0, 1, 2)] == [False, True, True, False]
    assert not view.resident(Key(1, 4))
