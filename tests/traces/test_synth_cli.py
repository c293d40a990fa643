"""`spac-trace synth` on the command line."""

import json
import sys

import pytest

from moe_spac.traces import open_trace
from moe_spac.traces.cli import main
from moe_spac.traces.schema import Provenance


def spac_trace(capsys, monkeypatch, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["spac-trace", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_synth_writes_a_labelled_trace(capsys, monkeypatch, tmp_path):
    out = tmp_path / "t.spac"
    options = ("--tokens", "40", "--sequences", "2", "--draft-length", "3", "--acceptance", "0.9,0.5", "--seed", "7")
    code, text, err = spac_trace(capsys, monkeypatch, "synth", "--like", "olmoe", "-o", str(out), *options, "--json")
    found = json.loads(text)
    assert (code, err) == (0, "")
    assert (found["provenance"], found["tokens"], found["sequences"]) == ("synthetic", 40, 2)
    trace = open_trace(out, strict=True)
    assert trace.header.provenance is Provenance.SYNTHETIC
    assert found["rows"] == sum(len(s) for s in trace.steps())
    assert found["steps"] == sum(1 for _ in trace.steps())
    first = out.read_bytes()
    code, text, _ = spac_trace(capsys, monkeypatch, "synth", "--like", "olmoe", "-o", str(out), *options)
    assert code == 0
    assert "made up, not recorded" in text
    assert out.read_bytes() == first


def test_list_shows_what_there_is_to_choose(capsys, monkeypatch):
    code, text, _ = spac_trace(capsys, monkeypatch, "synth", "--list", "--json")
    rows = {row["like"]: row for row in json.loads(text)}
    assert code == 0
    assert "q4" in rows["qwen3-30b-a3b"]["formats"]
    assert "qwen3-4b-fp8" in rows["qwen3-30b-a3b"]["drafts"]
    assert spac_trace(capsys, monkeypatch, "synth", "--list")[0] == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "--like MODEL"),
        (("--like", "olmoe", "-o", "{}/no/t.spac"), "no such folder"),
        (("--like", "gpt-5", "-o", "{}/t.spac"), "not a known model; choose one of deepseek-v2-lite"),
        (("--like", "olmoe", "-o", "{}/t.spac", "--acceptance", "high"), "--acceptance high"),
        (("--like", "olmoe", "-o", "{}/t.spac", "--draft-length", "2"), "go together"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, monkeypatch, tmp_path, args, says):
    code, out, err = spac_trace(capsys, monkeypatch, "synth", *(a.format(tmp_path) for a in args))
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "t.spac").exists()
