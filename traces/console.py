"""What the three commands share: exit codes, tables, sizes."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .errors import InputError

UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def run_app(app: typer.Typer) -> None:
    """Run a command line: bad input is one line on stderr and exit 2, Ctrl-C is exit 130, never a traceback."""
    try:
        code = app(standalone_mode=False)
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
    sys.exit(code if isinstance(code, int) else 0)


def show_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def show_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with the same keys as one table; numbers to the right, missing values as a dash."""
    if not rows:
        return
    say(f"[bold]{escape(title)}[/]")  # not the table's own title, which wraps at the width of a narrow table
    table = Table()
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*("-" if v is None else str(v) for v in row.values()))
    say(table)


def say(what: Any) -> None:
    """Print for people. In a pipe, lines are as long as they need to be."""
    console = Console(highlight=False, soft_wrap=isinstance(what, str))
    if not console.is_terminal:
        console.width = 200
    console.print(what)


def warn(text: str) -> None:
    """One line on stderr; the command goes on."""
    sys.stderr.write(f"warning: {text}\n")


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
