import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny import tiny_config

from moe_spac.traces.cached import CachedModel
from moe_spac.traces.drafting import Ngram
from moe_spac.traces.errors import InputError
from moe_spac.traces.models import load_pair
from moe_spac.traces.sampling import Race, distribution, judge_greedy, judge_sampled
from moe_spac.traces.schema import Kind
from moe_spac.traces.speculate import Observer, Options, Speculation

PROMPT = "Question: how many experts are there? Answer:"


@pytest.fixture(scope="module")
def pair(tiny_target, tiny_draft):
    return load_pair(tiny_target, tiny_draft)


@pytest.fixture(scope="module")
def prompt(pair):
    return pair.tokenizer.encode(PROMPT)


def transformers_greedy(model, ids, count, eos=None):
    out = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=count, eos_token_id=eos, pad_token_id=0,
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def plain(pair, prompt):
    """32 new tokens by transformers' own greedy loop."""
    tokens = transformers_greedy(pair.target, prompt, 32)
    assert len(set(tokens)) > 10  # a text that says one word for ever would prove little
    return tokens


class Log(Observer):
    """Writes down what the loop tells; `lengths` overrides the draft lengths, the last one repeats."""

    def __init__(self, lengths=None, stop_after=math.inf):
        self.steps, self.drafts, self.lengths, self.asked = [], [], lengths, 0
        self.stop_after = stop_after

    def draft_length(self, planned):
        if self.lengths is None:
            return planned
        return self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0]

    def drafted(self, token):
        self.drafts.append(token)

    def step_begins(self, kind, tokens, positions, drafted):
        self.steps.append([kind, tokens.tolist(), positions.tolist(), drafted.tolist()])

    def step_ends(self, accepted, emitted):
        self.steps[-1] += [accepted, list(emitted)]

    def stop(self):
        self.asked += 1
        return self.asked > self.stop_after


@pytest.mark.parametrize("length", range(1, 9))
def test_greedy_is_lossless_with_a_strange_draft(pair, prompt, plain, length):
    result = Speculation(pair.target, pair.draft, Options(32, length)).generate(prompt)
    assert result.tokens == plain
    assert result.drafted > 0


@pytest.mark.parametrize("length", range(1, 9))
def test_greedy_is_lossless_with_itself_as_draft(pair, prompt, plain, length):
    result = Speculation(pair.target, pair.target, Options(32, length)).generate(prompt)
    assert result.tokens == plain
    assert result.acceptance == 1.0
    assert result.verifies == 32 // (length + 1) + (32 % (length + 1) > 1)  # the rest is one shorter verify or decode
    assert result.verifies + result.decodes == math.ceil(32 / (length + 1))


def test_greedy_without_draft(pair, prompt, plain):
    result = Speculation(pair.target, None, Options(32)).generate(prompt)
    assert result.tokens == plain
    assert (result.decodes, result.verifies, result.acceptance) == (32, 0, None)


def test_prompt_chunks_do_not_change_the_text(pair, prompt, plain):
    log = Log()
    result = Speculation(pair.target, pair.draft, Options(16, 3, prefill_chunk=5), log).generate(prompt)
    assert result.tokens == plain[:16]
    prefill = [s for s in log.steps if s[0] is Kind.PREFILL]
    assert [t for s in prefill for t in s[1]] == prompt[:-1]
    assert [p for s in prefill for p in s[2]] == list(range(len(prompt) - 1))
    assert max(len(s[1]) for s in prefill) == 5


def test_every_step_is_told_as_it_was(pair, prompt, plain):
    log = Log()
    result = Speculation(pair.target, pair.draft, Options(20, 4), log).generate(prompt)
    text = list(prompt)
    drafts = iter(log.drafts)
    for kind, tokens, positions, drafted, accepted, emitted in log.steps[1:]:
        assert kind is (Kind.VERIFY if len(tokens) > 1 else Kind.DECODE)
        assert tokens[0] == text[-1]
        assert positions == list(range(len(text) - 1, len(text) - 1 + len(tokens)))
        assert drafted == [False] + [True] * (len(tokens) - 1)
        assert tokens[1:] == [next(drafts) for _ in tokens[1:]]
        assert emitted[:-1] == tokens[1 : 1 + accepted]
        assert len(emitted) == accepted + 1
        text += emitted
    assert text[len(prompt) :] == plain[:20] == result.tokens


def test_draft_length_is_the_observers(pair, prompt, plain):
    log = Log(lengths=[3, 0, 2, 0])
    result = Speculation(pair.target, pair.target, Options(20, 8), log).generate(prompt)
    rows = [len(s[1]) for s in log.steps if s[0] is not Kind.PREFILL]
    assert rows[:4] == [4, 1, 3, 1]
    assert set(rows[4:]) == {1}
    assert result.tokens == plain[:20]


@pytest.mark.parametrize("use_draft", [False, True])
def test_stop_token_ends_the_turn_where_transformers_ends_it(pair, prompt, plain, use_draft):
    stop = plain[10]
    expected = transformers_greedy(pair.target, prompt, 32, eos=stop)
    options = Options(32, 6, stop_tokens=(stop,))
    result = Speculation(pair.target, pair.target if use_draft else None, options).generate(prompt)
    assert result.tokens == expected
    assert result.tokens[-1] == stop


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7])
def test_number_of_new_tokens_is_exact(pair, prompt, plain, count):
    result = Speculation(pair.target, pair.target, Options(count, 4)).generate(prompt)
    assert result.tokens == plain[:count]


def test_second_turn_continues_the_text(pair, prompt, plain):
    more = pair.tokenizer.encode(" Answer: there are")
    speculation = Speculation(pair.target, pair.draft, Options(12, 3))
    speculation.generate(prompt)
    second = speculation.generate(more)
    whole = [*prompt, *plain[:12], *more]
    assert second.tokens == transformers_greedy(pair.target, whole, 12)
    assert speculation.text == whole + second.tokens


def test_cropped_cache_continues_bit_equal(pair, prompt):
    with torch.inference_mode():
        fresh, cropped = (CachedModel(pair.target, 320) for _ in range(2))
        fresh.feed(prompt, keep=1)
        cropped.feed(prompt, keep=1)
        cropped.feed([5, 6, 7, 8], keep=4)
        cropped.crop(4)
        assert torch.equal(fresh.feed([9, 10], keep=2), cropped.feed([9, 10], keep=2))


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_stop_is_obeyed_before_the_next_forward(pair, prompt, plain, after):
    log = Log(stop_after=after)
    result = Speculation(pair.target, pair.draft, Options(64, 4, prefill_chunk=4), log).generate(prompt)
    assert result.interrupted
    assert result.tokens == plain[: len(result.tokens)]
    assert all(len(step) == 6 for step in log.steps)  # no step is left open
    assert len([s for s in log.steps if s[0] is Kind.PREFILL]) <= after


def test_vocabularies_padded_differently(pair, prompt, tiny_draft):
    """320 rows in one model, 400 in the other; padding rows never win."""
    wide = load_pair(pair.shape.name, tiny_draft).draft
    assert wide is not None
    wide.resize_token_embeddings(400, mean_resizing=False)
    wide.lm_head.weight.data[320:] = 0.0
    for big, small in ((pair.target, wide), (wide, pair.target)):
        expected = transformers_greedy(big, prompt, 12)
        assert Speculation(big, small, Options(12, 3)).generate(prompt).tokens == expected


def test_recurrent_model_is_refused_as_draft(pair):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        intermediate_size=32, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    with pytest.raises(InputError, match=r"the draft .* cannot be rolled back"):
        Speculation(pair.target, model, Options())
    with pytest.raises(InputError, match=r"the target .* cannot be rolled back"):
        Speculation(model, pair.draft, Options())


def test_accept_and_resample_follow_the_target():
    """O04: 4 tokens, p and q by hand; acceptance must be sum(min(p, q)) = 0.1 + 0.2 + 0.15 + 0.05 = 0.5."""
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    rng = torch.Generator().manual_seed(7)
    n = 20_000
    drafts = torch.multinomial(q.expand(n, 4), 1, generator=rng)[:, 0].tolist()
    counts, accepted = [0] * 4, 0
    both = torch.stack([p, p])
    for draft in drafts:
        kept, own = judge_sampled(both, q[None], [draft], rng)
        accepted += kept
        counts[draft if kept else own] += 1
    chi2 = sum((c - n * e) ** 2 / (n * e) for c, e in zip(counts, p.tolist(), strict=True))
    assert chi2 < 16.27  # 3 degrees of freedom, 0.001
    assert accepted / n == pytest.approx(0.5, abs=0.015)


def test_sampling_with_itself_as_draft_keeps_nearly_everything(pair, prompt):
    options = Options(40, 4, temperature=1.0, seed=3)
    first = Speculation(pair.target, pair.target, options).generate(prompt)
    again = Speculation(pair.target, pair.target, options).generate(prompt)
    other = Speculation(pair.target, pair.target, Options(40, 4, temperature=1.0, seed=4)).generate(prompt)
    assert first.tokens == again.tokens != other.tokens
    assert first.acceptance is not None
    assert first.acceptance > 0.95  # p/q is 1 up to rounding


def test_sampled_loop_follows_the_target(pair, prompt):
    """The next token, with the draft's favourite being a stop token, against the target's exact probabilities."""
    with torch.inference_mode():
        p1 = distribution(CachedModel(pair.target, 320).feed(prompt, keep=1)[0], 0.6, 0.9)
        q1 = distribution(CachedModel(pair.draft, 320).feed(prompt, keep=1)[0], 0.6, 0.9)
    stop = int(q1.argmax())
    n = 200
    counts = torch.zeros(320).double()
    speculation = Speculation(pair.target, pair.draft, Options(2, 1, 0.6, 0.9, seed=1, stop_tokens=(stop,)))
    for _ in range(n):
        speculation.continue_from(prompt)
        counts[speculation.generate(()).tokens[0]] += 1
    assert counts[p1 == 0].sum() == 0
    cells = p1 * n >= 5
    expected = torch.cat([p1[cells] * n, (p1[~cells].sum() * n)[None]])
    seen = torch.cat([counts[cells], counts[~cells].sum()[None]])
    degrees = int((expected > 0).sum()) - 1
    chi2 = float((((seen - expected) ** 2) / expected.clamp(min=1e-9))[expected > 0].sum())
    assert chi2 < degrees + 4 * math.sqrt(2 * degrees)  # about 4 standard deviations


class Chain(torch.nn.Module):
    """A model of three tokens whose next one depends on the last alone: row i of `logits` is what follows token i."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.config, self.device = torch.tensor(logits), tiny_config(vocab_size=3), "cpu"

    def forward(self, input_ids, cache, **rest):
        empty = torch.zeros(1, 2, input_ids.shape[1], 1)
        cache.update(empty, empty, 0)
        return type("Out", (), {"logits": self.logits[input_ids]})


def law(logits, temperature, top_p):
    """Next-token probabilities of one row in plain Python: softmax, then the smallest top set with mass `top_p`."""
    weights = [math.exp(x / temperature) for x in logits]
    probs = [w / sum(weights) for w in weights]
    kept, mass = [0.0] * len(probs), 0.0
    for token in sorted(range(len(probs)), key=lambda t: -probs[t]):
        if mass < top_p:
            kept[token] = probs[token]
        mass += probs[token]
    return [p / sum(kept) for p in kept]


@pytest.mark.parametrize(
    ("temperature", "top_p", "invariant"), [(1.0, 1.0, False), (0.7, 0.85, False), (1.0, 1.0, True), (0.7, 0.85, True)]
)
def test_whole_sampled_texts_follow_the_target(temperature, top_p, invariant):
    """O04 through the loop: all 27 texts of three tokens, drafted two at a time by another, against exact odds."""
    rows = [[0.2, 1.0, -0.5], [1.2, 0.0, 0.4], [-1.0, 0.3, 0.9]]
    target, draft = Chain(rows), Chain([[1.0, 0.0, 0.5], [0.0, 0.8, 0.6], [0.9, 0.2, -0.3]])
    options = Options(3, 2, temperature, top_p, seed=11, draft_invariant=invariant)
    speculation = Speculation(target, draft, options)
    n, seen, accepted = 600, Counter(), 0
    for i in range(n):
        speculation.continue_from([0], replace(options, seed=i) if invariant else None)
        result = speculation.generate(())
        accepted += result.accepted
        seen[tuple(result.tokens)] += 1
    assert 0.2 * n < accepted < 1.8 * n  # drafts are kept and refused, both often
    laws = [law(row, temperature, top_p) for row in rows]
    expected = {
        text: n * math.prod(laws[last][token] for last, token in zip((0, *text), text, strict=False))
        for text in itertools.product(range(3), repeat=3)
    }
    assert sum(seen[text] for text in expected if expected[text] == 0) == 0
    cells = [text for text in expected if expected[text] > 0]
    chi2 = sum((seen[text] - expected[text]) ** 2 / expected[text] for text in cells)
    degrees = len(cells) - 1
    assert (
        chi2 < degrees + 3.1 * math.sqrt(2 * degrees) + 5
    )  # about the 0.999 quantile of chi-square for 7 to 26 degrees


def test_draws_of_a_race_follow_their_law_and_meet_those_of_another():
    """O04's two laws. Both choose x with probability 1 / sum over y of max(p(y)/p(x), q(y)/q(x)): the first of the
    exponentials of rates p and q is x's in both if no other is in either."""
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    race, n = Race(7), 20_000
    pairs = [(race.draw(p, i), race.draw(q, i)) for i in range(n)]
    for law, drawn in zip((p, q), zip(*pairs, strict=True), strict=True):
        counts = torch.bincount(torch.tensor(drawn), minlength=4)
        assert float(((counts - n * law) ** 2 / (n * law)).sum()) < 16.27  # 3 degrees of freedom, 0.001
    meet = 1 / 10 + 1 / (37 / 6) + 1 / (23 / 3) + 1 / 20  # by hand, of the formula above
    assert sum(a == b for a, b in pairs) / n == pytest.approx(meet, abs=0.015)
    assert race.draw(p, 5) == Race(7).draw(p, 5)


def test_a_seeds_text_does_not_depend_on_the_draft(pair, prompt):
    def text(draft, length, seed=3):
        options = Options(40, length, temperature=1.0, top_p=0.9, seed=seed, draft_invariant=True)
        result = Speculation(pair.target, draft, options).generate(prompt)
        return result.tokens, result.accepted

    plain, _ = text(None, 0)
    itself, accepted = text(pair.target, 4)
    assert itself == plain
    assert accepted == 32  # as its own draft it keeps all: 8 steps of 5 tokens
    assert all(text(draft, length)[0] == plain for draft in (pair.draft, Ngram()) for length in (1, 4, 7))
    assert text(None, 0, seed=4)[0] != plain


def test_distribution_by_hand():
    logits = torch.tensor([math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05)])
    assert distribution(logits, 1.0).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05])
    squared = [x * x for x in (0.5, 0.3, 0.15, 0.05)]
    assert distribution(logits, 0.5).tolist() == pytest.approx([x / sum(squared) for x in squared])
    assert distribution(logits, 1.0, 0.7).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert distribution(logits, 1.0, 0.4).tolist() == pytest.approx([1, 0, 0, 0])


def test_judge_greedy():
    assert judge_greedy([4, 5, 6, 7], [4, 5, 9]) == (2, 6)
    assert judge_greedy([4, 5, 6, 7], [4, 5, 6]) == (3, 7)
    assert judge_greedy([4], []) == (0, 4)


class Fed(CachedModel):
    """Counts the tokens that a model is fed."""

    fed = 0

    def feed(self, ids, keep):
        self.fed += len(ids)
        return super().feed(ids, keep)


@pytest.mark.parametrize("use_draft", [False, True])
def test_a_conversation_sent_again_is_read_from_where_it_parts(pair, prompt, plain, use_draft):
    """O45: a client sends the whole conversation: the tokens of a new start, without reading the beginning again."""
    draft = pair.draft if use_draft else None
    more = pair.tokenizer.encode(" Answer: there are")
    speculation = Speculation(pair.target, draft, Options(12, 3))
    speculation.target = counted = Fed(pair.target, speculation.target.vocab)
    first = speculation.generate(prompt)
    told = first.tokens
    before = counted.fed
    whole = [*prompt, *first.tokens[:7], *more]  # the client has cut the answer
    common = len(prompt) + 7 + (more[0] == first.tokens[7])
    assert speculation.continue_from(whole) == common
    second = speculation.generate(())
    assert second.tokens == transformers_greedy(pair.target, whole, 12)
    assert counted.fed - before == len(whole) - common + second.drafted + len(second.tokens) - 1 - second.accepted
    assert told == plain[:12]  # the first answer is not touched


def test_continuing_with_the_same_text_reads_one_token(pair, prompt, plain):
    speculation = Speculation(pair.target, pair.draft, Options(8, 3))
    speculation.generate(prompt)
    assert speculation.continue_from(prompt) == len(prompt) - 1
    assert speculation.generate(()).tokens == plain[:8]
    assert speculation.continue_from([*prompt, *plain[:8]], Options(4, 2)) == len(prompt) + 7
    assert speculation.generate(()).tokens == plain[8:12]
    with pytest.raises(InputError, match="no tokens"):
        speculation.continue_from([])


def test_full_sliding_windows_begin_anew_and_stay_exact():
    from tiny import family_model

    model = family_model("gpt_oss")  # windows of 8
    prompt, other = list(range(5, 25)), [*range(5, 15), 40, 41]
    speculation = Speculation(model, model, Options(6, 2))
    speculation.generate(prompt)
    assert speculation.continue_from(other) == 0
    assert speculation.generate(()).tokens == Speculation(model, None, Options(6)).generate(other).tokens


@pytest.mark.parametrize("after", range(2, 9))
def test_an_interrupted_answer_can_be_continued(pair, prompt, plain, after):
    """Interrupted while drafting: proposals that nobody judged are not taken for text."""
    speculation = Speculation(pair.target, pair.draft, Options(24, 4), Log(stop_after=after))
    first = speculation.generate(prompt)
    assert first.interrupted
    speculation.observer = Observer()
    rest = speculation.generate(()).tokens
    assert [*first.tokens, *rest][:24] == plain[:24]
