"""What recording costs: `python tests/benchmarks/bench_record.py [--tokens N] [--rounds R] [--json]`.

The embedded pair writes the same text in several ways, in turns, R rounds: by transformers' own greedy `generate`, by
our loop without a draft, by our draft/verify loop with nobody watching, by the same with the recorder writing its file,
and by the same with all scores and three layers of lookahead. Seconds are CPU seconds of this process
(`time.process_time`), prompts included: the least of the rounds. Ratios are to the unwatched loop of the same round:
their median and quartiles, which say how far to trust them; on a machine with other work they are no quiet timing.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


def measure(tokens: int, rounds: int) -> dict[str, np.ndarray]:
    """CPU seconds [rounds] of each case; the cases take turns, so that drift meets all of them."""
    with tempfile.TemporaryDirectory() as folder:
        todo = cases(tokens, Path(folder))
        texts = {name: case() for name, case in todo.items()}  # warms up too
        if any(text != texts["loop"] for name, text in texts.items() if name.startswith("loop")):
            raise SystemExit("the ways do not write the same text")
        return {name: np.array(seconds) for name, seconds in _rounds(todo, rounds).items()}


def _rounds(todo: dict[str, Callable[[], list[list[int]]]], rounds: int) -> dict[str, list[float]]:
    spent: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(rounds):
        for name, case in todo.items():
            begin = time.process_time()
            case()
            spent[name].append(time.process_time() - begin)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(args.tokens, args.rounds)
    rows = []
    for name, spent in seconds.items():
        low, middle, high = np.quantile(spent / seconds["loop"], [0.25, 0.5, 0.75]).tolist()
        rows.append({"way": name, "cpu_seconds": spent.min(), "ratio": middle, "quartiles": [low, high]})
    if args.json:
        show_json({"new_tokens": 3 * args.tokens, "draft_length": DRAFT_LENGTH, "rounds": args.rounds, "ways": rows})
        return
    say(f"3 prompts, {args.tokens} new tokens each, draft length {DRAFT_LENGTH}, {args.rounds} rounds")
    for row in rows:
        spread = " to ".join(f"{ratio:.2f}" for ratio in row["quartiles"])
        say(f"{row['way']:28} {row['cpu_seconds']:7.3f} CPU s  {row['ratio']:6.3f} of the loop ({spread})")


if __name__ == "__main__":
    main()
