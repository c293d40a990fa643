"""`serve`, `chat` and `generate` as commands: what is refused at once, statuses, event logs, Ctrl-C."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import pytest

from moe_spac.executor.cli import app
from moe_spac.policies.events import replay_events
from moe_spac.policies.load import load_policy
from moe_spac.traces.errors import InputError

COMMAND = [sys.executable, "-c", "from moe_spac.executor.cli import main; main()"]


def call(*words) -> int:
    return app([str(w) for w in words], standalone_mode=False)


@pytest.fixture
def pair(tiny_target, tiny_draft):
    return ["--target", str(tiny_target), "--draft", str(tiny_draft), "--machine", "rtx4060-laptop"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: others could use.*--open-to-all"),
        (["--host", "192.168.0.7"], "--host 192.168.0.7"),
        (["--host", "example.org"], "--host example.org"),
        (["--host", "256.0.0.1", "--api-key", "k"], "cannot listen"),
        (["--api-key", " "], "--api-key: it is empty"),
        (["--policy", "min"], "future"),
        (["--policy", "ar-lur"], "did you mean ar-lru"),
        (["--max-body", "big"], "--max-body"),
        (["--draft-length", "x"], "--draft-length x"),
    ],
)
def test_serve_refuses_at_once(words, said, pair):
    with pytest.raises(InputError, match=said):
        call("serve", "--port", 0, *pair, *words)


def test_a_port_that_is_taken_is_named(pair):
    from moe_spac.executor.web import listen

    with listen("127.0.0.1", 0) as sock, pytest.raises(InputError, match=r"--port \d+: cannot listen"):
        call("serve", "--port", sock.getsockname()[1], *pair)


def test_serve_without_its_extra_says_how_to_get_it(pair, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "moe_spac.executor.web", raising=False)
    with pytest.raises(InputError, match=r"needs uvicorn; install it with pip install 'moe-spac\[serve\]'"):
        call("serve", *pair)


@pytest.mark.parametrize("name", ["./mine.py:Mine", "mine.py:Mine", "winner.toml", "a/b", "min", "nonsense"])
def test_requests_may_not_name_files(name):
    from types import SimpleNamespace
    from typing import Any

    from moe_spac.executor.cli_serve import check_remote_policy
    from moe_spac.executor.opening import Opening

    some: Any = SimpleNamespace(allow_lossy=False)
    opening: Any = SimpleNamespace(checked_policy=lambda spec: Opening.checked_policy(some, spec))
    with pytest.raises(InputError):
        check_remote_policy(name, opening)
    check_remote_policy("moe-spac:balance=false", opening)


def test_a_load_that_fails_ends_the_server(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        call("serve", "--port", 0, "--target", tmp_path / "nowhere", "--machine", "rtx4060-laptop")


def test_ctrl_c_ends_a_server_that_answers(pair, tmp_path):
    errors = tmp_path / "err.txt"
    words = ["serve", "--port", "0", "--json", "--max-new-tokens", "9000", *pair]
    with errors.open("w") as log:
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline()
        url = json.loads(text)["url"]
        for _ in range(600):
            if httpx.get(f"{url}/health").status_code == 200:
                break
            time.sleep(0.1)
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "the", "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert "the server is ending" in rest[-1]
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert "Traceback" not in errors.read_text()


def test_chat_on_a_terminal(pair):
    """Two answers, the status line, Ctrl-C within an answer, and Ctrl-C at the prompt."""
    leader, follower = pty.openpty()
    words = ["chat", *pair, "--max-new-tokens", "9000"]
    process = subprocess.Popen([*COMMAND, *words], stdin=follower, stdout=follower, stderr=follower, close_fds=True)
    os.close(follower)
    seen = b""

    def until(mark: bytes) -> None:
        nonlocal seen
        while mark not in seen:
            seen += os.read(leader, 4096)
        seen = seen.split(mark, 1)[1]

    try:
        until(b"> ")
        os.write(leader, b"the expert\n")
        until(b"% hits")
        process.send_signal(signal.SIGINT)
        until(b"read before")
        until(b"> ")
        os.write(leader, b"/policy static\n")
        until(b"policy static; its slots start")
        until(b"> ")
        for _ in range(20):  # readline does not see a signal that comes just before it begins to wait
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_chat_in_a_pipe(pair, capsys, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("the expert\n/policy hybrimoe\n/reset\nthe expert\n/exit\nnever\n"))
    assert not call("chat", *pair, "--max-new-tokens", 6)
    out, err = capsys.readouterr()
    assert out[: len(out) // 2] == out[len(out) // 2 :] != ""
    assert err.splitlines() == ["policy hybrimoe; its slots start as it places them", "forgotten"]


def test_generate_logs_events_and_says_when_nothing_was_cached(pair, tmp_path, capsys):
    log = tmp_path / "events.jsonl"
    words = ["generate", "the expert", *pair, "--max-new-tokens", 6, "--clock", "virtual", "--json"]
    assert call(*words, "--strict", "--events", log, "--policy", "hybrimoe") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "ok"
    assert replay_events(load_policy("hybrimoe"), log) > 10
    assert call(*words, "--slots", 0) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "CACHE_INACTIVE"
    assert call(*words, "--slots", 0, "--strict") == 1
    capsys.readouterr()
    assert call(*words[:-1], "--slots", 0) == 0
    assert "CACHE_INACTIVE: no expert was ever resident" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"--events.*no such folder"):
        call(*words, "--events", tmp_path / "no" / "log")
