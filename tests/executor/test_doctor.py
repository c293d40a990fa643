"""doctor: facts of a machine, and what limits a model on it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_gguf
from hand import shape
from safetensors.torch import load_file, save_file

from moe_spac.executor.cli import app
from moe_spac.executor.doctor import examine, findings, needs, read_bandwidth
from moe_spac.traces.errors import InputError

FACTS = {
    "gpu": None, "kernels": "avx2", "why": "", "load": 0.1, "logical_cores": 8, "cores": 4, "torch_threads": 4,
    "cache_disk_free": 2**40, "cache_folder": "/c", "ram_free": 10_000, "read_all_threads": 1e9,
}  # fmt: skip


def test_bandwidth_is_that_of_this_machine():
    assert 1e8 < read_bandwidth(1, 0.02, 2**24) < 1e12


def test_facts_are_those_of_the_system(tmp_path):
    facts = examine(tmp_path / "not" / "there")
    assert facts["ram"] >= facts["ram_free"] > 0
    assert 1 <= facts["cores"] <= facts["logical_cores"]
    assert facts["cache_disk_free"] > 0
    json.dumps(facts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernels": "torch", "why": "no compiler"}, "torch: no compiler"),
        ({"load": 9.0}, "load 9.0 on 8 cores"),
        ({"torch_threads": 8}, "OMP_NUM_THREADS=4"),
        ({"cache_disk_free": 2**30}, "1.00 GiB of disk are free at /c"),
        ({"gpu": "H200"}, "page-locked"),
    ],
)
def test_what_is_odd_is_a_warning(change, said):
    assert [text for level, text in findings(FACTS) if level == "warning"] == []
    (text,) = [text for level, text in findings({**FACTS, **change}) if level == "warning"]
    assert said in text


def test_what_a_model_needs_is_counted_by_hand():
    # 2 layers of 4 experts of 1,000 bytes; 3 slots a layer are emulated in the same RAM, and 1,000 dense bytes.
    model = shape(2, 4, 2)
    wanted, found = needs(model, 3, FACTS)
    assert (wanted["experts_bytes"], wanted["slots_bytes"], wanted["expert_bytes_a_token"]) == (8_000, 6_000, 4_000)
    assert wanted["cpu_ms_all_missing"] == pytest.approx(4e-3)
    assert [level for level, _ in found] == ["failure", "note"]
    _, found = needs(model, 3, {**FACTS, "ram_free": 15_000})
    assert [level for level, _ in found] == ["note"]
    _, found = needs(model, 1, {**FACTS, "ram_free": 15_000})
    assert "fewer than the 2 experts" in found[0][1]
    gpu = {**FACTS, "gpu": "H200", "vram_free": 6_500, "copy_pinned": 2e9}
    wanted, found = needs(model, 3, gpu)
    assert "7,000" not in found[0][1]
    assert found[0][0] == "failure"
    assert "the link is the way" in found[1][1]
    assert needs(replace(model, dense_bytes=500), 3, gpu)[1][0][0] == "note"


def test_the_command_judges_a_target_and_fails_where_it_cannot_run(capsys):
    small = str(Path(__file__).parents[2] / "traces" / "pair" / "target")
    assert app(["doctor", "--target", small, "--slots", "10", "--json"], standalone_mode=False) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"]["slots_bytes"] == 8 * 10 * 73728 // 2  # saved in bfloat16
    assert app(["doctor", "--target", small, "--store", "exact", "--slots", "1"], standalone_mode=False) == 1
    assert "failure" in capsys.readouterr().out


def doctor(capsys, *words: object) -> tuple[int, dict[str, Any]]:
    code = app(["doctor", *map(str, words), "--json"], standalone_mode=False)
    return code, json.loads(capsys.readouterr().out)


def test_bytes_of_a_checkpoint_are_held_against_its_configuration(tiny_target, tmp_path, capsys):
    """tiny: 2 layers of 8 experts of 3 matrices of 64 x 32 float32 numbers."""
    experts = 2 * 8 * 3 * 64 * 32
    code, found = doctor(capsys, "--target", tiny_target)
    held = found["target"]
    assert code == 0
    assert held["experts_in_files_bytes"] == held["experts_expected_bytes"] == experts * 4
    assert held["experts_in_files_bytes"] + held["other_in_files_bytes"] == sum(
        t.nbytes for t in load_file(tiny_target / "model.safetensors").values()
    )
    half, short = shutil.copytree(tiny_target, tmp_path / "half"), shutil.copytree(tiny_target, tmp_path / "short")
    tensors = load_file(half / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in tensors.items()}, half / "model.safetensors", {"format": "pt"})
    code, found = doctor(capsys, "--target", half)
    assert code == 0
    assert any("192.00 KiB of experts, its configuration makes 384.00 KiB" in f["text"] for f in found["findings"])
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, short / "model.safetensors", {"format": "pt"})
    code, found = doctor(capsys, "--target", short)
    assert code == 1
    assert any(f["level"] == "failure" and name in f["text"] for f in found["findings"])


def test_a_gguf_file_is_judged(tiny_target, tmp_path, capsys):
    path, _ = save_gguf(tiny_target, tmp_path, "Q8_0")
    code, found = doctor(capsys, "--target", path, "--store", "q8")
    assert code == 0
    assert found["target"]["bits_a_weight_in_files"] == 8.5
    assert found["target"]["experts_in_files_bytes"] == found["target"]["experts_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slots", "3", "--vram", "1GiB", "--target", "x"], "--slots and --vram"),
        (["--slots", "3"], "--target"),
        (["--target", "qwen3-30b-a3b", "--store", "q3"], "--store q3"),
        (["--target", "./no-such"], "--target ./no-such"),
    ],
)
def test_bad_input_is_named(words, said):
    with pytest.raises(InputError, match=said):
        app(["doctor", *words], standalone_mode=False)
