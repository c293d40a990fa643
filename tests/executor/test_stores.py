"""Stores that are kept: the same bytes however they came about, made once, taken up again after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from from_host import logits_of
from safetensors.torch import load_file
from tiny import save_tiny_target

from moe_spac.executor import memory, stores
from moe_spac.executor.audit import audit, in_words
from moe_spac.executor.cli import app
from moe_spac.executor.cli_options import PairOptions
from moe_spac.executor.formats import QUANTISED
from moe_spac.executor.models import load_models
from moe_spac.executor.stores import Choice
from moe_spac.executor.whole import whole
from moe_spac.policies.interface import Key
from moe_spac.traces.errors import InputError

LAYERS = 2  # of the tiny target


@pytest.fixture
def unread(monkeypatch):
    """Filling a layer from the checkpoint fails."""

    def refuse(*_args):
        raise AssertionError("read again")

    return lambda: monkeypatch.setattr(stores, "fill_layer", refuse)


def bytes_of(store) -> list[torch.Tensor]:
    return [store.slab(layer).clone() for layer in range(store.layers)]


@pytest.mark.parametrize("format", ["q8", "q4"])
def test_quantised_records_are_the_formats_own(format, tiny_target, tmp_path):
    """Against encoding each of the checkpoint's matrices; the error stated for a layer is theirs together."""
    store = load_models(tiny_target, store=Choice(format, folder=tmp_path)).store
    tensors = load_file(tiny_target / "model.safetensors")
    encode, decode = QUANTISED[format].encode, QUANTISED[format].decode
    wrong, size = 0.0, 0.0
    for expert in range(8):
        path = f"model.layers.1.mlp.experts.{expert}"
        gate, up, down = (tensors[f"{path}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        flat = store.flat(Key(1, expert))
        assert torch.equal(store.record.up(flat), torch.cat([encode(gate), encode(up)]))
        assert torch.equal(store.record.down(flat), encode(down))
        for matrix in (gate, up, down):
            wrong += float((decode(encode(matrix), torch.float32) - matrix).square().sum())
            size += float(matrix.square().sum())
    assert store.losses[1] == pytest.approx((wrong / size) ** 0.5)


def test_memory_and_files_hold_the_same(tiny_target, tmp_path, unread):
    expected = bytes_of(load_models(tiny_target).store)
    mapped = load_models(tiny_target, store=Choice("exact", "mmap", tmp_path)).store
    assert (mapped.memory, mapped.losses) == ("mmap", ())
    unread()
    for memory_ in ("mmap", "mmap"):
        again = load_models(tiny_target, store=Choice("exact", memory_, tmp_path)).store
        assert all(torch.equal(a, b) for a, b in zip(bytes_of(again), expected, strict=True))
    quantised = tmp_path / "q"
    with pytest.raises(AssertionError, match="read again"):
        load_models(tiny_target, store=Choice("q8", "mmap", quantised))


def test_a_store_is_made_once_and_anew_for_other_weights(tiny_target, tmp_path, unread):
    first = load_models(tiny_target, store=Choice("q8", "ram", tmp_path)).store
    unread()
    for memory_ in ("ram", "mmap"):
        second = load_models(tiny_target, store=Choice("q8", memory_, tmp_path)).store
        assert second.memory == memory_
        assert second.losses == first.losses
        assert all(torch.equal(a, b) for a, b in zip(bytes_of(first), bytes_of(second), strict=True))
    other = save_tiny_target(tmp_path / "other", initializer_range=0.1)
    for given, choice in ((other, Choice("q8", "ram", tmp_path)), (tiny_target, Choice("q4", "ram", tmp_path))):
        with pytest.raises(AssertionError, match="read again"):
            load_models(given, store=choice)


def test_a_killed_run_is_taken_up_again(tmp_path):
    """Killed while it writes the third of six layers: the first two are not read again, and all bytes are the same."""
    folder = save_tiny_target(tmp_path / "model", num_hidden_layers=6)
    expected = bytes_of(load_models(folder, store=Choice("q8", "ram", tmp_path / "whole")).store)
    script = f"""
import time
from pathlib import Path
from moe_spac.executor import stores
from moe_spac.executor.models import load_models
fill = stores.fill_layer
def slow(found, layer, record, raw):
    loss = fill(found, layer, record, raw)
    if layer == 2:
        print("third", flush=True)
        time.sleep(60)
    return loss
stores.fill_layer = slow
load_models({str(folder)!r}, store=stores.Choice("q8", "ram", Path({str(tmp_path / "kept")!r})))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "third\n"
            (kept,) = (tmp_path / "kept").iterdir()
            with pytest.raises(InputError, match="another process is making this store"):
                load_models(folder, store=Choice("q8", "ram", tmp_path / "kept"))
        finally:
            os.kill(run.pid, signal.SIGKILL)
    assert sorted(p.name for p in kept.glob("*.bin")) == ["layer-000.bin", "layer-001.bin"]
    assert (kept / "layer.part").is_file()
    times = [(kept / f"layer-00{i}.bin").stat().st_mtime_ns for i in range(2)]
    time.sleep(0.01)
    store = load_models(folder, store=Choice("q8", "mmap", tmp_path / "kept")).store
    assert all(torch.equal(a, b) for a, b in zip(bytes_of(store), expected, strict=True))
    assert [(kept / f"layer-00{i}.bin").stat().st_mtime_ns for i in range(2)] == times
    assert not (kept / "layer.part").exists()


def test_damaged_stores_and_bad_folders_are_named(tiny_target, tmp_path):
    load_models(tiny_target, store=Choice("q8", "ram", tmp_path / "kept"))
    (kept,) = (tmp_path / "kept").iterdir()
    (kept / "layer-001.bin").write_bytes(b"short")
    with pytest.raises(InputError, match=r"layer-001\.bin is damaged; delete the folder"):
        load_models(tiny_target, store=Choice("q8", "ram", tmp_path / "kept"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--store-cache .* cannot be written"):
        load_models(tiny_target, store=Choice("q8", "ram", tmp_path / "file"))


@pytest.mark.parametrize(
    ("choice", "said"),
    [(Choice("q5"), "--store q5: unknown; choose"), (Choice("q8", "disk"), "--store-memory disk: unknown; choose")],
)
def test_unknown_choices(choice, said, tiny_target):
    with pytest.raises(InputError, match=said):
        load_models(tiny_target, store=choice)


def test_rows_that_no_group_fits_are_refused():
    with pytest.raises(InputError, match=r"--store q4: embedded target: rows of 48 numbers .* use --store exact"):
        load_models(store=Choice("q4"))


def test_too_little_memory_is_named_before_weights_are_read(tiny_target, tmp_path, monkeypatch, unread):
    """Experts in memory are refused, left to us they are mapped, and where not even the rest fits that is refused."""
    models = load_models(tiny_target)
    rest = memory.ROOM + models.pair.shape.dense_bytes + sum(memory.prefill_reserve(models.pair.shape, None).values())
    free = {"bytes": rest + 100 * 2**10}
    monkeypatch.setattr(stores, "free_ram", lambda: free["bytes"])
    assert load_models(tiny_target, store=Choice(folder=tmp_path)).store.memory == "mmap"
    unread()
    said = r"--store-memory ram: host memory has .* free .*384\.00 KiB experts \(exact\).*--store q8 \(102"
    with pytest.raises(InputError, match=said):
        load_models(tiny_target, store=Choice("exact", "ram"))
    free["bytes"] = 2**20
    with pytest.raises(InputError, match=r"--store-memory mmap: host memory .*keys and values of 4096 tokens.*close"):
        load_models(tiny_target, store=Choice("exact", "mmap", tmp_path))
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    free["bytes"] = 2**40
    with pytest.raises(InputError, match=r"disk has 1000 B free and 102\.00 KiB are needed"):
        load_models(tiny_target, store=Choice("q8", folder=tmp_path))


def test_memory_is_left_for_the_texts_that_are_asked_for(tiny_target, monkeypatch, capsys):
    """Where a short prompt's keys and values fit and those of 4,096 tokens do not."""
    models = load_models(tiny_target)
    shape = models.pair.shape
    needs = models.store.size + memory.ROOM + shape.dense_bytes + sum(memory.prefill_reserve(shape, None, 520).values())
    monkeypatch.setattr(stores, "free_ram", lambda: needs)
    store = ["--store", "exact", "--store-memory", "ram", "--target", str(tiny_target), "--draft", "none"]
    words = [*store, "--machine", "rtx4060-laptop", "--draft-length", "0"]
    short = ["generate", "the expert", "--max-new-tokens", "4", "--clock", "virtual", "--json"]
    assert app([*short, *words], standalone_mode=False) == 0
    assert not app(["bench", "-p", "4", "-n", "4", "-r", "1", "--json", *words], standalone_mode=False)
    for command, tokens in (
        (["generate", "the expert", "--max-new-tokens", "600"], "60[0-9]"),
        (["bench", "-p", "700", "-n", "0"], "700"),
        (["chat"], "4096"),
    ):
        with pytest.raises(InputError, match=f"keys and values of {tokens} tokens"):
            app([*command, *words], standalone_mode=False)


def test_free_memory_is_what_the_system_and_its_container_say(tmp_path, monkeypatch):
    here = memory.free_ram()
    assert 2**20 < here < 2**50
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory.free_ram() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_ram() > 2**20


def test_what_a_command_has_loaded_is_not_walked_by_the_collector_again(tiny_target):
    import gc

    gc.unfreeze()
    kept = PairOptions(target=str(tiny_target), draft="none").load()
    assert gc.get_freeze_count() > 100_000  # torch and transformers alone
    assert not any(one is kept.blocks for one in gc.get_objects())


def test_an_audit_counts_what_is_there(tiny_target, tiny_draft, tmp_path):
    models = load_models(tiny_target, tiny_draft, store=Choice("q4", "mmap", tmp_path))
    found = audit(models)
    numbers = LAYERS * 8 * 3 * 64 * 32
    assert found["experts"]["bytes"] == found["experts"]["expected_bytes"] == numbers * 18 // 32
    assert found["experts"]["bits_per_weight"] == 4.5
    assert found["dense"] == {"float32": models.pair.shape.dense_bytes + 2 * 8 * 4}  # and two buffers of 8 frequencies
    assert 0.05 < found["experts"]["relative_error"]["mean"] < 0.15
    assert "experts q4 (mmap) 54.00 KiB, 4.50 bits a weight, relative error 0." in in_words(found)
    assert json.loads(json.dumps(found)) == found
    slabs = [torch.zeros(8, 3 * 64 * 32 * 2, dtype=torch.uint8), models.store.slab(1)]  # as if left in 16 bits
    models.store._slabs = slabs
    with pytest.raises(InputError, match=r"experts should take 54\.00 KiB and take 123\.00 KiB"):
        audit(models)


@pytest.mark.parametrize("format", ["exact", "q8", "q4"])
def test_the_whole_model_is_the_stored_one(format, tiny_target, tmp_path):
    """Transformers on the decoded experts gives the logits of our own pass over the store."""
    models = load_models(tiny_target, store=Choice(format, folder=tmp_path))
    with torch.no_grad():
        theirs = whole(models)(torch.arange(40)[None]).logits
    torch.testing.assert_close(logits_of(models), theirs, rtol=0, atol=2e-5)
