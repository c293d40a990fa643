"""Signals by hand; their values against the counting replay, sorting and brute force."""

from itertools import islice

import numpy as np
import pytest
from hand import decode, step, trace

from moe_spac.policies.utility import transition
from moe_spac.simulator import signals
from moe_spac.simulator.counting import count_fast
from moe_spac.simulator.signal_values import (
    NEVER,
    as_lookahead,
    chances,
    demand,
    difference,
    hit_rate,
    hits,
    hits_in_pool,
    lookahead,
    next_use,
    prefetched,
    quality,
    reliability,
    residents,
)
from moe_spac.simulator.signals import (
    Combined,
    Followers,
    Frequency,
    Gates,
    NextTokens,
    Of,
    OwnTokens,
    Pass,
    Rate,
    Recency,
    Scored,
    Utility,
    passes,
    scored,
)
from moe_spac.traces.reader import open_trace
from moe_spac.traces.synth import synthesize

A_FEW = [(0, 1), (0, 2), (0, 1)]  # one layer of four experts


def told(*sets, experts=4, tokens=None, named=None):
    """Passes of one layer and one row each."""
    tokens = tokens or [-1] * len(sets)
    rows = [np.array([[each]]) for each in sets]
    return [
        Pass(
            signals.chosen(row, experts),
            signals.chosen(row, experts),
            signals.chosen(row, experts) > 0,
            row,
            np.array([token]),
            np.array([True]),
            t > 0,
            0,
            named,
        )
        for t, (row, token) in enumerate(zip(rows, tokens, strict=True))
    ]


def routed(needs):
    """A trace in which pass t needs what needs[t] says, the same number everywhere."""
    rows = [[np.flatnonzero(layer).tolist() for layer in need] for need in needs]
    return trace([step([row], position=t) for t, row in enumerate(rows)], needs.shape[2])


def random_needs(seed=0, passes=60, layers=3, experts=8, k=3):
    """Popular experts, and no order."""
    rng = np.random.default_rng(seed)
    weight = rng.random((layers, experts))
    rank = np.argsort(-(weight + rng.random((passes, layers, experts))), axis=-1)
    needs = np.zeros((passes, layers, experts), bool)
    np.put_along_axis(needs, rank[..., :k], True, axis=-1)
    return needs


# Passes


def test_passes_by_hand():
    verify = step([[[0, 1]], [[0, 2]], [[3, 2]]], drafted=2, accepted=1)
    (now,) = passes(trace([verify], 4))
    assert now.counts.tolist() == [[2, 1, 2, 1]]
    assert now.kept.tolist() == [[2, 1, 1, 0]]
    assert now.last.tolist() == [[True, False, True, False]]
    assert signals.only_rejected(now).tolist() == [[0, 0, 0, 1]]
    assert signals.counts(now)[0] == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1 / 3])
    assert signals.kept_counts(now)[0] == pytest.approx([1, 1 / 2, 1 / 2, 0])
    assert not now.goes_on


def test_passes_go_on_within_a_sequence_and_stop_at_the_most():
    found = passes(trace(decode(*A_FEW), 4), 2)
    assert [now.goes_on for now in found] == [False, True]


def test_gates_name_the_layers_after():
    said = np.zeros((1, 3, 2, 1), np.uint8)  # one row, three layers, two ahead, top-1
    said[0, 0] = [[5], [6]]
    said[0, 1] = [[7], [7]]  # the second would be layer 3, which is not there
    named = signals._named(said, 8)
    assert np.argwhere(named).tolist() == [[0, 1, 5], [0, 2, 7], [1, 2, 6]]


# Signals


def test_rate_recency_and_frequency_by_hand():
    now = told(*A_FEW)
    assert scored(Rate(1), now)[:, 0].tolist() == [
        [0.5, 0.5, 0, 0],
        [0.75, 0.25, 0.5, 0],
        [0.875, 0.625, 0.25, 0],
    ]
    assert scored(Recency(), now)[2, 0].tolist() == [1, 1, 0.5, 0]
    assert scored(Frequency(), now)[2, 0] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert scored(Frequency(by_age=True), now)[2, 0] == pytest.approx([1, 2 / 3, 1 / 6, 0])


def test_utility_is_that_of_moe_spac():
    (now,) = passes(trace([step([[[0, 1]], [[0, 2]], [[0, 2]]], drafted=2, accepted=1)], 4))
    moved = transition(np.zeros(4, np.int64), now.counts[0].astype(np.int64), 1, 1, 3)  # top 3, up 1 for two drafts
    assert Utility(1, 4, 2).after(now)[0].tolist() == (moved / 3).tolist()


def test_followers_come_back():
    now = told((0, 1), (2, 3), (0, 1), (2, 3), (0, 1))
    last = scored(Followers(1, 4), now)[-1, 0]
    assert set(np.argsort(-last)[:2]) == {2, 3}, "they came after 0 and 1 both times"


def test_followers_by_hand():
    now = told((0,), (1,), (0,))
    signal = Followers(1, 4)
    said = [signal.after(each)[0] for each in now]
    rates = scored(Rate(64), now)[:, 0]
    assert said[1] == pytest.approx(rates[1]), "nothing has followed 1"
    assert said[2] == pytest.approx((np.array([0, 1, 0, 0]) + rates[2]) / 2), "1 has followed 0 once"


def test_own_tokens_when_they_are_known():
    now = told((0, 1), (2, 3), (0, 1), tokens=[7, 9, 7])
    signal = OwnTokens(1, 4)
    for each in now[:2]:
        signal.after(each)
    mean = np.full(4, 0.5)
    assert signal.before(np.array([7]), None)[0] == pytest.approx((np.array([1, 1, 0, 0]) + mean) / 2)
    both = 1 - (1 - (np.array([1, 1, 0, 0]) + mean) / 2) * (1 - mean)
    assert signal.before(np.array([7, 8]), None)[0] == pytest.approx(both), "of 8 only the mean is known"


def test_next_tokens_learn_what_follows():
    now = told((0, 1), (2, 3), (0, 1), tokens=[7, 9, 7])
    signal = NextTokens(1, 4)
    said = [signal.after(each)[0] for each in now]
    mean = 0.5  # of the two rows that followed something, one chose each
    assert said[2] == pytest.approx((np.array([0, 0, 1, 1]) + mean) / 2)


def test_gates_speak_before_the_pass():
    named = np.zeros((2, 1, 4), np.int16)
    named[1, 0, 3] = 1
    now = told(*A_FEW, named=named)
    assert scored(Gates(2), now, late=True)[0, 0].tolist() == [0, 0, 0, 1]
    assert not scored(Gates(2), now).any()


def test_combined_is_ridge_regression():
    """Against the normal equations of everything seen, solved once."""
    needs = random_needs()
    now = passes(routed(needs))
    parts, window, prior = [Rate(2), Recency()], 2, 5.0
    said = scored(Combined(*parts, window=window, fade=1.0, prior=prior), now)
    columns = np.stack([np.ones(needs.shape), scored(Rate(2), now), scored(Recency(), now)], axis=-1)
    last = len(needs) - 1
    x = columns[: last - window + 1].reshape(-1, 3)
    y = np.mean([needs[1 + w : last - window + 2 + w] for w in range(window)], axis=0).reshape(-1)
    weights = np.linalg.solve(np.eye(3) * prior + x.T @ x, prior * np.array([0, 0.5, 0.5]) + x.T @ y)
    assert said[-1] == pytest.approx(columns[-1] @ weights, abs=1e-4)


def test_combined_learns_from_what_it_said_last():
    """With late parts the features are those of the last question before the pass."""
    needs = random_needs(1)
    now = passes(routed(needs))
    sure = np.roll(needs, -1, axis=0).astype(np.float32)
    told_late = Combined(Scored(np.zeros(needs.shape, np.float32), sure), window=1)
    said = scored(told_late, now, late=True)
    assert said[-2] == pytest.approx(sure[-2], abs=0.1), "the late part is the next demand itself"


def test_scored_repeats():
    needs = random_needs(2)
    now = passes(routed(needs))
    once = scored(Rate(4), now)
    assert (scored(Scored(once), now) == once).all()
    assert (scored(Scored(once, once + 1), now, late=True)[:-1] == once[:-1] + 1).all()


@pytest.mark.parametrize("late", [False, True])
def test_no_signal_sees_the_future(late):
    """Scores of a trace's first part do not hang on what comes after it."""
    now = passes(synthesize("qwen3-30b-a3b", 24, draft_length=3, acceptance=0.7))
    layers, experts = now[0].counts.shape
    make = [
        lambda: Of(signals.counts),
        lambda: Rate(4),
        Recency,
        lambda: Frequency(True),
        lambda: Utility(layers, experts, 3),
        lambda: Followers(layers, experts),
        lambda: OwnTokens(layers, experts),
        lambda: NextTokens(layers, experts),
        lambda: Combined(signals.Recency(), *map(signals.Rate, signals.HALF_LIVES), OwnTokens(layers, experts)),
    ]
    for new in make:
        known = 6 - late  # the last one has no next pass whose tokens could be known
        assert (scored(new(), now[:6], late)[:known] == scored(new(), now, late)[:known]).all()


# Values


@pytest.mark.parametrize("slots", [1, 2, 4, 7])
def test_hits_equal_the_counting_replay(slots):
    """Scores that say nothing make LRU, the next use the optimum; also where a pass needs more than the slots."""
    needs = random_needs(3)
    routing = routed(needs)
    for scores, policy in ((np.zeros(needs.shape), "ar-lru"), (lookahead(needs, None), "min")):
        assert hits(scores, needs, slots).tolist() == count_fast(routing, policy, slots * 3).hits.tolist()


def test_hits_equal_the_counting_replay_on_a_real_trace():
    routing = trace(list(islice(open_trace("gpt-oss-20b").steps(), 120)), 32)
    needs = demand(passes(routing))
    assert hits(np.zeros(needs.shape), needs, 8).tolist() == count_fast(routing, "ar-lru", 8 * 24).hits.tolist()


def test_prefetch_of_the_best_absent_by_hand():
    needs = demand(told((0, 1), (0, 2), (3, 2), (0, 1)))
    there = residents(np.zeros(needs.shape), needs, 2)
    assert [np.flatnonzero(row).tolist() for row in there[:, 0]] == [[], [0, 1], [0, 2], [2, 3]]
    scores = np.zeros(needs.shape)
    scores[:, 0] = [[9, 9, 0, 1], [0, 0, 0, 5], [0, 7, 6, 0], [0, 0, 0, 0]]  # says 3, 3 and 1
    assert prefetched(scores, needs, there, 1, 0) == (2 / 3, 2 / 4), "2, 3, 0 and 1 are missed; 3 and 1 were copied"
    assert prefetched(scores, needs, there, 2, 0) == (4 / 6, 1.0), "then 2 and 0 are as well, or 0 by recency"


def test_a_pool_of_one_layer_is_a_cache():
    needs = random_needs(4, layers=1)
    scores = scored(Rate(4), passes(routed(needs)))
    assert hits_in_pool(scores, needs, 4).tolist() == hits(scores, needs, 4).tolist()


def test_a_pool_by_hand():
    """Two layers share two slots: what layer 1 needs drives out layer 0's, unless that is ranked, or named, higher."""
    needs = np.zeros((2, 2, 3), bool)
    needs[:, 0, 0] = needs[:, 1, 1:] = True
    flat = np.zeros(needs.shape)
    assert hits_in_pool(flat, needs, 1).tolist() == [[0, 0], [0, 1]]
    ranked = flat.copy()
    ranked[:, 0, 0] = 1
    assert hits_in_pool(ranked, needs, 1).tolist() == [[0, 0], [1, 1]]


def test_a_pool_is_told_before_the_pass_and_by_gates():
    needs = np.zeros((2, 2, 3), bool)
    needs[0, 1, 0] = needs[0, 0, 0] = True  # both stay
    needs[1, 0, 1] = needs[1, 1, 0] = True  # layer 0 needs room: its own 0, or what layer 1 will need?
    scores = np.zeros(needs.shape)
    scores[:, 0, 0] = 0.5
    assert hits_in_pool(scores, needs, 1)[1].tolist() == [0, 0]
    assert hits_in_pool(scores, needs, 1, before=np.where(needs[[1, 1]], 0.9, 0.0))[1].tolist() == [0, 1]
    named = np.zeros((1, 2, 3), np.int16)
    named[0, 1, 0] = 1
    assert hits_in_pool(scores, needs, 1, named=[None, named])[1].tolist() == [0, 1]


def test_next_use_by_hand():
    needs = demand(told(*A_FEW))
    assert next_use(needs)[:, 0].tolist() == [[1, 2, 1, NEVER], [2, 2, NEVER, NEVER], [NEVER] * 4]


def test_sight_of_nothing_is_lru_and_more_sight_never_hits_less_here():
    needs = random_needs(5)
    rates = [hit_rate(hits(lookahead(needs, ahead), needs, 4), needs, 0) for ahead in (0, 1, 2, 4, None)]
    assert rates[0] == hit_rate(hits(np.zeros(needs.shape), needs, 4), needs, 0)
    assert rates == sorted(rates)
    assert as_lookahead(rates[2], rates[:4], [0, 1, 2, 4]) == pytest.approx(2)
    assert as_lookahead(0.0, rates[:4], [0, 1, 2, 4]) == 0


def test_quality_by_sorting():
    needs = random_needs(6)
    scores = scored(Rate(8), passes(routed(needs)))
    right = recalled = total = 0
    for t in range(7, len(needs) - 1):
        for layer in range(3):
            want = set(np.flatnonzero(needs[t + 1, layer]).tolist())
            age = [max((u for u in range(t + 1) if needs[u, layer, e]), default=-1) for e in range(8)]
            order = sorted(range(8), key=lambda e: (-(scores[t, layer, e] + 1e-7 * (age[e] + 1) / len(needs)), e))
            right += len(want & set(order[: len(want)]))
            recalled += len(want & set(order[:5]))
            total += len(want)
    found = quality(scores, needs, 5, 7)
    assert found.precision == pytest.approx(right / total)
    assert found.recall == pytest.approx(recalled / total)


def test_quality_of_the_truth_and_of_nothing():
    needs = random_needs(7)
    truth = np.roll(needs, -1, axis=0).astype(float)
    best = quality(truth, needs, 3, 4)
    assert (best.precision, best.recall) == (1, 1)
    assert best.skill > 0.999
    assert best.off == 0
    assert abs(quality(np.zeros(needs.shape), needs, 3, 4).skill) < 0.01


def test_chances_are_frequencies():
    said = np.repeat([0.0, 1.0, 2.0], 1000)
    came = np.concatenate([np.arange(1000) < n for n in (100, 500, 900)])
    assert chances(said, came, np.array([0.0, 1.0, 2.0, 5.0])) == pytest.approx([0.1, 0.5, 0.9, 0.9], abs=1e-3)
    curve = reliability(said, came)
    assert curve.tolist() == [[0, 1, 2], [0.1, 0.5, 0.9], [1000, 1000, 1000]]


def test_a_difference_and_its_interval():
    needs = np.ones((8, 1, 4), bool)
    one, other = np.full((8, 1), 3), np.full((8, 1), 1)
    assert difference(one, other, needs, np.arange(8) // 2, 2) == (0.5, 0.5, 0.5)
    mixed = np.where(np.arange(8)[:, None] < 4, 3, 1)
    gain, low, high = difference(mixed, other, needs, np.arange(8) // 2, 0)
    assert gain == 0.25
    assert low < 0.25 < high
