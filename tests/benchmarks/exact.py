"""Does every lossless policy write transformers' own greedy tokens, with every cache size and every draft?

    python tests/benchmarks/exact.py [--clock real] [--policy P ...]

All policies that may run live, 0, top-k, some and all experts in slots, without a draft, with one that is hardly ever
kept, with one that always is, and with n-grams, on the tiny random pair of the tests in float32. The tests take a part
of this. Exit 1 if any token differs.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import save_tiny_draft, save_tiny_target

from moe_spac.executor.models import load_models
from moe_spac.executor.session import Settings, run
from moe_spac.policies.load import OWN, load_policy
from moe_spac.simulator.machine import load_machine
from moe_spac.traces.console import say
from moe_spac.traces.models import quiet
from moe_spac.traces.prompts import Prompt
from moe_spac.traces.speculate import Options

PROMPTS = ("the expert that the router chose", "To be, or not")
SLOTS = (0, 4, 10, 16)  # of 16 experts in two layers, top-2
NEW_TOKENS = 12


def expected(target: Path, tokenizer: Any) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    texts = []
    for prompt in PROMPTS:
        rows = torch.tensor([tokenizer.encode(prompt)])
        more: dict[str, Any] = {"attention_mask": torch.ones_like(rows), "pad_token_id": 0, "eos_token_id": None}
        texts.append(model.generate(rows, do_sample=False, max_new_tokens=NEW_TOKENS, **more)[0].tolist())
    return texts


def main() -> int:
    every = sorted(cls.name for cls in OWN if cls.lossless and not cls.clairvoyant)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clock", choices=["virtual", "real"], default="virtual")
    parser.add_argument("--policy", nargs="+", choices=every, default=every, metavar="P", help="default: all")
    given = parser.parse_args()
    prompts = [Prompt(f"p{i}", "", (text,)) for i, text in enumerate(PROMPTS)]
    machine, wrong, runs = load_machine("rtx4060-laptop"), [], 0
    with tempfile.TemporaryDirectory() as folder, quiet():
        target, small = save_tiny_target(Path(folder) / "target"), save_tiny_draft(Path(folder) / "draft")
        drafts = {"none": "none", "hardly kept": small, "always kept": target, "n-gram": "ngram"}
        pairs = {name: load_models(target, draft) for name, draft in drafts.items()}
        right = expected(target, pairs["none"].pair.tokenizer)
        for policy, slots, (draft, models) in itertools.product(given.policy, SLOTS, pairs.items()):
            settings = Settings(machine, slots, given.clock, Options(max_new_tokens=NEW_TOKENS, draft_length=4))
            runs += 1
            if run(models, load_policy(policy), prompts, settings).texts != right:
                wrong.append((policy, slots, draft))
    say(f"{len(given.policy)} policies, {runs} runs on the {given.clock} clock, wrong: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
