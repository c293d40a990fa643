"""Trace files: what is written is read, and what is not whole is never taken for whole."""

import json
import signal
import subprocess
import sys
import zlib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import FIXTURES, random_step, same, small_header, write

from moe_spac.traces import open_trace
from moe_spac.traces.errors import InputError
from moe_spac.traces.layout import (
    CRC_KEY,
    END_KEY,
    HEADER_CRC_KEY,
    HEADER_KEY,
    PLAIN,
    STEPS_KEY,
    TOKENS_KEY,
    schema_of,
)
from moe_spac.traces.schema import FORMAT_VERSION, DraftShape, Header, Kind, ModelShape, Step
from moe_spac.traces.writer import TraceWriter


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(list(Kind)), max_size=12),
    experts=st.sampled_from([3, 256, 257]),
    extras=st.booleans(),
)
def test_every_step_comes_back(tmp_path_factory, seed, kinds, experts, extras):
    rng = np.random.default_rng(seed)
    more = {"weights": True, "scores": "router logits", "lookahead": 2} if extras else {}
    header = small_header(experts, **more)
    size = {Kind.PREFILL: 300, Kind.DECODE: 1, Kind.VERIFY: 5}
    steps = [random_step(rng, header, kind, size[kind], sequence=i // 3, turn=i % 2) for i, kind in enumerate(kinds)]
    path = write(tmp_path_factory.mktemp("t") / "t.spac", header, steps)
    trace = open_trace(path, strict=True)
    assert trace.header == header
    for _ in range(2):  # again from the start
        read = list(trace.steps())
        assert len(read) == len(steps)
        assert all(same(a, b) for a, b in zip(read, steps, strict=True))
        assert all(a.experts.dtype == (np.uint16 if experts > 256 else np.uint8) for a in read)


def test_counts(tmp_path):
    header = small_header()
    rng = np.random.default_rng(0)
    steps = [random_step(rng, header, Kind.PREFILL, 7), random_step(rng, header, Kind.VERIFY, 5, accepted=2)]
    steps += [random_step(rng, header, sequence=1), random_step(rng, header, Kind.VERIFY, 5, accepted=0)]
    summary = open_trace(write(tmp_path / "t.spac", header, steps)).summary()
    assert summary.steps == {"prefill": 1, "decode": 1, "verify": 2}
    assert (summary.tokens, summary.drafted, summary.accepted, summary.emitted) == (18, 8, 2, 3 + 1 + 1)
    assert (summary.sequences, summary.state) == (2, "complete")
    assert summary.bytes_per_token == (tmp_path / "t.spac").stat().st_size / 18


def test_first_format_version_is_read_for_ever():
    """O12: the fixture was written by the first version of the format; its JSON twin does not depend on our reader."""
    expected = json.loads((FIXTURES / "v1.json").read_text())
    trace = open_trace(FIXTURES / "v1.spac", strict=True)
    assert trace.header == Header.from_dict(expected["header"])
    steps = list(trace.steps())
    assert len(steps) == len(expected["steps"])
    for step, twin in zip(steps, expected["steps"], strict=True):
        assert same(step, Step(**{**twin, "kind": Kind(twin["kind"])}))


def test_newer_format_is_refused_naming_the_version(tmp_path):
    """O12."""
    header = small_header(format_version=FORMAT_VERSION + 1, tools={"moe-spac": "9.1.0"})
    path = write(tmp_path / "t.spac", header, [])
    with pytest.raises(InputError, match=rf"t.spac: trace format version {FORMAT_VERSION + 1} is needed.*9\.1\.0"):
        open_trace(path)


def test_plain_pyarrow_and_pandas_read_it(tmp_path):
    header, rng = small_header(weights=True), np.random.default_rng(0)
    steps = [random_step(rng, header, Kind.VERIFY, 3, accepted=1), random_step(rng, header)]
    write(tmp_path / "t.spac", header, steps)
    frame = pa.ipc.open_stream(str(tmp_path / "t.spac")).read_pandas()
    assert frame["step"].tolist() == [0, 0, 0, 1]
    assert frame["kind"].tolist() == ["verify"] * 3 + ["decode"]
    assert frame["accepted"].tolist() == [1, 1, 1, 0]
    assert np.array_equal(np.stack(frame["experts"]).reshape(4, 2, 2)[:3], steps[0].experts)


def test_size_of_a_qwen3_30b_a3b_trace(tmp_path):
    """O07: 48 layers, top 8 of 128: 384 bytes of ids a token, 1,000 tokens within 1 MB."""
    header, rng = small_header(128, 48, 8), np.random.default_rng(0)
    steps = [random_step(rng, header, positions=np.array([i])) for i in range(1000)]
    path = write(tmp_path / "t.spac", header, steps)
    assert path.stat().st_size <= 1_000_000
    assert open_trace(path).summary().tokens == 1000


def test_memory_does_not_grow_with_length(tmp_path):
    header, rng = small_header(128, 48, 8), np.random.default_rng(0)
    step = random_step(rng, header, Kind.PREFILL, 256)
    peaks = []
    for count in (4, 64):
        trace = open_trace(write(tmp_path / f"{count}.spac", header, [step] * count))
        before = pa.total_allocated_bytes()
        peaks.append(max(pa.total_allocated_bytes() - before for _ in trace.steps()))
    assert peaks[1] <= 1.5 * peaks[0]


def test_killed_writer_leaves_a_readable_file(tmp_path):
    """O11: a process is killed between two batches, and another in the middle of one (cut by hand)."""
    script = (
        "import sys, os, signal; sys.path.insert(0, sys.argv[2]); import numpy as np; import trace_files as t\n"
        "header, rng = t.small_header(), np.random.default_rng(0)\n"
        "writer = t.TraceWriter(sys.argv[1], header)\n"
        "for i in range(600):\n    writer.append(t.random_step(rng, header))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "t.spac"
    done = subprocess.run([sys.executable, "-c", script, str(path), str(Path(__file__).parents[1])], check=False)
    assert done.returncode == -signal.SIGKILL
    trace = open_trace(path)
    assert trace.summary().state == "incomplete: 512 steps, tail dropped"
    rng, header = np.random.default_rng(0), small_header()
    assert all(same(read, random_step(rng, header)) for read in trace.steps())
    with pytest.raises(InputError, match=r"t\.spac: incomplete: 512 steps, tail dropped"):
        open_trace(path, strict=True)
    path.write_bytes(path.read_bytes()[:-100])
    assert open_trace(path).summary().state == "incomplete: 256 steps, tail dropped"


def test_interrupted_run_is_whole_but_says_so(tmp_path):
    header, rng = small_header(), np.random.default_rng(0)
    path = tmp_path / "t.spac"
    with pytest.raises(KeyboardInterrupt), TraceWriter(path, header) as writer:  # noqa: PT012
        writer.append(random_step(rng, header))
        raise KeyboardInterrupt
    assert open_trace(path, strict=True).summary().state == "interrupted"
    assert len(list(open_trace(path).steps())) == 1


def test_flushed_steps_can_be_read_while_writing(tmp_path):
    header, rng = small_header(), np.random.default_rng(0)
    writer = TraceWriter(tmp_path / "t.spac", header)
    assert open_trace(tmp_path / "t.spac").header == header
    writer.append(random_step(rng, header))
    writer.flush()
    assert len(list(open_trace(tmp_path / "t.spac").steps())) == 1
    writer.close()


def read_all(path: Path, content: bytes) -> tuple[list[Step], str]:
    path.write_bytes(content)
    trace = open_trace(path)
    return list(trace.steps()), trace.summary().state


def test_a_flipped_bit_is_refused_or_harmless(tmp_path):
    good = (FIXTURES / "v1.spac").read_bytes()
    steps, _ = read_all(tmp_path / "t.spac", good)
    refused = 0
    for at in range(5, len(good), 89):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        try:
            read, state = read_all(tmp_path / "t.spac", bytes(bad))
        except InputError:
            refused += 1
        else:
            assert state == "complete"
            assert len(read) == len(steps)
            assert all(same(a, b) for a, b in zip(read, steps, strict=True))
    assert refused > 40


def test_a_cut_file_gives_a_beginning_of_its_steps(tmp_path):
    good = (FIXTURES / "v1.spac").read_bytes()
    steps, _ = read_all(tmp_path / "t.spac", good)
    header_ends = good.index(b"\xff\xff\xff\xff", 4)
    for size in range(0, len(good) - 8, 149):
        if size < header_ends:
            with pytest.raises(InputError):
                read_all(tmp_path / "t.spac", good[:size])
            continue
        read, state = read_all(tmp_path / "t.spac", good[:size])
        assert state == f"incomplete: {len(read)} steps, tail dropped"
        assert all(same(a, b) for a, b in zip(read, steps, strict=False))


def test_damage_in_the_middle_names_the_batch_even_if_the_end_is_missing(tmp_path):
    header, rng = small_header(), np.random.default_rng(0)
    steps = [random_step(rng, header, Kind.PREFILL, 300) for _ in range(4)]
    good = write(tmp_path / "t.spac", header, steps).read_bytes()
    marks = [at for at in range(len(good)) if good.startswith(b"spac.crc32", at)]
    assert len(marks) == 4
    length = good.rfind(b"\xff\xff\xff\xff", 0, marks[1]) + 4  # of the message of the second batch
    for content in (good, good[:-200]):
        bad = bytearray(content)
        bad[length + 2] ^= 1  # now longer than the file
        with pytest.raises(InputError, match="batch 2 is damaged"):
            read_all(tmp_path / "t.spac", bytes(bad))
    bad = bytearray(good)
    bad[marks[3] - 300 : marks[3] - 290] = b"\0" * 10  # inside the third batch's values
    with pytest.raises(InputError, match="batch 3 is damaged"):
        read_all(tmp_path / "t.spac", bytes(bad))


def test_joined_files_are_refused(tmp_path):
    good = (FIXTURES / "v1.spac").read_bytes()
    with pytest.raises(InputError, match="cannot be joined by concatenation"):
        read_all(tmp_path / "t.spac", good + good)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (b"\x28\xb5\x2f\xfd rest", "zstd"),
        (b"\x1f\x8b\x08 rest", "gunzip"),
        (b"PK\x03\x04 rest", "spac-trace import"),
        (b"PAR1 rest", "Parquet"),
        (b"step,layer,expert\n0,1,2\n", "text"),
        (b"\x00\x01\x02\x03", "00 01 02 03"),
        (b"\xff\xff\xff\xff\x10\x01", "inside its header"),
    ],
)
def test_other_files_are_refused_by_their_first_bytes(tmp_path, content, what):
    path = tmp_path / "t.spac"
    path.write_bytes(content)
    with pytest.raises(InputError, match=what) as caught:
        open_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"no such file; give a trace file or a bundled trace \(gpt-oss-20b"):
        open_trace(tmp_path / "t.spac")
    with pytest.raises(InputError, match="is a folder"):
        open_trace(tmp_path)
    with pytest.raises(InputError, match=r"t\.spac: cannot write: No such file"):
        TraceWriter(tmp_path / "none" / "t.spac", small_header())


def test_arrow_streams_that_are_no_traces_are_refused(tmp_path):
    schema = pa.schema([("a", pa.int32())])
    empty = {HEADER_KEY: b"{}", HEADER_CRC_KEY: str(zlib.crc32(b"{}"))}
    damaged = {**empty, HEADER_CRC_KEY: b"1"}
    for metadata, what in (
        (None, "no spac.header"),
        (damaged, "header is damaged"),
        (empty, "does not have the fields"),
    ):
        with pa.ipc.new_stream(str(tmp_path / "t.spac"), schema.with_metadata(metadata)) as stream:
            stream.write_table(pa.table({"a": pa.array([1], pa.int32())}, schema=schema.with_metadata(metadata)))
        with pytest.raises(InputError, match=what):
            open_trace(tmp_path / "t.spac")


HEADER = small_header()
GOOD = random_step(np.random.default_rng(0), HEADER, Kind.VERIFY, 3, accepted=1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"experts": np.full((3, 2, 2), 6)}, r"ids 6\.\.6, expected 0\.\.5"),
        ({"experts": np.full((3, 2, 2), -1)}, r"ids -1\.\.-1"),
        ({"experts": np.full((3, 2, 2), 6, np.uint8)}, "expert id 6, but the model has 6"),
        ({"experts": np.zeros((3, 2, 2), np.uint8)}, "chosen twice"),
        ({"experts": np.zeros((3, 2, 3), np.uint8)}, "shape"),
        ({"positions": np.arange(2)}, "positions has shape"),
        ({"positions": np.arange(3) - 1}, "negative"),
        ({"accepted": 3}, "do not fit its kind"),
        ({"kind": Kind.PREFILL}, "do not fit its kind"),
        ({"kind": Kind.DECODE, "drafted": np.zeros(3, bool), "accepted": 0}, "do not fit its kind"),
        ({"weights": np.ones((3, 2, 2))}, "weights given or missing"),
    ],
)
def test_steps_that_do_not_fit_are_not_written(tmp_path, change, what):
    writer = TraceWriter(tmp_path / "t.spac", HEADER)
    with pytest.raises(ValueError, match=what):  # noqa: PT012
        writer.append(replace(GOOD, **change))
        writer.flush()
    writer.close()


def test_values_are_checked_at_the_border_too(tmp_path, monkeypatch):
    """A file whose checksums are right but whose ids are not (another program wrote it)."""
    monkeypatch.setattr("moe_spac.traces.writer.flaw_in", lambda *_: None)
    step = replace(GOOD, experts=np.full((3, 2, 2), 6, np.uint8))
    path = write(tmp_path / "t.spac", HEADER, [GOOD, step], flush_each=True)
    with pytest.raises(InputError, match=r"batch 2 is damaged \(step 1: expert id 6"):
        list(open_trace(path).steps())


DOC = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")


def test_the_code_in_the_format_page_runs(tmp_path, monkeypatch, capsys):
    """With pyarrow and pandas alone."""
    code = DOC.split("```python\n")[1].split("```")[0]
    assert "moe_spac" not in code
    (tmp_path / "trace.spac").write_bytes((FIXTURES / "v1.spac").read_bytes())
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(code, found)
    steps = list(open_trace(FIXTURES / "v1.spac").steps())
    assert np.array_equal(found["experts"], np.concatenate([s.experts for s in steps]))
    first = [int(e) for s in steps for e in s.experts[:, 0].reshape(-1)]
    likes = max(range(6), key=first.count)
    assert capsys.readouterr().out == f"layer 1 likes expert {likes}; provenance: synthetic\n"


def test_the_format_page_names_every_field_and_column():
    header = small_header(weights=True, scores="logit", lookahead=1)
    names = {f.name for cls in (Header, ModelShape, DraftShape) for f in fields(cls)} | set(schema_of(header).names)
    assert [name for name in sorted(names) if f"`{name}`" not in DOC] == []
    for column in schema_of(header):
        if column.name in PLAIN:
            kind = {"string": "utf8"}.get(str(column.type), str(column.type))
            assert f"| `{column.name}` | {kind} |" in DOC
    for key in (HEADER_KEY, HEADER_CRC_KEY, CRC_KEY, END_KEY, STEPS_KEY, TOKENS_KEY):
        assert f"`{key.decode()}`" in DOC
