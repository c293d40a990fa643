"""What the commands of `spac-exec` share: options, and what they name."""

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import check_folder, measuring, parse_size
from ..traces.errors import InputError

if TYPE_CHECKING:
    from ..policies.interface import Policy
    from ..simulator.machine import Machine
    from ..traces.prompts import Prompt
    from .loading import Watch
    from .models import Context, Models

DEFAULT_FRACTION = 0.25  # of the experts in slots, where nothing else is said
DEFAULT_DRAFT_LENGTH = 4
DEFAULT_MACHINE = "rtx4090-pcie4"  # of the virtual clock

Target = Annotated[
    str | None, typer.Option(help="Folder, Hugging Face name or .gguf file. Default: the embedded pair.")
]
Draft = Annotated[
    str | None, typer.Option(help="The same for the draft; ngram drafts from the text itself, none does not draft.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (as saved).")]
Device = Annotated[str | None, typer.Option(help="cpu (the GPU is emulated) or cuda. Default: cuda if there is one.")]
Bandwidth = Annotated[str, typer.Option(metavar="RATE", help="Of the emulated link, e.g. 100MB/s.")]
Latency = Annotated[str, typer.Option(metavar="TIME", help="Of the emulated link, for each copy, e.g. 20us.")]
PolicyName = Annotated[str, typer.Option(help="A policy file, name, name:key=value,… or file.py:Class.")]
MachineName = Annotated[
    str | None, typer.Option("--machine", help="A preset or a profile's file. Default: measure this machine now.")
]
Slots = Annotated[int | None, typer.Option(min=0, help="Expert slots per layer.")]
CacheFraction = Annotated[float | None, typer.Option(min=0, max=1, help="Slots as a share of all experts.")]
Vram = Annotated[str | None, typer.Option(metavar="SIZE", help="Slots that fit in this, e.g. 12GiB.")]
DraftLength = Annotated[
    str | None,
    typer.Option(metavar="N|auto", help=f"Tokens to draft a step; auto measures. Default {DEFAULT_DRAFT_LENGTH}."),
]
AllowLossy = Annotated[bool, typer.Option("--allow-lossy", help="Also run a policy that changes the model's output.")]
StoreFormat = Annotated[
    str, typer.Option("--store", help="Experts in host memory: exact, q8 or q4. Default: as they are read.")
]
StoreMemory = Annotated[str, typer.Option(help="Where: ram, pinned, or mmap (a file). Default: what fits.")]
StoreFolder = Annotated[
    Path | None, typer.Option("--store-cache", metavar="DIR", help="Of stores kept on disk. Default: the user's cache.")
]
Tokenizer = Annotated[str | None, typer.Option(help="A folder or name to take it from. Default: the target's.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True)
class PairOptions:
    """Which pair is loaded, in which form, and where to."""

    target: Target = None
    draft: Draft = None
    store: StoreFormat = "auto"
    store_memory: StoreMemory = "auto"
    store_folder: StoreFolder = None
    tokenizer: Tokenizer = None
    dtype: Dtype = "float32"
    device: Device = None

    def load(self, drafts: bool = True, context: "Context" = None, watch: "Watch | None" = None) -> "Models":
        """As `load_models`; without `drafts` no draft is loaded, whatever was given."""
        from .memory import settle
        from .models import load_models
        from .stores import Choice

        kept = Choice(self.store, self.store_memory, self.store_folder)
        draft, device = self.draft if drafts else "none", self.device or default_device()
        with measuring("loading") if watch is None else nullcontext():
            models = load_models(self.target, draft, self.dtype, device, kept, self.tokenizer, watch, context)
        settle()
        return models


@dataclass(frozen=True)
class SizeOptions:
    """The machine, and how many experts it has slots for."""

    machine: MachineName = None
    slots: Slots = None
    cache_fraction: CacheFraction = None
    vram: Vram = None

    @property
    def budget(self) -> int | None:
        """Bytes of `vram`."""
        return parse_size(self.vram, "--vram") if self.vram else None

    def check(self) -> str | None:
        """The flag that says how many slots, if there is one; InputError where there are two, or no size."""
        flags = {"--slots": self.slots, "--cache-fraction": self.cache_fraction, "--vram": self.budget}
        given = [flag for flag, value in flags.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)}: give one of them")
        return given[0] if given else None


@dataclass(frozen=True)
class LogOptions:
    """What the policy decides, for a file."""

    events: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Log all that the policy is told and asked, with its answers.")
    ] = None
    events_limit: Annotated[str, typer.Option(metavar="SIZE", help="Where the log ends.")] = "1GiB"

    @property
    def most(self) -> int:
        """Bytes of the log."""
        return parse_size(self.events_limit, "--events-limit")

    def check(self) -> None:
        check_folder("--events", self.events)
        _ = self.most


def spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command for typer in which a parameter that is one of the groups above stands for the options in it."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {p.name: p.annotation for p in signature.parameters.values() if is_dataclass(p.annotation)}
    parameters: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        options = inspect.signature(groups[one.name], eval_str=True).parameters if one.name in groups else {"": one}
        parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options.values()]

    @wraps(command)
    def spread_out(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        return command(**given)

    spread_out.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    spread_out.__annotations__ = {one.name: one.annotation for one in parameters}
    return spread_out


def policy_of(spec: str) -> "tuple[Policy, dict[str, Any]]":
    """The policy, and how it was chosen if it comes from a policy file."""
    from ..policies.load import load_policy, read_policy_file

    return read_policy_file(Path(spec)) if spec.endswith(".toml") else (load_policy(spec), {})


def live_policy(spec: str, allow_lossy: bool) -> "tuple[Policy, dict[str, Any]]":
    """As `policy_of`; InputError for a policy that cannot run live, or may not."""
    from ..policies.load import check_causal, check_lossless

    policy, chosen = policy_of(spec)
    check_causal(spec, policy)
    check_lossless(spec, policy, allow_lossy)
    return policy, chosen


def draft_length_of(text: str | None, chosen: dict[str, Any]) -> tuple[int, bool]:
    """Tokens to draft a step at most, and whether it is measured how many pay; 0 where a policy file decodes plainly.

    Raises InputError for what is neither a number nor auto.
    """
    from ..traces.draft_length import LONGEST

    if text is None:
        return 0 if chosen.get("mode") == "ar" else DEFAULT_DRAFT_LENGTH, False
    if text == "auto":
        return LONGEST, True
    if not text.isdecimal():
        raise InputError(f"--draft-length {text}: give a number of tokens, 0 for none, or auto")
    return int(text), False


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
    from .device import has_gpu

    return "cuda" if has_gpu() else "cpu"


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

    if name is not None or clock == "virtual":
        return load_machine(name or DEFAULT_MACHINE)
    from .calibrate import calibrate as measure
    from .probe import PairSubject

    if sys.stderr.isatty():
        sys.stderr.write("measuring this machine (spac-exec calibrate -o FILE keeps it for --machine)\n")
    return measure(PairSubject(models))


def slots_of(
    size: SizeOptions,
    chosen: dict[str, Any],
    models: "Models",
    machine: "Machine",
    policy: "Policy",
    new_tokens: int,
    prompts: "list[Prompt]",
) -> int:
    """`slots_for` with the context that the longest of `prompts` needs."""
    context = context_of(models.pair.tokenizer, prompts, new_tokens)
    return slots_for(size, chosen, models, machine, policy, context)


def context_of(tokenizer: Any, prompts: "list[Prompt]", new_tokens: int) -> int:
    """Tokens of the longest of `prompts` with its answers."""
    from ..traces.prompts import encode

    return max(sum(map(len, encode(tokenizer, p))) + len(p.turns) * new_tokens for p in prompts)


def slots_for(
    size: SizeOptions,
    chosen: dict[str, Any],
    models: "Models",
    machine: "Machine",
    policy: "Policy",
    context: int,
) -> int:
    """Slots over all layers: what a flag says, else what the policy file says, else a quarter of the experts."""
    from ..simulator.capacity import check_size, fit_in

    shape = models.pair.shape
    layers = len(shape.moe_layers)
    slots, fraction, budget = size.slots, size.cache_fraction, size.budget
    given = size.check() or "--slots"
    if slots is not None:
        total = slots * layers
    elif fraction is not None:
        total = max(round(fraction * layers * shape.experts), fraction > 0)
    elif budget is not None:
        total = fit_in(budget, machine, shape, models.pair.draft_shape, context, policy.scope == "global").slots
    elif isinstance(chosen.get("slots_per_layer"), int | float):
        given, total = "the policy file's slots_per_layer", round(chosen["slots_per_layer"] * layers)
    else:
        total = max(round(DEFAULT_FRACTION * shape.experts), shape.top_k) * layers
    check_size(given, total, shape)
    return total
