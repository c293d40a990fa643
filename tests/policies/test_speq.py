"""MoE-SpeQ: calibrated confidences, phases, and eviction by what remains of the buffer."""

import numpy as np
from by_hand import begin, info, serve
from hand import setup, step
from policy_loop import make_setup, random_routing

from moe_spac.policies.future import Future
from moe_spac.policies.interface import Key
from moe_spac.policies.load import load_policy
from moe_spac.policies.speq import LookaheadBuffer, MoeSpeq
from moe_spac.simulator.replay import count


def test_confidence_is_calibrated_and_fidelity_its_mean():
    routing = random_routing(np.random.default_rng(0), 400, 4, 64, 8)
    buffer = LookaheadBuffer(0.909, 0.9, True, "verify")
    buffer.setup(make_setup(load_policy("moe-speq"), 4, 64, 16, 8))
    buffer.reveal(Future.of(4, 64, routing))
    said, true = [], []
    for at, ids in enumerate(routing):
        buffer.step_begins(info(at))
        for layer in range(4):
            named = np.flatnonzero(buffer.likely[layer])
            assert len(named) == len(np.unique(ids[:, layer]))
            said += buffer.likely[layer, named].tolist()
            true += np.isin(named, ids[:, layer]).tolist()
    said, true = np.array(said), np.array(true)
    assert abs(true.mean() - 0.909) < 0.005
    assert abs(said.mean() - 0.909) < 0.005
    for low, high in [(0.5, 0.7), (0.7, 0.85), (0.85, 0.95), (0.95, 1.0)]:
        among = (said >= low) & (said < high)
        assert abs(true[among].mean() - said[among].mean()) < 0.03


def test_while_drafting_only_the_sure_ones_come_and_nothing_named_goes():
    policy = load_policy("moe-speq:sure=0.9")
    assert isinstance(policy, MoeSpeq)
    rng = np.random.default_rng(1)
    routing = random_routing(rng, 40, 3, 32, 4)
    driver = begin(policy, 3, 32, 4, routing=routing)
    buffer = policy._parts.prefetch[0]
    assert isinstance(buffer, LookaheadBuffer)
    before, after = 0, 0
    for at, ids in enumerate(routing[:-1]):
        for layer in range(3):
            serve(driver, layer, *np.unique(ids[:, layer]))
        driver.step_ends(0, np.arange(2) == 0)
        likely, held = buffer.likely.copy(), set(driver.cache.resident)
        while (key := driver.next_fetch()) is not None:
            assert likely[key] >= 0.9
            driver.landed(key, 0)
            before += 1
        assert all(likely[key] == 0 for key in held - set(driver.cache.resident))
        driver.step_begins(info(at + 1))
        while (key := driver.next_fetch()) is not None:
            driver.landed(key, 0)
            after += likely[key] < 0.9
    assert before > 20
    assert after > 20


def test_the_least_likely_goes_first_and_only_for_something_likelier():
    buffer = LookaheadBuffer(1.0, 0.9, True, "draft")
    buffer.setup(make_setup(load_policy("moe-speq"), 2, 4, 2))
    buffer.likely[1] = [0.5, 0.9, 0, 0.7]
    ranks = {e: buffer.likely[1, e] for e in range(4)}
    assert sorted(ranks, key=ranks.__getitem__) == [2, 0, 3, 1]
    assert buffer.replaces(Key(1, 3), Key(1, 0), None)  # type: ignore[arg-type]
    assert not buffer.replaces(Key(1, 0), Key(1, 3), None)  # type: ignore[arg-type]
    buffer.drafting = True
    assert not buffer.replaces(Key(1, 3), Key(1, 0), None)  # type: ignore[arg-type]
    assert buffer.replaces(Key(1, 3), Key(1, 2), None)  # type: ignore[arg-type]


def test_what_the_window_still_needs_is_kept():
    """Three layers with one expert each, always the same, in two slots. Recency drops what comes next, 18 misses; the
    buffer keeps the two that the pass still needs, and the first layer's passes through: 2 hits from the second on."""
    steps = [step([[[0]] * 3] * 2, position=2 * i, drafted=1) for i in range(6)]
    for spec, misses in (("ar-lru:scope=global", 18), ("moe-speq:fidelity=1,prefetch=false", 8)):
        total = count(steps, load_policy(spec), setup(3, 6, [2])).total
        assert total.needed - total.hits == misses
        assert total.prefetches == 0


def test_all_that_a_true_twin_names_is_there():
    """Everything is new each time, in every layer: all but the first layer's comes in while the layers before run."""
    steps = [step([[[e]] * 3] * 2, position=2 * e, drafted=1) for e in range(6)]
    total = count(steps, load_policy("moe-speq:fidelity=1"), setup(3, 6, [2])).total
    assert (total.hits, total.prefetches, total.prefetches_used) == (12, 12, 12)
