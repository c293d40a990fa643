"""bench: what llama-bench prints, and what it went to."""

import json

import pytest

from moe_spac.executor.bench import Plan, bench, plan_of, rows
from moe_spac.executor.cli import app
from moe_spac.executor.cli_bench import sizes_of
from moe_spac.executor.floor import dispatch_floor
from moe_spac.executor.session import Settings
from moe_spac.policies.load import load_policy
from moe_spac.traces.errors import InputError
from moe_spac.traces.reader import open_trace
from moe_spac.traces.schema import Kind
from moe_spac.traces.speculate import Options


def test_a_plan_has_a_warm_up_and_the_same_texts_every_time():
    plan = Plan((3, 5), ((1, 2), (7,)), 4, repetitions=2)
    listed = [(s.test, s.ids, s.new_tokens) for s in plan.sequences()]
    once = [("pp3", (1, 2, 7), 1), ("pp5", (1, 2, 7, 1, 2), 1), ("tg4", (1, 2), 4), ("tg4", (7,), 4)]
    assert listed == [("warm-up", (7,), 4), *once, *once]


@pytest.fixture(scope="module")
def measured(load_live, live_prompts, live_machine, tmp_path_factory):
    models = load_live("tiny")
    trace = tmp_path_factory.mktemp("bench") / "t.spac"
    plan = plan_of(models, live_prompts, [9], 6, 2)
    settings = Settings(live_machine, 12, options=Options(6, 3))
    found = bench(models, load_policy("hybrimoe"), lambda: load_policy("hybrimoe"), settings, plan, trace)
    return models, found, trace


def test_every_text_is_measured_and_predicted_and_the_warm_up_is_not(measured):
    _, found, trace = measured
    assert [t.test for t in found] == ["pp9", "tg6", "tg6"] * 2
    steps = list(open_trace(trace).steps())
    assert {s.sequence for s in steps} == set(range(7))  # the warm-up is in the trace
    for index, one in enumerate(found, 1):
        own = [s for s in steps if s.sequence == index]
        assert [(s.kind, s.tokens) for s in one.steps] == [(s.kind, s.tokens) for s in one.simulated]
        assert [(s.kind, len(s)) for s in own] == [(s.kind, s.tokens) for s in one.steps]


def test_rows_say_what_was_measured(measured):
    models, found, _ = measured
    table = rows(found, models.pair.shape.expert_bytes)
    assert [row["test"] for row in table] == ["pp9", "tg6"]
    pp, tg = table
    assert (pp["samples"], tg["samples"]) == (2, 4)
    first = next(t for t in found if t.test == "pp9")
    prefill = [s for s in first.steps if s.kind is Kind.PREFILL]
    assert first.speed(first.steps) == pytest.approx(
        8e9 / sum(s.wall_ns for s in prefill)
    )  # the ninth is not prefill's
    generations = [t.answer.generation for t in found if t.test == "tg6"]
    assert tg["draft_n"] == sum(g.drafted for g in generations)
    assert tg["draft_n_accepted"] == sum(g.accepted for g in generations)
    assert 0 < tg["tpot_ms_p50"] <= tg["tpot_ms_p95"] <= tg["tpot_ms_p99"]
    assert tg["ttft_ms"] > 0
    copies = sum(t.answer.decode.copies for t in found if t.test == "tg6")
    assert tg["bytes_per_token"] == pytest.approx(copies * models.pair.shape.expert_bytes / 24)
    assert tg["predicted"] > 0


def test_the_floor_is_that_of_both_models(load_live):
    found = dispatch_floor(load_live("tiny"), rows=3)
    assert list(found) == ["target", "target_of_3_rows", "draft"]
    assert all(ms > 0 for ms in found.values())
    assert list(dispatch_floor(load_live("none"))) == ["target", "target_of_5_rows"]


def test_the_command_prints_tables_markdown_and_json(tiny_target, tiny_draft, tmp_path, capsys):
    words = ["bench", "--target", str(tiny_target), "--draft", str(tiny_draft), "-p", "8", "-n", "4", "-r", "1"]
    words += ["--machine", "rtx4060-laptop", "--prompt-limit", "1"]
    both = ["--policy", "static", "--policy", "ar-lru"]
    app([*words, *both], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "pp8" in shown
    assert "floor" in shown
    app([*words, *both, "-o", "md"], standalone_mode=False)
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("| model | size")
    assert len(table) == 2 + 2 * 2
    assert "±" in table[2]
    kept = tmp_path / "kept.spac"
    app([*words, "--json", "--record", str(kept)], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert [row["test"] for row in found["policies"]["ar-lru"]["rows"]] == ["pp8", "tg4"]
    assert open_trace(kept).summary().state == "complete"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "many"], "-p many"),
        (["-p", "1"], "-p 1"),
        (["-o", "sql"], "-o sql"),
        (["--policy", "min"], "future"),
        (["--record", "/no/such/t.spac"], "--record.*no such folder"),
        (["--record", "t.spac", "--policy", "static", "--policy", "ar-lru"], "--record.*one --policy"),
        (["-p", "0", "-n", "0"], "nothing to run"),
    ],
)
def test_bad_input_is_named(words, said, tiny_target):
    with pytest.raises(InputError, match=said):
        app(["bench", "--target", str(tiny_target), "--draft", "none", "--machine", "rtx4060-laptop", *words],
            standalone_mode=False)  # fmt: skip


def test_no_prompt_sizes_is_zero():
    assert sizes_of("0") == []
    assert sizes_of("8,16") == [8, 16]


def test_it_says_by_which_forward_models_run(load_live):
    from types import SimpleNamespace
    from typing import Any

    from tiny import family_model

    from moe_spac.executor.floor import forwards

    assert forwards(load_live("tiny")) == {"target": "lean", "draft": "lean"}
    other: Any = SimpleNamespace(pair=SimpleNamespace(models=[family_model("gpt_oss")]))
    assert forwards(other) == {"target": "transformers': the lean forward does not know GptOssForCausalLM"}
