"""The policy `marginal` against every other causal policy of the library, on texts that it was not tuned on.

    python tests/benchmarks/bench_marginal.py [--quick] [--jobs N] [-o docs/marginal-results.md] [--json F]

Two rounds for every setting. On one training text all rivals run, with drafts and without; the best `FINALISTS` of
them, `moe-spac` and `ar-lru` go on to the held-out texts, where everything that is printed is measured. Ratios are of
total time at equal tokens, their intervals a bootstrap over texts. Simulated; each part says what is synthetic.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from moe_spac.policies.load import load_policy, policy_names
from moe_spac.simulator.bounds import bounds
from moe_spac.simulator.compare import AR, SD, Case, Job, Source, loads_for, run_case
from moe_spac.simulator.foretold import Foretold
from moe_spac.simulator.machine import load_machine, rates_for
from moe_spac.simulator.metrics import Limited
from moe_spac.simulator.signs import Held
from moe_spac.simulator.sizing import find_size
from moe_spac.traces.console import say
from moe_spac.traces.reader import open_trace
from moe_spac.traces.redraft import windowed
from moe_spac.traces.synth import synthesize
from moe_spac.traces.views import only_sequences

OURS, BASE, PAPER = "marginal", "ar-lru", "moe-spac"
MODELLED = ("sp-moe", "moe-speq", "promoe")  # their forecasts are true needs, spoiled: no causal policy has these
FINALISTS = 2
RECALL = (0.8, 0.7, 0.6)  # assumed of made-up gate forecasts 1, 2 and 3 layers ahead, as in docs/signs.md
GPT_TEXTS = 3  # sequences of the bundled trace that make one text here


@dataclass(frozen=True)
class Setting:
    """A model's routing, a machine, the share of experts cached and the longest draft (0: none)."""

    model: str
    machine: str
    cached: float
    draft: int


SETTINGS = (
    Setting("qwen3-30b-a3b bf16", "rtx4090-pcie4", 0.17, 8),  # the paper's
    Setting("qwen3-30b-a3b bf16", "rtx4090-pcie4", 0.17, 0),
    Setting("qwen3-30b-a3b bf16", "rtx4090-pcie4", 0.40, 4),
    Setting("qwen3-30b-a3b bf16 gates", "rtx4090-pcie4", 0.17, 4),
    Setting("qwen3-30b-a3b q4", "rtx3060-pcie4-ddr4", 0.10, 0),
    Setting("qwen3-30b-a3b q4", "rtx3060-pcie4-ddr4", 0.30, 4),
    Setting("qwen3-30b-a3b q4 gates", "rtx3060-pcie4-ddr4", 0.60, 2),
    Setting("qwen3-30b-a3b bf16", "rtx5090-pcie5", 0.30, 4),
    Setting("qwen3-30b-a3b q4 gates", "rtx4090-pcie4-ddr4", 0.25, 0),
    Setting("deepseek-v2-lite bf16", "rtx3090-pcie4-ddr4", 0.25, 0),
    Setting("gpt-oss-20b", "rtx4060-laptop", 0.25, 0),
    Setting("gpt-oss-20b", "rtx4060-laptop", 0.25, 4),
    Setting("gpt-oss-20b", "rtx4090-pcie4", 0.125, 2),
    Setting("gpt-oss-20b", "rtx4060-laptop", 0.60, 8),
    Setting("gpt-oss-20b", "rtx3060-pcie4-ddr4", 0.40, 0),
    Setting("gpt-oss-20b", "rtx5060ti-pcie5-ddr5", 0.25, 4),
)


@dataclass(frozen=True)
class Sizes:
    """Tokens of the training text and of a held-out one, and how many of these there are."""

    screen: int
    tokens: int
    texts: int


@dataclass(frozen=True)
class Ran:
    """One policy on one text: decode's ns and tokens, hit rate, and the ns of the fluid bound (0: not asked)."""

    ns: int
    tokens: int
    hits: float
    bound_ns: int = 0


@cache
def source(model: str, draft: int, text: int, tokens: int) -> Source:
    """Text 0 is for training. Bundled gpt-oss-20b: recorded routing, drafts assumed (0.7). Else synthetic (0.75)."""
    name, *marks = model.split()
    if name == "gpt-oss-20b":
        chosen = only_sequences(open_trace(name), range(GPT_TEXTS * text, GPT_TEXTS * (text + 1)))
        trace = Limited(chosen, tokens)
        if draft:
            trace = windowed(trace, draft, 0.7, 0, find_size("Qwen3-0.6B", "--draft").as_draft())
        return Source(Held.of(trace))
    drafting: dict[str, Any] = {}
    if draft:
        paper = "bf16" in marks and draft == 8
        drafting = {"draft_length": draft, "acceptance": 0.75, "draft": "qwen3-4b-fp8" if paper else "qwen3-0.6b"}
    trace = synthesize(name, tokens, dtype=None if "bf16" in marks else marks[0], sequences=1, seed=text, **drafting)
    return Source(Held.of(Foretold(trace, RECALL) if "gates" in marks else trace))


def run(setting: Setting, policy: str, drafting: bool, text: int, tokens: int, bound: bool = False) -> Ran:
    src, mode = source(setting.model, setting.draft, text, tokens), SD if drafting else AR
    machine, shape = load_machine(setting.machine), src.trace.header.target
    slots = round(setting.cached * shape.experts) * len(shape.moe_layers)
    outcome = run_case(Job(src, machine, loads_for(src, [mode])), Case(policy, slots, mode))
    if outcome.failed:
        raise SystemExit(f"{policy} on {setting}: {outcome.status}")
    view, limit, m = src.view(mode), 0, outcome.metrics
    if bound:
        limit = bounds(view, rates_for(machine, shape, src.trace.header.draft), slots).layered_ns
    return Ran(m["decode_wall_ns"], m["tokens"], m["hit_rate_unique"], limit)


def rivals() -> list[str]:
    """Causal policies with nothing modelled, besides ours."""
    names = [n for n in policy_names() if n != OURS and n not in MODELLED]
    return [n for n in names if not load_policy(n).clairvoyant]


@dataclass(frozen=True)
class Finding:
    """One setting: every number from the held-out texts. Ratios of tokens/s, each (value, low, high)."""

    setting: Setting
    tokens_per_s: float
    hits: float
    best: str
    at_its_length: str
    over_best: tuple[float, float, float]
    over_any_length: tuple[float, float, float]
    over_paper: tuple[float, float, float]
    closed: float


def ratio(ours: Sequence[Ran], theirs: Sequence[Ran]) -> tuple[float, float, float]:
    """Of tokens/s, ours over theirs, with the middle 95 % of 2,000 resamples of the texts."""
    mine, other = (np.array([r.ns / r.tokens for r in runs]) for runs in (ours, theirs))
    picks = np.random.default_rng(0).integers(0, len(mine), (2000, len(mine)))
    spread = other[picks].sum(axis=1) / mine[picks].sum(axis=1)
    low, high = np.quantile(spread, (0.025, 0.975))
    return float(other.sum() / mine.sum()), float(low), float(high)


def time_of(runs: Sequence[Ran]) -> float:
    return float(np.mean([r.ns / r.tokens for r in runs]))


def contest(pool: Parallel, settings: Sequence[Setting], sizes: Sizes) -> list[Finding]:
    modes = {s: (True, False) if s.draft else (False,) for s in settings}
    names = rivals()
    screen = [(s, p, mode) for s in settings for p in names for mode in modes[s]]
    ran: Any = pool(delayed(run)(*one, 0, sizes.screen) for one in screen)
    trained = {one: time_of([r]) for one, r in zip(screen, ran, strict=True)}
    final = []
    for s in settings:
        ranked = sorted(names, key=lambda p: min(trained[s, p, mode] for mode in modes[s]))
        asked = sorted(names, key=lambda p: trained[s, p, bool(s.draft)])
        kept = dict.fromkeys([*ranked[:FINALISTS], *asked[:FINALISTS], PAPER, BASE])
        final += [(s, p, mode) for p in kept for mode in modes[s]] + [(s, OURS, bool(s.draft))]
    texts = range(1, sizes.texts + 1)
    ran = pool(delayed(run)(*one, t, sizes.tokens, one[1] == BASE) for one in final for t in texts)
    held = {one: ran[i * len(texts) : (i + 1) * len(texts)] for i, one in enumerate(final)}
    return [finding(s, {k[1:]: v for k, v in held.items() if k[0] == s}) for s in settings]


def finding(setting: Setting, held: dict[tuple[str, bool], list[Ran]]) -> Finding:
    drafting = bool(setting.draft)
    ours = held[OURS, drafting]
    others = {k: v for k, v in held.items() if k[0] != OURS}
    best = min((k for k in others if k[1] == drafting), key=lambda k: time_of(others[k]))
    any_length = min(others, key=lambda k: time_of(others[k]))
    bound = min(float(np.mean([r.bound_ns / r.tokens for r in runs])) for k, runs in held.items() if k[0] == BASE)
    base = time_of(held[BASE, drafting])
    return Finding(
        setting,
        1e9 / time_of(ours),
        float(np.mean([r.hits for r in ours])),
        best[0],
        f"{any_length[0]}, {'drafts' if any_length[1] else 'plain'}",
        ratio(ours, others[best]),
        ratio(ours, others[any_length]),
        ratio(ours, held[PAPER, drafting]),
        (base - time_of(ours)) / (base - bound),
    )


HEAD = (
    *("model", "machine", "cached", "drafts", "tok/s", "hits", "best other, same drafts", "times it"),
    *("times the best other, at its better of drafts and none", "times moe-spac", "closed"),
)

PAGE = """<!-- Written by `python tests/benchmarks/bench_marginal.py -o docs/marginal-results.md`; do not edit. -->

# `marginal` against all other causal policies

Simulated, on held-out texts; what the columns mean is said in [marginal.md](marginal.md).

{}
"""


def words(value: tuple[float, float, float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*value)


def table(found: Sequence[Finding]) -> str:
    lines = [f"| {' | '.join(HEAD)} |", "| --- " * len(HEAD) + "|"]
    for f in found:
        s = f.setting
        lines.append(
            f"| {s.model} | {s.machine} | {s.cached:.0%} | {s.draft or 'none'} | {f.tokens_per_s:.1f} | {f.hits:.3f} "
            f"| {f.best} | {words(f.over_best)} | {words(f.over_any_length)} {f.at_its_length} | {words(f.over_paper)} "
            f"| {f.closed:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two settings, short texts")
    parser.add_argument("--tokens", type=int, help="of every text, too few to tell anything: does all of it run?")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-o", type=Path, help="write the table here, too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes, settings = (Sizes(30, 60, 2), (SETTINGS[7], SETTINGS[10])) if args.quick else (Sizes(60, 128, 4), SETTINGS)
    if args.tokens:
        sizes = Sizes(args.tokens, args.tokens, sizes.texts)
    found = contest(Parallel(args.jobs, backend="multiprocessing"), settings, sizes)
    say(table(found))
    if args.json:
        args.json.write_text(json.dumps([{**vars(f), "setting": vars(f.setting)} for f in found], indent=1))
    if args.o:
        args.o.write_text(PAGE.format(table(found)))


if __name__ == "__main__":
    main()
