"""One page of pictures of what `statistics` found, as PNG and SVG, in lines and hatches that grey print keeps."""

from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .report import DISTANCES, LAGS, WINDOWS
from .schema import Header, Provenance

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "svg.hashsalt": "moe-spac",
}
PAGE = (11.7, 7.6)  # inches, A4 wide
INK, ACCENT, BAND = "#1a1a1a", "#0072B2", "#c9dcec"
SHARE = PercentFormatter(1.0, decimals=0)
LABELLED = 14  # domains that have room for their names


def draw(found: dict[str, Any], header: Header, path: Path) -> list[Path]:
    """Write the page for the statistics `found` to `path`.png and .svg; returns both. The same data, the same bytes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=PAGE, layout="constrained")
        panels: list[Callable[[Axes, dict[str, Any]], None]] = [
            _popularity, _skew, _overlap, _unions, _reuse, _slots, _domains, _acceptance,
        ]  # fmt: skip
        for axes, panel in zip(figure.subplots(2, 4).flat, panels, strict=True):
            panel(axes, found)
        figure.suptitle(_title(header), fontsize=12, fontweight="bold", x=0.01, ha="left")
        figure.supxlabel(_caption(found, header), fontsize=7.5, x=0.01, ha="left")
        files = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
        figure.savefig(files[0], dpi=110, metadata={"Software": None})
        figure.set_layout_engine("none")  # the layout stands
        figure.savefig(files[1], metadata={"Date": None})
    return files


def _title(header: Header) -> str:
    synthetic = header.provenance is Provenance.SYNTHETIC
    return ("SYNTHETIC, not recorded: " if synthetic else "") + f"expert routing of {header.target.name}"


def _caption(found: dict[str, Any], header: Header) -> str:
    target = header.target
    text = (
        f"{found['tokens']:,} generated tokens in {found['sequences']} sequences (no prompts, no rejected drafts); "
        f"top {target.top_k} of {target.experts} experts in {len(target.moe_layers)} layers. "
        f"Provenance: {header.provenance}, from {header.source}. Lines are means over layers, bands go from the lowest "
        "to the highest layer. LRU: each layer has slots of its own, empty when a sequence begins; a token looks up "
        "all its experts before any is replaced."
    )
    return fill(text, 190)


def _column(found: dict[str, Any], name: str) -> np.ndarray:
    """[L] one figure of all layers; nan where it is not there."""
    return np.array([layer[name] for layer in found["layers"]], float)


def _band(axes: Axes, found: dict[str, Any], prefix: str, at: tuple[int, ...]) -> None:
    """Mean line and band of `prefix`_n over n, as far as sequences are long enough."""
    values = np.array([_column(found, f"{prefix}_{n}") for n in at])
    there = ~np.isnan(values).any(axis=1)
    where, values = np.array(at)[there], values[there]
    axes.fill_between(where, values.min(1), values.max(1), color=BAND, label="all layers")
    axes.plot(where, values.mean(1), color=ACCENT, marker="o", markersize=3.5, label="mean")


def _powers(axes: Axes, at: tuple[int, ...], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(n) if len(at) < 9 or i % 2 == 0 else "" for i, n in enumerate(at)])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def _popularity(axes: Axes, found: dict[str, Any]) -> None:
    share = -np.sort(-np.array(found["popularity"], float), axis=1) * found["experts"]
    shown = axes.pcolormesh(
        share, rasterized=True, cmap="Greys", vmin=0, vmax=max(2.0, float(np.quantile(share, 0.99)))
    )
    axes.set_title("Popularity of experts")
    axes.set_xlabel("experts of the layer, busiest first")
    axes.set_ylabel("layer")
    numbers = [layer["layer"] for layer in found["layers"]]
    ticks = np.arange(0, len(numbers), -(-len(numbers) // 8))
    axes.set_yticks(ticks + 0.5, [str(numbers[i]) for i in ticks])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    bar = axes.figure.colorbar(shown, ax=axes, extend="max")
    bar.set_label("times an even share")


def _skew(axes: Axes, found: dict[str, Any]) -> None:
    layers = [layer["layer"] for layer in found["layers"]]
    lines = (
        ("entropy", "entropy / ln E", "-", "o"),
        ("gini", "Gini", "--", "s"),
        ("top20", "share of busiest 20%", ":", "^"),
    )
    for (name, label, style, marker), color in zip(lines, (INK, ACCENT, "#D55E00"), strict=True):
        axes.plot(layers, _column(found, name), style, marker=marker, markersize=3, color=color, label=label)
    axes.set_ylim(0, 1.25)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title("Skew by layer")
    axes.set_xlabel("layer")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, loc="upper left", fontsize=7, ncols=1, labelspacing=0.2)


def _overlap(axes: Axes, found: dict[str, Any]) -> None:
    _band(axes, found, "overlap", LAGS)
    axes.axhline(found["mean"]["independent_overlap"], color=INK, linestyle="--", linewidth=1, label="without memory")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(SHARE)
    axes.set_title("Experts shared with an earlier token")
    _powers(axes, LAGS, "lag, tokens")
    axes.legend(frameon=False, fontsize=7)


def _unions(axes: Axes, found: dict[str, Any]) -> None:
    _band(axes, found, "union", WINDOWS)
    for name, style, label in (("independent", "--", "without memory"), ("uniform", ":", "all experts alike")):
        axes.plot(WINDOWS, [found["mean"][f"{name}_{n}"] for n in WINDOWS], style, color=INK, linewidth=1, label=label)
    axes.set_ylim(0, found["experts"] * 1.02)
    axes.set_title("Distinct experts in K tokens")
    axes.set_ylabel("experts a layer")
    _powers(axes, WINDOWS, "K, tokens in a row")
    axes.legend(frameon=False, fontsize=7)


def _reuse(axes: Axes, found: dict[str, Any]) -> None:
    _band(axes, found, "reuse", DISTANCES)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(SHARE)
    axes.set_title("Reuse distance")
    axes.set_ylabel("uses at most that far from the last")
    _powers(axes, DISTANCES, "distance, tokens")
    axes.legend(frameon=False, fontsize=7, loc="lower right")


def _slots(axes: Axes, found: dict[str, Any]) -> None:
    curve = {name: np.array(values, float) for name, values in found["lru_curve"].items()}
    slots = np.arange(1, found["experts"] + 1)
    axes.fill_between(slots, curve["lowest"], curve["highest"], color=BAND, label="all layers")
    axes.plot(slots, curve["mean"], color=ACCENT, label="mean")
    axes.axvline(found["top_k"], color=INK, linestyle=":", linewidth=1, label=f"top {found['top_k']}")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, found["experts"])
    axes.yaxis.set_major_formatter(SHARE)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title("LRU hits against slots")
    axes.set_xlabel(f"slots a layer, of {found['experts']} experts")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=7, loc="lower right")


def _domains(axes: Axes, found: dict[str, Any]) -> None:
    pairs = found["domain_cosines"]
    axes.set_title("Likeness of domains")
    if not pairs:
        _nothing(axes, "one domain, or none named")
        return
    names = list(dict.fromkeys(name for pair in pairs for name in (pair["a"], pair["b"])))
    place = {name: i for i, name in enumerate(names)}
    table = np.eye(len(names))
    for pair in pairs:
        table[place[pair["a"]], place[pair["b"]]] = table[place[pair["b"]], place[pair["a"]]] = pair["cosine"]
    shown = axes.pcolormesh(table, rasterized=True, cmap="Greys", vmin=max(0.0, float(table.min()) - 0.05), vmax=1)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    if len(names) <= LABELLED:
        ticks = np.arange(len(names)) + 0.5
        axes.set_xticks(ticks, [_cut(name) for name in names], rotation=90, fontsize=7)
        axes.set_yticks(ticks, [_cut(name) for name in names], fontsize=7)
    else:
        axes.set_xlabel(f"{len(names)} domains, in the order of the trace")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    bar = axes.figure.colorbar(shown, ax=axes, shrink=0.75)
    bar.set_label("cosine of expert shares")


def _cut(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"


def _acceptance(axes: Axes, found: dict[str, Any]) -> None:
    drafts, load = found["acceptance"], found["draft_load"]
    measured = found["acceptance_model"] == "measured"
    axes.set_title("Accepted drafts by position" + ("" if measured or not drafts else " (modelled)"))
    if not drafts:
        _nothing(axes, "no draft in this trace")
        return
    rates = drafts["by_position"]
    bars = axes.bar(np.arange(1, len(rates) + 1), rates, color=BAND, edgecolor=INK, linewidth=0.8, hatch="///")
    if len(rates) <= 8:
        axes.bar_label(bars, [f"{rate:.0%}" for rate in rates], fontsize=7, padding=1)
    axes.set_ylim(0, 1.5)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(SHARE)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("place in the draft")
    text = f"{drafts['tokens_per_verify']:.2f} tokens a verify step\n{drafts['rate']:.0%} of drafted tokens accepted"
    if load:
        text += (
            f"\n{load['experts']:.1f} experts a layer in a step,\n{load['kept_experts']:.1f} of them for kept tokens"
        )
    axes.text(0.02, 0.98, text, transform=axes.transAxes, va="top", fontsize=7)


def _nothing(axes: Axes, why: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", style="italic", color="#555555")
