"""What a forward pass costs beside its arithmetic: `python tests/benchmarks/bench_floor.py [--rounds R] [--json]`.

Two models with random weights, so narrow that hardly anything but the calls is left: a Qwen3-MoE of 48 layers, top-8
of 128, whose experts do nothing, and a dense Qwen3 of 28 layers, the depth of the 0.6B draft. Each reads 100 tokens and
then passes of 1 row (decoding) and 5 rows (verifying four drafts), by transformers' own eager forward and by the lean
one, in turns; what was read is forgotten after every pass. Milliseconds are CPU time of this process on one thread
(`time.process_time`), the least of R rounds, so other work on the machine raises them little; `ratio` is eager to lean
of the same round, the median with quartiles. `difference` is the largest between the two ways' logits.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ExpertsInterface

from moe_spac.traces.cached import CachedModel
from moe_spac.traces.console import say, show_json, show_table
from moe_spac.traces.lean import LeanModel

CONTEXT = 100
NARROW: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "pad_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def models() -> dict[str, Any]:
    ExpertsInterface.register("nothing", lambda module, hidden, ids, weights: torch.zeros_like(hidden))
    torch.manual_seed(0)
    target = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **NARROW, num_hidden_layers=48, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=8,
            norm_topk_prob=True,
        )
    ).eval()  # fmt: skip
    target.set_experts_implementation("nothing")
    return {
        "Qwen3-MoE, 48 layers": target,
        "Qwen3, 28 layers": Qwen3ForCausalLM(Qwen3Config(**NARROW, num_hidden_layers=28)).eval(),
    }


def opened(kind: Any, model: Any) -> Any:
    one = kind(model, NARROW["vocab_size"])
    one.feed([(7 * i) % NARROW["vocab_size"] for i in range(CONTEXT)], keep=1)
    one.expect_crops()
    return one


def timed(one: Any, rows: int) -> tuple[float, torch.Tensor]:
    """ms of one pass, and its logits."""
    begin = time.process_time()
    logits = one.feed(list(range(5, 5 + rows)), keep=rows)
    ms = (time.process_time() - begin) * 1e3
    one.crop(rows)
    return ms, logits


@torch.inference_mode()
def measure(name: str, model: Any, rounds: int) -> list[dict[str, Any]]:
    eager, lean = opened(CachedModel, model), opened(LeanModel, model)
    table = []
    for rows in (1, 5):
        pairs, difference = [], 0.0
        for _ in range(rounds):
            (slow, theirs), (quick, ours) = timed(eager, rows), timed(lean, rows)
            pairs.append((slow, quick))
            difference = max(difference, float((ours - theirs).abs().max()))
        taken = np.array(pairs)
        low, middle, high = np.quantile(taken[:, 0] / taken[:, 1], [0.25, 0.5, 0.75])
        table.append(
            {
                "model": name, "rows": rows, "eager ms": round(taken[:, 0].min(), 2),
                "lean ms": round(taken[:, 1].min(), 2), "ratio": round(middle, 2),
                "quartiles": f"{low:.2f} to {high:.2f}", "difference": difference,
            }
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = [row for name, model in models().items() for row in measure(name, model, given.rounds)]
    if given.json:
        show_json(table)
        return
    show_table(f"CPU ms of a pass after {CONTEXT} tokens, one thread, the least of {given.rounds}", table)
    say(f"torch {torch.__version__}; ratio: eager to lean, median of rounds")


if __name__ == "__main__":
    main()
