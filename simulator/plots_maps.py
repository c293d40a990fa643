"""Figures of where and on what: residency by layer, policies by machine, memory against speed."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .plot_style import (
    BAD,
    COLUMN,
    FAINT,
    INK,
    LINES,
    MARKERS,
    PALETTE,
    STYLE,
    NothingToShow,
    end_labels,
    few_ticks,
    finish,
    label,
    line_style,
    named,
    short,
    size_words,
    styled,
    trouble,
)
from .results import Row, Slice, many, speed

GREYS = "Greys"  # one ink: what is darker is more, in print as on a screen
GIB = 2**30
MAPS = 4  # policies whose residency is shown
MACHINES = 4  # whose fronts can be told apart


@styled
def residency(part: Slice) -> Figure:
    """Share of the time for which each expert was resident, by layer; experts of a layer in the order of need."""
    best = part.winner()
    if part.occupancy is None or best is None:
        raise NothingToShow("the folder does not say who was resident (residency.parquet); sweeps keep no such record")
    shown = _shown(part, best)
    maps = {r["policy"]: _grid(part, r) for r in shown}
    height = max(0.75, min(1.6, 0.035 * part.layers))
    figure = Figure(figsize=(COLUMN, len(maps) * (height + 0.22) + 0.85), layout="constrained")
    panels = figure.subplots(len(maps), 1, sharex=True, squeeze=False)[:, 0]
    image: Any = None
    for axes, row, resident in zip(panels, shown, maps.values(), strict=True):
        image = axes.imshow(resident, aspect="auto", cmap=GREYS, vmin=0, vmax=1, interpolation="nearest")
        hit = f", hit rate {row['hit_rate_unique']:.2f}" if row.get("hit_rate_unique") is not None else ""
        axes.set_title(f"{label(row['policy'], part)}{hit}", loc="left")
        axes.set_ylabel("MoE layer")
        edge = min(best["slots"] / part.layers, resident.shape[1]) - 0.5
        axes.axvline(edge, color="#D55E00", linewidth=1.0, linestyle=(0, (3, 1)))
    panels[-1].set_xlabel("experts of the layer, most needed first")
    bar = figure.colorbar(image, ax=list(panels), shrink=0.6, aspect=30, pad=0.02)
    bar.set_label("share of the time resident", fontsize=6.5)
    bar.outline.set_linewidth(0.4)  # type: ignore[operator]
    note = f"{size_words(best['size'])}, {best['mode'].upper()}. Left of the line: as many experts as there are slots"
    finish(figure, "Who sits in the cache", part, note=note)
    return figure


def _shown(part: Slice, best: Row) -> list[Row]:
    """The winner's size and mode: the fastest policies, and the optimum last."""
    rows = [r for r in part.at(best["size"]) if r["mode"] == best["mode"] and speed(r)]
    own = sorted((r for r in rows if not r["reference"]), key=lambda r: -speed(r))
    optimum = [r for r in rows if r["reference"] and r["policy"] == "min"]
    return [*own[: MAPS - len(optimum)], *optimum]


def _grid(part: Slice, row: Row) -> np.ndarray:
    """[L, E]: the share of the time for which an expert was resident, sorted by need layer by layer."""
    assert part.occupancy is not None
    table = part.occupancy
    mine = (table["policy"] == row["policy"]) & (table["slots"] == row["slots"]) & (table["mode"] == row["mode"])
    shape = (part.layers, part.header.target.experts)
    resident, needed = table["resident"][mine].reshape(shape), table["needed"][mine].reshape(shape)
    order = np.argsort(-needed, axis=1, kind="stable")
    return np.take_along_axis(resident, order, 1)


def by_machine(parts: Sequence[Slice]) -> Figure:
    """Tokens/s of every policy on every machine, at its best draft length; shaded by its share of the column's best."""
    machines = list(dict.fromkeys(p.machine.name for p in parts))
    if len(machines) < 2:
        raise NothingToShow("only one machine; sweep several with --machine A --machine B")
    first = [p for p in parts if p.trace == parts[0].trace]
    sizes = first[0].sizes
    size = sizes[len(sizes) // 2]
    policies = [p for p in first[0].policies if not any(r["policy"] == p and r["reference"] for r in first[0].rows)]
    cells = {p: [_best_at(part, p, size) for part in first] for p in policies}
    policies = sorted(policies, key=lambda p: -sum(speed(r) for r in cells[p] if r))
    rows = [cells[p] for p in policies]
    values = np.array([[speed(r) if r else 0.0 for r in line] for line in rows])
    with matplotlib.rc_context(STYLE):
        width = max(COLUMN, 1.2 + 0.62 * len(machines))
        figure = Figure(figsize=(width, 1.35 + 0.3 * len(policies)), layout="constrained")
        axes = figure.subplots()
        _matrix(axes, values, rows)
        axes.set_yticks(range(len(policies)), [short(n) for n in policies])
        axes.set_xticks(range(len(machines)), [_broken(name) for name in machines])
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        note = f"{_who_wins(policies, values)}{size_words(size)}, each policy at its best draft length"
        finish(figure, "Tokens/s by policy and machine", many(first), note=note)
    return figure


def _best_at(part: Slice, policy: str, size: str) -> Row | None:
    rows = [r for r in part.rows if r["policy"] == policy and r["size"] == size]
    return max(rows, key=speed, default=None)


def _who_wins(policies: Sequence[str], values: np.ndarray) -> str:
    """What the matrix comes to: by how much whoever is first leads; values as in `_matrix`."""
    won = [int(n) for n in values.argmax(axis=0)[values.max(axis=0) > 0]]
    if not won or len(policies) < 2:
        return ""
    if len(set(won)) > 1:
        names = [f"{short(p)} on {won.count(n)}" for n, p in enumerate(policies) if n in won]
        return f"Fastest: {', '.join(names)} of {len(won)} machines. "
    second, best = np.sort(values[:, values.max(axis=0) > 0], axis=0)[-2:]
    if not second.all():
        return f"{short(policies[won[0]])} is the fastest everywhere. "
    low, high = min(best / second) - 1, max(best / second) - 1
    return f"{short(policies[won[0]])} is the fastest everywhere, by {low:.0%} to {high:.0%} over the next. "


def _broken(machine: str) -> str:
    """A preset's name on two lines: the card above what is around it."""
    card, _, rest = machine.partition("-")
    return f"{card}\n{rest}"


def _matrix(axes: Axes, values: np.ndarray, rows: Sequence[Sequence[Row | None]]) -> None:
    """values: [policies, machines] tokens/s, 0 where there are none. A cell is white at half of its machine's best."""
    share = values / np.maximum(values.max(axis=0), 1e-9)
    axes.imshow(share, cmap=GREYS, vmin=0.5, vmax=1.75, aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        row, best = rows[y][x], value > 0 and share[y, x] == 1
        words = f"{value:.1f}" if value else trouble(row) if row else "-"
        axes.text(x, y, words, ha="center", va="center" if best or not value else "bottom", color=INK if value else BAD,
                  fontsize=7, fontweight="bold" if best else "normal")  # fmt: skip
        if best:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.3, zorder=3))
        elif value:
            axes.text(x, y + 0.06, f"{share[y, x] - 1:.0%}", ha="center", va="top", fontsize=5.5)
    axes.set_xticks(np.arange(values.shape[1] - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(values.shape[0] - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def memory_against_speed(parts: Sequence[Slice]) -> Figure:
    """Every run by the memory of the card that it uses and its tokens/s; the front of each machine as a line."""
    shown = parts[:MACHINES]
    if not any(r.get("vram_bytes") for p in shown for r in p.rows):
        raise NothingToShow("the folder does not say how much of the card a run uses (vram_bytes)")
    if len({r["vram_bytes"] for r in shown[0].rows if speed(r)}) < 3:
        raise NothingToShow("only one cache size was run; give several, as in --slots 6,10,16")
    one = shown[0] if len(shown) == 1 else None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(COLUMN, 3.0 + 0.07 * len(one.policies if one else ())), layout="constrained")
        axes = figure.subplots()
        if one:
            _one_front(axes, one)
            _card(axes, one)
        else:
            for index, part in enumerate(shown):
                _front(axes, part, index)
            end_labels(axes, named(axes), 0.055)
        axes.set_xlabel("VRAM in use, GiB")
        axes.set_ylabel("decode speed, tokens/s")
        few_ticks(axes)
        left_out = f"; {len(parts) - MACHINES} more are not shown" if len(parts) > MACHINES else ""
        note = f"Line: no run is faster with less memory{left_out}. Small: every run of a policy that may be ranked"
        note += "; AR, K: its draft length" if one else ""
        finish(figure, "Memory against speed", many(shown), named(axes) if one else (), note)
    return figure


def _ranked(part: Slice) -> list[Row]:
    return [r for r in part.rows if speed(r) and r["lossless"] and not r["reference"] and r.get("vram_bytes")]


def _front(axes: Axes, part: Slice, index: int) -> None:
    """Runs of a machine as dots, and the line that none of them is above and left of."""
    rows, color = _ranked(part), PALETTE[index]
    front = pareto(rows)
    axes.plot([r["vram_bytes"] / GIB for r in rows], [speed(r) for r in rows], MARKERS[index], color=color,
              markersize=2.2, alpha=0.45, markeredgewidth=0)  # fmt: skip
    x, y = [r["vram_bytes"] / GIB for r in front], [speed(r) for r in front]
    axes.step(x, y, where="post", color=color, linestyle=LINES[index], linewidth=1.1, label=part.machine.name,
              marker=MARKERS[index], markersize=4, markevery=[])  # fmt: skip
    axes.plot(x, y, MARKERS[index], color=color, markersize=4, markeredgecolor=INK, markeredgewidth=0.4)


def _one_front(axes: Axes, part: Slice) -> None:
    """The same for a single machine: every policy by its own mark, hollow where marks have run out."""
    rows = _ranked(part)
    front = pareto(rows)
    at = [r["vram_bytes"] / GIB for r in front]
    axes.step(at, [speed(r) for r in front], where="post", color=INK, linewidth=0.8, label="_front", zorder=1)
    for name in part.policies:
        style = line_style(name, part) | {"linestyle": "none", "markeredgewidth": 0.5}
        style["markerfacecolor"] = "white" if part.policies.index(name) >= len(MARKERS) else style["color"]
        for chosen, size, edge in (([r for r in rows if r not in front], 3.0, style["color"]), (front, 5.0, INK)):
            mine = [r for r in chosen if r["policy"] == name]
            if any(r["policy"] == name for r in rows):
                axes.plot([r["vram_bytes"] / GIB for r in mine], [speed(r) for r in mine],
                          label=label(name, part) if edge is INK else "_runs",
                          **style | {"markersize": size, "markeredgecolor": edge})  # fmt: skip
    for row, x in zip(front, at, strict=True):
        words = f"K={row['draft_length']}" if row["draft_length"] else "AR"
        axes.annotate(words, (x, speed(row)), (0, 4), textcoords="offset points", fontsize=5.5, ha="center")


def _card(axes: Axes, part: Slice) -> None:
    """Where the card ends, for runs may be asked for that it cannot hold."""
    card = part.machine["gpu.vram"] / GIB
    low, high = axes.get_xlim()
    if low < card < high:
        axes.axvspan(card, high, color=FAINT, alpha=0.45, zorder=0, linewidth=0)
        axes.text(card + (high - low) * 0.01, 0.03, f"more than the card's {card:g} GiB", fontsize=5.5, rotation=90,
                  transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set_xlim(low, high)


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Rows that no other beats in both memory and speed, least memory first."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda r: (r["vram_bytes"], -speed(r))):
        if not front or speed(row) > speed(front[-1]):
            front.append(row)
    return front
