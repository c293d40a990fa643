"""The compiled kernels against torch in double precision, and their bits against each other.

Without a compiler there are none: then only the choice of torch is tested.
"""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.executor import kernels
from moe_spac.executor.formats import EXACT, QUANTISED, Format
from moe_spac.executor.moe import Call, fuses
from moe_spac.executor.store import HostStore, Record
from moe_spac.policies.interface import Key
from moe_spac.traces.errors import InputError

FORMATS = {**EXACT, **QUANTISED}
ALL = kernels.UP | kernels.GATE | kernels.DOWN
compiled = pytest.mark.skipif(kernels._library()[0] is None, reason="the kernels are not built")


def has(name: str) -> bool:
    library = kernels._library()[0]
    return library is not None and library.spac_isa_name(name.encode()) is not None


VECTORS = [pytest.param(n, marks=pytest.mark.skipif(not has(n), reason=f"no {n} here")) for n in ("avx2", "avx512")]


@pytest.fixture(autouse=True)
def restored():
    """The choice of the environment, afterwards."""
    before = os.environ.get("SPAC_KERNELS")
    yield
    os.environ.pop("SPAC_KERNELS", None)
    if before is not None:
        os.environ["SPAC_KERNELS"] = before
    kernels.chosen.cache_clear()


class Plain:
    has_gate = True

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up


class Clamped(Plain):
    """gpt-oss's kind: interleaved rows, limits."""

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.7 * gate)


class Ungated:
    has_gate = False

    def act_fn(self, up: torch.Tensor) -> torch.Tensor:
        return F.relu(up).square()


def store_of(fmt: Format, hidden: int, width: int, gated=True, biased=False, dtype=torch.float32, experts=6):
    record = Record(hidden, width, fmt, dtype, gated, biased)
    store = HostStore(1, experts, record)
    random = torch.Generator().manual_seed(hidden + width)
    for expert in range(experts):
        flat = store.flat(Key(0, expert))
        record.up(flat).copy_(fmt.encode(torch.randn(record.up_rows, hidden, generator=random) / hidden**0.5))
        record.down(flat).copy_(fmt.encode(torch.randn(hidden, width, generator=random) / width**0.5))
        for bias in record.biases(flat):
            if bias is not None:
                bias.copy_(torch.randn(bias.shape, generator=random))
    return store


def call_of(module, hidden: int, tokens: int, k: int, experts=6, seed=0) -> Call:
    random = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(experts, generator=random)[:k].tolist() for _ in range(tokens)]
    x = torch.randn(tokens, hidden, generator=random)
    return Call(0, module, x, ids, torch.rand(tokens, k, generator=random))


def doubled(call: Call, store: HostStore, rounded=lambda x: x) -> torch.Tensor:
    """Rows in double precision; `rounded` is applied to what either product reads."""
    record, k = store.record, call.weights.shape[1]
    rows = torch.empty(call.rows.shape, dtype=torch.float64)
    for expert, at in call.places.items():
        flat = store.flat(Key(0, expert))
        exact = record.format.dtype if record.format.exact else torch.float64
        up, down = (record.format.decode(m, exact).double() for m in (record.up(flat), record.down(flat)))
        up_bias, down_bias = (b.double() if b is not None else None for b in record.biases(flat))
        x = rounded(call.hidden[[row // k for row in at]].double())
        inner = call._activate(F.linear(x, up, up_bias))
        rows[at] = F.linear(rounded(inner), down, down_bias)
    return rows


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """To signed bytes in groups of 32 and back."""
    groups = x.view(len(x), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.round(groups / scale.clamp(min=1e-30)) * scale).view(x.shape)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def bits(store: HostStore, call: Call, isa: str, threads: int) -> torch.Tensor:
    kernels.choose(isa)
    call.rows.fill_(float("nan"))
    call.compute_on_host(list(call.places), store, threads)
    return call.rows.clone()


SHAPES = [(64, 32), (96, 288), (256, 96), (288, 544)]
ODD = [(6, 4), (37, 19), (16, 50)]


@compiled
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("biased", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)])
def test_products_are_those_of_double_precision(name, biased, dtype):
    """Exact formats to float32 rounding. Groups: the activations' bytes are off by at most half a step of 1/127 of the
    group's largest number, uniformly spread: 1/127/sqrt(12) of it, which for 32 normal numbers is about 2.1 of their
    deviations, so 0.5 % in each product; against the same rounding done by torch only ties differ."""
    fmt = FORMATS[name]
    for hidden, width in SHAPES + (ODD if fmt.exact else []):
        store, call = store_of(fmt, hidden, width, biased=biased, dtype=dtype), call_of(Plain(), hidden, 7, 3)
        kernels.choose("auto")
        call.compute_on_host(list(call.places), store)
        assert relative(call.rows, doubled(call, store)) < (1e-6 if fmt.exact else 0.02)
        if not fmt.exact:
            assert relative(call.rows, doubled(call, store, in_groups)) < 0.002


@compiled
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("module", [Clamped(), Ungated()], ids=["clamped", "ungated"])
def test_other_gates_are_the_familys_own(name, module):
    fmt = FORMATS[name]
    store = store_of(fmt, 96, 64, gated=module.has_gate, biased=True)
    assert not fuses(module, store.record)
    call = call_of(module, 96, 5, 2)
    assert [tokens for tokens, _ in call.compute_on_host(list(call.places), store)] == [
        len(at) for at in call.places.values()
    ]
    assert relative(call.rows, doubled(call, store)) < (1e-6 if fmt.exact else 0.02)


@compiled
@pytest.mark.parametrize("isa", VECTORS)
@pytest.mark.parametrize("name", FORMATS)
def test_vectors_threads_and_plain_c_give_the_same_bits(name, isa):
    fmt = FORMATS[name]
    for hidden, width in SHAPES + (ODD if fmt.exact else []):
        store, call = store_of(fmt, hidden, width), call_of(Plain(), hidden, 11, 4)
        expected = bits(store, call, "scalar", 1)
        assert not expected.isnan().any()
        for threads in (1, 2, 5):
            assert torch.equal(bits(store, call, isa, threads), expected)


@compiled
@pytest.mark.parametrize("name", FORMATS)
@given(tokens=st.integers(2, 70), row=st.integers(0, 10_000))
@settings(max_examples=12, deadline=None)
def test_a_token_alone_gives_what_it_gives_among_others(name, tokens, row):
    store = store_of(FORMATS[name], 96, 64, experts=2)
    x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(tokens))
    many = Call(0, Plain(), x, [[1]] * tokens, torch.ones(tokens, 1))
    one = Call(0, Plain(), x[row % tokens : row % tokens + 1], [[1]], torch.ones(1, 1))
    for call in (many, one):
        call.compute_on_host([1], store)
    assert torch.equal(many.rows[row % tokens], one.rows[0])


@compiled
def test_every_scale_that_float16_has():
    """Zero, subnormal, largest and negative scales of groups, through plain C and through the processor's own."""
    fmt = QUANTISED["q8"]
    store = store_of(fmt, 64, 32, experts=1)
    up = store.record.up(store.flat(Key(0, 0))).view(64, 2, 34)
    halves = torch.tensor([0.0, 6e-8, 5.9e-5, 6.1e-5, 1.0, -0.5, 65504.0, -6e-8], dtype=torch.float16)
    up[:, 0, :2] = halves.repeat(8).view(-1, 1).view(torch.uint8)
    call = call_of(Plain(), 64, 3, 1, experts=1)
    expected = bits(store, call, "scalar", 1)
    assert torch.equal(bits(store, call, "auto", 1), expected)
    assert relative(expected, doubled(call, store, in_groups)) < 0.002


@compiled
@pytest.mark.parametrize("isa", [*VECTORS, "scalar"])
def test_groups_of_tiny_activations_are_nothing_and_extreme_bytes_are_exact(isa):
    """Below 1e-25 a group counts as zeros, from there on it is computed; bytes may be -128, halves 0 and 15."""
    for name, extremes in (("q8", [128, 127, 129, 0]), ("q4", [0x00, 0xFF, 0x0F, 0xF0])):
        store = store_of(QUANTISED[name], 64, 32, experts=1)
        up = store.record.up(store.flat(Key(0, 0))).view(64, 2, -1)
        up[..., 2:] = torch.tensor(extremes, dtype=torch.uint8).repeat(up.shape[-1])[: up.shape[-1] - 2]
        call = call_of(Plain(), 64, 3, 1, experts=1)
        call.hidden[1, :32], call.hidden[2] = 1e-26, 1e-26
        got = bits(store, call, isa, 1)
        call.hidden[1, :32] = 0
        assert torch.equal(bits(store, call, isa, 1), got)
        assert relative(got, doubled(call, store, in_groups)) < 0.002
        assert not got[2].any()
        assert torch.equal(got, bits(store, call, "scalar", 1))


@compiled
@pytest.mark.parametrize("name", FORMATS)
def test_one_matrix_many_times_is_the_up_of_a_record(name):
    store = store_of(FORMATS[name], 96, 64, experts=1)
    layout, address = store.record.matrices, store.address(Key(0, 0))
    product = kernels.product_of(layout, address)
    for n in (1, 5, 70):
        x, out, expected = torch.randn(n, 96), torch.zeros(n, 128), torch.zeros(n, 128)
        kernels.multiply(product, x, out, 2)
        kernels.run(layout, kernels.UP, [address], [n], range(n), range(n), x, expected, expected)
        assert torch.equal(out, expected)


@given(st.integers(0, 300), st.integers(0, 70), st.integers(0, 70))
def test_moved_bytes_are_there_and_those_beside_them_are_not_touched(size, to, at):
    source = torch.arange(400, dtype=torch.int32).to(torch.uint8)
    target = torch.full((400,), 255, dtype=torch.uint8)
    kernels.move(target[to : to + size], source[at : at + size])
    assert torch.equal(target[to : to + size], source[at : at + size])
    assert (target[:to] == 255).all()
    assert (target[to + size :] == 255).all()


@compiled
def test_bfloat16_and_float16_tokens_are_computed_in_float32():
    store = store_of(EXACT["bfloat16"], 96, 64, dtype=torch.bfloat16)
    call = call_of(Plain(), 96, 4, 2)
    call = Call(0, call.module, call.hidden.bfloat16(), call.ids, call.weights.bfloat16())
    call.compute_on_host(list(call.places), store)
    assert relative(call.rows, doubled(call, store)) < 1e-6
    assert call.merge().dtype == torch.bfloat16


@compiled
def test_times_of_the_experts_add_up_to_the_call():
    store, call = store_of(EXACT["float32"], 288, 544), call_of(Plain(), 288, 20, 4)
    from time import perf_counter_ns

    begin = perf_counter_ns()
    work = call.compute_on_host(list(call.places), store, 2)
    wall = perf_counter_ns() - begin
    assert all(ns > 0 for _, ns in work)
    assert sum(ns for _, ns in work) <= wall


@compiled
def test_a_forked_process_computes_alone():
    """The pool's threads are not there in a child; the call ends all the same."""
    code = """
import os, torch, sys
sys.path.insert(0, "tests/executor")
from test_kernels import *
store, call = store_of(EXACT["float32"], 288, 544), call_of(Plain(), 288, 9, 4)
first = bits(store, call, "auto", 3)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(bits(store, call, "auto", 3), first) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_torch_computes_where_it_is_told_to(monkeypatch):
    kernels.choose("torch")
    assert not kernels.ready()
    assert kernels.describe()["kernels"] == "torch"
    monkeypatch.setattr(kernels, "run", None)
    store, call = store_of(EXACT["float32"], 64, 32), call_of(Plain(), 64, 5, 2)
    call.compute_on_host(list(call.places), store)
    assert relative(call.rows, doubled(call, store)) < 1e-6


def test_without_the_library_torch_computes_and_says_why(monkeypatch):
    monkeypatch.setattr(kernels, "_library", lambda: (None, None, "the kernels were not built"))
    kernels.choose("auto")
    assert kernels.describe()["kernels"] == "torch"
    assert "not built" in str(kernels.describe()["why"])
    with pytest.raises(InputError, match="SPAC_KERNELS=avx2: the kernels were not built"):
        kernels.choose("avx2")


def test_choices_and_threads_are_checked(monkeypatch):
    with pytest.raises(InputError, match="SPAC_KERNELS=sse: unknown; choose auto, torch"):
        kernels.choose("sse")
    for text in ("0", "-1", "x", "1000"):
        monkeypatch.setenv("SPAC_THREADS", text)
        with pytest.raises(InputError, match="takes a number from 1 to 256"):
            kernels.threads()
    monkeypatch.setenv("SPAC_THREADS", "3")
    assert kernels.threads() == kernels.threads(emulated=True) == 3
    monkeypatch.delenv("SPAC_THREADS")
    for cores, alone, beside in ((1, 1, 1), (2, 1, 1), (4, 3, 2), (16, 15, 8)):
        monkeypatch.setattr(kernels, "physical_cores", lambda n=cores: n)
        assert (kernels.threads(), kernels.threads(emulated=True)) == (alone, beside)


def test_the_structure_is_as_large_as_that_of_c():
    """9 counts of 4 bytes, padding to 8, then pointers and 4 offsets of 8."""
    assert ctypes.sizeof(kernels._Layer) == 40 + 8 + 32 + 8 * 8
