"""The learnt forecast of demand: features by their definition, weights against least squares by definition, order."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import built, compiled

from moe_spac.policies import reuse as module
from moe_spac.policies.reuse import FADE, HALF_LIVES, PRIOR, RATES, RECENCY, SEQUEL, WINDOW, Reuse


def by_definition(passes, experts):
    """Features after `passes` (sets of experts), computed from the whole history, [F, E]."""
    used = np.array([[e in p for e in range(experts)] for p in passes], float)
    found = np.zeros((RATES + len(HALF_LIVES), experts))
    found[0] = 1
    for e in range(experts):
        ages = [len(passes) - i for i in range(len(passes)) if used[i, e]]
        found[RECENCY, e] = 1 / min(ages) if ages else 0
    for row, half_life in enumerate(HALF_LIVES):
        weights = [(1 - 2 ** (-1 / half_life)) * 2 ** (-(len(passes) - 1 - i) / half_life) for i in range(len(passes))]
        found[RATES + row] = np.array(weights) @ used
    for b in range(experts if passes else 0):
        for a in passes[-1]:
            after = [used[i + 1, b] for i in range(len(passes) - 1) if used[i, a]]
            prior = found[RATES + HALF_LIVES.index(64), b]
            found[SEQUEL, b] += (sum(after) + prior) / (len(after) + 1) / len(passes[-1])
    return found


some_passes = st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=20)


@given(some_passes)
def test_features_are_recency_sequel_and_decayed_rates(passes):
    reuse = Reuse(1, 6)
    for p in passes:
        reuse.seen(0, sorted(p))
    np.testing.assert_allclose(reuse.features[0], by_definition(passes, 6), atol=1e-5)


def test_the_first_guess_is_the_mean_of_the_rates():
    reuse = Reuse(2, 4)
    reuse.seen(1, [2])
    row = reuse.demand[1]
    assert row[2] == pytest.approx(np.mean([1 - 2 ** (-1 / h) for h in HALF_LIVES]))
    assert row[[0, 1, 3]].tolist() == [0, 0, 0]
    assert reuse.demand[0].tolist() == [0, 0, 0, 0]


def test_weights_are_the_ridge_regression_of_what_followed():
    """Windows of layer 0 end after 1, 4, 7, ... passes; each is the demand after the features WINDOW passes before."""
    rng = np.random.default_rng(0)
    passes = [sorted(rng.choice(6, 2, replace=False).tolist()) for _ in range(1 + 5 * WINDOW)]
    reuse = Reuse(1, 6)
    for p in passes:
        reuse.seen(0, p)
    size = RATES + len(HALF_LIVES)
    first = np.array([0] * RATES + [1 / len(HALF_LIVES)] * len(HALF_LIVES))
    square, cross = np.eye(size) * PRIOR, PRIOR * first
    for end in range(1, len(passes) + 1, WINDOW):
        begin = max(0, end - WINDOW)
        x = by_definition(passes[:begin], 6)
        y = np.array([sum(e in p for p in passes[begin:end]) / WINDOW for e in range(6)])
        square, cross = FADE * square + x @ x.T, FADE * cross + x @ y
    np.testing.assert_allclose(reuse.weights, np.linalg.solve(square, cross), rtol=1e-3, atol=1e-4)


def test_it_learns_what_this_text_repeats():
    """Experts 0 and 1 take turns, so that of three passes one or two need either; 2 comes back now and then."""
    reuse = Reuse(1, 4)
    for i in range(400):
        reuse.seen(0, [i % 2, 2] if i % 7 == 0 else [i % 2])
    low, high = sorted(reuse.demand[0, :2].tolist())
    assert 0.35 < low <= high < 0.7
    assert reuse.demand[0, 3] < 0.1 < reuse.demand[0, 2] < 0.3


@given(st.integers(1, 50))
def test_a_prompt_counts_as_so_many_passes(tokens):
    """Reading n tokens that all need expert 1 leaves the rates of n passes that needed it."""
    read, seen = Reuse(1, 3), Reuse(1, 3)
    read.read(0, [1], [1.0], tokens)
    for _ in range(tokens):
        seen.seen(0, [1])
    np.testing.assert_allclose(read.features[0, RATES:], seen.features[0, RATES:], atol=1e-5)


@built
@given(st.integers(0, 2**32 - 1))
def test_compiled_and_numpy_are_equal_to_the_last_bit(seed):
    """Over random passes, prompts between them. Of a single expert numpy adds in another order; no model has that."""
    rng = np.random.default_rng(seed)
    layers, experts = (int(n) for n in rng.integers((1, 2), (5, 20)))
    one, other = Reuse(layers, experts), Reuse(layers, experts)
    for _ in range(12):
        tokens = int(rng.integers(2, 9)) if rng.random() < 0.1 else 0
        for layer in range(layers):
            needed = np.sort(rng.permutation(experts)[: rng.integers(1, experts + 1)]).tolist()
            named, right = dict.fromkeys(rng.permutation(experts)[: rng.integers(experts)].tolist(), 1.0), []
            for reuse, way in ((one, compiled), (other, None)):
                with mock.patch.object(module, "compiled", way):
                    if tokens:
                        reuse.read(layer, needed, [0.5] * len(needed), tokens)
                    else:
                        right.append(reuse.seen(layer, needed, named))
            assert right in ([], [len(named.keys() & needed)] * 2)
            assert one.demand.tobytes() == other.demand.tobytes()
    assert one._state.tobytes() == other._state.tobytes()
    assert one.weights.tobytes() == other.weights.tobytes()


@built
def test_what_is_not_there_is_refused():
    reuse = Reuse(2, 4)
    before = reuse.features.copy()
    for layer, needed, named in ((2, [0], ()), (-1, [0], ()), (0, [4], ()), (0, [-1], ()), (0, [0], {4: 1.0})):
        with pytest.raises(IndexError):
            reuse.seen(layer, needed, named)
    assert (reuse.features == before).all()
