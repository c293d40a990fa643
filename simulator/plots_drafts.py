"""Figures of speculation: what acceptance it needs, and how much to draft."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .compare import SD
from .plot_style import (
    BAD,
    FAINT,
    INK,
    NothingToShow,
    around,
    end_labels,
    few_ticks,
    finish,
    label,
    line_style,
    named,
    panel_sizes,
    size_words,
    stacked,
    styled,
)
from .results import Slice, speed
from .verdict import Verdict, expected_tokens

CURVE = [i / 100 for i in range(101)]


@styled
def against_acceptance(part: Slice) -> Figure:
    """Speed-up of speculation over the acceptance of a drafted token, at the cost of a verify step that was simulated;
    marked where this trace lies, and the line at which nothing is gained."""
    best = part.winner()
    size = best["size"] if best else ""
    verdicts = part.verdicts(size)
    if not verdicts:
        raise NothingToShow("no policy ran both with and without speculation")
    figure, (axes,) = stacked(1, 2.3)
    for verdict in verdicts:
        _curve(axes, verdict, _drafted(part, verdict, size), part)
    axes.axhline(1.0, color=INK, linewidth=1.0)
    axes.axhspan(0, 1.0, color=FAINT, alpha=0.45, zorder=0, linewidth=0)
    axes.text(0.99, 0.03, "slower than plain decoding", ha="right", fontsize=6)
    axes.text(0.99, 1.01, "break-even", va="bottom", ha="right", fontsize=6)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, None)
    axes.set_xlabel("chance that a drafted token is accepted")
    axes.set_ylabel("speed-up over plain decoding (AR)")
    few_ticks(axes)
    end_labels(axes, named(axes), 0.062)
    drafted = sorted({v.draft_length for v in verdicts})
    note = (
        f"{size_words(size)}, {' and '.join(map(str, drafted))} drafted tokens. Curves: independent acceptance "
        "(Leviathan et al. 2023), cost of a verify step as simulated; marks: this trace; ticks on the line: break-even"
    )
    finish(figure, "What acceptance speculation needs", part, note=note)
    return figure


def _drafted(part: Slice, verdict: Verdict, size: str) -> float:
    """Drafted tokens of a mean verify step: fewer than the draft length where texts end."""
    return next(r["drafted_per_verify"] for r in part.at(size) if r["policy"] == verdict.policy and r["mode"] == SD)


def _curve(axes: Axes, verdict: Verdict, drafted: float, part: Slice) -> None:
    style = line_style(verdict.policy, part)
    gains = [expected_tokens(a, drafted) / verdict.cost for a in CURVE]
    axes.plot(CURVE, gains, label=label(verdict.policy, part), markevery=[], **style)  # marked once, below
    if verdict.acceptance is not None:
        axes.plot(verdict.acceptance, verdict.speedup, marker=style["marker"], color=style["color"], markersize=5,
                  markeredgecolor=INK, markeredgewidth=0.5, zorder=4, linestyle="none", label="_trace")  # fmt: skip
    if verdict.break_even_acceptance is not None:
        axes.plot(verdict.break_even_acceptance, 1.0, marker="|", color=style["color"], markersize=8,
                  markeredgewidth=1.4, linestyle="none", label="_even", zorder=3)  # fmt: skip
    else:
        words = f"{label(verdict.policy, part)}: no acceptance is enough"
        axes.text(0.01, 0.03, words, fontsize=6, color=BAD)


@styled
def by_draft_length(part: Slice) -> Figure:
    """Tokens/s over the draft length, one line a policy; plain decoding is 0, the best length is ringed."""
    runs = {
        (size, name): found
        for size in panel_sizes(part)
        for name in part.policies
        if len(found := part.by_length(name, size)) > 2 and not next(iter(found.values()))["reference"]
    }
    if not runs:
        raise NothingToShow("no policy ran at several draft lengths; give --draft-lengths 0,1,2,4,8")
    sizes = list(dict.fromkeys(size for size, _ in runs))
    figure, panels = stacked(len(sizes), 1.2, keys=len({name for _, name in runs}))
    for size, axes in zip(sizes, panels, strict=True):
        for (_, name), found in ((key, f) for key, f in runs.items() if key[0] == size):
            speeds = {n: speed(r) for n, r in found.items()}
            axes.plot(list(speeds), list(speeds.values()), label=label(name, part), **line_style(name, part))
            best = max(speeds, key=lambda n: speeds[n])
            axes.plot(best, speeds[best], "o", markersize=7, markerfacecolor="none", markeredgecolor=INK,
                      markeredgewidth=0.7, label="_best")  # fmt: skip
        axes.set_ylim(around([speed(r) for found in runs.values() for r in found.values()]))
        axes.set_ylabel("tokens/s")
        axes.set_title(size_words(size), loc="left")
        few_ticks(axes, whole_x=True)
    panels[-1].set_xlabel("draft length K (0: plain decoding)")
    keys = {line.get_label(): line for axes in panels for line in named(axes)}
    note = "Ringed: the best length of a policy; speeds do not begin at 0"
    finish(figure, "Decode speed by draft length", part, list(keys.values()), note)
    return figure
