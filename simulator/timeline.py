"""Timelines that ui.perfetto.dev and chrome://tracing open: what every lane of a run did when.

A file holds one process for each run, "simulated" and "measured" say, so that both can be read against each other.
Spans on a lane are nested or disjoint: viewers drop or swap others. Times are integer ns here and microseconds in the
file, as the Chrome trace-event format wants them. An arrow leads from a copy to the first work that used it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ..traces.errors import InputError

FLOWS = 2**32  # numbers of arrows that a process may use; Perfetto takes whole numbers only, and one set for all
LANES = ("GPU", "CPU", "H2D", "D2H", "draft", "policy")  # from top to bottom
SIMULATED, MEASURED = "simulated", "measured"
Timeline = Mapping[str, Sequence["Span"]]  # process name -> its spans


@dataclass(frozen=True, slots=True)
class Span:
    """Something that `lane` did from `begin_ns` to `end_ns`, counted from the start of its run.

    name: what a reader sees on it, as "L12 E87"; category: attention, expert, fetch_demand, fetch_prefetch, wait, plan
    and the like; args: step, layer, expert, tokens, bytes, why. flow: a number that a copy and the first work on what
    it brought share, and no others in their process.
    """

    lane: str
    name: str
    begin_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)
    category: str = ""
    flow: int | None = None

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns


def write_timeline(path: Path, processes: Timeline, about: Mapping[str, Any] | None = None) -> None:
    """Write one file of all processes, whole or not at all; `about` says where it comes from.

    ValueError for spans that break the rules, see `check_timeline`; InputError if the file cannot be written.
    """
    check_timeline(processes)
    events = [e for pid, (name, spans) in enumerate(processes.items(), 1) for e in _process(pid, name, spans)]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    rest = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about or {})})
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden.write_text(f'{{"traceEvents":[\n{lines}\n],{rest[1:]}\n')
        os.replace(hidden, path)
    except OSError as error:
        raise InputError(f"{path}: the timeline cannot be written ({error.strerror}); give another file") from None


def check_timeline(processes: Timeline) -> None:
    """ValueError unless every span is on a known lane and ends after it begins, spans of a lane are nested or disjoint,
    and every flow leads from one copy that is over to one use that begins later."""
    for process, spans in processes.items():
        for lane, ordered in _by_lane(spans):
            if lane not in LANES:
                raise ValueError(f"{process}: no lane {lane!r}; there are {', '.join(LANES)}")
            _check_nesting(process, ordered)
        for flow, ends in _flows(spans).items():
            if len(ends) != 2 or ends[0].end_ns > ends[1].begin_ns:
                names = ", ".join(f"{s.lane} {s.name}" for s in ends)
                raise ValueError(f"{process}: flow {flow} does not lead from one finished copy to one use: {names}")


def _check_nesting(process: str, ordered: Sequence[Span]) -> None:
    around: list[Span] = []
    for span in ordered:
        if span.ns < 0:
            raise ValueError(f"{process}, {span.lane}: {span.name} ends before it begins")
        while around and around[-1].end_ns <= span.begin_ns:
            around.pop()
        if around and span.end_ns > around[-1].end_ns:
            both = f"{around[-1].name} and {span.name}"
            raise ValueError(
                f"{process}, {span.lane}: {both} overlap at {span.begin_ns} ns and neither holds the other"
            )
        around.append(span)


def busy_ns(spans: Sequence[Span], lane: str) -> int:
    """Time for which at least one span of the lane lasts."""
    total, until = 0, 0
    for span in sorted((s for s in spans if s.lane == lane), key=lambda s: s.begin_ns):
        total += max(0, span.end_ns - max(until, span.begin_ns))
        until = max(until, span.end_ns)
    return total


def _by_lane(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Spans of every lane, whoever holds another first."""
    ordered = sorted(spans, key=lambda s: (s.lane, s.begin_ns, -s.end_ns))
    return ((lane, list(group)) for lane, group in groupby(ordered, key=lambda s: s.lane))


def _flows(spans: Sequence[Span]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda s: (s.end_ns, s.begin_ns)):
        if span.flow is not None:
            found.setdefault(span.flow, []).append(span)
    return found


# The file


def _process(pid: int, name: str, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, name=name)
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    for tid, lane in enumerate(LANES, 1):
        yield _named("thread_name", pid, tid, name=lane)
        yield _named("thread_sort_index", pid, tid, sort_index=tid)
    sources = {flow: ends[0] for flow, ends in _flows(spans).items()}
    for lane, ordered in _by_lane(spans):
        where = {"pid": pid, "tid": LANES.index(lane) + 1}
        for span in ordered:
            yield {
                **{"ph": "X", **where, "ts": span.begin_ns / 1e3, "dur": span.ns / 1e3, "name": span.name},
                **({"cat": span.category} if span.category else {}),
                **({"args": dict(span.args)} if span.args else {}),
            }
            if span.flow is not None:
                yield {**where, **_arrow(span, pid, sources[span.flow] is span)}


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _arrow(span: Span, pid: int, leaves: bool) -> dict[str, Any]:
    """One end of an arrow. It belongs to the span that is open at its time, which a span's own end no longer is."""
    flow = {"cat": "flow", "name": "used", "id": pid * FLOWS + (span.flow or 0)}
    if leaves:
        return {"ph": "s", **flow, "ts": max(span.begin_ns, span.end_ns - 1) / 1e3}
    return {"ph": "f", "bp": "e", **flow, "ts": span.begin_ns / 1e3}


def read_timeline(path: Path) -> dict[str, list[Span]]:
    """The spans of every process again, lane by lane. InputError for a file that is none of ours or breaks the
    rules."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        found: dict[str, list[Span]] = {name: [] for name in processes.values()}
        for event in events:
            spans = found[processes[event["pid"]]]
            if event["ph"] == "X":
                spans.append(_span(event, lanes[event["pid"], event["tid"]]))
            elif event["ph"] in "sf":
                _bind(spans, event, lanes[event["pid"], event["tid"]])
        check_timeline(found)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a timeline's file") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a timeline of ours ({error}); write one with spac-sim run --timeline") from None
    return found


def _span(event: Mapping[str, Any], lane: str) -> Span:
    begin = round(event["ts"] * 1e3)
    end = begin + round(event["dur"] * 1e3)
    return Span(lane, event["name"], begin, end, event.get("args", {}), event.get("cat", ""))


def _bind(spans: list[Span], event: Mapping[str, Any], lane: str) -> None:
    """Give a flow to the innermost span that is open at its time, as viewers do."""
    at, flow = round(event["ts"] * 1e3), int(event["id"]) % FLOWS
    for index in reversed(range(len(spans))):
        span = spans[index]
        if span.lane == lane and span.begin_ns <= at <= span.end_ns:
            spans[index] = replace(span, flow=flow)
            return
    raise ValueError(f"flow {flow} at {at} ns belongs to no span")
