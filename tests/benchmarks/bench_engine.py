"""How fast the simulator is and where its time goes; prints ratios, asserts only that equal models agree.

    python tests/benchmarks/bench_engine.py [--quick] [--only PARTS]

Times are CPU seconds of this process, the best of several repeats, so that other work on the machine matters little;
ratios are steadier than rates. The trace is synthetic: 48 layers, 128 experts, top-8.
"""

import argparse
import cProfile
import gc
import pstats
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reference

from moe_spac.policies.balancer import best_threshold
from moe_spac.policies.load import load_policy, policy_names
from moe_spac.simulator.counting import count_fast
from moe_spac.simulator.engine import setup_for
from moe_spac.simulator.machine import Machine, load_machine, rates_for
from moe_spac.simulator.planning import planning as measure_planning
from moe_spac.simulator.planning import planning_trace
from moe_spac.simulator.replay import count
from moe_spac.simulator.run import simulate
from moe_spac.simulator.signs import Held
from moe_spac.traces.console import say, show_table
from moe_spac.traces.reader import open_trace
from moe_spac.traces.synth import synthesize
from moe_spac.traces.views import Steps
from moe_spac.traces.writer import TraceWriter

MODEL, MACHINE, POLICY = "qwen3-30b-a3b", "rtx4090-pcie4", "ar-lru"
SLOTS = 32  # a layer
TARGETS = {"reference": 2.5, "tokens_per_s": 900, "linear": (9, 11), "counting": 10, "balancer_us": 30}


def first(trace: Held, steps: int) -> Held:
    return Held(trace.header, trace.listed[:steps])


@dataclass(frozen=True)
class Sizes:
    """Tokens of each part, and repeats."""

    engine: int
    reference: int
    short: int
    planned: int
    repeats: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a 20-second version")
    parser.add_argument("--only", default="abcde", help="which parts, e.g. ac")
    parser.add_argument("--tokens", type=int, help="of every part, each once: does all of it run?")
    given = parser.parse_args()
    sizes = Sizes(200, 40, 40, 16, 2) if given.quick else Sizes(1000, 200, 400, 100, 5)
    if given.tokens:
        sizes = Sizes(*4 * [given.tokens], repeats=1)
    machine = load_machine(MACHINE)
    trace = Held.of(synthesize(MODEL, 10 * sizes.short if "b" in given.only else sizes.engine))
    parts: dict[str, Callable[[], None]] = {
        "a": lambda: against_processes(trace, machine, sizes),
        "b": lambda: linearity(trace, machine, sizes),
        "c": lambda: counting(first(trace, sizes.engine), machine, sizes),
        "d": lambda: planning(machine, sizes),
        "e": lambda: profile(first(trace, sizes.engine), machine),
    }
    for part, measure in parts.items():
        if part in given.only:
            measure()


def cpu_seconds(repeats: int, *works: Callable[[], Any]) -> list[tuple[float, Any]]:
    """For each work its best time of several and its last result. They take turns, so that a slow spell meets all."""
    best, results = [float("inf")] * len(works), [None] * len(works)
    for _ in range(repeats):
        for i, work in enumerate(works):
            gc.collect()
            begin = time.process_time()
            results[i] = work()
            best[i] = min(best[i], time.process_time() - begin)
    return list(zip(best, results, strict=True))


def slots_of(trace: Steps) -> int:
    return SLOTS * len(trace.header.target.moe_layers)


def replayed(trace: Steps, machine: Machine, policy: str = POLICY):
    run = simulate(trace, load_policy(policy), machine, slots_of(trace))
    assert run.error is None, run.error
    return run


# (a)


def against_processes(trace: Held, machine: Machine, sizes: Sizes) -> None:
    """Rate of the event-level engine over that of the reference, on one and the same system."""
    part, system = first(trace, sizes.reference), reference.bare(machine)
    rates = rates_for(system, trace.header.target)
    (theirs, (ns, misses)), (ours, run) = cpu_seconds(
        sizes.repeats, lambda: reference.replay(part.listed, rates, SLOTS), lambda: replayed(part, system)
    )
    found = sum(step.wall_ns for step in run.steps), run.decode.needed - run.decode.hits
    assert found == (ns, misses), f"the models disagree: {found} ns and misses, the reference says {(ns, misses)}"
    whole = first(trace, sizes.engine)
    [(taken, _)] = cpu_seconds(sizes.repeats, lambda: replayed(whole, machine))
    tokens, asked = len(part.listed), TARGETS
    say(f"(a) event level, {POLICY}, {SLOTS} slots a layer: {len(whole.listed) / taken:.0f} tokens/s on {MACHINE} "
        f"(target {asked['tokens_per_s']})")  # fmt: skip
    say(f"    against a process for every transfer and expert: {theirs / ours:.2f}x (target {asked['reference']}x), "
        f"{tokens / ours:.0f} and {tokens / theirs:.0f} tokens/s; both end at {ns} ns, {misses} misses")  # fmt: skip


# (b)


def linearity(trace: Held, machine: Machine, sizes: Sizes) -> None:
    """Time and memory of a trace ten times as long. Memory is read from files, a batch at a time."""
    short = first(trace, sizes.short)
    (once, _), (tenfold, _) = cpu_seconds(
        sizes.repeats, lambda: replayed(short, machine), lambda: replayed(trace, machine)
    )
    low, high = TARGETS["linear"]
    say(f"(b) {len(trace.listed)} tokens take {tenfold / once:.1f}x the time of {len(short.listed)} "
        f"(target {low} to {high})")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        peaks = [peak_bytes(write(part, Path(folder) / f"{i}.spac"), machine) for i, part in enumerate((short, trace))]
    more = (peaks[1] - peaks[0]) / (len(trace.listed) - len(short.listed))
    say(f"    peak memory {peaks[0] / 1e6:.1f} and {peaks[1] / 1e6:.1f} MB: {more:.0f} bytes more for each step, "
        "which is the times that a run keeps of it")  # fmt: skip


def write(trace: Held, path: Path) -> Path:
    with TraceWriter(path, trace.header) as writer:
        for step in trace.listed:
            writer.append(step)
    return path


def peak_bytes(path: Path, machine: Machine) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        replayed(open_trace(path), machine)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# (c)


def counting(trace: Held, machine: Machine, sizes: Sizes) -> None:
    """Rates of the two count-only modes over the event-level one; all three find the same misses."""
    slots, shape = slots_of(trace), trace.header.target

    def driven():
        policy = load_policy(POLICY)
        return count(trace.listed, policy, setup_for(shape, rates_for(machine, shape), policy, slots, 0))

    (events, run), (fast, counts), (driver_only, driver) = cpu_seconds(
        sizes.repeats, lambda: replayed(trace, machine), lambda: count_fast(trace, POLICY, slots), driven
    )
    misses = run.decode.needed - run.decode.hits
    assert misses == counts.in_decode(counts.misses) == driver.decode.needed - driver.decode.hits
    say(f"(c) count-only: {events / fast:.1f}x the event level (target {TARGETS['counting']}x), "
        f"{len(trace.listed) / fast:.0f} tokens/s; the driver without a clock: {events / driver_only:.1f}x; "
        f"{misses} misses in all three")  # fmt: skip


# (d)


def planning(machine: Machine, sizes: Sizes) -> None:
    """What every policy needs to decide, in us for one layer of a verify step, and the balancer alone."""
    trace = Held.of(planning_trace(sizes.planned))
    found = measure_planning(sorted(policy_names()), trace, machine, slots_of(trace), min(sizes.repeats, 2))
    rows = [{"policy": f.policy, "us": None if f.total is None else f"{f.total:.1f}"} for f in found]
    show_table(f"(d) us a layer inside each policy; {len(trace.listed)} verify steps, {SLOTS} slots a layer", rows)
    each = balancer_us(trace, machine, sizes)
    say(f"    the moe-spac balancer alone, 128 experts: {each:.1f} us a layer (target under {TARGETS['balancer_us']})")


def balancer_us(trace: Held, machine: Machine, sizes: Sizes) -> float:
    """`best_threshold` on random utilities 0..8 of 128 experts, a quarter of them resident."""
    rates = rates_for(machine, trace.header.target)
    experts = trace.header.target.experts
    rng = np.random.default_rng(0)
    utilities = [np.minimum(rng.poisson(1.0, experts), 8) for _ in range(500)]
    absent = rng.random(experts) >= 0.25
    gpu_ns, cpu_ns = (np.full(experts, float(ns)) for ns in (rates.costs.gpu_ns(2), rates.costs.cpu_ns(2)))
    budget = 20.0 * rates.costs.copy_ns

    def balance() -> None:
        for utility in utilities:
            best_threshold(utility, absent, gpu_ns, cpu_ns, [SLOTS] * 10, rates.costs.copy_ns, budget)

    return cpu_seconds(sizes.repeats, balance)[0][0] * 1e6 / len(utilities)


# (e)


def profile(trace: Held, machine: Machine) -> None:
    """Where the event level's time goes, by file."""
    profiler = cProfile.Profile()
    profiler.runcall(replayed, trace, machine)
    own: dict[str, float] = defaultdict(float)
    for place, seconds in _own_times(pstats.Stats(profiler)):
        own[place] += seconds
    total = sum(own.values())
    top = sorted(own.items(), key=lambda item: -item[1])[:10]
    rows = [{"file": place, "share": f"{100 * seconds / total:.0f} %"} for place, seconds in top]
    show_table(f"(e) {POLICY} under cProfile, own time by file (calls weigh more than they do without it)", rows)


def _own_times(stats: pstats.Stats) -> Iterator[tuple[str, float]]:
    root = Path(reference.__file__).parents[2]
    for (file, _, function), (_, _, own, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        path = Path(file)
        if file == "~":
            yield f"built in: {function}", own
        else:
            yield str(path.relative_to(root)) if path.is_relative_to(root) else "/".join(path.parts[-2:]), own


if __name__ == "__main__":
    main()
