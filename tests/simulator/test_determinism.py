"""The same inputs give the same bytes, whatever Python's hash seed and whoever does the work (design 4.6, O30)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from speculated import BROKEN, speculated, write

POLICIES = ("lrfu", "hybrimoe", "moe-spac", "mine.py:Broken")
NAMED = [word for name in POLICIES for word in ("--policy", name)]
RUN = ("run", "t.spac", *NAMED, "--slots", "3", "--no-plots", "--out", "r", "--json")
SWEEP = ("sweep", "t.spac", *NAMED, "--slots", "3", "--draft-lengths", "0,2", "--out", "r", "--json")


def spac_sim(folder: Path, hash_seed: str, words: tuple[str, ...]) -> dict[str, bytes]:
    """What a process of its own prints, and every file that it leaves, by name."""
    folder.mkdir()
    write(speculated(5), folder / "t.spac")
    (folder / "mine.py").write_text(BROKEN)
    command = [sys.executable, "-c", "from moe_spac.simulator.cli import main; main()", *words]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True)
    assert done.returncode == 0, done.stderr
    files = {str(p.relative_to(folder)): p.read_bytes() for p in (folder / "r").rglob("*") if p.is_file()}
    return {"stdout": done.stdout, "stderr": done.stderr} | files


@pytest.mark.parametrize(("words", "wanted"), [(RUN, "r/metrics.json"), (SWEEP, "r/sweep.parquet")])
def test_hash_seed_and_jobs_change_no_byte(tmp_path, words, wanted):
    one = spac_sim(tmp_path / "one", "1", words)
    two = spac_sim(tmp_path / "two", "2", (*words, "--jobs", "2"))
    assert wanted in one
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
