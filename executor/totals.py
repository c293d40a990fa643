"""What a server has done since it started, and that in Prometheus' text format.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (0.0.4).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .result import Answer
from .session import Session
from .times import StepTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]
Sample = tuple[Labels, float]


@dataclass(slots=True)
class Experts:
    """One policy's experts: needed and resident when needed (after prefill), computed on the CPU, bytes copied."""

    needed: int = 0
    hits: int = 0
    cpu: int = 0
    copied_bytes: int = 0


@dataclass(slots=True)
class Totals:
    """Sums over all answers. Seconds are of the worker's thread, waits those of the fast device."""

    outcomes: Counter[str] = field(default_factory=Counter)  # answered, failed, abandoned, refused
    tokens: Counter[str] = field(default_factory=Counter)  # prompt, reused, generated, drafted, accepted
    seconds: dict[str, float] = field(default_factory=lambda: {"prompt": 0.0, "generation": 0.0})
    waits: dict[str, float] = field(default_factory=lambda: {"copy": 0.0, "cpu": 0.0})
    experts: dict[str, Experts] = field(default_factory=dict)
    answers: int = 0

    def add(self, answer: Answer, tokens: int, session: Session) -> None:
        """Count one answer of which `tokens` were given out."""
        self.answers += 1
        generation = answer.generation
        self.tokens.update(
            prompt=answer.prompt,
            reused=answer.reused,
            generated=tokens,
            drafted=generation.drafted,
            accepted=generation.accepted,
        )
        self.seconds["prompt"] += answer.prompt_s
        self.seconds["generation"] += answer.seconds - answer.prompt_s
        for cause, seconds in stalls(answer).items():
            self.waits[cause] += seconds
        experts = self.experts.setdefault(answer.policy, Experts())
        experts.needed += answer.decode.needed
        experts.hits += answer.decode.hits
        experts.cpu += answer.decode.cpu + answer.prefill.cpu
        copies = answer.decode.copies + answer.prefill.copies
        experts.copied_bytes += copies * session.models.pair.shape.expert_bytes

    def mean_seconds(self) -> float:
        """Of an answer."""
        return sum(self.seconds.values()) / self.answers if self.answers else 0.0


def stalls(answer: Answer) -> dict[str, float]:
    """Seconds that the fast device waited, by what for."""
    splits = [step.split() for step in answer.times if isinstance(step, StepTimes)]
    return {cause: sum(s[f"wait_{cause}"] for s in splits) / 1e9 for cause in ("copy", "cpu")}


def hit_rate(answer: Answer) -> float | None:
    """Experts resident when needed, of all needed after the prompt."""
    return answer.decode.hits / answer.decode.needed if answer.decode.needed else None


def exposition(totals: Totals, waiting: int, running: bool, places: int, session: Session | None) -> str:
    """The page that Prometheus reads."""
    policies = list(totals.experts.items())  # the worker may add one meanwhile

    def each(count: Callable[[Experts], float]) -> list[Sample]:
        return [({"policy": name}, count(experts)) for name, experts in policies]

    now: list[tuple[str, str, str, Iterable[Sample]]] = [
        ("up", "gauge", "1 once the models are loaded.", [({}, float(session is not None))]),
        ("requests", "counter", "Requests by how they ended.", _by("outcome", totals.outcomes)),
        ("requests_waiting", "gauge", "Requests in the queue.", [({}, waiting)]),
        ("requests_running", "gauge", "Requests that are being answered.", [({}, float(running))]),
        ("queue_places", "gauge", "Places in the queue.", [({}, places)]),
        ("tokens", "counter", "Tokens by kind.", _by("kind", totals.tokens)),
        ("busy_seconds", "counter", "Time spent, by phase.", _by("phase", totals.seconds)),
        ("stall_seconds", "counter", "Time the fast device waited for experts, by cause.", _by("cause", totals.waits)),
        ("experts_needed", "counter", "Experts needed after prompts.", each(lambda x: x.needed)),
        ("expert_hits", "counter", "Of those, resident.", each(lambda x: x.hits)),
        ("experts_on_cpu", "counter", "Experts computed on the CPU.", each(lambda x: x.cpu)),
        ("copied_bytes", "counter", "Expert bytes copied.", each(lambda x: x.copied_bytes)),
        ("hit_rate", "gauge", "Hits of needed, since the start.", each(lambda x: x.hits / max(1, x.needed))),
    ]
    if session is not None:
        layers = len(session.models.pair.shape.moe_layers)
        slots = session.settings.slots
        now.append(("slots_per_layer", "gauge", "Expert slots a layer.", [({}, slots / layers)]))
        now.append(("policy_info", "gauge", "The running policy.", [({"policy": session.policy.name}, 1)]))
    return "".join(_family(*family) for family in now)


def _by(label: str, counts: Mapping[str, float]) -> list[Sample]:
    return [({label: name}, value) for name, value in sorted(dict(counts).items())]


def _family(name: str, kind: str, about: str, samples: Iterable[Sample]) -> str:
    full = f"spac_{name}" + ("_total" if kind == "counter" else "")
    lines = [f"# HELP {full} {about}", f"# TYPE {full} {kind}"]
    for labels, value in samples:
        marks = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{full}{{{marks}}} {value!r}" if marks else f"{full} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
