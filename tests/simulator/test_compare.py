import json
from dataclasses import replace

import numpy as np
import pytest
from speculated import BROKEN, plain, speculated

from moe_spac.simulator.compare import (
    AR,
    SD,
    Case,
    Job,
    Source,
    by_length,
    cases_for,
    find,
    length_cases,
    loads_for,
    loads_of,
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
    return run_cases(replace(job_for(speculated()), bounded=True), cases_for(policies, [6], MODES))


def test_every_size_has_every_policy_in_every_mode_and_the_optimum_last():
    cases = cases_for(["a", "min", "b", "a"], [6, 8], ["sd", "ar"])
    assert [(c.policy, c.mode, c.reference) for c in cases if c.slots == 6] == [
        (p, m, p in ("ar-lru", "min")) for p in ("a", "b", "ar-lru", "min") for m in ("sd", "ar")
    ]
    assert [c.slots for c in cases] == [6] * 8 + [8] * 8
    assert [c.policy for c in cases_for(["a"], [6], ["sd"], optimum=False)] == ["a"]
    assert [(c.policy, c.reference) for c in cases_for(["ar-lru"], [6], ["sd"])] == [("ar-lru", False), ("min", True)]


def test_a_draft_takes_slots_from_its_own_runs_only_o37():
    cases = cases_for(["a"], [{"sd": 6, "ar": 8}], ["sd", "ar"], optimum=False)
    assert [(c.mode, c.slots, c.size) for c in cases] == [("sd", 6, 6), ("ar", 8, 6)]
    outcomes = run_cases(job_for(speculated()), cases_for(["static"], [{"sd": 6, "ar": 8}], MODES))
    assert [v.size for v in verdicts(outcomes)] == [6] * 3
    assert {o.mode: o.metrics["slots_per_layer"] for o in outcomes} == {SD: 3, AR: 4}


def test_a_failing_policy_is_named_and_stops_no_other_o31(outcomes, broken):
    failed = [o for o in outcomes if o.failed]
    assert {o.policy for o in failed} == {f"{broken}:Broken"}
    for o in failed:
        for word in ("policy Broken", "step 1, layer", "evicts expert"):
            assert word in o.status
        assert o.metrics == {}
    others = {o.policy: o.status for o in outcomes if not o.failed}
    assert others == {"ar-lru": "ok", f"{broken}:Lossy": "CACHE_INACTIVE", "static": "ok", "min": "ok"}
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


def test_nothing_is_faster_than_the_fluid_bound(outcomes):
    for o in outcomes:
        assert o.bound is not None
        if o.speed:
            assert o.lossless
            assert o.metrics["decode_wall_ns"] >= o.bound.layered_ns
            assert o.metrics["gap_closed_time"] == (0 if o.policy == "ar-lru" else pytest.approx(_closed(outcomes, o)))


def _closed(outcomes, o):
    lru = find(outcomes, "ar-lru", 6, o.mode)
    assert lru is not None
    bound_ms = 1e3 / o.metrics["fluid_bound_tokens_per_s"]
    mine, base = o.metrics["tpot_ms_mean"], lru.metrics["tpot_ms_mean"]
    return (base - mine) / (base - bound_ms)


def test_the_winner_is_lossless_and_not_clairvoyant(outcomes):
    best = winner(outcomes, 6)
    assert best
    fit = [o for o in outcomes if o.policy in ("ar-lru", "static")]
    assert best.speed == max(o.speed for o in fit)
    assert any(not o.lossless for o in outcomes)


def test_a_verdict_for_every_policy_that_ran_in_both_modes(outcomes, broken):
    found = {v.policy: v for v in verdicts(outcomes)}
    assert set(found) == {"ar-lru", "static", "min"}
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


def test_other_draft_lengths():
    job = job_for(speculated())
    outcomes = run_cases(job, cases_for(["static", "ar-lru"], [6], MODES))
    cases = length_cases(outcomes, [0, 1, 3, 6])
    assert [(c.policy, c.draft_length) for c in cases] == [(p, n) for p in ("static", "ar-lru") for n in (1, 3, 6)]
    assert run_cases(job, length_cases(outcomes, [0]), jobs=2) == []
    assert [c.policy for c in length_cases(outcomes, [1], find(outcomes, "ar-lru", 6, SD))] == ["ar-lru"]
    cut = run_cases(replace(job, loads=loads_of(job.source, cases)), cases)
    runs = by_length([*outcomes, *cut], "static", 6)
    assert list(runs) == [0, 1, 3, 6]
    # Cut at the recorded length the trace is itself.
    recorded = find(outcomes, "static", 6, SD)
    assert recorded is not None
    assert runs[3].cut
    assert runs[3].metrics["decode_wall_ns"] == recorded.metrics["decode_wall_ns"]
    assert {o.metrics["tokens"] for o in runs.values()} == {recorded.metrics["tokens"]}
    drafted = [o.metrics["drafted_per_verify"] for n, o in runs.items() if n]
    assert drafted == sorted(drafted)
    best = next(v for v in verdicts([*outcomes, *cut]) if v.policy == "static").best_draft_length
    assert best == max(runs, key=lambda n: runs[n].speed)


def test_regret_changes_no_answer():
    plainly, judged = (
        run_cases(replace(job_for(speculated()), regret=regret), cases_for(["ar-lru"], [6], [SD]))
        for regret in (False, True)
    )
    for a, b in zip(plainly, judged, strict=True):
        assert a.metrics.items() <= b.metrics.items()
        assert b.metrics["victim_picks"] > 0
    best = find(judged, "min", 6, SD)
    assert best is not None
    assert (best.metrics["victim_optimal_share"], best.metrics["victim_regret_events_mean"]) == (1, 0)


def test_an_assumed_draft_cuts_plain_steps_into_windows():
    source = Source(plain(30), window=3, acceptance=1.0)
    assert source.speculates
    steps = list(source.view(SD).steps())
    assert [s.emitted for s in steps[:-1]] == [4] * 7
    assert sum(s.emitted for s in steps) == len(list(source.view(AR).steps())) == 30
    assert len(list(Source(plain(30), limit=9).view(AR).steps())) == 9
    with pytest.raises(InputError, match="has a draft already"):
        Source(speculated(), window=3).view(SD)


def test_who_drafts_otherwise_is_not_held_against_the_bound_of_the_recorded_steps(tmp_path):
    (tmp_path / "short.py").write_text(
        "from moe_spac.policies.interface import Policy\n"
        "class Short(Policy):\n"
        "    name = 'short'\n"
        "    def draft_length(self, longest):\n"
        "        return min(1, longest)\n"
    )
    cases = cases_for(["ar-lru", f"{tmp_path}/short.py:Short"], [8], [SD], optimum=False)
    plain, short = run_cases(replace(job_for(speculated()), bounded=True), cases)
    assert plain.bound is not None
    assert short.metrics["decode_steps"] > plain.metrics["decode_steps"]
    assert short.bound is None
