"""The page for policy authors holds: its example runs, its commands exist, and its tables name every policy."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from hand import decode, setup
from policy_loop import Host, make_setup, random_routing
from speculated import plain, write
from typer.testing import CliRunner

from moe_spac.policies import interface, parts
from moe_spac.policies.load import load_policy, policy_names
from moe_spac.simulator.cli import app
from moe_spac.simulator.replay import count

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
COMMANDS = re.findall(r"^ {4}spac-sim (.*?)(?: {2,}.*)?$", PAGE, re.MULTILINE)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    (tmp_path / "mine.py").write_text(code[1])
    write(plain(), tmp_path / "t.spac")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.py"


def test_the_example_does_what_it_says(mine):
    # Two slots, window 2. Step 0: 0 and 1 are missed, CPU. Step 1: 0 again, fetched; 2 on the CPU. Step 2: 0 hits, 1
    # again after 2 steps, fetched. Step 3: both hit.
    steps = decode([0, 1], [0, 2], [0, 1], [0, 1])
    total = count(steps, load_policy(f"{mine}:Mine:window=2"), setup(1, 4, [2])).total
    assert (total.hits, total.cpu, total.fetches, total.fallbacks) == (3, 3, 2, 0)
    # Window 1: the second miss of 1 comes too late for that, and the third is in time.
    short = count(steps, load_policy(f"{mine}:Mine:window=1"), setup(1, 4, [2])).total
    assert (short.hits, short.cpu, short.fetches) == (2, 4, 2)


def test_the_example_keeps_the_contract(mine):
    policy = load_policy(f"{mine}:Mine")
    for cpu in (True, False):
        records = []
        for _ in range(2):
            rng = np.random.default_rng(3)
            routing = random_routing(rng, 30, 2, 6, 2)
            host = Host(policy, make_setup(policy, 2, 6, 3, cpu=cpu), routing, rng)
            assert host.play().total.fallbacks == 0
            records.append(host.record)
        assert records[0] == records[1]


def test_a_new_policy_takes_twenty_lines(mine):
    whole = mine.read_text().split("@dataclass")
    part, policy = whole[0].split("\n\n\n")[1], whole[1]
    for code in (part, policy):
        assert len([line for line in code.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_work(mine, line):
    words = shlex.split(line.replace("gpt-oss-20b", "t.spac"))
    more = ["--slots", "2", "--no-plots", "--no-optimum"] if words[0] == "run" else []
    done = CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output


def test_every_policy_is_in_the_table():
    listed = set(re.findall(r"`([a-z0-9-]+)`", PAGE[PAGE.index("## All policies") :]))
    assert set(policy_names()) <= listed


def test_every_method_of_the_contract_is_on_the_page():
    methods = [n for n, v in vars(interface.Policy).items() if callable(v) and not n.startswith("_")]
    assert all(f"`{name}" in PAGE for name in methods)
    for part in (parts.Placement, parts.VictimOrder, parts.Admission, parts.Prefetcher, parts.Dispatcher):
        own = [n for n, v in vars(part).items() if callable(v) and not n.startswith("_")]
        assert f"`{part.__name__}`" in PAGE
        assert all(f"`{name}(" in PAGE for name in own)
