"""Published signs on small traces: those that come out even there, and a page that says which do not."""

import json
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from moe_spac.simulator import signs_spac
from moe_spac.simulator.cli import app
from moe_spac.simulator.cli_signs import NAMES, markdown
from moe_spac.simulator.signs import (
    Claim,
    Part,
    hybrimoe_parts,
    one_layer,
    prefetching,
    recency_and_popularity,
    scores_over_recency,
    skewed,
    sticky,
)


def held(part):
    return {claim.words: claim.holds for claim in part.claims}


def test_recency_and_popularity_each_win_once():
    part = recency_and_popularity(600)
    assert all(held(part).values())
    assert [row["trace"] for row in part.rows] == ["sticky", "skewed"]


def test_the_two_traces_are_what_they_say():
    rng = np.random.default_rng(0)
    kept = sticky(rng, 200)
    again = [len(np.intersect1d(a, b)) for a, b in pairwise(kept)]
    assert min(again) == 4
    assert np.mean(again) == pytest.approx(4 + 4 * 4 / 124, abs=0.1)  # 4 of the 124 others were there before
    counts = np.sort(np.bincount(skewed(rng, 400).reshape(-1), minlength=128))[::-1]
    assert counts[:13].sum() > 0.4 * counts.sum()  # a tenth of the experts
    trace = one_layer(kept, 128)
    assert [s.experts.shape for s in trace.steps()] == [(1, 1, 8)] * 200


def test_prefetching_pays_and_loses():
    part = prefetching(12)
    assert held(part) == {"prefetching by good forecasts pays": True, "prefetching by bad forecasts loses": True}


def test_scores_beat_recency_where_experts_are_many():
    part = scores_over_recency(24)
    assert [row["published gain"] for row in part.rows] == [6.0, 2.7, 5.0, 7.8]
    for row, claim in zip(part.rows, part.claims, strict=True):
        assert claim.holds == (row["MRS"] > row["LRU"])
        assert row["gain"] == row["MRS"] - row["LRU"]


def test_every_technique_of_hybrimoe_helps():
    part = hybrimoe_parts(10)
    came = held(part)
    assert all(came[f"{name} is faster than none"] for name in ("all", "scheduling", "prefetching", "caching"))
    assert part.rows[0]["published x none"] == 1.86


def test_the_papers_setting(monkeypatch):
    monkeypatch.setattr(signs_spac, "VARIATIONS", signs_spac.VARIATIONS[2:3])
    part = signs_spac.paper_setting(16)
    speeds = {(row["policy"], row["mode"]): row["tok/s"] for row in part.rows}
    ratio = speeds["moe-spac", "sd"] / speeds["n-cpu-moe", "sd"]
    assert (part.claims[0].ours, part.claims[0].holds) == (f"{ratio:.2f}", ratio > 1)
    assert [claim.published for claim in part.claims] == ["1.42", "2.06", "1.16", "1.25"]
    assert [row["if"] for row in part.more] == ["as assumed", "drafting costs nothing", "published"]
    as_assumed, free, published = part.more
    assert as_assumed["times llama.cpp with drafts"] == ratio
    assert free["moe-spac sd"] > as_assumed["moe-spac sd"]
    assert free["hybrimoe ar"] == as_assumed["hybrimoe ar"]
    assert published["times HybriMoE"] == pytest.approx(2.06, abs=0.005)
    assert sum("moves most" in line for line in part.remarks) == 2


def test_the_page_counts_what_came_out():
    parts = [
        Part("a", "A", "set", [Claim("x", True, "1", "2", "s"), Claim("y", False, "3", "4", "s")], [{"n": 1.23456}])
    ]
    page = markdown(parts)
    assert "1 of 2 signs come out." in page
    assert "| x | yes | 1 | 2 | s |" in page
    assert "| y | no | 3 | 4 | s |" in page
    assert "| 1.23 |" in page


def test_the_command(tmp_path):
    def sim(*words):
        return CliRunner().invoke(app, ["signs", *words], env={"COLUMNS": "200"})

    found = json.loads(sim("pinning", "--tokens", "200", "--json").stdout)
    assert [part["name"] for part in found] == ["pinning"]
    assert "comes out" in sim("pinning", "--tokens", "200").stdout
    assert f"parts: {', '.join(NAMES)}" in str(sim("nope").exception)
    assert "leave PART" in str(sim("pinning", "-o", str(tmp_path / "s.md")).exception)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_the_parts(name):
    makers = {"pinning": recency_and_popularity, "prefetch": prefetching, "hybrimoe": hybrimoe_parts,
              "mrs": scores_over_recency, "moe-spac": signs_spac.paper_setting}  # fmt: skip
    from moe_spac.simulator.cli_signs import _makers

    assert _makers()[name] is makers[name]
