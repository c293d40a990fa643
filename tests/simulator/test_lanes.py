import simpy

from moe_spac.policies.interface import Key
from moe_spac.simulator.lanes import Dram, Link, Meter


def test_flows_that_fit_together_do_not_disturb_each_other():
    env = simpy.Environment()
    dram = Dram(env, 14 * 10**9)
    done = []
    for name, size in (("dma", 6000), ("cpu", 8000)):
        dram.flow(size, 1000).callbacks.append(lambda _, n=name: done.append((n, env.now)))
    env.run()
    assert done == [("dma", 1000), ("cpu", 1000)]


def test_two_flows_share_dram_max_min_fairly():
    # Wishes 6 and 8 GB/s on 10 GB/s: both get 5 until the first has moved 6000 bytes (1200 ns); the other has then
    # 2000 bytes left, at 8 GB/s 250 ns.
    env = simpy.Environment()
    dram = Dram(env, 10 * 10**9)
    done = []
    for name, size in (("dma", 6000), ("cpu", 8000)):
        dram.flow(size, 1000).callbacks.append(lambda _, n=name: done.append((n, env.now)))
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
    dram.flow(2000, 1000).callbacks.append(lambda _: done.update(small=env.now))
    dram.flow(8000, 400).callbacks.append(lambda _: done.update(large=env.now))
    env.run()
    assert done["small"] == 1000
    assert abs(done["large"] - 1000) <= 1


def link_log(pulls: list[Key]):
    env = simpy.Environment()
    log = []
    link = Link(
        env,
        Dram(env, 10**15),
        size=10,
        fixed_ns=20,
        bytes_ns=80,
        pull=lambda: pulls.pop(0) if pulls else None,
        landed=lambda key, ns: log.append((key, env.now, ns)),
    )
    return env, link, log


def test_a_prefetch_on_the_wire_delays_the_demand_behind_it():
    env, link, log = link_log([Key(0, 7)])
    env.run(until=30)
    link.demand(Key(0, 1))
    env.run()
    assert log == [(Key(0, 7), 100, 100), (Key(0, 1), 200, 100)]
    assert link.meter.read(200) == {"prefetch": 100, "demand": 100}


def test_waiting_demand_goes_before_prefetches():
    env, link, log = link_log([Key(1, 0), Key(1, 1)])
    env.run(until=1)
    link.demand(Key(0, 1))
    env.run()
    assert [key for key, _, _ in log] == [Key(1, 0), Key(0, 1), Key(1, 1)]


def test_an_idle_link_asks_again_when_kicked():
    pulls: list[Key] = []
    env, link, log = link_log(pulls)
    env.run(until=50)
    pulls.append(Key(0, 3))
    env.run(until=60)
    assert log == []
    link.kick()
    env.run()
    assert log == [(Key(0, 3), 160, 100)]


def test_a_meter_can_be_read_in_the_middle_of_a_busy_period():
    meter = Meter()
    meter.begin("demand", 10)
    assert meter.read(15) == {"demand": 5}
    meter.end(20)
    assert meter.read(99) == {"demand": 10}
