import numpy as np
import pytest
from hand import decode, setup, step

from moe_spac.policies.driver import Driver
from moe_spac.policies.future import Future
from moe_spac.policies.interface import Key, LayerReport
from moe_spac.policies.load import load_policy
from moe_spac.simulator.engine import step_info
from moe_spac.simulator.regret import watch


def play(steps, policy: str, slots: int, layers: int = 1, experts: int = 6):
    chosen = load_policy(policy)
    future = Future.of(layers, experts, (s.experts for s in steps))
    picks = watch(chosen, future, layers, len(steps))
    driver = Driver(chosen, setup(layers, experts, [slots] * layers), future)
    for index, one in enumerate(steps):
        driver.step_begins(step_info(index, one))
        for layer in range(layers):
            plan = driver.gate(layer, one.experts[:, layer])
            for expert in plan.copies:
                driver.landed(Key(layer, expert), 0)
            driver.layer_ends(LayerReport(layer, 0, 0, 0, 0, 0))
        driver.step_ends(one.accepted, one.kept)
    return picks


def test_regret_by_hand():
    """Requests 0 1 2 0 1 2 0 with 2 slots. LRU gives up 0, 1, 2, 0 and 1 at times 2 to 6.

    Time 2: 0 is next at 3, 1 at 4: 1 event lost. Time 3: of 1 (4) and 2 (5): 1. Time 4: of 2 (5) and 0 (6): 1.
    Time 5: of 0 (6) and 1 (never: 7): 1. Time 6: of 1 and 2, both never: none.
    """
    picks = play(decode([0], [1], [2], [0], [1], [2], [0]), "ar-lru", 2)
    assert (picks.picks, picks.optimal, picks.regret) == (5, 1, 4)
    assert picks.metrics()["victim_regret_events_mean"] == pytest.approx(0.8)


def test_the_optimum_has_no_regret():
    rng = np.random.default_rng(7)
    steps = [step([[sorted(rng.choice(6, 2, replace=False).tolist()) for _ in range(3)]]) for _ in range(60)]
    best, lru = (play(steps, policy, 3, layers=3) for policy in ("min:bypass=false", "ar-lru"))
    assert (best.optimal, best.regret) == (best.picks, 0)
    assert lru.optimal < lru.picks
    assert lru.regret > 0
