"""What each part of a policy is worth: the same trace with one part switched off, or only one switched on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..policies.load import load_policy
from ..traces.errors import InputError
from .compare import Case, Job, Outcome, run_cases


@dataclass(frozen=True, slots=True)
class Arm:
    """One variant. switches: parameters that differ from the policy as asked for. published: its speed over that of
    the first arm of `Study.base`, as its authors have measured it."""

    name: str
    about: str
    switches: Mapping[str, Any]
    published: float | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """The arms of one policy, the whole policy first. base: the arm that published factors refer to."""

    policy: str
    arms: tuple[Arm, ...]
    source: str
    base: str | None = None


SPAC = Study(
    "moe-spac",
    (
        Arm("full", "as described in the paper, in our reconstruction", {}),
        Arm("no SpecUE", "no utilities: an expert is hot if the last batch used it", {"estimator": "binary"}),
        Arm("no HetWB", "no balancer: the threshold is always tau", {"balance": False}),
        Arm("no async engine", "hot experts are copied when their layer needs them", {"asynchronous": False}),
        Arm("(a) off", "residents drop to key 0 when their layer ends", {"unified": False}),
        Arm("(b) off", "boundaries stay where they are", {"adaptive": False}),
        Arm("(b) by change", "boundaries follow the change of counts", {"calibration": "change"}),
        Arm("(c) off", "as no HetWB", {"balance": False}),
        Arm("(d) off", "the GPU starts when the CPU has finished", {"serial_tiers": True}),
        Arm("(e) off", "requests whose layer has begun are still served", {"discard_late": False}),
        Arm(
            "all off",
            "the released code",
            {
                **{"unified": False, "adaptive": False, "balance": False, "discard_late": False},
                **{"serial_tiers": True, "scale": False},
            },
        ),
    ),
    "arXiv 2603.09983 has an ablation (SpecUE, HetWB); its figures are in no source that we could read",
)
_NONE = {"schedule": False, "prefetch": False, "cache": "fixed"}
HYBRI = Study(
    "hybrimoe",
    (
        Arm("all", "as described in the paper", {}, 1.86),
        Arm("none", "residents chosen by chance stay for ever; misses on the CPU", _NONE),
        Arm("scheduling", "only the three-timeline schedule", _NONE | {"schedule": True}, 1.46),
        Arm("prefetching", "only impact-driven prefetch", _NONE | {"prefetch": True}, 1.15),
        Arm("caching", "only the score-based cache, filled behind the layers", _NONE | {"cache": "mrs"}, 1.38),
        Arm("LRU cache", "all, with LRU for the cache", {"cache": "lru"}),
    ),
    "arXiv 2504.05897: Qwen2-57B-A14B, a quarter of the experts cached, A6000 and 10 cores, decode, no speculation",
    base="none",
)
STUDIES = {study.policy: study for study in (SPAC, HYBRI)}
START = {"hybrimoe": {"start": "random"}}  # as the paper has it; the default starts empty, as for other policies


@dataclass(slots=True)
class Row:
    """One arm and how it ran; ratios of tokens/s. `published` as in `Arm`."""

    arm: Arm
    spec: str
    outcome: Outcome
    to_full: float | None
    to_base: float | None


def study_of(spec: str) -> Study:
    """InputError for a policy without an ablation."""
    name = spec.partition(":")[0]
    if name not in STUDIES:
        raise InputError(f"--policy {spec}: ablate knows the parts of {' and '.join(STUDIES)}")
    return STUDIES[name]


def spec_of(spec: str, arm: Arm) -> str:
    """The arm as a policy to run; its switches win over parameters of `spec`, and those over `START`."""
    name, _, given = spec.partition(":")
    start = _words(START.get(name, {}))
    return with_parameters(f"{name}:{','.join(filter(None, (start, given)))}", arm.switches)


def with_parameters(spec: str, parameters: Mapping[str, Any]) -> str:
    """The policy with these parameters on top of those that `spec` gives: of two values the last counts."""
    if not parameters:
        return spec.removesuffix(":")
    bare = spec.endswith((".py", ":")) or ":" not in spec.rpartition(".py:")[2]
    return f"{spec.removesuffix(':')}{':' if bare else ','}{_words(parameters)}"


def _words(parameters: Mapping[str, Any]) -> str:
    return ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in parameters.items())


def ablate(
    job: Job, spec: str, slots: int, mode: str, jobs: int = 1, progress: Callable[[int], None] | None = None
) -> list[Row]:
    """Run every arm of the policy. InputError for one without an ablation, or for a parameter that it has not."""
    study = study_of(spec)
    specs = {arm.name: spec_of(spec, arm) for arm in study.arms}
    for one in specs.values():
        load_policy(one)
    different = list(dict.fromkeys(specs.values()))
    outcomes = run_cases(job, [Case(one, slots, mode) for one in different], jobs, progress)
    found = dict(zip(different, outcomes, strict=True))
    full = found[specs[study.arms[0].name]].speed
    base = found[specs[study.base]].speed if study.base else 0.0
    return [_row(arm, specs[arm.name], found[specs[arm.name]], full, base) for arm in study.arms]


def _row(arm: Arm, spec: str, outcome: Outcome, full: float, base: float) -> Row:
    speed = outcome.speed
    return Row(arm, spec, outcome, speed / full if full and speed else None, speed / base if base and speed else None)


def document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One flat record an arm, for `--json`."""
    names = ("tokens_per_s", "hit_rate_assignment", "hit_rate_unique", "cpu_share_unique", "h2d_bytes_per_token")
    return [
        {
            "arm": row.arm.name,
            "about": row.arm.about,
            "policy": row.spec,
            "status": row.outcome.status,
            **{name: row.outcome.metrics.get(name) for name in names},
            "ratio_to_full": row.to_full,
            "ratio_to_base": row.to_base,
            "published_ratio_to_base": row.arm.published,
        }
        for row in rows
    ]
