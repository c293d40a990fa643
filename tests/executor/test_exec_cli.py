"""spac-exec from the command line."""

import json
import subprocess
import sys
import tomllib

import pytest

from moe_spac.executor.cli import app
from moe_spac.policies.load import load_policy, save_policy
from moe_spac.traces.errors import InputError
from moe_spac.traces.reader import open_trace


def call(*words) -> int:
    return app([str(w) for w in words], standalone_mode=False)


@pytest.fixture
def pair(tiny_target, tiny_draft):
    return ["--target", tiny_target, "--draft", tiny_draft]


@pytest.fixture
def winner(tmp_path):
    """As spac-sim writes it."""
    path = tmp_path / "winner.toml"
    save_policy(path, load_policy("moe-spac"), {"slots": 8, "slots_per_layer": 4.0, "mode": "sd", "machine": "m"})
    return path


def test_winner_runs_on_a_calibrated_machine(pair, winner, tmp_path, capsys):
    machine, trace = tmp_path / "machine.toml", tmp_path / "run.spac"
    assert not call("calibrate", "-o", machine, *pair, "--link-bandwidth", "200MB/s", "--link-latency", "10us")
    assert tomllib.loads(machine.read_text())["link"]["bandwidth"]["value"] == "200.0 MB/s"
    assert "expert on cpu" in capsys.readouterr().out
    words = ["generate", "the expert", "--policy", winner, "--machine", machine, *pair, "--max-new-tokens", 8]
    assert call(*words, "--record", trace, "--check") == 0
    shown = capsys.readouterr().out
    assert "identical" in shown
    assert "predicted" in shown
    assert open_trace(trace).summary().emitted == 8


def test_json_of_the_virtual_clock(pair, winner, capsys):
    words = ["generate", "the expert", "--policy", winner, *pair, "--max-new-tokens", 6, "--clock", "virtual"]
    assert call(*words, "--json", "--check") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical_to_transformers"] is True
    assert (found["policy"], found["slots_per_layer"], found["new_tokens"]) == ("moe-spac", 4, 6)
    assert found["tokens_per_s"] > 0
    assert found["texts"][0]["prompt"] == "the expert"
    assert call(*words, "--json", "--slots", 8) == 0
    assert json.loads(capsys.readouterr().out)["hit_rate"] > found["hit_rate"]


def test_a_winner_without_speculation_drafts_nothing(pair, tmp_path, capsys):
    path = tmp_path / "winner.toml"
    save_policy(path, load_policy("ar-lru"), {"slots_per_layer": 4.0, "mode": "ar"})
    assert call("generate", "the", "--policy", path, *pair, "--max-new-tokens", 5, "--clock", "virtual", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["acceptance"], found["steps"]) == (None, 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "min"], "future"),
        (["--policy", "moe-spca"], "did you mean moe-spac"),
        (["--slots", "1"], "--slots.*top-k"),
        (["--slots", "9"], "8 experts"),
        (["--slots", "2", "--vram", "1GiB"], "--slots and --vram"),
        (["--vram", "1kB"], "--vram.*not one slot"),
        (["--clock", "moon"], "--clock moon"),
        (["--machine", "moon"], "--machine.*moon"),
        (["--check", "--temperature", "1"], "--check"),
        (["--record", "/no/such/folder/t.spac"], "--record.*no such folder"),
        (["--prompts", "drama"], "PROMPT and --prompts"),
    ],
)
def test_bad_input_is_named(words, said, pair):
    with pytest.raises(InputError, match=said):
        call("generate", "the expert", "--clock", "virtual", *pair, "--max-new-tokens", 2, *words)


@pytest.mark.parametrize("rate", ["fast", "100", "0MB/s", "-1MB/s"])
def test_link_rates_need_a_unit(rate, pair, tmp_path):
    with pytest.raises(InputError, match=r"--link-bandwidth.*100MB/s"):
        call("calibrate", "-o", tmp_path / "m.toml", *pair, "--link-bandwidth", rate)


def test_what_changes_the_output_must_be_allowed(pair, tmp_path):
    (tmp_path / "lossy.py").write_text(
        "from moe_spac.policies.interface import Policy\n"
        "class Lossy(Policy):\n    name = 'lossy'\n    lossless = False\n"
    )
    words = ("generate", "the expert", "--clock", "virtual", *pair, "--max-new-tokens", 2)
    with pytest.raises(InputError, match="--allow-lossy"):
        call(*words, "--policy", f"{tmp_path}/lossy.py:Lossy")
    call(*words, "--policy", f"{tmp_path}/lossy.py:Lossy", "--allow-lossy")


@pytest.mark.parametrize("module", ["traces", "simulator", "executor"])
def test_commands_run_as_modules(module):
    found = subprocess.run([sys.executable, "-m", f"moe_spac.{module}.cli", "--help"], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert f"python -m moe_spac.{module}.cli" in found.stdout


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_shared_options_are_options_of_every_command(command, capsys):
    with pytest.raises(SystemExit):
        app([command, "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{o} " in shown for o in ("target", "draft", "store", "device", "machine", "slots", "vram"))
    assert "--pair" not in shown
    with pytest.raises(InputError, match="--slots and --vram"):
        call(command, "--slots", 2, "--vram", "1GiB")


def test_memory_is_left_for_the_context_that_is_asked_for(pair):
    with pytest.raises(InputError, match=r"host memory has .* keys and values of 1000000000000 tokens"):
        call("chat", *pair, "--context", 10**12)
