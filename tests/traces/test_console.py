"""Tables fit the terminal and lose nothing."""

import os
import pty
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_spac.traces.console import room, show_table

WIDE = [
    {
        "policy": f"policy-{i}",
        "slots": str(i // 2),
        "status": "ok",
        **{f"number {n} of it": n * 1000 + i for n in range(9)},
    }
    for i in range(4)
]


@pytest.fixture(autouse=True)
def eighty(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def table_lines(out: str) -> list[str]:
    return [line for line in out.splitlines() if line[:1] in set("┏┃┡│└")]


def test_a_wide_table_goes_on_in_further_ones_that_name_their_rows_again(capsys):
    show_table("t", WIDE)
    out = capsys.readouterr().out
    assert max(map(len, table_lines(out))) <= 80
    assert out.count("┏") >= 2
    assert out.count("policy-3") == out.count("┏")
    for row in WIDE:
        for value in row.values():
            assert re.search(rf"│ +{value} +│", out)


def test_a_table_that_fits_is_left_as_it_is(capsys):
    show_table("t", [{"a b": 1, "what it is": "short"}])
    assert "┃ a b ┃ what it is ┃" in capsys.readouterr().out


def test_sentences_go_on_in_the_next_line(capsys):
    show_table("t", [{"name": "x", "about": "words " * 40, "n": 12345}])
    out = capsys.readouterr().out
    assert max(map(len, table_lines(out))) <= 80
    assert out.count("words") == 40
    assert "12345" in out


def test_as_many_first_columns_as_tell_the_rows_apart_are_said_again(capsys):
    rows = [{"trace": "t", "machine": m, "size": s, **{f"number-{n}": n for n in range(9)}} for m in "ab" for s in "xy"]
    show_table("t", rows)
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("┃")]
    assert len(heads) > 1
    assert all(re.match(r"┃ trace ┃ machine ┃ size ┃", head) for head in heads)


names = st.text("abc defghij", min_size=1, max_size=18).map(lambda s: s.strip() or "x")
cells = st.one_of(st.none(), st.integers(0, 10**9), st.text("xyz ", max_size=60).map(str.strip))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, st.lists(cells, min_size=2, max_size=2), min_size=1, max_size=14))
def test_no_table_is_wider_than_there_is_room(capsys, columns):
    show_table("t", [{name: values[at] for name, values in columns.items()} for at in range(2)])
    out = capsys.readouterr().out
    assert max(map(len, table_lines(out))) <= 80
    for value in (v for values in columns.values() for v in values if isinstance(v, int)):
        assert str(value) in out


def test_room_is_the_terminals_or_what_columns_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "123")
    assert room() == 123


SCRIPT = "from moe_spac.traces.console import show_table; show_table('t', [{'name': 'x', 'value': 1}])"


def test_colour_is_for_terminals_only():
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}
    piped = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, env=environment, check=True).stdout
    assert b"\x1b" not in piped
    main, side = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=side, env=environment) as process:
        os.close(side)
        shown = b""
        while chunk := _read(main):
            shown += chunk
    os.close(main)
    assert process.returncode == 0
    assert b"\x1b[1m" in shown


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""
