"""O11, O12: what a crash, a bad disk or time does to a trace file."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from trace_files import FIXTURES, random_step, same, small_header, write

from moe_spac.traces import open_trace
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import Kind, Step

RECORDS, EACH = 50, 10
CONTINUES = b"\xff\xff\xff\xff"  # begins every message of an Arrow stream


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[bytes, list[Step], list[int]]:
    """A file of 50 steps in batches of 10, its steps, and where each message begins (the last is the end)."""
    header, rng = small_header(), np.random.default_rng(0)
    steps = [random_step(rng, header, sequence=i // 20, positions=np.array([i % 20])) for i in range(RECORDS)]
    path = tmp_path_factory.mktemp("whole") / "t.spac"
    from moe_spac.traces.writer import TraceWriter

    with TraceWriter(path, header) as writer:
        for number, step in enumerate(steps, 1):
            writer.append(step)
            if number % EACH == 0:
                writer.flush()
    content = path.read_bytes()
    begins = [match.start() for match in re.finditer(re.escape(CONTINUES), content) if match.start() % 8 == 0]
    assert len(begins) == 1 + 1 + RECORDS // EACH + 1 + 1  # schema, empty batch, batches, end mark, end of stream
    return content, steps, begins


def outcome(path: Path, content: bytes) -> tuple[list[Step], str]:
    path.write_bytes(content)
    trace = open_trace(path)
    return list(trace.steps()), trace.summary().state


def test_every_truncation_reads_or_refuses(tmp_path, whole):
    """Around every border between messages byte by byte, and every 37th byte between; never a wrong or missing step,
    and never "complete". (Each of the file's bytes was tried once by hand: the loop below with step 1.)
    """
    content, steps, begins = whole
    near = {at + d for at in begins for d in range(-9, 17)}
    for size in sorted(near | set(range(0, len(content), 37))):
        if not 0 <= size < len(content):
            continue
        if size < begins[1]:  # inside the header
            with pytest.raises(InputError, match=r"not a trace|nothing can be read"):
                outcome(tmp_path / "t.spac", content[:size])
            continue
        read, state = outcome(tmp_path / "t.spac", content[:size])
        assert all(same(a, b) for a, b in zip(read, steps, strict=False))
        arrived = sum(at <= size for at in begins[3:-1])  # batches that are whole
        if size >= begins[-1]:  # only the mark that ends the stream is cut
            assert (len(read), state) == (RECORDS, "complete")
        else:
            assert len(read) == EACH * arrived or len(read) == EACH * (arrived + 1)
            assert state == f"incomplete: {len(read)} steps, tail dropped"


def test_damage_in_the_middle_is_refused(tmp_path, whole):
    """A block of zeros, a block that is missing, a batch that is missing, doubled, or in another's place."""
    content, _, begins = whole
    third, fourth, fifth = begins[4], begins[5], begins[6]
    middle = (third + fourth) // 2
    bad = {
        "zeros": content[:middle] + bytes(64) + content[middle + 64 :],
        "a hole": content[:middle] + content[middle + 64 :],
        "a batch less": content[:third] + content[fourth:],
        "a batch twice": content[:fourth] + content[third:],
        "two batches swapped": content[:third] + content[fourth:fifth] + content[third:fourth] + content[fifth:],
    }
    refused = {}
    for name, changed in bad.items():
        with pytest.raises(InputError) as caught:
            outcome(tmp_path / "t.spac", changed)
        refused[name] = str(caught.value)
    assert all(re.search(r"batch \d is damaged", text) for text in refused.values()), refused
    assert len(outcome(tmp_path / "t.spac", content)[0]) == RECORDS


def test_a_tail_of_zeros_is_a_tail_that_is_missing(tmp_path, whole):
    """What a file system leaves after a power cut: the length is there, the bytes are not."""
    content, steps, begins = whole
    for at in (begins[4], begins[4] + 8, (begins[4] + begins[5]) // 2):
        read, state = outcome(tmp_path / "t.spac", content[:at] + bytes(len(content) - at))
        assert state == f"incomplete: {len(read)} steps, tail dropped"
        assert len(read) == 2 * EACH
        assert all(same(a, b) for a, b in zip(read, steps, strict=False))


def test_512_experts_with_top_10_survive(tmp_path):
    header, rng = small_header(512, 3, 10, lookahead=1), np.random.default_rng(0)
    steps = [random_step(rng, header, Kind.VERIFY, 4) for _ in range(8)]
    path = write(tmp_path / "t.spac", header, steps, flush_each=True)
    read = list(open_trace(path, strict=True).steps())
    assert all(same(a, b) for a, b in zip(read, steps, strict=True))
    assert read[0].experts.dtype == np.uint16
    assert max(int(step.experts.max()) for step in read) > 255


FROZEN = {
    "v1.spac": "c2f90ad19baacab1ac5361e4483650fb8099207ba0c51fc658b69bad2b6878c3",
    "v1.json": "32a02d4194074dc01f41ba8227a7f0e30e9889647bbb82eb50b4f6d0b049af0a",
}


@pytest.mark.parametrize("name", FROZEN)
def test_fixtures_of_released_formats_never_change(name):
    """What they hold is checked in test_file: `test_first_format_version_is_read_for_ever`."""
    assert hashlib.sha256((FIXTURES / name).read_bytes()).hexdigest() == FROZEN[name]
