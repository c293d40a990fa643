import pytest
import simpy

from moe_spac.policies.interface import Key
from moe_spac.simulator.lanes import CopyPrice, Dram, Link, Meter


def test_flows_that_fit_together_do_not_disturb_each_other():
    env = simpy.Environment()
    dram = Dram(env, 14 * 10**9)
    done = []
    for name, size in (("dma", 6000), ("cpu", 8000)):
        dram.flow(size, 1000, lambda n=name: done.append((n, env.now)))
    env.run()
    assert done == [("dma", 1000), ("cpu", 1000)]


def test_two_flows_share_dram_max_min_fairly():
    # Wishes 6 and 8 GB/s on 10 GB/s: both get 5 until the first has moved 6000 bytes (1200 ns); the other has then
    # 2000 bytes left, at 8 GB/s 250 ns.
    env = simpy.Environment()
    dram = Dram(env, 10 * 10**9)
    done = []
    for name, size in (("dma", 6000), ("cpu", 8000)):
        dram.flow(size, 1000, lambda n=name: done.append((n, env.now)))
    env.run()
    assert [n for n, _ in done] == ["dma", "cpu"]
    assert abs(done[0][1] - 1200) <= 1
    assert abs(done[1][1] - 1450) <= 1
    assert dram.meter.read(int(env.now)) == {"busy": env.now}


def test_a_small_wish_is_granted_in_full():
    # 2 and 20 GB/s on 10: the small one is undisturbed, the large one gets the remaining 8.
    env = simpy.Environment()
    dram = Dram(env, 10 * 10**9)
    done = {}
    dram.flow(2000, 1000, lambda: done.update(small=env.now))
    dram.flow(8000, 400, lambda: done.update(large=env.now))
    env.run()
    assert done["small"] == 1000
    assert abs(done["large"] - 1000) <= 1


def link_log(pulls: list[Key], chunks: int = 1, keep: bool = True, both_ways: float = 1.0):
    """A link whose copies take 20 ns to start and 80 for 1000 bytes; what landed and what was cancelled."""
    env = simpy.Environment()
    log = []
    link = Link(
        env,
        Dram(env, 10**15),
        CopyPrice(1000, 20, 80, chunks, 0, both_ways),
        pull=lambda: pulls.pop(0) if pulls else None,
        keep=lambda key: keep,
        landed=lambda key, ns: log.append((key, env.now, ns)),
        cancelled=lambda key, moved: log.append((key, env.now, "cancelled", moved)),
    )
    link.wake()
    return env, link, log


def test_a_whole_prefetch_on_the_wire_delays_the_demand_behind_it():
    env, link, log = link_log([Key(0, 7)])
    env.run(until=30)
    link.demand(Key(0, 1))
    env.run()
    assert log == [(Key(0, 7), 100, 100), (Key(0, 1), 200, 100)]
    assert link.meter.read(200) == {"prefetch": 100, "demand": 100}


def test_demand_goes_between_the_chunks_of_a_prefetch():
    # 4 chunks of 20 ns: at 30 the first is on the wire, until 40. Demand from 40 to 140. The rest needs 20 + 60 ns.
    env, link, log = link_log([Key(0, 7)], chunks=4)
    env.run(until=30)
    demand = link.demand(Key(0, 1))
    env.run()
    assert demand.at == 140
    assert log == [(Key(0, 1), 140, 100), (Key(0, 7), 220, 220)]
    assert link.meter.read(220) == {"prefetch": 40 + 80, "demand": 100}


def test_a_prefetch_that_was_pushed_aside_can_be_given_up():
    env, link, log = link_log([Key(0, 7), Key(0, 8)], chunks=4, keep=False)
    env.run(until=50)
    link.demand(Key(0, 1))
    env.run()
    # At 50 the second chunk is on the wire, until 60.
    assert log == [(Key(0, 1), 160, 100), (Key(0, 7), 160, "cancelled", 500), (Key(0, 8), 260, 100)]


def test_before_its_first_chunk_a_prefetch_gives_way_at_once():
    env, link, log = link_log([Key(0, 7)], keep=False)
    env.run(until=10)
    link.demand(Key(0, 1))
    env.run()
    assert log == [(Key(0, 1), 110, 100), (Key(0, 7), 110, "cancelled", 0)]


def test_a_prefetch_that_a_layer_waits_for_is_not_pushed_aside():
    env, link, log = link_log([Key(0, 7)], chunks=4)
    env.run(until=30)
    joined = link.join(Key(0, 7))
    link.demand(Key(0, 1))
    env.run()
    assert joined.at == 100
    assert [key for key, *_ in log] == [Key(0, 7), Key(0, 1)]


def test_a_prefetch_pushed_aside_twice_still_moves_every_byte_once():
    # Chunks of 20 ns. 20-40 first chunk; demand 40-140; again 160-180 second chunk; demand 180-280; then 300-340.
    env, link, log = link_log([Key(0, 7)], chunks=4)
    env.run(until=30)
    link.demand(Key(0, 1))
    env.run(until=170)
    link.demand(Key(0, 2))
    env.run()
    assert log[-1] == (Key(0, 7), 340, 340)


def test_waiting_demand_goes_before_prefetches():
    env, link, log = link_log([Key(1, 0), Key(1, 1)])
    env.run(until=30)
    link.demand(Key(0, 1))
    env.run()
    assert [key for key, *_ in log] == [Key(1, 0), Key(0, 1), Key(1, 1)]


def test_an_idle_link_asks_again_when_woken():
    pulls: list[Key] = []
    env, link, log = link_log(pulls)
    env.run(until=50)
    pulls.append(Key(0, 3))
    env.run(until=60)
    assert log == []
    link.wake()
    env.run()
    assert log == [(Key(0, 3), 160, 100)]


def test_both_directions_at_once_slow_the_way_to_the_device():
    # Without fixed costs: 80 ns alone; back 80 ns, in which 0.45 x 80 ns of work are done; then 44 ns at full speed.
    env = simpy.Environment()
    landed = []
    link = Link(
        env,
        Dram(env, 10**15),
        CopyPrice(1000, 0, 80, 1, 0, 0.45),
        pull=lambda: None,
        keep=lambda key: True,
        landed=lambda key, ns: landed.append(ns),
        cancelled=lambda key, moved: None,
    )
    link.demand(Key(0, 0))
    link.write_back()
    env.run()
    assert landed[0] == pytest.approx(124, abs=1)
    assert link.back_meter.read(200) == {"write_back": 80}


def test_a_gigabyte_each_way_is_not_served_in_turn():
    # O24: 40 ms alone at 25 GB/s; while data flows back all the time, 40 / 0.45 = 88.9 ms; never 80 ms.
    env = simpy.Environment()
    landed = []
    price = CopyPrice(10**9, 0, 40 * 10**6, 1, 100 * 10**6, 0.45)
    link = Link(
        env,
        Dram(env, 10**15),
        price,
        pull=lambda: None,
        keep=lambda key: True,
        landed=lambda key, ns: landed.append(ns),
        cancelled=lambda key, moved: None,
    )
    link.write_back()
    link.demand(Key(0, 0))
    env.run()
    assert landed[0] == pytest.approx(88.9e6, rel=1e-3)


def test_a_meter_can_be_read_in_the_middle_of_a_busy_period():
    meter = Meter()
    meter.begin("demand", 10)
    assert meter.read(15) == {"demand": 5}
    meter.end(20)
    assert meter.read(99) == {"demand": 10}
