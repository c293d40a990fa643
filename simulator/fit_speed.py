"""The speed that `fit` expects: `compare.run_case` on a few tokens, as `spac-sim run` does it on a trace (O27)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np

from ..policies.load import load_policy
from ..traces.errors import InputError
from ..traces.redraft import windowed
from ..traces.schema import DraftShape, Header, Kind, ModelShape, Provenance, Step
from ..traces.views import Steps, View
from .compare import AR, SD, Case, Job, Outcome, Source, loads_for, run_case, verdicts
from .fit import Plan, plan
from .machine import Machine
from .metrics import BOTTLENECKS, Limited
from .ranges import HIGH, LOW, Profile
from .verdict import Verdict, expected_tokens

SAME = -1.0
LAYER_EVENTS = 576  # of decoding in a sample: what all policies replay in about a second
PROMPT = 16  # tokens before the first decoded one: the caches are empty before these, and not warm after them


@dataclass(frozen=True, slots=True)
class Sample:
    """A few tokens of routing to time a plan with, and where they come from, in words; `acceptance`: of drafted
    tokens, where it is assumed."""

    trace: Steps
    words: str
    acceptance: float | None

    @property
    def unions(self) -> dict[int, float]:
        """Mean distinct experts of a layer that this routing needs, by rows of a step; decode and verify steps."""
        sums: dict[int, list[int]] = {}
        for step in self.trace.steps():
            if step.kind is not Kind.PREFILL:
                needed = sums.setdefault(len(step), [])
                needed += [len(np.unique(layer)) for layer in np.moveaxis(step.experts, 1, 0)]
        return {rows: sum(needed) / len(needed) for rows, needed in sorted(sums.items())}


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens/s of one policy in one mode: with the profile's values, and with its uncertain entries at either end.

    `run` is what `spac-sim run` measures on the same steps. Where acceptance is assumed, the few verify steps of a
    sample accept more or less than that by chance; the other three are then corrected to what is assumed, by the
    expected tokens of a step over the sample's. `middle` and `run` are None for a card that nobody measured: what is
    not known to a point is not shown as one.
    """

    policy: str
    mode: str
    slots_per_layer: float
    status: str
    low: float | None
    middle: float | None
    high: float | None
    run: float | None
    hit_rate: float | None
    bottleneck: str | None


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a draft is assumed to work: tokens at a time, and the chance of each to be accepted."""

    length: int = 4
    acceptance: float = 0.7


def enough_tokens(p: Plan) -> int:
    """Tokens of a sample that keeps `fit` instant: 12 of a model with 48 MoE layers, fewer of a deeper one."""
    return max(4, LAYER_EVENTS // p.wanted.layers)


def synthetic_sample(p: Plan, tokens: int, seed: int, drafting: Drafting) -> Sample:
    """Routing of the plan's own model by its published statistics, or of the nearest model that these are known of."""
    from ..traces.synth import synthesize

    shape, draft = p.wanted.shape, p.wanted.draft_shape
    like = _nearest(shape)
    if _distance(shape, like) == SAME:
        given = {"draft_length": drafting.length, "acceptance": drafting.acceptance} if draft else {}
        trace = synthesize(like, tokens, seed, sequences=1, prefill=PROMPT, **given)
        words = f"synthetic routing by the published statistics of {like}"
    else:
        trace = _borrowed(shape, like, tokens, seed)
        trace = windowed(trace, drafting.length, drafting.acceptance, seed, draft) if draft else trace
        words = f"synthetic routing: {like}'s statistics, the nearest that are known, carried over to this shape"
    moved = _moved(_fitted(trace, shape, draft), p.wanted.context)
    words += f", {tokens} tokens after {PROMPT} of prompt at the end of the context, seed {seed}"
    return Sample(moved, words + (f"; {_assumed(drafting)}" if draft else ""), drafting.acceptance if draft else None)


def traced_sample(trace: Steps, name: str, p: Plan, steps: int, drafting: Drafting, seed: int) -> Sample:
    """The first `steps` steps of a trace, priced with the plan's sizes. InputError if it is of another shape."""
    own, shape, draft = trace.header.target, p.wanted.shape, p.wanted.draft_shape
    sides = [(len(s.moe_layers), s.experts, s.top_k) for s in (own, shape)]
    if sides[0] != sides[1]:
        have, need = ("{} layers of {} experts, top-{}".format(*side) for side in sides)
        raise InputError(f"--trace {name}: routing of {have}, but {shape.name} has {need}; give a trace of this model")
    limited = Limited(trace, steps)
    words, assumed = f"{trace.header.provenance} trace {name}, first {steps} steps", None
    if draft and trace.header.acceptance == "none":
        limited = windowed(limited, drafting.length, drafting.acceptance, seed, draft)
        words, assumed = f"{words}; {_assumed(drafting)}", drafting.acceptance
    elif trace.header.acceptance != "none" and not draft:
        raise InputError(f"--trace {name}: it has drafts; name the draft that is to fit with --draft")
    return Sample(_fitted(limited, shape, draft), words, assumed)


def speeds(
    p: Plan,
    profile: Profile,
    sample: Sample,
    policies: Sequence[str],
    seed: int = 0,
    tell: Callable[[str, int, int], None] | None = None,
) -> tuple[list[Speed], list[str]]:
    """Every policy without and (if there is a draft) with speculation, and what that says of speculation.

    Without, the draft's place on the card has slots too (O37), and a policy with one pool for all layers has what its
    staging leaves: every policy gets the same memory, as by `spac-sim run --vram` where it is run alone.
    `tell` is told the policy and mode of each group of runs, how many are done, and of how many.
    """
    source = Source(sample.trace)
    modes = [AR, SD] if source.speculates else [AR]
    loads = loads_for(source, modes)
    machines = _at(p, profile, LOW), p.machine, _at(p, profile, HIGH)
    names = dict.fromkeys(policies)
    cases = [Case(name, _slots(p, name, mode), mode, size=p.slots) for name in names for mode in modes]
    rows, middle = [], []
    for done, case in enumerate(cases):
        if tell:
            tell(f"{case.policy}, {case.mode}", done, len(cases))
        ends = [run_case(Job(source, machine, loads, seed), case) for machine in machines]
        middle.append(ends[1])
        rows.append(_speed(ends, profile.calibrated, sample.acceptance, p.wanted.layers))
    return rows, [v.words() for v in _verdicts(middle, sample.acceptance)]


def _slots(p: Plan, policy: str, mode: str) -> int:
    """What the card holds for a policy of that scope, in one mode."""
    draft = p.wanted.draft if mode == SD else None
    return plan(replace(p.wanted, draft=draft, pooled=load_policy(policy).scope == "global"), p.machine).slots


def _verdicts(outcomes: Sequence[Outcome], assumed: float | None) -> list[Verdict]:
    """Whether speculation pays, at the assumed acceptance where it is not a measured one."""
    found = verdicts(outcomes)
    if assumed is None:
        return found
    corrected = []
    drafted = {o.policy: o.metrics.get("drafted_per_verify") for o in outcomes if o.mode == SD}
    for v in found:
        tokens = expected_tokens(assumed, drafted[v.policy] or 0.0)
        gain = v.speedup * tokens / v.tokens_per_verify
        corrected.append(replace(v, pays=gain > 1, speedup=gain, tokens_per_verify=tokens, acceptance=None))
    return corrected


def _at(p: Plan, profile: Profile, side: int) -> Machine:
    """The profile's slow or fast end, with the plan's pins."""
    end = profile.at(side)
    pins = {"host.pin_limit": p.machine.quantities["host.pin_limit"]}
    return replace(end, quantities={**end.quantities, **pins})


def _speed(ends: Sequence[Outcome], calibrated: bool, assumed: float | None, layers: int) -> Speed:
    raw = [None if o.failed else o.metrics["tokens_per_s"] for o in ends]
    own = ends[1].metrics
    factor = 1.0
    if assumed is not None and own.get("verify_steps"):
        factor = expected_tokens(assumed, own["drafted_per_verify"]) / own["tokens_per_verify"]
    known = [r * factor for r in raw if r is not None]
    return Speed(
        policy=ends[1].policy,
        mode=ends[1].mode,
        slots_per_layer=ends[1].slots / layers,
        status=ends[1].status,
        low=min(known, default=None),
        middle=raw[1] * factor if calibrated and raw[1] is not None else None,
        high=max(known, default=None),
        run=raw[1] if calibrated else None,
        hit_rate=own.get("hit_rate_unique"),
        bottleneck=BOTTLENECKS.get(str(own.get("bottleneck"))),
    )


def _assumed(drafting: Drafting) -> str:
    return (
        f"assumed: {drafting.length} tokens drafted at a time, each accepted with a chance of {drafting.acceptance:g}"
    )


def _nearest(shape: ModelShape) -> str:
    """The model with known statistics that is this one, else the one whose experts are as many times top-k as here."""
    from ..traces.synth import models

    return min(models(), key=lambda like: (_distance(shape, like), like))


def _distance(shape: ModelShape, like: str) -> float:
    """`SAME` where name and shape are those of `like`, else how far the ratios of experts to top-k are apart."""
    from ..traces.synth import model_shape

    known = model_shape(like)
    sides = [(s.moe_layers, s.experts, s.top_k, s.hidden) for s in (shape, known)]
    if sides[0] == sides[1]:
        return SAME
    return abs(float(np.log(shape.experts * known.top_k / (shape.top_k * known.experts))))


def _borrowed(shape: ModelShape, like: str, tokens: int, seed: int) -> Steps:
    """Routing of another model's statistics with this one's experts, top-k and layers (taken at the same depth)."""
    from ..traces.synth import Chain, load, process_of

    known, layers = load(like), len(shape.moe_layers)
    parts = {name: _resampled(values, layers) for name, values in known["parameters"].items()}
    process = process_of({**known, "experts": shape.experts, "top_k": shape.top_k, "parameters": parts})
    header = Header(
        target=shape,
        provenance=Provenance.SYNTHETIC,
        source=f"generated by moe-spac fit from the statistics of {like}: no model was run",
        sequences=({"name": "fit/0", "domain": known["domains"][0], "prompt_tokens": PROMPT},),
        tools={"moe-spac": version("moe-spac")},
    )

    def steps() -> Iterator[Step]:
        experts, _ = Chain(process, 0, seed, 0).advance(PROMPT + tokens)
        yield _step(Kind.PREFILL, 0, experts[:PROMPT])
        yield from (_step(Kind.DECODE, i, experts[i : i + 1]) for i in range(PROMPT, PROMPT + tokens))

    return View(header, steps)


def _resampled(values: Any, layers: int) -> Any:
    if not isinstance(values, list):
        return values
    return np.interp(np.linspace(0, 1, layers), np.linspace(0, 1, len(values)), values).tolist()


def _step(kind: Kind, position: int, experts: np.ndarray) -> Step:
    n = len(experts)
    positions = np.arange(position, position + n, dtype=np.int32)
    return Step(0, 0, kind, positions, np.full(n, -1, np.int32), np.zeros(n, bool), 0, experts)


def _fitted(trace: Steps, shape: ModelShape, draft: DraftShape | None) -> Steps:
    """The same routing with the sizes of the plan; generated once and kept, it being short."""
    header = replace(trace.header, target=shape, draft=draft)
    kept = list(trace.steps())
    return View(header, lambda: iter(kept))


def _moved(trace: Steps, context: int) -> Steps:
    """The same steps at the end of a context of so many tokens, where attention reads the most."""
    kept = list(trace.steps())
    by = max(0, context - 1 - max(int(s.positions[-1]) for s in kept))
    moved = [replace(s, positions=s.positions + np.int32(by)) for s in kept]
    return View(trace.header, lambda: iter(moved))
