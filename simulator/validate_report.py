"""The validation as a table, a JSON document and a page of Markdown."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from .machine import UNITS
from .validate import AIM, LIMIT, Report, Result
from .validate_cases import Row, Study, fingerprint, page, shape_of

GROUPS = {
    "all rows": lambda r: True,
    "T1": lambda r: r.row.tier == "T1",
    "T2": lambda r: r.row.tier == "T2",
    "tokens/s": lambda r: r.row.what == "speed",
    "tokens/s, T1": lambda r: r.row.what == "speed" and r.row.tier == "T1",
    "hit rates": lambda r: r.row.what == "hit",
    "shared memory, copies": lambda r: r.row.what not in ("speed", "hit"),
}
HEADER = "<!-- Written by `spac-sim validate -o docs/validation.md`; do not edit. Inputs: {} -->"
INTRO = f"""# How far predictions are from published measurements

`spac-sim validate` replays measurements that others have published and compares. Every row is counted but those that
an entry of the machine was fitted to, one row for each fit; rows that fail stay. The error is predicted over measured,
less one. The aim is a median absolute error of {AIM:.0%} and no T1 row beyond {LIMIT:.0%}; every row beyond {LIMIT:.0%}
counts as a failure. Names of rows are those under which they were collected.

Tiers are those of the collectors: T1 states hardware, model, setting and a sweep or a hit rate; T2 leaves more to be
assumed, or is good for order and factor only. Most rows are single runs of other people on builds that cannot be had
again. Nothing here was measured by us. What a row does not state stands under "assumed", what was replayed stands in
brackets (a context of 512 tokens where none is stated), and machine entries without a source are those of the preset
named. A reason given for a failure was written after it was seen.

Routing: "any", the placement takes the same time whatever is routed; "given", the row states the hit rate and routing
is drawn to have it, so that only time is predicted; "synthetic", hits are predicted too, from made-up routing with
the published statistics of Qwen3-30B-A3B; "even", every set of experts equally likely. None is recorded routing of
these models, which nobody has published. Replays are short: 8 to 64 tokens at a steady state, hit rates as long as the
measured ones."""

HINDSIGHT = """These were made after a first comparison had come out worse. Each rests on a source or on a fact about
the engine that is named, but the rows in question are no longer blind."""


def groups(report: Report) -> list[dict[str, Any]]:
    """Summaries by kind of row, empty kinds left out."""
    parts = {name: [r for r in report.counted if wanted(r)] for name, wanted in GROUPS.items()}
    return [{"rows_of": name, **report.summary(part)} for name, part in parts.items() if part]


def by_study(report: Report) -> float:
    """The median over studies of each one's median absolute error, so that long sweeps do not speak for all."""
    names = dict.fromkeys(r.study for r in report.counted)
    return median(median(abs(r.error) for r in report.counted if r.study == name) for name in names)


def misses(report: Report) -> dict[str, float]:
    """Of counted hit rates: the median difference in points, and the median error of the misses, which cost time."""
    rows = [r for r in report.counted if r.row.what == "hit"]
    if not rows:
        return {}
    return {
        "median_points": median(abs(r.predicted - r.row.measured) for r in rows),
        "median_absolute_error_of_misses": median(abs((100 - r.predicted) / (100 - r.row.measured) - 1) for r in rows),
    }


def document(report: Report) -> dict[str, Any]:
    """Everything, as JSON takes it. Errors are fractions."""
    return {
        "inputs": fingerprint(),
        "summary": groups(report),
        "median_over_studies": by_study(report),
        "hit_rates": misses(report),
        "rows": [_as_dict(r) for r in report.results],
        "fits": [
            {
                "study": f.study,
                "row": f.fit.row,
                "why": f.fit.why,
                "reached": f.reached,
                "entries": [{"entry": e, "before": before, "after": after} for e, before, after in f.changes],
            }
            for f in report.fits
        ],
        "checks": [{"study": c.study, "claim": c.claim, "holds": c.holds, "source": c.source} for c in report.checks],
        "left_out": page()["left_out"],
        "hindsight": page()["hindsight"],
    }


def _as_dict(r: Result) -> dict[str, Any]:
    row = r.row
    return {
        "study": r.study,
        "row": row.id,
        "what": row.what,
        "unit": row.unit,
        "measured": row.measured,
        "predicted": r.predicted,
        "error": r.error,
        "fitted": r.fitted,
        "fails": r.fails,
        "tier": row.tier,
        "routing": row.routing,
        "model": row.model,
        "policy": row.policy,
        "slots": row.slots,
        "bits": list(row.bits),
        "context": row.context,
        "source": row.source,
        "setup": row.setup,
        "assumed": row.assumed,
        "why": row.why if r.fails else "",
    }


def table(report: Report) -> list[dict[str, Any]]:
    """For people: one line for each row."""
    return [
        {
            "row": r.row.id,
            "measured": f"{r.row.measured:.4g}",
            "predicted": f"{r.predicted:.4g}",
            "unit": r.row.unit,
            "error": _error(r),
            "tier": r.row.tier,
            "routing": r.row.routing,
            "source": r.row.source,
        }
        for r in report.results
    ]


def _error(r: Result) -> str:
    return "fitted" if r.fitted else f"{r.error:+.1%}" + (" fails" if r.fails else "")


def verdict(report: Report) -> str:
    """One line: how far off, and where most."""
    s = report.summary(report.counted)
    held = sum(c.holds for c in report.checks)
    return (
        f"median absolute error {s['median_absolute_error']:.1%} over {s['rows']} rows (aim {AIM:.0%}), worst "
        f"{s['worst_error']:+.0%} ({s['worst_row']}); {s['beyond_30_percent']} rows beyond {LIMIT:.0%}; "
        f"each study counted once, {by_study(report):.1%}; {held} of {len(report.checks)} orders and shapes come out"
    )


def markdown(report: Report, studies: Sequence[Study]) -> str:
    """The whole page. The same report gives the same bytes."""
    said = page()
    lines = [HEADER.format(fingerprint()), "", INTRO, "", "## Summary", "", _sentence(verdict(report)), ""]
    lines += [
        *_summary(report),
        "",
        *_of_misses(report),
        "## Rows that fail",
        "",
        *_failures(report),
        "",
        "## Orders and shapes",
        "",
    ]
    checks = [[c.claim, "yes" if c.holds else f"**no**: {c.why}", c.source] for c in report.checks]
    lines += [*_markdown_table(["claim", "comes out", "source"], checks), "", "## Choices made in hindsight", ""]
    lines += [HINDSIGHT, "", *(f"- {each['choice']} Before: {each['before']}" for each in said["hindsight"])]
    for study in studies:
        lines += ["", f"## {study.title}", "", *_study(report, study)]
    lines += ["", "## Left out", "", *(f"- {each['rows']}: {each['why']}." for each in said["left_out"])]
    return "\n".join(lines) + "\n"


def _summary(report: Report) -> list[str]:
    names = ["rows", "number", "median abs. error", "worst", "within 15 %", "beyond 30 %"]
    return _markdown_table(
        names,
        [
            [
                g["rows_of"],
                str(g["rows"]),
                f"{g['median_absolute_error']:.1%}",
                f"{g['worst_error']:+.0%} ({g['worst_row']})",
                str(g["within_15_percent"]),
                str(g["beyond_30_percent"]),
            ]
            for g in groups(report)
        ],
    )


def _of_misses(report: Report) -> list[str]:
    said = misses(report)
    if not said:
        return []
    return [
        f"Hit rates are off by {said['median_points']:.1f} points in the median; of the misses, which are what takes "
        f"time, that is {said['median_absolute_error_of_misses']:.0%}.",
        "",
    ]


def _failures(report: Report) -> list[str]:
    return [
        f"- **{r.row.id}** ({r.row.tier}, {r.row.source}): predicted {r.predicted:.4g} {r.row.unit}, measured "
        f"{r.row.measured:.4g}, {r.error:+.0%}. {_sentence(r.row.why or 'not explained')}"
        for r in report.failures
    ]


def _study(report: Report, study: Study) -> list[str]:
    quantities = study.machine.quantities
    known = [
        f"`{entry}` = {_value(entry, quantities[entry].value)} ({quantities[entry].basis}: {quantities[entry].source})"
        for entry in study.known
    ]
    lines = [f"Machine: preset `{study.base}`{', but ' if known else ''}{'; '.join(known)}.", ""]
    for f in report.fits:
        if f.study == study.name:
            changes = ", ".join(
                f"`{entry}` {_value(entry, before)} to {_value(entry, after)}" for entry, before, after in f.changes
            )
            end = "" if f.reached else " **No value fits.**"
            lines += [f"Fitted to {f.fit.row}: {changes}. Why: {f.fit.why}.{end}", ""]
    rows = [r for r in report.results if r.study == study.name]
    lines += _markdown_table(
        ["row", "setup", "measured", "predicted", "unit", "error", "tier", "routing", "source"],
        [
            [
                r.row.id,
                r.row.setup + _setting(r.row),
                f"{r.row.measured:.4g}",
                f"{r.predicted:.4g}",
                r.row.unit,
                _error(r),
                r.row.tier,
                r.row.routing,
                r.row.source,
            ]
            for r in rows
        ],
    )
    assumed: dict[str, list[str]] = {}
    for r in rows:
        if r.row.assumed:
            assumed.setdefault(r.row.assumed, []).append(r.row.id)
    return [*lines, "", *(f"- Assumed ({_ids(ids, len(rows))}): {text}." for text, ids in assumed.items())]


def _setting(row: Row) -> str:
    """What the replay was given: experts on the GPU, bits of a weight, context, and the hit rate if that is given."""
    if row.what.startswith("shared-") or row.what == "copy":
        return ""
    shape, (experts, others) = shape_of(row), row.bits
    bits = f"{experts:g} bits" if experts == others else f"{experts:g} bits, all but experts {others:g}"
    place = f"{row.slots / len(shape.moe_layers):.4g} of {shape.experts} experts a layer on the GPU"
    context = "" if row.what == "hit" else f"; context {row.context}"
    return f" [{place}; {bits}{context}{f'; hit rate {row.hit:g} %' if row.routing == 'given' else ''}]"


def _value(entry: str, value: float) -> str:
    """With the unit that reads best: us, MB, GB/s, TFLOP/s or none."""
    units = UNITS[entry]
    unit = next((u for u in ("us", "GB/s", "TFLOP/s", "MB") if u in units), "")
    return f"{value / units[unit]:.4g} {unit}".strip()


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _ids(ids: Sequence[str], of: int) -> str:
    return "all" if len(ids) == of else ", ".join(ids)


def _markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
