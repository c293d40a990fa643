"""`spac-sim signs`: published orders of policies, and whether they come out here."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import say, show_json, show_table
from ..traces.errors import InputError
from .cli_run import AsJson, progress_bar

if TYPE_CHECKING:
    from .signs import Part

NAMES = ("pinning", "prefetch", "hybrimoe", "mrs", "moe-spac")


def signs(
    only: Annotated[list[str] | None, typer.Argument(metavar="[PART]…", help=f"{', '.join(NAMES)}.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Length of every part's trace; 0: each part's own.")] = 0,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="F.md", help="Write the page of Markdown.")] = None,
    json: AsJson = False,
) -> int:
    """Run published comparisons on made-up routing and say which signs come out, with sizes beside the published."""
    chosen = list(dict.fromkeys(only or NAMES))
    if strange := [name for name in chosen if name not in NAMES]:
        raise InputError(f"PART {strange[0]}: no such part; parts: {', '.join(NAMES)}")
    if out is not None and (len(chosen) < len(NAMES) or tokens):
        raise InputError("-o: the page has all parts at their own lengths; leave PART and --tokens out")
    makers, parts = _makers(), []
    with progress_bar("comparing", len(chosen)) as progress:
        for name in chosen:
            parts.append(makers[name](tokens) if tokens else makers[name]())
            if progress:
                progress(len(parts))
    if out is not None:
        write(out, parts)
    if json:
        show_json([asdict(part) for part in parts])
        return 0
    for part in parts:
        tell(part)
    if out is not None:
        say(f"written: {out}")
    return 0


def _makers() -> "dict[str, Callable[..., Part]]":
    from .signs import hybrimoe_parts, prefetching, recency_and_popularity, scores_over_recency
    from .signs_spac import paper_setting

    makers = (recency_and_popularity, prefetching, hybrimoe_parts, scores_over_recency, paper_setting)
    return dict(zip(NAMES, makers, strict=True))


def tell(part: "Part") -> None:
    show_table(part.title, [{k: _shown(v) for k, v in row.items()} for row in part.rows])
    say(part.setting)
    show_table("Signs", claim_rows(part))
    show_table("With one assumption changed", [{k: _shown(v) for k, v in row.items()} for row in part.more])
    for line in part.remarks:
        say(f"- {line}")
    say("")


def claim_rows(part: "Part") -> list[dict[str, Any]]:
    return [
        {
            "sign": claim.words,
            "comes out": "yes" if claim.holds else "no",
            "ours": claim.ours,
            "published": claim.published,
            "source": claim.source,
        }
        for claim in part.claims
    ]


def _shown(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value


def write(path: Path, parts: "Sequence[Part]") -> None:
    """InputError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown(parts), encoding="utf-8")
    except OSError as error:
        raise InputError(f"-o {path}: cannot be written ({error.strerror})") from None


def markdown(parts: "Sequence[Part]") -> str:
    """The whole page; the same code gives the same bytes."""
    claims = [claim for part in parts for claim in part.claims]
    held = sum(claim.holds for claim in claims)
    lines = [
        "<!-- Written by `spac-sim signs -o docs/signs.md`; do not edit. -->",
        "",
        "# Published signs, and whether they come out here",
        "",
        "The shipped policies on made-up routing with the published statistics of the models named (see "
        "synthetic.md), on the model of a machine (`spac-sim machines NAME` lists what of it is measured and what "
        "assumed). No model ran, and nothing was fitted to the figures below. Published figures are those of the "
        "sources named; some are known only by notes of others. A sign that does not come out stays.",
        "",
        f"{held} of {len(claims)} signs come out.",
    ]
    for part in parts:
        lines += ["", f"## {part.title}", "", part.setting, "", *_table(part.rows), "", *_table(claim_rows(part))]
        lines += ["", "With one assumption changed:", "", *_table(part.more)] if part.more else []
        lines += ["", *[f"- {line}" for line in part.remarks]] if part.remarks else []
    return "\n".join(lines) + "\n"


def _table(rows: "Sequence[dict[str, Any]]") -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join("-" if cell is None else str(_shown(cell)) for cell in cells) + " |"

    return [line(list(rows[0])), line(["---"] * len(rows[0])), *(line(list(row.values())) for row in rows)]
