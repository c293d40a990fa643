"""Event logs: a fresh policy taken through one decides as the recorded one did, and a changed log is noticed."""

import json

import numpy as np
import pytest
from policy_loop import Host, make_setup, random_routing

from moe_spac.policies.driver import Driver
from moe_spac.policies.events import EventLog, Recording, replay_events
from moe_spac.policies.interface import Policy
from moe_spac.policies.load import OWN, load_policy
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import Kind

CAUSAL = sorted(cls.name for cls in OWN if not cls.clairvoyant)
MORE = ("ar-lru:scope=global,write_back=true", "lrfu:scope=global", "llamacpp-cache:scope=global,order=lrfu")


def play(policy: Policy, seed: int = 5) -> Driver:
    """Nine steps of three layers with copies that land when chance says so, and slots that are taken and given back."""
    rng = np.random.default_rng(seed)
    layers, experts = 3, 6
    routing = random_routing(rng, 9, layers, experts, 2)
    kinds = [Kind.PREFILL if index in (0, 4) else Kind.VERIFY for index in range(9)]
    setup = make_setup(policy, layers, experts, 3, draft_length=3, seed=seed)
    host = Host(policy, setup, routing, rng)
    host.wall_ns = 100_000
    fewer = tuple(n - 1 for n in setup.slots)
    driver = host.play(kinds, ahead=2, scores=True, slots={3: fewer, 6: setup.slots})
    driver.draft_length(3)
    return driver


@pytest.fixture
def recorded(tmp_path):
    def record(spec: str):
        path = tmp_path / "events.jsonl"
        with EventLog(path) as log:
            return path, play(Recording(load_policy(spec), log))

    return record


@pytest.mark.parametrize("spec", [*CAUSAL, *MORE])
def test_recording_changes_nothing_and_a_fresh_policy_decides_the_same(spec, recorded):
    path, driver = recorded(spec)
    assert driver.record == play(load_policy(spec)).record
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert replay_events(load_policy(spec), path) == sum("ask" in line for line in lines) > 0


def test_only_what_a_policy_can_hear_is_written(recorded):
    path, _ = recorded("static")
    heard = {line.get("tell") for line in map(json.loads, path.read_text().splitlines())}
    assert not heard & {"work_done", "transfer_done", "layer_ends"}


def test_the_first_answer_that_differs_is_named(recorded):
    path, _ = recorded("ar-lru")
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"ask":"victim"' in line and '"answer":null' not in line)
    line = json.loads(lines[number])
    line["answer"] = [2, 5] if line["answer"] != [2, 5] else [2, 4]
    path.write_text("\n".join([*lines[:number], json.dumps(line), *lines[number + 1 :]]))
    with pytest.raises(InputError, match=rf"line {number + 1}: policy ar-lru decides otherwise: victim gives"):
        replay_events(load_policy("ar-lru"), path)


def test_another_policy_is_noticed(recorded):
    path, _ = recorded("ar-lru:spec_topk=1")
    with pytest.raises(InputError, match=r"line 1: policy fifo decides otherwise: the log is of .*ar-lru"):
        replay_events(load_policy("fifo"), path)
    path, _ = recorded("lfru")
    with pytest.raises(InputError, match="decides otherwise"):
        replay_events(load_policy("lfru:scope=global"), path)


def test_a_log_that_is_full_says_so_and_replays_as_far_as_it_goes(tmp_path, capsys):
    path = tmp_path / "events.jsonl"
    with EventLog(path, 4000) as log:
        play(Recording(load_policy("ar-lru"), log))
    text = path.read_text()
    assert 3000 < len(text) <= 4000 + len('{"full":true}\n')
    assert text.endswith('\n{"full":true}\n')
    assert "reached its limit" in capsys.readouterr().err
    assert replay_events(load_policy("ar-lru"), path) == text.count('{"ask"') > 0


@pytest.mark.parametrize(
    "text", ["[", '{"tell":"nothing","args":[]}', '{"ask":"dispatch"}', '{"tell":"setup","args":[1]}']
)
def test_what_is_no_event_log_is_refused(text, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="line 1 is no event"):
        replay_events(load_policy("ar-lru"), path)
    with pytest.raises(InputError, match="cannot be read"):
        replay_events(load_policy("ar-lru"), tmp_path / "none")
    with pytest.raises(InputError, match="cannot be written"):
        EventLog(tmp_path / "no" / "folder")


def test_the_future_is_no_event():
    with pytest.raises(InputError, match="future"):
        Recording(load_policy("min"), lambda line: None)
