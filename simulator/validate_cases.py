"""The published measurements that `spac-sim validate` replays: one TOML file in `validation/` for each study.

A study is one engine (and mostly one machine) with the rows that were published of it. Its file says which preset
the machine starts from, which entries are known better, which entries are fitted to which row, and, for every row,
what was measured, where that stands, and what had to be assumed.
"""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..traces.errors import InputError
from ..traces.schema import ModelShape
from ..traces.synth import FOLDER as SYNTHETIC
from .machine import BASES, PRESETS, UNITS, Machine, Quantity, load_machine, read_quantity
from .sizing import FORMATS, KV_FORMATS, Format, find_size

FOLDER = Path(__file__).parent / "validation"
MODELS, PAGE = "models", "page"
LIKE = "qwen3-30b-a3b"  # the model whose synthetic routing stands in for others
WHAT = {
    "speed": "tok/s",
    "hit": "%",
    "copy": "ms",
    "copy-wait": "ms/token",
    "copy-share": "%",
    "shared-cpu": "GB/s",
    "shared-link": "GB/s",
    "shared-sum": "GB/s",
}
TIERS = ("T1", "T2")


@dataclass(frozen=True, slots=True)
class Row:
    """One published number and what is needed to predict it.

    `bits` are those of a weight, of experts and of all others; `slots` counts expert slots over all layers. `routing`
    says where the routing comes from (`validate_routing`), and `tokens` of each of `sequences` are replayed, of which
    hit rates leave the first `skip` out. `hit` is the measured hit rate in per cent that a routing of kind "given"
    reproduces. `fitted`: something else was fitted to this very number. `machine` holds entries that differ from the
    study's; `why` explains a large error, after the fact.
    """

    id: str
    what: str
    measured: float
    tier: str
    source: str
    setup: str
    model: str
    bits: tuple[float, float]
    policy: str
    slots: int
    kv: str = "fp16"
    top_k: int = 0
    context: int = 512
    routing: str = "any"
    hit: float = 0.0
    tokens: int = 48
    skip: int = 0
    sequences: int = 1
    fitted: bool = False
    assumed: str = ""
    why: str = ""
    machine: tuple[tuple[str, Quantity], ...] = ()

    @property
    def unit(self) -> str:
        return WHAT[self.what]


@dataclass(frozen=True, slots=True)
class Fit:
    """Entries that are scaled by one factor until the study predicts `row` exactly."""

    row: str
    entries: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Order:
    """`first` must be predicted to be larger than `second`, as it was measured; `why` explains a failure."""

    first: str
    second: str
    source: str
    why: str = "not explained"


@dataclass(frozen=True, slots=True)
class Diagonal:
    """Shares of experts on the GPU against shares of the way from the time of row `zero` to that of row `full`.

    Each of `rows` must be predicted to lie below the diagonal, as it was measured: its placement gains less than its
    share, because a layer that still needs the CPU pays the whole round trip.
    """

    zero: str
    full: str
    rows: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Study:
    """One engine's rows. `machine` has the entries of the preset `base` but for those that `known` lists."""

    name: str
    title: str
    base: str
    known: tuple[str, ...]
    machine: Machine
    rows: tuple[Row, ...]
    fits: tuple[Fit, ...]
    orders: tuple[Order, ...]
    diagonals: tuple[Diagonal, ...]

    def row(self, id: str) -> Row:
        for row in self.rows:
            if row.id == id:
                return row
        raise InputError(f"validation/{self.name}.toml: there is no row {id}")


def studies() -> list[Study]:
    """All studies, by name. InputError names the file and the row of what cannot be read."""
    return [_study(path) for path in _files() if path.stem not in (MODELS, PAGE)]


def page() -> dict[str, list[dict[str, str]]]:
    """What else the page says: `left_out` rows, and choices made in `hindsight`."""
    return _read(FOLDER / f"{PAGE}.toml")


def fingerprint() -> str:
    """A hash of all files that state a number here: studies, the presets they start from, the synthetic routing's."""
    digest = hashlib.sha256()
    presets = sorted({PRESETS / f"{study.base}.toml" for study in studies()})
    for path in (*_files(), *presets, SYNTHETIC / f"{LIKE}.json"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]


def shape_of(row: Row) -> ModelShape:
    """The row's model in the row's format of weights."""
    shape = _shape(row.model, row.bits, row.kv)
    return replace(shape, top_k=row.top_k or shape.top_k)


@cache
def _shape(model: str, bits: tuple[float, float], kv: str) -> ModelShape:
    """bits: of a weight, of routed experts and of all others."""
    about = _models()[model]
    experts, body = bits
    if known := about.get("known"):
        return find_size(known, "validation/models.toml:").shape(Format(f"{experts:g}-bit", experts, body, body), kv)
    return ModelShape(
        name=about["name"],
        layers=about["layers"],
        moe_layers=tuple(range(about.get("first_moe_layer", 0), about["layers"])),
        experts=about["experts"],
        top_k=about["top_k"],
        hidden=about["hidden"],
        expert_width=about["expert_width"],
        dtype=f"{experts:g}-bit",
        expert_bytes=round(3 * about["hidden"] * about["expert_width"] * experts / 8),
        dense_bytes=round((about["body"] + about["embedding"] + about["head"]) * body / 8),
        kv_bytes_per_token=round(about["kv_growing"] * KV_FORMATS[kv] / 8),
        embedding_bytes=round(about["embedding"] * body / 8),
    )


@cache
def _models() -> dict[str, Any]:
    return _read(FOLDER / f"{MODELS}.toml")


def _files() -> list[Path]:
    return sorted(FOLDER.glob("*.toml"))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"validation/{path.name}: cannot be read ({error})") from None


def _study(path: Path) -> Study:
    data, where = _read(path), f"validation/{path.name}"
    entries = dict(_entries(data.get("machine", {}), where))
    preset = load_machine(data["base"])
    rows = tuple(_row(each, where) for given in data["rows"] for each in _unrolled(data.get("all", {}) | given, where))
    ids = [row.id for row in rows]
    if len(set(ids)) < len(ids):
        raise InputError(f"{where}: two rows are called {max(ids, key=ids.count)}")
    return Study(
        name=path.stem,
        title=data["title"],
        base=data["base"],
        known=tuple(entries),
        machine=Machine(path.stem, data["title"], preset.quantities | entries),
        rows=rows,
        fits=tuple(Fit(f["row"], tuple(f["entries"]), f["why"]) for f in data.get("fits", [])),
        orders=tuple(Order(**o) for o in data.get("orders", [])),
        diagonals=tuple(Diagonal(**{**d, "rows": tuple(d["rows"])}) for d in data.get("diagonals", [])),
    )


def _unrolled(given: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """A row whose `measured` is a list stands for as many rows; lists of that length beside it go along with it."""
    measured = given["measured"]
    if not isinstance(measured, list):
        yield dict(given)
        return
    together = {k: v for k, v in given.items() if isinstance(v, list) and len(v) == len(measured) and k != "bits"}
    if not isinstance(given["id"], list):
        raise InputError(f"{where}: row {given['id']} measures {len(measured)} numbers and needs as many ids")
    for i in range(len(measured)):
        yield {**given, **{k: v[i] for k, v in together.items()}}


def _row(given: dict[str, Any], where: str) -> Row:
    where = f"{where}: row {given['id']}"
    known = {f.name for f in fields(Row)} | {"cpu_layers", "slots_per_layer", "share"}
    if strange := sorted(set(given) - known):
        raise InputError(f"{where}: unknown field {strange[0]}")
    if (
        given.get("what", "speed") not in WHAT
        or given["tier"] not in TIERS
        or given.get("kv", "fp16") not in KV_FORMATS
    ):
        raise InputError(f"{where}: what is one of {', '.join(WHAT)}; tier one of {', '.join(TIERS)}; kv fp16 or q8_0")
    bits = given.pop("bits")
    of_experts, of_body = bits if isinstance(bits, list) else (bits, bits)
    both = _bits(of_experts), _bits(of_body)
    slots = _slots(given, _shape(given["model"], both, "fp16"))
    row = {
        **{k: v for k, v in given.items() if k not in ("cpu_layers", "slots_per_layer", "share")},
        "what": given.get("what", "speed"),
        "bits": both,
        "slots": slots,
        "measured": float(given["measured"]),
        "hit": float(given.get("hit", 0.0)),
        "machine": tuple(_entries(given.get("machine", {}), where)),
    }
    return Row(**row)


def _slots(given: Mapping[str, Any], shape: ModelShape) -> int:
    """Expert slots over all layers, from whichever way the row states them; all experts if it states none."""
    layers = len(shape.moe_layers)
    whole = layers * shape.experts
    if "cpu_layers" in given:
        return (layers - min(layers, given["cpu_layers"])) * shape.experts
    if "slots_per_layer" in given:
        return round(given["slots_per_layer"] * layers)
    if "share" in given:
        return round(given["share"] * whole)
    return given.get("slots", whole)


def _bits(given: str | float) -> float:
    return FORMATS[given] if isinstance(given, str) else float(given)


def _entries(tables: Mapping[str, Mapping[str, Any]], where: str) -> Iterator[tuple[str, Quantity]]:
    for table, entries in tables.items():
        for name, given in entries.items():
            entry = f"{table}.{name}"
            value = read_quantity(str(given["value"]), UNITS[entry]) if entry in UNITS else None
            if value is None or given.get("basis") not in BASES or not given.get("source"):
                raise InputError(f"{where}: {entry} is unknown, or its value, basis or source is wrong")
            yield entry, Quantity(value, given["basis"], given["source"])
