import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import typer

from moe_spac.traces.cli_record import record
from moe_spac.traces.console import run_app
from moe_spac.traces.reader import open_trace

TWO = "Question: how many experts are there? Answer:\n\nIn the beginning\n"


def run_record(capsys, monkeypatch, *args):
    """The command as the console script runs it: exit code, stdout, stderr."""
    app = typer.Typer(add_completion=False)
    app.command()(record)
    monkeypatch.setattr(sys, "argv", ["record", *map(str, args)])
    with pytest.raises(SystemExit) as end:
        run_app(app)
    out, err = capsys.readouterr()
    return end.value.code, out, err


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *args: run_record(capsys, monkeypatch, *args)


@pytest.fixture
def two(tmp_path):
    path = tmp_path / "two.txt"
    path.write_text(TWO, encoding="utf-8")
    return path


def test_two_prompts_are_two_sequences(call, two, tmp_path, tiny_target, tiny_draft):
    """O03 and the greedy check of O01, through the command."""
    out = tmp_path / "t.spac"
    pair = ("--target", tiny_target, "--draft", tiny_draft)
    code, text, err = call("-o", out, *pair, "--prompts", two, "--max-new-tokens", 8, "--require-exact", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(text)
    trace = open_trace(out)
    assert facts["sequences"] == len(trace.header.sequences) == 2
    assert facts["new_tokens"] == 16
    assert facts["identical_to_plain"] is True
    assert facts["file_bytes"] == out.stat().st_size
    order = [s.sequence for s in trace.steps()]
    assert order == sorted(order)
    assert trace.header.source == "file two.txt"


def test_table_for_people(call, two, tmp_path, tiny_target, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # one table, headings in one line
    code, text, _ = call("-o", tmp_path / "t.spac", "--target", tiny_target, "--prompts", two, "--max-new-tokens", 4)
    assert code == 0
    for word in ("sequences", "acceptance", "tokens per verify", "bytes per row", "t.spac"):
        assert word in text


def test_the_two_streams_go_to_two_files(call, tmp_path):
    out = tmp_path / "t.spac"
    code, _, err = call("-o", out, "--draft-out", out)
    assert (code, out.exists()) == (2, False)
    assert "the target's trace goes there" in err


def test_a_draft_with_experts_through_the_command(call, two, tmp_path, tiny_target):
    """With itself as draft every proposal is kept, at every position, and both streams rank by logits."""
    out, draft_out = tmp_path / "t.spac", tmp_path / "d.spac"
    args = ("--target", tiny_target, "--draft", tiny_target, "--prompts", two, "--max-new-tokens", 9, "--json")
    code, text, _ = call("-o", out, "--draft-out", draft_out, *args, "--scores", "full", "--draft-length", 2)
    assert code == 0
    facts = json.loads(text)
    assert facts["acceptance_by_position"] == [1.0, 1.0]
    assert facts["draft_probability"]["refused"] is None
    assert 0 < facts["draft_probability"]["kept"] <= 1
    for path in (out, draft_out):
        trace = open_trace(path)
        assert (trace.header.scores, trace.summary().state) == ("logit", "complete")


def test_require_exact_fails_on_a_difference(call, two, tmp_path, tiny_target, tiny_draft, monkeypatch):
    """A real difference is made by recording from a text that the plain run does not write."""
    from moe_spac.traces import recorder

    honest = recorder.find_difference
    monkeypatch.setattr(
        recorder,
        "find_difference",
        lambda pair, name, turns, options, text: honest(pair, name, turns, options, text[:-1]),
    )
    args = ("--target", tiny_target, "--draft", tiny_draft, "--prompts", two, "--max-new-tokens", 4)
    code, text, _ = call("-o", tmp_path / "t.spac", *args, "--require-exact")
    assert code == 1
    assert "differs from plain greedy decoding at position" in text
    code, text, _ = call("-o", tmp_path / "t.spac", *args, "--compare-plain")
    assert code == 0
    assert "two best logits are" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--batch-size", "2"], "one after another"),
        (["--scores", "some"], "--scores some: choose topk or full"),
        (["--require-exact", "--temperature", "1"], "only greedy output"),
        (["--prompts", "dramma"], "did you mean drama?"),
        (["--target", "./nowhere"], "no such folder"),
        (["--draft-length", "0"], "--draft-length"),
        (["--draft-out", "/no/such/folder/d.spac"], "--draft-out /no/such/folder/d.spac: no such folder"),
        (["--draft-out", "d.spac", "--draft", "none"], "--draft-out: the draft (none) has no routed experts"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(call, tmp_path, args, words):
    code, _, err = call("-o", tmp_path / "t.spac", *args)
    assert code == 2
    assert words in " ".join(err.split())
    assert not (tmp_path / "t.spac").exists()


def test_output_folder_must_exist(call, tmp_path):
    code, _, err = call("-o", tmp_path / "no" / "t.spac")
    assert code == 2
    assert "no such folder" in err


def test_ctrl_c_while_decoding(call, tmp_path, tiny_target, tiny_draft, two):
    """O14: a real signal, once the file shows that recording has begun."""
    out = tmp_path / "t.spac"

    def interrupt():
        while not out.exists() or out.stat().st_size < 20_000:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    args = ("--target", tiny_target, "--draft", tiny_draft, "--prompts", two, "--max-new-tokens", 7000)
    code, _, err = call("-o", out, *args, "--ignore-eos", "--scores", "full")
    assert code == 130
    assert "interrupted" in err
    trace = open_trace(out)
    assert trace.summary().state == "interrupted"
    assert sum(1 for _ in trace.steps()) > 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.spac", "two.txt"]


def test_ctrl_c_in_a_long_prefill_on_a_terminal(tmp_path, tiny_target):
    """O14 with the prompt in chunks, in a process of its own, whose terminal shows how far it is until then."""
    prompt, out = tmp_path / "long.txt", tmp_path / "t.spac"
    prompt.write_text("the expert that the router chose " * 1000, encoding="utf-8")
    program = (
        "import typer; from moe_spac.traces.cli_record import record; from moe_spac.traces.console import run_app;"
        "app = typer.Typer(); app.command()(record); run_app(app)"
    )
    options = ["--target", str(tiny_target), "--prompts", str(prompt), "--prefill-chunk", "16", "--scores", "full"]
    command = [sys.executable, "-c", program, "-o", str(out), *options]
    master, slave = os.openpty()
    terminal = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=slave, env=terminal)
    os.close(slave)
    shown, asked = b"", False
    with contextlib.suppress(OSError):  # the terminal ends with the process
        while part := os.read(master, 65536):
            shown += part
            if not asked and re.search(rb"0/64 tokens, 0\.0/s, \d+ of prompts", shown) and out.stat().st_size > 8_000:
                process.send_signal(signal.SIGINT)
                asked = True
    os.close(master)
    assert process.wait(timeout=60) == 130
    assert b"interrupted" in shown
    trace = open_trace(out)
    assert trace.summary().state == "interrupted"
    assert {s.kind for s in trace.steps()} == {"prefill"}
