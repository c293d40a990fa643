"""What recording costs: `python tests/benchmarks/bench_record.py [--tokens N] [--repeats R] [--json]`.

The embedded pair writes the same text four ways, in turns, R times each: transformers' own greedy `generate` without a
draft, our draft/verify loop with nobody watching, the same with the recorder writing its file, and the same with all
scores and three layers of lookahead. The figure is CPU seconds of this process (`time.process_time`), the least of the
repeats, prompts included; so other processes on the machine disturb it little, but it is no timing of a quiet machine.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_spac.traces.console import say, show_json
from moe_spac.traces.models import load_pair, quiet
from moe_spac.traces.prompts import encode, read_prompts
from moe_spac.traces.recorder import record
from moe_spac.traces.speculate import Options, Speculation

DRAFT_LENGTH = 4


def cases(tokens: int, folder: Path) -> dict[str, Callable[[], list[list[int]]]]:
    """Each returns the texts it wrote, so that equal work can be checked."""
    pair = load_pair()
    prompts = read_prompts(None, 3)
    turns = [encode(pair.tokenizer, prompt) for prompt in prompts]
    options = Options(tokens, DRAFT_LENGTH)

    def transformers() -> list[list[int]]:
        return [_generate(pair.target, ids, tokens) for (ids,) in turns]

    def plain(draft: Any) -> list[list[int]]:
        texts = []
        for (ids,) in turns:
            speculation = Speculation(pair.target, draft, options)
            speculation.generate(ids)
            texts.append(speculation.text)
        return texts

    def recorded(**kinds: Any) -> list[list[int]]:
        return record(pair, prompts, folder / "t.spac", options, **kinds).texts

    return {
        "transformers greedy": transformers,
        "loop without draft": lambda: plain(None),
        "loop": lambda: plain(pair.draft),
        "loop + recording": recorded,
        "loop + scores + lookahead 3": lambda: recorded(scores=True, lookahead=3),
    }


def _generate(model: Any, ids: list[int], tokens: int) -> list[int]:
    rows = torch.tensor([ids])
    with torch.inference_mode(), quiet():
        out = model.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip
    return out[0].tolist()


def measure(tokens: int, repeats: int) -> dict[str, float]:
    """CPU seconds of each case, the least of the repeats; the cases take turns, so that drift meets all of them."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        todo = cases(tokens, Path(folder))
        texts = {name: case() for name, case in todo.items()}  # warms up too
        ours = [text for name, text in texts.items() if name.startswith("loop")]
        assert all(text == ours[0] for text in ours), "the ways do not write the same text"
        for _ in range(repeats):
            for name, case in todo.items():
                begin = time.process_time()
                case()
                spent = time.process_time() - begin
                seconds[name] = min(spent, seconds.get(name, spent))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(args.tokens, args.repeats)
    base = seconds["loop"]
    if args.json:
        show_json({"tokens": 3 * args.tokens, "cpu_seconds": seconds})
        return
    say(f"3 prompts, {args.tokens} new tokens each, draft length {DRAFT_LENGTH}, least of {args.repeats} repeats")
    for name, spent in seconds.items():
        say(f"{name:28} {spent:7.3f} CPU s  {spent / base:6.3f} of the loop")


if __name__ == "__main__":
    main()
