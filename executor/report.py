"""What `spac-exec` prints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from ..simulator.machine import Machine, rates_for
from ..traces.console import say, show_json, show_size, show_table, warn
from ..traces.models import Pair
from ..traces.prompts import Prompt
from .audit import audit, in_words
from .models import Models
from .predict import Prediction
from .result import WHY, Result, status_of
from .session import Settings


def facts(models: Models, settings: Settings, result: Result) -> dict[str, Any]:
    """A run in flat numbers; counts are of everything after prefill."""
    shape, count = models.pair.shape, result.decode
    tokens = max(1, result.new_tokens)
    steps = sum(g.verifies + g.decodes for g in result.generations)
    drafts = models.pair.draft is not None and settings.options.draft_length > 0
    return {
        "status": status_of(result.slots, result.prefill + result.decode, drafts, result.generations),
        "policy": result.policy,
        "clock": result.clock,
        "machine": settings.machine.name,
        "slots_per_layer": result.slots / len(shape.moe_layers),
        "arena_bytes": result.arena_bytes,
        "sequences": len(result.generations),
        "new_tokens": result.new_tokens,
        "steps": steps,
        "prefill_s": result.prefill_s,
        "decode_s": result.decode_s,
        "tokens_per_s": result.tokens_per_s,
        "acceptance": result.accepted / result.drafted if result.drafted else None,
        "hit_rate": count.hits / count.needed if count.needed else None,
        "experts_on_cpu": count.cpu / count.needed if count.needed else None,
        "bytes_per_token": count.copies * shape.expert_bytes / tokens,
        "evictions": count.evictions,
        "fallbacks": count.fallbacks,
    }


def document(
    models: Models, prompts: Sequence[Prompt], settings: Settings, result: Result, prediction: Prediction | None
) -> dict[str, Any]:
    found = facts(models, settings, result)
    if prediction is not None:
        found["prediction"] = {
            "tokens_per_s": prediction.predicted,
            "error": prediction.error,
            "predicted_ms_per_token": prediction.predicted_split,
            "measured_ms_per_token": prediction.measured_split,
        }
    found["memory"] = audit(models)
    found["texts"] = _texts(models, prompts, result)
    return found


def show(
    models: Models, prompts: Sequence[Prompt], settings: Settings, result: Result, prediction: Prediction | None
) -> None:
    for text in _texts(models, prompts, result):
        say(f"[bold]{escape(text['prompt'])}[/][dim] →[/] {escape(text['text'])}\n")
    found = facts(models, settings, result)
    percent = {"acceptance", "hit_rate", "experts_on_cpu"}
    row = {k.replace("_", " "): f"{v:.1%}" if k in percent and v is not None else v for k, v in found.items()}
    row |= {name: f"{row[name]:.2f}" for name in ("prefill s", "decode s")} | {
        "slots per layer": f"{found['slots_per_layer']:g}",
        "tokens per s": f"{found['tokens_per_s']:.1f}",
        "arena bytes": show_size(found["arena_bytes"]),
        "bytes per token": show_size(found["bytes_per_token"]),
    }
    wide = ("status", "clock", "machine", "sequences", "fallbacks", "decode s")
    show_table(
        f"{result.policy} on the {result.clock} clock, machine {settings.machine.name}",
        [{k: v for k, v in row.items() if k not in wide}],
    )
    say(in_words(audit(models)))
    if found["status"] in WHY:
        warn(f"{found['status']}: {WHY[found['status']]}")
    if prediction is not None:
        _show_prediction(prediction)


def _show_prediction(prediction: Prediction) -> None:
    split = {"predicted": prediction.predicted_split, "measured": prediction.measured_split}
    names = sorted({name for parts in split.values() for name in parts if parts[name] >= 0.005})
    rows = [
        {"": which, "tokens per s": f"{speed:.1f}"}
        | {name: f"{split[which][name]:.2f}" if name in split[which] else None for name in names}
        for which, speed in (("predicted", prediction.predicted), ("measured", prediction.measured))
    ]
    show_table("Prediction of this very run by the simulator; ms per output token by cause", rows)
    say(f"predicted {prediction.predicted:.1f}, measured {prediction.measured:.1f} tokens/s: {prediction.error:+.1%}")


def _texts(models: Models, prompts: Sequence[Prompt], result: Result) -> list[dict[str, str]]:
    """One entry a turn that was generated."""
    decode = models.pair.tokenizer.decode
    turns = [(p.name, turn) for p in prompts for turn in p.turns]
    return [
        {"name": name, "prompt": turn, "text": decode(g.tokens, skip_special_tokens=True)}
        for (name, turn), g in zip(turns, result.generations, strict=False)
    ]


def calibrated(machine: Machine, pair: Pair, out: Path, json: bool) -> None:
    """What a calibration comes to for its pair."""
    rates = rates_for(machine, pair.shape, pair.draft_shape)
    costs = rates.costs
    ns = {
        "layer_without_experts": rates.dense_ns(1, 0),
        "expert_on_gpu": costs.gpu_ns(1),
        "expert_on_cpu": costs.cpu_ns(1),
        "hybrid_layer": costs.hybrid_ns,
        "copy": costs.copy_ns,
        "policy_per_layer": rates.policy_ns,
        "step": rates.step_ns,
        "drafted_token": rates.draft_token_ns,
    }
    if json:
        show_json({"file": str(out), "machine": machine.name, "title": machine.title, "ns": ns})
        return
    rows = [{"what": name.replace("_", " "), "us": f"{value / 1e3:.0f}"} for name, value in ns.items()]
    show_table(f"{machine.name}: {machine.title}", rows)
    say(f"written to {out}; use it as --machine {out} in spac-sim and spac-exec")
