"""Count-only replay: the same policies and the same driver, without a clock.

Every copy is complete the moment it is ordered and nothing takes time, so this is the fast path where only hits
matter, and the differential test of the event-level engine. A policy that prices its choices still sees the costs of
`setup`.
"""

from collections.abc import Iterable

import numpy as np

from ..policies.demand import Needed, needed_by_layer
from ..policies.driver import Driver
from ..policies.future import Future
from ..policies.interface import Key, LayerReport, Policy, Setup, StepInfo
from ..traces.schema import Step
from .engine import gate_forecasts, step_info


def count(steps: Iterable[Step], policy: Policy, setup: Setup) -> Driver:
    """Replay with one event a layer and step; the driver that comes back holds the counts.

    PolicyError if the policy gives an illegal answer.
    """
    steps = list(steps)
    future = Future.of(setup.layers, setup.experts, (s.experts for s in steps))
    driver = Driver(policy, setup, future)
    for index, step in enumerate(steps):
        driver.step_begins(step_info(index, step))
        for layer, needed in enumerate(needed_by_layer(step.experts)):
            if step.ahead is not None:
                for forecast in gate_forecasts(layer, step.ahead[:, layer], setup.layers):
                    driver.forecast(forecast)
            weights = None if step.weights is None else step.weights[:, layer]
            scores = None if step.scores is None else step.scores[:, layer]
            _layer(driver, layer, step.experts[:, layer], weights, scores, needed)
        driver.step_ends(step.accepted, step.kept)
    return driver


def count_sequential(steps: Iterable[Step], policy: Policy, setup: Setup) -> Driver:
    """Replay every needed expert as an event of its own, ascending in its layer, as key-value cache simulators do.

    It inflates the misses of recency policies against event-atomic serving and is here only to compare with such tools.
    """
    steps = list(steps)
    accesses = [(s, Key(la, int(e))) for s in steps for la in range(setup.layers) for e in np.unique(s.experts[:, la])]
    future = Future(setup.layers, setup.experts)
    for event, (_, key) in enumerate(accesses):
        future.add(key, event)
    driver = Driver(policy, setup, future)
    for event, (step, key) in enumerate(accesses):
        driver.step_begins(StepInfo(event, step.kind, step.tokens, step.drafted))
        _layer(driver, key.layer, np.array([[key.expert]]))
        driver.step_ends(step.accepted, step.kept)
    return driver


def _layer(
    driver: Driver,
    layer: int,
    ids: np.ndarray,
    weights: np.ndarray | None = None,
    scores: np.ndarray | None = None,
    needed: Needed | None = None,
) -> None:
    plan = driver.gate(layer, ids, weights, scores, needed)
    if driver.hears_landing:
        for expert in plan.copies:
            driver.landed(Key(layer, expert), 0)
    driver.layer_ends(LayerReport(layer, 0, 0, 0, 0, 0) if driver.hears_layers else None)
    while (key := driver.next_fetch()) is not None:
        driver.landed(key, 0)
