"""Ablations on a small trace, forecasts of stated quality, and what planning costs."""

import json
import pickle

import numpy as np
import pytest
from hand import Trace
from speculated import BROKEN, plain, speculated, write
from typer.testing import CliRunner

from moe_spac.policies.load import load_policy
from moe_spac.simulator.ablate import STUDIES, ablate, document, spec_of, study_of, with_parameters
from moe_spac.simulator.cli import app
from moe_spac.simulator.compare import AR, SD, Job, Source, loads_for
from moe_spac.simulator.foretold import Foretold, foretold
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.planning import planned, planning
from moe_spac.traces.errors import InputError

MACHINE = load_machine("rtx4090-pcie4")


def job(trace, mode):
    source = Source(trace)
    return Job(source, MACHINE, loads_for(source, [mode]))


def test_all_arms_of_moe_spac_run_beside_the_whole():
    rows = ablate(job(speculated(), SD), "moe-spac:k=3", 6, SD)
    assert [row.arm.name for row in rows][:4] == ["full", "no SpecUE", "no HetWB", "no async engine"]
    assert all(row.spec.startswith("moe-spac:k=3") for row in rows)
    assert rows[0].to_full == 1
    *parts, release_arm = rows
    assert (release_arm.outcome.status, release_arm.to_full) == ("CACHE_INACTIVE", None)  # 4 tokens heat nothing there
    for row in parts:
        assert row.outcome.status == "ok"
        assert row.to_full == row.outcome.speed / rows[0].outcome.speed
        assert row.to_base is None  # no published factors
    assert rows[2].outcome is rows[7].outcome  # no HetWB is switch (c): one run serves both
    policy = load_policy(rows[-1].spec)
    release = load_policy("moe-spac-release:k=3")
    assert vars(policy) == vars(release)


def test_hybrimoe_stands_beside_the_published_factors():
    rows = {row.arm.name: row for row in ablate(job(Foretold(plain(40), (0.9, 0.8)), AR), "hybrimoe", 6, AR)}
    published = {name: row.arm.published for name, row in rows.items() if row.arm.published}
    assert published == {"all": 1.86, "scheduling": 1.46, "prefetching": 1.15, "caching": 1.38}
    assert rows["none"].to_base == 1
    assert rows["none"].outcome.metrics["h2d_bytes_per_token"] == 0
    assert rows["prefetching"].outcome.metrics["prefetches"] > 0
    assert rows["caching"].to_base == rows["caching"].outcome.speed / rows["none"].outcome.speed
    assert "start=random" in rows["all"].spec
    assert {r["arm"] for r in document(list(rows.values()))} == set(rows)


@pytest.mark.parametrize(
    ("spec", "parameters", "found"),
    [
        ("lfru", {"bypass": False}, "lfru:bypass=false"),
        ("lfru:a=1", {"b": 2, "c": "x"}, "lfru:a=1,b=2,c=x"),
        ("mine.py:Mine", {"a": 1}, "mine.py:Mine:a=1"),
        ("C:/x/mine.py:Mine:b=2", {"a": 1}, "C:/x/mine.py:Mine:b=2,a=1"),
        ("lfru", {}, "lfru"),
    ],
)
def test_parameters_on_top(spec, parameters, found):
    assert with_parameters(spec, parameters) == found


def test_arms_name_parameters_that_there_are():
    for study in STUDIES.values():
        for arm in study.arms:
            policy = load_policy(spec_of(study.policy, arm))
            assert {key: getattr(policy, key) for key in arm.switches} == dict(arm.switches)
    with pytest.raises(InputError, match="ablate knows the parts of moe-spac and hybrimoe"):
        study_of("ar-lru")


def test_forecasts_are_right_as_often_as_stated():
    ids = np.argsort(np.random.default_rng(0).random((50, 2, 8)))[:, :, :2]
    base = plain(1)
    steps = [
        type(one)(0, 0, one.kind, np.array([t], np.int32), one.tokens, one.drafted, 0, ids[t : t + 1].astype(np.uint8))
        for one in base.listed
        for t in range(50)
    ]
    made = Foretold(Trace(base.header, steps), (1.0, 0.0))
    assert made.header.lookahead == 2
    assert "right with probability 1,0" in made.header.notes
    for ahead, step in zip(aheads(made), steps, strict=True):
        assert ahead.shape == (1, 2, 2, 2)
        last = set(step.experts[0, 1].tolist())  # two layers ahead of the first there is none, so the last repeats
        assert set(ahead[0, 0, 0].tolist()) == last
        assert not set(ahead[0, 0, 1].tolist()) & last
        assert all(len(set(row)) == 2 for row in ahead.reshape(-1, 2).tolist())
    half = Foretold(Trace(base.header, steps), (0.5,))
    found = zip(aheads(half), steps, strict=True)
    right = [len(set(ahead[0, 0, 0].tolist()) & set(step.experts[0, 1].tolist())) for ahead, step in found]
    assert np.mean(right) / 2 == pytest.approx(0.5, abs=0.15)
    assert bytes_of(pickle.loads(pickle.dumps(half))) == bytes_of(half)
    assert bytes_of(half) != bytes_of(Foretold(half.trace, (0.5,), seed=1))


def aheads(trace):
    return [np.asarray(step.ahead) for step in trace.steps()]


def bytes_of(trace):
    return [ahead.tobytes() for ahead in aheads(trace)]


@pytest.mark.parametrize("text", ["1.5", "a,b", "", "-0.1"])
def test_forecasts_that_make_no_sense(text):
    with pytest.raises(InputError, match="--forecast"):
        foretold(plain(2), text)


def test_forecasts_are_not_put_over_recorded_ones():
    with pytest.raises(InputError, match="forecasts of its own"):
        foretold(Foretold(plain(2), (0.5,)), "0.5")


def sim(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_the_command(tmp_path):
    trace = str(write(plain(12), tmp_path / "t.spac"))
    shown = sim("ablate", trace, "--policy", "hybrimoe", "--slots", "3")
    assert shown.exit_code == 0, shown.output
    assert "nothing is prefetched" in shown.stdout
    assert "published: arXiv 2504.05897" in shown.stdout
    made = json.loads(
        sim("ablate", trace, "--policy", "hybrimoe", "--slots", "3", "--forecast", "0.9", "--json").stdout
    )
    assert made["arms"][1]["published_ratio_to_base"] is None
    assert made["arms"][0]["tokens_per_s"] > 0
    assert "made up" in made["notes"]
    assert "one cache size" in str(sim("ablate", trace, "--slots", "2,3").exception)


def test_planning_is_measured_and_failures_are_told(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    trace = speculated(6)
    broken, good = planning([f"{tmp_path}/mine.py:Broken", "moe-spac"], trace, MACHINE, 6, repeats=1)
    assert (broken.us, broken.total) == (None, None)
    assert "Broken" in str(broken.error)
    assert good.us is not None
    assert {"dispatch", "layer_ends"} <= set(good.us)
    assert good.total == pytest.approx(sum(good.us.values()))
    assert (planned("static", trace, MACHINE, 6, repeats=1).total or 0) > 0


def test_planning_beside_what_is_charged(tmp_path):
    trace = str(write(plain(6), tmp_path / "t.spac"))
    words = ("planning", trace, "--policy", "moe-spac", "--policy", "static", "--slots", "3", "--steps", "4")
    found = json.loads(sim(*words, "--json").stdout)
    assert (found["charged_us_per_layer"], found["least_of_replays"]) == (30, 10)
    assert [p["policy"] for p in found["policies"]] == ["moe-spac", "static"]
    assert all(p["us_per_layer"] > 0 for p in found["policies"])
    shown = sim(*words, "--repeats", "3").stdout
    assert "the least of 3 replays" in shown
    assert "the simulator charges 30 us a layer" in shown
