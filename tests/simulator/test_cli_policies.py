"""`spac-sim policies` lists and describes; a policy that changes tokens needs --allow-lossy."""

import json

import pytest
from speculated import BROKEN, plain, write
from typer.testing import CliRunner

from moe_spac.policies.load import policy_names
from moe_spac.simulator.cli import app
from moe_spac.traces.errors import InputError


def sim(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_all_are_listed():
    assert {row["name"] for row in json.loads(sim("policies", "--json").stdout)} >= set(policy_names())
    shown = sim("policies").stdout
    assert all(name in shown for name in policy_names())


def test_one_is_described():
    found = json.loads(sim("policies", "llamacpp-cache", "--json").stdout)
    assert {"name": "inserts", "value": 2, "type": "int"} in found["parameters"]
    shown = sim("policies", "hindsight").stdout
    assert "knows the future, so it cannot run live" in shown
    assert "placement.py" in shown
    assert isinstance(sim("policies", "no-such").exception, InputError)


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_lossy_policies_need_permission(command, tmp_path):
    trace = write(plain(6), tmp_path / "t.spac")
    (tmp_path / "mine.py").write_text(BROKEN)
    words = (command, str(trace), "--policy", f"{tmp_path}/mine.py:Lossy", "--slots", "2", "--no-optimum")
    words += ("--out", str(tmp_path / "out"), *(["--no-plots"] if command == "run" else []))
    refused = sim(*words)
    assert isinstance(refused.exception, InputError)
    assert "changes the model's output; run it with --allow-lossy" in str(refused.exception)
    allowed = sim(*words, "--allow-lossy")
    assert allowed.exit_code == 0, allowed.output
