"""Synthetic traces: the same each time, valid, labelled, and windows that leave the text as it is."""

import tracemalloc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_spac.traces import open_trace
from moe_spac.traces.errors import InputError
from moe_spac.traces.gpt_oss import gpt_oss_20b
from moe_spac.traces.schema import Header, Kind, Provenance
from moe_spac.traces.stats import acceptance, decode_routing, overlap
from moe_spac.traces.synth import model_shape, models, synthesize
from moe_spac.traces.synth_process import Chain, Process, best, stream
from moe_spac.traces.views import autoregressive
from moe_spac.traces.writer import TraceWriter

SMALL = "gpt-oss-20b"


def columns(trace) -> list[tuple]:
    return [(s.sequence, s.kind, s.accepted, s.positions.tolist(), s.experts.tolist()) for s in trace.steps()]


def plain(layers=3, experts=16, top_k=2, drift=1.0, memory=0.8, lasting=0.0) -> Process:
    def each(value):
        return np.full(layers, value, np.float32)

    return Process(
        experts, top_k, each(lasting), each(0), each(0), each(drift), each(memory), each(1e9), emphasis=(1.0, 1.0)
    )


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 70),
    share=st.floats(0, 1),
    length=st.integers(0, 5),
    chance=st.floats(0, 1),
    prefill=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_any_trace_is_valid_and_keeps_the_text_of_plain_decoding(tokens, share, length, chance, prefill, seed):
    sequences = 1 + int(share * (min(tokens, 4) - 1))
    chances = chance if length else None
    trace = synthesize(SMALL, tokens, seed, length, chances, sequences=sequences, prefill=prefill)
    steps = list(trace.steps())
    assert columns(trace) == [
        (s.sequence, s.kind, s.accepted, s.positions.tolist(), s.experts.tolist()) for s in steps
    ]  # starts over, the same
    assert sum(s.emitted for s in steps) == tokens
    for step in steps:
        assert step.experts.shape == (len(step), 24, 4)
        assert step.experts.max() < 32
        assert all(len(set(ids)) == 4 for ids in step.experts.reshape(-1, 4).tolist())
        assert 0 <= step.accepted <= step.drafted.sum() <= length
        if step.kind is Kind.VERIFY:
            assert step.drafted.tolist() == [False] + [True] * (len(step) - 1)
        else:
            assert not step.drafted.any()
            assert not step.accepted
    same = synthesize(SMALL, tokens, seed, sequences=sequences, prefill=prefill)
    assert columns(autoregressive(trace)) == columns(same)
    for sequence in range(sequences):  # positions of the final text run on without a gap
        kept = np.concatenate([s.positions[s.kept] for s in steps if s.sequence == sequence])
        assert kept.tolist() == list(range(len(kept)))


def test_another_seed_is_another_sample_of_the_same_model():
    one, other = (decode_routing(synthesize(SMALL, 256, seed, sequences=2)).experts for seed in (0, 1))
    assert (one != other).mean() > 0.5


@pytest.mark.parametrize("name", models())
def test_every_model_says_that_it_is_synthetic_also_in_a_file(name, tmp_path):
    trace = synthesize(name, 3, draft_length=2, acceptance=0.5, prefill=2)
    assert trace.header.provenance is Provenance.SYNTHETIC
    assert "Synthetic" in trace.header.notes
    assert f"{name}.json" in trace.header.notes
    assert trace.header.acceptance.startswith("modelled")
    assert Header.from_dict(trace.header.to_dict()) == trace.header
    with TraceWriter(tmp_path / "t.spac", trace.header) as writer:
        for step in trace.steps():
            writer.append(step)
    again = open_trace(tmp_path / "t.spac", strict=True)
    assert again.header.provenance is Provenance.SYNTHETIC
    assert columns(again) == columns(trace)


def test_acceptance_is_as_asked_by_place():
    found = acceptance(synthesize("mixtral-8x7b", 3000, 3, 3, (0.9, 0.5), sequences=1).steps())
    assert found is not None
    assert found.by_position == pytest.approx((0.9, 0.45, 0.225), abs=0.05)  # 0.9, 0.9 x 0.5, and again x 0.5


def test_rejected_rows_begin_at_the_last_kept_token_and_then_drift_apart():
    chain = Chain(plain(layers=8, drift=3.0, memory=0.9), 0, 0, 0)
    text, drift = chain.advance(400)
    one, state = chain.branch(drift)
    two, _ = chain.branch(state)

    def alike(a, b):
        return np.mean([len(set(x) & set(y)) / 2 for x, y in zip(a.reshape(-1, 2), b.reshape(-1, 2), strict=True)])

    next_one = alike(text[:-1], text[1:])
    assert alike(text, one) == pytest.approx(next_one, abs=0.03)
    assert alike(text[:-2], text[2:]) == pytest.approx(alike(text, two), abs=0.03)
    # two continuations of one token are as far apart as tokens two steps apart: memory 0.9 squared
    assert alike(text[1:], one[:-1]) == pytest.approx(alike(text[:-2], text[2:]), abs=0.04)


def test_without_memory_or_preferences_overlap_is_that_of_chance():
    experts, _ = Chain(plain(drift=0.0), 0, 0, 0).advance(4000)
    assert overlap(experts, np.array([0, 4000])) == pytest.approx([2 / 16] * 3, abs=0.01)


def test_gumbel_choices_are_softmax_choices():
    """The best of scores with Gumbel noise is drawn with the chances of a softmax: checked for top-1."""
    process = plain(layers=1, experts=8, top_k=1, drift=0.0, lasting=1.0)
    logits = process.lasting(0, 0, 0)[0].astype(float)
    picks, _ = Chain(process, 0, 0, 0).advance(40_000)
    softmax = np.exp(logits) / np.exp(logits).sum()
    assert np.bincount(picks.ravel(), minlength=8) / 40_000 == pytest.approx(softmax, abs=0.01)


def test_popularity_belongs_to_the_model_and_preferences_to_the_sequence():
    process = plain(lasting=1.0)
    assert (process.lasting(0, 5, 1) == process.lasting(1, 9, 2)).all()
    draws = [stream(use, 0).standard_normal() for use in ("popularity", "domain", "sequence", "text", "aside")]
    assert len(set(draws)) == 5  # NumPy's own keys [0] and [0, 0] would give the same numbers


@settings(max_examples=30, deadline=None)
@given(experts=st.integers(2, 600), k=st.integers(1, 10), seed=st.integers(0, 1000))
def test_best_equals_sorting(experts, k, seed):
    score = np.random.default_rng(seed).standard_normal((5, experts)).astype(np.float32)
    k = min(k, experts)
    ids = best(score, k)
    found = np.take_along_axis(score, ids.astype(int), 1)
    wanted = -np.sort(-score, axis=1)[:, :k]
    assert found == pytest.approx(wanted, abs=1e-3, rel=2e-4)  # scores that close may change places
    assert all(len(set(row)) == k for row in ids.tolist())


def test_memory_does_not_grow_with_the_trace():
    def peak(steps: int) -> int:
        tracemalloc.start()
        trace = synthesize(SMALL, 100_000, draft_length=4, acceptance=0.7, sequences=1)
        for _ in islice(trace.steps(), steps):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(5)
    assert peak(250) < 1.2 * peak(50)


def test_shapes_follow_from_the_weights():
    qwen = model_shape("qwen3-30b-a3b")
    assert qwen.expert_bytes == 3 * 2048 * 768 * 2 == 9_437_184
    assert qwen.dense_bytes + qwen.all_expert_bytes == 2 * 30_532_122_624  # the published number of parameters
    assert model_shape("qwen3-30b-a3b", "q4").expert_bytes == round(4_718_592 * 4.862 / 8)
    assert model_shape("gpt-oss-20b") == gpt_oss_20b()
    published = {"mixtral-8x7b": 46_702_792_704, "olmoe": 6_919_161_856, "deepseek-v2-lite": 15_706_484_224}
    for name, parameters in published.items():
        shape = model_shape(name)
        assert shape.dense_bytes + shape.all_expert_bytes == 2 * parameters, name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"like": "qwen"}, "--like qwen: not a known model"),
        ({"tokens": 0}, "at least one token"),
        ({"tokens": 3, "sequences": 4}, "at least one token"),
        ({"draft_length": 4}, "go together"),
        ({"acceptance": 0.5}, "go together"),
        ({"draft_length": 4, "acceptance": 1.5}, "from 0 to 1"),
        ({"seed": -1}, "0 or more"),
        ({"domains": ["poems"]}, "--domains poems"),
        ({"dtype": "int3"}, "--dtype int3"),
        ({"draft_length": 1, "acceptance": 0.5, "draft": "gpt-2"}, "--draft gpt-2"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, says):
    with pytest.raises(InputError, match=says) as refused:
        synthesize(**{"like": SMALL, "tokens": 8} | arguments)
    assert "\n" not in str(refused.value)
