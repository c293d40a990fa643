"""Predict one published number: replay the row's placement or cache on its routing, or the plain formula of a copy.

Short replays: a placement by whole layers takes the same time for every token, so 8 tokens are replayed; others take
48 or what their row says, after a prefill step that fills the cache and is not counted.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import simpy

from ..policies.interface import Policy
from ..policies.load import load_policy
from ..traces.errors import InputError
from ..traces.schema import Kind
from ..traces.views import Steps
from .engine import Run, setup_for
from .lanes import Dram
from .machine import Machine, load_machine, rates_for
from .replay import count
from .run import simulate
from .validate_cases import Row, shape_of
from .validate_policies import PLACEMENTS, HalfPinned, Placed, Split, placed
from .validate_routing import (
    PROMPT,
    Router,
    counts_of,
    decoded,
    even,
    given,
    popularity,
    router_of,
    synthetic,
    trace_of,
)

ANY = "rtx4090-pcie4"  # prices for policies that are replayed without a clock and look at none
LAYERS = 12  # that stand for all where hit rates of per-layer caches are counted
STEADY = 8  # tokens of a replay in which every token takes the same time
CHUNK, WINDOW_NS = 4_000_000, 100_000_000  # of the replayed measurements of shared DRAM


def predict(row: Row, machine: Machine) -> float:
    """The row's number on this machine, in the row's unit."""
    if row.what == "copy":
        costs = rates_for(machine, shape_of(row)).costs
        return costs.copy_ns / 1e6
    if row.what.startswith("shared-"):
        return shared(machine)[row.what.removeprefix("shared-")]
    if row.what == "hit":
        return 100 * hit_rate(row)
    run = replayed(row, machine)
    decode = [step for step in run.steps if step.kind is not Kind.PREFILL]
    wall = sum(step.wall_ns for step in decode)
    if row.what == "speed":
        return len(decode) * 1e9 / wall
    waited = sum(step.gpu.get("wait_copy", 0) for step in decode)
    return 100 * waited / wall if row.what == "copy-share" else waited / len(decode) / 1e6


def replayed(row: Row, machine: Machine) -> Run:
    """The row's policy on its routing. InputError if the policy fails."""
    run = simulate(_trace(row), _policy(row, _router(row)), machine, row.slots)
    if run.error is not None:
        raise InputError(f"validation: row {row.id}: {run.error}")
    return run


def hit_rate(row: Row) -> float:
    """By distinct experts, of the row's policy in a replay without a clock; each sequence starts with an empty cache.

    Caches of a layer do not see each other, so that a few layers, evenly spaced, stand for all.
    """
    whole = shape_of(row)
    shape = replace(whole, layers=LAYERS, moe_layers=tuple(range(LAYERS)))
    slots = round(row.slots / len(whole.moe_layers) * LAYERS)
    router, rates = router_of(shape), rates_for(load_machine(ANY), shape)
    hits = needed = 0
    for sequence in range(row.sequences):
        steps = decoded(synthetic(router, row.tokens, first=sequence), 0)
        for sign, part in ((1, steps), (-1, steps[: row.skip])):
            if part:
                policy = _policy(row, router, sequence)
                counted = count(part, policy, setup_for(shape, rates, policy, slots, 0)).decode
                hits += sign * counted.hits
                needed += sign * counted.needed
    return hits / needed


def shared(machine: Machine) -> dict[str, float]:
    """GB/s of CPU and link, and of both, while both read host memory all the time."""
    env = simpy.Environment()
    dram = Dram(env, round(machine["host.bandwidth"]))
    moved = {"cpu": 0, "link": 0}

    def go_on(who: str, ns: int) -> None:
        def landed() -> None:
            moved[who] += CHUNK
            go_on(who, ns)

        dram.flow(CHUNK, ns, landed)

    for who in moved:
        go_on(who, round(CHUNK * 1e9 / machine[f"{who}.bandwidth"]))
    env.run(until=WINDOW_NS)
    rates = {who: size / WINDOW_NS for who, size in moved.items()}
    return rates | {"sum": sum(rates.values())}


@lru_cache(maxsize=2)
def _trace(row: Row) -> Steps:
    shape, router = shape_of(row), _router(row)
    if row.routing == "given":
        rates = rates_for(load_machine(ANY), shape)
        return given(shape, rates, _policy(row, router), row.slots, row.hit / 100, row.tokens, row.context)
    return trace_of(shape, decoded(_ids(row, router), row.context))


def _ids(row: Row, router: Router) -> np.ndarray:
    if row.routing == "any":
        return even(router, STEADY)
    if row.routing == "even":
        return even(router, row.tokens)
    if row.routing != "synthetic":
        raise InputError(f"validation: row {row.id}: routing {row.routing!r} is not any, even, given or synthetic")
    if row.policy == "prompt":
        return synthetic(router, PROMPT + row.tokens)[PROMPT:]
    return synthetic(router, row.tokens, row.sequences)


def _router(row: Row) -> Router:
    return router_of(shape_of(row))


def _policy(row: Row, router: Router, sequence: int = 0) -> Policy:
    """A new policy object for the row: a placement, one of the engines' own, or a shipped one by its name."""
    how, _, mode = row.policy.partition(":")
    if how in PLACEMENTS:
        return Placed(placed(how, row.slots, _counts(row, router)), serial=mode == "serial")
    if how == "split":
        return Split(float(mode))
    if how == "half-pinned":
        return HalfPinned(counts_of(router, synthetic(router, row.tokens, first=sequence)))
    return load_policy(row.policy)


def _counts(row: Row, router: Router) -> np.ndarray:
    """[L, E] uses by which a placement chooses: of other texts, or of the prompt before what is replayed."""
    if row.policy == "prompt":
        return counts_of(router, synthetic(router, PROMPT + row.tokens)[:PROMPT])
    return popularity(router)
