"""The named statistics, against counting by hand and against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.traces.synth_stats import Sample, statistic


def one_layer(*sequences: list[tuple[int, ...]], count: int, places: tuple[int, ...] | None = None) -> Sample:
    experts = np.array(sequences, np.uint8).reshape(-1, 1, len(sequences[0][0]))
    return Sample(experts, places or (0,) * len(sequences), count)


TEXT = one_layer([(0, 1), (1, 2), (0, 3), (1, 2)], count=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("overlap", (1 + 0 + 0) / 6),
        ("lag/2", (1 + 2) / 4),
        ("union/2", (3 + 4 + 4) / 3),
        ("repeat/1", 1 / 6),  # of tokens 0 to 2: only expert 1
        ("repeat/2", 4 / 4),  # tokens 0 and 1: 0 and 1 come back, and so do 1 and 2
        ("lru/2", 1 / 8),  # only 1 of token 1 is still there
        ("lru/4", 4 / 8),  # all but the first use of each
        ("lfu/2", 1 / 8),  # must take in what it missed, so it holds the last token's experts
        ("oracle/2", 3 / 8),  # hits 1, then 0, then 1: after token 1 it leaves 2 out for 0
        ("top20", 3 / 8),  # the busiest expert (a fifth of 4 rounds to 1) has 3 of 8
        ("miss_first/2/4", 3 / 4),
        ("miss_after/2/4", 1 / 4),
    ],
)
def test_statistics_counted_by_hand(name, value):
    assert statistic(name, TEXT, ["only"]) == pytest.approx(value)


def test_domains_are_taken_apart():
    both = one_layer([(0, 1), (0, 1)], [(2, 3), (4, 5)], count=8, places=(0, 1))
    assert statistic("overlap/code", both, ["code", "maths"]) == 1
    assert statistic("overlap/maths", both, ["code", "maths"]) == 0
    assert statistic("domain_cosine", both, ["code", "maths"]) == 0


def test_a_name_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="no statistic 'luck'"):
        statistic("luck", TEXT, [])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), slots=st.integers(2, 6))
def test_lfu_and_the_clairvoyant_equal_a_slow_cache(seed, slots):
    rng = np.random.default_rng(seed)
    rows = np.argsort(rng.random((2, 12, 6)), axis=2)[..., :2]
    found = one_layer(*rows.tolist(), count=6)
    assert statistic(f"lfu/{slots}", found, []) == pytest.approx(slow_lfu(rows, slots))
    assert statistic(f"oracle/{slots}", found, []) == pytest.approx(slow_oracle(rows, slots))


def slow_lfu(rows: np.ndarray, slots: int) -> float:
    hits = 0
    for sequence in rows.tolist():
        held, uses, last = set(), dict.fromkeys(range(6), 0), dict.fromkeys(range(6), -1)
        for t, ids in enumerate(sequence):
            hits += len(held & set(ids))
            for e in ids:
                uses[e], last[e] = uses[e] + 1, t
            others = sorted(held - set(ids), key=lambda e: (-uses[e], -last[e], e))
            held = set(ids) | set(others[: slots - len(ids)])
    return hits / rows.size


def slow_oracle(rows: np.ndarray, slots: int) -> float:
    hits = 0
    for sequence in rows.tolist():
        held = set()
        for t, ids in enumerate(sequence):
            hits += len(held & set(ids))

            def soon(e, t=t, sequence=sequence):
                return next((n for n in range(t + 1, len(sequence)) if e in sequence[n]), len(sequence))

            held = set(sorted(held | set(ids), key=lambda e: (soon(e), e))[:slots])
    return hits / rows.size
