"""What `spac-trace info` and `spac-trace stats` say of a trace, as plain values for JSON and as tables for people."""

from dataclasses import asdict
from typing import Any

import numpy as np

from .console import show_size, warn
from .reader import Summary, Trace
from .schema import Header, Provenance, id_dtype
from .stats import (
    Routing,
    acceptance,
    cosines,
    decode_routing,
    domain_shares,
    draft_load,
    entropy,
    gini,
    hit_rate,
    independent_overlap,
    independent_union,
    lru_depths,
    overlap,
    reuse,
    shares,
    top_share,
    unions,
)
from .views import Steps

LAGS = (1, 2, 4, 8, 16, 32, 64)
WINDOWS = (2, 4, 8, 16, 32, 64)
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def warn_if_unfinished(trace: Trace) -> None:
    """Say on stderr what is missing from a trace whose writer was killed."""
    if not trace.finished:
        warn(f"{trace.path}: {trace.summary().state}")


def info_rows(trace: Trace, summary: Summary) -> list[dict[str, str]]:
    """Header and counts, one field a row."""
    return [{"field": k, "value": v} for k, v in {**_about_file(trace, summary), **_about_model(trace.header)}.items()]


def _about_file(trace: Trace, summary: Summary) -> dict[str, str]:
    header = trace.header
    raw = len(header.target.moe_layers) * header.target.top_k * id_dtype(header.target.experts).itemsize
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in summary.steps.items() if count)
    return {
        "file": str(trace.path),
        "state": summary.state,
        "provenance": f"{header.provenance}, from {header.source}",
        "steps": kinds or "none",
        "tokens": f"{summary.tokens:,} computed, {summary.emitted:,} emitted, in {summary.sequences} sequences",
        "drafted": f"{summary.drafted:,}, of which {summary.accepted:,} accepted",
        "size": f"{show_size(summary.file_bytes)}, {summary.bytes_per_token:.1f} bytes/token (ids alone {raw}, packed)",
        "also stored": ", ".join(_extras(header)) or "ids only",
        "notes": header.notes or "none",
        "tools": ", ".join(f"{name} {version}" for name, version in header.tools.items()) or "not stated",
        "format version": str(header.format_version),
    }


def _about_model(header: Header) -> dict[str, str]:
    target, draft = header.target, header.draft
    sampling = ", ".join(f"{k} {'not stated' if v is None else v}" for k, v in header.sampling.items())
    return {
        "target": target.name,
        "draft": f"{draft.name}, {draft.layers} layers, {show_size(draft.dense_bytes)}" if draft else "none",
        "draft length": str(header.draft_length),
        "acceptance": header.acceptance,
        "sampling": sampling,
        "experts": f"top {target.top_k} of {target.experts} in {len(target.moe_layers)} of {target.layers} layers",
        "MoE layers": _ranges(target.moe_layers),
        "widths": f"hidden {target.hidden}, expert {target.expert_width}",
        "quantisation": target.dtype,
        "bytes": f"expert {show_size(target.expert_bytes)}, all experts {show_size(target.all_expert_bytes)}, "
        f"dense {show_size(target.dense_bytes)}, keys and values {show_size(target.kv_bytes_per_token)} a token",
    }


def _extras(header: Header) -> list[str]:
    extras = ["routing weights"] if header.weights else []
    extras += [f"scores ({header.scores})"] if header.scores is not None else []
    return extras + ([f"gates of the next {header.lookahead} layers"] if header.lookahead else [])


def _ranges(numbers: tuple[int, ...]) -> str:
    """ "0-3, 5, 7-8" of ascending numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def statistics(trace: Steps) -> dict[str, Any]:
    """Statistics of the generated text (prompts and rejected drafts left out), and of drafting if there is a draft.

    "layers" has one record for each MoE layer and "mean" their mean; figures that need more tokens than a sequence
    has are None. LRU: slots a layer, empty at the start of each sequence, `lru_atomic` for whole-token lookups;
    "lru_curve" has the atomic hit rate for 1, 2, ... E slots. reuse_n: share of uses at most n tokens after the last
    one of the same expert. independent_overlap and independent_n: overlap and union of tokens with these shares but
    no memory, uniform_n: with all experts alike. "popularity" [L][E] are shares of a layer's choices.
    """
    target = trace.header.target
    routing = decode_routing(trace)
    experts, offsets = routing.experts, routing.offsets
    share = shares(experts, target.experts)
    columns = {f"overlap_{lag}": overlap(experts, offsets, lag) for lag in LAGS}
    columns |= {f"union_{n}": found for n, found in zip(WINDOWS, unions(experts, offsets, WINDOWS), strict=True)}
    columns |= {f"independent_{n}": independent_union(share, target.top_k, n) for n in WINDOWS}
    columns |= {f"reuse_{n}": found for n, found in zip(DISTANCES, reuse(experts, offsets, DISTANCES), strict=True)}
    columns |= {"independent_overlap": independent_overlap(share, target.top_k)}
    columns |= {"top20": top_share(share), "entropy": entropy(share), "gini": gini(share)}
    slots = [n * target.top_k for n in (1, 2, 3, 4, 6) if n * target.top_k < target.experts]
    curve = np.empty((target.experts, len(share)))
    for name, atomic in (("lru_atomic", True), ("lru_sequential", False)):
        depths = lru_depths(experts, offsets, target.experts, atomic)
        columns |= {f"{name}_{count}": hit_rate(depths, count) for count in slots}
        if atomic:
            curve = np.array([hit_rate(depths, count) for count in range(1, target.experts + 1)])
    mean = {name: _number(values.mean()) for name, values in columns.items()}
    mean |= {f"uniform_{n}": _number(target.experts * (1 - (1 - target.top_k / target.experts) ** n)) for n in WINDOWS}
    return {
        "tokens": len(experts),
        "sequences": len(routing.sequences),
        "experts": target.experts,
        "top_k": target.top_k,
        "provenance": str(trace.header.provenance),
        "slots": slots,
        "mean": mean,
        "layers": [
            {"layer": layer, **{name: _number(values[i]) for name, values in columns.items()}}
            for i, layer in enumerate(target.moe_layers)
        ],
        "lru_curve": {
            name: [_number(value) for value in values]
            for name, values in (("mean", curve.mean(1)), ("lowest", curve.min(1)), ("highest", curve.max(1)))
        },
        "popularity": [[_number(value) for value in row] for row in share],
        **_of_domains(routing, trace, target.experts),
        **_of_drafts(trace, target.experts),
    }


def _of_domains(routing: Routing, trace: Steps, experts: int) -> dict[str, Any]:
    domains = cosines(domain_shares(routing, trace.header.sequences, experts))
    return {"domain_cosines": [{"a": a, "b": b, "cosine": round(c, 4)} for (a, b), c in domains.items()]}


def _of_drafts(trace: Steps, experts: int) -> dict[str, Any]:
    drafts, load = acceptance(trace.steps()), draft_load(trace.steps(), experts)
    return {
        "acceptance_model": trace.header.acceptance,
        "acceptance": asdict(drafts) if drafts else None,
        "draft_load": {**asdict(load), "ratio": load.ratio} if load else None,
    }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 5)


def layer_rows(found: dict[str, Any]) -> list[dict[str, str | None]]:
    """The per-layer table: one row a layer, the mean last."""
    names = {"overlap_1": "overlap", "overlap_8": "lag 8", "overlap_64": "lag 64"}
    names |= {
        "union_2": "union 2",
        "union_8": "union 8",
        "union_64": "union 64",
        "top20": "top 20%",
        "entropy": "entropy",
        "gini": "Gini",
    }
    names |= {f"lru_atomic_{count}": f"LRU {count}" for count in found["slots"]}
    records = [*found["layers"], {"layer": "mean", **found["mean"]}]
    return [
        {"layer": str(r["layer"]), **{title: _shown(r[name], name) for name, title in names.items()}} for r in records
    ]


def total_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """The figures that belong to no layer."""
    mean, slots = found["mean"], found["slots"]

    def listed(prefix: str, at: tuple[int, ...] | list[int]) -> str:
        return "  ".join(f"{n}: {_shown(mean[f'{prefix}_{n}'], prefix) or '-'}" for n in at)

    rows = {
        "tokens": f"{found['tokens']:,} in {found['sequences']} sequences",
        "overlap by lag": listed("overlap", LAGS),
        "experts in K tokens": listed("union", WINDOWS),
        "used again within K tokens": listed("reuse", DISTANCES),
        "LRU hits by slots (whole token first)": listed("lru_atomic", slots),
        "LRU hits by slots (one by one)": listed("lru_sequential", slots),
    }
    pairs = sorted(found["domain_cosines"], key=lambda pair: pair["cosine"])
    if pairs:
        average = sum(pair["cosine"] for pair in pairs) / len(pairs)
        rows["cosine between domains"] = f"mean {average:.3f} over {len(pairs)} pairs"
        for name, pair in (("least alike", pairs[0]), ("most alike", pairs[-1])):
            rows[name] = f"{pair['cosine']:.3f}  {pair['a']} and {pair['b']}"
    drafts = found["acceptance"]
    if drafts:
        rows["acceptance"] = f"{drafts['rate']:.3f} of drafted tokens in {drafts['verify_steps']:,} verify steps"
        rows["tokens per verify"] = f"{drafts['tokens_per_verify']:.2f}"
        rows["accepted by position"] = "  ".join(f"{j + 1}: {p:.3f}" for j, p in enumerate(drafts["by_position"]))
    load = found["draft_load"]
    if load:
        rows["experts a layer in a verify step"] = (
            f"{load['experts']:.2f}, of which {load['kept_experts']:.2f} for kept tokens ({load['ratio']:.2f} times)"
        )
        rows["choices found beforehand"] = (
            f"rejected drafts: {_shown(load['rejected_found'], '') or '-'} among those of kept tokens, accepted: "
            f"{_shown(load['accepted_found'], '') or '-'} among those of the first token"
        )
    return [{"figure": name, "value": value} for name, value in rows.items()]


def markdown(found: dict[str, Any], header: Header, picture: str) -> str:
    """A page with the picture and both tables, for reading in a browser or a repository."""
    synthetic = "**Synthetic, not recorded.** " if header.provenance is Provenance.SYNTHETIC else ""
    lines = [
        f"# Expert routing of {header.target.name}",
        "",
        f"{synthetic}Provenance: {header.provenance}, from {header.source}. {header.notes}".strip(),
        "",
        f"![Statistics in pictures]({picture})",
        "",
        "Generated text only: no prompts, no rejected drafts. LRU: slots of each layer's own, empty when a sequence "
        'begins. "Whole token first": a token looks up all its experts before any is replaced; "one by one": each use '
        "replaces at once. Entropy is over ln E.",
        "",
        *_markdown_table(total_rows(found)),
        "",
        *_markdown_table(layer_rows(found)),
    ]
    return "\n".join(lines) + "\n"


def _markdown_table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(rows[0])
    cells = [["-" if row[name] is None else str(row[name]) for name in names] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *cells)]


def _shown(value: float | None, name: str) -> str | None:
    if value is None:
        return None
    return f"{value:.1f}" if name.startswith("union") else f"{value:.3f}"
