"""`spac-exec replay`: a trace's routing on real kernels and copies."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import measuring, say, show_json, show_size, show_table, starting
from ..traces.errors import InputError
from .cli_options import AsJson, Bandwidth, Device, Latency, MachineName, default_device, link_of, policy_of

if TYPE_CHECKING:
    from ..traces.views import Steps
    from .replay import Rig

NAMES = ("draft", "step", "dense", "expert", "wait_copy", "wait_cpu", "hybrid", "policy")


def replay(
    trace: Annotated[str, typer.Argument(help="A trace file or a bundled trace.")],
    policy: Annotated[list[str] | None, typer.Option(help="Give it again for more. Default: ar-lru.")] = None,
    slots: Annotated[int | None, typer.Option(min=0, help="Expert slots per layer. Default: twice the top-k.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first N MoE layers.")] = None,
    form: Annotated[str, typer.Option("--format", help="How experts are stored: f32, bf16, q8 or q4.")] = "q8",
    dense: Annotated[
        str, typer.Option(help="weights: a product over as many bytes as a layer's other weights; or none.")
    ] = "weights",
    limit_steps: Annotated[int, typer.Option(min=1, help="Steps of the trace.")] = 40,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps after prefill that are run and not counted.")] = 4,
    draft_length: Annotated[
        int | None,
        typer.Option("--window", min=0, help="Cut decode steps into verify steps of so many assumed drafts."),
    ] = None,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Of these drafts.")] = 0.7,
    machine: MachineName = None,
    link_bandwidth: Bandwidth = "2GB/s",
    link_latency: Latency = "20us",
    rounds: Annotated[int, typer.Option(min=1, help="Of calibration, where no --machine is given.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the policy and of the weights.")] = 0,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Run a trace's routing on random weights of the right shape, and set what it took beside the simulation.

    No model is needed. Experts run by the real kernels on both tiers, copies are real (on CUDA) or emulated; the rest
    of a layer is a stand-in, and a draft a pause as long as the profile says.
    """
    if dense not in ("weights", "none"):
        raise InputError(f"--dense {dense}: unknown; choose weights or none")
    names = policy or ["ar-lru"]
    for name in names:
        policy_of(name)
    with starting():
        from ..traces.reader import open_trace
        from .memory import settle
        from .replay import first_layers, in_format

    link = link_of(link_bandwidth, link_latency)
    steps: Any = open_trace(trace)
    if draft_length:
        from ..traces.redraft import windowed

        steps = windowed(steps, draft_length, acceptance, seed)
    steps = in_format(first_layers(steps, layers), form)
    shape = steps.header.target
    per_layer = min(shape.experts, 2 * shape.top_k if slots is None else slots)
    with measuring("making random weights"):
        rig = _rig(steps, form, per_layer, dense == "weights", device or default_device(), seed)
    settle()
    with measuring("measuring this machine and running the trace"):
        profile = _machine(machine, rig, max(shape.top_k, per_layer), link, rounds)
        found = {name: _one(rig, steps, name, profile, per_layer, limit_steps, warm_up, seed) for name in names}
    facts = {
        "trace": trace, "model": shape.name, "layers": shape.layers, "format": form, "slots_per_layer": per_layer,
        "expert_bytes": shape.expert_bytes, "dense": dense, "machine": profile.name,
        "provenance": str(steps.header.provenance), "acceptance": steps.header.acceptance,
    }  # fmt: skip
    if json:
        show_json({**facts, "policies": found})
    else:
        _show(facts, found)


def _rig(steps: "Steps", form: str, slots: int, dense: bool, device: str, seed: int) -> "Rig":
    from .memory import check_memory, free_ram
    from .replay import build, memory_of

    shape = steps.header.target
    needs = memory_of(shape, slots * len(shape.moe_layers), dense)
    check_memory("host memory", "replay", needs, free_ram(), "give fewer --layers or --slots, or a smaller --format")
    return build(steps, form, dense, device, seed)


def _machine(name: str | None, rig: "Rig", slots: int, link: Any, rounds: int) -> Any:
    from ..simulator.machine import load_machine
    from .calibrate import calibrate
    from .probe import RigSubject

    return load_machine(name) if name is not None else calibrate(RigSubject(rig, slots), link, rounds=rounds)


def _one(
    rig: "Rig", steps: "Steps", name: str, machine: Any, slots: int, limit: int, warm_up: int, seed: int
) -> dict[str, Any]:
    """Measured and simulated of one policy, over the same steps."""
    from .replay import compare
    from .session import Settings

    settings = Settings(machine, slots * rig.shape.layers, seed=seed)
    both = compare(rig, steps, lambda: policy_of(name)[0], settings, limit, warm_up)
    return {
        "measured": both.measured, "simulated": both.simulated, "tokens": both.tokens,
        "error": both.simulated["tpot_ms"] / both.measured["tpot_ms"] - 1,
    }  # fmt: skip


def _show(facts: dict[str, Any], found: dict[str, Any]) -> None:
    size, slots = show_size(facts["expert_bytes"]), facts["slots_per_layer"]
    say(f"{facts['model']}, {facts['layers']} layers, experts of {size} ({facts['format']}), {slots} slots a layer")
    say(f"routing {facts['provenance']}, acceptance {facts['acceptance']}; weights random, dense part a stand-in")
    speeds = [
        {"policy": name, "error": f"{one['error']:+.1%}"}
        | {f"{what} {short}": f"{one[side][key]:.3f}" for key, what in (("hit_rate", "hit"), ("tpot_ms", "TPOT ms"))
           for side, short in (("measured", "live"), ("simulated", "sim"))}
        for name, one in found.items()
    ]  # fmt: skip
    show_table("simulator against this machine", speeds)
    parts = [
        {"policy": name, "": which} | {k: f"{one[which]['split_ms'].get(k, 0):.2f}" for k in NAMES}
        for name, one in found.items()
        for which in ("measured", "simulated")
    ]
    show_table("ms of an output token by cause", parts)
