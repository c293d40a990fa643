"""A policy driven call by call: passes of two tokens, one of them drafted, layers served as the test says."""

from collections.abc import Sequence

import numpy as np
from policy_loop import make_setup

from moe_spac.policies.driver import Driver, Plan
from moe_spac.policies.future import Future
from moe_spac.policies.interface import Key, LayerReport, Policy, StepInfo
from moe_spac.traces.schema import Kind


def begin(
    policy: Policy, layers: int, experts: int, slots: int, draft: int = 3, routing: Sequence[np.ndarray] = ()
) -> Driver:
    """The first pass has begun; `routing` is the future, [n, L, k] a step."""
    setup = make_setup(policy, layers, experts, slots, 1, draft_length=draft)
    driver = Driver(policy, setup, Future.of(layers, experts, routing))
    driver.step_begins(info(0))
    return driver


def info(index: int, kind: Kind = Kind.VERIFY) -> StepInfo:
    return StepInfo(index, kind, np.zeros(2, np.int32), np.array([False, True]))


def serve(driver: Driver, layer: int, *experts: int, wall: int = 0) -> Plan:
    """One layer from its gate to its end, in `wall` ns."""
    plan = driver.gate(layer, np.array([experts]))
    for expert in plan.copies:
        driver.landed(Key(layer, expert), 100_000)
    driver.layer_ends(LayerReport(layer, wall, 0, 0, 0, 0))
    return plan
