import filecmp
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from speculated import BROKEN, plain, speculated, write

from moe_spac.simulator.cli import main
from moe_spac.simulator.machine import load_machine, show_machine
from moe_spac.simulator.sweep import Replay, plan, policy_identity, replays_of, run_cell, source_of
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import DraftShape

TWO = ("--policy", "ar-lru", "--policy", "static")
CRASH = "import os\nfrom moe_spac.policies.interface import Policy\n\n\nclass Crash(Policy):\n"
CRASH += "    def dispatch(self, demand, view):\n        os._exit(1)\n"


@pytest.fixture
def sim(tmp_path, monkeypatch, capsys):
    """Run `spac-sim` in an empty folder with t.spac (drafts) and plain.spac (none); (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    write(speculated(6), tmp_path / "t.spac")
    write(plain(12), tmp_path / "plain.spac")
    (tmp_path / "mine.py").write_text(BROKEN)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["spac-sim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def same_files(one: Path, two: Path) -> bool:
    names = {str(p.relative_to(one)) for p in one.rglob("*") if p.is_file()}
    assert names == {str(p.relative_to(two)) for p in two.rglob("*") if p.is_file()}
    return len(filecmp.cmpfiles(one, two, names, shallow=False)[0]) == len(names)


def test_a_sweep_is_the_product_as_one_tidy_table(sim, tmp_path):
    words = ("sweep", "t.spac", "plain.spac", *TWO, "--policy", "mine.py:Broken", "--slots", "3")
    code, out, err = sim(*words, "--draft-lengths", "0,2,recorded", "--acceptance", "0.7", "--out", "r",
                         "--machine", "rtx4090-pcie4", "--machine", "rtx3090-pcie3-ddr4")  # fmt: skip
    assert (err, code) == ("", 0)
    table = pd.read_parquet(tmp_path / "r" / "sweep.parquet")
    # t.spac: none, cut to 2, recorded; plain.spac: none, assumed 2. Two machines, three policies and min.
    assert len(table) == (3 + 2) * 2 * 4
    assert not table.duplicated(["trace", "machine", "size", "policy", "draft"]).any()
    assert set(table.draft) == {"none", "cut to 2", "recorded", "assumed 2"}
    assert table.groupby("draft").draft_length.unique().map(list).to_dict() == {
        "none": [0], "cut to 2": [2], "recorded": [3], "assumed 2": [2]}  # fmt: skip
    broken = table.policy == "mine.py:Broken"
    assert table[broken].status.str.match(r"failed: policy Broken, step \d+, layer \d: evicts expert \d").all()
    assert table[broken].tokens_per_s.isna().all()
    assert (table[~broken].status == "ok").all()
    assert (table[~broken].tokens_per_s <= table[~broken].fluid_bound_tokens_per_s).all()
    assert "mine.py:Broken: 10 of its cells have the status failed: policy Broken, step 1" in out
    assert "accepted is assumed, and costs nothing: plain.spac" in out


def test_a_cell_has_the_numbers_of_a_run(sim, tmp_path):
    _, out, _ = sim("sweep", "t.spac", *TWO, "--slots", "3", "--out", "r", "--json")
    cells = json.loads(out)
    _, out, _ = sim("run", "t.spac", *TWO, "--slots", "3", "--out", "one", "--json", "--no-plots")
    runs = [run for run in json.loads(out)["runs"] if run["draft_length"] in (0, 3)]
    assert len(cells) == len(runs) == 6
    for run in runs:
        same = [c for c in cells if (c["policy"], c["slots"], c["mode"]) == (run["policy"], run["slots"], run["mode"])]
        flat = {k: v for k, v in run.items() if k not in ("cut", "size") and not isinstance(v, list | dict)}
        assert [{k: c.get(k, "missing") for k in flat} for c in same] == [flat]


def test_finished_cells_are_not_done_again_and_damaged_ones_are(sim, tmp_path):
    words = ("sweep", "t.spac", *TWO, "--slots", "3,6", "--out", "r")
    sim(*words)
    whole = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir() if p.is_file()}
    cells = sorted((tmp_path / "r" / "cells").iterdir())
    written = {p: p.stat().st_mtime_ns for p in cells}
    assert len(cells) == 2 * 2 * 3
    cells[0].unlink()
    cells[1].write_bytes(cells[1].read_bytes()[:-40])
    assert sim(*words)[0] == 0
    assert {p: p.stat().st_mtime_ns for p in cells[2:]} == {p: written[p] for p in cells[2:]}
    assert cells[1].stat().st_mtime_ns != written[cells[1]]
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir() if p.is_file()} == whole
    sim("sweep", "t.spac", *TWO, "--slots", "3,6,4", "--out", "r")
    assert len(list((tmp_path / "r" / "cells").iterdir())) == 3 * 2 * 3
    assert all(p.stat().st_mtime_ns == written[p] for p in cells[2:])


def test_whatever_changes_a_result_makes_another_cell(sim, tmp_path):
    machine = load_machine("rtx4090-pcie4")

    def key(trace="t.spac", length=None, machine=machine, policy="mine.py:Lossy", slots=6, seed=0, **more):
        return plan(
            replays_of(trace, [length], seed=seed, **more), [machine], [policy], lambda *_: {"some": slots}, seed
        )[0].key

    link = replace(machine.quantities["link.bandwidth"], value=1e9)
    keys = [
        key(),
        key(slots=8),
        key(seed=1),
        key(length=0),
        key(length=2),
        key(length=2, seed=1),
        key(limit=3),
        key(machine=replace(machine, quantities=machine.quantities | {"link.bandwidth": link})),
        key(policy="moe-spac"),
        key(policy="moe-spac:k=3"),
        key("plain.spac", 2, acceptance=0.5),
        key("plain.spac", 2, acceptance=0.6),
        key("plain.spac", 2, acceptance=0.6, drafter=DraftShape("d", 1, 10**6, 8)),
    ]
    assert key() == keys[0]
    write(speculated(6, seed=1), tmp_path / "t.spac")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_a_policys_own_source_belongs_to_its_cells(sim, tmp_path):
    words = ("sweep", "t.spac", "--policy", "mine.py:Broken", "--slots", "3", "--no-optimum", "--out", "r")
    code, out, _ = sim(*words)
    assert (code, "failed" in out) == (1, True)  # nothing but the broken policy ran
    assert sim(*words, "--policy", "static")[0] == 0
    assert sim(*words, "--policy", "static", "--strict")[0] == 1
    policy_identity.cache_clear()  # a process of its own would not have it
    (tmp_path / "mine.py").write_text(BROKEN.replace("return incoming", "return None"))
    code, out, _ = sim(*words)
    assert (code, "failed" in out) == (0, False)


def test_a_worker_with_other_files_or_another_program_is_refused(sim, tmp_path):
    replay = replays_of("t.spac", [0])[0]
    cell = plan([replay], [load_machine("rtx4090-pcie4")], ["static"], lambda *_: {"3 a layer": 6})[0]
    with pytest.raises(InputError, match="another version of moe-spac"):
        run_cell(replace(cell, code="0" * 64), None)  # type: ignore[arg-type]
    write(speculated(5), tmp_path / "t.spac")
    with pytest.raises(InputError, match="not the file that the sweep was planned with"):
        source_of(replace(replay, seed=1))
    with pytest.raises(InputError, match="no such file"):
        source_of(Replay("x", "x.spac", "0"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("t.spac", "gone.spac"), "gone.spac: no such file"),
        (("t.spac", "--policy", "ar-lur"), "did you mean ar-lru?"),
        (("t.spac", "--machine", "rtx4090-pcie4", "--machine", "abacus"), "no preset or file named 'abacus'"),
        (("t.spac", "--slots", "6,9"), "--slots: 9 slots a layer, but tiny has 8 experts a layer"),
        (("t.spac", "--draft-lengths", "2,-1"), "--draft-lengths 2,-1: not a list of whole numbers"),
        (("t.spac", "plain.spac", "--draft-lengths", "2"), "plain.spac has no drafts"),
        (("t.spac", "--acceptance", "0.7"), "--acceptance: no draft is assumed"),
        (("t.spac", "--machine", "rtx4090-pcie4", "--machine", "copy.toml"), "two profiles have the name"),
        (("t.spac", "--limit-steps", "1"), "no decode steps"),
        (("t.spac", "--vram", "24GiB,1KiB"), "--vram"),
        (("t.spac", "--dask", "nonsense", "--slots", "3"), "--dask nonsense: no scheduler answers there"),
    ],
)
def test_unusable_inputs_are_refused_before_anything_runs(sim, tmp_path, words, says):
    (tmp_path / "copy.toml").write_text(show_machine(load_machine("rtx4090-pcie4")))
    code, out, err = sim("sweep", *words, "--out", "r")
    assert (code, out) == (2, "")
    assert says in err
    assert not (tmp_path / "r").exists()


def test_several_memory_sizes(sim):
    _, out, _ = sim("sweep", "t.spac", *TWO, "--vram", "4.7GB,4.71GB", "--out", "r", "--json")
    fits = [sim("run", "t.spac", *TWO, "--vram", size, "--out", "one", "--json", "--no-plots")[1]
            for size in ("4.7GB", "4.71GB")]  # fmt: skip
    assert {r["slots"] for r in json.loads(out)} == {r["slots"] for fit in fits for r in json.loads(fit)["runs"]}
    assert {r["size"] for r in json.loads(out)} == {"4.7GB", "4.71GB"}


def test_a_dask_cluster_gives_the_same_bytes(sim, tmp_path):
    distributed = pytest.importorskip("distributed")
    words = ("sweep", "t.spac", "plain.spac", *TWO, "--policy", "mine.py:Broken", "--slots", "3", "--out", "r",
             "--draft-lengths", "0,2", "--acceptance", "0.7")  # fmt: skip
    assert sim(*words)[0] == 0
    (tmp_path / "r").rename(tmp_path / "local")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster:
        assert sim(*words, "--dask", cluster.scheduler_address)[0] == 0
    assert same_files(tmp_path / "local", tmp_path / "r")


def test_a_worker_that_dies_is_said_in_one_line(sim, tmp_path):
    (tmp_path / "crash.py").write_text(CRASH)
    words = ("sweep", "t.spac", "--policy", "crash.py:Crash", "--slots", "3,4", "--no-optimum", "--out", "r")
    code, out, err = sim(*words, "--jobs", "2")
    assert (code, out) == (2, "")
    assert "error: --jobs 2: a worker process was killed" in err


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups")
def test_killed_and_interrupted_sweeps_keep_their_cells_and_end_their_workers(sim, tmp_path):
    write(speculated(500), tmp_path / "long.spac")
    words = (
        "sweep",
        "long.spac",
        *TWO,
        "--slots",
        "2,3,4,5,6,7,8",
        "--draft-lengths",
        "0",
        "--out",
        "r",
        "--jobs",
        "2",
    )
    command = [sys.executable, "-c", "from moe_spac.simulator.cli import main; main()", *words]
    kept: dict[Path, int] = {}
    for kind in (signal.SIGKILL, signal.SIGINT):
        with (tmp_path / "said").open("w") as said:
            sweep = subprocess.Popen(command, cwd=tmp_path, stderr=said, start_new_session=True)
        while len(cells := times(tmp_path / "r" / "cells")) <= len(kept) and sweep.poll() is None:
            time.sleep(0.02)
        begin = time.monotonic()
        sweep.send_signal(kind)
        assert sweep.wait(10) == (130 if kind is signal.SIGINT else -kind)
        if kind is signal.SIGINT:
            assert time.monotonic() - begin < 5  # under 1 s on a quiet machine
        while group_lives(sweep.pid):
            assert time.monotonic() - begin < 10
            time.sleep(0.02)
        cells = times(tmp_path / "r" / "cells")
        assert kept.items() <= cells.items()
        kept = cells
    assert 2 <= len(kept) < 7 * 3
    assert (tmp_path / "said").read_text().startswith(f"interrupted: {len(kept)} of 21 cells are finished; ")
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["cells"]


def times(folder: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in folder.glob("*.json")}


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
