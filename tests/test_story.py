"""The first command of the README keeps its promise, end to end."""

import subprocess
import sys


def test_the_whole_story_runs_offline(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "moe_spac", "--out", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "identical" in done.stdout
    for name in ("trace.spac", "this-machine.toml", "winner.toml", "compare/metrics.json", "compare/run.json"):
        assert (tmp_path / "demo" / name).is_file(), name
    assert len(list((tmp_path / "demo" / "compare").glob("*.png"))) >= 3
    assert len(list((tmp_path / "demo" / "compare").glob("*.svg"))) >= 3
