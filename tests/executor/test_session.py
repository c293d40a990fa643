"""A session over several requests; policy files and event logs of live runs."""

import threading
from dataclasses import replace

import pytest

from moe_spac.executor.session import Session, Settings, run
from moe_spac.policies.events import replay_events
from moe_spac.policies.load import OWN, load_policy, read_policy_file, save_policy
from moe_spac.traces.errors import InputError
from moe_spac.traces.speculate import Options

CAUSAL = sorted(cls.name for cls in OWN if cls.lossless and not cls.clairvoyant)
TOKENS = 12
SLOTS = 10


@pytest.fixture
def settings(live_machine):
    return Settings(live_machine, SLOTS, options=Options(max_new_tokens=TOKENS, draft_length=3))


@pytest.fixture
def prompt_ids(load_live, live_prompts):
    tokenizer = load_live("tiny").pair.tokenizer
    return [tokenizer.encode(prompt.turns[0]) for prompt in live_prompts]


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("spac-")]


@pytest.mark.parametrize("policy", CAUSAL)
def test_a_policy_file_runs_live_and_its_events_replay_byte_for_byte(
    policy, load_live, live_prompts, settings, greedy_texts, tmp_path
):
    """The file as spac-sim writes it; on the real clock, whose times are among the events."""
    file, log = tmp_path / "winner.toml", tmp_path / "events.jsonl"
    save_policy(file, load_policy(policy), {"slots_per_layer": SLOTS / 2})
    result = run(load_live("tiny"), read_policy_file(file)[0], live_prompts[:1], replace(settings, events=log))
    assert result.texts == greedy_texts[:1]
    assert replay_events(read_policy_file(file)[0], log) > 2 * len(result.times)


def test_requests_under_changing_policies_are_all_answered_the_same(load_live, prompt_ids, greedy_texts, settings):
    with Session(load_live("tiny"), load_policy("ar-lru"), settings) as session:
        arena = session.host.arena
        for policy in (None, "hybrimoe", "lrfu:scope=global", "static", "ar-lru"):
            if policy is not None:
                session.use(load_policy(policy))
            for ids, text in zip(prompt_ids, greedy_texts, strict=True):
                answer = session.generate(ids)
                assert session.text == text
                assert [*ids, *answer.generation.tokens] == text
                assert answer.policy == session.policy.name
                steps = answer.generation.decodes + answer.generation.verifies
                assert answer.decode.events == 2 * steps  # of this request alone, over 2 layers
                assert len(answer.times) >= steps
        assert session.host.times == []
        assert session.host.arena.slots >= arena.slots
    assert our_threads() == []


def test_the_cache_stays_warm_and_the_text_is_kept(load_live, prompt_ids, greedy_texts, settings):
    with Session(load_live("tiny"), load_policy("ar-lru"), replace(settings, slots=16)) as session:
        first = session.generate(prompt_ids[0])
        again = session.generate(prompt_ids[0])
        longer = session.generate([*greedy_texts[0], *prompt_ids[1]])
        session.forget()
        anew = session.generate([*greedy_texts[0], *prompt_ids[1]])
    assert first.prefill.hits < first.prefill.needed
    assert again.decode.hits == again.decode.needed  # all 16 experts have been in their slots by then
    assert (first.reused, again.reused) == (0, len(prompt_ids[0]) - 1)
    assert (longer.reused, anew.reused) == (len(greedy_texts[0]) - 1, 0)
    assert longer.generation.tokens == anew.generation.tokens


def test_tokens_are_told_as_they_come_and_an_answer_can_be_stopped(load_live, prompt_ids, greedy_texts, settings):
    with Session(load_live("own"), load_policy("ar-lru"), settings) as session:
        heard: list[int] = []
        sizes: list[int] = []

        def hear(tokens):
            heard.extend(tokens)
            sizes.append(len(tokens))

        answer = session.generate(prompt_ids[0], on_tokens=hear)
        assert heard == answer.generation.tokens
        assert max(sizes) > 1  # a step that keeps its drafts settles several
        heard.clear()
        sizes.clear()
        stopped = session.generate(prompt_ids[0], None, hear, lambda: len(sizes) == 2)
        assert stopped.generation.interrupted
        assert stopped.generation.tokens == heard == answer.generation.tokens[: len(heard)]
        assert session.generate(prompt_ids[0]).generation.tokens == answer.generation.tokens


def test_after_an_error_in_a_step_the_next_request_is_answered(load_live, prompt_ids, greedy_texts, settings):
    def failing(tokens):
        raise ArithmeticError("no idea")

    with Session(load_live("tiny"), load_policy("moe-spac"), settings) as session:
        session.generate(prompt_ids[0])
        with pytest.raises(ArithmeticError):
            session.generate(prompt_ids[1], on_tokens=failing)
        assert our_threads() == []
        session.generate(prompt_ids[1])
        assert session.text == greedy_texts[1]
        with pytest.raises(InputError, match="future"):
            session.use(load_policy("min"))
        session.generate(prompt_ids[0])
        assert session.text == greedy_texts[0]
    assert our_threads() == []
