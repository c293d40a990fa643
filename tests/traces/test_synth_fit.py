"""Synthetic models come as close to published figures as the docs say, and the fit finds what it is asked for."""

from pathlib import Path

import numpy as np
import pytest

from moe_spac.traces.errors import InputError
from moe_spac.traces.stats import overlap
from moe_spac.traces.synth import load, models, process_of, published
from moe_spac.traces.synth_fit import Layers, markdown, problem, save, solve_layers, write_tables
from moe_spac.traces.synth_process import Process
from moe_spac.traces.synth_stats import sample
from moe_spac.traces.synth_targets import Row, Target, compare, overlap_profile, targets

PAGE = Path(__file__).parents[2] / "docs" / "synthetic.md"
MISSED = {"top16/summarisation", "entropy/summarisation"}  # the docs say why


def test_qwen_is_within_ten_percent_of_the_published_prompts():
    """Another seed than the fit's and the docs' check. The slow statistics are left to the command."""
    chosen = [
        t for t in targets("qwen3-30b-a3b") if t.source == "moe-trace" and t.name.split("/")[0] not in ("lfu", "oracle")
    ]
    assert len(chosen) > 20
    rows = compare("qwen3-30b-a3b", process_of(load("qwen3-30b-a3b")), chosen, seed=77)
    assert {r.target.name for r in rows if abs(r.error) > 0.1} <= MISSED


def test_the_process_reproduces_real_routing():
    """gpt-oss-20b: all of it is known, from the bundled trace; half of these figures were not used in the fit."""
    names = {"overlap", "lag/8", "lag/64", "union/8", "union/128", "lru/8", "lru/16", "repeat/8", "top20", "entropy"}
    chosen = targets("gpt-oss-20b", names)
    assert len(chosen) == len(names)
    for row in compare("gpt-oss-20b", process_of(load("gpt-oss-20b")), chosen, seed=77):
        assert abs(row.error) < 0.1, row


def test_the_overlap_profile_keeps_what_is_published():
    profile = overlap_profile("qwen3-30b-a3b")
    given = published("qwen3-30b-a3b")["overlap"]
    assert profile.mean() == pytest.approx(given["mean"])
    for layer, value in given["measured"].items():
        assert profile[int(layer)] == value


def test_layers_are_solved_for_their_overlap():
    task = problem("mixtral-8x7b")
    start = Layers(np.full(32, 4.0), np.ones(5), np.full(32, 0.5), np.full(32, 0.1))
    shape = np.array([0.8, 0.8, 0.9, 1.3, 1.3])
    solved = solve_layers(task, shape, start, 6)
    for layers, close in ((start, False), (solved, True)):
        found = sample(task.process(shape, layers), (0, 1, 2, 3, 4) * 2, 129, seed=1)
        misses = np.abs(overlap(found.experts, found.offsets) - 0.302)
        assert bool(misses.mean() < 0.01) is close


def test_parameters_survive_being_saved(tmp_path, monkeypatch):
    before = load("olmoe")
    process = process_of(before)
    monkeypatch.setattr("moe_spac.traces.synth_fit.FOLDER", tmp_path)
    save("olmoe", process, before["shape"], [], 4)
    monkeypatch.setattr("moe_spac.traces.synth.FOLDER", tmp_path)
    load.cache_clear()
    try:
        again = process_of(load("olmoe"))
    finally:
        load.cache_clear()
    for name in Process.__dataclass_fields__:
        assert np.array_equal(getattr(again, name), getattr(process, name)), name


@pytest.mark.parametrize("name", models())
def test_each_model_names_its_sources_and_has_its_table(name):
    about = published(name)
    assert {t["source"] for t in about["targets"]} <= set(about["sources"])
    assert {t["sample"] for t in about["targets"]} <= set(about["samples"])
    table = PAGE.read_text().partition(f"<!-- table {name} -->")[2].partition("<!-- end -->")[0]
    shown = [line.split("`")[1] for line in table.splitlines() if "`" in line]
    assert shown == [t["name"] for t in about["targets"]]


def test_tables_go_where_the_page_has_a_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table a -->\nold\n<!-- end -->\nafter\n")
    table = markdown([Row(Target("lru/8", 0.5, "prompts", "someone", 1.0), 0.6)])
    write_tables(page, {"a": table})
    assert page.read_text() == f"before\n<!-- table a -->\n{table}\n<!-- end -->\nafter\n"
    assert "| `lru/8` | 0.5 | 0.6 | **+20.0%** | fitted | someone |" in table
    with pytest.raises(InputError, match="no place for b"):
        write_tables(page, {"b": table})
