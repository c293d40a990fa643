"""The order of all experts: against sorted lists, and numpy against C, to the last bit."""

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

KEYS = all_keys(3, 19)  # as many as C takes at a time, and three
EVERY = [key for row in KEYS for key in row]
ways = pytest.mark.parametrize("way", [by_numpy, pytest.param(compiled, marks=built)], ids=["numpy", "C"])


def filled(way: Any, seed: int, passes: float = 1.5) -> tuple[Any, set[Key]]:
    """A pool in which about half are resident and worths are few, so that some are equal; and who is resident."""
    rng = np.random.default_rng(seed)
    pool, demand = way.Pool(new_pool(3, 19), KEYS), rng.integers(0, 5, (3, 19)).astype(np.float32) / 3
    for layer in range(3):
        pool.price(layer, demand, passes, (), 0.0)
    held = {key for key in EVERY if rng.random() < 0.5}
    for key in held:
        pool.put(key, RESIDENT)
    return pool, held


@ways
@given(st.integers(0, 2**32 - 1))
def test_the_coldest_and_the_warmest_are_those_of_a_sorted_list(way, seed):
    pool, held = filled(way, seed)
    worth = {key: float(pool.array[WORTH][key]) for key in EVERY}
    by_worth = sorted(held, key=lambda key: (worth[key], key))
    if held:
        assert pool.least() == worth[by_worth[0]]
    absent = min(set(EVERY) - held, key=lambda key: (-worth[key], key), default=None)
    found = pool.warmest()
    assert (found and found[0]) == absent
    if found:
        assert found[1] == pytest.approx(worth[found[0]], abs=1e-4)
        assert found[2] == pool.least()
    candidates = {key for key in held if key.expert % 3}
    rest = [key for key in by_worth if key in candidates]
    for below in (0.9, 0.9, 250.0):
        expected = rest[0] if rest and worth[rest[0]] < below else None
        assert pool.coldest(candidates, below) == expected
        rest = rest[bool(expected) :]
        candidates.discard(expected)
    there = {key for key in EVERY if pool.array[AWAY][key] == RESIDENT}
    assert there == {*rest, *(k for k in held if not k.expert % 3)}


def counted(way: Any) -> Any:
    """Two layers of four experts, worth 0 to 7."""
    pool, demand = way.Pool(new_pool(2, 4), all_keys(2, 4)), np.arange(8, dtype=np.float32).reshape(2, 4)
    for layer in range(2):
        pool.price(layer, demand, 1.0, (), 0.0)
    return pool


@ways
def test_an_exchange_is_for_what_is_worth_less(way):
    pool, held = counted(way), {Key(0, 2), Key(1, 0), Key(1, 1)}
    for key in held:
        pool.put(key, RESIDENT)
    assert pool.exchange(held, Key(0, 1)) is None  # 1 use, against 2 at least
    assert pool.exchange(held - {Key(0, 2)}, Key(1, 3)) == Key(1, 0)
    assert pool.exchange(held, Key(0, 3)) == Key(0, 2)
    resident = np.array([[False, False, False, True], [False, True, False, True]])
    assert (pool.array[AWAY] == np.where(resident, RESIDENT, ABSENT)).all()


@ways
def test_named_experts_are_worth_more_until_they_are_priced_again(way):
    pool, demand = counted(way), np.arange(8, dtype=np.float32).reshape(2, 4)
    pool.price(1, demand, 2.0, {3: 1.0, 0: 1.0}, 0.5)
    assert pool.array[WORTH].tolist() == [[0, 1, 2, 3], [8.5, 10, 12, 14.5]]
    pool.price(1, demand, 2.0, (1,), 0.25)
    assert pool.array[WORTH, 1].tolist() == [8, 10.25, 12, 14]
    assert pool.array[RANK, 1].tolist() == [1008, 1010.25, 1012, 1014]


@built
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3))
def test_both_ways_are_equal_to_the_last_bit(seed, passes):
    pools = [filled(way, seed, passes)[0] for way in (by_numpy, compiled)]
    rng = np.random.default_rng(seed)
    for _ in range(20):
        layer, demand = int(rng.integers(3)), rng.standard_normal((3, 19)).astype(np.float32)
        named, chance = rng.permutation(19)[: rng.integers(19)].tolist(), float(rng.random())
        key, incoming = (Key(int(rng.integers(3)), int(rng.integers(19))) for _ in range(2))
        away, below = [RESIDENT, COMING, ABSENT][rng.integers(3)], float(rng.random())
        candidates, answers = {key for key in EVERY if rng.random() < 0.5}, []
        for pool in pools:
            pool.price(layer, demand, passes, named, chance)
            pool.put(key, away)
            moved = pool.coldest(candidates, below), pool.exchange(candidates, incoming)
            answers.append((*moved, pool.least(), pool.warmest()))
        assert answers[0] == answers[1]
        assert pools[0].array.tobytes() == pools[1].array.tobytes()


@built
def test_what_is_not_there_is_refused():
    pool, demand = compiled.Pool(new_pool(2, 4), all_keys(2, 4)), np.zeros((2, 4), np.float32)
    for call in (
        lambda: pool.put(Key(0, 4), 0.0),
        lambda: pool.put(Key(-1, 0), 0.0),
        lambda: pool.exchange({Key(0, 0)}, Key(2, 0)),
        lambda: pool.price(2, demand, 1.0, (), 0.0),
        lambda: pool.price(0, demand, 1.0, (4,), 0.0),
    ):
        with pytest.raises(IndexError, match="no such layer or expert"):
            call()


@built
def test_what_is_of_another_kind_is_refused():
    make: Any = compiled.Pool
    pool, demand = make(new_pool(2, 4), all_keys(2, 4)), np.zeros((2, 4), np.float32)
    pool.put(Key(0, 0), RESIDENT)
    wrong: Any = ("a", 3)
    for call in (
        lambda: pool.price(0, demand, 1.0, wrong, 0.0),
        lambda: pool.put(wrong, 0.0),
        lambda: pool.put(wrong[1], 0.0),
        lambda: pool.put(Key(0, 0), wrong),
        lambda: pool.put(Key(0, 0)),
        lambda: pool.coldest(wrong[1], 250.0),
        lambda: pool.exchange(wrong[1], wrong),
        lambda: make(wrong, ()),
        lambda: make(),
    ):
        with pytest.raises(TypeError):
            call()
    assert pool.least() == 0  # as before
