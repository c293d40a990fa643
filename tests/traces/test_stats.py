"""Statistics: against brute force on random routing, and against the published figures of the bundled trace."""

from collections import OrderedDict
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.traces import open_trace
from moe_spac.traces.schema import Kind, Step
from moe_spac.traces.stats import (
    Routing,
    acceptance,
    cosines,
    decode_routing,
    domain_shares,
    draft_load,
    entropy,
    gini,
    hit_rate,
    independent_overlap,
    independent_union,
    lru_depths,
    overlap,
    reuse,
    shares,
    top_share,
    unions,
)
from moe_spac.traces.views import only_sequences


@st.composite
def routings(draw) -> tuple[np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    count = draw(st.integers(3, 7))
    experts = np.argsort(rng.random((sum(lengths), 2, count)) + rng.random(count), axis=-1)[..., :2]
    return experts.astype(np.uint8), np.r_[0, np.cumsum(lengths)], count


def sets_of(experts: np.ndarray, offsets: np.ndarray, layer: int) -> list[list[list[int]]]:
    return [experts[a:b, layer].tolist() for a, b in pairwise(offsets)]


@settings(max_examples=40, deadline=None)
@given(routing=routings(), lag=st.integers(1, 4))
def test_overlap_equals_brute_force(routing, lag):
    experts, offsets, _ = routing
    found = overlap(experts, offsets, lag)
    for layer in range(2):
        pairs = [
            len(set(row) & set(tokens[t - lag])) / 2
            for tokens in sets_of(experts, offsets, layer)
            for t, row in enumerate(tokens)
            if t >= lag
        ]
        assert found[layer] == pytest.approx(np.mean(pairs)) if pairs else np.isnan(found[layer])


@settings(max_examples=40, deadline=None)
@given(routing=routings(), window=st.integers(1, 6))
def test_unions_equal_brute_force(routing, window):
    experts, offsets, _ = routing
    found = unions(experts, offsets, [window])[0]
    for layer in range(2):
        sizes = [
            len({e for row in tokens[t : t + window] for e in row})
            for tokens in sets_of(experts, offsets, layer)
            for t in range(len(tokens) - window + 1)
        ]
        assert found[layer] == pytest.approx(np.mean(sizes)) if sizes else np.isnan(found[layer])


def lru_hits(tokens: list[list[int]], slots: int, atomic: bool) -> int:
    """An LRU cache kept as an ordered dictionary, oldest first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in tokens:
        if atomic:
            hits += sum(e in cache for e in row)
        for e in reversed(row) if atomic else row:
            hits += 0 if atomic else e in cache
            cache[e] = None
            cache.move_to_end(e)
            while not atomic and len(cache) > slots:
                cache.popitem(last=False)
        while len(cache) > slots:
            cache.popitem(last=False)
    return hits


@settings(max_examples=40, deadline=None)
@given(routing=routings(), slots=st.integers(1, 8), atomic=st.booleans())
def test_lru_equals_a_cache_that_is_run(routing, slots, atomic):
    experts, offsets, count = routing
    found = hit_rate(lru_depths(experts, offsets, count, atomic), slots)
    for layer in range(2):
        hits = sum(lru_hits(tokens, slots, atomic) for tokens in sets_of(experts, offsets, layer))
        assert found[layer] == pytest.approx(hits / (2 * len(experts)))


def test_shares_top_share_and_entropy_by_hand():
    experts = np.array([[[0, 1]], [[0, 2]], [[0, 1]], [[0, 3]]], np.uint8)  # counts 4, 2, 1, 1 of 8
    share = shares(experts, 5)
    assert share.tolist() == [[0.5, 0.25, 0.125, 0.125, 0.0]]
    assert top_share(share, 0.4).tolist() == [0.75]
    assert entropy(share)[0] == pytest.approx(1.75 * np.log(2) / np.log(5))


@settings(max_examples=40, deadline=None)
@given(routing=routings(), within=st.integers(1, 6))
def test_reuse_equals_brute_force(routing, within):
    experts, offsets, _ = routing
    found = reuse(experts, offsets, [within])[0]
    for layer in range(2):
        near = 0
        for tokens in sets_of(experts, offsets, layer):
            for t, row in enumerate(tokens):
                recent = {e for past in tokens[max(0, t - within) : t] for e in past}
                near += len(set(row) & recent)
        assert found[layer] == pytest.approx(near / (2 * len(experts)))


def test_gini_by_hand():
    """Two alike: 0; all to one of four: 3/4; shares 1/2, 1/4, 1/4, 0: mean difference over twice the mean is 3/8."""
    share = np.array([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0]])
    differences = np.abs(share[:, :, None] - share[:, None, :]).mean(axis=(1, 2)) / (2 * share.mean(axis=1))
    assert differences.tolist() == [0, 0.75, 0.375]
    assert gini(share) == pytest.approx(differences)


def test_tokens_without_memory_by_simulation():
    """Tokens that choose two of four with given chances: overlap of two, union of three."""
    rng = np.random.default_rng(0)
    chance = np.array([0.9, 0.6, 0.3, 0.2])
    chosen = rng.random((40_000, 3, 4)) < chance  # each expert by itself, as the formula has it
    share = (chance / 2)[None]
    assert independent_union(share, 2, 3)[0] == pytest.approx(chosen.any(axis=1).sum(axis=1).mean(), abs=0.02)
    both = (chosen[:, 0] & chosen[:, 1]).sum(axis=1).mean() / 2
    assert independent_overlap(share, 2)[0] == pytest.approx(both, abs=0.01)


def test_draft_load_by_hand():
    """One layer, top 2 of 6: the first token 0 1, the accepted draft 1 2, the rejected one 2 5."""
    ids = np.array([[[0, 1]], [[1, 2]], [[2, 5]]], np.uint8)
    step = Step(0, 0, Kind.VERIFY, np.arange(3), np.arange(3), np.arange(3) > 0, 1, ids)
    found = draft_load([step], 6)
    assert found is not None
    assert (found.experts, found.kept_experts, found.ratio) == (4, 3, 4 / 3)
    assert (found.rejected_found, found.accepted_found) == (0.5, 0.5)
    assert draft_load([], 6) is None


def test_cosines_between_domains():
    experts = np.array([[[0, 1]], [[0, 1]], [[0, 2]], [[3, 4]]], np.uint8)
    routing = Routing(experts, np.array([0, 2, 3, 4]), np.array([0, 1, 2]))
    found = cosines(domain_shares(routing, ({"domain": "a"}, {"domain": "b"}, {"domain": "c"}), 5))
    assert found == pytest.approx({("a", "b"): 0.5, ("a", "c"): 0.0, ("b", "c"): 0.0})


def test_acceptance_by_hand():
    def verify(drafted: int, accepted: int) -> Step:
        n = drafted + 1
        ids = np.zeros((n, 1, 1), np.uint8)
        return Step(0, 0, Kind.VERIFY, np.arange(n), np.arange(n), np.arange(n) > 0, accepted, ids)

    found = acceptance([verify(3, 3), verify(3, 1), verify(3, 0), verify(1, 1)])
    assert found is not None
    assert (found.verify_steps, found.rate, found.tokens_per_verify) == (4, 0.5, 2.25)
    assert found.by_position == pytest.approx((3 / 4, 1 / 3, 1 / 3))
    assert acceptance([]) is None


@cache
def bundled() -> Routing:
    return decode_routing(open_trace("gpt-oss-20b"))


@cache
def mmlu_pro_test() -> Routing:
    trace = open_trace("gpt-oss-20b")
    chosen = [i for i, s in enumerate(trace.header.sequences) if s["dataset"] == "mmlu_pro_test"]
    assert len(chosen) == 28
    return decode_routing(only_sequences(trace, chosen))


def test_bundled_trace_has_the_published_locality():
    """Figures computed from the source's arrays by other code, before this package existed."""
    experts, offsets = bundled().experts, bundled().offsets
    assert (experts.shape, len(offsets)) == ((57_499, 24, 4), 166)
    lag1 = overlap(experts, offsets)
    assert lag1.mean() == pytest.approx(0.433, abs=5e-4)
    assert (lag1[0], lag1[12]) == pytest.approx((0.189, 0.593), abs=5e-4)
    known = {2: 6.27, 3: 8.01, 4: 9.39, 5: 10.5, 6: 11.5, 8: 13.0, 16: 16.4, 32: 19.4, 64: 21.9, 128: 23.9}
    found = dict(zip(known, unions(experts, offsets, list(known)).mean(axis=1), strict=True))
    assert {n: float(f"{value:.3g}") for n, value in found.items()} == known


def test_bundled_trace_has_the_published_figures_of_independent_draws():
    share = shares(bundled().experts, 32)
    assert independent_overlap(share, 4).mean() == pytest.approx(0.198, abs=5e-4)
    known = {2: 7.2, 3: 9.8, 4: 12.0, 5: 13.8, 6: 15.3, 8: 17.7, 16: 22.8, 32: 26.5, 64: 28.9, 128: 30.4}
    assert {n: round(float(independent_union(share, 4, n).mean()), 1) for n in known} == known


def test_bundled_trace_has_the_published_overlap_at_longer_lags():
    """Those figures weigh each sequence by its tokens, ours by its pairs, of which short sequences have fewer."""
    experts, offsets = bundled().experts, bundled().offsets
    lengths = np.diff(offsets)
    for lag, known, ours in (
        (2, 0.373, 0.373),
        (4, 0.357, 0.357),
        (8, 0.343, 0.343),
        (16, 0.333, 0.334),
        (64, 0.315, 0.318),
    ):
        long = np.flatnonzero(lengths > lag)
        each = [overlap(experts[offsets[s] : offsets[s + 1]], np.array([0, lengths[s]]), lag).mean() for s in long]
        assert np.average(each, weights=lengths[long]) == pytest.approx(known, abs=6e-4)
        assert overlap(experts, offsets, lag).mean() == pytest.approx(ours, abs=6e-4)


def test_bundled_trace_has_the_published_skew():
    experts, offsets = bundled().experts, bundled().offsets
    share = shares(experts, 32)
    top = top_share(share)
    assert (top.mean(), top.min(), top.max()) == pytest.approx((0.412, 0.324, 0.556), abs=5e-4)
    assert entropy(share).mean() == pytest.approx(0.912, abs=5e-4)
    within = [top_share(shares(experts[a:b], 32)).mean() for a, b in pairwise(offsets)]
    assert np.mean(within) == pytest.approx(0.561, abs=5e-4)


@pytest.mark.parametrize(
    ("atomic", "known"),
    [(True, (0.424, 0.651, 0.801, 0.892, 0.969)), (False, (0.333, 0.615, 0.785, 0.886, 0.968))],
)
def test_bundled_trace_has_the_published_lru_hit_rates(atomic, known):
    routing = mmlu_pro_test()
    depths = lru_depths(routing.experts, routing.offsets, 32, atomic)
    found = [hit_rate(depths, slots).mean() for slots in (4, 8, 12, 16, 24)]
    assert found == pytest.approx(known, abs=5.1e-4)
