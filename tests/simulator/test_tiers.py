"""Tiers that get in each other's way, and waits that end later than the copy."""

from dataclasses import replace

import pytest
from hand import decode, rates, setup, step

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Key, Policy, Where
from moe_spac.simulator.engine import Engine, replay_step


class ThirdOnCpu(Policy):
    """Expert 2 is the CPU tier's; 0 and 1 are fetched."""

    name = "third-on-cpu"

    def dispatch(self, demand, view):
        def place(expert: int) -> Where:
            resident = view.resident(Key(demand.layer, expert))
            return Where.CPU if expert == 2 else Where.GPU if resident else Where.FETCH

        return [(e, place(e)) for e in demand.experts]


def steps_of(steps, exact: bool, **times):
    engine = Engine(Driver(ThirdOnCpu(), setup(1, 8, [8])), rates(**times), exact=exact)
    for index, one in enumerate(steps):
        replay_step(engine, index, one)
    return [(s.wall_ns, s.gpu) for s in engine.steps]


@pytest.mark.parametrize("exact", [False, True])
def test_overlapping_work_is_slower_on_both_tiers(exact):
    # Step 1 fetches 0 and 1. Step 2: 60 ns of residents beside 100 ns of CPU; half of 60 is lost, on both.
    _, (wall, gpu) = steps_of(decode([0, 1], [0, 1, 2]), exact, gpu=30, cpu=100, hybrid=5, overlap=0.5)
    assert gpu == {"expert": 90, "wait_cpu": 40, "hybrid": 5}
    assert wall == 135
    # A CPU that is done first: 40 ns of both at once, so 20 are lost.
    _, (wall, gpu) = steps_of(decode([0, 1], [0, 1, 2]), exact, gpu=30, cpu=40, overlap=0.5)
    assert (wall, gpu) == (80, {"expert": 80})


def test_only_work_beside_the_cpu_is_slower():
    # 0 lands at 50 and 1 at 100. CPU 60 ns: 10 ns of expert 0 beside it, half lost on both; expert 1 finds it done.
    ((wall, gpu),) = steps_of(decode([0, 1, 2]), True, copy=50, gpu=20, cpu=60, overlap=0.5)
    assert gpu == {"wait_copy": 50 + 25, "expert": 25 + 20}
    assert wall == 120


@pytest.mark.parametrize("exact", [False, True])
def test_a_wait_for_a_copy_ends_after_its_arrival_and_none_does_where_nobody_waits(exact):
    # Two copies of 100 land at 100 and 200; 30 of work each; every wait ends 7 late.
    ((wall, gpu),) = steps_of(decode([0, 1]), exact, copy=100, gpu=30, arrival_ns=7)
    assert (wall, gpu) == (237, {"wait_copy": 107 + 70, "expert": 60})
    # Copies of 20 behind work of 30: the second is there already when the first has been computed.
    ((wall, _),) = steps_of(decode([0, 1]), exact, copy=20, gpu=30, arrival_ns=7)
    assert wall == 27 + 30 + 30


@pytest.mark.parametrize("exact", [False, True])
def test_experts_that_are_there_together_are_one_call(exact):
    # Two copies of 100 are two calls of 5; then both are residents and one call.
    first, second = steps_of(decode([0, 1], [0, 1]), exact, copy=100, gpu=30, call_ns=5)
    assert first == (235, {"wait_copy": 100 + 65, "expert": 70})
    assert second == (65, {"expert": 65})
    # Copies of 20 behind work of 50: at 55 the second is there, too late for the call that began at 20.
    ((wall, _),) = steps_of(decode([0, 1]), exact, copy=20, gpu=50, call_ns=5)
    assert wall == 20 + 55 + 55


@pytest.mark.parametrize("exact", [False, True])
def test_copies_that_land_while_residents_are_computed_are_one_call(exact):
    # Residents 0 and 1 take 65; 3 and 4 land at 20 and 40 and go together.
    (*_, (wall, gpu)) = steps_of(decode([0, 1], [0, 1, 3, 4]), exact, copy=20, gpu=30, call_ns=5)
    assert (wall, gpu) == (130, {"expert": 130})


class PrefetchesOne(ThirdOnCpu):
    """And brings 5, which nobody needs."""

    name = "prefetches-one"

    def __init__(self) -> None:
        self.wanted = [Key(0, 5)]

    def next_fetch(self, view):
        return self.wanted.pop() if self.wanted else None


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("longer", "finds"), [(0, 4), (30, 5)])
def test_a_prefetch_that_lands_holds_up_the_next_layer(exact, longer, finds):
    # 0 goes first, until 100; then 5, until 200 or 230. Steps end at 130, 160, 190, 220 and 250 if nothing lands.
    machine = rates(copy=100, gpu=30, landing_ns=7, prefetch_ns=longer)
    engine = Engine(Driver(PrefetchesOne(), setup(1, 8, [8])), machine, exact=exact)
    for index, one in enumerate(decode(*[[0]] * 6)):
        replay_step(engine, index, one)
    walls = [130, 30, 30, 30, 30, 30]
    walls[finds] += 7
    assert [s.wall_ns for s in engine.steps] == walls
    assert engine.steps[finds].gpu == {"policy": 7, "expert": 30}
    assert sum(s.link.get("prefetch", 0) for s in engine.steps) == 100 + longer


@pytest.mark.parametrize(("draft_ns", "late"), [(50, 4), (0, 0)])
def test_a_layer_takes_longer_in_a_step_that_a_draft_model_came_before(draft_ns, late):
    """Looking tokens up takes no time and leaves nothing behind; nor does a step without a draft."""
    engine = Engine(
        Driver(PrefetchesOne(), setup(2, 8, [8, 8])),
        rates(gpu=30, dense=10, draft_token_ns=draft_ns, after_draft_ns=4),
        dense_only_layers=1,
    )
    for index, one in enumerate([step([[[0], [0]]] * 2, drafted=1), step([[[0], [0]]], 2)]):
        replay_step(engine, index, one)
    assert [s.gpu["dense"] for s in engine.steps] == [3 * (10 + late), 3 * 10]


@pytest.mark.parametrize(("channels", "longer"), [(frozenset(), 0), (frozenset({"next-gate"}), 4)])
def test_a_layer_takes_longer_where_gates_are_asked_ahead_for_the_policy(channels, longer):
    policy = PrefetchesOne()
    policy.channels = channels
    engine = Engine(Driver(policy, setup(2, 8, [8, 8])), rates(gpu=30, dense=10, ending_ns=5, ahead_ns=4))
    one = step([[[0], [0]]], 0)
    replay_step(engine, 0, replace(one, ahead=one.experts[:, :, None]))
    assert (engine.steps[0].gpu["dense"], engine.steps[0].gpu["policy"]) == (2 * (10 + longer), 2 * 5)


@pytest.mark.parametrize("exact", [False, True])
def test_a_layer_on_both_tiers_takes_longer(exact):
    # Step 2: 60 ns of residents and 100 ns of CPU; 9 more because both have work. Step 3 is the CPU's alone.
    _, *both = steps_of(decode([0, 1], [0, 1, 2], [2]), exact, gpu=30, cpu=100, beside_ns=9)
    assert both == [(109, {"expert": 60, "wait_cpu": 40, "hybrid": 9}), (100, {"wait_cpu": 100})]
