"""Folders of results as the commands write them: `run` of several sizes and lengths, `sweep` of two machines.

One policy of each fails in every run, one knows nothing better than to stay as it is.
"""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from speculated import BROKEN, speculated, write

from moe_spac.simulator.cli import main

POLICIES = ("--policy", "ar-lru", "--policy", "static", "--policy", "mine.py:Broken")


def call(*words: str) -> int:
    with patch.object(sys, "argv", ["spac-sim", *words]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def make_folders(where: Path) -> None:
    """`where`/run and `where`/sweep, without figures; leaves the working folder there."""
    write(speculated(8), where / "t.spac")
    (where / "mine.py").write_text(BROKEN)
    run = ("run", "t.spac", *POLICIES, "--slots", "3,4,6", "--draft-lengths", "1,2", "--no-plots", "--out", "run")
    assert call(*run) == 0
    machines = ("--machine", "rtx4090-pcie4", "--machine", "rtx4060-laptop")
    assert call("sweep", "t.spac", *POLICIES, *machines, "--slots", "3,4,6", "--out", "sweep") == 0
