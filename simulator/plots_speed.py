"""Figures of speed: by policy, against the size of the cache, and where the time of a token goes."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .compare import AR, SD
from .metrics import OK
from .plot_style import (
    BAD,
    INK,
    MODE_STYLES,
    SOFT,
    NothingToShow,
    around,
    bound_of,
    bound_style,
    few_ticks,
    finish,
    label,
    line_style,
    mode_words,
    name_rows,
    named,
    ok,
    panel_sizes,
    size_words,
    stacked,
    styled,
    trouble,
)
from .results import Row, Slice, speed
from .steptimes import GPU_LABELS

PARTS = {
    "dense": ("attention, dense weights", "#333333", ""),
    "expert": ("experts on the GPU", "#56B4E9", ""),
    "draft": ("draft model", "#A6CEE3", "...."),
    "step": ("fixed cost of a step", "#E3E3E3", ""),
    "wait_copy": ("stall: waits for copies", "#D55E00", "////"),
    "wait_cpu": ("stall: waits for the CPU", "#E69F00", "xxxx"),
    "hybrid": ("joining CPU and GPU", "#009E73", "\\\\\\\\"),
    "policy": ("policy decides", "#CC79A7", "++++"),
}
ROW = 0.24  # inches of a policy with its two bars


def ranked(part: Slice) -> list[str]:
    """Policies, fastest first at the winner's size; failed ones after those, references last."""
    best = part.winner()
    at = part.at(best["size"]) if best else part.main
    fastest: dict[str, float] = {}
    for row in at:
        fastest[row["policy"]] = max(fastest.get(row["policy"], 0.0), speed(row))
    reference = {r["policy"] for r in part.rows if r["reference"]}
    return sorted(part.policies, key=lambda p: (p in reference, -fastest.get(p, 0.0)))


@styled
def by_policy(part: Slice) -> Figure:
    """Decode tokens/s by policy, with and without speculation; references hollow, bounds as lines."""
    sizes, names, modes = panel_sizes(part), ranked(part), part.modes
    if not ok(part.main):
        raise NothingToShow("no run has the status ok")
    figure, panels = stacked(len(sizes), ROW * len(names) + 0.3)
    top = max(max(speed(r), bound_of(r)) for r in part.main if r["size"] in sizes)
    for size, axes in zip(sizes, panels, strict=True):
        here = {(r["policy"], r["mode"]): r for r in part.at(size)}
        for mode in modes:
            for limit in {bound_of(r) for (_, m), r in here.items() if m == mode} - {0.0}:
                axes.axvline(limit, **bound_style(mode), zorder=3)
        for row, name in enumerate(names):
            for place, mode in enumerate(modes):
                y = row + (place - (len(modes) - 1) / 2) * 0.4
                if (name, mode) in here:
                    _speed_bar(axes, y, here[name, mode], 0.8 / len(modes), top)
        name_rows(axes, [label(n, part) for n in names])
        axes.set_title(size_words(size), loc="left", color=SOFT)
        axes.set_xlim(0, top * 1.12)
        axes.grid(axis="x")
    panels[-1].set_xlabel("decode speed, tokens/s")
    keys: list[Patch | Line2D] = [
        Patch(edgecolor=INK, label=mode_words(m), facecolor=MODE_STYLES[m][0], hatch=MODE_STYLES[m][1], linewidth=0.5)
        for m in modes
    ]
    if any(r["reference"] for r in part.main):
        keys.append(
            Patch(facecolor="white", edgecolor=INK, linestyle="--", linewidth=0.6, label="reference, not ranked")
        )
    bounded = [m for m in modes if any(bound_of(r) for r in part.main if r["mode"] == m)]
    keys += [Line2D([], [], label=f"bound of any policy, {m.upper()}", **bound_style(m)) for m in bounded]
    finish(figure, "Decode speed by policy", part, keys)
    return figure


def _speed_bar(axes: Axes, y: float, row: Row, height: float, top: float) -> None:
    if row["status"] != OK:
        axes.text(top * 0.01, y, f"{row['mode'].upper()}: {trouble(row)}", va="center", color=BAD, style="italic",
                  fontsize=6)  # fmt: skip
        return
    color, hatch = MODE_STYLES[row["mode"]]
    axes.barh(y, speed(row), height * 0.92, color="white" if row["reference"] else color, hatch=hatch,
              edgecolor=INK, linewidth=0.5, linestyle="--" if row["reference"] else "-")  # fmt: skip
    axes.text(speed(row) + top * 0.01, y, f"{speed(row):.1f}", va="center", fontsize=5.5, zorder=4,
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85})  # fmt: skip


@styled
def against_slots(part: Slice) -> Figure:
    """Speed, its share of the fastest policy's, hit rate and bytes moved for a token over the size of the expert cache,
    one line a policy."""
    if not ok(part.main):
        raise NothingToShow("no run has the status ok")
    if len(part.sizes) < 2:
        raise NothingToShow("only one cache size was run; give several, as in --slots 6,10,16")
    mode = SD if SD in part.modes else AR
    metrics = _metrics([r for r in part.main if r["mode"] == mode])
    figure, panels = stacked(len(metrics), 1.1, keys=len(part.policies) + 1)
    for name in part.policies:
        runs = sorted((r for r in part.main if (r["policy"], r["mode"]) == (name, mode)), key=lambda r: r["slots"])
        bad = [r for r in runs if r["status"] != OK]
        words = label(name, part) + (f": {trouble(bad[0])}" if bad else "")
        for axes, metric in zip(panels, metrics.values(), strict=True):
            points = [(r["slots"] / part.layers, y) for r in ok(runs) if (y := metric(r)) is not None]
            axes.plot([x for x, _ in points], [y for _, y in points], label=words, **line_style(name, part))
    limits = {r["slots"]: bound_of(r) for r in part.main if bound_of(r) and r["mode"] == mode}
    if limits:
        at = sorted(limits)
        panels[0].plot(
            [s / part.layers for s in at], [limits[s] for s in at], label="bound of any policy", **bound_style(mode)
        )
    for axes, unit in zip(panels, metrics, strict=True):
        axes.set_ylabel(unit)
        few_ticks(axes, whole_x=True)
        if unit == SHARE:  # who is far behind is seen in the panel above
            low, high = around([y for line in axes.lines for y in np.asarray(line.get_ydata()) if y >= NEAR])
            axes.set_ylim(low, min(high, 101.5))
        elif unit == MOVED:
            axes.set_ylim(0)
    panels[0].set_ylabel(f"tokens/s, {mode.upper()}")
    panels[-1].set_xlabel("expert slots per layer")
    _gigabytes_above(panels[0], part)
    failed = sorted({str(line.get_label()) for line in panels[0].lines if not np.size(line.get_xdata())})
    cut = f"; less than {NEAR:.0f} % of the fastest is not shown" if SHARE in metrics else ""
    note = f"Hit rate by distinct expert; bytes over the link to the GPU; only they begin at 0{cut}" + (
        f". Without a run: {'; '.join(failed)}" if failed else ""
    )
    finish(figure, f"Against the size of the expert cache ({mode.upper()})", part, named(panels[0]), note)
    return figure


SPEED, SHARE, HITS, MOVED = "tokens/s", "% of the fastest", "hit rate", "GB per token"
NEAR = 75.0  # per cent of the fastest policy's speed


def _metrics(runs: Sequence[Row]) -> dict[str, Callable[[Row], float | None]]:
    """What panels show of a run. Its share of the fastest run of its size only where several policies can be ranked;
    references have none."""
    able = [r for r in ok(runs) if not r["reference"]]
    best: dict[int, float] = {}
    for row in able:
        best[row["slots"]] = max(best.get(row["slots"], 0.0), speed(row))

    def share(row: Row) -> float | None:
        return None if row["reference"] else 100 * speed(row) / best[row["slots"]]

    metrics: dict[str, Callable[[Row], float | None]] = {SPEED: speed}
    if len({r["policy"] for r in able}) > 1:
        metrics[SHARE] = share
    return metrics | {
        HITS: lambda row: row.get("hit_rate_unique"),
        MOVED: lambda row: None if row.get("h2d_bytes_per_token") is None else row["h2d_bytes_per_token"] / 1e9,
    }


def _gigabytes_above(axes: Axes, part: Slice) -> None:
    """The same axis in GiB of the card that hold experts."""
    each = part.layers * part.header.target.expert_bytes / 2**30
    above = axes.secondary_xaxis("top", functions=(partial(np.multiply, each), partial(np.multiply, 1 / each)))
    above.set_xlabel("GiB of VRAM that hold experts", fontsize=6.5)


@styled
def time_of_a_token(part: Slice) -> Figure:
    """Milliseconds of the GPU's timeline for each output token, stacked by what they go to."""
    if not ok(part.main):
        raise NothingToShow("no run has the status ok")
    sizes = panel_sizes(part)
    ran = {(r["policy"], r["mode"]) for r in part.main}
    rows = [(name, mode) for name in ranked(part) for mode in part.modes if (name, mode) in ran]
    figure, panels = stacked(len(sizes), 0.155 * len(rows) + 0.3)
    shown = [r for r in ok(part.main) if r["size"] in sizes]
    used = [p for p in GPU_LABELS if any(r.get(f"gpu_{p}_ms_per_token") for r in shown)]
    for size, axes in zip(sizes, panels, strict=True):
        here = {(r["policy"], r["mode"]): r for r in part.at(size)}
        for at, key in enumerate(rows):
            if key in here:
                _time_bar(axes, at, here[key], used)
        name_rows(axes, [f"{label(n, part)}  {m.upper()}" for n, m in rows])
        axes.tick_params(axis="y", labelsize=5.5)
        axes.set_title(size_words(size), loc="left", color=SOFT)
        axes.grid(axis="x")
    panels[-1].set_xlabel("ms per output token")
    keys = [
        Patch(facecolor=PARTS[p][1], hatch=PARTS[p][2], edgecolor=INK, linewidth=0.5, label=PARTS[p][0]) for p in used
    ]
    finish(figure, "Where the time of a token goes", part, keys)
    return figure


def _time_bar(axes: Axes, at: float, row: Row, used: Sequence[str]) -> None:
    if row["status"] != OK:
        axes.text(0, at, f" {trouble(row)}", va="center", color=BAD, style="italic", fontsize=5.5)
        return
    begin = 0.0
    for name in used:
        width = float(row[f"gpu_{name}_ms_per_token"])
        if width:
            _, color, hatch = PARTS[name]
            axes.barh(at, width, 0.78, left=begin, color=color, hatch=hatch, edgecolor=INK, linewidth=0.4)
            begin += width
