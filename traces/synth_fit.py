"""Fits the parameters of a synthetic model to what is published of the real one, and says how close they come.

    python -m moe_spac.traces.synth_fit qwen3-30b-a3b            writes synthetic/qwen3-30b-a3b.json
    python -m moe_spac.traces.synth_fit qwen3-30b-a3b --check    compares; --write FILE.md puts the table there

In every layer `spread`, the standard deviation of the lasting and the drifting part of the score together, is solved
for the layer's lag-1 overlap, by a few damped steps on one fixed set of random numbers. Five numbers for the whole
model say how the rest follows from it and from the layer's place between the least and the most persistent one: the
lasting part's share of the variance (at both ends), the memory of the drift, and the ceiling of the lasting part over
its standard deviation (at both ends). They are found by Gauss-Newton steps on the weighted relative misses of the
published figures. Last, the lasting part is divided into popularity, domain and sequence so that the busiest experts
get their published share over all text and within a domain.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from .console import run_app, show_json, show_table
from .errors import InputError
from .stats import overlap, top_share
from .synth import FOLDER, PARTS, load, process_of, published
from .synth_process import Process
from .synth_stats import MEANING, Sample, sample
from .synth_targets import Row, Target, compare, overlap_profile, skew_profiles, targets

FIT_SEED, CHECK_SEED = 1, 1001
FIT_SEQUENCES, LAST_SEQUENCES, FIT_TOKENS = 10, 40, 129
SKEW_SEQUENCES, SKEW_TOKENS = 400, 6
LARGEST_SPREAD = 12.0
SHAPE = ("share_low", "share_high", "memory", "ceiling_low", "ceiling_high")
TOLERANCE = 0.1  # larger misses stand out in the tables
DAMPINGS = (0.03, 0.3, 3.0)  # of a Gauss-Newton step: the first that helps is taken
TRIAL = 0.25  # of a finite difference, in the coordinates of `_coordinates`


@dataclass(frozen=True, slots=True)
class Layers:
    """What is solved for in each layer [L] (`spread`, and its division `popularity`, `domain`: shares of variance) and
    each domain [D] (`emphasis`: a factor on the lasting part).
    """

    spread: np.ndarray
    emphasis: np.ndarray
    popularity: np.ndarray
    domain: np.ndarray


@dataclass(frozen=True)
class Problem:
    """What is known of a model, ready to fit to. overlap, place: [L]; place is 0 in the least persistent layer, 1 in
    the most. by_domain: [D] overlaps or None.
    """

    like: str
    experts: int
    top_k: int
    overlap: np.ndarray
    place: np.ndarray
    by_domain: np.ndarray | None
    chosen: list[Target]

    @property
    def chance(self) -> float:
        return self.top_k / self.experts

    def process(self, shape: np.ndarray, layers: Layers) -> Process:
        """The random process of `shape` (in the order of SHAPE) and of the layers."""
        share_low, share_high, memory, ceiling_low, ceiling_high = shape
        share = share_low + (share_high - share_low) * self.place
        ceiling = ceiling_low + (ceiling_high - ceiling_low) * self.place
        lasting = layers.spread * np.sqrt(share)
        rest = np.clip(1 - layers.popularity - layers.domain, 0, 1)
        return Process(
            self.experts,
            self.top_k,
            popularity=lasting * np.sqrt(layers.popularity),
            domain=lasting * np.sqrt(layers.domain),
            sequence=lasting * np.sqrt(rest),
            drift=layers.spread * np.sqrt(1 - share),
            memory=np.full(len(share), memory),
            ceiling=ceiling * lasting,
            emphasis=tuple(layers.emphasis.tolist()),
        )


def problem(like: str) -> Problem:
    """Read a model's .toml. InputError for a name not known."""
    about, found = published(like), targets(like)
    profile = overlap_profile(like)
    low, high = np.quantile(profile, (0.1, 0.9))
    place = np.clip((profile - low) / max(high - low, 1e-9), 0, 1)
    values = {t.name: t.value for t in found}
    by_domain = [values.get(f"overlap/{domain}") for domain in about["domains"]]
    known = None if None in by_domain else np.array(by_domain, float)
    model = about["model"]
    return Problem(like, model["experts"], model["top_k"], profile, place, known, [t for t in found if t.weight])


def solve_layers(
    task: Problem, shape: np.ndarray, layers: Layers, times: int, sequences: int = FIT_SEQUENCES
) -> Layers:
    """Bring the overlaps of layers and domains to their published values: so many damped fixed-point steps."""
    domains = len(layers.emphasis)
    places = tuple(i % domains for i in range(sequences))
    for _ in range(times):
        found = sample(task.process(shape, layers), places, FIT_TOKENS, FIT_SEED)
        ours = overlap(found.experts, found.offsets)
        ratio = (task.overlap - task.chance) / np.maximum(ours - task.chance, 0.003)
        spread = np.clip(layers.spread * ratio**0.7, 0.02, LARGEST_SPREAD)
        layers = replace(layers, spread=spread, emphasis=_emphasis(task, found, layers.emphasis))
    return layers


def solve_skew(task: Problem, shape: np.ndarray, layers: Layers, times: int) -> Layers:
    """Divide the lasting part so that the busiest experts get their published share; the overlaps follow."""
    profiles = skew_profiles(task.like)
    if profiles is None:
        return layers
    even = round(0.2 * task.experts) / task.experts  # the share if all were used alike
    domains = len(layers.emphasis)
    places = tuple(i % domains for i in range(SKEW_SEQUENCES))
    for _ in range(times):
        found = sample(task.process(shape, layers), places, SKEW_TOKENS, FIT_SEED)
        shares = found.domain_shares()
        together, within = top_share(shares.mean(axis=0)), np.mean([top_share(s) for s in shares], axis=0)
        popularity = np.clip(layers.popularity * ((profiles[0] - even) / (together - even)), 0.001, 0.999)
        both = (layers.popularity + layers.domain) * ((profiles[1] - even) / (within - even))
        domain = np.clip(both - popularity, 0.001, None) if domains > 1 else np.zeros_like(popularity)
        domain = np.minimum(domain, 1 - popularity)
        layers = solve_layers(task, shape, replace(layers, popularity=popularity, domain=domain), 1)
    return layers


def fit(
    like: str, rounds: int = 4, say: Callable[[str], object] = lambda text: None
) -> tuple[Process, dict[str, float], list[Row]]:
    """Parameters of a model, the five numbers of its shape, and the weighted figures as fitted. At most so
    many `rounds` of the search. A model whose .toml has `shape` keeps that one.
    """
    task = problem(like)
    about = published(like)
    count, domains = len(task.overlap), len(about["domains"])
    layers = Layers(np.full(count, 2.0), np.ones(domains), np.full(count, 0.2), np.full(count, 0.3 * (domains > 1)))
    given = about.get("shape")
    shape = np.array([given[name] for name in SHAPE] if given else [0.95, 0.8, 0.9, 1.1, 1.4])
    layers = solve_layers(task, shape, layers, 10)
    layers = solve_skew(task, shape, layers, 6)
    if not given:
        shape, layers = _search(task, shape, layers, rounds, say)
    layers = solve_skew(task, shape, layers, 10)
    layers = solve_layers(task, shape, layers, 5, LAST_SEQUENCES)
    process = task.process(shape, layers)
    return (
        process,
        dict(zip(SHAPE, shape.round(4).tolist(), strict=True)),
        compare(like, process, task.chosen, FIT_SEED),
    )


def _search(
    task: Problem, shape: np.ndarray, layers: Layers, rounds: int, say: Callable[[str], object]
) -> tuple[np.ndarray, Layers]:
    """Damped Gauss-Newton on the five numbers; the layers are solved again for each trial."""

    def misses(at: np.ndarray, layers: Layers, times: int) -> tuple[np.ndarray, Layers]:
        layers = solve_layers(task, _shape(at), layers, times)
        rows = compare(task.like, task.process(_shape(at), layers), task.chosen, FIT_SEED)
        return np.array([r.target.weight * np.log1p(r.error) for r in rows]), layers

    at = _coordinates(shape)
    miss, layers = misses(at, layers, 2)
    for _ in range(rounds):
        say(f"weighted miss {miss @ miss:.5f} at {dict(zip(SHAPE, _shape(at).round(3).tolist(), strict=True))}")
        slope = np.stack([(misses(at + step, layers, 2)[0] - miss) / TRIAL for step in TRIAL * np.eye(len(at))], axis=1)
        square = slope.T @ slope
        for damping in DAMPINGS:
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-4), -slope.T @ miss)
            trial = at + np.clip(step, -0.8, 0.8)
            found, solved = misses(trial, layers, 4)
            if found @ found < miss @ miss:
                at, miss, layers = trial, found, solved
                break
        else:
            break
    return _shape(at), layers


def _coordinates(shape: np.ndarray) -> np.ndarray:
    """Unbounded: shares and memory by their log-odds, ceilings by their logarithm."""
    odds = np.log(shape[:3] / (1 - shape[:3]))
    return np.r_[odds, np.log(shape[3:])]


def _shape(at: np.ndarray) -> np.ndarray:
    return np.r_[1 / (1 + np.exp(-at[:3])), np.exp(at[3:])]


def _emphasis(task: Problem, found: Sample, emphasis: np.ndarray) -> np.ndarray:
    if task.by_domain is None:
        return emphasis
    parts = [found.of(place) for place in range(len(emphasis))]
    ours = np.array([overlap(p.experts, p.offsets).mean() for p in parts])
    wanted = task.by_domain - task.chance
    ratio = (wanted / wanted.mean()) / ((ours - task.chance) / (ours.mean() - task.chance))
    return emphasis * ratio / np.mean(emphasis * ratio)


def save(like: str, process: Process, shape: dict[str, float], rows: Sequence[Row], rounds: int) -> None:
    """Write synthetic/<like>.json."""
    about = published(like)
    fitted = f"fitted to {len(rows)} published figures and to overlap by layer"
    borrowed = "fitted to the few published figures; how overlap is made up in time is taken from Qwen3-30B-A3B"
    content = {
        "model": like,
        "basis": borrowed if "shape" in about else fitted,
        "command": f"python -m moe_spac.traces.synth_fit {like} --rounds {rounds}",
        "sources": about["sources"],
        "domains": about["domains"],
        "experts": process.experts,
        "top_k": process.top_k,
        "model_seed": process.seed,
        "shape": shape,
        "emphasis": [round(float(v), 4) for v in process.emphasis],
        "parameters": {part: [round(float(v), 4) for v in getattr(process, part)] for part in PARTS},
    }
    text = json.dumps(content, indent=1)
    (FOLDER / f"{like}.json").write_text(text + "\n", encoding="utf-8")


def markdown(rows: Sequence[Row]) -> str:
    """The calibration table: what is published, ours, the relative error, and whether the fit saw it."""
    lines = ["| statistic | published | ours | error | | source |", "| --- | ---: | ---: | ---: | --- | --- |"]
    for row in rows:
        t = row.target
        source = f"{t.source} ({t.note})" if t.note else t.source
        miss = f"**{row.error:+.1%}**" if abs(row.error) > TOLERANCE else f"{row.error:+.1%}"
        lines.append(
            f"| `{t.name}` | {t.value:.4g} | {row.ours:.4g} | {miss} | {'fitted' if t.weight else ''} | {source} |"
        )
    return "\n".join(lines)


def glossary() -> str:
    """What the names of the statistics mean, as a table."""
    return "\n".join(
        ["| statistic | |", "| --- | --- |", *(f"| `{name}` | {text} |" for name, text in MEANING.items())]
    )


def write_tables(page: Path, tables: dict[str, str]) -> None:
    """Put each table between the marks `<!-- table NAME -->` and `<!-- end -->` of a page. InputError without them."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--write {page}: cannot read: {error.strerror}") from None
    for name, table in tables.items():
        begin, end = f"<!-- table {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise InputError(f"--write {page}: no place for {name}; put the lines {begin} and {end} there")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    page.write_text(text, encoding="utf-8")


def check(names: Sequence[str], page: Path | None, as_json: bool) -> None:
    """Compare models with what is published; the samples have another seed than those of the fit."""
    found = {like: compare(like, process_of(load(like)), targets(like), CHECK_SEED) for like in names}
    if page:
        write_tables(page, {"statistics": glossary()} | {like: markdown(rows) for like, rows in found.items()})
    if as_json:
        show_json(
            {
                like: [asdict(r.target) | {"ours": r.ours, "error": r.error} for r in rows]
                for like, rows in found.items()
            }
        )
        return
    for like, rows in found.items():
        table = [
            {
                "statistic": r.target.name,
                "published": f"{r.target.value:.4g}",
                "ours": f"{r.ours:.4g}",
                "error": f"{r.error:+.1%}",
                "fitted": "yes" if r.target.weight else "",
                "source": r.target.source,
            }
            for r in rows
        ]
        show_table(f"{like}: synthetic against published", table)


def fit_or_check(
    like: Annotated[list[str], typer.Argument(help="Models, as in synthetic/NAME.toml.")],
    check_: Annotated[
        bool, typer.Option("--check", help="Compare the parameters that are there; fit nothing.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="With --check: a page whose marked tables are replaced.")] = None,
    rounds: Annotated[int, typer.Option(help="Most steps in the search for the five numbers of the shape.")] = 4,
    json_: Annotated[bool, typer.Option("--json", help="With --check: print JSON instead of tables.")] = False,
) -> None:
    """Fit synthetic models to what is published of the real ones, or say how close they come."""
    if check_:
        check(like, write, json_)
        return
    for name in like:
        process, shape, rows = fit(name, rounds, lambda text: sys.stderr.write(f"{text}\n"))
        save(name, process, shape, rows, rounds)


def main() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(fit_or_check)
    run_app(app)


if __name__ == "__main__":
    main()
