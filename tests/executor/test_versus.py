"""Simulator against live: the arithmetic of the table, and one contest on a tiny pair."""

import shlex

import pytest

from moe_spac.executor.calibrate import EmulatedLink
from moe_spac.executor.cli import app
from moe_spac.executor.cli_versus import cells_of
from moe_spac.executor.versus import Cell, PairStage, Row, Sample, contest, orders
from moe_spac.executor.versus_report import document, page, table, verdict
from moe_spac.traces.console import show_table
from moe_spac.traces.errors import InputError
from moe_spac.traces.speculate import Options


def row(policy: str, live, simulated, hits=(0.5, 0.5), slots=8, link=None) -> Row:
    made = Row(Cell(link or EmulatedLink(), slots, policy), exact=True)
    made.live = [Sample(ms, hits[0], {"expert": ms}) for ms in live]
    made.simulated = [Sample(ms, hits[1], {"expert": ms}) for ms in simulated]
    return made


def test_the_error_is_the_median_of_the_repetitions():
    one = row("a", [10, 20, 40], [10.9, 20, 80])
    assert one.errors == pytest.approx([0.09, 0, 1])
    assert (one.error, one.measured, one.predicted) == (pytest.approx(0.09), 20, 20)
    assert one.good()
    assert not row("a", [10], [11.5]).good()
    assert not row("a", [10], [8.5]).good()


def test_hits_more_than_a_point_apart_are_not_good():
    assert row("a", [10], [10], hits=(0.5, 0.509)).good()
    off = row("a", [10], [10], hits=(0.5, 0.52))
    assert off.points == pytest.approx(2)
    assert not off.good()


def test_only_policies_that_differ_must_come_in_order():
    rows = [row("a", [10], [10]), row("b", [10.5], [9]), row("c", [20], [9.5]), row("d", [5], [30], slots=9)]
    pairs, wrong = orders(rows)
    assert pairs == 2  # a and b are too close, d has other slots
    assert [(x.cell.policy, y.cell.policy) for x, y in wrong] == [("a", "c")]


def test_the_page_says_what_is_off():
    rows = [row("a", [10, 11, 12], [10, 11, 12]), row("b", [20], [30]), row("c", [40], [12], hits=(0.4, 0.5))]
    text = page([("One", "a test", rows)], "spac-exec versus -r 3")
    lines = {line.split("|")[3].strip(): line for line in text.splitlines() if line.startswith("| 100 MB/s")}
    assert "11.00 [10.00, 12.00]" in lines["a"]
    assert lines["a"].rstrip().endswith("|  |")
    assert "+50.0%" in lines["b"]
    assert "off" in lines["b"]
    assert "Other order: b, c; 100 MB/s, 8 slots" in text
    assert "in 1 of 3 rows" in verdict(rows)
    assert "-r 3" in text
    (part,) = document([("One", "a test", rows)])["parts"]
    assert part["orders"] == {"pairs": 3, "wrong": 1}
    assert [r["good"] for r in part["rows"]] == [True, False, False]


def test_the_table_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show_table(
        "One", table([row("moe-spac-release:k=4", [100, 110], [150, 150], hits=(0.5, 0.52)), row("b", [2], [2])])
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("+43.2% off" in line for line in lines)  # the median of 150 / 100 and 150 / 110, less 1


def test_a_contest_measures_and_predicts_every_cell(load_live, live_prompts, tmp_path):
    stage = PairStage(load_live("own"), live_prompts[:1], Options(6, 3), tmp_path, tokens=24)
    assert len(cells_of("4,8", "200MB/s", ["ar-lru", "static"], stage)) == 4
    rows = contest(stage, cells_of("4,8", "200MB/s", ["ar-lru"], stage), repetitions=1, tries=1)  # each takes a while
    assert [(r.cell.slots, r.cell.policy) for r in rows] == [(4, "ar-lru"), (8, "ar-lru")]
    for one in rows:
        assert one.exact is True
        assert one.points == 0
        assert one.measured > 0
        assert sum(one.simulated[0].split.values()) == pytest.approx(one.predicted, rel=1e-6)
        assert sum(one.live[0].split.values()) == pytest.approx(one.measured, rel=1e-6)
    assert rows[1].live[0].hits > rows[0].live[0].hits
    with pytest.raises(InputError, match="--slots many"):
        cells_of("many", "1GB/s", [], stage)
    with pytest.raises(InputError, match="top-k"):
        cells_of("1", "1GB/s", [], stage)


def test_the_command_runs_and_writes_a_page(tmp_path, capsys):
    """One layer of a real model's size; whether the row is good is this machine's affair."""
    page = tmp_path / "page.md"
    shown = "versus --no-pair --layers 1 --format q4 --limit-steps 8 -r 1 --slots 8 --link 3GB/s --policy static"
    words = shlex.split(f"{shown} -o {page}")
    assert app(words, standalone_mode=False) in (0, 1)
    assert "hits within 1 point in 1 " in capsys.readouterr().out  # they are no matter of time
    row = next(line for line in page.read_text().splitlines() if "| static |" in line)
    assert "| 3000 MB/s | 8 | static | " in row
    assert "| exact |" in row
