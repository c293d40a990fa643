"""`spac-exec generate`: real inference for some prompts."""

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import check_folder, measuring, say, show_json, starting
from ..traces.errors import InputError
from .cli_options import (
    AllowLossy,
    AsJson,
    DraftLength,
    LogOptions,
    PairOptions,
    PolicyName,
    SizeOptions,
    context_of,
    draft_length_of,
    live_policy,
    machine_of,
    policy_of,
    prompts_of,
    slots_of,
    source_of,
    spread,
)

if TYPE_CHECKING:
    from ..traces.prompts import Prompt
    from .models import Models


@spread
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to continue. Default: three bundled prompts.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A .txt or .jsonl file, or a bundled set's name.")] = None,
    prompt_limit: Annotated[int | None, typer.Option(help="Only the first N prompts.")] = None,
    policy: PolicyName = "ar-lru",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    draft_length: DraftLength = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of the policy.")] = 0,
    draft_invariant: Annotated[
        bool,
        typer.Option("--draft-invariant", help="A seed's text is the same whatever is drafted; fewer drafts are kept."),
    ] = False,
    clock: Annotated[str, typer.Option(help="real, or virtual: the simulator's time.")] = "real",
    record: Annotated[Path | None, typer.Option(metavar="T", help="Write a routing trace of the run.")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what every lane did, simulated and measured, for ui.perfetto.dev."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 where the cache or the draft did nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the tokens with transformers' own greedy ones.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    allow_lossy: AllowLossy = False,
    json: AsJson = False,
    *,
    pair: PairOptions,
    size: SizeOptions,
    log: LogOptions,
) -> int:
    """Generate text with the target's experts in slots, moved as the policy says, and print what it took."""
    chosen_policy, chosen = live_policy(policy, allow_lossy)
    if clock not in ("real", "virtual"):
        raise InputError(f"--clock {clock}: unknown; choose real or virtual")
    if check and temperature > 0:
        raise InputError("--check: only greedy output can be compared; leave out --temperature")
    check_folder("--record", record)
    check_folder("--timeline", timeline)
    log.check()
    size.check()
    if timeline is not None and clock != "real":
        raise InputError("--timeline: needs the real clock; for simulated time alone use spac-sim run --timeline")
    given = prompts_of(prompt, prompts, prompt_limit)
    if check and any(len(p.turns) > 1 for p in given):
        raise InputError("--check: takes prompts of one turn; these are conversations")
    length, adaptive = draft_length_of(draft_length, chosen)
    if adaptive and clock != "real":
        raise InputError("--draft-length auto: goes by the real clock; give a number with --clock virtual")

    with starting():
        from ..traces.speculate import Options
        from .session import Settings, run

    needed = partial(context_of, prompts=given, new_tokens=max_new_tokens)
    models = pair.load(length > 0, needed)  # 0: asked for, or the policy was chosen for decoding without a draft
    profile = machine_of(size.machine, clock, models)
    stops = () if ignore_eos else models.pair.stop_tokens
    options = Options(
        max_new_tokens, length, temperature, seed=seed, stop_tokens=stops, adaptive=adaptive,
        draft_invariant=draft_invariant or adaptive,
    )  # fmt: skip
    total = slots_of(size, chosen, models, profile, chosen_policy, max_new_tokens, given)
    with ExitStack() as stack:
        trace = record
        if trace is None and clock == "real":
            trace = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spac-"))) / "run.spac"
        settings = Settings(
            profile, total, clock, options, seed, size.budget, trace, log.events, timeline is not None, log.most  # type: ignore[arg-type]
        )  # fmt: skip
        with measuring(f"generating, prompts: {len(given)}"):
            result = run(models, chosen_policy, given, settings, source_of(prompt, prompts))
        if timeline is not None:
            _draw(timeline, policy, settings, result)
        return _tell(models, policy, given, settings, result, check, strict, json)


def _draw(file: Path, policy: str, settings: Any, result: Any) -> None:
    from ..simulator.timeline import write_timeline
    from .predict import compare_lanes

    lanes = compare_lanes(settings.record, policy_of(policy)[0], settings.machine, result, settings.seed)
    about = {"policy": policy, "machine": settings.machine.name, "slots": settings.slots, "seed": settings.seed}
    write_timeline(file, lanes, about)


def _tell(
    models: "Models",
    policy: str,
    prompts: "list[Prompt]",
    settings: Any,
    result: Any,
    check: bool,
    strict: bool,
    json: bool,
) -> int:
    """Print what there is to print; 1 if the check found a difference that rounding does not explain, or `strict` a
    status that is not ok."""
    from ..traces.prompts import encode
    from .check import find_difference
    from .predict import predict
    from .report import document, facts, show

    prediction = difference = None
    if settings.clock == "real" and result.decode_s > 0:
        prediction = predict(settings.record, policy_of(policy)[0], settings.machine, result, settings.seed)
    if check:
        options = settings.options
        firsts = [encode(models.pair.tokenizer, prompt)[0] for prompt in prompts]
        difference = find_difference(models, firsts, result.generations, options.stop_tokens, options.max_new_tokens)
    if json:
        same: dict[str, Any] = {"identical_to_transformers": difference is None} if check else {}
        if difference is not None:
            same["difference"] = asdict(difference) | {"explained": difference.explained}
        show_json(document(models, prompts, settings, result, prediction) | same)
    else:
        show(models, prompts, settings, result, prediction)
        if check:
            say("tokens identical to transformers' own greedy generate" if difference is None else str(difference))
    idle = strict and facts(models, settings, result)["status"] != "ok"
    return 1 if (difference is not None and not difference.explained) or idle else 0
