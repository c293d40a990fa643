"""Expert arithmetic against plain loops in double precision, and the slots' bytes."""

import pytest
import torch

from moe_spac.executor.formats import EXACT, QUANTISED
from moe_spac.executor.moe import Call
from moe_spac.executor.store import Arena, HostStore, Record
from moe_spac.policies.interface import Key
from moe_spac.traces.errors import InputError

HIDDEN, WIDTH = 6, 4
RECORD = Record(HIDDEN, WIDTH, EXACT["float32"], torch.float32)


class Gate:
    """What transformers' experts modules bring: gate and up halves to one."""

    has_gate = True

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


@pytest.fixture
def store() -> HostStore:
    torch.manual_seed(0)
    store = HostStore(2, 5, RECORD)
    for layer in range(2):
        for expert in range(5):
            store.flat(Key(layer, expert)).view(torch.float32).normal_()
    return store


def by_hand(store, hidden, ids, weights) -> torch.Tensor:
    out = torch.zeros(len(ids), HIDDEN, dtype=torch.float64)
    for t, chosen in enumerate(ids):
        for j, expert in enumerate(chosen):
            flat = store.flat(Key(1, expert)).view(torch.float32).double()
            gate, up = flat[:24].view(4, 6), flat[24:48].view(4, 6)
            down = flat[48:72].view(6, 4)
            x = hidden[t].double()
            a = gate @ x
            out[t] += weights[t, j].double() * (down @ (a / (1 + torch.exp(-a)) * (up @ x)))
    return out


def test_merged_output_equals_plain_loops(store):
    hidden, weights = torch.randn(4, HIDDEN), torch.rand(4, 2)
    ids = [[3, 1], [1, 0], [2, 3], [3, 4]]
    call = Call(1, Gate(), hidden, ids, weights)
    assert call.places == {3: [0, 5, 6], 1: [1, 2], 0: [3], 2: [4], 4: [7]}
    assert [tokens for tokens, _ in call.compute_on_host(list(call.places), store)] == [3, 2, 1, 1, 1]
    torch.testing.assert_close(call.merge().double(), by_hand(store, hidden, ids, weights), rtol=1e-5, atol=1e-6)


def test_result_does_not_depend_on_place_or_order(store):
    hidden, weights = torch.randn(3, HIDDEN), torch.rand(3, 2)
    ids = [[3, 1], [1, 0], [2, 3]]
    first, second = (Call(1, Gate(), hidden, ids, weights) for _ in range(2))
    arena = Arena(5, store.record)
    first.compute_on_host((0, 1, 2, 3), store)
    for expert in (3, 2):
        arena.load(expert + 1, store.flat(Key(1, expert)))
        second.compute(expert, arena, expert + 1)
    second.compute_on_host((1, 0), store)
    second.bring((1, 0))
    assert torch.equal(first.merge(), second.merge())


def test_a_record_is_gate_and_up_then_down_each_on_a_cache_line(store):
    flat = store.flat(Key(0, 2)).view(torch.float32)
    weights = store.weights(Key(0, 2))
    assert torch.equal(weights.up.flatten(), flat[:48])
    assert torch.equal(weights.down.flatten(), flat[48:72])
    assert (store.record.offsets, store.record.size) == ((0, 192, 320, 320, 320), 320)


def test_biases_come_last():
    record = Record(32, 64, QUANTISED["q8"], torch.bfloat16, gated=False, biased=True)
    assert record.offsets == (0, 64 * 34, 64 * 34 + 32 * 68, 64 * 34 + 32 * 68 + 128, 64 * 34 + 32 * 68 + 192)
    up, down = record.biases(torch.zeros(record.size, dtype=torch.uint8))
    assert up is not None
    assert down is not None
    assert (up.shape, down.shape, up.dtype) == ((64,), (32,), torch.bfloat16)


def test_the_arena_keeps_its_budget():
    record = RECORD
    assert Arena(3, record, budget=3 * record.size).size == 3 * record.size
    with pytest.raises(InputError, match=r"4 slots.*budget"):
        Arena(4, record, budget=4 * record.size - 1)
