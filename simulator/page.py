"""One self-contained HTML page about a folder of results: the verdict first, then what it rests on."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

from .metrics import BOTTLENECKS, OK
from .page_style import CSS, inline
from .plot_style import NothingToShow, short, size_words
from .plots import ACROSS, FIGURES
from .plots_speed import PARTS
from .results import Row, Slice, speed
from .steptimes import GPU_LABELS
from .verdict import Verdict
from .whatif import WhatIf, fits, lead_holds, runner_up

MODES = {"sd": "speculative", "ar": "plain"}
SAYS = {
    "speed": "Bars: decode speed of every policy, with and without speculation, and the bounds",
    "slots": "Lines: speed, its share of the fastest's, hit rate and bytes per token against the cache's size",
    "time": "Stacked bars: where the time of a token goes, by policy",
    "acceptance": "Curves: speed-up of speculation against acceptance, with the break-even line",
    "lengths": "Lines: speed by draft length",
    "residency": "Heat maps: how long each expert was resident, by layer",
    "machines": "Table in shades: tokens per second by policy and machine",
    "pareto": "Points: VRAM in use against tokens per second, with the front",
}


@dataclass(frozen=True, slots=True)
class Findings:
    """One trace on one machine, the run that it recommends, and what changes would bring (or why that is unknown)."""

    part: Slice
    best: Row | None
    what_if: WhatIf | None
    why_not: str = ""


def page(title: str, findings: Sequence[Findings], tell: Callable[[int], None] | None = None) -> str:
    """The whole document. `tell` hears how many per cent of its figures are drawn."""
    parts = [f.part for f in findings]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>{sections(findings)}"
        f"{_figures(parts, tell)}{_footer(parts)}</main></body></html>\n"
    )


def sections(findings: Sequence[Findings]) -> str:
    """All that is said, without figures: for several traces and machines an overview, then each of them."""
    many = len(findings) > 1
    return (_overview(findings) if many else "") + "".join(_about(f, "h2" if many else "h1") for f in findings)


def _overview(findings: Sequence[Findings]) -> str:
    """For several traces or machines: who wins where."""
    ran = [(f.part, f.best) for f in findings if f.best]
    wins = Counter(short(best["policy"]) for _, best in ran)
    lines = "".join(
        f"<li>{escape(part.trace)} on {escape(part.machine.name)}: {_name(best)}, {speed(best):.1f} "
        f"tokens/s with {escape(size_words(best['size']))}</li>"
        for part, best in ran
    )
    if not wins:
        return "<h1>No policy ran to its end</h1>"
    name, count = wins.most_common(1)[0]
    claim = f"{escape(name)} is fastest on {count} of {len(findings)}"
    kicker = f'<p class="kicker">{len(findings)} combinations of trace and machine · simulated</p>'
    return f'{kicker}<h1>{claim}</h1><ul class="plain lead">{lines}</ul>'


def _about(f: Findings, tag: str) -> str:
    if f.best is None:
        nothing = "<p>No run has the status ok, so there is nothing to recommend.</p>"
        return _head(f.part, "No policy ran to its end", tag) + nothing + _failed(f.part)
    parts = [_verdict(f, f.best, tag), _table(f.part, f.best), _limits(f.best), _helps(f), _speculation(f.part, f.best)]
    return "".join([*parts, _sure(f, f.best), _failed(f.part)])


def _head(part: Slice, claim: str, tag: str) -> str:
    kind = " · synthetic trace, no model ran" if part.synthetic else ""
    kicker = f"{escape(part.trace)} on {escape(part.machine.name)} · simulated{kind}"
    return f'<p class="kicker head">{kicker}</p><{tag} class="claim">{claim}</{tag}>'


# The verdict


def _verdict(f: Findings, best: Row, tag: str) -> str:
    part, second = f.part, runner_up(f.part, best)
    drafted = best["draft_length"]
    how = f"drafts of {drafted} token{'s' * (drafted > 1)}" if drafted else "plain decoding"
    claim = f"{_name(best)} with {how} is fastest: {speed(best):.1f} tokens a second"
    lead = [f"{size_words(best['size'])}"]
    if second:
        lead.append(f"{speed(best) / speed(second):.2f} times the next policy, {_name(second)}")
    if bound := best.get("fluid_bound_tokens_per_s"):
        lead.append(f"{speed(best) / bound:.0%} of what no lossless policy can exceed here")
    lead.append(f"what limits it is the {escape(_limit(best))}")
    said = f'<p class="lead">{"; ".join(lead)}.</p>'
    over = sorted((r for r in part.main if speed(r) and not fits(r, part.machine)), key=lambda r: r["slots"])
    if over and fits(best, part.machine):
        sizes = ", ".join(dict.fromkeys(size_words(r["size"]) for r in over))
        card = part.machine["gpu.vram"] / 2**30
        said += (
            f'<p class="soft">Not considered, for more than the card of {card:.3g} GiB would be in use: {sizes}.</p>'
        )
    elif over:
        said += '<p class="bad">This needs more memory than the card has; no run that was asked for fits it.</p>'
    return _head(part, claim, tag) + said + _cards(part, best)


def _name(row: Row) -> str:
    """A policy's name, which is not broken at its hyphens."""
    return f'<span class="name">{escape(short(row["policy"]))}</span>'


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _limit(row: Row) -> str:
    words = BOTTLENECKS[row["bottleneck"]]
    return words[0].lower() + words[1:] if words.split()[0].isalpha() and not words.split()[0].isupper() else words


def _cards(part: Slice, best: Row) -> str:
    bound, vram = best.get("fluid_bound_tokens_per_s"), best.get("vram_bytes")
    cards = [
        ("decode speed", f"{speed(best):.1f}", "tokens/s"),
        ("time of a token", f"{best['tpot_ms_mean']:.1f}", "ms"),
        ("hit rate", f"{best['hit_rate_unique']:.0%}", "of experts"),
        ("to the GPU", f"{best['h2d_bytes_per_token'] / 1e6:.0f}", "MB a token"),
        ("VRAM in use", f"{vram / 2**30:.1f}", "GiB") if vram else ("slots", str(best["slots"]), "in all"),
    ]
    if bound:
        cards.append(("bound of any policy", f"{bound:.1f}", "tokens/s"))
    shown = "".join(f"<div><dt>{n}</dt><dd>{v} <small>{unit}</small></dd></div>" for n, v, unit in cards)
    return f'<dl class="cards">{shown}</dl>'


# The table


def _table(part: Slice, best: Row) -> str:
    others = [s for s in part.sizes if s != best["size"]]
    more = "".join(f"<h3>{escape(size_words(s))}</h3>{_rows(part, best, s)}" for s in others)
    hidden = f"<details><summary>The other cache sizes: {len(others)}</summary>{more}</details>" if others else ""
    title = f"<h2>All policies at {escape(size_words(best['size']))}</h2>"
    note = "K: the best draft length that was tried. Hit rate, MB and VRAM are of the faster of SD and AR."
    shown = f'{_rows(part, best, best["size"])}<p class="small soft">{note}</p>'
    return f"<section>{title}{shown}{hidden}</section>"


def _rows(part: Slice, best: Row, size: str) -> str:
    """A policy's runs of one size; the draft length of its speculative run is the best that was tried."""
    names = sorted(part.policies, key=lambda n: -max((speed(r) for r in _of(part, n, size)), default=0.0))
    names.sort(key=lambda n: any(r["reference"] for r in _of(part, n, size)))
    body = "".join(_row(_of(part, name, size), best) for name in names if _of(part, name, size))
    heads = ("policy", "SD tok/s", "K", "AR tok/s", "SD/AR", "hit", "MB/token", "VRAM GiB")
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{h}</th>" for h in heads)}</tr>{body}</table></div>'


def _of(part: Slice, policy: str, size: str) -> list[Row]:
    return [r for r in part.rows if (r["policy"], r["size"]) == (policy, size)]


def _row(runs: Sequence[Row], best: Row) -> str:
    sd = max((r for r in runs if r["mode"] == "sd"), key=speed, default=None)
    ar = next((r for r in runs if r["mode"] == "ar"), None)
    main = max((r for r in (sd, ar) if r), key=speed)
    name = escape(short(main["policy"])) + (" (reference)" if main["reference"] else "")
    if not speed(main):
        return f'<tr><td>{name}</td><td colspan="7" class="bad">{escape(main["status"].split(":")[0])}</td></tr>'
    kind = "best" if main is best else "reference" if main["reference"] else ""
    ratio = speed(sd) / speed(ar) if sd and ar and speed(ar) else None
    vram = main["vram_bytes"] / 2**30 if main.get("vram_bytes") else None
    cells = [
        _number(speed(sd) if sd else None, 1),
        str(sd["draft_length"]) if sd else "-",
        _number(speed(ar) if ar else None, 1),
        _number(ratio, 2),
        _number(main["hit_rate_unique"], 2),
        _number(main["h2d_bytes_per_token"] / 1e6, 0),
        _number(vram, 1),
    ]
    return f'<tr class="{kind}"><td>{name}</td>{"".join(f"<td>{c}</td>" for c in cells)}</tr>'


def _number(value: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" if value is not None else "-"


# What limits, what would help


def _limits(best: Row) -> str:
    times = {p: float(best[f"gpu_{p}_ms_per_token"] or 0.0) for p in GPU_LABELS}
    total = sum(times.values())
    rows = "".join(
        _bar(PARTS[p][0], ms / total, f"{ms:.2f} ms", "", "stall" if p.startswith("wait") else "")
        for p, ms in sorted(times.items(), key=lambda item: -item[1])
        if ms
    )
    busy = ", ".join(f"{name} {best[key]:.0%}" for name, key in _BUSY if best.get(key) is not None)
    note = f'<p class="small soft">Of the time in use: {busy}. Orange: the GPU stands still.</p>'
    return f'<section><h2>What limits it</h2><ul class="bars">{rows}</ul>{note}</section>'


_BUSY = (
    ("GPU", "gpu_utilisation"),
    ("link", "link_utilisation"),
    ("CPU", "cpu_utilisation"),
    ("RAM", "dram_utilisation"),
)


def _bar(name: str, share: float, value: str, why: str, kind: str = "") -> str:
    width = f"{100 * min(1.0, max(0.0, share)):.1f}"
    because = f'<span class="why">{escape(why)}</span>' if why else ""
    bar = f'<span class="bar"><i style="width:{width}%"></i></span>'
    return f'<li class="{kind}"><span>{escape(name)}</span>{bar}<b>{value}</b>{because}</li>'


def _helps(f: Findings) -> str:
    if f.what_if is None:
        said = f"<p>Not known: {escape(f.why_not)}.</p>"
        return f"<section><h2>What would help most</h2>{said}</section>"
    changes = f.what_if.changes
    most = max(1e-9, *(c.gain for c in changes))
    rows = "".join(
        _bar(
            c.name,
            c.gain / most,
            f"{c.gain:+.0%}",
            f"{c.words}: {c.tokens_per_s:.1f} tokens/s",
            "" if c.gain > 0 else "minus",
        )
        for c in changes
    )
    first = changes[0]
    claim = f"{first.name}, {first.gain:+.0%}" if first.gain >= 0.01 else "nothing of this brings as much as 1 %"
    note = (
        f'<p class="small soft">Each line is the same policy, cache and draft simulated again over the first '
        f"{f.what_if.steps} steps with this one thing changed ({f.what_if.base:.1f} tokens/s without).</p>"
    )
    return f'<section><h2>What would help most: {escape(claim)}</h2><ul class="bars">{rows}</ul>{note}</section>'


def _speculation(part: Slice, best: Row) -> str:
    found: dict[str, Verdict] = {v.policy: v for v in part.verdicts(best["size"])}
    verdict = found.get(best["policy"]) or next(iter(found.values()), None)
    if verdict is None:
        return ""
    return f"<section><h2>Does speculation pay?</h2><p>{escape(_sentence(verdict.words()))}.</p></section>"


# How sure


def _sure(f: Findings, best: Row) -> str:
    part, machine = f.part, f.part.machine
    said = [f"The routing is {_kind(part)}; {best['tokens']:,} output tokens were decoded."]
    if part.assumed:
        said.append(f"No draft ran: {escape(part.assumed)}.")
    assumed = machine.assumed
    of = f"{len(assumed)} of the {len(machine.quantities)} entries of the machine profile are assumed, not measured"
    said.append(f"{of}." if assumed else "Every entry of the machine profile was measured or specified.")
    if f.what_if and assumed:
        ends = [f"{escape(short(r.policy))} {r.low:.1f} to {r.high:.1f}" for r in f.what_if.ranges]
        said.append(f"With all of these at their slow and at their fast end, in tokens/s: {'; '.join(ends)}.")
        holds = lead_holds(f.what_if.ranges)
        if holds is not None:
            said.append(
                "The winner stays ahead at both ends." if holds else "<b>The winner changes within that range.</b>"
            )
    said.append("<code>spac-sim validate</code> compares the simulator with published measurements of other machines.")
    return (
        f'<section><h2>How sure is this?</h2><ul class="plain">{"".join(f"<li>{s}</li>" for s in said)}</ul></section>'
    )


def _kind(part: Slice) -> str:
    words = {"recorded": "recorded here", "imported": "recorded by others and imported"}
    return words.get(str(part.header.provenance), "<b>synthetic: no model ran</b>")


def _failed(part: Slice) -> str:
    bad = dict.fromkeys(f"{short(r['policy'])}: {r['status']}" for r in part.rows if r["status"] != OK)
    if not bad:
        return ""
    rows = "".join(f"<li>{escape(words)}</li>" for words in bad)
    return f'<section><h2>What did not run</h2><ul class="plain">{rows}</ul></section>'


# Figures, footer


def _figures(parts: Sequence[Slice], tell: Callable[[int], None] | None) -> str:
    todo = [(f"{name}-{at}", name, partial(draw, p)) for at, p in enumerate(parts) for name, draw in FIGURES.items()]
    across = [(name, name, partial(draw, parts)) for name, draw in ACROSS.items()]
    todo = across + todo if len(parts) > 1 else todo + across
    shown = []
    for done, (unique, name, draw) in enumerate(todo, 1):
        try:
            shown.append(inline(draw, unique, SAYS[name]))
        except NothingToShow:
            continue
        finally:
            if tell:
                tell(100 * done // len(todo))
    return f'<section><h2>Figures</h2><div class="figures">{"".join(shown)}</div></section>'


def _footer(parts: Sequence[Slice]) -> str:
    commands = "\n".join(dict.fromkeys(p.command for p in parts))
    version = parts[0].version
    again = f"<h2>To see this again</h2><pre>{escape(commands)}</pre>"
    note = "Every number here is simulated; <code>spac-sim metrics</code> defines them."
    return f'<section>{again}<p class="small soft">moe-spac {escape(version)}. {note}</p></section>'
