"""`spac-sim machines`: the presets, or one profile with what is known of each value."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import say, show_json, show_size, show_table

if TYPE_CHECKING:
    from .machine import Machine

CROSSING_MODEL, CROSSING_FORMAT = "qwen3-30b-a3b", "q4"


def machines(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A preset or a profile's file.")] = None,
    model: Annotated[str, typer.Option(help="Model whose prefill crossing to show.")] = CROSSING_MODEL,
    quant: Annotated[str, typer.Option(metavar="FORMAT", help="Its format, as in fit.")] = CROSSING_FORMAT,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the machine presets; with a name, each value of one, how it is known and from where."""
    from .machine import load_machine, machine_names

    if name is not None:
        show_one(load_machine(name), model, quant, json)
        return
    found = [load_machine(n) for n in machine_names()]
    if json:
        show_json([machine_row(m) | {"assumed": m.assumed} for m in found])
    else:
        show_table("Machine presets", [machine_row(m) for m in found])


def machine_row(m: "Machine") -> dict[str, Any]:
    return {
        "name": m.name,
        "title": m.title,
        "vram_gib": round(m["gpu.vram"] / 2**30, 1),
        "gpu_gb_per_s": m["gpu.bandwidth"] / 1e9,
        "link_gb_per_s": m["link.bandwidth"] / 1e9,
        "cpu_gb_per_s": m["cpu.bandwidth"] / 1e9,
        "assumed_entries": f"{len(m.assumed)} of {len(m.quantities)}",
    }


def show_one(m: "Machine", model: str, quant: str, json: bool) -> None:
    from .fit import streaming
    from .ranges import base_unit
    from .sizing import find_size, format_for

    size = find_size(model, "--model")
    shape = size.shape(format_for(quant, size))
    crossing = {"model": shape.name, "format": shape.dtype, **streaming(m, shape)}
    if json:
        rows = [
            {"entry": e, "value": q.value, "unit": base_unit(e), "basis": q.basis, "source": q.source}
            for e, q in m.quantities.items()
        ]
        show_json({"name": m.name, "title": m.title, "entries": rows, "prefill": crossing})
        return
    rows = [
        {"entry": e, "value": show_value(e, q.value), "basis": q.basis, "source": q.source}
        for e, q in m.quantities.items()
    ]
    show_table(f"{m.name}: {m.title}", rows)
    say(f"{shape.name} in {shape.dtype}: {streaming_words(crossing)}")


def streaming_words(facts: dict[str, Any]) -> str:
    """Where prefill changes from the CPU to the link, in a sentence."""
    at = facts["crossing_tokens"]
    way = "the CPU computes absent experts at any length of prompt" if at is None else _crossing(at)
    return f"{way}; all experts over the link once take {facts['pass_s']:.2f} s (rule of thumb: {facts['rule_tokens']})"


def _crossing(at: int) -> str:
    return f"below {at} prompt tokens at a time absent experts are cheaper on the CPU, from {at} on streamed"


def show_value(entry: str, value: float) -> str:
    """An entry's value for people."""
    from .machine import COMPUTE, RATE, SIZE, TIME, UNITS

    units = UNITS[entry]
    if units is SIZE:
        return show_size(value)
    if units is RATE:
        return f"{value / 1e9:g} GB/s"
    if units is TIME:
        return f"{value / 1e3:g} us"
    if units is COMPUTE:
        return f"{value / 1e12:g} TFLOP/s"
    return f"{value:g}"
