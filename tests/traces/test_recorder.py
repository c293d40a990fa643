import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import family_model, save_tiny_target, save_tiny_tokenizer, tiny_config

from moe_spac.traces.errors import InputError
from moe_spac.traces.models import load_pair, moe_blocks
from moe_spac.traces.prompts import Prompt, encode
from moe_spac.traces.reader import open_trace
from moe_spac.traces.recorder import RouterRecorder, find_difference, record
from moe_spac.traces.routers import half_scores
from moe_spac.traces.schema import Kind, Provenance
from moe_spac.traces.speculate import Options, Speculation

PROMPTS = [
    Prompt("one", "a", ("Question: how many experts are there? Answer:",)),
    Prompt("two", "b", ("In the beginning",)),
]


@pytest.fixture(scope="module")
def pair(tiny_target, tiny_draft):
    return load_pair(tiny_target, tiny_draft)


@pytest.fixture(scope="module")
def whole(pair, tmp_path_factory):
    """A recording with everything: two prompts, chunks, scores and two layers of lookahead."""
    out = tmp_path_factory.mktemp("whole") / "t.spac"
    options = Options(20, 3, prefill_chunk=7)
    summary = record(pair, PROMPTS, out, options, source="here", scores=True, lookahead=2, compare=True)
    return summary, open_trace(out)


def kept_rows(steps, sequence, field):
    rows = [getattr(s, field)[s.kept] for s in steps if s.sequence == sequence]
    return np.concatenate(rows)


def routing_of(model, ids):
    """Router logits [L, n, E] of one plain forward, by transformers' own output."""
    with torch.inference_mode():
        out = model(torch.tensor([ids]), output_router_logits=True, use_cache=False)
    return torch.stack(out.router_logits)


def test_header_says_everything(whole, pair):
    header = whole[1].header
    assert header.provenance is Provenance.RECORDED
    assert header.acceptance == "measured"
    assert (header.draft_length, header.lookahead, header.scores, header.weights) == (3, 2, "logit", True)
    assert header.target == pair.shape
    assert header.draft == pair.draft_shape
    assert header.sampling["temperature"] == 0.0
    assert header.sampling["seed"] == 0
    assert set(header.tools) == {"moe-spac", "torch", "transformers", "python"}
    lengths = [len(pair.tokenizer.encode(p.turns[0])) for p in PROMPTS]
    assert [s["prompt_tokens"] for s in header.sequences] == lengths
    assert [(s["name"], s["domain"]) for s in header.sequences] == [("one", "a"), ("two", "b")]


def test_kept_rows_are_the_text_and_its_routing(whole, pair):
    """Against one forward over the final text without cache, chunks or draft, and transformers' own router output."""
    summary, trace = whole
    steps = list(trace.steps())
    assert [s.sequence for s in steps] == sorted(s.sequence for s in steps)
    for sequence, text in enumerate(summary.texts):
        assert kept_rows(steps, sequence, "tokens").tolist() == text[:-1]
        assert kept_rows(steps, sequence, "positions").tolist() == list(range(len(text) - 1))
        logits = routing_of(pair.target, text[:-1])
        weights, ids = logits.softmax(-1).topk(2)
        assert np.array_equal(kept_rows(steps, sequence, "experts"), ids.permute(1, 0, 2).numpy())
        weights = (weights / weights.sum(-1, keepdim=True)).permute(1, 0, 2).numpy()
        np.testing.assert_allclose(kept_rows(steps, sequence, "weights"), weights, atol=1e-3)
        scores = kept_rows(steps, sequence, "scores")
        np.testing.assert_allclose(scores, logits.permute(1, 0, 2).numpy(), atol=2e-3, rtol=2e-3)


def test_counts_of_trace_and_summary_agree(whole):
    summary, trace = whole
    steps = list(trace.steps())
    assert sum(s.emitted for s in steps) == summary.new_tokens == 40
    assert sum(len(s) for s in steps) == summary.rows
    assert sum(int(s.drafted.sum()) for s in steps) == summary.total("drafted")
    assert sum(s.accepted for s in steps) == summary.total("accepted")
    assert trace.summary().state == "complete"


def test_greedy_is_identical_to_plain(whole):
    """O01 in float32."""
    assert whole[0].compared
    assert whole[0].differences == []


def test_scores_give_the_ids_back(whole):
    """O08: the top-k of what is stored is what the router chose, for every row."""
    for step in whole[1].steps():
        top = np.argsort(-step.scores, axis=-1, kind="stable")[..., :2]
        assert np.array_equal(np.sort(top, -1), np.sort(step.experts, -1))


@pytest.mark.parametrize("ids", [[2, 3], [2, 1], [3, 1]])
def test_scores_keep_the_choice_where_half_precision_would_lose_it(ids):
    near = torch.tensor([[1.0, 2.0, 2.0001, 2.00005]])  # ids 1..3 are one number in float16
    stored = half_scores(near, torch.tensor([ids]))
    assert set(np.argsort(-stored[0])[:2].tolist()) == set(ids)
    np.testing.assert_allclose(stored[0], near[0].numpy(), rtol=2e-3)


def test_scores_that_do_not_give_the_choice_are_refused():
    with pytest.raises(InputError, match="not the top-k of its scores"):
        half_scores(torch.tensor([[1.0, 2.0, 2.1, 2.2]]), torch.tensor([[2, 1]]))


def test_lookahead_is_the_next_gates_opinion(whole, pair):
    """By hand: the gate weights of layer 1 on the input of layer 0's gate; layer 1 repeats itself."""
    summary, trace = whole
    steps = list(trace.steps())
    text = summary.texts[0][:-1]
    seen = []
    blocks = moe_blocks(pair.target)
    hook = blocks[0].gate.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    routing_of(pair.target, text)
    hook.remove()
    weight = blocks[1].gate.get_parameter("weight").detach().numpy()
    logits = seen[0].reshape(-1, 64).numpy() @ weight.T
    guess = np.argsort(-logits, -1)[:, :2]
    ahead = kept_rows(steps, 0, "ahead")
    assert ahead.shape == (len(text), 2, 2, 2)
    assert np.array_equal(ahead[:, 0, 0], guess)
    assert np.array_equal(ahead[:, 0, 1], guess)
    own = kept_rows(steps, 0, "experts")[:, 1]
    assert np.array_equal(ahead[:, 1, 0], own)
    assert np.array_equal(ahead[:, 1, 1], own)


class Scripted(torch.nn.Module):
    """A draft that says what it is told to say at each position."""

    def __init__(self, script: dict[int, int]):
        super().__init__()
        self.script, self.config, self.device, self.at = script, tiny_config(), "cpu", 0

    def forward(self, input_ids, cache, **rest):
        shape = (1, 2, input_ids.shape[1], 16)
        cache.update(torch.zeros(shape), torch.zeros(shape), 0)
        logits = torch.zeros(1, input_ids.shape[1], 320)
        for row in range(input_ids.shape[1]):
            position = cache.get_seq_length() - input_ids.shape[1] + row
            logits[0, row, self.script.get(position + 1, 0)] = 1.0
        return type("Out", (), {"logits": logits})


def test_rejected_rows_stay_and_are_marked(pair):
    """O05: drafts right, right, wrong: one verify step of 4 rows with 2 accepted and 3 emitted."""
    ids = pair.tokenizer.encode(PROMPTS[0].turns[0])
    plain = Speculation(pair.target, None, Options(3)).generate(ids).tokens
    n = len(ids)
    draft = Scripted({n: plain[0], n + 1: plain[1], n + 2: (plain[2] + 1) % 320})
    steps = []
    recorder = RouterRecorder(pair.target, pair.shape, steps.append)
    with recorder.watching():
        result = Speculation(pair.target, draft, Options(4, 3), recorder).generate(ids)
    verify = steps[1]
    assert [s.kind for s in steps[:2]] == [Kind.PREFILL, Kind.VERIFY]
    assert verify.experts.shape == (4, 2, 2)
    assert (verify.accepted, verify.emitted) == (2, 3)
    assert verify.drafted.tolist() == [False, True, True, True]
    assert verify.kept.tolist() == [True, True, True, False]
    assert result.tokens[:3] == plain
    assert (result.drafted_at[0], result.accepted_at[:3]) == (result.verifies, [1, 1, 0])
    one = math.exp(1) / (math.exp(1) + 319)  # the script's logits are 1 for its token and 0 for 319 others
    assert result.sure_kept == pytest.approx(2 * one)
    assert result.sure_refused == pytest.approx((result.drafted - 2) * one)


def test_hooks_are_gone_afterwards(pair):
    def hooks():
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pair.target.modules()]

    before = hooks()
    recorder = RouterRecorder(pair.target, pair.shape, lambda step: None, scores=True)
    with recorder.watching():
        assert sum(hooks()) == sum(before) + 2 * 3  # two layers: before experts, before and after the gate
    assert hooks() == before


def test_first_layer_dense(tmp_path):
    """O09: the absolute layer number is in the header, the rows have one MoE layer."""
    save_tiny_target(tmp_path / "t", mlp_only_layers=[0])
    pair = load_pair(tmp_path / "t")
    record(pair, PROMPTS[:1], tmp_path / "t.spac", Options(4), lookahead=1)
    trace = open_trace(tmp_path / "t.spac")
    assert trace.header.target.moe_layers == (1,)
    assert trace.header.target.layers == 2
    assert trace.header.acceptance == "none"
    assert trace.header.draft_length == 0
    assert all(s.experts.shape[1:] == (1, 2) for s in trace.steps())
    assert [s.kind for s in trace.steps()] == [Kind.PREFILL] + [Kind.DECODE] * 4


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_ids_do_not_depend_on_the_experts_implementation(whole, tiny_target, tiny_draft, tmp_path, implementation):
    """O10."""
    pair = load_pair(tiny_target, tiny_draft, experts=implementation)
    assert pair.target.config._experts_implementation == implementation
    record(pair, PROMPTS, tmp_path / "t.spac", Options(20, 3, prefill_chunk=7))
    for ours, theirs in zip(open_trace(tmp_path / "t.spac").steps(), whole[1].steps(), strict=True):
        assert np.array_equal(ours.experts, theirs.experts)
        assert np.array_equal(ours.tokens, theirs.tokens)


def test_same_seed_same_bytes(pair, tmp_path):
    options = Options(12, 3, temperature=0.8, top_p=0.9, seed=5)
    for name in "ab":
        record(pair, PROMPTS, tmp_path / name, options)
    record(pair, PROMPTS, tmp_path / "c", replace(options, seed=6))
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_difference_is_located_with_its_margin(pair):
    ids = pair.tokenizer.encode(PROMPTS[0].turns[0])
    text = [*ids, *Speculation(pair.target, None, Options(8)).generate(ids).tokens]
    assert find_difference(pair, "p", [ids], Options(8), text) is None
    at = len(ids) + 3
    changed = [*text[:at], (text[at] + 1) % 320, *text[at + 1 :]]
    found = find_difference(pair, "p", [ids], Options(8), changed)
    assert found is not None
    assert (found.position, found.speculative, found.plain) == (at, changed[at], text[at])
    with torch.inference_mode():
        top = pair.target(torch.tensor([text[:at]])).logits[0, -1].topk(2).values
    assert found.margin == pytest.approx(float(top[0] - top[1]), abs=1e-4)


def test_long_prompt_has_every_row(pair, tmp_path):
    """O06's size: 8,192 prompt rows in one forward; the last prompt token begins the first step."""
    ids = np.random.default_rng(0).integers(1, 320, 8193).tolist()
    rows = []
    recorder = RouterRecorder(pair.target, pair.shape, lambda step: rows.append((step.kind, len(step))))
    with recorder.watching():
        Speculation(pair.target, None, Options(1, prefill_chunk=10_000), recorder).generate(ids)
    assert rows == [(Kind.PREFILL, 8192), (Kind.DECODE, 1)]


def test_prompt_longer_than_the_model(pair, tmp_path):
    with pytest.raises(InputError, match=r"prompt two: .* the model holds 16384"):
        record(pair, [replace(PROMPTS[1], turns=("word " * 20_000,))], tmp_path / "t", Options(4))


@pytest.fixture
def chat(pair, tmp_path):
    """Three turns, recorded (O45)."""
    prompt = Prompt("c", "", ("How many?", "And now?", "Why?"), chat=True)
    summary = record(pair, [prompt], tmp_path / "t.spac", Options(5, 2), compare=True)
    return encode(pair.tokenizer, prompt), summary, open_trace(tmp_path / "t.spac")


def test_turns_are_marked_and_no_prefix_runs_twice(chat):
    turns, summary, trace = chat
    steps = list(trace.steps())
    assert [s.turn for s in steps] == sorted(s.turn for s in steps)
    assert {s.turn for s in steps} == {0, 1, 2}
    assert kept_rows(steps, 0, "tokens").tolist() == summary.texts[0][:-1]
    assert kept_rows(steps, 0, "positions").tolist() == list(range(len(summary.texts[0]) - 1))
    read = [sum(len(s) for s in steps if s.turn == t and s.kind is Kind.PREFILL) for t in range(3)]
    # A turn reads its own words: the first all but its last, a later one also the answer's last token before it.
    assert read == [len(turns[0]) - 1, len(turns[1]), len(turns[2])]
    assert trace.header.sequences[0]["prompt_tokens"] == sum(map(len, turns))


def test_turns_write_what_a_fresh_run_over_the_history_writes(pair, chat):
    turns, summary, _ = chat
    history: list[int] = []
    for ids in turns:
        history += ids
        history += Speculation(pair.target, None, Options(5)).generate(history).tokens
    assert history == summary.texts[0]
    assert summary.differences == []


@pytest.fixture(scope="module")
def both(tiny_target, tmp_path_factory):
    """A draft with experts of its own, and two recordings: with its stream and without."""
    folder = tmp_path_factory.mktemp("both")
    draft = save_tiny_target(folder / "d", num_experts=6, num_hidden_layers=3, mlp_only_layers=[1])
    pair = load_pair(tiny_target, draft)
    record(pair, PROMPTS, folder / "alone.spac", Options(12, 3))
    summary = record(pair, PROMPTS, folder / "t.spac", Options(12, 3), draft_out=folder / "d.spac", scores=True)
    return pair, summary, *(open_trace(folder / f"{name}.spac") for name in ("alone", "t", "d"))


def test_a_draft_with_experts_stays_out_of_the_targets_trace(both):
    """vllm#48622."""
    _, summary, alone, target, _ = both
    assert summary.total("drafted") > 20
    for ours, theirs in zip(target.steps(), alone.steps(), strict=True):
        assert np.array_equal(ours.experts, theirs.experts)
        assert np.array_equal(ours.tokens, theirs.tokens)
    assert target.header.target.experts == 8


def test_the_drafts_stream_is_the_drafts_routing(both):
    """Kept rows against a plain forward of the draft over the text."""
    pair, summary, _, _, stream = both
    assert (stream.header.target.experts, stream.header.target.moe_layers) == (6, (0, 2))
    assert stream.header.draft is None
    assert "Routing of the draft" in stream.header.notes
    steps = list(stream.steps())
    for sequence, text in enumerate(summary.texts):
        tokens = kept_rows(steps, sequence, "tokens").tolist()
        assert kept_rows(steps, sequence, "positions").tolist() == list(range(len(tokens)))
        assert tokens == text[: len(tokens)]
        assert len(tokens) > len(text) - 5
        ids = routing_of(pair.draft, tokens).softmax(-1).topk(2).indices.permute(1, 0, 2)
        assert np.array_equal(kept_rows(steps, sequence, "experts"), ids.numpy())


def test_the_drafts_rounds_stand_beside_the_verify_steps(both):
    """Every row of a round after its unread text is a row of the verify step: same token, same position."""
    _, _, _, target, stream = both
    rounds = [s for s in stream.steps() if s.kind is not Kind.PREFILL]
    verifies = [s for s in target.steps() if s.kind is Kind.VERIFY]
    assert len(rounds) == len(verifies)
    for ours, theirs in zip(rounds, verifies, strict=True):
        shared = theirs.positions[:-1]  # the last draft is not read by the draft itself
        assert (ours.sequence, ours.positions[-1]) == (theirs.sequence, shared[-1])
        assert np.array_equal(ours.positions[-len(shared) :], shared)
        assert np.array_equal(ours.tokens[-len(shared) :], theirs.tokens[:-1])
        assert ours.accepted == min(theirs.accepted, len(shared) - 1)


def test_dense_draft_has_no_stream(pair, tmp_path):
    with pytest.raises(InputError, match=r"--draft-out: the draft .* has no routed experts"):
        record(pair, PROMPTS, tmp_path / "t", Options(4), draft_out=tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent")
    family_model("qwen3_next").save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


def test_recurrent_target_is_recorded_without_a_draft(recurrent, tmp_path):
    pair = load_pair(recurrent, "none")
    summary = record(pair, PROMPTS[:1], tmp_path / "t.spac", Options(6, prefill_chunk=7), scores=True, lookahead=1)
    trace = open_trace(tmp_path / "t.spac")
    assert trace.summary().state == "complete"
    assert kept_rows(trace.steps(), 0, "tokens").tolist() == summary.texts[0][:-1]
    assert (trace.header.target.moe_layers, trace.header.scores) == ((0, 1, 2), "logit")


def test_recurrent_model_is_refused_for_speculation_before_weights_are_read(
    recurrent, tiny_target, tiny_draft, tmp_path
):
    shutil.copytree(recurrent, tmp_path / "t")
    (tmp_path / "t" / "model.safetensors").unlink()
    reason = r"2 of 3 layers with linear attention .* cannot be rolled back .* use --draft none"
    with pytest.raises(InputError, match=r"--draft: the target .* " + reason):
        load_pair(tmp_path / "t", tiny_draft)
    with pytest.raises(InputError, match=r"--draft: the draft .* " + reason):
        load_pair(tiny_target, tmp_path / "t")
