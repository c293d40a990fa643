"""Tuning: what is tried, on which part, and that only the held-out score is the result."""

import json
import tomllib
from dataclasses import replace

import pytest
from hand import Trace
from speculated import plain, speculated, write
from typer.testing import CliRunner

from moe_spac.policies.load import load_policy
from moe_spac.simulator import tune as tuning
from moe_spac.simulator.cli import app
from moe_spac.simulator.compare import AR, SD, Case, Job, Source, loads_for, run_case
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.tune import Search, halves, settings, tune, values_of
from moe_spac.traces.errors import InputError

MACHINE = load_machine("rtx4090-pcie4")


def sequences(*lengths):
    """Plain decoding, one sequence after the other."""
    base = plain(max(lengths))
    steps = [replace(s, sequence=i) for i, n in enumerate(lengths) for s in base.listed[:n]]
    names = tuple({"name": str(i), "domain": "test"} for i in range(len(lengths)))
    return Trace(replace(base.header, sequences=names), steps)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a=1,2,2", ("a", ["1", "2"])),
        ("whole=1..4:4", ("whole", ["1", "2", "3", "4"])),
        ("whole=1..2:5", ("whole", ["1", "2"])),
        ("x=0..1:3", ("x", ["0", "0.5", "1"])),
        ("x=0.1..0.3:2", ("x", ["0.1", "0.3"])),
        ("b=true,false", ("b", ["true", "false"])),
    ],
)
def test_values(text, found):
    assert values_of(text, {"whole": int, "x": float}.get) == found


@pytest.mark.parametrize("text", ["a", "=1", "a=", "x=1..2", "x=a..2:3", "x=1..2:0", "x=1..2:-1"])
def test_values_that_cannot_be_read(text):
    with pytest.raises(InputError, match="write key=a,b,c or key=lo"):
        values_of(text, {}.get)


def test_settings_are_a_grid_or_drawn_from_it():
    grid = settings("moe-spac:k=4", ["tau=1,2", "smoothing=0.1,0.2,0.3"], 0, 0)
    assert len(grid) == 6
    assert grid[1] == "moe-spac:k=4,tau=1,smoothing=0.2"
    drawn = settings("moe-spac:k=4", ["tau=1,2", "smoothing=0.1,0.2,0.3"], 3, 7)
    assert len(set(drawn)) == 3
    assert set(drawn) <= set(grid)
    assert drawn == settings("moe-spac:k=4", ["tau=1,2", "smoothing=0.1,0.2,0.3"], 3, 7)
    wide = ["smoothing=0.001..1:1000", "k=2..40:39"]
    assert len(set(settings("moe-spac", wide, 5, 0))) == 5
    assert all(load_policy(one).name == "moe-spac" for one in settings("moe-spac", wide, 5, 0))
    assert tuning._combination(4, [["a", "b"], ["x", "y", "z"]]) == ["b", "y"]


@pytest.mark.parametrize(
    ("spec", "params", "words"),
    [
        ("moe-spac", [], "it has|has k"),
        ("moe-spac", ["nope=1"], "no parameter 'nope'"),
        ("moe-spac", ["smoothing=7"], "smoothing must lie"),
        ("moe-spac", ["smoothing=0.001..1:1000", "k=2..40:39"], "39000 settings are too many"),
        ("no-such", ["a=1"], "no policy"),
    ],
)
def test_settings_that_there_are_not(spec, params, words):
    with pytest.raises(InputError, match=words):
        settings(spec, params, 0, 0)


def test_whole_sequences_are_held_out():
    training, judging = halves(sequences(4, 6, 8, 2), 0.5)
    assert [s.sequence for s in training.steps()] == [0] * 4 + [1] * 6
    assert [s.sequence for s in judging.steps()] == [2] * 8 + [3] * 2
    assert "the first 2 of 4 sequences, 10 of 20 steps" in training.header.notes
    few = halves(sequences(4, 4), 0.99)
    assert [len(list(part.steps())) for part in few] == [4, 4]  # never all


def test_a_single_sequence_is_cut():
    training, judging = halves(plain(10), 0.7)
    assert [int(s.positions[0]) for s in training.steps()] == list(range(7))
    assert [int(s.positions[0]) for s in judging.steps()] == [7, 8, 9]
    assert (training.words, judging.words) == ("steps 1 to 7", "steps 8 to 10")


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5])
def test_something_must_be_held_out(share):
    with pytest.raises(InputError, match="held out to judge the winner"):
        halves(plain(10), share)


def speed(trace, spec, mode):
    source = Source(trace)
    return run_case(Job(source, MACHINE, loads_for(source, [mode])), Case(spec, 6, mode)).speed


def test_training_chooses_and_the_held_out_part_judges():
    trace = sequences(30, 30)
    tried = settings("lrfu", ["half_life=1,8,64"], 0, 0)
    told = []
    found = tune(
        Search(Source(trace), MACHINE, 6, AR), "lrfu", tried, progress=lambda done, total: told.append((done, total))
    )
    training, judging = halves(trace, 0.5)
    scores = [speed(training, spec, AR) for spec in tried]
    assert list(found.training) == scores
    assert found.winner == tried[scores.index(max(scores))]
    assert found.training_score == max(scores)
    assert found.held_out == speed(judging, found.winner, AR)
    assert found.held_out_default == speed(judging, "lrfu", AR)
    assert found.gain == speed(judging, found.winner, AR) / speed(judging, "lrfu", AR)
    assert told[-1] == (30 * 4 + 30 * 2,) * 2
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_nothing_that_ran_is_no_winner():
    with pytest.raises(InputError, match="no setting of lrfu ran with the status ok"):
        tune(Search(Source(plain(8)), MACHINE, 2, AR), "lrfu", ["lrfu:half_life=1"])  # fewer slots than top-k
    with pytest.raises(InputError, match="--metric speed"):
        tune(Search(Source(plain(8)), MACHINE, 6, AR, metric="speed"), "lrfu", ["lrfu:half_life=1"])


def sim(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_the_command_reports_what_was_held_out(tmp_path):
    trace = str(write(speculated(16), tmp_path / "t.spac"))
    words = [
        "tune",
        trace,
        "--policy",
        "moe-spac",
        "--param",
        "tau=1,2",
        "--param",
        "balance=false,true",
        "--slots",
        "3",
    ]
    winner = tmp_path / "new" / "w.toml"
    shown = sim(*words, "-o", str(winner))
    assert shown.exit_code == 0, shown.output
    assert "result, on the held-out part" in shown.stdout
    assert "in training" in shown.stdout
    assert "no result" in shown.stdout
    made = json.loads(sim(*words, "--json").stdout)
    assert set(made["result"]) == {"metric", "held_out", "default", "gain"}
    assert len(made["search"]) == 5
    written = tomllib.loads(winner.read_text())
    assert written["chosen"]["held_out_score"] == made["result"]["held_out"]
    assert written["chosen"]["held_out_score_of_default"] == made["result"]["default"]
    assert written["chosen"]["training_score_not_a_result"] == max(s["training_score"] for s in made["search"][1:])
    assert written["chosen"]["mode"] == SD
    assert vars(load_policy(str(winner))) == vars(load_policy(made["winner"]))
    assert "held out to judge" in str(sim(*words, "--train", "1").exception)
