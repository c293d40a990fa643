"""What `spac-sim fit` says: the plan at once, the speeds when they are there, or all of it as one JSON document."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..traces.console import say, show_json, show_size, show_table
from .cards import MEASURE
from .cli_machines import streaming_words
from .fit import DOES_NOT_FIT, PROCESS_BYTES, Plan, llama_flags, plan, streaming, unions
from .fit_speed import Drafting, Sample, Speed
from .metrics import OK
from .ranges import COST_SPREAD, RATE_SPREAD, Profile

# Seen with Qwen3-30B-A3B, Mixtral and gpt-oss-20b: 200 tokens instead of 12 raise hit rates by up to 0.25, least where
# few experts fit, most with hybrimoe where most do, so that it passes moe-spac on the first.
COLD = (
    "the sample begins with empty caches: with many slots, policies that learn are shown slower than they become, and "
    "their order may change; --tokens 200 takes ten times as long and shows it"
)


@dataclass
class Report:
    """A plan and, once they have been timed, its speeds; `verdicts` say whether speculation pays."""

    plan: Plan
    profile: Profile
    drafting: Drafting
    sample: Sample | None = None
    speeds: list[Speed] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return "calibrated" if self.profile.calibrated else "uncalibrated"


def show_plan(r: Report) -> None:
    """Memory, slots and what limits them."""
    p, wanted, model = r.plan, r.plan.wanted, r.plan.wanted.model
    label = "" if r.profile.calibrated else " (uncalibrated)"
    say(f"[bold]{model.name}[/] in {wanted.form.name} on {p.machine.name}{label}")
    say(
        f"{model.total / 1e9:.2f} B parameters, of which a token uses {model.active / 1e9:.2f} B: decoding reads "
        f"{model.routed_active / 1e9:.3f} B of {model.routed / 1e9:.2f} B in {wanted.layers} x {model.experts} experts"
    )
    used = (p.slots + p.staging) * wanted.shape.expert_bytes
    rows = [{"on the card": name, "size": show_size(size)} for name, size in p.fit.taken.items() if size]
    rows.append({"on the card": f"{p.slots} expert slots and {p.staging} for staging", "size": show_size(used)})
    show_table(f"{show_size(wanted.vram)} of card memory", rows)
    for line in plan_lines(r):
        say(line)


def plan_lines(r: Report) -> list[str]:
    p, wanted = r.plan, r.plan.wanted
    model, each = wanted.model, r.plan.slots / r.plan.wanted.layers
    lines = [
        f"slots: {each:.1f} of {model.experts} experts a layer, {each / model.top_k:.2f} times the experts per token",
        f"context: {wanted.context} tokens, {show_size(kv_bytes(p))} of keys and values in {wanted.kv} "
        f"({wanted.shape.kv_bytes_per_token} bytes a token{_draft_kv(p)})",
        f"host memory: {show_size(p.host_bytes)}, of which experts {show_size(wanted.shape.all_expert_bytes)}",
        f"pinned: {p.pin.words}",
    ]
    if (cost := draft_cost(p)) is not None:
        lines.append(
            f"draft: {show_size(cost['weights'])} of weights and {show_size(cost['keys_and_values'])} of keys and "
            f"values; without it there would be {cost['slots_per_layer_without']:.1f} slots a layer"
        )
    lines += [f"limit: {limit}" for limit in p.limits]
    lines += [f"[bold red]does not fit:[/] {problem}" for problem in p.problems]
    lines.append(f"prefill: {streaming_words(streaming(p.machine, wanted.shape))}")
    lines.append(f"experts that a layer needs in one pass, if routing were even: {_wide(verify_unions(r))}")
    return [*lines, *(f"note: {note}" for note in p.notes), f"llama.cpp: {llama_flags(p, r.drafting.length)}"]


def _wide(found: dict[int, float]) -> str:
    return ", ".join(f"{needed:.1f} for {rows} rows" for rows, needed in found.items())


def show_speeds(r: Report) -> None:
    """Speeds by policy, whether speculation pays, and what all of it rests on."""
    if r.sample is not None:
        rows = [_row(s, r.profile.calibrated) for s in r.speeds]
        show_table(f"tokens/s while decoding ({r.sample.words})", rows)
        say(f"experts that a layer needed in one pass of this sample: {_wide(r.sample.unions)}")
    for verdict in r.verdicts:
        say(verdict)
    if (best := fastest(r)) is not None:
        say(f"fastest on this sample: {best.policy} in {best.mode} mode; its time goes mostly to: {best.bottleneck}")
        say(COLD)
    assumed = len(r.profile.spread)
    if r.profile.calibrated:
        say(
            f"range: {assumed} of {len(r.profile.machine.quantities)} entries of {r.plan.machine.name} that matter for "
            f"speed are assumed; rates x{RATE_SPREAD[0]} to x{RATE_SPREAD[1]}, times and counts x{COST_SPREAD[0]} to "
            f"x{COST_SPREAD[1]}, all slow or all fast together (see --json, field basis)"
        )
    else:
        say(f"[bold]uncalibrated:[/] no entry was measured, so a range and no point; to measure: {MEASURE}")


def _row(s: Speed, calibrated: bool) -> dict[str, Any]:
    middle = {"expected": _rounded(s.middle)} if calibrated else {}
    row: dict[str, Any] = {"policy": s.policy, "mode": s.mode, "slots_per_layer": _rounded(s.slots_per_layer)}
    row |= {"status": s.status, "low": _rounded(s.low)}
    return row | middle | {"high": _rounded(s.high), "hit_rate": _rounded(s.hit_rate), "bottleneck": s.bottleneck}


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def fastest(r: Report) -> Speed | None:
    """The policy with the highest low end, where it is the best bet whatever the assumed entries are."""
    ranked = [s for s in r.speeds if s.status == OK and s.low is not None]
    return max(ranked, key=lambda s: s.low or 0.0, default=None)


def kv_bytes(p: Plan) -> int:
    wanted = p.wanted
    draft = wanted.draft.kv_bytes(wanted.context, wanted.kv) if wanted.draft else 0
    return wanted.model.kv_bytes(wanted.context, wanted.kv) + draft


def _draft_kv(p: Plan) -> str:
    draft = p.wanted.draft_shape
    return f", draft {draft.kv_bytes_per_token}" if draft else ""


def draft_cost(p: Plan) -> dict[str, Any] | None:
    """What the draft takes of the card, and the slots that there would be without it (O37)."""
    wanted, draft = p.wanted, p.wanted.draft
    if draft is None:
        return None
    without = plan(replace(wanted, draft=None), p.machine)
    return {
        "name": draft.name,
        "weights": draft.as_draft(wanted.kv).dense_bytes,
        "keys_and_values": draft.kv_bytes(wanted.context, wanted.kv),
        "slots_per_layer_without": without.slots / wanted.layers,
    }


def verify_unions(r: Report) -> dict[int, float]:
    lengths = {1, 2, 4, 8} | ({r.drafting.length + 1} if r.plan.wanted.draft else set())
    return unions(r.plan.wanted, tuple(sorted(lengths)))


def show_document(r: Report) -> None:
    show_json(document(r))


def document(r: Report) -> dict[str, Any]:
    """Everything, sizes in bytes. `basis`: every entry of the machine with its range and where it comes from."""
    p, wanted, model = r.plan, r.plan.wanted, r.plan.wanted.model
    best = fastest(r)
    return {
        "model": model.name,
        "model_source": model.source,
        "format": asdict(wanted.form),
        "machine": p.machine.name,
        "calibration": r.label,
        "status": p.status,
        "fits": p.status != DOES_NOT_FIT,
        "problems": p.problems,
        "limits": p.limits,
        "notes": p.notes,
        "parameters": {k: getattr(model, k) for k in ("total", "active", "routed", "routed_active")},
        "vram": wanted.vram,
        "taken": dict(p.fit.taken),
        "expert_bytes": wanted.shape.expert_bytes,
        "experts": model.experts,
        "top_k": model.top_k,
        "layers": wanted.layers,
        "slots": p.slots,
        "staging": p.staging,
        "slots_per_layer": p.slots / wanted.layers,
        "room_per_layer": min(p.fit.places / wanted.layers, model.experts),
        "context": wanted.context,
        "kv_format": wanted.kv,
        "kv_bytes_per_token": wanted.shape.kv_bytes_per_token,
        "kv_bytes": kv_bytes(p),
        "host_bytes": p.host_bytes,
        "expert_bytes_in_host": wanted.shape.all_expert_bytes,
        "pin": asdict(p.pin),
        "draft": draft_cost(p),
        "prefill": streaming(p.machine, wanted.shape),
        "expected_union": verify_unions(r),
        "llama_cpp": llama_flags(p, r.drafting.length),
        "sample": r.sample.words if r.sample else None,
        "sample_caution": COLD,
        "measured_union": r.sample.unions if r.sample else None,
        "speeds": [asdict(s) for s in r.speeds],
        "fastest": asdict(best) if best else None,
        "speculation": r.verdicts,
        "basis": [*r.profile.basis(), *_assumptions(r)],
        "measure_with": MEASURE,
    }


def _assumptions(r: Report) -> list[dict[str, Any]]:
    """What a result rests on beside the machine."""
    own: list[dict[str, Any]] = [{"entry": "process memory", "value": PROCESS_BYTES, "unit": "bytes"}]
    if r.plan.wanted.draft and r.sample is not None and r.sample.acceptance is not None:
        own.append({"entry": "draft length", "value": r.drafting.length, "unit": "tokens"})
        own.append({"entry": "acceptance", "value": r.drafting.acceptance, "unit": ""})
    return [row | {"basis": "assumed", "source": "spac-sim fit"} for row in own]
