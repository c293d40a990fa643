"""Measure this machine for one pair of models and write it down as a machine profile.

Everything is measured in place: short runs of the real loop on the real clock with every expert resident, on the GPU
alone, on the CPU tier alone, and with every second expert on the CPU tier. The figures are mapped to the profile's
entries so that `rates_for` gives them back for this pair; for another model the profile is a guess. Memory-bound terms
are left out (bandwidths are written as practically infinite): at these sizes they cannot be told from the fixed ones.
"""

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import ClassVar

import numpy as np
import torch

from ..policies.interface import Demand, Key, Policy, Setup, View, Where
from ..simulator.machine import DEFAULTS, UNITS, Machine, Quantity, rates_for
from ..traces.prompts import encode, read_prompts
from ..traces.schema import Kind
from ..traces.speculate import Options, Speculation
from .models import Models
from .moe import attach
from .session import Live, Settings, make_host
from .store import Arena
from .times import LayerTimes, StepTimes

ENDLESS = 1e18  # bytes/s or FLOP/s of what is not the limit
MANY = 9  # rows of a verify step with a draft of 8
PROMPT = 8 * MANY + 1
TOKENS = 24
WARM_UP = 2  # steps of each kind that are not counted


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """The host-to-device link of a device that does not exist: bytes/s and ns per copy."""

    bandwidth: float = 100e6
    latency_ns: float = 20e3


class Probe(Policy):
    """Everything resident; each `every`th expert of a layer goes to the CPU tier (0: none)."""

    name: ClassVar[str] = "calibration"

    def __init__(self, every: int) -> None:
        self.every = every

    def setup(self, setup: Setup) -> None:
        self._setup = setup

    def placement(self) -> Iterable[Key]:
        return [Key(layer, e) for layer in range(self._setup.layers) for e in range(self._setup.experts)]

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        return [
            (e, Where.CPU if self.every and i % self.every == self.every - 1 else Where.GPU)
            for i, e in enumerate(demand.experts)
        ]


def calibrate(models: Models, link: EmulatedLink | None = None, name: str = "this-machine") -> Machine:
    """A profile of this machine for these models, in a few seconds. On a CPU the link is what `link` says."""
    entries = _blank(models, link or EmulatedLink())
    start = Machine(name, "", entries)
    alone = _observe(models, start)
    drafting = _observe(models, start, draft=True) if models.pair.draft is not None else []
    one = [s for s in alone if s.kind is Kind.DECODE]
    # Where a draft runs in between, caches are colder; so verify steps are taken if there are any.
    many = [s for s in drafting if s.kind is Kind.VERIFY] or [s for s in alone if s.kind is Kind.PREFILL]
    _fit_gpu(models, entries, one, many)
    _fit_cpu(models, start, _observe(models, start, every=1))
    _fit_hybrid(models, start, _observe(models, start, every=2))
    if drafting:
        _fit_draft(models, start, drafting)
    kind = "CUDA device" if models.device.type == "cuda" else "no GPU: slots in RAM stand for its memory"
    return Machine(name, f"{platform.machine()}, {os.cpu_count()} cores; {kind}; for {models.pair.shape.name}", entries)


def _measured(value: float, what: str) -> Quantity:
    return Quantity(max(0.0, float(value)), "measured", what)


def _blank(models: Models, link: EmulatedLink) -> dict[str, Quantity]:
    """Nothing measured yet: no cost anywhere but on the link."""
    unlimited = ("gpu.bandwidth", "gpu.compute", "host.bandwidth", "cpu.bandwidth", "cpu.compute")
    entries = {e: Quantity(ENDLESS if e in unlimited else 0.0, "assumed", "not told from fixed costs") for e in UNITS}
    entries |= {e: Quantity(value, "assumed", source) for e, (value, source) in DEFAULTS.items()}
    entries["gpu.kernels_per_layer"] = Quantity(1.0, "measured", "one unit: all of a layer but its experts")
    shape, draft = models.pair.shape, models.pair.draft_shape
    if models.device.type == "cuda":
        entries["link.bandwidth"] = _measured(_copy_rate(models), "pinned copies of single experts")
        vram = torch.cuda.get_device_properties(models.device).total_memory
        entries["gpu.vram"] = _measured(vram, "the driver")
    else:
        entries["link.bandwidth"] = Quantity(link.bandwidth, "emulated", "--link-bandwidth")
        entries["link.copy_fixed"] = Quantity(link.latency_ns, "emulated", "--link-latency")
        vram = shape.dense_bytes + (draft.dense_bytes if draft else 0) + shape.all_expert_bytes // 2
        entries["gpu.vram"] = Quantity(vram, "emulated", "dense weights, the draft and half of the experts")
    return entries


def _copy_rate(models: Models, copies: int = 32) -> float:
    """Bytes/s of experts copied one after another to a CUDA device."""
    arena = Arena(1, models.store.record, models.device)
    torch.cuda.synchronize(models.device)
    begin = perf_counter_ns()
    for i in range(copies):
        arena.load(0, models.store.flat(Key(0, i % models.store.experts)))
    torch.cuda.synchronize(models.device)
    return copies * models.store.record.size * 1e9 / (perf_counter_ns() - begin)


def _observe(models: Models, machine: Machine, every: int = 0, draft: bool = False) -> list[StepTimes]:
    """Steps of MANY prompt rows and then of one row or, with the draft, of verification; warm-up taken off."""
    ids = [i for p in read_prompts("held-out") for i in encode(models.pair.tokenizer, p)[0]][:PROMPT]
    options = Options(max_new_tokens=TOKENS, draft_length=4, prefill_chunk=MANY)
    shape = models.pair.shape
    everything = len(shape.moe_layers) * shape.experts
    host = make_host(models, Probe(every), Settings(machine, everything, options=options))
    try:
        live = Live(host, models)
        attach(models.experts, live)
        Speculation(models.pair.target, models.pair.draft if draft else None, options, live).generate(ids)
    finally:
        host.close()
    times = [s for s in host.times if isinstance(s, StepTimes)]
    kinds = (Kind.PREFILL, Kind.DECODE, Kind.VERIFY)
    return [step for kind in kinds for step in [s for s in times if s.kind is kind][WARM_UP:]]


def typical(values: Iterable[float]) -> float:
    """Mean without the outer hundredth on either side: speed is a matter of means, so only a freak does not count."""
    ordered = np.sort(np.fromiter(values, float))
    cut = len(ordered) // 100
    return float(ordered[cut : len(ordered) - cut].mean()) if len(ordered) else 0.0


def _line(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Fixed part and slope (ns) of (tokens, ns), from the typical time of each number of tokens.

    Where a disturbance makes the fixed part negative, growth cannot be told and all of it is called fixed.
    """
    flat = typical(ns for _, ns in points), 0.0
    tokens = sorted({n for n, _ in points})
    if len(tokens) < 2:
        return flat
    means = [typical(ns for n, ns in points if n == t) for t in tokens]
    counts = [sum(n == t for n, _ in points) for t in tokens]
    slope, fixed = np.polyfit(tokens, means, 1, w=np.sqrt(counts))
    return (float(fixed), max(0.0, float(slope))) if fixed > 0 else flat


def _layers(steps: Iterable[StepTimes]) -> list[LayerTimes]:
    return [layer for step in steps for layer in step.layers]


def _dense(steps: Sequence[StepTimes]) -> float:
    """Everything of a layer but its experts; the first layer's has the embedding in it."""
    return typical(layer.before for step in steps for layer in step.layers[1:] or step.layers)


def _fit_gpu(models: Models, entries: dict[str, Quantity], one: Sequence[StepTimes], many: Sequence[StepTimes]) -> None:
    """From steps of one row and of many. One compute rate serves the dense part and the experts, so it is taken from
    their sum; the fixed parts take the rest."""
    shape = models.pair.shape
    rows = float(np.mean([s.tokens for s in many]))
    layers = _layers([*one, *many])
    work = [w for layer in layers for w in layer.work]
    dense_slope = max(0.0, (_dense(many) - _dense(one)) / (rows - 1))
    slope = dense_slope + shape.top_k * _line(work)[1]
    if slope > 0:
        unit = rates_for(Machine("", "", entries | {"gpu.compute": Quantity(1e9, "measured", "")}), shape)
        flop = unit.dense_token_ns + shape.top_k * unit.costs.gpu_token_ns  # at 1 FLOP/ns
        entries["gpu.compute"] = _measured(flop / slope * 1e9, f"growth from 1 to {rows:.1f} rows")
    rates = rates_for(Machine("", "", entries), shape)
    fixed = [_dense(group) - n * rates.dense_token_ns for group, n in ((one, 1), (many, rows))]
    entries["gpu.launch"] = _measured(float(np.mean(fixed)), f"a layer without its experts, 1 and {rows:.1f} rows")
    expert = typical(ns - n * rates.costs.gpu_token_ns for n, ns in work)
    entries["gpu.expert_fixed"] = _measured(expert, "experts on the main thread")
    tails = [s.layers[0].before - _dense(group) + s.tail for group in (one, many) for s in group]
    entries["gpu.step_fixed"] = _measured(typical(tails), "embedding, head and loop of a step")
    policy = typical(layer.policy for layer in layers)
    entries["policy.layer"] = _measured(policy, "driver with a policy that decides nothing")


def _fit_cpu(models: Models, machine: Machine, steps: Sequence[StepTimes]) -> None:
    entries, shape = machine.quantities, models.pair.shape
    layers = _layers(steps)
    fixed, slope = _line([w for x in layers for w in x.cpu_work[1:]])
    entries["cpu.expert_fixed"] = _measured(fixed, "experts on the CPU tier's thread")
    if slope > 0:
        unit = rates_for(Machine("", "", entries | {"cpu.compute": Quantity(1e9, "measured", "")}), shape)
        entries["cpu.compute"] = _measured(unit.costs.cpu_token_ns / slope * 1e9, "growth with the rows of an expert")
    costs = rates_for(machine, shape).costs
    first = typical(x.cpu_work[0][1] - costs.cpu_ns(x.cpu_work[0][0]) for x in layers)
    entries["cpu.first_expert"] = _measured(first, "first expert of a layer against the others")


def _fit_hybrid(models: Models, machine: Machine, steps: Sequence[StepTimes]) -> None:
    """What both tiers lose to each other, threads and all: a layer on both against the slower one alone."""
    costs = rates_for(machine, models.pair.shape).costs
    lost = []
    for x in _layers(steps):
        gpu = sum(costs.gpu_ns(n) for n, _ in x.work)
        cpu = sum(costs.cpu_ns(n, first=i == 0) for i, (n, _) in enumerate(x.cpu_work))
        lost.append(x.wall - x.policy - max(gpu, cpu))
    what = "a layer on both tiers against the slower one alone"
    machine.quantities["cpu.hybrid_layer"] = _measured(typical(lost), what)


def _fit_draft(models: Models, machine: Machine, steps: Sequence[StepTimes]) -> None:
    draft = models.pair.draft_shape
    assert draft is not None
    per_token = typical(s.draft / (s.tokens - 1) for s in steps if s.kind is Kind.VERIFY)
    rest = per_token - rates_for(machine, models.pair.shape, draft).draft_token_ns
    machine.quantities["gpu.draft_fixed"] = _measured(rest, "a drafted token beside the launches of its layers")


def with_policy_time(machine: Machine, ns: float) -> Machine:
    """The same machine with the decision time that a run really had."""
    entry = _measured(ns, "mean of the run")
    return replace(machine, quantities={**machine.quantities, "policy.layer": entry})
