"""Run one policy over a trace on one machine."""

from collections.abc import Callable
from typing import Any

from ..policies.driver import Driver, PolicyError
from ..policies.interface import Policy
from ..traces.redraft import drafted
from ..traces.views import Steps
from .engine import Engine, Run, future_of, replay_step, setup_for, shares
from .machine import Machine, rates_for


def simulate(
    trace: Steps,
    policy: Policy,
    machine: Machine,
    slots: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    record: list[tuple[Any, ...]] | None = None,
    protect: bool = False,
    slots_at: Callable[[int], int] | None = None,
    engine_of: Callable[..., Engine] = Engine,
) -> Run:
    """Replay `trace` on `machine` with `slots` expert slots in all. A failing policy gives a run with `error` set.

    protect: prefill leaves the cache as it is. slots_at: slots in all that are left beside the keys and values of so
    many tokens; never more than `slots` are used. A policy that chooses draft lengths has the text cut accordingly,
    up to the trace's own draft length.
    """
    header = trace.header
    shape = header.target
    rates = rates_for(machine, shape, header.draft)
    run = Run(policy.name, slots, slots_seen=(slots, slots))

    def shrunk(context: int) -> tuple[int, ...]:
        assert slots_at is not None
        now = min(slots, slots_at(context))
        run.slots_seen = min(run.slots_seen[0], now), run.slots_seen[1]
        return shares(now, len(shape.moe_layers), policy)

    try:
        setup = setup_for(shape, rates, policy, slots, header.draft_length, seed)
        future = future_of(shape, trace.steps()) if policy.clairvoyant else None
        driver = Driver(policy, setup, future, record, protect)
        dense_only = shape.layers - len(shape.moe_layers)
        engine = engine_of(driver, rates, dense_only, slots_at=shrunk if slots_at else None)
        run.steps, run.prefill, run.decode = engine.steps, driver.prefill, driver.decode
        steps = trace.steps()
        if driver.drafts and header.acceptance != "none":
            steps = drafted(trace, driver.draft_length, header.draft_length, seed)
        for index, step in enumerate(steps):
            replay_step(engine, index, step)
            if progress:
                progress(index + 1)
        run.layers = engine.layers
    except PolicyError as error:
        run.error = str(error)
    return run
