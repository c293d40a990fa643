"""The structure holds: import direction, what stays out of the fast commands, what is packaged, how long files get."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHAIN = ["traces", "policies", "simulator", "executor"]
SOURCES = [p for folder in CHAIN for p in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> list[tuple[int, str]]:
    """(relative level, module) of every import in a file, also of those inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
        elif isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_chain(path):
    parts = path.relative_to(ROOT).parts
    allowed = set(CHAIN[: CHAIN.index(parts[0]) + 1])
    depth = len(parts) - 1
    for level, module in imports(path):
        if level > depth:  # reaches the root package
            assert module.split(".")[0] in allowed | {""}, f"{path} imports {module}"
        top = module.split(".")[0]
        if level == 0 and parts[0] in ("policies", "simulator"):
            assert top not in ("torch", "transformers"), f"{path} imports {module}"
        if level == 0 and parts[0] == "policies":
            assert top != "simpy", f"{path} imports {module}"
        assert top != "moe_spac", f"{path}: relative imports inside the package"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("module", ["traces.cli", "simulator.cli", "executor.cli"])
def test_commands_start_without_the_heavy_libraries(module):
    heavy = ("torch", "transformers", "matplotlib", "pandas")
    code = f"import sys, moe_spac.{module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_folder_with_code_is_packaged():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(("moe_spac", *p.parent.relative_to(ROOT).parts)) for p in SOURCES} | {"moe_spac"}
    assert set(packages) == folders


def test_nothing_refers_to_the_workplace():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / f for f in listed.stdout.split()] if listed.returncode == 0 else SOURCES
    for path in files:
        if path.suffix in (".py", ".md", ".toml", ".json", ".jsonl") and path != Path(__file__):
            text = path.read_text()
            assert "../shared" not in text, path
            assert "/work/" not in text, path
