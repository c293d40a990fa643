"""`spac-exec doctor`: what this machine has, and what would limit a model on it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import measuring, parse_size, say, show_json, show_size, show_table, starting
from ..traces.errors import InputError
from .cli_options import AsJson, StoreFolder

if TYPE_CHECKING:
    from ..traces.schema import ModelShape

RATES = ("read_one_thread", "read_all_threads", "copy_pinned", "copy_pageable")
SIZES = ("ram", "ram_free", "vram", "vram_free", "cache_disk_free")


def doctor(
    target: Annotated[
        str | None, typer.Option(help="A model to judge: folder, Hugging Face name, trace, or one that synth knows.")
    ] = None,
    store: Annotated[str, typer.Option(help="Its experts in host memory: exact, q8 or q4.")] = "exact",
    slots: Annotated[int | None, typer.Option(min=0, help="Expert slots per layer. Default: twice the top-k.")] = None,
    vram: Annotated[str | None, typer.Option(metavar="SIZE", help="Slots that fit in this, e.g. 12GiB.")] = None,
    store_folder: StoreFolder = None,
    json: AsJson = False,
) -> int:
    """Say what this machine has, which kernels were chosen, and what would limit a model here (exit 1: it fails)."""
    if slots is not None and vram is not None:
        raise InputError("--slots and --vram: give one of them")
    if target is None and (slots is not None or vram is not None or store != "exact"):
        raise InputError("--slots, --vram and --store: need the --target that they are for")
    room = None if vram is None else parse_size(vram, "--vram")
    with starting():
        shape = None if target is None else _shape(target, store)
        from .doctor import FAIL, examine, findings, needs
        from .stores import default_folder

    with measuring("measuring memory and copies"):
        facts = examine(store_folder or default_folder())
    found = findings(facts)
    wanted: dict[str, Any] | None = None
    if target is not None and shape is not None:
        wanted, more = needs(shape, _slots(shape, slots, room), facts)
        held, odd = _files(target)
        wanted |= held
        found += more + odd
    bad = any(level == FAIL for level, _ in found)
    if json:
        show_json({**facts, "target": wanted, "findings": [{"level": level, "text": text} for level, text in found]})
    else:
        _show(facts, wanted, found)
    return 1 if bad else 0


def _files(target: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What the target's files hold, if they are here, and what is odd about it."""
    from .audit import audit_files, on_disk
    from .doctor import FAIL, WARN

    if (place := on_disk(target)) is None:
        return {}, []
    try:
        held = audit_files(place)
    except InputError as error:
        return {}, [(FAIL, str(error))]
    actual, expected = held["experts_in_files_bytes"], held["experts_expected_bytes"]
    if expected <= actual <= 1.2 * expected:  # factors of quantised numbers
        return held, []
    sizes = f"{show_size(actual)} of experts, its configuration makes {show_size(expected)}"
    return held, [(WARN, f"the checkpoint has {sizes}: its numbers are of another type than config.json says")]


def _shape(target: str, store: str) -> "ModelShape":
    from .formats import QUANTISED
    from .replay import record_of

    if store not in ("exact", *QUANTISED):
        raise InputError(f"--store {store}: unknown; choose exact, {', '.join(QUANTISED)}")
    shape = _named(target)
    return shape if store == "exact" else replace(shape, expert_bytes=record_of(shape, store).size)


def _named(target: str) -> "ModelShape":
    if target.endswith(".gguf"):
        from ..traces.models import dtype_of, model_shape
        from .models import find_source

        found = find_source("--target", target, "target")
        return model_shape(found.config, found.name, dtype_of(found.config, "auto"))
    from ..traces.shapes import ShapeFlags, named_shape

    try:
        shape = named_shape(ShapeFlags(model=target))
    except InputError as error:
        raise InputError(str(error).replace("--model", "--target", 1)) from None
    assert shape is not None
    return shape


def _slots(shape: "ModelShape", slots: int | None, room: int | None) -> int:
    """Slots a layer: what is said, else what `room` bytes hold beside the dense weights, else twice the top-k."""
    if room is not None:
        left = max(0, room - shape.dense_bytes)
        slots = left // (len(shape.moe_layers) * shape.expert_bytes)
    return min(shape.experts, 2 * shape.top_k if slots is None else slots)


def _show(facts: dict[str, Any], wanted: dict[str, Any] | None, found: list[tuple[str, str]]) -> None:
    show_table("this machine", _listed(facts))
    if wanted is not None:
        show_table(f"{wanted['model']} on it", _listed({k: v for k, v in wanted.items() if k != "model"}))
    colours = {"note": "dim", "warning": "yellow", "failure": "bold red"}
    for level, text in found:
        say(f"[{colours[level]}]{level}:[/] {text}")


def _listed(facts: dict[str, Any]) -> list[dict[str, str]]:
    """One row a fact; what is long is cut, and whole with --json."""
    return [{"what": name.replace("_", " "), "value": _shown(name, value)[-50:]} for name, value in facts.items()]


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if name in RATES:
        return f"{value / 1e9:.1f} GB/s"
    if name in SIZES or "bytes" in name:
        return show_size(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)
