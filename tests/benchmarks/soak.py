"""A real server on the embedded pair under mixed requests for as long as you like, its policy changing all the time.

    python tests/benchmarks/soak.py --minutes 30 [--prompts N] [--json soak.json]

Every greedy answer is compared with transformers' own text, every sampled one with the first of its seed. Prints the
server's resident memory over time with its slope, and its threads before, after and at the end. Exit 1 unless all
answers are right, no thread is left over and memory grows by less than 1 % of what it was, in all.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from rich.markup import escape

from moe_spac.traces.console import say
from moe_spac.traces.models import find_pair, quiet
from moe_spac.traces.prompts import read_prompts

POLICIES = (
    *("ar-lru", "hybrimoe", "moe-spac", "static", "llamacpp-cache", "lfru", "fiddler", "freetoken", "gate-lookahead"),
    *("lrfu:scope=global", "moe-infinity", "dali", "s3-fifo", "governed"),
)
Talk = list[tuple[str, str]]  # role and words
TOKENS = 32
SEEDS = 3
EVERY_SECONDS = 5.0  # between samples of memory
WARM_UP = 0.2  # of the time, before memory counts


@dataclass
class Soak:
    """What happened. `memory`: (seconds, bytes); `threads`: idle, before and after the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    policies: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    exit_code: int | None = None

    def growth(self) -> tuple[float, float, float]:
        """Bytes a second by least squares after the warm-up, that over the time measured, and the mean memory."""
        at = np.array([m for m in self.memory if m[0] >= WARM_UP * self.memory[-1][0]], float)
        slope = float(np.polyfit(at[:, 0], at[:, 1], 1)[0]) if len(at) > 2 else 0.0
        return slope, slope * (at[-1, 0] - at[0, 0]), float(at[:, 1].mean())


def references(texts: list[str]) -> dict[str, str]:
    """What transformers continues each text with, greedily."""
    import torch
    from transformers import AutoModelForCausalLM

    found = find_pair(None, "none")[0]
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(found.place, dtype=torch.float32)
    answers = {}
    for text in texts:
        rows = torch.tensor([found.tokenizer.encode(text)])
        more: dict[str, Any] = {"attention_mask": torch.ones_like(rows), "pad_token_id": 0, "eos_token_id": 0}
        out = model.generate(rows, do_sample=False, max_new_tokens=TOKENS, **more)
        answers[text] = found.tokenizer.decode(out[0, rows.shape[1] :], skip_special_tokens=True)
    return answers


class Client:
    """Sends requests of all kinds and judges the answers."""

    def __init__(self, url: str, seed: int, soak: Soak, prompts: int | None = None) -> None:
        self.url, self.soak = url, soak
        self.rng = random.Random(seed)
        self.api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.model = self.api.models.list().data[0].id
        texts = [prompt.turns[0][:200] for prompt in read_prompts(None, prompts)]
        greedy = references(texts)
        self.talks: list[Talk] = [[("user", text)] for text in texts]
        for text, later in zip(texts, texts[1:] + texts[:1], strict=True):
            self.talks.append([("user", text), ("assistant", greedy[text]), ("user", later)])
        self.right = greedy | references([whole(talk) for talk in self.talks[len(texts) :]])
        self.sampled: dict[tuple[str, int], str] = {}

    def one(self) -> None:
        """One request, of a kind drawn at random, under a policy drawn at random."""
        kind = self.rng.choices(
            ["chat", "stream", "completion", "stop", "sampled", "abandoned", "refused"], [4, 4, 2, 2, 2, 1, 1]
        )[0]
        policy = self.rng.choice(POLICIES)
        talk = self.rng.choice(self.talks)
        self.soak.policies[policy] += 1
        self.soak.outcomes[kind] += 1
        getattr(self, f"_{kind}")(talk, policy)

    def _ask(self, talk: Talk, policy: str, **more: Any) -> Any:
        given = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"policy": policy}} | more
        messages: Any = [{"role": role, "content": text} for role, text in talk]
        return self.api.chat.completions.create(model=self.model, messages=messages, **given)

    def _judge(self, talk: Talk, policy: str, said: str, right: str) -> None:
        if said != right:
            self.soak.wrong.append({"text": whole(talk), "policy": policy, "said": said, "right": right})

    def _chat(self, talk: Talk, policy: str) -> None:
        said = self._ask(talk, policy).choices[0].message.content
        self._judge(talk, policy, said, self.right[whole(talk)])

    def _stream(self, talk: Talk, policy: str) -> None:
        parts = self._ask(talk, policy, stream=True)
        said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        self._judge(talk, policy, said, self.right[whole(talk)])

    def _completion(self, talk: Talk, policy: str) -> None:
        answer = self.api.completions.create(
            model=self.model, prompt=whole(talk), max_tokens=TOKENS, temperature=0, extra_body={"policy": policy}
        )
        self._judge(talk, policy, answer.choices[0].text, self.right[whole(talk)])

    def _stop(self, talk: Talk, policy: str) -> None:
        right = self.right[whole(talk)]
        stop = right[len(right) // 2 :][:2] or "never"
        said = self._ask(talk, policy, stop=stop).choices[0].message.content
        self._judge(talk, policy, said, right.split(stop)[0])

    def _sampled(self, talk: Talk, policy: str) -> None:
        seed = self.rng.randrange(SEEDS)
        said = self._ask(talk, policy, temperature=0.8, top_p=0.95, seed=seed).choices[0].message.content
        self._judge(talk, policy, said, self.sampled.setdefault((whole(talk), seed), said))

    def _abandoned(self, talk: Talk, policy: str) -> None:
        parts = self._ask(talk, policy, stream=True, max_tokens=400)
        next(iter(parts))
        parts.close()

    def _refused(self, talk: Talk, policy: str) -> None:
        bad = self.rng.choice([{"n": 3}, {"temperature": 7}, {"policy": "x.py:A"}, {"messages": []}, {"nonsense": 1}])
        body = {"messages": [{"role": "user", "content": talk[0][1]}], "max_tokens": 3} | bad
        if (status := httpx.post(f"{self.url}/v1/chat/completions", json=body).status_code) != 400:
            self.soak.wrong.append({"refused": bad, "status": status})


def whole(talk: Talk) -> str:
    """The text that the server makes of a conversation for a model without a template."""
    text = ""
    for role, words in talk:
        text += ("" if not text or role == "assistant" else "\n\n") + words
    return text


def state(pid: int) -> tuple[int, int]:
    """Resident bytes and threads of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(lines["VmRSS"].split()[0]) * 1024, int(lines["Threads"])


def start() -> tuple[subprocess.Popen[str], str]:
    """The server, loaded, and its address."""
    words = ["serve", "--port", "0", "--json", "--machine", "rtx4060-laptop", "--policy-in-requests"]
    code = "from moe_spac.executor.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        text += process.stdout.readline()
    url = json.loads(text)["url"]
    while httpx.get(f"{url}/health").status_code != 200:
        time.sleep(0.2)
    return process, url


def settled_threads(pid: int) -> int:
    """Threads of an idle server: the web framework's own come and go at first."""
    time.sleep(1.0)
    return state(pid)[1]


def run(minutes: float, seed: int, prompts: int | None) -> Soak:
    soak = Soak()
    process, url = start()
    try:
        client = Client(url, seed, soak, prompts)
        for policy in POLICIES:  # each once, so that whatever is made once has been made
            client._chat(client.talks[0], policy)
        client._chat(client.talks[0], POLICIES[0])
        soak.threads.append(settled_threads(process.pid))
        begin, last = time.monotonic(), 0.0
        while (now := time.monotonic() - begin) < minutes * 60:
            client.one()
            if now - last >= EVERY_SECONDS or not soak.memory:
                soak.memory.append((now, state(process.pid)[0]))
                last = now
        client._chat(client.talks[0], POLICIES[0])
        soak.threads.append(settled_threads(process.pid))
    finally:
        process.send_signal(signal.SIGINT)
        soak.exit_code = process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
    return soak


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or a server would inherit that a shell ignores it
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, help="use so many of the embedded ones; else all")
    parser.add_argument("--json", type=Path, help="write everything there too")
    given = parser.parse_args()
    if given.json is not None and not given.json.parent.is_dir():
        parser.error(f"--json {given.json}: no such folder")
    soak = run(given.minutes, given.seed, given.prompts)
    slope, grown, mean = soak.growth()
    requests = sum(soak.outcomes.values())
    say(f"{requests} requests in {given.minutes:g} min: {dict(soak.outcomes)}")
    say(f"policies: {dict(soak.policies)}")
    say(f"answers that differ from the reference: {len(soak.wrong)}")
    for wrong in soak.wrong[:5]:
        say(escape(f"  {wrong}"))
    say(f"memory: {mean / 2**20:.1f} MiB, slope {slope * 3600 / 2**20:+.2f} MiB/h, {grown / 2**20:+.2f} MiB in all")
    say(f"threads of the idle server: {soak.threads[0]} before, {soak.threads[-1]} after; exit code {soak.exit_code}")
    if given.json:
        given.json.write_text(json.dumps(vars(soak)))
    flat = grown < 0.01 * mean
    return 0 if not soak.wrong and flat and soak.threads[-1] <= soak.threads[0] and soak.exit_code == 130 else 1


if __name__ == "__main__":
    sys.exit(main())
