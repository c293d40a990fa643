"""The system that `bench_engine` replays, written the obvious way: in SimPy, a process for every transfer and every
expert, a resource for the link and one for the GPU. It shares no code with the simulator but the prices.

Dense work, then the layer's experts: residents at once, each miss when its copy has landed; copies in ascending order.
Least recently used goes, of equals the lowest expert; nothing that the layer needs is evicted.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import simpy

from moe_spac.simulator.machine import Machine, Rates
from moe_spac.traces.schema import Step


def bare(machine: Machine) -> Machine:
    """The same machine without what the reference does not have: costs of a step and of deciding, shared DRAM."""
    without = {"gpu.step_fixed": 0.0, "policy.layer": 0.0, "host.bandwidth": 1e15}
    changed = {entry: replace(machine.quantities[entry], value=value) for entry, value in without.items()}
    return replace(machine, quantities=machine.quantities | changed)


def replay(steps: Sequence[Step], rates: Rates, slots: int) -> tuple[int, int]:
    """(ns in all, misses) of decode steps with `slots` expert slots in each layer."""
    env = simpy.Environment()
    model = Model(env, rates, steps[0].experts.shape[1], slots)
    env.process(model.run(steps))
    env.run()
    return int(env.now), model.misses


class Model:
    def __init__(self, env: simpy.Environment, rates: Rates, layers: int, slots: int) -> None:
        self.env, self.rates, self.slots = env, rates, slots
        self.gpu, self.link = simpy.Resource(env, 1), simpy.Resource(env, 1)
        self.cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(layers)]
        self.misses = 0

    def run(self, steps: Sequence[Step]):
        for step in steps:
            for layer in range(step.experts.shape[1]):
                yield self.env.process(self.dense(len(step), int(step.positions[0])))
                experts, loads = np.unique(step.experts[:, layer], return_counts=True)
                yield from self.layer(layer, dict(zip(experts.tolist(), loads.tolist(), strict=True)))

    def dense(self, tokens: int, context: int):
        with self.gpu.request() as mine:
            yield mine
            yield self.env.timeout(self.rates.dense_ns(tokens, context))

    def layer(self, layer: int, demand: dict[int, int]):
        cached = self.cached[layer]
        missing = [e for e in demand if e not in cached]
        fetches = {e: self.env.process(self.fetch()) for e in missing}
        work = [self.env.process(self.compute(load, None)) for e, load in demand.items() if e not in fetches]
        work += [self.env.process(self.compute(demand[e], fetch)) for e, fetch in fetches.items()]
        yield self.env.all_of(work)
        self.misses += len(missing)
        for expert in demand:
            if expert in cached:
                cached.move_to_end(expert)
        for expert in missing:
            oldest = next(iter(cached), None)
            if len(cached) >= self.slots and oldest is not None and oldest not in demand:
                del cached[oldest]
            if len(cached) < self.slots:
                cached[expert] = None
        for expert in demand:
            if expert in cached:
                cached.move_to_end(expert)

    def fetch(self):
        with self.link.request() as mine:
            yield mine
            yield self.env.timeout(self.rates.costs.copy_ns)

    def compute(self, load: int, fetch: simpy.Process | None):
        if fetch is not None:
            yield fetch
        with self.gpu.request() as mine:
            yield mine
            yield self.env.timeout(self.rates.costs.gpu_ns(load))
