from typing import ClassVar

import numpy as np
import pytest
from hand import decode, rates, setup, step, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Key, Policy, Where
from moe_spac.simulator.engine import Engine, replay_step
from moe_spac.simulator.steptimes import GPU_LABELS


class Fetch(Policy):
    """Every miss is copied and kept if there is room."""

    name: ClassVar[str] = "fetch"


class Ahead(Fetch):
    """Prefetches expert 0 of every layer, in layer order."""

    scope = "global"

    def setup(self, setup):
        self.layers = setup.layers

    def next_fetch(self, view):
        keys = (Key(layer, 0) for layer in range(self.layers))
        return next((k for k in keys if not view.resident(k) and not view.in_flight(k)), None)


class OnCpu(Fetch):
    def dispatch(self, demand, view):
        return [(e, Where.CPU) for e in demand.experts]


def play(steps, policy, times, experts=8, slots=None):
    layers = steps[0].experts.shape[1]
    slots = slots or ([layers * experts] if policy.scope == "global" else [experts] * layers)
    engine = Engine(Driver(policy, setup(layers, experts, slots, times.costs)), times)
    for index, one in enumerate(steps):
        replay_step(engine, index, one)
    return engine


@pytest.mark.parametrize(("copy", "compute", "serial", "overlapped"), [(4, 3, 70, 43), (3, 4, 70, 43)])
def test_copies_overlap_compute_o23(copy, compute, serial, overlapped):
    steps = decode([0], layers=10)
    times = rates(copy=copy * 10**6, gpu=compute * 10**6)
    assert play(steps, Fetch(), times).now == serial * 10**6
    assert play(steps, Ahead(), times).now == overlapped * 10**6


def test_only_used_experts_move_o22():
    engine = play([step([[[0]], [[3]], [[0]]])], Fetch(), rates(copy=50))
    assert engine.driver.total.copies == 2
    assert engine.steps[0].link == {"demand": 100}


def test_gpu_works_on_residents_while_copies_are_on_their_way():
    # Step 2 needs {0 resident, 1 absent}: 30 ns of GPU work hide 30 of the copy's 100 ns, then 30 ns for the arrival.
    engine = play(decode([0, 0], [0, 1]), Fetch(), rates(copy=100, gpu=30))
    assert engine.steps[1].gpu == {"expert": 60, "wait_copy": 70}
    assert engine.steps[1].wall_ns == 130


def test_a_layer_ends_when_both_tiers_are_done():
    engine = play(decode([0, 1]), OnCpu(), rates(cpu=40, hybrid=5, dense=10))
    assert engine.steps[0].gpu == {"dense": 10, "wait_cpu": 80, "hybrid": 5}
    assert engine.steps[0].cpu == {"busy": 80}


def test_cpu_and_copies_slow_each_other_down_on_shared_dram():
    class Split(Fetch):
        def dispatch(self, demand, view):
            return [(0, Where.FETCH), (1, Where.CPU)]

    # Both want 1000 bytes in 100 ns (10 GB/s); 10 GB/s in all gives each 5, so both take 200 ns.
    engine = play(decode([0, 1]), Split(), rates(copy=100, cpu=100, dram=10 * 10**9))
    assert engine.now == 200


def test_drafting_is_charged_and_leaves_the_link_free():
    steps = [step([[[1]]]), step([[[0]]] * 3, position=1, drafted=2, accepted=1)]
    engine = play(steps, Ahead(), rates(copy=80, draft_token_ns=50), slots=[8])
    second = engine.steps[1]
    assert second.gpu == {"draft": 100}
    assert second.emitted == 2
    assert engine.driver.decode.prefetches_used == 1


def test_serial_tiers_add_up():
    class Serial(Fetch):
        serial_tiers = True

        def dispatch(self, demand, view):
            return [(0, Where.FETCH), (1, Where.CPU)]

    assert play(decode([0, 1]), Serial(), rates(cpu=40, gpu=30)).now == 70


routing = st.lists(
    st.lists(
        st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=2), min_size=3, max_size=3), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(routing, st.integers(0, 90), st.integers(0, 90), st.integers(0, 6), st.integers(1, 40))
def test_every_nanosecond_is_accounted_for(tokens, copy, cpu, slots, dram):
    class Mixed(Ahead):
        scope = "layer"

        def dispatch(self, demand, view):
            def where(e):
                if view.resident(Key(demand.layer, e)):
                    return Where.GPU
                return (Where.FETCH, Where.STREAM, Where.CPU)[e % 3]

            return [(e, where(e)) for e in demand.experts]

        def next_fetch(self, view):
            keys = (Key(la, e) for la in range(3) for e in range(6))
            return next(
                (k for k in keys if view.free(k.layer) and not view.resident(k) and not view.in_flight(k)), None
            )

        def victim(self, incoming, candidates, view):
            return next(iter(candidates), None)

    steps = [
        step([[sorted(layer) for layer in token] for token in t], drafted=len(t) - 1, accepted=(len(t) - 1) // 2)
        for t in tokens
    ]
    times = rates(
        copy=copy, cpu=cpu, gpu=7, dense=11, hybrid=3, dram=dram * 10**9, step_ns=5, copy_fixed=2, policy_ns=1
    )
    engine = play(steps, Mixed(), times, experts=6, slots=[slots] * 3)
    assert sum(s.wall_ns for s in engine.steps) == engine.now
    for s in engine.steps:
        assert sum(s.gpu.values()) == s.wall_ns
        assert set(s.gpu) <= set(GPU_LABELS)
        for lane in (s.cpu, s.link, s.dram):
            assert 0 <= sum(lane.values()) <= s.wall_ns
    total = engine.driver.total
    assert total.needed == total.hits + total.joins + total.fetches + total.streams + total.cpu
    engine.driver.cache.check()


def test_the_same_run_twice_is_the_same_to_the_nanosecond():
    rng = np.random.default_rng(0)
    steps = [step([[sorted(rng.choice(8, 2, replace=False)) for _ in range(3)]], i) for i in range(30)]
    times = rates(copy=77, gpu=13, dense=5)
    assert play(steps, Ahead(), times).steps == play(steps, Ahead(), times).steps


def test_simulate_names_a_policy_that_breaks_the_contract():
    from moe_spac.simulator.machine import load_machine
    from moe_spac.simulator.run import simulate

    class EvictsNeeded(Fetch):
        name: ClassVar[str] = "evicts-needed"

        def victim(self, incoming, candidates, view):
            return incoming

    run = simulate(trace(decode([0, 1], [2, 3]), 8), EvictsNeeded(), load_machine("rtx4090-pcie4"), slots=2)
    assert run.error is not None
    assert "policy evicts-needed, step 1, layer 0" in run.error
