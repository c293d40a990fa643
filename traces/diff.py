"""Are two traces the same routing, and if not, where do they part?"""

from itertools import zip_longest
from typing import Any

import numpy as np

from .reader import Trace
from .report import statistics
from .schema import Header, Step

PLAIN = ("sequence", "turn", "kind", "accepted")
WIDTH = 80
COLUMNS = ("positions", "tokens", "drafted")
SHOWN = ("overlap_1", "overlap_8", "union_2", "union_8", "top20", "entropy", "gini")


def compare(a: Trace, b: Trace) -> dict[str, Any]:
    """Compare two traces step by step.

    `same` is true if both have the same steps: kinds, positions, token ids, drafts, accepted counts and expert ids in
    the router's order. Headers, weights and scores may differ; `header` lists the fields that do, and
    `weights_differ_by` is the largest difference of a weight (None if one has none). `first` tells where the steps
    part: step, sequence, what, and for experts token (row of the step), position, layer and both choices;
    `steps_differing` counts those that are not, `order_only` the ones among them with the same experts in another
    order. `statistics` has the figures of both side by side.
    """
    first, differing, order_only, weights_differ, steps = None, 0, 0, None, 0
    for number, (x, y) in enumerate(zip_longest(a.steps(), b.steps())):
        steps = number + 1
        part = _parting(x, y, a.header)
        if part is not None:
            differing += 1
            order_only += bool(part.get("order_only"))
            first = first or {"step": number, **part}
        elif x.weights is not None and y.weights is not None:
            apart = float(np.abs(x.weights.astype(np.float32) - y.weights.astype(np.float32)).max(initial=0))
            weights_differ = max(weights_differ or 0.0, apart)
    figures = _figures(a)
    found = {
        "same": first is None,
        "first": first,
        "steps": steps,
        "steps_differing": differing,
        "order_only": order_only,
        "weights_differ_by": weights_differ,
        "header": header_rows(a.header, b.header),
        "statistics": [figures, figures if first is None else _figures(b)],  # the same routing has the same figures
    }
    return {"verdict": verdict(found), **found}


def _parting(x: Step | None, y: Step | None, header: Header) -> dict[str, Any] | None:
    """What differs between two steps, or None. A step that is not there differs from any."""
    if x is None or y is None:
        there = x or y
        return {
            "what": "length",
            "sequence": there.sequence if there else None,
            "missing_in": "A" if x is None else "B",
        }
    for name in PLAIN:
        if getattr(x, name) != getattr(y, name):
            return {"what": name, "sequence": x.sequence, "a": getattr(x, name), "b": getattr(y, name)}
    if len(x) != len(y):
        return {"what": "tokens in the step", "sequence": x.sequence, "a": len(x), "b": len(y)}
    for name in COLUMNS:
        ours, theirs = getattr(x, name), getattr(y, name)
        if not np.array_equal(ours, theirs):
            row = int(np.argmax(ours != theirs))
            return {"what": name, "sequence": x.sequence, "token": row, "a": ours[row].item(), "b": theirs[row].item()}
    if x.experts.shape != y.experts.shape:
        return {
            "what": "layers and k",
            "sequence": x.sequence,
            "a": list(x.experts.shape[1:]),
            "b": list(y.experts.shape[1:]),
        }
    if np.array_equal(x.experts, y.experts):
        return None
    row, layer = np.argwhere((x.experts != y.experts).any(axis=-1))[0].tolist()
    return {
        "what": "experts",
        "sequence": x.sequence,
        "token": row,
        "position": int(x.positions[row]),
        "layer": header.target.moe_layers[layer],
        "a": x.experts[row, layer].tolist(),
        "b": y.experts[row, layer].tolist(),
        "order_only": bool(np.array_equal(np.sort(x.experts, axis=-1), np.sort(y.experts, axis=-1))),
    }


def header_rows(a: Header, b: Header) -> list[dict[str, str]]:
    """The fields of the headers that differ, those of models one by one."""
    ours, theirs = _flat(a.to_dict()), _flat(b.to_dict())
    return [
        {"field": name, "A": _cut(ours.get(name, "-")), "B": _cut(theirs.get(name, "-"))}
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    ]


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = f"{len(value)} named" if name == "sequences" else value
    if flat["sequences"] == "0 named":
        del flat["sequences"]
    elif fields["sequences"]:
        flat["sequence names"] = [sequence.get("name") for sequence in fields["sequences"]]
    return flat


def _figures(trace: Trace) -> dict[str, Any]:
    found = statistics(trace)
    figures = {"tokens": found["tokens"], "sequences": found["sequences"]}
    figures |= {name: found["mean"][name] for name in SHOWN}
    figures |= {f"lru_atomic_{n}": found["mean"][f"lru_atomic_{n}"] for n in found["slots"]}
    drafts = found["acceptance"]
    return figures | (
        {"acceptance": drafts["rate"], "tokens_per_verify": drafts["tokens_per_verify"]} if drafts else {}
    )


def rows_of(found: dict[str, Any]) -> list[dict[str, str | None]]:
    """The statistics as a table of three columns."""
    ours, theirs = found["statistics"]
    return [{"figure": name, "A": _shown(ours.get(name)), "B": _shown(theirs.get(name))} for name in {**ours, **theirs}]


def _shown(value: float | None) -> str | None:
    return None if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def verdict(found: dict[str, Any]) -> str:
    """One sentence."""
    first = found["first"]
    if first is None:
        apart = found["weights_differ_by"]
        more = f"; weights differ by up to {apart:.3g}" if apart else ""
        return f"the same routing in all {found['steps']:,} steps{more}"
    where = f"step {first['step']}"
    if first["what"] == "length":
        return f"different: {first['missing_in']} ends before {where}, up to which they are the same"
    if "token" in first:
        where += f", token {first['token']} (sequence {first['sequence']})"
    if "layer" in first:
        where += f", position {first['position']}, layer {first['layer']}"
    order = f", {found['order_only']:,} of them only in order" if found["order_only"] else ""
    return (
        f"different: first at {where}: {first['what']} {first['a']} in A, {first['b']} in B; "
        f"{found['steps_differing']:,} of {found['steps']:,} steps differ{order}"
    )
