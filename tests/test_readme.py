"""What the README shows works as shown."""

import re
import shlex
from pathlib import Path

import pytest
from hand import decode, setup

from moe_spac.policies.load import load_policy
from moe_spac.simulator.replay import count

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_readme_policy_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    path = tmp_path / "mine.py"
    path.write_text(code[1])
    policy = load_policy(f"{path}:Mine:rare=0")
    # Two slots; 0 is used in every step and stays, the others pass through or take turns in the second slot.
    steps = decode([0, 1], [0, 2], [0, 1], [0, 1])
    total = count(steps, policy, setup(1, 4, [2])).total
    assert (total.needed, total.hits) == (8, 5)


@pytest.mark.parametrize("line", re.findall(r"^ {4}spac-sim run .*$", README, re.MULTILINE))
def test_readme_options_exist(line):
    from typer.testing import CliRunner

    from moe_spac.simulator.cli import app

    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    for word in shlex.split(line):
        if word.startswith("--"):
            assert word in shown
