"""Run one policy over a trace on one machine."""

from collections.abc import Callable
from typing import Any

from ..policies.driver import Driver, PolicyError
from ..policies.interface import Policy
from ..traces.views import Steps
from .engine import Engine, Run, future_of, replay_step, setup_for
from .machine import Machine, rates_for


def simulate(
    trace: Steps,
    policy: Policy,
    machine: Machine,
    slots: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    record: list[tuple[Any, ...]] | None = None,
) -> Run:
    """Replay `trace` on `machine` with `slots` expert slots in all. A failing policy gives a run with `error` set."""
    header = trace.header
    shape = header.target
    rates = rates_for(machine, shape, header.draft)
    run = Run(policy.name, slots)
    try:
        setup = setup_for(shape, rates, policy, slots, header.draft_length, seed)
        future = future_of(shape, trace.steps()) if policy.clairvoyant else None
        driver = Driver(policy, setup, future, record)
        engine = Engine(driver, rates, dense_only_layers=shape.layers - len(shape.moe_layers))
        run.steps, run.prefill, run.decode = engine.steps, driver.prefill, driver.decode
        for index, step in enumerate(trace.steps()):
            replay_step(engine, index, step)
            if progress:
                progress(index + 1)
    except PolicyError as error:
        run.error = str(error)
    return run
