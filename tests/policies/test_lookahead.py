"""Short sight: nothing seen is the fallback, all seen is the optimum, and what lies between (C4, O3)."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hand import decode, rates, setup, step, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.policies.driver import Driver
from moe_spac.policies.future import NEVER, Future
from moe_spac.policies.interface import Key
from moe_spac.policies.load import load_policy
from moe_spac.policies.lookahead import noisy
from moe_spac.simulator.engine import setup_for
from moe_spac.simulator.metrics import Limited
from moe_spac.simulator.replay import count
from moe_spac.traces.reader import open_trace
from moe_spac.traces.schema import Step


def misses(steps: list[Step], spec: str, *slots: int, experts: int = 6) -> int:
    layers = steps[0].experts.shape[1]
    total = count(steps, load_policy(spec), setup(layers, experts, slots)).total
    return total.needed - total.hits


def random_steps(seed: int, steps: int = 25, layers: int = 2, experts: int = 7) -> list[Step]:
    rng = np.random.default_rng(seed)
    share = np.log(rng.dirichlet(np.full(experts, 0.5), size=layers) + 1e-3)
    counts = rng.integers(1, 4, size=steps).tolist()
    return [
        step(np.argsort(share + rng.gumbel(size=(n, layers, experts)))[:, :, -2:].tolist(), i)
        for i, n in enumerate(counts)
    ]


def run(steps: list[Step], spec: str, slots: int) -> Driver:
    policy = load_policy(spec)
    return count(steps, policy, setup_for(trace(steps, 7).header.target, rates(), policy, slots, 0))


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 14), st.sampled_from(["layer", "global"]))
def test_no_sight_is_the_fallback_and_all_sight_the_optimum_c4(seed, slots, scope):
    steps = random_steps(seed)
    for beyond, fallback in (("lru", "ar-lru"), ("lfru", "lfru")):
        blind = run(steps, f"lookahead:ahead=0,beyond={beyond},scope={scope}", slots)
        same = run(steps, f"{fallback}:scope={scope}", slots)
        assert blind.total == same.total
        assert blind.cache.resident.keys() == same.cache.resident.keys()
        sighted = run(steps, f"lookahead:ahead=none,beyond={beyond},scope={scope}", slots)
        assert sighted.total.hits == run(steps, f"min:scope={scope}", slots).total.hits
        lost = run(steps, f"lookahead:recall=0,garble=false,beyond={beyond},scope={scope}", slots)
        assert lost.total == same.total


def test_by_hand():
    """Two slots, 0 1 2 0 1: at 2, recency would drop 0. Seeing one step ahead keeps 0, seeing two keeps both."""
    steps = decode([0], [1], [2], [0], [1])
    assert [misses(steps, f"lookahead:ahead={w}", 2) for w in (0, 1, 2)] == [5, 4, 3]


def test_a_step_ahead_reaches_to_the_same_layer_of_the_next_step():
    """A pool of two. At step 1, layer 0, recency would drop its own 0, the older, which the next step needs there."""
    steps = [step([[[0], [0]]]), step([[[1], [1]]]), step([[[0], [2]]])]
    assert [misses(steps, f"lookahead:ahead={w},scope=global", 2) for w in (0, 1)] == [6, 5]


def test_what_is_seen_wrongly():
    rng = np.random.default_rng(0)
    routing = [np.argsort(rng.random((1, 2, 8)))[:, :, :3] for _ in range(400)]
    true = Future.of(2, 8, routing)
    for garble in (False, True):
        seen = noisy(true, 2, 8, 0.7, garble, seed=3)
        right = wrong = 0
        for key in (Key(layer, e) for layer in range(2) for e in range(8)):
            real, forecast = uses(true, key), uses(seen, key)
            right += len(real & forecast)
            wrong += len(forecast - real)
        assert abs(right / 2400 - 0.7) < 0.03
        assert wrong == (2400 - right if garble else 0)
        again = noisy(true, 2, 8, 0.7, garble, seed=3)
        assert uses(again, Key(1, 5)) == uses(seen, Key(1, 5)) != uses(noisy(true, 2, 8, 0.7, garble, 4), Key(1, 5))


def uses(future: Future, key: Key) -> set[int]:
    found, at = set(), -1
    while (at := future.next_use(key, at)) != NEVER:
        found.add(at)
    return found


def test_the_window_is_kept():
    """Three layers with one expert each, always the same, and two slots: recency always drops what comes next. The
    oracle keeps the two that the step still needs, and the first passes through: two hits from the second step on."""
    steps = decode(*[[0]] * 6, layers=3)
    assert misses(steps, "ar-lru:scope=global", 2) == 18
    assert misses(steps, "oracle-window:prefetch=false", 2) == 18 - 2 * 5


def test_the_window_is_brought_in_and_nothing_else():
    """Every layer needs something new every time: all but the first layer's can be there in time, in two slots."""
    steps = decode(*[[e] for e in range(6)], layers=3)
    kept = count(steps, load_policy("oracle-window:prefetch=false"), setup(3, 6, [2])).total
    assert (kept.hits, kept.prefetches) == (0, 0)
    brought = count(steps, load_policy("oracle-window"), setup(3, 6, [2])).total
    assert (brought.hits, brought.prefetches, brought.prefetches_used, brought.prefetches_wasted) == (12, 12, 12, 0)


def test_the_window_looks_no_further_than_its_step():
    steps = random_steps(1, layers=1)  # with one layer nothing is left to see
    assert run(steps, "oracle-window", 3).total == run(steps, "ar-lru:scope=global", 3).total


def test_refuses_nonsense():
    for spec in ("lookahead:ahead=-1", "lookahead:recall=1.5", "oracle-window:recall=-0.1"):
        with pytest.raises(Exception, match="must be"):
            load_policy(spec)


def test_the_curve_on_a_real_trace_has_the_published_shape():
    """Published for gpt-oss-120b, an eighth resident (moe "foresight" study): .15 .29 .48 .74 of the gap to the optimum
    for W = 1 2 4 8, and .42 .31 .19 at W = 4 with recall .9 .7 .5. So: rising, by less and less for each step of sight,
    and falling with recall. The figures themselves are another model's."""
    whole = Limited(open_trace("gpt-oss-20b"), 100).steps()
    steps = [replace(s, experts=s.experts[:, ::6], weights=None) for s in whole]  # 4 of 24 layers
    base, best = (misses(steps, spec, *[8] * 4, experts=32) for spec in ("ar-lru", "min"))

    def closed(spec: str) -> float:
        return (base - misses(steps, spec, *[8] * 4, experts=32)) / (base - best)

    curve = [closed(f"lookahead:ahead={w}") for w in (0, 1, 2, 4, 8)]
    assert curve[0] == 0
    assert all(a < b for a, b in pairwise(curve))
    gains = np.diff(curve) / np.diff([0, 1, 2, 4, 8])  # for each step of sight
    assert all(a > b for a, b in pairwise(gains.tolist()))
    noise = [closed(f"lookahead:ahead=4,recall={r}") for r in (0.9, 0.7, 0.5)]
    assert curve[3] > noise[0] > noise[1] > noise[2]
