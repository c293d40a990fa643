"""Conversations: what is said, what commands do, what Ctrl-C does."""

import io
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from moe_spac.executor.chat import Chat, StatusLine, stopping
from moe_spac.executor.session import Session, Settings
from moe_spac.policies.load import load_policy
from moe_spac.traces.speculate import Options

WORDS = "the expert that the router chose"


@pytest.fixture
def talk(load_live, live_machine):
    options = Options(max_new_tokens=12, draft_length=3)
    terminal = io.StringIO()
    with Session(load_live("tiny"), load_policy("ar-lru"), Settings(live_machine, 10, options=options)) as session:
        yield Chat(session, load_policy, io.StringIO(), StatusLine(terminal))


def written(talk: Chat) -> str:
    assert isinstance(talk.out, io.StringIO)
    text = talk.out.getvalue()
    talk.out.seek(0)
    talk.out.truncate()
    return text


def test_turns_are_the_greedy_text_of_the_whole_conversation(talk, load_live):
    import torch
    from transformers import AutoModelForCausalLM

    models = load_live("tiny")
    tokenizer = models.pair.tokenizer
    reference: Any = AutoModelForCausalLM.from_pretrained(models.place)
    text = ""
    for words in (WORDS, "And God said", "how many?"):
        assert talk.take(words)
        said = written(talk)
        text += ("\n\n" if text else "") + words
        rows = torch.tensor([tokenizer.encode(text)])
        out = reference.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        expected = tokenizer.decode(out[0, rows.shape[1] :], skip_special_tokens=True)
        assert said == expected + "\n"
        text += expected
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 3


def test_later_turns_keep_what_was_read(talk):
    first = talk.answer(WORDS)
    second = talk.answer("And God said")
    assert first.reused == 0
    assert second.reused > first.prompt // 2
    status = talk.status._terminal.getvalue()
    assert "% hits, 12 tokens" in status
    assert f"{second.reused}/{second.prompt} read before" in status


def test_commands(talk, capsys):
    talk.take(WORDS)
    first = written(talk)
    for line, words in (
        ("/policy hybrimoe", "policy hybrimoe"),
        ("/policy", "HybriMoe("),
        ("/policy nonsense", "error: --policy: there is no policy 'nonsense'"),
        ("/policy min", "error: .*future"),
        ("/help", "/reset"),
        ("/what", "/what: unknown"),
        ("/reset", "forgotten"),
        ("", ""),
    ):
        assert talk.take(line)
        said = capsys.readouterr().err
        assert all(word in said for word in words.split(".*"))
    assert (talk.messages, written(talk)) == ([], "")
    talk.take(WORDS)
    assert written(talk) == first
    assert talk.session.policy.name == "hybrimoe"
    assert not talk.take("/exit")


def test_a_conversation_beyond_the_context_is_refused_and_can_be_forgotten(talk, capsys):
    talk.take("a b" * 6500)
    assert "more than the model holds; /reset" in capsys.readouterr().err
    talk.take(WORDS)
    assert written(talk)


def test_ctrl_c_stops_an_answer_and_the_second_one_leaves(talk):
    main = threading.main_thread().ident
    assert main is not None
    with stopping() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    session = talk.session
    session.settings = replace(session.settings, options=replace(session.settings.options, max_new_tokens=9000))
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    answer = talk.answer(WORDS)
    assert answer.generation.interrupted
    assert len(answer.generation.tokens) < 9000
    assert talk.messages[1]["content"] + "\n" == written(talk)


def test_the_status_line_stays_on_the_last_row_and_is_taken_away(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "10")
    terminal = io.StringIO()
    with StatusLine(terminal) as status:
        assert "\x1b[1;9r" in terminal.getvalue()
        status.show("x" * 50)
        assert "\x1b[10;1H\x1b[2K\x1b[2m" + "x" * 19 + "\x1b[0m" in terminal.getvalue()
        monkeypatch.setenv("LINES", "12")
        status.show("y")
        assert "\x1b[1;11r" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b7\x1b[r\x1b[12;1H\x1b[2K\x1b8")
