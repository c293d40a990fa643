"""Speed of prompt processing and of generation under several policies, in the form of llama-bench.

Every policy gets the same sequences in the same order in one session of its own: a warm-up that is not counted, the
prompt sizes (pp), then the prompts, generated (tg), all of it `repetitions` times. The routing is recorded, and the
simulator is asked what it would have said, so that every row has its prediction.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..policies.driver import Counters
from ..policies.interface import Policy
from ..simulator.run import simulate
from ..simulator.steptimes import StepTime
from ..traces.errors import InputError
from ..traces.prompts import Prompt, encode
from ..traces.reader import open_trace
from ..traces.recorder import make_header
from ..traces.schema import Kind
from ..traces.writer import TraceWriter
from .models import Models
from .predict import priced_by_run
from .result import Answer
from .session import Session, Settings, lookahead_of
from .times import StepTimes, exposed

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompt sizes (tokens) to process, prompts (token ids) to generate `new_tokens` from each, and how often."""

    sizes: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    repetitions: int

    def sequences(self) -> list["Text"]:
        """All of it in order; the warm-up first."""
        text = [i for ids in self.prompts for i in ids]
        round_ = [Text(f"pp{size}", _long(text, size), 1) for size in self.sizes]
        if self.new_tokens:
            round_ += [Text(f"tg{self.new_tokens}", ids, self.new_tokens) for ids in self.prompts]
        return [replace(round_[-1], test="warm-up"), *(s for _ in range(self.repetitions) for s in round_)]


@dataclass(frozen=True, slots=True)
class Text:
    """One text: the test that it belongs to, its prompt and how many tokens to generate."""

    test: str
    ids: tuple[int, ...]
    new_tokens: int


@dataclass(slots=True)
class Timed:
    """One answered sequence, and the simulator's steps for it."""

    test: str
    answer: Answer
    steps: list[StepTimes]
    simulated: list[StepTime] = field(default_factory=list)

    def speed(self, steps: Sequence[StepTimes | StepTime]) -> float:
        """Prompt tokens a second for pp, output tokens a second for tg, from `steps` (measured or simulated)."""
        if self.test.startswith("pp"):
            chosen = [s for s in steps if s.kind is Kind.PREFILL]
            tokens = sum(s.tokens for s in chosen)
        else:
            chosen = [s for s in steps if s.kind is not Kind.PREFILL]
            tokens = len(self.answer.generation.tokens)
        ns = sum(s.wall_ns for s in chosen)
        if any(isinstance(s, StepTimes) for s in chosen) and not self.test.startswith("pp"):
            ns -= round(self.answer.generation.seconds.get("draft_prefill", 0.0) * 1e9)
        return tokens * 1e9 / ns if ns > 0 else 0.0


def bench(
    models: Models,
    policy: Policy,
    again: Callable[[], Policy],
    settings: Settings,
    plan: Plan,
    trace: Path,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> list[Timed]:
    """All sequences of `plan` under one policy, warm-up left out; the routing goes to `trace`.

    `again` makes a fresh object of the policy, for the simulation. `tell`: sequences done, of how many.
    """
    sequences = plan.sequences()
    names = [Prompt(f"{i}-{s.test}", "bench", ("",)) for i, s in enumerate(sequences)]
    lookahead = lookahead_of(policy)
    turns = [[list(s.ids)] for s in sequences]
    header = make_header(models.pair, names, turns, settings.options, "spac-exec bench", False, lookahead)
    found = []
    with TraceWriter(trace, header) as writer, Session(models, policy, settings, writer.append) as session:
        for index, one in enumerate(sequences):
            session.sequence = index
            session.begin(replace(settings.options, max_new_tokens=one.new_tokens))
            answer = session.extend(one.ids)
            found.append(Timed(one.test, answer, [s for s in answer.times if isinstance(s, StepTimes)]))
            tell(index + 1, len(sequences))
    _simulate(found, again(), settings, trace)
    return found[1:]


def _simulate(found: Sequence[Timed], policy: Policy, settings: Settings, trace: Path) -> None:
    """Give every sequence the simulator's steps; the decision time charged is the mean of all measured ones."""
    machine = priced_by_run(settings.machine, [s for one in found for s in one.steps])
    run = simulate(open_trace(trace), policy, machine, settings.slots, settings.seed)
    if run.error:
        raise InputError(run.error)
    steps: Iterator[StepTime] = iter(run.steps)
    for one in found:
        one.simulated = list(islice(steps, len(one.steps)))


def rows(found: Sequence[Timed], expert_bytes: int) -> list[dict[str, Any]]:
    """One row a test: speed with mean and deviation over the repetitions, prediction, and for tg what it went to."""
    return [
        _row(test, [t for t in found if t.test == test], expert_bytes) for test in dict.fromkeys(t.test for t in found)
    ]


def _row(test: str, same: Sequence[Timed], expert_bytes: int) -> dict[str, Any]:
    speeds = [t.speed(t.steps) for t in same]
    said = [t.speed(t.simulated) for t in same]
    row: dict[str, Any] = {
        "test": test,
        "samples": len(speeds),
        "tokens_per_s": statistics.fmean(speeds),
        "deviation": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "predicted": statistics.fmean(said),
        "error": statistics.fmean(said) / statistics.fmean(speeds) - 1 if min(speeds) > 0 else None,
    }
    return row if test.startswith("pp") else row | _generation(same, expert_bytes)


def _generation(same: Sequence[Timed], expert_bytes: int) -> dict[str, Any]:
    count = sum((t.answer.decode for t in same), Counters())
    tokens = sum(len(t.answer.generation.tokens) for t in same)
    steps = [s for t in same for s in t.steps if s.kind is not Kind.PREFILL]
    splits = [s.split() for s in steps]
    gaps = np.array([ms for t in same for ms in token_gaps(t)])
    drafted = sum(t.answer.generation.drafted for t in same)
    accepted = sum(t.answer.generation.accepted for t in same)
    return {
        "ttft_ms": statistics.fmean(first_token_ms(t) for t in same),
        **{f"tpot_ms_p{p}": float(np.percentile(gaps, p)) if len(gaps) else None for p in PERCENTILES},
        "draft_n": drafted,
        "draft_n_accepted": accepted,
        "acceptance": accepted / drafted if drafted else None,
        "hit_rate": count.hits / count.needed if count.needed else None,
        "experts_on_cpu": count.cpu / count.needed if count.needed else None,
        "bytes_per_token": count.copies * expert_bytes / max(1, tokens),
        "stall_copy_ms": sum(s["wait_copy"] for s in splits) / 1e6 / max(1, tokens),
        "stall_cpu_ms": sum(s["wait_cpu"] for s in splits) / 1e6 / max(1, tokens),
        "decide_ms": sum(s["policy"] for s in splits) / 1e6 / max(1, tokens),
        **exposed(steps),
    }


def first_token_ms(one: Timed) -> float:
    """Time to first token: reading the prompt, by both models, and the first step."""
    first = next((s.wall_ns for s in one.steps if s.kind is not Kind.PREFILL), 0) / 1e6
    read = sum(s.wall_ns for s in one.steps if s.kind is Kind.PREFILL) / 1e6
    return read + first  # the draft reads the prompt as part of the first step's drafting


def token_gaps(one: Timed) -> list[float]:
    """ms an output token, one value a token after the first step: a step's tokens come together, and share its time."""
    steps = [s for s in one.steps if s.kind is not Kind.PREFILL]
    emitted = [s.emitted for s in one.simulated if s.kind is not Kind.PREFILL]
    return [
        s.wall_ns / 1e6 / n for s, n in islice(zip(steps, emitted, strict=True), 1, None) for _ in range(n) if n > 0
    ]


def plan_of(models: Models, prompts: Sequence[Prompt], sizes: Sequence[int], new_tokens: int, repetitions: int) -> Plan:
    """InputError: a size of less than two tokens, or nothing to run."""
    if any(size < 2 for size in sizes):
        raise InputError(f"-p {min(sizes)}: give prompt sizes of at least 2 tokens")
    if not sizes and new_tokens == 0:
        raise InputError("-p and -n: nothing to run; give a prompt size or a number of tokens")
    ids = tuple(tuple(encode(models.pair.tokenizer, prompt)[0]) for prompt in prompts)
    return Plan(tuple(sizes), ids, new_tokens, repetitions)


def _long(text: Sequence[int], size: int) -> tuple[int, ...]:
    """The first `size` tokens of a text that is repeated as often as it takes."""
    return tuple(text[i % len(text)] for i in range(size))
