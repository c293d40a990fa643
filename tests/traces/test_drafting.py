"""Drafts from the text itself: what is proposed, that greedy and sampled text stay the target's, what is refused."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import family_config, save_tiny_tokenizer, tiny_config

from moe_spac.traces.drafting import Ngram, Round
from moe_spac.traces.errors import InputError
from moe_spac.traces.models import load_pair
from moe_spac.traces.prompts import Prompt
from moe_spac.traces.reader import open_trace
from moe_spac.traces.recorder import record
from moe_spac.traces.schema import Kind
from moe_spac.traces.speculate import Observer, Options, Speculation


def proposed(draft, text, wanted, stops=(), temperature=0.0):
    def never(law, position):
        raise AssertionError("an n-gram has nothing to draw")

    return draft.propose(
        Round(text, wanted, stops, temperature, 1.0, 512, never, Observer(), lambda: False, lambda phase, begin: None)
    )


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, [9, 1, 2]),
        ([1, 2, 3, 9, 1, 2, 3], 6, [9, 1, 2, 3, 9, 1]),  # goes on with its own proposals
        ([5, 1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # the latest of two
        ([5, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2], 1, [7]),  # three tokens before two, though earlier
        ([4, 4, 4, 4], 3, [4, 4, 4]),
        ([1, 2, 3, 4], 3, []),
        ([2, 9, 2], 3, []),  # one token is too little
        ([1], 3, []),
    ],
)
def test_the_latest_longest_run_is_continued(text, wanted, expected):
    assert proposed(Ngram().open(10), text, wanted).tokens == expected


def test_a_stop_token_is_not_proposed():
    assert proposed(Ngram().open(10), [1, 2, 3, 0, 1, 2, 3], 4, stops=(0,)).tokens == []
    assert proposed(Ngram().open(10), [1, 2, 3, 5, 0, 1, 2, 3], 4, stops=(0,)).tokens == [5]


def test_proposals_are_certain_of_themselves():
    found = proposed(Ngram().open(4), [1, 2, 3, 1, 2], 2, temperature=0.7)
    assert found.sure == [1.0, 1.0]
    assert [law.tolist() for law in found.laws] == [[0, 0, 0, 1], [0, 1, 0, 0]]


def by_search(text, longest, shortest):
    """The token after the latest earlier occurrence of the longest run, by looking everywhere."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return [text[end]]
    return []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(1, 6), max_size=12), st.integers(1, 40)
)
def test_an_index_that_grows_with_the_text_finds_what_a_search_finds(text, growth, cut):
    """Also after the text was cut back and continued otherwise."""
    draft = Ngram(3, 2).open(3)
    ends = [min(len(text), end) for end in itertools.accumulate(growth)]
    for end in ends:
        assert proposed(draft, text[:end], 1).tokens == by_search(text[:end], 3, 2)
    other = [*text[:cut], *(2 - token for token in text[cut:])]
    draft.keep(cut)
    assert proposed(draft, other, 1).tokens == by_search(other, 3, 2)


@pytest.fixture(scope="module")
def pair(tiny_target):
    return load_pair(tiny_target, "ngram")


@pytest.mark.parametrize("length", [1, 4, 8])
def test_greedy_text_is_the_targets(pair, length):
    prompt = pair.tokenizer.encode("the expert that the router chose is the expert that the router")
    plain = Speculation(pair.target, None, Options(24)).generate(prompt)
    speculation = Speculation(pair.target, pair.draft, Options(24, length))
    found = speculation.generate(prompt)
    assert found.tokens == plain.tokens
    assert found.drafted > 0
    assert speculation.continue_from([*prompt, *plain.tokens[:5], 7, 8, 9]) == len(prompt) + 5
    cold = Speculation(pair.target, None, Options(24)).generate([*prompt, *plain.tokens[:5], 7, 8, 9])
    assert speculation.generate(()).tokens == cold.tokens


class Chain(torch.nn.Module):
    """Three tokens; the next depends on the last alone: row i of `logits` is what follows token i."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.config, self.device = torch.tensor(logits), tiny_config(vocab_size=3), "cpu"

    def forward(self, input_ids, cache, **rest):
        empty = torch.zeros(1, 2, input_ids.shape[1], 1)
        cache.update(empty, empty, 0)
        return type("Out", (), {"logits": self.logits[input_ids]})


def test_sampled_text_follows_the_target():
    """O04 with certain proposals: all 27 texts of three tokens after 0 1 2 0, against exact odds."""
    rows = [[0.2, 1.0, -0.5], [1.2, 0.0, 0.4], [-1.0, 0.3, 0.9]]
    speculation = Speculation(Chain(rows), Ngram(2, 1), Options(3, 2, temperature=1.0, seed=5))
    n, seen, kept, drafted = 1500, Counter(), 0, 0
    for _ in range(n):
        speculation.continue_from([0, 1, 2, 0])
        result = speculation.generate(())
        kept, drafted = kept + result.accepted, drafted + result.drafted
        seen[tuple(result.tokens)] += 1
    assert 0.2 * drafted < kept < 0.8 * drafted  # both often
    odds = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in rows]
    expected = {
        text: n * math.prod(odds[last][token] for last, token in zip((0, *text), text, strict=False))
        for text in itertools.product(range(3), repeat=3)
    }
    chi2 = sum((seen[text] - e) ** 2 / e for text, e in expected.items())
    assert chi2 < 54.05  # 26 degrees of freedom, 0.001


def test_the_trace_says_where_drafts_came_from(pair, tmp_path):
    prompts = [Prompt("p", "", ("the expert that the router chose is the expert that the router",))]
    record(pair, prompts, tmp_path / "t.spac", Options(24, 3))
    trace = open_trace(tmp_path / "t.spac", strict=True)
    draft = trace.header.draft
    assert draft is not None
    assert (draft.name, draft.layers, draft.dense_bytes) == ("n-gram of 4 to 2 tokens", 0, 0)
    assert (trace.header.draft_length, trace.header.acceptance) == (3, "measured")
    assert any(step.kind is Kind.VERIFY for step in trace.steps())


@pytest.mark.parametrize("draft", ["ngram", "folder"])
def test_a_target_that_cannot_roll_back_is_refused_before_weights(draft, tmp_path, tiny_draft):
    """There are no weights in the folder."""
    from moe_spac.executor.models import load_models

    family_config("qwen3_next").save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    for load in (load_pair, load_models):
        with pytest.raises(InputError, match=r"--draft: the target .* cannot be rolled back"):
            load(tmp_path, "ngram" if draft == "ngram" else tiny_draft)
