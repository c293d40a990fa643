"""MoE-SpAc: the released code's known answers, a literal re-telling of it, and what the paper's switches add."""

from dataclasses import replace

import numpy as np
import pytest
from policy_loop import COSTS, Host, make_setup, random_routing

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Key, LayerReport, Setup, StepInfo
from moe_spac.policies.load import load_policy
from moe_spac.policies.spac import SAVED_COPIES, LevelQueues, MoeSpac, MoeSpacRelease, Request, SlotKeys
from moe_spac.policies.utility import UtilityEstimator, calibrate, scaled_constants, transition
from moe_spac.traces.schema import Kind


@pytest.mark.parametrize(
    ("start", "counts", "utilities"),
    [
        (0, [9] * 6, [1, 2, 3, 4, 5, 5]),
        (0, [8] * 6, [1, 2, 3, 4, 4, 4]),
        (0, [6] * 4, [1, 2, 2, 2]),
        (0, [5] * 4, [1, 1, 1, 1]),
        (0, [4] * 4, [0, 0, 0, 0]),
        (0, [9, 9, 0, 1, 1, 0, 5, 9, 7, 3, 2, 2, 0, 0], [1, 2, 1, 1, 1, 0, 1, 2, 3, 3, 2, 2, 1, 0]),
        (5, [0] * 6, [4, 3, 2, 1, 0, 0]),
        (5, [3] * 4, [4, 3, 3, 3]),
        (3, [1] * 6, [2, 1, 1, 1, 1, 1]),
    ],
)
def test_released_transition(start, counts, utilities):
    u, seen = np.array([start]), []
    for f in counts:
        u = transition(u, np.array([f]) - u, 5, 1, 5)
        seen.append(int(u[0]))
    assert seen == utilities


def test_victims_by_key_then_id_below_the_threshold():
    keys = SlotKeys(10, 100, 5)
    for id_, key in ((300, 0), (12, 0), (1, 2), (0, 6)):
        keys.add(id_, key)
    order = []
    for _ in range(4):
        key, id_ = keys.coldest()
        order.append((key, id_))
        keys.remove(id_)
    assert order == [(0, 12), (0, 300), (2, 1), (6, 0)]
    assert [key < 1 for key, _ in order] == [True, True, False, False]


def test_keys_are_counted_through_all_changes():
    rng = np.random.default_rng(0)
    keys = SlotKeys(3, 8, 5)
    there: dict[int, int] = {}
    for _ in range(300):
        id_, level, layer = int(rng.integers(24)), int(rng.integers(6)), int(rng.integers(3))
        if id_ not in there:
            keys.add(id_, level)
            there[id_] = level
        elif rng.random() < 0.3:
            keys.remove(id_)
            del there[id_]
        else:
            keys.lift(id_, level)
            there[id_] = max(there[id_], level)
        if rng.random() < 0.3:
            keys.freeze(layer)
            keys.thaw(layer, np.full(8, level))
            there |= {i: level for i in there if i // 8 == layer}
        assert keys.colder() == [sum(key < tau for key in there.values()) for tau in range(7)]
        assert keys.coldest()[0] == min(there.values(), default=7)


def test_queues_serve_the_highest_level_in_order_of_age():
    queues = LevelQueues(5, 10)
    queues.push(1, 0, [0, 1, 2], [1, 3, 1])
    queues.push(2, 7, [0, 1, 2], [3, 1, 3])
    queues.push(1, 1, [3], [3])
    queues.drop_heads(1)  # 10, 11 and 12 are first in theirs, 13 is behind those of layer 2
    popped = [queues.pop(2) for _ in range(4)]
    assert popped == [Request(20, 3, 7), Request(22, 3, 7), Request(13, 3, 1), None]
    assert queues.pop(1) == (21, 1, 7)
    assert queues.pop(1) is None


@pytest.mark.parametrize(("draft", "constants"), [(8, (5, 5, 1)), (4, (5, 1, 1)), (2, (3, 1, 1)), (0, (1, 1, 1))])
def test_constants_scale_with_the_draft(draft, constants):
    assert scaled_constants(draft, 5) == constants


def test_boundaries_follow_the_mean_deviation():
    # Rises 3 and 1 (mean 2), falls 2 (mean 2).
    up, down = calibrate(np.array([3, 1, -2, 0]), 5.0, 1.0, 5, 0.1)
    assert (up, down) == (pytest.approx(4.7), pytest.approx(1.1))
    assert calibrate(np.array([0]), 5.0, 1.0, 5, 0.1) == (5.0, 1.0)
    assert calibrate(np.array([99]), 5.0, 1.0, 5, 1.0) == (5.0, 1.0)
    assert calibrate(np.array([-5, -5]), 5.0, 1.0, 5, 0.5) == (5.0, 3.0)
    assert calibrate(np.array([-9, 0]), 5.0, 1.0, 5, 0.25, most=9) == (5.0, 3.0)


def test_boundaries_may_follow_the_change_of_counts():
    estimator = UtilityEstimator(1, 3, 5, 5, 1, 0.5, by_change=True)
    estimator.update(0, np.array([9, 3, 0]))  # from nothing: rises 9 and 3, no fall
    assert estimator.boundaries[0] == (5.0, 1.0)  # 5.5, clipped
    estimator.update(0, np.array([5, 4, 0]))  # a rise of 1, a fall of 4
    assert estimator.boundaries[0] == (3.0, 2.5)


def test_four_tokens_never_heat_anything():
    policy = MoeSpacRelease()
    routing = random_routing(np.random.default_rng(0), 30, 2, 8, 2, tokens=4)
    driver = Host(policy, make_setup(policy, 2, 8, 4, draft_length=3), routing).play()
    assert not policy.utility.u.any()
    assert driver.total.copies == driver.total.hits == 0
    assert driver.total.cpu == driver.total.needed


class Retold:
    """The released code's cache and prefetcher in its own terms: slots in an ordered set, one queue a level."""

    def __init__(self, experts, slots):
        self.experts = experts
        self.slots = [(-1, -slot) for slot in range(slots, 0, -1)]
        self.queues = {level: [] for level in range(1, 6)}
        self.u = {}
        self.held = None
        self.copying = (0, 0)

    def begins(self, layer):
        for queue in self.queues.values():
            while queue and queue[0] // self.experts == layer:
                del queue[0]
        self.slots = [(6 if self._in(i, layer) else key, i) for key, i in self.slots]
        return [i % self.experts for key, i in self.slots if key == 6]

    def _in(self, id_, layer):
        return id_ >= 0 and id_ // self.experts == layer

    def ends(self, layer, counts):
        self.slots = [(0 if key == 6 else key, i) for key, i in self.slots]
        for expert in range(self.experts):
            id_ = layer * self.experts + expert
            f, u = counts.get(expert, 0), self.u.get(id_, 0)
            if f - u >= 5:
                u = min(5, u + 1)
            elif u - f >= 1:
                u = max(0, u - 1)
            self.u[id_] = u
            if u > 0:
                self.queues[u].append(id_)

    def link_free(self):
        """(id to copy, id that goes or None), or None while there is nothing to do."""
        while True:
            if self.held is None:
                level = max((q for q in self.queues if self.queues[q]), default=None)
                if level is None:
                    return None
                self.held = (self.queues[level].pop(0), level)
            id_, level = self.held
            there = [key for key, i in self.slots if i == id_]
            if there:
                self.slots = [(max(key, level) if i == id_ else key, i) for key, i in self.slots]
                self.held = None
                continue
            key, out = min(self.slots, default=(9, 0))
            if key >= 1:
                return None
            self.slots.remove((key, out))
            self.copying, self.held = (level, id_), None
            return id_, out if key == 0 else None

    def landed(self):
        self.slots.append(self.copying)


@pytest.mark.parametrize("seed", range(6))
def test_release_decides_as_the_code_does(seed):
    rng = np.random.default_rng(seed)
    layers, experts, slots = 3, 6, 5
    record = []
    driver = Driver(MoeSpacRelease(), Setup(layers, experts, 2, 1, (slots,), COSTS, draft_length=8), record=record)
    told, flying, moved = Retold(experts, slots), [], 0

    def link():
        nonlocal moved
        for _ in range(int(rng.integers(0, 3))):
            if flying:
                driver.landed(flying.pop(), 1)
                told.landed()
                continue
            before = len(record)
            key, answer = driver.next_fetch(), told.link_free()
            evicted = [note[2] for note in record[before:] if note[1] == "evict"]
            assert (key is None) == (answer is None)
            if key is not None and answer is not None:
                moved += 1
                assert key == Key(*divmod(answer[0], experts))
                assert evicted == ([] if answer[1] is None else [Key(*divmod(answer[1], experts))])
                flying.append(key)

    for index, ids in enumerate(random_routing(rng, 100, layers, experts, 2, tokens=9)):
        driver.step_begins(StepInfo(index, Kind.VERIFY, np.zeros(len(ids), np.int32), np.zeros(len(ids), bool)))
        for layer in range(layers):
            there = told.begins(layer)
            plan = driver.gate(layer, ids[:, layer])
            assert set(plan.gpu) == set(there) & set(plan.demand.experts)
            assert not plan.copies
            assert not plan.joins
            link()
            driver.layer_ends(LayerReport(layer, 0, 0, 0, 0, 0))
            told.ends(layer, plan.demand.load())
            link()
        driver.cache.check()
    assert moved > slots


@pytest.mark.parametrize("policy", [MoeSpac(), MoeSpacRelease()])
def test_large_batches_pass_by(policy):
    driver = Driver(policy, Setup(1, 8, 2, 1, (3,), COSTS, draft_length=8))
    hot = np.array([[0, 1]] * 9)
    for _ in range(3):
        driver.gate(0, hot)
        driver.layer_ends(LayerReport(0, 0, 0, 0, 0, 0))
        while (key := driver.next_fetch()) is not None:
            driver.landed(key, 0)
    before = policy.utility.u.copy()
    assert driver.cache.residents(0) == [0, 1]
    plan = driver.gate(0, np.array([[0, 5]] * 32))
    assert (plan.gpu, plan.copies, plan.kept, plan.cpu) == ((0,), (5,), frozenset(), ())
    driver.layer_ends(LayerReport(0, 0, 0, 0, 0, 0))
    assert (policy.utility.u == before).all()
    assert driver.gate(0, hot).gpu == (0, 1)


def test_release_evicts_a_hot_expert_for_a_waiting_request_and_the_paper_does_not():
    """Layer 0's experts fill the pool; layer 1's wait, and find layer 0's at key 0 when it ends the next time."""
    evicted = {}
    for policy in (MoeSpac(balance=False, adaptive=False), MoeSpacRelease()):
        record = []
        driver = Driver(policy, Setup(2, 4, 2, 1, (2,), COSTS, draft_length=8), record=record)
        for _ in range(2):
            for layer, chosen in enumerate(((0, 1), (2, 3))):
                driver.gate(layer, np.array([chosen] * 9))
                driver.layer_ends(LayerReport(layer, 0, 0, 0, 0, 0))
                while (key := driver.next_fetch()) is not None:
                    driver.landed(key, 0)
        evicted[policy.name] = next((note[2] for note in record if note[1] == "evict"), None)
    assert evicted == {"moe-spac": None, "moe-spac-release": Key(0, 0)}


def test_a_request_whose_layer_has_begun_is_dropped_only_by_the_paper():
    """The only slot is held by a hot expert of layer 0; layer 1's request waits, and is late at its next run."""
    for policy, wanted in (
        (MoeSpac(balance=False, adaptive=False), Key(0, 3)),
        (MoeSpacRelease(unified=True), Key(1, 2)),
    ):
        driver = Driver(policy, Setup(2, 4, 1, 1, (1,), COSTS, draft_length=8))

        def run(layer, expert, prefetch=True, driver=driver):
            driver.gate(layer, np.array([[expert]] * 9))
            driver.layer_ends(LayerReport(layer, 0, 0, 0, 0, 0))
            if prefetch and (key := driver.next_fetch()) is not None:
                driver.landed(key, 0)

        run(0, 0)
        run(1, 2)  # asked for, no victim: held
        run(0, 3, prefetch=False)  # 0 cools to level 0, but nobody asks the link yet
        driver.gate(1, np.array([[3]] * 9))
        assert driver.next_fetch() == wanted


def test_the_links_time_binds_when_the_slots_are_full_and_is_saved_up():
    """One slot, and a layer that takes 40 us where a copy takes 100: an empty slot is filled at once; after that a copy
    has to wait until it can be paid, and never more than SAVED_COPIES are saved up for."""
    policy = MoeSpac(adaptive=False)
    driver = Driver(policy, Setup(1, 4, 1, 1, (1,), COSTS, draft_length=8))

    def run(expert):
        """A step; the expert that is copied after it, if one is."""
        driver.step_begins(StepInfo(0, Kind.VERIFY, np.zeros(9, np.int32), np.arange(9) > 0))
        driver.gate(0, np.array([[expert]] * 9))
        driver.layer_ends(LayerReport(0, 40_000, 0, 0, 0, 0))
        driver.step_ends(0, np.arange(9) == 0)
        if (key := driver.next_fetch()) is not None:
            driver.landed(key, 100_000)
        return key and key.expert

    assert run(0) == 0
    assert [run(1) for _ in range(3)] == [None, None, 1]  # 40, 80, 120: it leaves 20
    assert [run(1) for _ in range(20)] == [None] * 20
    assert policy._saved == [240_000.0]
    while policy.utility.u[0, 1] > 0:
        run(2)
    assert driver.cache.residents(0) == [2]


@pytest.mark.parametrize("copy_ns", [100_000, 2_500_000])
def test_full_slots_take_no_more_copies_than_the_link_has_time_for(copy_ns):
    policy = MoeSpac()
    routing = random_routing(np.random.default_rng(8), 60, 2, 8, 2, tokens=9)
    costs = replace(COSTS, copy_fixed_ns=0, copy_bytes_ns=copy_ns)
    host = Host(policy, make_setup(policy, 2, 8, 3, draft_length=8, costs=costs), routing)
    host.play()
    copies, saved = sum(note[1] == "prefetch" for note in host.record), SAVED_COPIES + 1
    assert 6 < copies <= 6 + 2 * (60 * host.wall_ns / copy_ns + saved)


def test_plain_decoding_is_inert_in_the_release_and_means_last_use_in_the_paper():
    routing = random_routing(np.random.default_rng(6), 30, 2, 8, 2, tokens=1)
    totals = {}
    for spec in ("moe-spac-release", "moe-spac"):
        policy = load_policy(spec)
        totals[spec] = Host(policy, make_setup(policy, 2, 8, 4), routing).play().total
    assert totals["moe-spac-release"].copies == 0
    assert totals["moe-spac"].hits > 0


SWITCHES = [
    {},
    {"unified": False},
    {"adaptive": False},
    {"balance": False},
    {"serial_tiers": True},
    {"discard_late": False},
    {"estimator": "binary"},
    {"asynchronous": False},
    {"asynchronous": False, "unified": False},
    {"estimator": "binary", "asynchronous": False, "balance": False},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_the_policy_knows_the_cache_whatever_is_switched_off(switches):
    policy = MoeSpac(**switches)
    rng = np.random.default_rng(3)
    routing = random_routing(rng, 40, 3, 12, 3, tokens=9)
    driver = Host(policy, make_setup(policy, 3, 12, 4, top_k=3, draft_length=8), routing, rng=rng).play()
    known = [Key(*divmod(id_, 12)) for id_ in range(36) if policy.keys.resident(id_)]
    assert known == sorted(driver.cache.resident)
    assert policy._taken == len(driver.cache.resident) + len(driver.cache.flying)
    assert sum(policy.keys.count) == len(known)
    assert driver.total.copies > 0
    assert (driver.total.fetches == 0) == policy.asynchronous
    assert (driver.total.prefetches > 0) == policy.asynchronous


def test_each_of_the_five_switches_decides_something():
    """Of the five, CPU before GPU is the host's; every other one changes what is copied or evicted."""
    records = []
    for switches in SWITCHES[:6]:
        policy = MoeSpac(**switches)
        rng = np.random.default_rng(3)
        routing = random_routing(rng, 60, 3, 12, 3, tokens=9)
        host = Host(policy, make_setup(policy, 3, 12, 4, top_k=3, draft_length=8), routing, rng=rng, slow=True)
        host.play()
        records.append(host.record)
    whole, unified, adaptive, balance, serial, discard = records
    assert serial == whole
    assert all(other != whole for other in (unified, adaptive, balance, discard))


def test_without_the_estimator_the_last_batch_is_what_is_hot():
    policy = MoeSpac(estimator="binary", balance=False)
    driver = Driver(policy, Setup(1, 8, 2, 1, (4,), COSTS, draft_length=8))
    for chosen in ([[0, 1], [0, 2]], [[5, 6]]):
        driver.gate(0, np.array(chosen))
        driver.layer_ends(LayerReport(0, 0, 0, 0, 0, 0))
        asked = []
        while (key := driver.next_fetch()) is not None:
            asked.append(key.expert)
            driver.landed(key, 0)
        assert asked == sorted({e for row in chosen for e in row})
        assert np.flatnonzero(policy.utility.u[0]).tolist() == asked


def test_without_the_engine_a_layer_waits_for_its_hot_experts_alone():
    policy = MoeSpac(asynchronous=False, balance=False, adaptive=False)
    driver = Driver(policy, Setup(1, 8, 2, 1, (4,), COSTS, draft_length=8))
    for copies, cpu in (((), (0, 1)), ((0, 1), ()), ((), ())):
        plan = driver.gate(0, np.array([[0, 1]] * 9))
        assert (plan.copies, plan.cpu) == (copies, cpu)
        assert driver.next_fetch() is None
        for expert in plan.copies:
            driver.landed(Key(0, expert), 0)
        driver.layer_ends(LayerReport(0, 0, 0, 0, 0, 0))
    assert driver.cache.residents(0) == [0, 1]
    plan = driver.gate(0, np.array([[0, 7]] * 9))  # 7 has no utility yet
    assert (plan.gpu, plan.copies, plan.cpu) == ((0,), (), (7,))


@pytest.mark.parametrize("bad", [{"k": 0}, {"tau": 7}, {"tau": 0}, {"smoothing": 0.0}, {"up": 0}, {"down": 0}])
def test_impossible_parameters(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        MoeSpac(**bad)
