"""The tables of a comparison: rows of text and numbers, and which columns a terminal has room for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .compare import AR, SD, Outcome, by_length
from .metrics import OK


@dataclass(frozen=True, slots=True)
class Number:
    """A number as the table shows it; a table puts what is not text to the right."""

    value: float
    digits: int
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.value:.{self.digits}f}{self.unit}"


def _number(value: Any, digits: int, unit: str = "", scale: float = 1.0) -> Number | None:
    return None if value is None else Number(value * scale, digits, unit)


def sizes_of(outcomes: Sequence[Outcome]) -> list[int]:
    """Cache sizes by the name they have in the comparison: the slots of the first mode."""
    return list(dict.fromkeys(o.size for o in outcomes))


def names_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Policies in the order of the comparison, references last."""
    return [o.policy for o in sorted({o.policy: o for o in outcomes}.values(), key=lambda o: o.reference)]


Row = dict[str, Any]


def table_rows(outcomes: Sequence[Outcome], layers: int) -> list[Row]:
    """One row for each cache size and policy, and the bound of each size. Hits and bytes are of the speculative run
    where there is one. Columns that would be empty in every row are left out."""
    rows = []
    for size in sizes_of(outcomes):
        rows += [_row(runs, layers) for runs in _by_policy(outcomes, size)]
        rows += _bound_row(outcomes, size, layers, rows[0])
    return _filled(rows)


def more_rows(outcomes: Sequence[Outcome], layers: int) -> list[Row]:
    """What `--wide` adds, for each cache size and policy that ran: rarer numbers, of the same runs."""
    rows = [
        _more(runs.get(SD) or runs[AR], layers)
        for size in sizes_of(outcomes)
        for runs in _by_policy(outcomes, size)
        if all(o.status == OK for o in runs.values())
    ]
    return _filled(rows)


def _by_policy(outcomes: Sequence[Outcome], size: int) -> list[dict[str, Outcome]]:
    """For every policy its runs of one cache size by mode."""
    found = [{o.mode: o for o in outcomes if (o.policy, o.size, o.cut) == (p, size, False)} for p in names_of(outcomes)]
    return [runs for runs in found if runs]


def _filled(rows: Sequence[Row]) -> list[Row]:
    return [{k: v for k, v in row.items() if any(r[k] is not None for r in rows)} for row in rows]


def _name(o: Outcome) -> str:
    """A policy from a file without its folders."""
    file, colon, kind = o.policy.rpartition(".py:")
    return (f"{Path(file).name}{colon}{kind}" if colon else o.policy) + (" (ref)" if o.reference else "")


def _row(runs: Mapping[str, Outcome], layers: int) -> Row:
    main = runs.get(SD) or runs[AR]
    bad = [o.status for o in runs.values() if o.status != OK]
    m: Mapping[str, Any] = {} if bad else main.metrics
    sd, ar = ((runs[mode].speed or None) if mode in runs and not bad else None for mode in (SD, AR))
    return {
        "policy": _name(main),
        "slots": " / ".join(dict.fromkeys(share_of(o.slots, layers) for o in runs.values())),
        "status": bad[0].split(":")[0] if bad else OK,
        "SD tok/s": _number(sd, 1),
        "AR tok/s": _number(ar, 1),
        "SD/AR": _number(sd / ar if sd and ar else None, 2, "x"),
        "hit": _number(m.get("hit_rate_unique"), 3),
        "MB/token": _number(m.get("h2d_bytes_per_token"), 2, scale=1e-6),
        "to MIN": _number(m.get("gap_to_optimum"), 3),
        "closed": _percent(m.get("gap_closed")),
        "in time": _percent(m.get("gap_closed_time")),
    }


def _more(o: Outcome, layers: int) -> Row:
    m = o.metrics
    return {
        "policy": _name(o),
        "slots": share_of(o.slots, layers),
        "hit by token": _number(m["hit_rate_assignment"], 3),
        "prefill hit": _number(m["prefill_hit_rate_unique"], 3),
        "copy wait": _percent(_part(m, "wait_copy")),
        "CPU wait": _percent(_part(m, "wait_cpu")),
        "CPU MB/token": _number(m["cpu_bytes_per_token"], 2, scale=1e-6),
        "wasted": _percent(m["wasted_share"]),
        "timely": _percent(m["prefetch_timely_recall"]),
        "TPOT p95 ms": _number(m["tpot_ms_p95"], 2),
        "TTFT ms": _number(m["ttft_ms_mean"], 1),
        "regret": _number(m.get("victim_regret_events_mean"), 0),
        "optimal victims": _percent(m.get("victim_optimal_share")),
    }


def _bound_row(outcomes: Sequence[Outcome], size: int, layers: int, like: Row) -> list[Row]:
    """The fluid bound as a row: what no lossless policy can exceed at this size."""
    found = {o.mode: o.bound for o in outcomes if o.size == size and o.bound}
    if not found:
        return []
    speeds = {mode: bound.tokens_per_s(bound.layered_ns) for mode, bound in found.items()}
    sd, ar = speeds.get(SD), speeds.get(AR)
    return [
        {
            **dict.fromkeys(like),
            "policy": "fluid bound (ref)",
            "slots": " / ".join(dict.fromkeys(share_of(b.slots, layers) for b in found.values())),
            "status": OK,
            "SD tok/s": _number(sd, 1),
            "AR tok/s": _number(ar, 1),
            "SD/AR": _number(sd / ar if sd and ar else None, 2, "x"),
        }
    ]


def share_of(slots: int, layers: int) -> str:
    return str(slots // layers) if slots % layers == 0 else f"{slots / layers:.1f}"


def _percent(share: float | None) -> Number | None:
    return None if share is None else Number(100 * share, 0, "%")


def _part(m: Mapping[str, Any], label: str) -> float | None:
    """Share of decode time that the GPU's timeline spends on one thing."""
    return m[f"gpu_{label}_ns"] / m["decode_wall_ns"] if m and m["decode_wall_ns"] else None


def fitted(rows: Sequence[Mapping[str, Any]], width: int) -> list[dict[str, Any]]:
    """The table without what a reader misses least, as far as it must be to fit into `width` columns."""
    spare = ["MB/token", "to MIN", "SD/AR", "slots"]
    if all(r.get("status") == OK for r in rows):
        spare.insert(0, "status")
    left = [dict(r) for r in rows]
    while spare and left and _width(left) > width:
        name = spare.pop(0)
        left = [{k: v for k, v in r.items() if k != name} for r in left]
    return left


def _width(rows: Sequence[Mapping[str, Any]]) -> int:
    """Columns of a terminal that the table takes: a bar and a space on either side of every cell."""
    cells = {k: max(len(k), *(len("-" if r[k] is None else str(r[k])) for r in rows)) for k in rows[0]}
    return 1 + sum(n + 3 for n in cells.values())


def length_rows(outcomes: Sequence[Outcome], layers: int) -> list[dict[str, Any]]:
    """Speed by draft length: a row for each size and policy of which more than one length was run."""
    pairs = [(size, policy) for size in sizes_of(outcomes) for policy in names_of(outcomes)]
    found = {pair: by_length(outcomes, pair[1], pair[0]) for pair in pairs}
    found = {pair: runs for pair, runs in found.items() if len(runs) > 2}
    tried = sorted({n for runs in found.values() for n in runs})
    rows = []
    for (size, policy), runs in found.items():
        best = max(runs, key=lambda n: runs[n].speed)
        speeds = {f"K={n}" if n else "AR": _number(runs[n].speed, 1) if n in runs else None for n in tried}
        rows.append({"policy": policy, "slots": share_of(size, layers), **speeds, "best": Number(best, 0)})
    return rows
