"""Measure the embedded pair on all held-out prompts and write `measured.json`.

    python -m moe_spac.traces.pair.measure -o traces/pair/measured.json

Greedy decoding in float32, 64 new tokens a prompt; acceptance at draft length 4 and 8 by domain, routing statistics of
the generated text, and one text sample a domain.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ..models import Pair, load_pair
from ..prompts import Prompt, read_prompts
from ..reader import Trace, open_trace
from ..recorder import record
from ..report import statistics
from ..schema import Kind
from ..speculate import Options

NEW_TOKENS = 64


def record_at(pair: Pair, prompts: list[Prompt], options: Options, out: Path) -> tuple[Trace, list[list[int]]]:
    """Record all prompts; the trace and the text of each sequence."""
    summary = record(pair, prompts, out, options, compare=True)
    assert not summary.differences, "speculative greedy decoding must not change a float32 text"
    return open_trace(out), summary.texts


def acceptance_by_domain(trace: Trace) -> dict[str, dict[str, float]]:
    """Accepted over drafted tokens, and tokens per verify step, for each domain and over all."""
    domains = [s["domain"] for s in trace.header.sequences]
    counts: dict[str, list[int]] = {}
    for step in trace.steps():
        if step.kind is Kind.VERIFY:
            for name in (domains[step.sequence], "all"):
                count = counts.setdefault(name, [0, 0, 0])
                count[0] += int(step.drafted.sum())
                count[1] += step.accepted
                count[2] += 1
    return {
        name: {"acceptance": round(accepted / drafted, 4), "tokens_per_verify": round(1 + accepted / verifies, 3)}
        for name, (drafted, accepted, verifies) in counts.items()
    }


def samples(pair: Pair, prompts: list[Prompt], texts: list[list[int]]) -> dict[str, dict[str, str]]:
    """The first prompt of each domain and what the target makes of it."""
    found: dict[str, dict[str, str]] = {}
    for prompt, text in zip(prompts, texts, strict=True):
        if prompt.domain not in found:
            given = len(pair.tokenizer.encode(prompt.turns[0]))
            found[prompt.domain] = {"prompt": prompt.turns[0], "continuation": pair.tokenizer.decode(text[given:])}
    return found


def measure(prompts: list[Prompt], new_tokens: int) -> dict[str, Any]:
    pair = load_pair()
    found: dict[str, Any] = {"prompts": len(prompts), "new_tokens": new_tokens, "temperature": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for length in (4, 8):
            options = Options(max_new_tokens=new_tokens, draft_length=length)
            trace, texts = record_at(pair, prompts, options, Path(folder) / f"{length}.spac")
            found[f"draft_length_{length}"] = acceptance_by_domain(trace)
        stats = statistics(trace)
        found["samples"] = samples(pair, prompts, texts)
    layers = stats["layers"]
    for name in ("overlap_1", "top20", "entropy", "union_8"):
        found[name] = _spread([layer[name] for layer in layers])
    cosines = [pair["cosine"] for pair in stats["domain_cosines"]]
    found["domain_cosine"] = {
        "mean": round(sum(cosines) / len(cosines), 4),
        "least": min(cosines),
        "most": max(cosines),
    }
    found["lru_hit_rate_by_slots"] = {n: stats["mean"][f"lru_atomic_{n}"] for n in stats["slots"]}
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": round(sum(values) / len(values), 4), "least": min(values), "most": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description="See the top of the file.")
    parser.add_argument("-o", dest="out", type=Path, required=True)
    parser.add_argument("--prompts", default="held-out", metavar="SET|FILE", help="other ones")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of each prompt")
    given = parser.parse_args()
    found = measure(read_prompts(given.prompts), given.new_tokens)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "samples"}, indent=1))


if __name__ == "__main__":
    main()
