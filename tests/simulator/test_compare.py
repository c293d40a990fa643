import json

import numpy as np
import pytest
from speculated import BROKEN, plain, speculated

from moe_spac.simulator.compare import (
    AR,
    SD,
    Case,
    Job,
    Source,
    cases_for,
    find,
    loads_for,
    run_cases,
    verdicts,
    winner,
)
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.report import metrics_document
from moe_spac.traces.errors import InputError

MODES = (SD, AR)


def job_for(trace, **taken):
    source = Source(trace, **taken)
    modes = MODES if source.speculates else (AR,)
    return Job(source, load_machine("rtx4090-pcie4"), loads_for(source, modes))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    path = tmp_path_factory.mktemp("policies") / "mine.py"
    path.write_text(BROKEN)
    return path


@pytest.fixture(scope="module")
def outcomes(broken):
    policies = ["ar-lru", f"{broken}:Broken", f"{broken}:Lossy", "static"]
    return run_cases(job_for(speculated()), cases_for(policies, [6], MODES))


def test_every_size_has_every_policy_in_every_mode_and_the_optimum_last():
    cases = cases_for(["a", "min", "b", "a"], [6, 8], ["sd", "ar"])
    assert [(c.policy, c.mode) for c in cases if c.slots == 6] == [
        (p, m) for p in ("a", "b", "min") for m in ("sd", "ar")
    ]
    assert [c.slots for c in cases] == [6] * 6 + [8] * 6
    assert all(c.policy != "min" for c in cases_for(["a"], [6], ["sd"], optimum=False))


def test_a_failing_policy_is_named_and_stops_no_other_o31(outcomes, broken):
    failed = [o for o in outcomes if o.failed]
    assert {o.policy for o in failed} == {f"{broken}:Broken"}
    for o in failed:
        for word in ("policy Broken", "step 1, layer", "evicts expert"):
            assert word in o.status
        assert o.metrics == {}
    assert all(o.status == "ok" for o in outcomes if not o.failed)
    assert len(outcomes) == 10


def test_both_modes_give_the_same_text(outcomes):
    sd, ar = (find(outcomes, "ar-lru", 6, mode) for mode in MODES)
    assert sd
    assert ar
    assert sd.metrics["tokens"] == ar.metrics["tokens"] == ar.metrics["decode_steps"]
    assert sd.metrics["verify_steps"] == 12
    assert ar.metrics["verify_steps"] == 0
    assert sd.metrics["gpu_draft_ms_per_token"] > 0
    assert ar.metrics["gpu_draft_ms_per_token"] == 0


def test_times_add_up_in_the_table_of_steps(outcomes):
    for o in outcomes:
        if not o.failed:
            gpu = sum(column for name, column in o.steps.items() if name.startswith("gpu_"))
            assert np.array_equal(gpu, o.steps["wall_ns"])


def test_no_on_demand_policy_hits_more_than_the_optimum_o17(outcomes):
    for mode in MODES:
        best, lru = find(outcomes, "min", 6, mode), find(outcomes, "ar-lru", 6, mode)
        assert best
        assert lru
        assert best.reference
        assert best.metrics["gap_to_optimum"] == 0
        assert best.metrics["gap_closed"] == 1
        assert lru.metrics["gap_to_optimum"] >= 0
        assert lru.metrics["gap_closed"] == 0


def test_the_winner_is_lossless_and_not_clairvoyant(outcomes):
    best = winner(outcomes, 6)
    assert best
    fit = [o for o in outcomes if o.policy in ("ar-lru", "static")]
    assert best.speed == max(o.speed for o in fit)
    assert any(not o.lossless and o.status == "ok" for o in outcomes)


def test_a_verdict_for_every_policy_that_ran_in_both_modes(outcomes, broken):
    found = {v.policy: v for v in verdicts(outcomes)}
    assert set(found) == {"ar-lru", f"{broken}:Lossy", "static", "min"}
    sd, ar = (find(outcomes, "static", 6, mode) for mode in MODES)
    assert sd
    assert ar
    assert found["static"].speedup == pytest.approx(sd.speed / ar.speed)
    # All steps but prefill are verify steps here: speed-up = tokens a step / cost of a step.
    assert found["static"].speedup == pytest.approx(found["static"].tokens_per_verify / found["static"].cost)


@pytest.mark.parametrize(("slots", "status"), [(0, "CACHE_INACTIVE"), (3, "SLOTS_LT_TOPK")])
def test_a_cache_that_cannot_work_is_never_ranked_o32(slots, status):
    outcomes = run_cases(job_for(plain()), [Case("ar-lru", slots, AR)])
    assert outcomes[0].status == status
    assert outcomes[0].speed == 0
    assert winner(outcomes, slots) is None


def test_the_number_of_processes_changes_nothing_o30():
    job, cases = job_for(speculated(5)), cases_for(["ar-lru", "moe-spac"], [6], [SD])
    one, two = (json.dumps(metrics_document(run_cases(job, cases, jobs))) for jobs in (1, 2))
    assert one == two


def test_progress_ends_at_all_steps():
    job, told = job_for(plain(4)), []
    run_cases(job, cases_for(["ar-lru"], [6, 8], [AR]), progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 4 * 4


def test_an_assumed_draft_cuts_plain_steps_into_windows():
    source = Source(plain(30), window=3, acceptance=1.0)
    assert source.speculates
    steps = list(source.view(SD).steps())
    assert [s.emitted for s in steps[:-1]] == [4] * 7
    assert sum(s.emitted for s in steps) == len(list(source.view(AR).steps())) == 30
    assert len(list(Source(plain(30), limit=9).view(AR).steps())) == 9
    with pytest.raises(InputError, match="has a draft already"):
        Source(speculated(), window=3).view(SD)
