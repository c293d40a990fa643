"""How often an expert was resident, counted again from the driver's own record of admissions and evictions."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest
from speculated import speculated

from moe_spac.policies.load import load_policy
from moe_spac.simulator.compare import AR, SD, Job, Source, cases_for, loads_for, run_cases
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.occupancy import Occupancy, need_shares
from moe_spac.simulator.report import write_residency
from moe_spac.simulator.run import simulate
from moe_spac.traces.schema import Kind

MACHINE = load_machine("rtx4090-pcie4")


def replayed(record, steps, layers=2, experts=8):
    """[S, L, E] bool from a driver's record: who is resident after each step, starting empty."""
    here, found = np.zeros((layers, experts), bool), np.zeros((steps, layers, experts), bool)
    for at in range(steps):
        for what, *rest in (note[1:] for note in record if note[0] == at):
            if what in ("admit", "evict"):
                here[rest[0].layer, rest[0].expert] = what == "admit"
        found[at] = here
    return found


@pytest.mark.parametrize("steps", [13, 600])
def test_shares_of_a_cache_that_fetches_every_miss(steps):
    trace = speculated(steps - 1)
    record = []
    watched = Occupancy(2, 8, steps)
    simulate(trace, load_policy("ar-lru"), MACHINE, 8, progress=watched.after_step, record=record,
             engine_of=watched.engine_of)  # fmt: skip
    every = 1 if steps <= 256 else 3
    wanted = replayed(record, steps)[every - 1 :: every].mean(axis=0)
    assert watched.shares == pytest.approx(wanted, abs=1e-6)
    assert 0 < watched.shares.sum() <= 8 + 1e-5


def test_needs_are_counted_by_step():
    trace = speculated(5)
    wanted = np.zeros((2, 8))
    verified = [s for s in trace.listed if s.kind is not Kind.PREFILL]
    for step in verified:
        for layer in range(2):
            for expert in set(step.experts[:, layer].ravel().tolist()):
                wanted[layer, expert] += 1 / len(verified)
    assert need_shares(trace) == pytest.approx(wanted, abs=1e-6)


def test_the_table_names_every_expert_of_every_run(tmp_path):
    source = Source(speculated(5))
    job = Job(source, MACHINE, loads_for(source, [SD, AR]), occupancy=True)
    outcomes = run_cases(job, cases_for(["ar-lru", "static"], [8], [SD, AR], optimum=False))
    cut = replace(outcomes[0], cut=True)
    write_residency(tmp_path / "r.parquet", job, [*outcomes, cut])
    table = pyarrow.parquet.read_table(tmp_path / "r.parquet").to_pandas()
    assert len(table) == 4 * 2 * 8
    assert not table.duplicated(["policy", "slots", "mode", "layer", "expert"]).any()
    mine = table[(table["policy"] == "static") & (table["mode"] == SD)]
    assert mine["resident"].to_numpy().reshape(2, 8) == pytest.approx(outcomes[2].residency)
    assert set(mine["resident"]) == {0.0, 1.0}  # a placement that never changes
    assert mine["needed"].to_numpy().reshape(2, 8) == pytest.approx(need_shares(source.view(SD)))
