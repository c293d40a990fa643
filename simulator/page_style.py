"""How the report page looks: its style sheet, and figures that follow it into the dark.

One serif for what is said, the system's sans for what is looked up; one accent; numerals of one width. The page takes
everything from itself: no font, script or image is fetched.
"""

import io
import re
from collections.abc import Callable
from html import escape

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

from .plot_style import BAD, CAPTION, FAINT, INK, PALETTE, SOFT, STYLE

LIGHT = {
    "ink": INK,
    "soft": SOFT,
    "line": FAINT,
    "paper": "#ffffff",
    "ground": "#f6f5f1",
    "bad": BAD,
    "accent": "#005b94",
}
DARK = {
    "ink": "#ececea",
    "soft": "#a9a9a6",
    "line": "#3d3e40",
    "paper": "#1b1c1e",
    "ground": "#121314",
    "bad": "#ff8a93",
    "accent": "#7cc4f2",
}
# Policies' colours on a dark ground: the same hues, lighter.
LIFTED = ("#4aa8e0", "#f2853d", "#2cc79b", "#e29bc4", "#f0b83c", "#7cc8f0", "#c08a7e", "#a9a9a9")

_COLOURS = {
    **{
        value.lower(): f"var(--{name})"
        for name, value in LIGHT.items()
        if name in ("ink", "soft", "line", "bad", "paper")
    },
    **{colour.lower(): f"var(--p{i})" for i, colour in enumerate(PALETTE)},
    "#000000": "var(--ink)",
    "#333333": "var(--dense)",
    "#e3e3e3": "var(--step)",
    "#a6cee3": "var(--plain)",
}


def _variables(theme: dict[str, str], palette: tuple[str, ...], dense: str, step: str, plain: str) -> str:
    named = {**theme, **{f"p{i}": c for i, c in enumerate(palette)}, "dense": dense, "step": step, "plain": plain}
    return "".join(f"--{name}:{value};" for name, value in named.items())


CSS = (
    f":root{{color-scheme:light dark;{_variables(LIGHT, PALETTE, '#333333', '#e3e3e3', '#a6cee3')}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_variables(DARK, LIFTED, '#8d8d8d', '#5c5d60', '#3f6f8c')}}}"
    ".figure image{filter:invert(1)}}"
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
 "Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:break-word}
main{max-width:68rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
h1,h2,.lead{font-family:"Iowan Old Style","Palatino Linotype",Palatino,Georgia,"DejaVu Serif",serif;text-wrap:balance}
h1{font-size:clamp(1.65rem,1.1rem + 2.4vw,2.75rem);line-height:1.15;font-weight:600;margin:.25rem 0 1rem;
 letter-spacing:-.01em;max-width:24em}
h2{font-size:1.35rem;line-height:1.25;font-weight:600;margin:0 0 .75rem}
h2.claim{font-size:clamp(1.4rem,1.1rem + 1.4vw,2rem);line-height:1.2;margin:.25rem 0 .75rem;max-width:26em}
.kicker.head:not(:first-child){margin-top:3.5rem}
h3{font-size:1rem;margin:1.5rem 0 .5rem}
p{margin:0 0 .75rem;max-width:42rem}
.kicker{font-size:.8125rem;letter-spacing:.08em;text-transform:uppercase;color:var(--soft);margin:0}
.lead{font-size:1.125rem;line-height:1.5;color:var(--ink)}
.name{white-space:nowrap} .soft{color:var(--soft)} .bad{color:var(--bad)} .small{font-size:.875rem}
section{border-top:1px solid var(--line);padding:1.75rem 0 .75rem;margin-top:1.25rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:0 1.5rem;margin:1.5rem 0 0;padding:0;
 border-top:2px solid var(--ink)}
.cards div{padding:.75rem 0} .cards dt{font-size:.8125rem;color:var(--soft)}
.cards dd{margin:0;font-size:1.625rem;line-height:1.2;font-weight:600}
.cards small{font-size:.875rem;font-weight:400;color:var(--soft)}
.scroll{overflow-x:auto;margin:0 0 1rem}
table{border-collapse:collapse;width:100%;font-size:.9375rem}
th,td{padding:.45rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{font-weight:500;font-size:.8125rem;color:var(--soft);vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:0} td:last-child,th:last-child{padding-right:0}
tr.best td{font-weight:650} tr.best td:first-child{color:var(--accent)}
tr.reference td{color:var(--soft);font-style:italic}
.bars{list-style:none;margin:0 0 1rem;padding:0;max-width:46rem}
.bars li{display:grid;grid-template-columns:minmax(0,15rem) minmax(0,1fr) 5.5rem;gap:.15rem .9rem;align-items:center;
 padding:.4rem 0;border-bottom:1px solid var(--line)}
.bars i{display:block;height:.8rem;background:var(--accent);border-radius:1px;min-width:1px}
.bars b{text-align:right;font-weight:600} .bars .why{grid-column:1/-1;color:var(--soft);font-size:.875rem}
.bars .stall i{background:var(--p1)} .bars .minus i{background:var(--line)}
.figures{columns:2 26rem;column-gap:1.25rem}
.figure{margin:0 0 1.25rem;background:var(--paper);border:1px solid var(--line);border-radius:3px;padding:.75rem;
 break-inside:avoid}
.figure figcaption{font-size:.8125rem;line-height:1.4;color:var(--soft);margin-top:.5rem}
.figure svg{display:block;width:100%;height:auto}
ul.plain{padding-left:1.1rem;margin:0 0 .75rem;max-width:42rem} ul.plain li{margin:.35rem 0}
details{margin:.5rem 0 1rem} summary{cursor:pointer;color:var(--accent)}
code,pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.8125rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--paper);border:1px solid var(--line);padding:.75rem;
 margin:0 0 .75rem}
@media(max-width:36rem){main{padding:1.5rem 1rem 3rem}
 .bars li{grid-template-columns:minmax(0,1fr) 5rem} .bars .bar{grid-column:1/-1;grid-row:2}
 .bars .why{grid-row:3} table{font-size:.8125rem} th,td{padding:.4rem .3rem} th{font-size:.75rem;white-space:normal}
 tr>:nth-child(5):not([colspan]){display:none}}
@media print{body{background:#fff} .figure{break-inside:avoid}}
"""
)


def inline(draw: Callable[[], Figure], name: str, says: str) -> str:
    """A figure for the page: its colours are the page's, its ids are its own, its caption is text of the page's size.
    `says` is for screen readers."""
    figure, sink = draw(), io.StringIO()
    captions = [text for text in figure.findobj(Text) if text.get_gid() == CAPTION]
    words = " ".join(text.get_text().replace("\n", " ") for text in captions if isinstance(text, Text))
    for text in captions:
        text.set_text("")  # type: ignore[attr-defined]
    with matplotlib.rc_context({**STYLE, "savefig.transparent": True}):
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None})
    svg = _themed(sink.getvalue(), name).replace("<svg ", f'<svg role="img" aria-label="{escape(says, True)}" ', 1)
    return f'<figure class="figure">{svg}<figcaption>{escape(words)}</figcaption></figure>'


def _themed(svg: str, name: str) -> str:
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return re.sub(r"#[0-9a-fA-F]{6}\b", lambda m: _COLOURS.get(m[0].lower(), m[0]), svg)
