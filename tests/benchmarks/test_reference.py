import numpy as np
import pytest
from benchmarks.reference import bare, replay
from hand import shape, step, trace

from moe_spac.policies.load import load_policy
from moe_spac.simulator.machine import load_machine, rates_for
from moe_spac.simulator.run import simulate


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("bytes_each", [10**5, 10**7])
def test_the_engine_ends_when_a_process_for_everything_does(slots, bytes_each):
    """Cheap copies, so that landed experts queue for the GPU, and dear ones, so that it waits; 1 to 4 tokens a step."""
    rng = np.random.default_rng(slots)
    routing = [[[rng.choice(8, 2, replace=False).tolist() for _ in range(3)] for _ in range(n)]
               for n in rng.integers(1, 5, 60)]  # fmt: skip
    made = trace([step(rows, position) for position, rows in enumerate(routing)], 8, bytes_each)
    machine = bare(load_machine("rtx4090-pcie4"))
    run = simulate(made, load_policy("ar-lru"), machine, slots * 3)
    found = sum(s.wall_ns for s in run.steps), run.decode.needed - run.decode.hits
    assert found == replay(made.listed, rates_for(machine, shape(3, 8, 2, bytes_each)), slots)
