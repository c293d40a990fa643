"""A trace recorded while experts are offloaded is the recorder's own, to the last byte of the file."""

import pytest

from moe_spac.executor.models import load_models
from moe_spac.executor.session import Settings, run
from moe_spac.policies.load import load_policy
from moe_spac.traces.models import load_pair
from moe_spac.traces.prompts import describe, read_prompts
from moe_spac.traces.reader import open_trace
from moe_spac.traces.recorder import record
from moe_spac.traces.speculate import Options

OPTIONS = Options(max_new_tokens=24, draft_length=4)
SLOTS = 8 * 8  # a quarter of the embedded target's experts


@pytest.fixture(scope="module")
def prompts():
    return read_prompts("drama", 2)


@pytest.fixture(scope="module")
def recorded(prompts, tmp_path_factory):
    """By how many layers are asked ahead: the bytes that the recorder writes for the embedded pair."""
    pair, folder = load_pair(), tmp_path_factory.mktemp("recorded")

    def write(lookahead: int) -> bytes:
        path = folder / f"{lookahead}.spac"
        record(pair, prompts, path, OPTIONS, source=describe("drama"), lookahead=lookahead)
        return path.read_bytes()

    return {lookahead: write(lookahead) for lookahead in (0, 3)}


@pytest.mark.parametrize(("policy", "lookahead"), [("ar-lru", 0), ("moe-spac", 0), ("hybrimoe", 3)])
def test_the_file_is_the_recorders_byte_for_byte(policy, lookahead, prompts, recorded, live_machine, tmp_path):
    """hybrimoe hears what the next three layers' gates say, so they are in its trace as with --lookahead 3."""
    path = tmp_path / "live.spac"
    settings = Settings(live_machine, SLOTS, "real", OPTIONS, record=path)
    result = run(load_models(), load_policy(policy), prompts, settings, describe("drama"))
    assert path.read_bytes() == recorded[lookahead]
    assert open_trace(path, strict=True).summary().emitted == result.new_tokens
    assert result.decode.hits < result.decode.needed
