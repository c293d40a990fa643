"""The checks of `gpu_check`: on a GPU where there is one, and on the emulated device."""

import json

import pytest

from moe_spac.executor import all_checks
from moe_spac.executor.all_checks import CHECKS, LIMIT_SECONDS, check_all, floor, token_identity
from moe_spac.executor.device import has_gpu
from moe_spac.executor.device_checks import arena_budget, copy_bandwidth, out_of_memory, overlap, pin_probe, preemption
from moe_spac.executor.gpu_check import main
from moe_spac.traces.errors import InputError


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name):
    found = CHECKS[name]("cuda")
    assert found["ok"], json.dumps(found, indent=1)


@pytest.mark.parametrize("check", [copy_bandwidth, arena_budget, out_of_memory, preemption])
def test_on_the_emulated_device(check):
    found = check("cpu")
    assert found["ok"], json.dumps(found, indent=1)
    json.dumps(found)


def test_emulated_copies_and_computing_overlap():
    """The machine that tests run on may be busy, so part of what a GPU has to do is enough."""
    assert overlap("cpu")["hidden"] > 0.2


def test_pin_probe_on_the_emulated_device():
    found = pin_probe("cpu", 2**20)
    assert (found["ok"], found["pinned"], found["refused"]) == (True, 2**20, False)


def test_checks_of_a_model_on_the_emulated_device():
    found = token_identity("cpu", ["hybrimoe"])
    assert (found["ok"], found["policies"]) == (True, 1)
    assert floor("cpu", rounds=2)["target_ms"] > 0


def test_a_check_that_breaks_has_failed_and_the_others_run(capsys):
    def broken(place):
        raise ZeroDivisionError(place)

    told = []
    found = check_all("cpu", {"broken": broken, "well": lambda place: {"ok": True}}, told.append)
    assert not found["ok"]
    assert found["checks"]["broken"]["error"] == "ZeroDivisionError: cpu"
    assert found["checks"]["well"]["ok"]
    assert found["device"] == "emulated: no GPU was used"
    assert [line.split(",")[0] for line in told] == ["broken: FAILED", "well: ok"]


def test_no_check_begins_when_time_is_up(monkeypatch):
    monkeypatch.setattr(all_checks, "LIMIT_SECONDS", -1.0)
    found = check_all("cpu", {"well": lambda place: {"ok": True}}, lambda line: None)
    assert found["checks"]["well"] == {"ok": False, "skipped": "out of time"}
    assert LIMIT_SECONDS < 8 * 60


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(InputError, match="no GPU that torch can use; --device cpu"):
        main([])


def test_one_document_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(all_checks, "CHECKS", {"arena_budget": arena_budget})
    file = tmp_path / "gpu.json"
    assert main(["--device", "cpu", "-o", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["ok"]
    assert list(found["checks"]) == ["arena_budget"]
    assert "arena_budget: ok" in capsys.readouterr().err
