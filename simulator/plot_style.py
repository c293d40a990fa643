"""What all figures share: one column of a paper wide, read in grey print, provenance below.

Every policy has a colour, a marker and a line style, the same in all figures of a folder; every part of a bar a hatch.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from .compare import AR, OPTIMUM, SD
from .metrics import OK
from .results import Row, Slice

COLUMN = 3.3  # inches, a column of a two-column paper
CAPTION = "caption"  # the id of the text below a figure
PANELS = 3  # cache sizes that are shown side by side at most
INK, SOFT, FAINT, BAD = "#1a1a1a", "#5f5f5f", "#d9d9d9", "#b00020"
# Colours from Okabe and Ito's palette, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
MARKERS = "osD^vPX*"
LINES = ("-", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)))
MODE_STYLES = {SD: ("#0072B2", ""), AR: ("#A6CEE3", "////")}
STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "hatch.linewidth": 0.5,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "grid.linewidth": 0.4,
    "grid.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "svg.hashsalt": "moe-spac",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
Draw = Callable[[Slice], Figure]


class NothingToShow(Exception):  # noqa: N818 (no error: a folder need not hold everything)
    """A folder's data cannot give this figure; the message says why."""


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write PNG and SVG. The same data give the same bytes: no date, no random ids."""
    files = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    with matplotlib.rc_context(STYLE):
        figure.savefig(files[0], dpi=300, metadata={"Software": None})
        figure.set_layout_engine("none")  # the layout stands; working it out again takes as long as drawing
        figure.savefig(files[1], metadata={"Date": None})
    return files


def styled(draw: Draw) -> Draw:
    """Make a figure in our style whoever calls."""

    def drawn(part: Slice) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(part)

    drawn.__name__, drawn.__doc__ = draw.__name__, draw.__doc__
    return drawn


def short(name: str) -> str:
    """A policy from a file without its folders."""
    file, dot, kind = name.rpartition(".py:")
    return f"{Path(file).name}{dot}{kind}" if dot else name


def label(name: str, part: Slice) -> str:
    return short(name) + (" (ref)" if any(r["policy"] == name and r["reference"] for r in part.rows) else "")


def trouble(row: Row) -> str:
    """What stands in the place of a run without a number."""
    return "failed" if row["status"].startswith("failed") else row["status"]


def bound_of(row: Row) -> float:
    """Tokens/s that no lossless policy can exceed with these steps and slots; 0 if unknown."""
    return float(row.get("fluid_bound_tokens_per_s") or 0.0)


def bound_style(mode: str) -> dict[str, Any]:
    return {"color": INK, "linestyle": "--" if mode == SD else (0, (1, 1.5)), "linewidth": 0.9}


def mode_words(mode: str) -> str:
    return "speculative (SD)" if mode == SD else "plain (AR)"


def panel_sizes(part: Slice) -> list[str]:
    """Cache sizes to show: all, or the smallest, the middle and the largest."""
    sizes = part.sizes
    return sizes if len(sizes) <= PANELS else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]


def size_words(size: str) -> str:
    return size.replace(" a layer", " slots per layer")


def line_style(name: str, part: Slice) -> dict[str, Any]:
    """How a policy's line looks; references in black. No two of sixteen share both marker and dashes, and whoever comes
    first has the larger marker, so that of two lines on the same points both are seen."""
    if any(r["policy"] == name and r["reference"] for r in part.rows):
        dashes, marker = ((0, (4, 1.5, 1, 1.5)), "x") if name == OPTIMUM else ((0, (2, 1)), "+")
        return {"color": INK, "linestyle": dashes, "marker": marker, "linewidth": 0.8, "markersize": 3.5}
    at = part.policies.index(name)
    color, marker, size = PALETTE[at % len(PALETTE)], MARKERS[at % len(MARKERS)], 4.6 - 0.25 * (at % len(MARKERS))
    dashes = LINES[(at + at // len(MARKERS)) % len(LINES)]
    return {"color": color, "linestyle": dashes, "marker": marker, "linewidth": 1.1, "markersize": size}


def named(axes: Axes) -> list[Line2D]:
    """Lines that stand for something that has a name."""
    return [line for line in axes.lines if not str(line.get_label()).startswith("_")]


def stacked(count: int, height: float, share_x: bool = True, keys: int = 0) -> tuple[Figure, list[Axes]]:
    """A column of panels, `height` inches each, and room for a legend of so many keys."""
    figure = Figure(figsize=(COLUMN, count * height + 0.75 + 0.07 * (keys + 1)), layout="constrained")
    panels = figure.subplots(count, 1, sharex=share_x, squeeze=False)
    return figure, list(panels[:, 0])


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)


def few_ticks(axes: Axes, whole_x: bool = False) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole_x))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(True)


def around(values: Sequence[float]) -> tuple[float, float]:
    """Limits of an axis that shows these values and little else."""
    low, high = min(values), max(values)
    room = 0.09 * (high - low or high)
    return low - room, high + room


def finish(figure: Figure, title: str, part: Slice, keys: Sequence[Any] = (), note: str = "") -> None:
    """Title above, legend under it, provenance below."""
    said = f"{note}. {part.caption}" if note else part.caption
    wide = figure.get_figwidth() / COLUMN
    title = ("SYNTHETIC: " if part.synthetic else "") + title
    below = fill(said, int(77 * wide), break_on_hyphens=False)
    figure.supxlabel(below, x=0.02, ha="left", fontsize=5.5, color=SOFT, gid=CAPTION)
    if keys:  # the legend carries the title, for the layout does not keep two things above the panels apart
        bold = {"weight": "bold", "size": 8}
        figure.legend(handles=list(keys), title=title, title_fontproperties=bold, alignment="left", ncols=2,
                      loc="outside upper left", frameon=False, handlelength=2.4, columnspacing=1.2, borderpad=0.2,
                      borderaxespad=0.5)  # fmt: skip
    else:
        figure.suptitle(title, x=0.02, ha="left", fontweight="bold", fontsize=8)


def end_labels(axes: Axes, lines: Sequence[Line2D], gap: float) -> None:
    """Write every line's name at its right end with a piece of the line, at least `gap` of the axes' height from the
    next. In ink: the lighter colours are hard to read in print."""
    low, high = axes.get_ylim()
    ends = sorted(((np.asarray(line.get_ydata())[-1] - low) / (high - low), at) for at, line in enumerate(lines)
                  if len(np.asarray(line.get_ydata())))  # fmt: skip
    for (wish, at), place in zip(ends, apart([wish for wish, _ in ends], gap), strict=True):
        axes.add_line(Line2D([1.0, 1.04], [wish, place], linewidth=0.4, color=SOFT, label="_lead", clip_on=False,
                             transform=axes.transAxes))  # fmt: skip
        piece = Line2D([], [])
        piece.update_from(lines[at])
        piece.set(data=([1.04, 1.09, 1.14], [place] * 3), markevery=[1], label="_piece", clip_on=False,
                  transform=axes.transAxes)  # fmt: skip
        axes.add_line(piece)
        axes.annotate(str(lines[at].get_label()), (1.16, place), xycoords="axes fraction", va="center", fontsize=6,
                      annotation_clip=False)  # fmt: skip


def apart(wishes: Sequence[float], gap: float) -> list[float]:
    """Ascending places at least `gap` apart, as near to the ascending `wishes` as can be, in squares (pool adjacent
    violators)."""
    pools: list[list[float]] = []  # sum and number of the wishes that share a place, the gaps taken out
    for at, wish in enumerate(wishes):
        pools.append([wish - at * gap, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    flat = [total / count for total, count in pools for _ in range(int(count))]
    return [place + at * gap for at, place in enumerate(flat)]


def ok(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["status"] == OK]
