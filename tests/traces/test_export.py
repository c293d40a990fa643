"""Export: other tools read what is written, and what comes back is what went out."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import FIXTURES, random_step, same, small_header, write

from moe_spac.traces import open_trace
from moe_spac.traces.errors import InputError
from moe_spac.traces.export import ACCESS, FORMS, export
from moe_spac.traces.importers import import_routing
from moe_spac.traces.layout import HEADER_KEY
from moe_spac.traces.schema import Kind

BACK = ("parquet", "csv", "jsonl", "npz")


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(list(Kind)), min_size=1, max_size=8),
    experts=st.sampled_from([3, 256, 512]),
    extras=st.booleans(),
    form=st.sampled_from(BACK),
)
def test_round_trips_are_exact(tmp_path_factory, seed, kinds, experts, extras, form):
    """O13. CSV rows have no room for scores and looked-ahead gates; all else comes back to the last bit."""
    folder, rng = tmp_path_factory.mktemp("t"), np.random.default_rng(seed)
    more = {"weights": True, "scores": "logit", "lookahead": 2} if extras else {}
    header = small_header(experts, notes='a, "b"\n# ü', sequences=({"name": "x,y", "domain": "d"},), **more)
    size = {Kind.PREFILL: 300, Kind.DECODE: 1, Kind.VERIFY: 5}
    steps = [random_step(rng, header, kind, size[kind], sequence=i // 3, turn=i % 2) for i, kind in enumerate(kinds)]
    trace = open_trace(write(folder / "a.spac", header, steps))
    export(trace, folder / f"a.{form}")
    kept = import_routing(folder / f"a.{form}", folder / "b.spac")
    if form == "csv":
        steps = [replace(step, scores=None, ahead=None) for step in steps]
        header = replace(header, scores=None, lookahead=0)
    assert kept == header == open_trace(folder / "b.spac").header
    read = list(open_trace(folder / "b.spac", strict=True).steps())
    assert all(same(a, b) for a, b in zip(read, steps, strict=True))
    assert {p.name for p in folder.iterdir()} == {"a.spac", f"a.{form}", "b.spac"}


def test_parquet_keeps_rows_and_header(tmp_path):
    assert export(open_trace(FIXTURES / "v1.spac"), tmp_path / "t.parquet") == 24
    table = pq.read_table(tmp_path / "t.parquet")
    plain = pa.ipc.open_stream(str(FIXTURES / "v1.spac")).read_all()
    assert table.equals(plain)
    assert table.schema.metadata[HEADER_KEY] == plain.schema.metadata[HEADER_KEY]


def test_csv_and_jsonl_are_read_by_others(tmp_path):
    trace = open_trace(FIXTURES / "v1.spac")
    steps = list(trace.steps())
    assert export(trace, tmp_path / "t.csv") == 24 * 2 * 2
    frame = pd.read_csv(tmp_path / "t.csv", comment="#")
    assert frame["layer"].tolist() == [1, 1, 2, 2] * 24
    assert np.array_equal(frame["expert"], np.concatenate([s.experts for s in steps]).reshape(-1))
    assert frame["token"].tolist() == np.repeat(np.arange(24), 4).tolist()
    assert frame["token_id"].tolist() == np.repeat(np.concatenate([s.tokens for s in steps]), 4).tolist()
    assert frame["kind"].iloc[-1] == "verify"
    assert export(trace, tmp_path / "t.jsonl") == 24 * 2
    head, *rows = map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines())
    assert head["spac.header"]["provenance"] == "synthetic"
    assert [r["layer"] for r in rows] == [1, 2] * 24
    assert [r["ids"] for r in rows[:2]] == steps[0].experts[0].tolist()


def test_numpy_arrays(tmp_path):
    trace = open_trace(FIXTURES / "v1.spac")
    assert export(trace, tmp_path / "t.npz") == 24
    with np.load(tmp_path / "t.npz") as archive:
        assert archive["experts"].shape == (24, 2, 2)
        assert archive["kind"].tolist()[0] == "prefill"
        assert json.loads(str(archive["spac.header"]))["target"]["name"] == "tiny"


def accesses_by_hand(steps) -> list[tuple[int, int]]:
    """(step, layer * 6 + expert) of every distinct expert that a step needs, layer after layer, ascending."""
    return [
        (number, layer * 6 + expert)
        for number, step in enumerate(steps)
        for layer in range(step.experts.shape[1])
        for expert in sorted(set(step.experts[:, layer].reshape(-1).tolist()))
    ]


def test_oracle_general_records(tmp_path):
    """24 packed bytes: time u32, id u64, size u32, next access i64 (-1: never)."""
    trace = open_trace(FIXTURES / "v1.spac")
    expected = accesses_by_hand(trace.steps())
    assert export(trace, tmp_path / "t.oracleGeneral") == len(expected)
    assert (tmp_path / "t.oracleGeneral").stat().st_size == 24 * len(expected)
    found = np.fromfile(tmp_path / "t.oracleGeneral", ACCESS)
    assert list(zip(found["time"].tolist(), found["id"].tolist(), strict=True)) == expected
    assert set(found["size"].tolist()) == {384}
    ids = [key for _, key in expected]
    for i, key in enumerate(ids):
        assert found["next"][i] == (ids.index(key, i + 1) if key in ids[i + 1 :] else -1)


def test_libcachesim_reads_it_and_counts_what_we_count(tmp_path):
    """Another program's LRU on our file finds the misses of ours, at every cache size."""
    lcs = pytest.importorskip("libcachesim")
    from hand import setup

    from moe_spac.policies.load import load_policy
    from moe_spac.simulator.replay import count_sequential

    rng = np.random.default_rng(3)
    header = small_header(8, 1, 2)
    liked = rng.random(8) * 2
    steps = []
    for i in range(150):
        n = 3 if i % 5 == 0 else 1
        ids = np.argsort(rng.random((n, 1, 8)) + liked, axis=-1)[..., -2:]
        steps.append(random_step(rng, header, Kind.PREFILL if n > 1 else Kind.DECODE, n, experts=ids))
    trace = open_trace(write(tmp_path / "t.spac", header, steps))
    count = export(trace, tmp_path / "t.oracleGeneral")
    for slots in (2, 3, 5, 8):
        reader = lcs.TraceReader(str(tmp_path / "t.oracleGeneral"), lcs.TraceType.ORACLE_GENERAL_TRACE)
        missed, _ = lcs.LRU(cache_size=slots * 384).process_trace(reader)
        total = count_sequential(trace.steps(), load_policy("ar-lru"), setup(1, 8, [slots])).total
        assert total.needed == count
        assert round(missed * count) == total.needed - total.hits
        reader = lcs.TraceReader(str(tmp_path / "t.oracleGeneral"), lcs.TraceType.ORACLE_GENERAL_TRACE)
        best, _ = lcs.Belady(cache_size=slots * 384).process_trace(reader)
        assert best <= missed


def test_what_cannot_be_exported_is_refused(tmp_path):
    trace = open_trace(FIXTURES / "v1.spac")
    with pytest.raises(InputError, match=r"no format has this suffix; use \.parquet, \.csv"):
        export(trace, tmp_path / "t.xlsx")
    with pytest.raises(InputError, match="--format xlsx: unknown"):
        export(trace, tmp_path / "t", "xlsx")
    with pytest.raises(InputError, match="cannot write"):
        export(trace, tmp_path / "none" / "t.csv")
    copy = tmp_path / "t.csv"
    copy.write_bytes((FIXTURES / "v1.spac").read_bytes())
    with pytest.raises(InputError, match="this is the file that is read"):
        export(open_trace(copy), copy)
    assert copy.read_bytes() == (FIXTURES / "v1.spac").read_bytes()
    big = small_header()
    big = replace(big, target=replace(big.target, expert_bytes=2**32))
    write(tmp_path / "big.spac", big, [random_step(np.random.default_rng(0), big)])
    with pytest.raises(InputError, match="less than 4 GiB"):
        export(open_trace(tmp_path / "big.spac"), tmp_path / "t.oracleGeneral")


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_trace_leaves_no_export(tmp_path, form):
    header, rng = small_header(), np.random.default_rng(0)
    path = write(tmp_path / "bad.spac", header, [random_step(rng, header, Kind.PREFILL, 300) for _ in range(3)])
    bad = bytearray(path.read_bytes())
    at = (bad.index(b"spac.crc32") + bad.rindex(b"spac.crc32")) // 2
    bad[at : at + 20] = bytes(20)
    (tmp_path / "bad.spac").write_bytes(bytes(bad))
    with pytest.raises(InputError, match="damaged"):
        export(open_trace(tmp_path / "bad.spac"), tmp_path / f"t.{form}")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.spac"]


@pytest.mark.parametrize("form", BACK)
def test_exports_that_were_cut_or_changed_are_refused(tmp_path, form):
    path = tmp_path / f"t.{form}"
    export(open_trace(FIXTURES / "v1.spac"), path)
    good = path.read_bytes()
    lines = good.split(b"\n")
    bad = [good[: len(good) // 2]]
    if form in ("csv", "jsonl"):
        bad.append(b"\n".join(lines[:-2]) + b"\n")  # a row less
        bad.append(b"\n".join([lines[0], *lines[2:4], lines[1], *lines[4:]]))  # out of order
    for content in bad:
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"t\.{form}"):
            import_routing(path, tmp_path / "b.spac")
        assert not (tmp_path / "b.spac").exists()
