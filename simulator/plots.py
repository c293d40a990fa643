"""Plots of a comparison, as PNG and SVG: speed by policy, speed and hit rate against slots, where a token's time goes,
speed by draft length. The fluid bound, which no lossless policy can exceed, is a dotted line.

They are read in grey print too: every policy has a marker and a line style, every part of a bar a hatch.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .compare import AR, OPTIMUM, SD, Outcome, by_length
from .metrics import OK
from .steptimes import GPU_LABELS
from .tables import names_of, sizes_of

# Colours from Okabe and Ito's palette, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
MARKERS = "osD^vPX*"
LINES = ("-", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (7, 2, 1, 2)), "-", "-.")
MODE_STYLES = {SD: ("#0072B2", ""), AR: ("#A6CEE3", "///")}
PARTS = {
    "dense": ("attention, dense weights", "#4D4D4D", ""),
    "expert": ("experts on the GPU", "#0072B2", ""),
    "draft": ("draft model", "#56B4E9", "..."),
    "step": ("fixed cost of a step", "#BBBBBB", ""),
    "wait_copy": ("GPU waits for copies", "#D55E00", "///"),
    "wait_cpu": ("GPU waits for the CPU", "#E69F00", "xxx"),
    "hybrid": ("joining CPU and GPU", "#009E73", "\\\\\\"),
    "policy": ("policy decides", "#CC79A7", "++"),
}
STYLE: dict[Any, Any] = {"font.size": 9, "hatch.linewidth": 0.7, "svg.hashsalt": "moe-spac", "axes.spines.top": False,
         "axes.spines.right": False, "axes.axisbelow": True, "axes.titlesize": 9}  # fmt: skip
PANELS = 3


def draw_all(folder: Path, outcomes: Sequence[Outcome], layers: int, origin: str) -> None:
    """Write speed, slots (given several cache sizes), time and lengths (given several draft lengths) into `folder`.
    `origin` says whence the data."""
    with matplotlib.rc_context(STYLE):
        if any(o.cut for o in outcomes):
            _save(lengths(outcomes, layers, origin), folder / "lengths")
        outcomes = [o for o in outcomes if not o.cut]
        _save(speed(outcomes, layers, origin), folder / "speed")
        if len(sizes_of(outcomes)) > 1:
            _save(against_slots(outcomes, layers, origin), folder / "slots")
        _save(time(outcomes, layers, origin), folder / "time")


def _save(figure: Figure, stem: Path) -> None:
    """The same data give the same bytes: no date, no random ids."""
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    figure.set_layout_engine("none")  # the layout stands; working it out again takes as long as drawing
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})


def panel_sizes(outcomes: Sequence[Outcome]) -> list[int]:
    """Cache sizes to show side by side: all, or the smallest, the middle and the largest."""
    sizes = sorted(sizes_of(outcomes))
    return sizes if len(sizes) <= PANELS else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]


def speed(outcomes: Sequence[Outcome], layers: int, origin: str) -> Figure:
    """Decode tokens/s by policy, with and without speculation; the reference hollow."""
    sizes, names = panel_sizes(outcomes), names_of(outcomes)
    modes = [m for m in (SD, AR) if any(o.mode == m for o in outcomes)]
    figure, panels = _panels(sizes, layers, 1.6 + 0.42 * len(names))
    top = max((max(o.speed, _bound(o)) for o in outcomes if o.size in sizes), default=0) or 1.0
    for size, axes in zip(sizes, panels, strict=True):
        here = {(o.policy, o.mode): o for o in outcomes if o.size == size}
        for mode, limit in {m: _bound(o) for (_, m), o in here.items() if o.bound}.items():
            axes.axvline(limit, **_bound_style(mode))
        for row, name in enumerate(names):
            for place, mode in enumerate(modes):
                y = row + (place - (len(modes) - 1) / 2) * 0.4
                if (name, mode) in here:
                    _speed_bar(axes, y, here[name, mode], 0.8 / len(modes), top)
        _name_rows(axes, [_label(n, outcomes) for n in names])
        axes.set_xlim(0, top * 1.2)
        axes.set_xlabel("decode, tokens/s")
    keys = [
        Patch(edgecolor="black", label=_mode(m), facecolor=MODE_STYLES[m][0], hatch=MODE_STYLES[m][1]) for m in modes
    ]
    keys.append(Patch(facecolor="white", edgecolor="black", linestyle="--", label="reference, not ranked"))
    keys += [Line2D([], [], label=f"fluid bound, {m.upper()}", **_bound_style(m)) for m in modes if _bounded(outcomes)]
    _finish(figure, "Simulated speed by policy", origin, keys)
    return figure


def _bound(o: Outcome) -> float:
    """Tokens/s that no lossless policy can exceed with these steps and slots; 0 if unknown."""
    return float((o.bound.tokens_per_s(o.bound.layered_ns) if o.bound else None) or 0.0)


def _bounded(outcomes: Sequence[Outcome]) -> bool:
    return any(o.bound for o in outcomes)


def _bound_style(mode: str) -> dict[str, Any]:
    return {"color": "black", "linestyle": ":" if mode == SD else (0, (1, 4)), "linewidth": 1.3, "zorder": 0.5}


def _mode(mode: str) -> str:
    return "speculative (SD)" if mode == SD else "plain (AR)"


def _speed_bar(axes: Axes, y: float, o: Outcome, height: float, top: float) -> None:
    if o.status != OK:
        axes.text(top * 0.01, y, f"{o.mode.upper()}: {_short(o)}", va="center", color="#B00000", style="italic")
        return
    color, hatch = MODE_STYLES[o.mode]
    axes.barh(y, o.speed, height * 0.92, color="white" if o.reference else color, hatch=hatch, edgecolor="black",
              linewidth=0.8, linestyle="--" if o.reference else "-")  # fmt: skip
    axes.text(o.speed + top * 0.01, y, f"{o.speed:.1f}", va="center")


def against_slots(outcomes: Sequence[Outcome], layers: int, origin: str) -> Figure:
    """Tokens/s and hit rate over the cache size, one line a policy, the reference dashed in black."""
    mode = SD if any(o.mode == SD for o in outcomes) else AR
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(names_of(outcomes)):
        runs = sorted((o for o in outcomes if (o.policy, o.mode) == (name, mode)), key=lambda o: o.slots)
        style = _line_style(index, runs[0])
        good = [o for o in runs if o.status == OK]
        label = _label(name, outcomes) + ("" if len(good) == len(runs) else f": {_short(_first_bad(runs))}")
        for axes, metric in ((left, "tokens_per_s"), (right, "hit_rate_unique")):
            axes.plot([o.slots / layers for o in good], [o.metrics[metric] for o in good], label=label, **style)
    limits = {o.slots: _bound(o) for o in sorted(outcomes, key=lambda o: o.slots) if o.bound and o.mode == mode}
    if limits:
        at = [slots / layers for slots in limits]
        left.plot(at, list(limits.values()), label="fluid bound (ref)", **_bound_style(mode))
    left.set_ylabel(f"decode, tokens/s, {_mode(mode)}")
    right.set_ylabel("hit rate, by distinct expert of a layer")
    left.set_ylim(bottom=0)
    right.set_ylim(0, 1.02)
    for axes in (left, right):
        axes.set_xlabel("expert slots per layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    _finish(figure, "Simulated speed and hit rate against the size of the expert cache", origin, left.lines)
    return figure


def _first_bad(runs: Sequence[Outcome]) -> Outcome:
    return next(o for o in runs if o.status != OK)


def _line_style(index: int, o: Outcome) -> dict[str, Any]:
    if o.reference:
        clairvoyant = o.policy == OPTIMUM
        dashes, marker = ("--", "_") if clairvoyant else ((0, (6, 3)), "|")
        return {"color": "black", "linestyle": dashes, "marker": marker, "linewidth": 1.2}
    at = index % len(PALETTE)
    return {"color": PALETTE[at], "linestyle": LINES[at], "marker": MARKERS[at], "linewidth": 1.6, "markersize": 5}


def time(outcomes: Sequence[Outcome], layers: int, origin: str) -> Figure:
    """Milliseconds of the GPU's timeline for each output token, stacked by what they go to."""
    sizes = panel_sizes(outcomes)
    rows = [(n, m) for n in names_of(outcomes) for m in (SD, AR) if any((o.policy, o.mode) == (n, m) for o in outcomes)]
    figure, panels = _panels(sizes, layers, 1.9 + 0.27 * len(rows))
    top = max((o.metrics["tpot_ms_mean"] for o in outcomes if o.size in sizes and o.status == OK), default=0) or 1.0
    used = [label for label in GPU_LABELS if any(o.metrics.get(f"gpu_{label}_ms_per_token") for o in outcomes)]
    for size, axes in zip(sizes, panels, strict=True):
        here = {(o.policy, o.mode): o for o in outcomes if o.size == size}
        for row, key in enumerate(rows):
            if key in here:
                _time_bar(axes, row, here[key], used)
        _name_rows(axes, [f"{_label(n, outcomes)}  {m.upper()}" for n, m in rows])
        axes.set_xlabel("ms per output token")
        axes.set_xlim(0, top * 1.03)
    keys = [Patch(facecolor=PARTS[p][1], hatch=PARTS[p][2], edgecolor="black", label=PARTS[p][0]) for p in used]
    _finish(figure, "Where the time of a token goes (simulated)", origin, keys)
    return figure


def _time_bar(axes: Axes, row: float, o: Outcome, used: Sequence[str]) -> None:
    if o.status != OK:
        axes.text(0, row, f" {_short(o)}", va="center", color="#B00000", style="italic")
        return
    begin = 0.0
    for part in used:
        width = float(o.metrics[f"gpu_{part}_ms_per_token"])
        if not width:
            continue
        _, color, hatch = PARTS[part]
        axes.barh(row, width, 0.78, left=begin, color=color, hatch=hatch, edgecolor="black", linewidth=0.5)
        begin += width


def lengths(outcomes: Sequence[Outcome], layers: int, origin: str) -> Figure:
    """Tokens/s over the draft length, one line a policy; plain decoding is 0."""
    tried = [o for o in outcomes if o.cut]
    sizes = panel_sizes(tried)
    figure, panels = _panels(sizes, layers, 3.4)
    names = names_of(tried)
    top = max((o.speed for o in outcomes if o.size in sizes), default=0) or 1.0
    for size, axes in zip(sizes, panels, strict=True):
        for index, name in enumerate(names):
            runs = by_length(outcomes, name, size)
            if runs:
                speeds = [o.speed for o in runs.values()]
                axes.plot(list(runs), speeds, label=name, **_line_style(index, next(iter(runs.values()))))
        axes.set_ylim(0, top * 1.05)
        axes.set_xlabel("draft length K (0: plain decoding)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("decode, tokens/s")
    shown = {str(line.get_label()): line for axes in panels for line in axes.lines}
    _finish(figure, "Simulated speed by draft length", origin, list(shown.values()))
    return figure


def _short(o: Outcome) -> str:
    return "failed" if o.failed else o.status


def _label(name: str, outcomes: Sequence[Outcome]) -> str:
    return f"{name} (ref)" if any(o.policy == name and o.reference for o in outcomes) else name


def _panels(sizes: Sequence[int], layers: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.2 + 3.2 * len(sizes), height + 0.7), layout="constrained")
    panels = list(figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0])
    for size, axes in zip(sizes, panels, strict=True):
        axes.set_title(f"{size / layers:.3g} slots per layer")
        axes.grid(axis="x", alpha=0.3)
    return figure, panels


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _finish(figure: Figure, title: str, origin: str, keys: Sequence[Any]) -> None:
    below = fill(origin, int(figure.get_figwidth() * 14))
    figure.suptitle(f"{title}\n{below}", fontsize=10)
    rows = -(-len(keys) // int(figure.get_figwidth() / 1.75))
    columns = -(-len(keys) // rows)
    figure.legend(handles=keys, loc="outside lower center", ncols=columns, frameon=False)
