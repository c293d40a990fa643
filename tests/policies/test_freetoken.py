"""FreeToken: q* by hand, against a measured split, and what it is for."""

from dataclasses import replace

import numpy as np
import pytest
from hand import rates
from policy_loop import COSTS, Host, make_setup, sets

from moe_spac.policies.freetoken import Memory, Split
from moe_spac.policies.load import load_policy
from moe_spac.traces.schema import Kind


def split(memory: Memory = "shared", costs=COSTS, cpu=True):
    part = Split(memory, 32)
    part.setup(make_setup(load_policy("freetoken"), 1, 8, 2, costs=costs, cpu=cpu))
    return part


def test_q_star_by_hand():
    """40 us on the CPU, 100 over the link: 0.4 of the misses, or 40 / 140 where the two share no memory."""
    assert [split().fetched(m) for m in range(9)] == [0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert [split("apart").fetched(m) for m in range(9)] == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    slow = replace(COSTS, cpu_memory_ns=300_000)  # a CPU that is slower than the link is left alone
    assert [split(costs=slow).fetched(m) for m in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("link", "host", "misses"), [(25.0, 75.0, 6), (20.0, 50.0, 5), (10.0, 80.0, 8)])
def test_both_sides_end_together(link, host, misses):
    """The CPU is left what the link does not take, so q / link = (m - q) / (host - link)."""
    q = split(costs=rates(copy=round(1e9 / link), cpu=round(1e9 / host)).costs).fetched(misses)
    assert q / link == pytest.approx((misses - q) / (host - link))


def test_the_measured_split():
    """4090 and TR Pro 5955WX, 25.2 and 84.5 GB/s: 1.07 fetched and 3.19 on the CPU for each layer and step
    (FreeToken issue 232), 4.26 misses on average."""
    part = split(costs=rates(copy=round(1e9 / 25.2), cpu=round(1e9 / 84.5)).costs)
    assert [part.fetched(m) for m in (3, 4, 5)] == [1, 1, 1]


def played(routing, slots=4, cpu=True, kinds=None):
    policy = load_policy("freetoken")
    host = Host(policy, make_setup(policy, routing[0].shape[1], 8, slots, cpu=cpu), routing)
    host.play(kinds)
    return host


def test_the_fetched_ones_are_those_with_most_tokens_and_they_stay():
    # Five misses: 3 with three tokens, 0 with two, the rest with one. Two are fetched, then two hit.
    ids = np.array([[0, 3], [3, 5], [0, 3], [1, 2]])[:, None]
    host = played([ids, ids])
    gates = [note[1:] for note in host.record if note[1] == "gate"]
    assert gates[0] == ("gate", 0, (), (3, 0), (), (1, 2, 5))
    assert gates[1] == ("gate", 0, (0, 3), (1,), (), (2, 5))


def test_prompts_and_machines_without_a_cpu_fetch_everything():
    assert played(sets([0, 1, 2]), cpu=False).driver.total.fetches == 3
    long = [np.tile(np.array([[0, 1, 2]]), (32, 1))[:, None]]
    assert played(long, kinds=[Kind.PREFILL]).driver.total.fetches == 3


def test_one_pool():
    """Layer 0 asks for two at a time, layer 1 always for the same one, which is never displaced: it has free slots."""
    policy = load_policy("freetoken")
    assert policy.scope == "global"
    total = played(sets([0, 1], [2, 3], [4, 5], layers=2), slots=1).driver.total
    assert (total.insertions, total.evictions) == (6, 4)  # one of two misses each time, two slots in all
