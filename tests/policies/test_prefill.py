import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Costs, Setup, Where
from moe_spac.policies.load import load_policy
from moe_spac.policies.prefill import cheaper_absent, cpu_ns, crossing, expected_union, stream_ns

# Copy 4 us, GPU 3 us, CPU 2 us a token, 1 us to join.
COSTS = Costs(3000, 0, 0.0, 0, 0, 0, 2000.0, 1000, 0, 4000)


def test_union_of_even_routing_o20():
    assert expected_union(8, 2, 3) == pytest.approx(4.625)
    assert [round(expected_union(128, 8, b), 3) for b in (1, 2, 4)] == [8, 15.5, 29.123]
    assert expected_union(128, 8, 8) == pytest.approx(51.62, abs=0.005)


def test_union_of_even_routing_is_what_chance_gives():
    chance = random.Random(0)
    drawn = [len({e for _ in range(5) for e in chance.sample(range(32), 4)}) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected_union(32, 4, 5), rel=0.01)


@pytest.mark.parametrize(("copy", "gpu"), [(4_000_000, 3_000_000), (3_000_000, 4_000_000)])
def test_copies_overlap_with_computation_o23(copy, gpu):
    """Ten experts, 4 and 3 ms: 43 ms either way, not the 70 ms of one after the other."""
    costs = Costs(gpu, 0, 0.0, 0, 0, 0, 0.0, 0, 0, copy)
    assert stream_ns([1] * 10, costs) == 43_000_000


def test_the_cheaper_way_by_hand():
    # Two experts of one token: copies end at 4 and 8 us, computed at 11; CPU 2 x 2 + 1 = 5 us.
    assert (stream_ns([1, 1], COSTS), cpu_ns([1, 1], COSTS)) == (11_000, 5_000)
    assert cheaper_absent([1, 1], COSTS) is Where.CPU
    # Of six tokens each: still 11 us for the link, 25 for the CPU.
    assert cheaper_absent([6, 6], COSTS) is Where.STREAM
    # Of five and none: 7 against 11 us; of three: 7 against 7, and a tie stays where the weights are.
    assert cheaper_absent([5], COSTS) is Where.STREAM
    assert cheaper_absent([3], COSTS) is Where.CPU


@settings(max_examples=60)
@given(st.integers(2, 64), st.data())
def test_the_crossing_is_the_first_batch_that_streams(experts, data):
    top_k = data.draw(st.integers(1, experts))
    copy, token = data.draw(st.integers(1, 500)) * 1000, data.draw(st.integers(1, 200)) * 100.0
    costs = Costs(1000, 2000, 10.0, 500, 500, 2000, token, 3000, 100, copy)

    def streams(tokens: int) -> bool:
        needed = min(experts, tokens * top_k, max(1, round(expected_union(experts, top_k, tokens))))
        each, more = divmod(tokens * top_k, needed)
        return cheaper_absent([each + 1] * more + [each] * (needed - more), costs) is Where.STREAM

    at = crossing(experts, top_k, costs, longest=4096)
    if at is None:
        assert not streams(4096)
    else:
        assert streams(at)
        assert at == 1 or not streams(at - 1)


def test_static_streams_where_that_is_cheaper():
    """One resident and one absent expert: up to three tokens the CPU takes no longer, from four on the link wins."""
    driver = Driver(load_policy("static:offload_tokens=auto"), Setup(1, 64, 2, 1, (1,), COSTS))
    plans = [driver.gate(0, np.array([[0, 5]] * tokens)) for tokens in (3, 4)]
    assert [(p.gpu, p.copies, p.cpu) for p in plans] == [((0,), (), (5,)), ((0,), (5,), ())]
