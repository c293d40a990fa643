"""A machine profile, and what it makes of a model: the times that the engine charges.

A profile is a TOML file. Every entry is a quantity with a unit, a basis (`measured`, `spec`, `assumed`) and a source:

    [link]
    bandwidth = { value = "25 GB/s", basis = "measured", source = "nvbandwidth#15" }

`host.bandwidth` is what CPU and copies reach together, which is less than a stream benchmark (0.875 of it on four
measured hosts). Assumptions: batch 1; one GPU; the achieved (not the theoretical) rates stand in the profile; a
forward pass reads every dense weight once and the keys and values of its context once; the layers are alike.
"""

import json
import re
import tomllib
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..policies.interface import Costs
from ..traces.errors import InputError
from ..traces.schema import DraftShape, ModelShape

PRESETS = Path(__file__).parent / "machines"
BASES = ("measured", "spec", "assumed", "emulated")
TIME = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
SIZE = {"MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30}
RATE = {f"{unit}/s": factor for unit, factor in SIZE.items()}
COMPUTE = {"MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12}
COUNT = {"": 1.0}

UNITS: dict[str, dict[str, float]] = {
    "gpu.vram": SIZE,
    "gpu.reserved": SIZE,
    "gpu.bandwidth": RATE,
    "gpu.compute": COMPUTE,
    "gpu.dense_compute": COMPUTE,
    "gpu.context_bandwidth": RATE,
    "gpu.launch": TIME,
    "gpu.kernels_per_layer": COUNT,
    "gpu.first_expert": TIME,
    "gpu.after_draft": TIME,
    "gpu.ahead": TIME,
    "gpu.expert_fixed": TIME,
    "gpu.step_fixed": TIME,
    "gpu.draft_fixed": TIME,
    "gpu.headroom": SIZE,
    "link.bandwidth": RATE,
    "link.copy_fixed": TIME,
    "link.arrival": TIME,
    "link.landing": TIME,
    "link.prefetch_fixed": TIME,
    "link.chunk": SIZE,
    "link.d2h_bandwidth": RATE,
    "link.both_ways": COUNT,
    "link.pageable_bandwidth": RATE,
    "link.pageable_fixed": TIME,
    "host.bandwidth": RATE,
    "host.pin_limit": SIZE,
    "cpu.bandwidth": RATE,
    "cpu.compute": COMPUTE,
    "cpu.first_expert": TIME,
    "cpu.expert_fixed": TIME,
    "cpu.hybrid_layer": TIME,
    "cpu.beside": TIME,
    "cpu.overlap": COUNT,
    "policy.layer": TIME,
    "policy.layer_end": TIME,
}

# What a profile may leave out: value in base units and why that value. They count as assumed.
DEFAULTS: dict[str, tuple[float, str]] = {
    "gpu.headroom": (256 * 2**20, "kept free so that the driver does not begin to page (Crow#86: 7x slower near full)"),
    "gpu.dense_compute": (0.0, "default: as gpu.compute"),
    "gpu.context_bandwidth": (0.0, "default: as gpu.bandwidth"),
    "gpu.first_expert": (0.0, "default: experts that are computed together cost no more than their sum"),
    "gpu.ahead": (0.0, "default: to note down what a gate is asked takes no time"),
    "gpu.after_draft": (0.0, "default: drafting leaves nothing behind that slows the layers after it"),
    "link.arrival": (0.0, "default: whoever waits for a copy goes on when it has landed"),
    "link.landing": (0.0, "default: who launches the work is not held up by prefetches that land meanwhile"),
    "policy.layer_end": (0.0, "default: all decisions are made before a layer's experts"),
    "link.prefetch_fixed": (0.0, "default: it is known what to prefetch when the link is free"),
    "link.chunk": (2e6, "default: an expert is copied in pieces of about this size, and demand may go between them"),
    "link.d2h_bandwidth": (0.0, "default: as fast as host to device"),
    "link.both_ways": (0.45, "nvbandwidth#53: 25 to 11 GB/s host to device while data flows back"),
    "link.pageable_bandwidth": (11.6e9, "imp#1409: 864 KiB keep the host busy for 76.2 us"),
    "link.pageable_fixed": (16.1e3, "imp#1409: 864 KiB take 92.3 us in all"),
    "host.pin_limit": (0.0, "default: 0, no limit known"),
    "cpu.beside": (
        0.0,
        "default: handing over to the CPU tier and launching work do not disturb each other",
    ),
    "cpu.overlap": (0.0, "default: the tiers share memory and nothing else"),
}

# Bytes of a dense weight by the experts' type; where it is not told here, the dense part is stored like the experts.
DENSE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "mxfp4": 2.0}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number in base units (bytes, bytes/s, ns, FLOP/s), how it is known and from where."""

    value: float
    basis: str
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A profile: `name`, a line about it, and one `Quantity` for every entry of `UNITS`."""

    name: str
    title: str
    quantities: dict[str, Quantity]

    def __getitem__(self, entry: str) -> float:
        return self.quantities[entry].value

    @property
    def assumed(self) -> list[str]:
        """Entries that nobody measured."""
        return [name for name, q in self.quantities.items() if q.basis == "assumed"]


def machine_names() -> list[str]:
    return sorted(f.stem for f in PRESETS.glob("*.toml"))


def load_machine(name: str) -> Machine:
    """A preset by name or a profile by path. InputError names the file, the entry and the units that it takes."""
    if name in machine_names():
        return parse_machine((PRESETS / f"{name}.toml").read_text(), f"machine {name}")
    path = Path(name)
    if not path.is_file():
        raise InputError(f"--machine: no preset or file named {name!r}; presets: {', '.join(machine_names())}")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a machine profile ({error})") from None
    return parse_machine(text, str(path))


def parse_machine(text: str, where: str) -> Machine:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not valid TOML: {error}") from None
    quantities = {entry: _quantity(data, entry, where) for entry in UNITS}
    known = {e.split(".")[0] for e in UNITS}
    for table, entries in data.items():
        if isinstance(entries, dict):
            for entry in entries:
                if table not in known or f"{table}.{entry}" not in UNITS:
                    raise InputError(f"{where}: unknown entry {table}.{entry}; known: {', '.join(UNITS)}")
    return Machine(str(data.get("name", where)), str(data.get("title", "")), quantities)


def _quantity(data: dict[str, Any], entry: str, where: str) -> Quantity:
    table, name = entry.split(".")
    given = data.get(table, {}).get(name)
    units = UNITS[entry]
    wanted = "a plain number" if units is COUNT else f"a number and one of {', '.join(units)}"
    if given is None and entry in DEFAULTS:
        value, source = DEFAULTS[entry]
        return Quantity(value, "assumed", source)
    if not isinstance(given, dict) or "value" not in given:
        raise InputError(f"{where}: {entry} is missing; write {entry} = {{ value = ..., basis = ..., source = ... }}")
    value = read_quantity(str(given["value"]), units)
    if value is None:
        raise InputError(f"{where}: {entry} has the value {given['value']!r}; it takes {wanted}")
    if value == 0 and units in (RATE, COMPUTE) and entry not in DEFAULTS:
        raise InputError(f"{where}: {entry} is 0; a rate must be more than that")
    if given.get("basis") not in BASES:
        raise InputError(f"{where}: {entry} needs a basis, one of {', '.join(BASES)}")
    return Quantity(value, given["basis"], str(given.get("source", "")))


def read_quantity(text: str, units: dict[str, float]) -> float | None:
    """A number and one of `units`, in base units; None if `text` is something else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*(\S*)\s*", text)
    return float(Decimal(match[1]) * Decimal(units[match[2]])) if match and match[2] in units else None


def show_machine(machine: Machine) -> str:
    """TOML text that `parse_machine` reads back as the same profile."""
    lines = [f"name = {_text(machine.name)}", f"title = {_text(machine.title)}"]
    table = ""
    for entry, q in machine.quantities.items():
        if entry.split(".")[0] != table:
            table = entry.split(".")[0]
            lines += ["", f"[{table}]"]
        unit, factor = next(iter(UNITS[entry].items()))
        # In decimals, because dividing and multiplying floats by a power of ten need not give the same float back.
        value = f"{Decimal(repr(q.value)) / Decimal(factor):f} {unit}".strip()
        known = f'basis = "{q.basis}", source = {_text(q.source)}'
        lines.append(f'{entry.split(".")[1]} = {{ value = "{value}", {known} }}')
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """A TOML string: JSON's escapes are TOML's too."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Rates:
    """What one machine needs for one model (and draft), in ns: the experts' `costs` and everything around them.

    A copy has `chunks` between which it may be interrupted; `back_bytes_ns` are for an expert's bytes from device to
    host (0: as the other way) and `both_ways` is the share of its speed that a copy to the device keeps meanwhile. The
    first `pinned_experts`, in order of (layer, expert), lie in pinned memory (-1: all); the others are copied at the
    pageable prices, and nothing is launched until they have landed. `costs` has the price of pinned ones, if any.
    Deciding takes `policy_ns` of a layer before its experts and `ending_ns` after them. Experts that are there together
    are computed together, for `call_ns` more; what lands later is another call. In a step that verifies what a draft
    model proposed, a layer takes `after_draft_ns` longer before its experts, and `ahead_ns` where gates are asked ahead
    for the policy. A wait for a copy ends `arrival_ns` after it landed; a prefetch that lands holds up the fast device
    by `landing_ns`, and took the link `prefetch_ns` longer than another copy. A layer on both tiers takes `beside_ns`
    longer. While both compute, each is slower by `overlap` of the time that its work takes alone: where they are
    threads on the same cores, or both read host memory.
    """

    costs: Costs
    dense_fixed_ns: int
    dense_memory_ns: int
    dense_token_ns: float
    context_ns: float
    step_ns: int
    draft_token_ns: int
    policy_ns: int
    dram_bytes_per_s: int
    chunks: int = 1
    back_bytes_ns: int = 0
    both_ways: float = 1.0
    pinned_experts: int = -1
    pageable_fixed_ns: int = 0
    pageable_bytes_ns: int = 0
    call_ns: int = 0
    after_draft_ns: int = 0
    ahead_ns: int = 0
    arrival_ns: int = 0
    landing_ns: int = 0
    prefetch_ns: int = 0
    ending_ns: int = 0
    beside_ns: int = 0
    overlap: float = 0.0

    def dense_ns(self, tokens: int, context: int, drafted: bool = False) -> int:
        """Attention, norms, router and shared expert of one layer for `tokens` new tokens after `context` others.

        drafted: some of them were, by a draft model if that takes any time; looking them up leaves nothing behind.
        """
        work = max(self.dense_memory_ns, round(tokens * self.dense_token_ns))
        after = self.after_draft_ns if drafted and self.draft_token_ns else 0
        return self.dense_fixed_ns + work + round((context + tokens) * self.context_ns) + after


def rates_for(machine: Machine, shape: ModelShape, draft: DraftShape | None = None) -> Rates:
    """Price a model on a machine. The draft's weights are read once for every drafted token."""
    m = machine
    params = 3 * shape.hidden * shape.expert_width
    expert_flop = 2 * params
    read_ns = 1e9 / m["gpu.bandwidth"]
    pageable = round(m["link.pageable_fixed"]), round(shape.expert_bytes * 1e9 / m["link.pageable_bandwidth"])
    pinned = int(m["host.pin_limit"] // shape.expert_bytes) if m["host.pin_limit"] else -1
    copy = round(m["link.copy_fixed"]), round(shape.expert_bytes * 1e9 / m["link.bandwidth"])
    if pinned == 0:
        copy = pageable
    costs = Costs(
        gpu_fixed_ns=round(m["gpu.expert_fixed"]),
        gpu_memory_ns=round(shape.expert_bytes * read_ns),
        gpu_token_ns=expert_flop * 1e9 / m["gpu.compute"],
        cpu_first_ns=round(m["cpu.first_expert"]),
        cpu_fixed_ns=round(m["cpu.expert_fixed"]),
        cpu_memory_ns=round(shape.expert_bytes * 1e9 / m["cpu.bandwidth"]),
        cpu_token_ns=expert_flop * 1e9 / m["cpu.compute"],
        hybrid_ns=round(m["cpu.hybrid_layer"]),
        copy_fixed_ns=copy[0],
        copy_bytes_ns=copy[1],
        host_bytes_ns=round(shape.expert_bytes * 1e9 / m["host.bandwidth"]),
    )
    layer_bytes = (shape.dense_bytes - shape.embedding_bytes) / shape.layers
    weight_bytes = DENSE_BYTES.get(shape.dtype, shape.expert_bytes / params)
    launch_ns = m["gpu.kernels_per_layer"] * m["gpu.launch"]
    return Rates(
        costs=costs,
        dense_fixed_ns=round(launch_ns),
        dense_memory_ns=round(layer_bytes * read_ns),
        dense_token_ns=2 * layer_bytes / weight_bytes * 1e9 / (m["gpu.dense_compute"] or m["gpu.compute"]),
        context_ns=shape.kv_bytes_per_token / shape.layers * 1e9 / (m["gpu.context_bandwidth"] or m["gpu.bandwidth"]),
        step_ns=round(m["gpu.step_fixed"]),
        draft_token_ns=_draft_ns(m, draft) if draft else 0,
        policy_ns=round(m["policy.layer"]),
        dram_bytes_per_s=round(m["host.bandwidth"]),
        chunks=max(1, round(shape.expert_bytes / m["link.chunk"])) if m["link.chunk"] else 1,
        back_bytes_ns=round(shape.expert_bytes * 1e9 / m["link.d2h_bandwidth"]) if m["link.d2h_bandwidth"] else 0,
        both_ways=m["link.both_ways"],
        pinned_experts=pinned,
        pageable_fixed_ns=pageable[0],
        pageable_bytes_ns=pageable[1],
        call_ns=round(m["gpu.first_expert"]),
        after_draft_ns=round(m["gpu.after_draft"]),
        ahead_ns=round(m["gpu.ahead"]),
        arrival_ns=round(m["link.arrival"]),
        landing_ns=round(m["link.landing"]),
        prefetch_ns=round(m["link.prefetch_fixed"]),
        ending_ns=round(m["policy.layer_end"]),
        beside_ns=round(m["cpu.beside"]),
        overlap=m["cpu.overlap"],
    )


def _draft_ns(machine: Machine, draft: DraftShape) -> int:
    launch_ns = machine["gpu.kernels_per_layer"] * machine["gpu.launch"]
    if not draft.layers:
        return 0  # looked up in the text
    read_ns = draft.dense_bytes * 1e9 / machine["gpu.bandwidth"]
    return round(machine["gpu.draft_fixed"] + draft.layers * launch_ns + read_ns)
