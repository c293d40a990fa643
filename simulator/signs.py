"""Published orders of policies, reproduced where they are: who wins, by how much, and what it hangs on.

Every part runs the shipped policies on made-up routing and compares the sign, and where there is one the size, with
what others have measured. Nothing is fitted to these figures. A sign that does not come out stays, as such.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..policies.load import load_policy
from ..traces.schema import Header, Kind, ModelShape, Provenance, Step
from ..traces.synth import synthesize
from ..traces.views import Steps
from .ablate import HYBRI, ablate
from .compare import AR, Case, Job, Outcome, Source, loads_for, run_case
from .engine import setup_for
from .foretold import Foretold
from .machine import load_machine, rates_for
from .replay import count

MACHINE = "rtx4090-pcie4"
SERVER = "rtx3090-pcie4-server"  # nearest to an A6000, the same chip, beside a server's CPU
RECALL = (0.8, 0.7, 0.6)  # assumed of next-gate forecasts 1, 2, 3 layers ahead


@dataclass(frozen=True, slots=True)
class Claim:
    """`holds`: it comes out here too. ours, published: the figures, in words."""

    words: str
    holds: bool
    ours: str
    published: str
    source: str


@dataclass(slots=True)
class Part:
    """One question. setting: what was run; rows: its table; more: another, of what changes with an assumption;
    remarks: what is to be known before quoting it."""

    name: str
    title: str
    setting: str
    claims: list[Claim] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    more: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Held:
    """A trace in memory, because it is replayed many times."""

    header: Header
    listed: Sequence[Step]

    @classmethod
    def of(cls, trace: Steps) -> "Held":
        return cls(trace.header, list(trace.steps()))

    def steps(self) -> Iterable[Step]:
        return self.listed


def one_layer(ids: np.ndarray, experts: int) -> Held:
    """A trace of plain decoding with one layer; ids: [T, k] distinct experts of every token."""
    shape = ModelShape("one layer", 1, (0,), experts, ids.shape[1], 8, 8, "float32", 10**6, 1000, 8)
    header = Header(shape, Provenance.SYNTHETIC, "drawn by spac-sim signs")
    token, drafted = np.full(1, -1, np.int32), np.zeros(1, bool)
    steps = [
        Step(0, 0, Kind.DECODE, np.full(1, t, np.int32), token, drafted, 0, row[None, None].astype(np.uint8))
        for t, row in enumerate(ids)
    ]
    return Held(header, steps)


def sticky(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """[T, 8] of 128: each token keeps 4 of the last one's 8 experts, the rest is uniform."""
    rows = [rng.choice(128, 8, replace=False)]
    while len(rows) < tokens:
        kept = rng.choice(rows[-1], 4, replace=False)
        others = np.setdiff1d(np.arange(128), kept)
        rows.append(np.r_[kept, rng.choice(others, 4, replace=False)])
    return np.sort(rows, axis=1)


def skewed(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """[T, 8] of 128: every token draws its 8 from a Zipf law of exponent 1.2 over shuffled ids."""
    share = np.arange(1, 129) ** -1.2
    share = rng.permutation(share / share.sum())
    return np.array([np.sort(rng.choice(128, 8, replace=False, p=share)) for _ in range(tokens)])


def hit_rate(trace: Steps, spec: str, slots: int, cpu: bool = True) -> float:
    """Of distinct experts of every event, counted without a clock; `slots` a layer."""
    policy, shape = load_policy(spec), trace.header.target
    setup = setup_for(shape, rates_for(load_machine(MACHINE), shape), policy, slots * len(shape.moe_layers), 0)
    total = count(trace.steps(), policy, replace(setup, cpu=cpu)).total
    return total.hits / total.needed


def recency_and_popularity(tokens: int = 2000) -> Part:
    """O18: no order of LRU and pinning holds on every trace."""
    policies = {"recency": "ar-lru", "pinning": "kt-frequency:warmup=64"}
    part = Part(
        "pinning",
        "Pinning and recency",
        f"One layer of 128 experts, top-8, 10 slots, {tokens} tokens. Sticky: a token keeps 4 of the last one's "
        "experts. Skewed: experts drawn from a Zipf law of exponent 1.2. Recency is ar-lru, pinning kt-frequency, "
        "which pins what the first 64 tokens used most.",
    )
    found = {}
    for name, make in (("sticky", sticky), ("skewed", skewed)):
        trace = one_layer(make(np.random.default_rng(18), tokens), 128)
        found[name] = {word: hit_rate(trace, spec, 10) for word, spec in policies.items()}
        part.rows.append({"trace": name} | {f"{word} hits": rate for word, rate in found[name].items()})
    for name, winner, loser, published, source in (
        ("sticky", "recency", "pinning", "pinning loses at every budget that fits", "kekzl/imp#2061"),
        ("skewed", "pinning", "recency", "0.46 (hindsight) against 0.08 to 0.18", "FlashML-org/FreeToken#174"),
    ):
        rates = found[name]
        ours = f"{rates[winner]:.3f} against {rates[loser]:.3f}"
        words = f"{winner} hits more than {loser} ({name})"
        part.claims.append(Claim(words, rates[winner] > rates[loser], ours, published, source))
    return part


def synthetic(like: str, tokens: int, dtype: str | None = None) -> Held:
    return Held.of(synthesize(like, tokens, sequences=max(1, tokens // 256), dtype=dtype))


def job_of(trace: Steps, machine: str = MACHINE) -> Job:
    source = Source(trace)
    return Job(source, load_machine(machine), loads_for(source, [AR]))


def slots_of(trace: Steps, fraction: float) -> int:
    """In all; the share of every layer is rounded alike."""
    shape = trace.header.target
    return round(fraction * shape.experts) * len(shape.moe_layers)


def prefetching(tokens: int = 160) -> Part:
    """The same prefetcher with good and with bad forecasts."""
    part = Part(
        "prefetch",
        "Prefetch that pays and prefetch that loses",
        f"Synthetic Qwen3-30B-A3B, {tokens} tokens of plain decoding on {MACHINE}, 17 % of the experts cached. "
        "Forecasts are made up, each right with the chance stated for 1, 2 and 3 layers ahead.",
    )
    plain, pairs = synthetic("qwen3-30b-a3b", tokens), {}
    bases = {"gate-lookahead": "ar-lru", "hybrimoe": "hybrimoe:prefetch=false"}
    slots = slots_of(plain, 0.17)
    for recall in ((0.9, 0.8, 0.7), (0.1, 0.1, 0.1)):
        job = job_of(Held.of(Foretold(plain, recall)))
        for spec, base in bases.items():
            with_it, without = (run_case(job, Case(s, slots, AR)) for s in (spec, base))
            pairs[spec, recall] = ratio = with_it.speed / without.speed
            part.rows.append(
                {
                    "policy": spec,
                    "forecasts right": ", ".join(map(str, recall)),
                    "tok/s": with_it.speed,
                    "tok/s without": without.speed,
                    "ratio": ratio,
                    "of prefetches used": with_it.metrics["prefetch_precision"],
                }
            )
    good = {spec: ratio for (spec, recall), ratio in pairs.items() if recall[0] > 0.5}
    bad = {spec: ratio for (spec, recall), ratio in pairs.items() if recall[0] < 0.5}
    part.claims = [
        Claim("prefetching by good forecasts pays", min(good.values()) > 1, _each(good),
              "1.22 (AdapMoE, next gate right in 9 of 10); 1.33 (Mixtral-Offloading, T4)",
              "arXiv 2408.10284; arXiv 2312.17238"),
        Claim("prefetching by bad forecasts loses", max(bad.values()) < 1, _each(bad),
              "forecasts with a precision of 0.35 are worse than none", "a public note on foresight in eviction"),
    ]  # fmt: skip
    return part


def _each(ratios: dict[str, float]) -> str:
    return ", ".join(f"{ratio:.2f} ({spec})" for spec, ratio in ratios.items())


def hybrimoe_parts(tokens: int = 160) -> Part:
    """HybriMoE's ablation: each technique alone, and all."""
    trace = Held.of(Foretold(synthetic("qwen3-30b-a3b", tokens, "q4"), RECALL))
    rows = ablate(job_of(trace, SERVER), "hybrimoe", slots_of(trace, 0.25), AR)
    part = Part(
        "hybrimoe",
        "HybriMoE, technique by technique",
        "Synthetic Qwen3-30B-A3B in 4 bit (no made-up routing of Qwen2-57B exists here; both have top-8), "
        f"{tokens} tokens of plain decoding on {SERVER}, the preset nearest to theirs, a quarter of the experts "
        f"cached, a random start; next-gate forecasts assumed right with {', '.join(map(str, RECALL))}. Published: "
        f"{HYBRI.source.partition(': ')[2]}.",
    )
    for row in rows:
        figures = {"tok/s": row.outcome.speed, "hits": row.outcome.metrics["hit_rate_unique"], "x none": row.to_base}
        part.rows.append({"arm": row.arm.name} | figures | {"published x none": row.arm.published})
        if row.arm.published and row.to_base:
            part.claims.append(
                Claim(f"{row.arm.name} is faster than none", row.to_base > 1, f"{row.to_base:.2f}",
                      f"{row.arm.published}", "arXiv 2504.05897, decode")
            )  # fmt: skip
    known = [row for row in rows if row.arm.published and row.to_base]
    ours, theirs = ([r.arm.name for r in sorted(known, key=key)] for key in (_to_base, _published))
    part.claims.append(
        Claim("the arms come in the published order", ours == theirs, " < ".join(ours), " < ".join(theirs),
              "arXiv 2504.05897, decode")
    )  # fmt: skip
    part.remarks.append(
        "What the published baseline (on KTransformers) does with the slots, and how its caching arm fills them "
        "without the scheduler, is not known; `spac-sim ablate` has our reading. Here a prefetched expert stays, so "
        "that prefetching alone is a cache as well, and what scheduling alone has copied is dropped."
    )
    return part


def _to_base(row: Any) -> float:
    return row.to_base


def _published(row: Any) -> float:
    return row.arm.published


MRS = (  # model, share cached, published hits of MRS and LRU in %, whose
    ("mixtral-8x7b", 0.25, 36.2, 30.2, "Mixtral"),
    ("mixtral-8x7b", 0.75, 83.3, 80.6, "Mixtral"),
    ("deepseek-v2-lite", 0.25, 52.7, 47.7, "DeepSeek-V2-Lite"),
    ("olmoe", 0.25, 52.8, 45.0, "Qwen2-57B"),
)


def scores_over_recency(tokens: int = 512) -> Part:
    """HybriMoE's cache order against LRU, every miss fetched and kept."""
    part = Part(
        "mrs",
        "Minus-recent-score against LRU",
        f"Hit rates in %, {tokens} tokens of plain decoding, every miss fetched and kept, no prefetch, counted without "
        "a clock. OLMoE (64 experts, top-8) stands in for Qwen2-57B, which has as many.",
    )
    for like, fraction, mrs, lru, theirs in MRS:
        trace = synthetic(like, tokens)
        slots = round(fraction * trace.header.target.experts)
        by_score, by_use = (
            100 * hit_rate(trace, f"hybrimoe:prefetch=false,cache={order}", slots, cpu=False)
            for order in ("mrs", "lru")
        )
        figures = {"MRS": by_score, "LRU": by_use, "gain": by_score - by_use}
        published = {"published MRS": mrs, "published LRU": lru, "published gain": round(mrs - lru, 1)}
        part.rows.append({"synthetic": like, "cached": fraction, "for": theirs} | figures | published)
        part.claims.append(
            Claim(f"MRS hits more than LRU ({theirs}, {fraction:.0%})", by_score > by_use,
                  f"{by_score - by_use:+.1f} points", f"{mrs - lru:+.1f} points", "arXiv 2504.05897")
        )  # fmt: skip
    part.remarks.append(
        "Made-up routing has no router scores: a chosen expert scores 1/k and all others 0, so the scores of experts "
        "that were nearly chosen, which the paper's order also sees, are missing here."
    )
    return part


def times_of(outcome: Outcome) -> dict[str, float]:
    """ms a token by what the GPU spends it on, largest first; parts below 0.05 ms left out."""
    names = {k[len("gpu_") : -len("_ms_per_token")]: k for k in outcome.metrics if k.endswith("_ms_per_token")}
    parts = {name: outcome.metrics[key] for name, key in names.items() if outcome.metrics[key] >= 0.05}
    return dict(sorted(parts.items(), key=lambda item: -item[1]))
