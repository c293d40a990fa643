"""The compiled expert kernels (csrc/), called once a layer with the GIL released; without them torch does the work.

`SPAC_KERNELS` chooses: auto (the default), torch, or one instruction set (avx512, avx2, scalar). auto takes the best
vector set of this processor; on x86-64 without AVX2 it takes torch, which is faster there than plain C.
`SPAC_THREADS` is how many threads compute, ours included. The default leaves one physical core free, for the link, the
policy and whatever else runs, and all sleep between calls: with threads that spin, two busy cores are enough to make
every layer tens of times slower.

Results do not depend on the instruction set, the number of threads or how many tokens are computed together. Where the
weights are in groups of 32, so are the activations: signed bytes with a float32 scale for each group.
"""

import ctypes
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from ..traces.errors import InputError
from .formats import Format

NAMES = ("auto", "torch", "avx512", "avx2", "scalar")
UP, GATE, DOWN = 1, 2, 4
_FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "q8": 3, "q4": 4}
_PLAIN = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ISAS = {name: name.encode() for name in ("", *NAMES)}


class _Layer(ctypes.Structure):
    """As csrc/layer.c has it."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("format", "bias", "hidden", "width", "up_rows")),
        *((name, ctypes.c_int32) for name in ("stages", "experts", "rows", "threads")),
        ("isa", ctypes.c_char_p),
        ("offset", ctypes.c_uint64 * 4),
        *((name, ctypes.c_void_p) for name in ("records", "counts", "sources", "targets", "x", "middle", "out", "ns")),
    )


@dataclass(frozen=True, slots=True)
class Matrices:
    """The layout of a record as the kernels need it: `Record` has the same, and a single matrix is one without down.

    offsets: of up [up_rows, hidden], down [hidden, width] and their biases in `dtype`, in bytes.
    """

    format: Format
    dtype: torch.dtype
    hidden: int
    width: int
    up_rows: int
    biased: bool
    offsets: tuple[int, ...]


@dataclass(slots=True)
class Choice:
    """What computes. `isa` is None for torch, and `why` says why."""

    library: ctypes.CDLL | None
    path: str | None
    isa: str | None
    why: str


def run(
    layout: "Matrices",
    stages: int,
    addresses: Sequence[int],
    counts: Sequence[int],
    sources: Sequence[int],
    targets: Sequence[int],
    x: torch.Tensor,
    middle: torch.Tensor,
    out: torch.Tensor,
    threads: int = 1,
) -> tuple[list[int], int]:
    """Some experts of one layer; returns ns of each, which add up to the wall time inside, and after how many more the
    interpreter was back.

    addresses: of the experts' records. counts: tokens of each. sources: for each expert's tokens in turn the row of `x`
    [n, hidden]; targets: the row of `out` [m, hidden]. middle: [sum of counts, up_rows], what up gives, with GATE
    silu(first half) * second half in the first half. With DOWN alone `x` is [sum of counts, width]. All float32,
    contiguous, on the CPU. Only where `ready()`.
    """
    choice = chosen()
    assert choice.library is not None
    experts, ints = len(addresses), ctypes.c_int32
    ns = (ctypes.c_int64 * experts)()
    arrays = (
        (ctypes.c_void_p * experts)(*addresses),
        (ints * experts)(*counts),
        (ints * len(sources))(*sources),
        (ints * len(targets))(*targets),
    )
    layer = _Layer(
        _FORMATS[layout.format.name],
        _PLAIN[layout.dtype] if layout.biased else -1,
        layout.hidden,
        layout.width,
        layout.up_rows,
        stages,
        experts,
        len(x),
        threads,
        ISAS[choice.isa or ""],
        (ctypes.c_uint64 * 4)(*layout.offsets[:4]),
        *(ctypes.addressof(a) for a in arrays),
        x.data_ptr(),
        middle.data_ptr(),
        out.data_ptr(),
        ctypes.addressof(ns),
    )
    begin = perf_counter_ns()
    failed = choice.library.spac_layer(ctypes.byref(layer))
    back = perf_counter_ns()
    if failed:
        raise MemoryError(f"the kernels need more memory for {sum(counts)} rows of {layout.hidden} numbers")
    spent = list(ns)
    return spent, back - begin - sum(spent)


@dataclass(slots=True)
class Product:
    """One matrix, ready to be multiplied many times; see `multiply`.

    layer: as C reads it. kept: what that points to.
    """

    rows: int
    columns: int
    layer: _Layer
    kept: tuple[Any, ...]


def product_of(layout: Matrices, address: int) -> Product:
    """The matrix `up` of a layout at an address that stays as long as this does."""
    one = (ctypes.c_void_p * 1)(address), (ctypes.c_int32 * 1)(), (ctypes.c_int64 * 1)()
    layer = _Layer(
        format=_FORMATS[layout.format.name],
        bias=-1,
        hidden=layout.hidden,
        up_rows=layout.up_rows,
        stages=UP,
        experts=1,
        offset=(ctypes.c_uint64 * 4)(*layout.offsets[:4]),
        records=ctypes.addressof(one[0]),
        counts=ctypes.addressof(one[1]),
        ns=ctypes.addressof(one[2]),
    )
    return Product(layout.up_rows, layout.hidden, layer, one)


def multiply(product: Product, x: torch.Tensor, out: torch.Tensor, threads: int = 1) -> None:
    """out [n, rows] = x [n, columns] times the transposed matrix; both float32, contiguous, on the CPU. As `run` with
    UP, without most of what the call costs. Only where `ready()`."""
    choice, layer, n = chosen(), product.layer, len(x)
    assert choice.library is not None
    product.kept[1][0] = layer.rows = n
    layer.threads, layer.isa = threads, ISAS[choice.isa or ""]
    layer.sources = _first_rows(1 << max(6, (n - 1).bit_length()))[1]
    layer.x, layer.middle = x.data_ptr(), out.data_ptr()
    if choice.library.spac_layer(ctypes.byref(layer)):
        raise MemoryError(f"the kernels need more memory for {n} rows of {product.columns} numbers")


def move(target: torch.Tensor, source: torch.Tensor) -> int:
    """Copy bytes [n], contiguous and on the CPU, past its caches; with the kernels not built, as torch copies.

    Returns ns that it took, without the wait for the interpreter afterwards if the kernels do it.
    """
    library = chosen().library
    if library is None:
        begin = perf_counter_ns()
        target.copy_(source)
        return perf_counter_ns() - begin
    return library.spac_move(target.data_ptr(), source.data_ptr(), target.nbytes)


@cache
def _first_rows(n: int) -> tuple[Any, int]:
    """0 .. n - 1 and their address."""
    rows = (ctypes.c_int32 * n)(*range(n))
    return rows, ctypes.addressof(rows)


def ready() -> bool:
    """Whether the compiled kernels compute."""
    return chosen().isa is not None


@cache
def chosen() -> Choice:
    """What `SPAC_KERNELS` and this machine come to. InputError: what was asked for is not to be had."""
    name = os.environ.get("SPAC_KERNELS", "auto") or "auto"
    if name not in NAMES:
        raise InputError(f"SPAC_KERNELS={name}: unknown; choose {', '.join(NAMES)}")
    if name == "torch":
        return Choice(None, None, None, "SPAC_KERNELS=torch")
    library, path, why = _library()
    if library is None:
        if name != "auto":
            raise InputError(f"SPAC_KERNELS={name}: {why}")
        return Choice(None, None, None, why)
    isa = library.spac_isa_name(b"" if name == "auto" else name.encode())
    if isa is None:
        raise InputError(f"SPAC_KERNELS={name}: this processor lacks it; choose auto")
    if name == "auto" and isa == b"scalar" and platform.machine() in ("x86_64", "AMD64"):
        return Choice(library, path, None, "this processor lacks AVX2, and torch is faster than plain C")
    return Choice(
        library, path, isa.decode(), "the best this processor has" if name == "auto" else f"SPAC_KERNELS={name}"
    )


def choose(name: str) -> None:
    """Compute by another of NAMES from now on; for tests and benchmarks. Raises as `chosen` does."""
    os.environ["SPAC_KERNELS"] = name
    chosen.cache_clear()
    chosen()


def describe() -> dict[str, object]:
    """For people: library, instruction set, threads, and why this choice."""
    choice = chosen()
    return {
        "kernels": choice.isa or "torch",
        "library": choice.path,
        "why": choice.why,
        "threads": threads(),
        "cores": physical_cores(),
    }


def threads(emulated: bool = False) -> int:
    """How many threads compute experts: `SPAC_THREADS`, else one less than the physical cores that we may use, or half
    of them where the fast device is `emulated` and needs the other half."""
    asked = os.environ.get("SPAC_THREADS", "")
    if not asked:
        cores = physical_cores()
        return max(1, cores // 2 if emulated else cores - 1)
    if not asked.isdecimal() or not 1 <= int(asked) <= 256:
        raise InputError(f"SPAC_THREADS={asked}: takes a number from 1 to 256")
    return int(asked)


@cache
def physical_cores() -> int:
    """Cores that this process may run on; two hardware threads of one core count once where Linux tells."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed, cores = os.sched_getaffinity(0), set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(tuple((topology / part).read_text() for part in ("physical_package_id", "core_id")))
        except OSError:
            return len(allowed)
    return len(cores)


@cache
def _library() -> tuple[ctypes.CDLL | None, str | None, str]:
    """The shared library that the installation built beside this file; else None and why not."""
    found = [path for suffix in EXTENSION_SUFFIXES if (path := Path(__file__).with_name("_kernels" + suffix)).is_file()]
    if not found:
        return None, None, "the kernels were not built (no C compiler when this was installed?); install again with one"
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return None, None, f"{found[0].name} cannot be loaded ({error})"
    library.spac_isa_name.restype = ctypes.c_char_p
    library.spac_isa_name.argtypes = [ctypes.c_char_p]
    library.spac_move.restype = ctypes.c_int64
    library.spac_move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.spac_layer.argtypes = library.spac_attention.argtypes = [ctypes.c_void_p]
    return library, str(found[0]), ""
