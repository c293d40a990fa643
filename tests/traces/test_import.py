"""Import of gpt-oss-20b routing archives."""

import json
from pathlib import Path

import numpy as np
import pytest

from moe_spac.traces import open_trace
from moe_spac.traces.errors import InputError
from moe_spac.traces.gpt_oss import gpt_oss_20b, import_gpt_oss
from moe_spac.traces.schema import Kind, Provenance


def archive(folder: Path, lengths: tuple[int, ...] = (3, 2), **changes) -> Path:
    """A small archive as the source has them; `changes` replace arrays or, as `meta`, the records."""
    rng = np.random.default_rng(0)
    tokens = sum(lengths)
    arrays = {
        "expert_ids": np.argsort(rng.random((tokens, 24, 32)), axis=-1)[..., :4].astype(np.uint8),
        "expert_probs_u8": rng.integers(0, 256, (tokens, 24, 4)).astype(np.uint8),
        "seq_offsets": np.r_[0, np.cumsum(lengths)],
    }
    meta = [
        {"dataset": "mmlu", "category": f"c{i}", "row_index": 7, "first_position": 10 * i + 5, "tokens": n}
        for i, n in enumerate(lengths)
    ]
    meta = changes.pop("meta", meta)
    np.savez(folder / "a.npz", **{name: value for name, value in {**arrays, **changes}.items() if value is not None})
    (folder / "a_meta.jsonl").write_text("".join(json.dumps(record) + "\n" for record in meta))
    return folder / "a.npz"


@pytest.mark.parametrize("weights", [True, False])
def test_rows_become_decode_steps(tmp_path, weights):
    src = archive(tmp_path)
    import_gpt_oss(src, tmp_path / "t.spac", weights)
    trace = open_trace(tmp_path / "t.spac", strict=True)
    steps = list(trace.steps())
    source = np.load(src)
    assert np.array_equal(np.concatenate([s.experts for s in steps]), source["expert_ids"])
    assert [s.sequence for s in steps] == [0, 0, 0, 1, 1]
    assert [int(s.positions[0]) for s in steps] == [5, 6, 7, 15, 16]
    assert {s.kind for s in steps} == {Kind.DECODE}
    assert all(s.tokens.tolist() == [-1] for s in steps)
    assert trace.header.provenance is Provenance.IMPORTED
    assert [s["name"] for s in trace.header.sequences] == ["mmlu/c0/7", "mmlu/c1/7"]
    assert "not known (-1)" in trace.header.notes
    stored = [s.weights for s in steps if s.weights is not None]
    assert len(stored) == (5 if weights else 0)
    if weights:
        assert np.concatenate(stored) == pytest.approx(source["expert_probs_u8"] / 255, abs=1e-3)


def test_model_sizes_are_those_published():
    """20,914,757,184 parameters and a checkpoint of 12.8 GiB (model card)."""
    model = gpt_oss_20b()
    biases = 2 * 2880 + 2880
    expert_weights = (model.expert_bytes - 2 * biases) * 8 / 4.25 + biases
    assert 24 * 32 * expert_weights + model.dense_bytes / 2 == 20_914_757_184
    assert (model.all_expert_bytes + model.dense_bytes) / 2**30 == pytest.approx(12.8, abs=0.05)
    assert (model.expert_bytes, model.kv_bytes_per_token) == (13_236_480, 49_152)


def test_bundled_trace_is_the_model_and_small():
    trace = open_trace("gpt-oss-20b")
    summary = trace.summary()
    assert trace.header.target == gpt_oss_20b()
    assert (summary.tokens, summary.sequences, summary.state) == (57_499, 165, "complete")
    assert summary.file_bytes <= 6_000_000
    assert trace.header.provenance is Provenance.IMPORTED


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"expert_ids": None}, "not a gpt-oss-20b routing archive"),
        ({"expert_ids": np.zeros((5, 24, 4), np.uint8)}, "names an expert twice"),
        ({"expert_ids": np.full((5, 24, 4), 32, np.uint8)}, r"of 0\.\.31"),
        ({"expert_ids": np.zeros((5, 2, 4), np.uint8)}, r"must be \[tokens, 24, 4\]"),
        ({"seq_offsets": np.array([0, 3])}, "seq_offsets must rise"),
        ({"meta": []}, r"a_meta\.jsonl: its records do not describe the 2 sequences"),
        ({"meta": [3]}, r"a_meta\.jsonl: cannot read"),
    ],
)
def test_wrong_archives_are_refused_and_write_nothing(tmp_path, changes, what):
    src = archive(tmp_path, **changes)
    with pytest.raises(InputError, match=what):
        import_gpt_oss(src, tmp_path / "t.spac")
    assert not (tmp_path / "t.spac").exists()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"a\.npz: no such file"):
        import_gpt_oss(tmp_path / "a.npz", tmp_path / "t.spac")
    src = archive(tmp_path)
    (tmp_path / "a_meta.jsonl").unlink()
    with pytest.raises(InputError, match=r"a_meta\.jsonl: no such file"):
        import_gpt_oss(src, tmp_path / "t.spac")
    src.write_text("text")
    with pytest.raises(InputError, match=r"a\.npz: not a gpt-oss-20b routing archive"):
        import_gpt_oss(src, tmp_path / "t.spac")
