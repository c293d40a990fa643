"""`spac-exec`: real inference under a policy."""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import parse_size, run_app, say, show_json
from ..traces.errors import InputError

if TYPE_CHECKING:
    from ..policies.interface import Policy
    from ..simulator.machine import Machine
    from ..traces.prompts import Prompt
    from .models import Models

app = typer.Typer(help="Run real inference under a policy.", no_args_is_help=True, add_completion=False)

DEFAULT_FRACTION = 0.25  # of the experts in slots, where nothing else is said
DEFAULT_DRAFT_LENGTH = 4
DEFAULT_MACHINE = "rtx4090-pcie4"  # of the virtual clock

Target = Annotated[str | None, typer.Option(help="Folder or Hugging Face name. Default: the embedded pair.")]
Draft = Annotated[str | None, typer.Option(help="The same for the draft; none decodes without one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (as saved).")]
Device = Annotated[str | None, typer.Option(help="cpu (the GPU is emulated) or cuda. Default: cuda if there is one.")]
Bandwidth = Annotated[str, typer.Option(metavar="RATE", help="Of the emulated link, e.g. 100MB/s.")]
Latency = Annotated[str, typer.Option(metavar="TIME", help="Of the emulated link, for each copy, e.g. 20us.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to continue. Default: three bundled prompts.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A .txt or .jsonl file, or a bundled set's name.")] = None,
    prompt_limit: Annotated[int | None, typer.Option(help="Only the first N prompts.")] = None,
    policy: Annotated[str, typer.Option(help="A policy file, name, name:key=value,… or file.py:Class.")] = "ar-lru",
    target: Target = None,
    draft: Draft = None,
    machine: Annotated[
        str | None, typer.Option(help="A preset or a profile's file. Default: measure this machine now.")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=0, help="Expert slots per layer.")] = None,
    cache_fraction: Annotated[float | None, typer.Option(min=0, max=1, help="Slots as a share of all experts.")] = None,
    vram: Annotated[str | None, typer.Option(metavar="SIZE", help="Slots that fit in this, e.g. 12GiB.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    draft_length: Annotated[
        int | None, typer.Option(min=0, help=f"Tokens to draft a step. Default {DEFAULT_DRAFT_LENGTH}.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of the policy.")] = 0,
    clock: Annotated[str, typer.Option(help="real, or virtual: the simulator's time.")] = "real",
    record: Annotated[Path | None, typer.Option(metavar="T", help="Write a routing trace of the run.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the tokens with transformers' own greedy ones.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Also run a policy that changes the model's output.")
    ] = False,
    dtype: Dtype = "float32",
    device: Device = None,
    json: AsJson = False,
) -> int:
    """Generate text with the target's experts in slots, moved as the policy says, and print what it took."""
    chosen_policy, chosen = policy_of(policy)
    if not (chosen_policy.lossless or allow_lossy):
        raise InputError(f"--policy {policy}: this policy changes the model's output; run it with --allow-lossy")
    if clock not in ("real", "virtual"):
        raise InputError(f"--clock {clock}: unknown; choose real or virtual")
    if check and temperature > 0:
        raise InputError("--check: only greedy output can be compared; leave out --temperature")
    if record is not None and not record.parent.is_dir():
        raise InputError(f"--record {record}: no such folder {record.parent}; make it first")
    given = prompts_of(prompt, prompts, prompt_limit)
    if check and any(len(p.turns) > 1 for p in given):
        raise InputError("--check: takes prompts of one turn; these are conversations")
    length = draft_length if draft_length is not None else 0 if chosen.get("mode") == "ar" else DEFAULT_DRAFT_LENGTH
    if length == 0:  # asked for, or the policy was chosen for decoding without a draft
        draft = "none"

    from ..traces.speculate import Options
    from .models import load_models
    from .session import Settings, run

    models = load_models(target, draft, dtype, device or default_device())
    profile = machine_of(machine, clock, models)
    stops = () if ignore_eos else models.pair.stop_tokens
    options = Options(max_new_tokens, length, temperature, seed=seed, stop_tokens=stops)
    budget = parse_size(vram, "--vram") if vram else None
    total = slots_of(slots, cache_fraction, budget, chosen, models, profile, chosen_policy, max_new_tokens, given)
    with ExitStack() as stack:
        trace = record
        if trace is None and clock == "real":
            trace = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spac-"))) / "run.spac"
        settings = Settings(profile, total, clock, options, seed, budget, trace)  # type: ignore[arg-type]
        result = run(models, chosen_policy, given, settings, source_of(prompt, prompts))
        return _tell(models, policy, given, settings, result, check, json)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The profile to write (TOML).")],
    target: Target = None,
    draft: Draft = None,
    link_bandwidth: Bandwidth = "100MB/s",
    link_latency: Latency = "20us",
    dtype: Dtype = "float32",
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Measure this machine for a pair of models and write a machine profile for spac-sim and spac-exec."""
    from ..simulator.machine import show_machine
    from .calibrate import calibrate as measure
    from .models import load_models
    from .report import calibrated

    link = link_of(link_bandwidth, link_latency)
    if not out.parent.is_dir():
        raise InputError(f"-o {out}: no such folder {out.parent}; make it first")
    models = load_models(target, draft, dtype, device or default_device())
    profile = measure(models, link, out.stem)
    try:
        out.write_text(show_machine(profile))
    except OSError as error:
        raise InputError(f"-o {out}: cannot be written ({error.strerror})") from None
    calibrated(profile, models.pair, out, json)


def policy_of(spec: str) -> "tuple[Policy, dict[str, Any]]":
    """The policy, and how it was chosen if it comes from a policy file."""
    from ..policies.load import load_policy, read_policy_file

    return read_policy_file(Path(spec)) if spec.endswith(".toml") else (load_policy(spec), {})


def prompts_of(prompt: str | None, source: str | None, limit: int | None) -> "list[Prompt]":
    from ..traces.prompts import Prompt, read_prompts

    if prompt is not None and source is not None:
        raise InputError("PROMPT and --prompts: give one of them")
    if prompt is not None:
        return [Prompt("prompt", "", (prompt,))]
    if source is None and limit is None:
        return read_prompts(None)[::4]  # one prompt of every second domain
    return read_prompts(source, limit)


def source_of(prompt: str | None, source: str | None) -> str:
    from ..traces.prompts import describe

    return "command line" if prompt is not None else describe(source)


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def link_of(bandwidth: str, latency: str):
    from ..simulator.machine import RATE, TIME, read_quantity
    from .calibrate import EmulatedLink

    def quantity(flag: str, text: str, units: dict[str, float], example: str) -> float:
        value = read_quantity(text, units)
        if not value:
            raise InputError(f"{flag} {text}: takes a number and one of {', '.join(units)}, for example {example}")
        return value

    return EmulatedLink(
        quantity("--link-bandwidth", bandwidth, RATE, "100MB/s"), quantity("--link-latency", latency, TIME, "20us")
    )


def machine_of(name: str | None, clock: str, models: "Models") -> "Machine":
    """The profile that was named; else, on the real clock, a new measurement."""
    from ..simulator.machine import load_machine
    from .calibrate import calibrate as measure

    if name is not None or clock == "virtual":
        return load_machine(name or DEFAULT_MACHINE)
    if sys.stderr.isatty():
        sys.stderr.write("measuring this machine (spac-exec calibrate -o FILE keeps the result for --machine)\n")
    return measure(models)


def slots_of(
    slots: int | None,
    fraction: float | None,
    vram: int | None,
    chosen: dict[str, Any],
    models: "Models",
    machine: "Machine",
    policy: "Policy",
    new_tokens: int,
    prompts: "list[Prompt]",
) -> int:
    """Slots over all layers: what a flag says, else what the policy file says, else a quarter of the experts."""
    from ..simulator.capacity import check_size, fit_in
    from ..traces.prompts import encode

    shape = models.pair.shape
    layers = len(shape.moe_layers)
    flags = {"--slots": slots, "--cache-fraction": fraction, "--vram": vram}
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: give one of them")
    if slots is not None:
        total = slots * layers
    elif fraction is not None:
        total = max(round(fraction * layers * shape.experts), fraction > 0)
    elif vram is not None:
        context = max(sum(map(len, encode(models.pair.tokenizer, p))) + len(p.turns) * new_tokens for p in prompts)
        total = fit_in(vram, machine, shape, models.pair.draft_shape, context, policy.scope == "global").slots
    elif isinstance(chosen.get("slots_per_layer"), int | float):
        given, total = ["the policy file's slots_per_layer"], round(chosen["slots_per_layer"] * layers)
    else:
        total = max(round(DEFAULT_FRACTION * shape.experts), shape.top_k) * layers
    check_size(given[0] if given else "--slots", total, shape)
    return total


def _tell(
    models: "Models", policy: str, prompts: "list[Prompt]", settings: Any, result: Any, check: bool, json: bool
) -> int:
    """Print what there is to print; 1 if the check found a difference."""
    from ..traces.prompts import encode
    from .check import find_difference
    from .predict import predict
    from .report import document, show, show_difference

    prediction = difference = None
    if settings.clock == "real" and result.decode_s > 0:
        prediction = predict(settings.record, policy_of(policy)[0], settings.machine, result, settings.seed)
    if check:
        options = settings.options
        firsts = [encode(models.pair.tokenizer, prompt)[0] for prompt in prompts]
        difference = find_difference(models, firsts, result.generations, options.stop_tokens, options.max_new_tokens)
    if json:
        same = {"identical_to_transformers": difference is None} if check else {}
        show_json(document(models, prompts, settings, result, prediction) | same)
    else:
        show(models, prompts, settings, result, prediction)
        if check:
            say(
                "tokens identical to transformers' own greedy generate"
                if difference is None
                else show_difference(difference)
            )
    return 1 if difference is not None else 0


def main() -> None:
    run_app(app)
