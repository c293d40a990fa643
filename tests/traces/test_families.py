"""Recording through every family's router, against choices worked out from the model's own parts by other means."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny import FAMILIES, family_config, family_model

from moe_spac.simulator.parameters import count
from moe_spac.traces.cached import CachedModel, reads_in_parts
from moe_spac.traces.errors import InputError
from moe_spac.traces.models import model_shape, moe_blocks
from moe_spac.traces.recorder import RouterRecorder
from moe_spac.traces.speculate import Options, Speculation

RECURRENT = ("qwen3_next", "lfm2_moe", "jamba")
WHOLE = ("jamba",)  # its state in transformers does not survive a prompt in parts
ODD = ("deepseek_v4",)  # its first layers look experts up by token
PROMPT = list(range(5, 17))


def recorded(model, family, **kinds):
    """Text, kept rows and recorder; the target is its own draft where its cache allows that."""
    steps = []
    recorder = RouterRecorder(model, model_shape(model.config, family), steps.append, **kinds)
    draft = None if family in RECURRENT + ODD else model
    with recorder.watching():
        chunk = 512 if family in WHOLE else 5
        speculation = Speculation(model, draft, Options(6, 2, prefill_chunk=chunk), recorder)
        speculation.generate(PROMPT)
    names = ("tokens", "experts", "weights", *(["scores", "ahead"] if kinds else []))
    rows = {name: np.concatenate([getattr(s, name)[s.kept] for s in steps]) for name in names}
    return Run(model, recorder, speculation.text, rows, *plain(model, speculation.text[:-1]))


class Run(NamedTuple):
    model: Any
    recorder: RouterRecorder
    text: list[int]
    rows: dict[str, np.ndarray]
    gates: list
    handed: list


@pytest.fixture(scope="module")
def runs():
    """One recording of each family with all that its gates allow, made when first asked for."""
    made: dict[str, Run] = {}

    def get(family):
        if family not in made:
            kinds = {} if family in ODD else {"scores": True, "lookahead": 2}
            made[family] = recorded(family_model(family), family, **kinds)
        return made[family]

    return get


def plain(model, text):
    """Gate inputs and outputs, and what experts were handed, layer by layer, of one forward without cache."""
    blocks = moe_blocks(model)
    seen = [[], []]
    hooks = [b.gate.register_forward_hook(lambda m, a, out: seen[0].append((a, out))) for b in blocks]
    hooks += [b.experts.register_forward_pre_hook(lambda m, a: seen[1].append(a)) for b in blocks]
    with torch.inference_mode():
        model(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def by_hand(family, block, hidden, config):
    """Chosen experts of each token as a set, from gate weights alone: the papers' rules, in numpy."""
    gate = block.gate
    weight = next(p for name, p in gate.named_parameters() if name.endswith("weight")).detach().numpy()
    logits = hidden.reshape(-1, hidden.shape[-1]).numpy() @ weight.T
    if getattr(gate, "bias", None) is not None:
        logits = logits + gate.bias.detach().numpy()
    ranked = logits
    if family in ("deepseek_v3", "glm4_moe"):  # arXiv 2412.19437: sigmoid, plus a bias that only ranking sees
        ranked = 1 / (1 + np.exp(-logits)) + gate.e_score_correction_bias.numpy()
    if family == "deepseek_v3":  # groups by the sum of their best two
        groups = np.sort(ranked.reshape(len(ranked), 4, 2), -1)[..., -2:].sum(-1)
        ranked = _only_groups(ranked, groups, config.topk_group)
    if family == "deepseek_v2":  # arXiv 2405.04434: groups by their best
        groups = ranked.reshape(len(ranked), 4, 2).max(-1)
        ranked = _only_groups(ranked, groups, config.topk_group)
    return np.sort(np.argsort(-ranked, -1)[:, :2], -1)


def _only_groups(ranked, groups, keep):
    best = np.argsort(-groups, -1)[:, :keep]
    allowed = np.zeros_like(groups, bool)
    np.put_along_axis(allowed, best, True, -1)
    return np.where(np.repeat(allowed, ranked.shape[1] // groups.shape[1], -1), ranked, -np.inf)


NINE = ("qwen3_moe", "qwen2_moe", "qwen3_next", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe")


@pytest.mark.parametrize("family", NINE)
def test_recorded_ids_follow_the_papers_rule(runs, family):
    run = runs(family)
    assert run.rows["tokens"].tolist() == run.text[:-1]
    assert run.rows["experts"].shape == (len(run.text) - 1, len(run.recorder.blocks), 2)
    for order, block in enumerate(run.recorder.blocks):
        expected = by_hand(family, block, run.gates[order][0][0], run.model.config)
        assert np.array_equal(np.sort(run.rows["experts"][:, order], -1), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_weights_are_those_of_a_plain_forward(runs, family):
    """What experts get in one forward over the whole text, without cache, chunks or draft."""
    run = runs(family)
    assert len(run.handed) == run.rows["experts"].shape[1]
    for order, (_, ids, weights) in enumerate(run.handed):
        assert np.array_equal(run.rows["experts"][:, order], ids.numpy())
        np.testing.assert_allclose(run.rows["weights"][:, order], weights.numpy(), atol=2e-3)


@pytest.mark.parametrize("family", NINE)
def test_ids_do_not_depend_on_the_experts_implementation(runs, family):
    """O10."""
    run = runs(family)
    before = run.model.config._experts_implementation
    for implementation in {"eager", "batched_mm", "grouped_mm"} - {before}:
        run.model.set_experts_implementation(implementation)
        again = recorded(run.model, family)
        assert again.text == run.text
        assert np.array_equal(again.rows["experts"], run.rows["experts"])
    run.model.set_experts_implementation(before)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ODD])
def test_top_k_of_stored_scores_is_the_choice(runs, family):
    """O08, and the header's name for them: a bias or groups make it a biased score, all others rank as logits do."""
    run = runs(family)
    biased = ("deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe", "afmoe", "lfm2_moe")
    assert run.recorder.routers.scores == ("biased score" if family in biased else "logit")
    top = np.argsort(-run.rows["scores"].astype(np.float32), -1, kind="stable")[..., :2]
    assert np.array_equal(np.sort(top, -1), np.sort(run.rows["experts"], -1))
    for order, (_, output) in enumerate(run.gates if family not in biased else []):
        logits = output[0].reshape(-1, 8).float()
        np.testing.assert_allclose(run.rows["scores"][:, order], logits.numpy(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ODD])
def test_lookahead_is_the_next_gates_opinion(runs, family):
    """The gate module of layer l+1 called on the input of layer l's, with whatever else it is given."""
    run = runs(family)
    last = len(run.recorder.blocks) - 1
    for order in range(last):
        rest = run.gates[order + 1][0][1:]
        with torch.inference_mode():
            output = run.recorder.blocks[order + 1].gate(run.gates[order][0][0], *rest)
        assert np.array_equal(run.rows["ahead"][:, order, 0], output[2].numpy())
    for j in range(2):
        assert np.array_equal(run.rows["ahead"][:, last, j], run.handed[last][1].numpy())


def test_gates_that_need_more_than_hidden_states(runs):
    model = runs("deepseek_v4").model
    with pytest.raises(InputError, match="DeepseekV4HashRouter decides by more than hidden states"):
        recorded(model, "deepseek_v4", lookahead=1)
    with pytest.raises(InputError, match="not the top-k of its scores"):
        recorded(model, "deepseek_v4", scores=True)


def test_prompt_in_parts_is_refused_where_it_would_come_out_wrong(runs):
    model = runs("jamba").model
    assert not reads_in_parts(model)
    assert all(reads_in_parts(runs(family).model) for family in ("qwen3_next", "lfm2_moe", "mixtral"))
    speculation = Speculation(model, None, Options(2, prefill_chunk=16))
    speculation.generate(PROMPT)
    with pytest.raises(InputError, match=r"JambaForCausalLM.* loses its state .* prompts of one turn"):
        speculation.generate([4, 5, 6])
    with pytest.raises(InputError, match="--prefill-chunk of at least 11"):
        Speculation(model, None, Options(2, prefill_chunk=5)).generate(PROMPT)


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_is_what_the_model_holds(runs, family):
    """Experts and dense weights add up to the model; keys and values are what its cache grows by."""
    model = runs(family).model
    shape = model_shape(model.config, family)
    experts = [b.experts for b in moe_blocks(model)]
    one = sum(p[0].numel() for p in experts[0].parameters())
    assert (shape.layers, shape.experts, shape.top_k, shape.hidden) == (3, 8, 2, 32)
    assert shape.expert_bytes == one * 4
    assert shape.all_expert_bytes + shape.dense_bytes == 4 * sum(p.numel() for p in model.parameters())
    wide = family in ("mixtral", "olmoe", "gpt_oss", "phimoe", "minimax_m2", "jamba", "deepseek_v4")
    assert shape.expert_width == (48 if wide else 16)
    if not getattr(model.config, "kv_lora_rank", None):
        assert shape.kv_bytes_per_token == 4 * cache_growth(model)


def cache_growth(model):
    """Numbers that a token adds to keys and values, once there are more than any window holds."""
    cached, sizes = CachedModel(model, 320), []
    with torch.inference_mode():
        for count in (40, 10):
            cached.feed(range(count), keep=1)
            kept = [getattr(layer, name, None) for layer in cached.cache.layers for name in ("keys", "values")]
            sizes.append(sum(tensor.numel() for tensor in kept if tensor is not None))
    return (sizes[1] - sizes[0]) // 10


@pytest.mark.parametrize(
    ("family", "layers"),
    [("qwen3_moe", (0, 2)), ("qwen2_moe", (1,)), ("deepseek_v3", (1, 2)), ("glm4_moe", (1, 2)), ("mixtral", (0, 1, 2))],
)
def test_dense_layers_are_kept_apart(family, layers):
    """O09: mlp_only_layers, decoder_sparse_step, first_k_dense_replace."""
    assert model_shape(family_config(family), family).moe_layers == layers


@pytest.mark.parametrize("family", NINE)
def test_the_fit_helper_counts_the_same_from_the_configuration(family):
    """Two independent ways to sizes; the helper leaves out vectors inside attention, 1 % or so of models this small."""
    config = family_config(family)
    shape, size = model_shape(config, family), count(config.to_dict(), family, "config.json")
    assert (size.layers, size.moe_layers, size.experts, size.top_k) == (3, shape.moe_layers, 8, 2)
    assert (size.hidden, size.expert_width) == (shape.hidden, shape.expert_width)
    assert size.expert * 4 == shape.expert_bytes
    assert size.kv_growing * 4 == shape.kv_bytes_per_token
    assert (size.body + size.embedding + size.head) * 4 == pytest.approx(shape.dense_bytes, rel=0.015)
