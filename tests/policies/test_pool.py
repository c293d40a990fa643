"""The order of all experts: against sorted lists, and numpy against C, to the last bit."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import built, compiled

from moe_spac.policies import pool as by_numpy
from moe_spac.policies.interface import Key
from moe_spac.policies.pool import ABSENT, AWAY, COMING, RANK, RESIDENT, WORTH, new_pool
from moe_spac.policies.residency import all_keys

KEYS = all_keys(3, 6)
EVERY = [key for row in KEYS for key in row]
ways = pytest.mark.parametrize("way", [by_numpy, pytest.param(compiled, marks=built)], ids=["numpy", "C"])


def filled(way: ModuleType, seed: int, passes: float = 1.5) -> tuple[np.ndarray, set[Key]]:
    """A pool in which about half are resident and worths are few, so that some are equal; and who is resident."""
    rng = np.random.default_rng(seed)
    pool, demand = new_pool(3, 6), rng.integers(0, 5, (3, 6)).astype(np.float32) / 3
    for layer in range(3):
        way.price(pool, layer, demand, passes, (), 0.0)
    held = {key for key in EVERY if rng.random() < 0.5}
    for key in held:
        way.put(pool, key, RESIDENT)
    return pool, held


@ways
@given(st.integers(0, 2**32 - 1))
def test_the_coldest_and_the_warmest_are_those_of_a_sorted_list(way, seed):
    pool, held = filled(way, seed)
    worth = {key: float(pool[WORTH][key]) for key in EVERY}
    by_worth = sorted(held, key=lambda key: (worth[key], key))
    if held:
        assert way.least(pool) == worth[by_worth[0]]
    absent = min(set(EVERY) - held, key=lambda key: (-worth[key], key), default=None)
    found = way.warmest(pool, KEYS)
    assert (found and found[0]) == absent
    if found:
        assert found[1] == pytest.approx(worth[found[0]], abs=1e-4)
    candidates = {key for key in held if key.expert % 3}
    rest = [key for key in by_worth if key in candidates]
    for below in (0.9, 0.9, 250.0):
        expected = rest[0] if rest and worth[rest[0]] < below else None
        assert way.coldest(pool, KEYS, candidates, below) == expected
        rest = rest[bool(expected) :]
        candidates.discard(expected)
    assert {key for key in EVERY if pool[AWAY][key] == RESIDENT} == {*rest, *(k for k in held if not k.expert % 3)}


@ways
def test_named_experts_are_worth_more_until_they_are_priced_again(way):
    pool, demand = new_pool(2, 4), np.arange(8, dtype=np.float32).reshape(2, 4)
    way.price(pool, 1, demand, 2.0, {3: 1.0, 0: 1.0}, 0.5)
    assert pool[WORTH].tolist() == [[0, 0, 0, 0], [8.5, 10, 12, 14.5]]
    way.price(pool, 1, demand, 2.0, (1,), 0.25)
    assert pool[WORTH, 1].tolist() == [8, 10.25, 12, 14]
    assert pool[RANK, 1].tolist() == [1008, 1010.25, 1012, 1014]


@built
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3))
def test_both_ways_are_equal_to_the_last_bit(seed, passes):
    one, other = (filled(way, seed, passes)[0] for way in (by_numpy, compiled))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        layer, demand = int(rng.integers(3)), rng.standard_normal((3, 6)).astype(np.float32)
        named, chance = rng.permutation(6)[: rng.integers(6)].tolist(), float(rng.random())
        key, away = Key(layer, int(rng.integers(6))), [RESIDENT, COMING, ABSENT][rng.integers(3)]
        candidates, below = {key for key in EVERY if rng.random() < 0.5}, float(rng.random())
        answers = []
        for way, pool in ((by_numpy, one), (compiled, other)):
            way.price(pool, layer, demand, passes, named, chance)
            way.put(pool, key, away)
            answers.append((way.least(pool), way.coldest(pool, KEYS, candidates, below), way.warmest(pool, KEYS)))
        assert answers[0] == answers[1]
        assert one[:3].tobytes() == other[:3].tobytes()


@built
def test_what_is_not_there_is_refused():
    pool, demand = new_pool(2, 4), np.zeros((2, 4), np.float32)
    for call in (
        lambda: compiled.put(pool, Key(0, 4), 0.0),
        lambda: compiled.put(pool, Key(-1, 0), 0.0),
        lambda: compiled.price(pool, 2, demand, 1.0, (), 0.0),
        lambda: compiled.price(pool, 0, demand, 1.0, (4,), 0.0),
    ):
        with pytest.raises(IndexError, match="no such layer or expert"):
            call()
    wrong: Any = ("a", 3)
    with pytest.raises(TypeError):
        compiled.price(pool, 0, demand, 1.0, wrong, 0.0)
    with pytest.raises(TypeError):
        compiled.put(pool, wrong[1], 0.0)
