"""What a layer costs live: `python tests/benchmarks/bench_lanes.py [--tokens N] [--rounds R] [--policy P ...]`.

The embedded pair writes one text under each policy on the real clock with 10 slots a layer, R rounds in turns; the
fastest round of a policy counts. Columns are of one expert layer: what the main thread's wall time goes to, CPU time of
the whole process and of the main thread inside `RealHost.layer` (us), voluntary switches between threads, and how much
of the copies' and the CPU tier's work was hidden behind the main thread's. The link is emulated (100 MB/s, 20 us), and
the policies decide by a profile measured first.
"""

import argparse
import resource
import time
from typing import Any

from moe_spac.executor.calibrate import ROUNDS, calibrate
from moe_spac.executor.models import Models, load_models
from moe_spac.executor.probe import PairSubject
from moe_spac.executor.real import RealHost
from moe_spac.executor.session import Settings, run
from moe_spac.executor.times import StepTimes, exposed
from moe_spac.policies.load import load_policy
from moe_spac.simulator.machine import Machine
from moe_spac.traces.console import show_json, show_table
from moe_spac.traces.prompts import read_prompts
from moe_spac.traces.schema import Kind
from moe_spac.traces.speculate import Options

SLOTS_PER_LAYER = 10
POLICIES = ("ar-lru", "hybrimoe", "moe-spac")
SPLIT = {"dense": "dense", "expert": "expert", "wait_copy": "wait_copy", "wait_cpu": "wait_cpu", "policy": "deciding"}


class Watched:
    """CPU time of the main thread inside `RealHost.layer` while it is entered."""

    def __enter__(self) -> "Watched":
        self.ns = self.calls = 0
        self._layer = RealHost.layer

        def layer(host: RealHost, *given: Any) -> None:
            begin = time.thread_time_ns()
            self._layer(host, *given)
            self.ns += time.thread_time_ns() - begin
            self.calls += 1

        RealHost.layer = layer  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def __exit__(self, *_: object) -> None:
        RealHost.layer = self._layer


def measure(models: Models, machine: Machine, policy: str, tokens: int) -> dict[str, Any]:
    slots = SLOTS_PER_LAYER * len(models.pair.shape.moe_layers)
    settings = Settings(machine, slots, options=Options(max_new_tokens=tokens, draft_length=4))
    switches, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.process_time_ns()
    with Watched() as watched:
        result = run(models, load_policy(policy), read_prompts(None, 1), settings)
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
    cpu = time.process_time_ns() - cpu
    steps = [s for s in result.times if isinstance(s, StepTimes) and s.kind is not Kind.PREFILL]
    layers = max(1, sum(len(s.layers) for s in steps))
    split = [s.split() for s in steps]
    return {
        "policy": policy,
        "tokens_per_s": result.tokens_per_s,
        **{f"{said}_us": sum(s[name] for s in split) / layers / 1e3 for name, said in SPLIT.items()},
        "process_cpu_us": cpu / watched.calls / 1e3,
        "main_cpu_us": watched.ns / watched.calls / 1e3,
        "switches": switches / watched.calls,
        **exposed(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    models = load_models()
    machine = calibrate(PairSubject(models), rounds=min(ROUNDS, given.rounds))
    rows = [[measure(models, machine, p, given.tokens) for p in given.policy] for _ in range(given.rounds)]
    best = [max(column, key=lambda row: row["tokens_per_s"]) for column in zip(*rows, strict=True)]
    if given.json:
        show_json(best)
        return
    show_table(
        "one expert layer, live",
        [{k.replace("_us", ""): f"{v:.2g}" if isinstance(v, float) and v < 10 else v if isinstance(v, str) or v is None
          else f"{v:.0f}" for k, v in row.items()} for row in best],
    )  # fmt: skip


if __name__ == "__main__":
    main()
