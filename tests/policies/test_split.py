"""The split of a layer's misses: by hand, against all splits, and Python against C."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import built, compiled

from moe_spac.policies import split as by_python
from moe_spac.policies.demand import PerLoad
from moe_spac.policies.interface import Demand, Where
from moe_spac.policies.pool import WORTH, Pool, new_pool
from moe_spac.policies.residency import all_keys
from moe_spac.policies.split import Prices, all_answers, most_worth_copying

NO_TIMES = {}  # what `most_worth_copying` does not look at
# A copy takes 100; the CPU 25 for its first and to join; host memory gives an expert in 25 ns.
KEYS, ANSWERS = all_keys(2, 9), all_answers(9)
BY_HAND = Prices(1.0, NO_TIMES, NO_TIMES, 100, 25, 25)


def missing(gains, on_cpu=40, on_gpu=10):
    return [(-g - on_cpu, i, g, on_cpu, on_gpu) for i, g in enumerate(gains)]


def test_the_split_by_hand():
    """Three missing: all on the CPU 3 * 40 + 25 = 145; one copied max(110, 105); two copied max(210, 65)."""
    assert most_worth_copying(missing([0, 0, 0]), 0, 0, BY_HAND) == 1
    assert most_worth_copying(missing([0, 0]), 0, 0, BY_HAND) == 0  # 105 against 110
    assert most_worth_copying(missing([6, 0]), 0, 0, BY_HAND) == 1  # 105 against 110 - 6
    assert most_worth_copying(missing([0, 0, 0]), 0, 50, BY_HAND) == 0  # the link is busy until then: 160
    assert most_worth_copying(missing([101, 101]), 0, 0, BY_HAND) == 2  # 105, 9, 210 - 202 = 8


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=9),
    st.integers(0, 300), st.integers(0, 300), st.integers(0, 60),
)  # fmt: skip
def test_no_other_number_of_copies_is_better(each, gpu, link, host):
    items = [(0.0, i, float(g), c, n) for i, (g, c, n) in enumerate(each)]

    def price(copied):
        there, here = items[:copied], items[copied:]
        gpu_ns = gpu + sum(i[4] for i in there)
        link_ns = link + 100 * copied + (there[-1][4] if there else 0)
        cpu_ns = sum(i[3] for i in here) + 25 if here else 0
        both = host * len(items) if there and here else 0
        return max(gpu_ns, link_ns, cpu_ns, both) - sum(i[2] for i in there)

    prices = BY_HAND._replace(host_ns=host)
    assert price(most_worth_copying(items, gpu, link, prices)) == min(map(price, range(len(items) + 1)))


def random_call(seed):
    """A pool's array of 2 layers and 9 experts with a few worths, what a layer needs of it, and prices."""
    rng = np.random.default_rng(seed)
    pool = new_pool(2, 9)
    pool[WORTH] = rng.integers(0, 4, (2, 9)) / 3
    experts = sorted(rng.permutation(9)[: rng.integers(1, 10)].tolist())
    held = frozenset(e for e in experts if rng.random() < 0.4)
    joins = [e for e in range(9) if e not in held and rng.random() < 0.2]
    loads = tuple(rng.integers(1, 5, len(experts)).tolist())
    demand = Demand(int(rng.integers(2)), tuple(experts), loads, np.zeros((4, 2), int), held=held)
    a, b = rng.integers(1, 60, 2).tolist()
    times = PerLoad(lambda n: 10 + a * n), PerLoad(lambda n: 30 + b * n)
    prices = Prices(rng.random() * 200, *times, *rng.integers(0, 200, 3).tolist())
    return pool, demand, joins, rng.random(), int(rng.integers(100)), prices


@given(st.integers(0, 2**32 - 1))
def test_everyone_goes_somewhere_and_what_is_copied_is_worth_most(seed):
    pool, demand, joins, floor, link_ns, prices = random_call(seed)
    answer = by_python.split(Pool(pool, KEYS), demand, joins, floor, link_ns, prices, ANSWERS)
    where = dict(answer)
    assert len(answer) == len(where)
    assert where.keys() == set(demand.experts)
    assert {e for e in where if where[e] is Where.GPU} == demand.held
    assert {e for e in demand.experts if e in joins} <= {e for e in where if where[e] is Where.FETCH}
    worth = {
        e: max(0.0, float(pool[WORTH, demand.layer, e]) - floor) * prices.use_ns + prices.on_cpu[n]
        for e, n in zip(demand.experts, demand.loads, strict=True)
        if e not in demand.held and e not in joins
    }
    assert [e for e in where if e in worth] == sorted(worth, key=lambda e: (-worth[e], e))
    copied = [where[e] is Where.FETCH for e in where if e in worth]
    assert copied == sorted(copied, reverse=True)


@built
@given(st.integers(0, 2**32 - 1))
def test_both_ways_are_equal(seed):
    array, demand, *others = random_call(seed)
    answers = [
        way.split(pool, demand, *others, ANSWERS)
        for way, pool in ((compiled, compiled.Pool(array, KEYS)), (by_python, Pool(array, KEYS)))
    ]
    assert answers[0] == answers[1]


@built
def test_what_is_not_there_is_refused():
    array, demand, joins, floor, link_ns, prices = random_call(1)
    pool = compiled.Pool(array, KEYS)
    for wrong in (demand._replace(layer=2), demand._replace(experts=(9,), loads=(1,)), demand._replace(loads=())):
        with pytest.raises(IndexError, match="no such layer or expert"):
            compiled.split(pool, wrong, joins, floor, link_ns, prices, ANSWERS)
    with pytest.raises(TypeError):
        compiled.split(pool, demand, joins, floor, link_ns, prices._replace(on_gpu=None), ANSWERS)
