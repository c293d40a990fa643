"""What the three commands share: exit codes, tables, sizes."""

import gc
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .errors import InputError

WORD = 20  # a cell longer than this may be broken
UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def run_app(app: typer.Typer) -> NoReturn:
    """`run_main` of a command line."""
    run_main(lambda: app(standalone_mode=False))


def run_main(main: Callable[[], Any]) -> NoReturn:
    """Run a command: bad input is one line on stderr and exit 2, Ctrl-C is exit 130, never a traceback."""
    try:
        code = main()
    except InputError as error:
        line = " ".join(str(error).splitlines())
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(line)}")
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        show = getattr(error, "show", None)  # usage errors of the command-line library
        if show is None:
            raise
        show()
        code = 2
    gc.freeze()  # or the interpreter's last collection walks for a second through all that torch has made
    sys.exit(code if isinstance(code, int) else 0)


def show_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def room() -> int:
    """Columns that a table may take: those of the terminal, or of COLUMNS; 80 in a pipe."""
    return shutil.get_terminal_size((80, 24)).columns


def show_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with the same keys as one table; numbers to the right, missing values as a dash.

    It fits `room()`: headings and sentences are broken at their spaces, and what is still too wide is continued in
    further tables under the first, which name their rows again.
    """
    if not rows:
        return
    say(f"[bold]{escape(title)}[/]")  # not the table's own title, which wraps at the width of a narrow table
    width, names = room(), list(rows[0])
    broken = 1 + sum(_wish(rows, name) for name in names) > width
    for part in _parts(rows, names, width) if broken else [names]:
        say(_table(rows, part, broken))


def _table(rows: Sequence[Mapping[str, Any]], names: Sequence[str], broken: bool) -> Table:
    table = Table()
    for name in names:
        side: Literal["left", "right"] = "left" if isinstance(rows[0][name], str) else "right"
        heading = name.replace(" ", "\n") if broken else name
        table.add_column(heading, justify=side, no_wrap=not _wraps(rows, name), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    return table


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def _wraps(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether a column is of sentences or long names, which may go on in another line; numbers may not."""
    return any(isinstance(row[name], str) and len(row[name]) > WORD for row in rows)


def _wish(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """Width that a column would like to have, its bar and its margins included."""
    return max(len(name), *(len(_cell(row[name])) for row in rows)) + 3


def _least(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """Width that it cannot do without."""
    longest = max(len(_cell(row[name])) for row in rows)
    heading = max(len(word) for word in name.split() or [""])
    return max(heading, WORD if _wraps(rows, name) else longest) + 3


def _parts(rows: Sequence[Mapping[str, Any]], names: list[str], width: int) -> list[list[str]]:
    """The columns of each table of those that together show all; each begins with the columns that name the rows."""
    least = {name: _least(rows, name) for name in names}
    keys = names[: _naming(rows, names)]
    if sum(least[name] for name in keys) > 2 * width // 3:
        keys = names[:1]
    parts = [list(keys)]
    for name in names[len(keys) :]:
        if len(parts[-1]) > len(keys) and 1 + sum(least[n] for n in parts[-1]) + least[name] > width:
            parts.append(list(keys))
        parts[-1].append(name)
    return parts


def _naming(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int:
    """How many of the first columns tell the rows apart; 1 if not even all do."""
    for count in range(1, len(names)):
        if len({tuple(_cell(row[name]) for name in names[:count]) for row in rows}) == len(rows):
            return count
    return 1


def say(what: Any) -> None:
    """Print for people: a terminal's lines end between words; in a pipe they are as long as they need to be."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = room()
    console.print(what, soft_wrap=isinstance(what, str) and not console.is_terminal)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that something without a known end goes on; nothing in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(escape(what)):
        yield


@contextmanager
def measuring(what: str) -> Iterator[None]:
    """The same where time is measured: a line that stands still, since one that moves takes a processor's time."""
    tell(f"{what} …")
    try:
        yield
    finally:
        tell("")


def starting() -> AbstractContextManager[None]:
    """The same around the imports of a command that needs torch: they take seconds in which nothing else is shown."""
    return measuring("starting")


def tell(what: str) -> None:
    """Put `what` in the place of what was told before, as a terminal's last line; "" takes it away."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
        sys.stderr.flush()


def warn(text: str) -> None:
    """One line on stderr; the command goes on."""
    sys.stderr.write(f"warning: {text}\n")


def check_folder(flag: str, file: Path | None) -> None:
    """InputError if the folder into which `file` is to be written is not there; before the work, not after it."""
    if file is not None and not file.parent.is_dir():
        raise InputError(f"{flag} {file}: no such folder {file.parent}; make it first")


def parse_size(text: str, flag: str) -> int:
    """Bytes of "24GiB", "900 MB" or "1.5GB"; InputError names the flag."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2] not in UNITS:
        raise InputError(f"{flag}: cannot read the size {text!r}; write for example 24GiB or 900MB")
    return round(float(match[1]) * UNITS[match[2]])


def show_size(size: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError
