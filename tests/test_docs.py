"""What pages show can be typed: commands in `sh` blocks are run, all others are checked for their options."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"^(?: {4}|\$ )(spac-(?:trace|sim|exec) [a-z].*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def app_of(program: str):
    if program == "spac-trace":
        from moe_spac.traces.cli import app
    elif program == "spac-sim":
        from moe_spac.simulator.cli import app
    else:
        from moe_spac.executor.cli import app
    return app


def commands(text: str) -> list[str]:
    """The commands of a page's `sh` blocks, without comments; a backslash goes on with the next line."""
    lines = "\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.startswith("spac-")]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p.read_text())], ids=lambda p: p.name)
def test_commands_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in commands(page.read_text()):
        program, *words = shlex.split(command)
        result = CliRunner().invoke(app_of(program), words)
        assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception}"


def shown() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = BLOCK.sub("", page.read_text())
        found += [(page.name, line) for line in SHOWN.findall(text)]
    return found


@pytest.mark.parametrize(("page", "line"), shown(), ids=lambda value: value[:60])
def test_options_exist(page, line):
    """A line may show several commands, `a | b`, and explain itself after some spaces."""
    program, _, rest = line.split("   ")[0].partition(" ")
    for part in re.split(r" \| (?=[a-z]+\b(?! *\|)(?!\]))", rest):
        name = part.split()[0]
        told = CliRunner().invoke(app_of(program), [name, "--help"], env={"COLUMNS": "200"})
        assert told.exit_code == 0, f"{page}: {line}: no {name}"
        for option in re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", part):
            assert option in told.output, f"{page}: {line}: {name} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_entry_of_a_profile_is_explained():
    from moe_spac.simulator.machine import UNITS

    page = (ROOT / "docs" / "machines.md").read_text()
    assert set(re.findall(r"^\| `([a-z]+\.[a-z0-9_]+)`", page, re.MULTILINE)) == set(UNITS)
