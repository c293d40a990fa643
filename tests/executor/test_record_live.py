"""A trace recorded while experts are offloaded is the recorder's own, byte for byte."""

import numpy as np
import pyarrow as pa
import pytest

from moe_spac.executor import kernels
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


@pytest.fixture(params=["torch", "auto"])
def kernels_name(request, monkeypatch):
    """How experts are computed: as transformers does, or by the compiled kernels where there are any."""
    monkeypatch.setenv("SPAC_KERNELS", request.param)
    kernels.chosen.cache_clear()
    yield request.param
    monkeypatch.undo()
    kernels.chosen.cache_clear()


@pytest.mark.parametrize(("policy", "lookahead"), [("ar-lru", 0), ("moe-spac", 0), ("hybrimoe", 3)])
def test_the_routing_is_the_recorders_byte_for_byte(
    policy, lookahead, kernels_name, prompts, recorded, live_machine, tmp_path
):
    """hybrimoe hears what the next three layers' gates say, so they are in its trace as with --lookahead 3.

    What must differ: compiled kernels add in another order than transformers, so now and then a router's weight is
    rounded to the next float16. Nothing else does, and without them the file is the same to its last byte.
    """
    path, theirs = tmp_path / "live.spac", tmp_path / "recorded.spac"
    settings = Settings(live_machine, SLOTS, "real", OPTIONS, record=path)
    result = run(load_models(), load_policy(policy), prompts, settings, describe("drama"))
    theirs.write_bytes(recorded[lookahead])
    if kernels_name == "torch":
        assert path.read_bytes() == theirs.read_bytes()
    ours, recorders = (pa.ipc.open_stream(file) for file in (path, theirs))
    assert ours.schema.equals(recorders.schema, check_metadata=True)
    batches = list(zip(ours, recorders, strict=True))
    for name in ours.schema.names:
        columns = [(a[name], b[name]) for a, b in batches]
        if name != "weights":
            assert all(a.equals(b) for a, b in columns), name
            continue
        for a, b in columns:
            bits = [np.asarray(x.flatten()).view(np.int16).astype(int) for x in (a, b)]
            assert np.abs(bits[0] - bits[1]).max(initial=0) <= 1
            assert np.mean(bits[0] != bits[1]) < 0.01 if len(bits[0]) else True
    assert open_trace(path, strict=True).summary().emitted == result.new_tokens
    assert result.decode.hits < result.decode.needed
