"""Routing for published measurements whose own routing nobody published.

Three kinds, always named beside the result. "any": a placement by whole layers takes the same time for every routing,
so it is drawn evenly. "given": the measured hit rate is part of the row, and routing is drawn against the policy's
own cache so that it comes out. "synthetic": the process of the synthetic Qwen3-30B-A3B traces, stretched to the row's
layers, experts and top-k; then hits are predicted. "even": evenly drawn where it does matter, which is an assumption.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from ..policies.driver import Driver
from ..policies.interface import Key, LayerReport, Policy, StepInfo
from ..traces.schema import Header, Kind, ModelShape, Provenance, Step, id_dtype
from ..traces.synth import load, process_of
from ..traces.synth_process import Chain, Process
from ..traces.views import Steps, View
from .engine import setup_for
from .machine import Rates
from .validate_cases import LIKE

OTHERS, EACH = 8, 64  # sequences of other texts, and their tokens, from which popularity is counted
PROMPT = 256


@dataclass(frozen=True, slots=True)
class Router:
    """What made-up routing depends on: layers, experts, experts per token."""

    layers: int
    experts: int
    top_k: int


def router_of(shape: ModelShape) -> Router:
    return Router(len(shape.moe_layers), shape.experts, shape.top_k)


def trace_of(shape: ModelShape, steps: Sequence[Step]) -> Steps:
    """Steps as a trace that says that it is synthetic."""
    header = Header(shape, Provenance.SYNTHETIC, "drawn for a published measurement; no model was run")
    return View(header, lambda: iter(steps))


def step_of(ids: np.ndarray, position: int, kind: Kind = Kind.DECODE) -> Step:
    """ids: [n, L, k]."""
    n = len(ids)
    positions = np.arange(position, position + n, dtype=np.int32)
    return Step(0, 0, kind, positions, np.full(n, -1, np.int32), np.zeros(n, bool), 0, ids)


def decoded(ids: np.ndarray, context: int) -> list[Step]:
    """One decode step for each token of ids [tokens, L, k]; the first follows `context` others."""
    return [step_of(ids[i : i + 1], context + i) for i in range(len(ids))]


@lru_cache(maxsize=4)
def even(router: Router, tokens: int, seed: int = 0) -> np.ndarray:
    """[tokens, L, k]: every set of experts equally likely."""
    chance = np.random.default_rng(seed).random((tokens, router.layers, router.experts), dtype=np.float32)
    return np.argpartition(chance, router.top_k, axis=-1)[..., : router.top_k].astype(id_dtype(router.experts))


@lru_cache(maxsize=4)
def synthetic(router: Router, tokens: int, sequences: int = 1, first: int = 0) -> np.ndarray:
    """[tokens, L, k] of so many sequences in turn, numbered from `first`."""
    process, domains = _process(router), len(load(LIKE)["domains"])
    parts = np.array_split(np.arange(tokens), sequences)
    chains = [Chain(process, i % domains, 0, first + i) for i in range(sequences)]
    return np.concatenate([chain.advance(len(part))[0] for chain, part in zip(chains, parts, strict=True)])


def _process(router: Router) -> Process:
    """The model's process with its layers repeated or left out evenly, and other numbers of experts."""
    process = process_of(load(LIKE))
    at = np.linspace(0, len(process.popularity) - 1, router.layers).round().astype(int)
    values = {f.name: getattr(process, f.name) for f in fields(process)}
    by_layer = {name: value[at] for name, value in values.items() if isinstance(value, np.ndarray)}
    return replace(process, experts=router.experts, top_k=router.top_k, **by_layer)


def counts_of(router: Router, ids: np.ndarray) -> np.ndarray:
    """[L, E]: how often each expert was chosen in ids [tokens, L, k]."""
    flat = ids + np.arange(router.layers)[:, None] * router.experts
    return np.bincount(flat.reshape(-1), minlength=router.layers * router.experts).reshape(router.layers, -1)


@lru_cache(maxsize=4)
def popularity(router: Router) -> np.ndarray:
    """[L, E] counts over texts that are not the replayed ones."""
    return counts_of(router, synthetic(router, OTHERS * EACH, OTHERS, first=1000))


def given(shape: ModelShape, rates: Rates, policy: Policy, slots: int, hit: float, tokens: int, context: int) -> Steps:
    """Routing in which `policy` with `slots` slots in all finds the share `hit` of its experts resident.

    The policy is replayed without a clock; each layer draws its hits from what is resident at that moment and its
    misses from the rest. A prefill step that is not counted fills a cache that starts empty.
    """
    driver = Driver(policy, setup_for(shape, rates, policy, slots, 0))
    chance = np.random.default_rng(0)
    router, steps = router_of(shape), []
    if not driver.cache.resident:
        filling = _filling(router, slots // router.layers)
        steps.append(step_of(filling, 0, Kind.PREFILL))
        _play(driver, steps[0], lambda layer: filling[:, layer])
    for i in range(tokens):
        ids = np.zeros((1, router.layers, router.top_k), id_dtype(router.experts))
        step = step_of(ids, context + i)

        def choose(layer: int, ids: np.ndarray = ids) -> np.ndarray:
            ids[0, layer] = _draw(driver, layer, router, hit, chance)
            return ids[:, layer]

        _play(driver, step, choose)
        steps.append(step)
    return trace_of(shape, steps)


def _filling(router: Router, slots: int) -> np.ndarray:
    """Tokens that between them need the first `slots` experts of every layer."""
    n = -(-max(slots, router.top_k) // router.top_k)
    ids = np.minimum(np.arange(n * router.top_k), slots - 1).reshape(n, 1, router.top_k)
    ids[-1] = np.arange(slots - router.top_k, slots)
    return np.repeat(ids, router.layers, axis=1).astype(id_dtype(router.experts))


def _draw(driver: Driver, layer: int, router: Router, hit: float, chance: np.random.Generator) -> np.ndarray:
    here = driver.cache_view.residents(layer)
    outside = np.ones(router.experts, bool)
    outside[here] = False
    absent = np.flatnonzero(outside)
    wanted = router.top_k * (1 - hit)
    misses = int(wanted) + int(chance.random() < wanted % 1)
    misses = min(max(misses, router.top_k - len(here)), len(absent))
    picks = (chance.choice(here, router.top_k - misses, False), chance.choice(absent, misses, False))
    return np.sort(np.concatenate(picks))


def _play(driver: Driver, step: Step, choose: Callable[[int], np.ndarray]) -> None:
    """One step without a clock; `choose` gives the experts [n, k] of a layer when its turn comes."""
    driver.step_begins(StepInfo(0, step.kind, step.tokens, step.drafted))
    for layer in range(step.experts.shape[1]):
        plan = driver.gate(layer, choose(layer))
        for expert in plan.copies:
            driver.landed(Key(layer, expert), 0)
        driver.layer_ends(LayerReport(layer, 0, 0, 0, 0, 0))
    driver.step_ends(0, step.kept)
