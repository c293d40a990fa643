import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from hand import Trace
from speculated import BROKEN, SHAPE, plain, speculated, write

from moe_spac.policies.load import read_policy_file
from moe_spac.simulator.cli import main
from moe_spac.simulator.machine import load_machine, show_machine

FAST = ("--no-plots", "--no-optimum", "--policy", "static")


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


def test_run_prints_a_table_a_verdict_and_writes_a_folder(sim, tmp_path):
    code, out, err = sim("run", "t.spac", "--slots", "3,6", "--save-winner", "w.toml")
    assert (code, err) == (0, "")
    for word in (
        "ar-lru",
        "hybrimoe",
        "moe-spac",
        "static",
        "min (ref)",
        "fluid bound (ref)",
        "Best draft length of 0, 1, 2, 3, 4, 8: ",
        "SD tok/s",
        "here: ",
        "bottleneck: ",
    ):
        assert word in out
    folder = tmp_path / "runs" / "t-rtx4090-pcie4"
    names = {p.name for p in folder.iterdir()}
    assert names == {"run.json", "metrics.json", "steps.csv", "layers.csv", "residency.parquet"} | {
        f"{n}.{s}" for n in ("speed", "slots", "time", "lengths") for s in ("png", "svg")
    }
    assert max(len(line) for line in out.splitlines() if line.startswith(("│", "┃"))) <= 100
    command = json.loads((folder / "run.json").read_text())["command"]
    assert command == "spac-sim run t.spac --slots 3,6 --save-winner w.toml"
    chosen = tomllib.loads((tmp_path / "w.toml").read_text())["chosen"]
    winners = json.loads((folder / "metrics.json").read_text())["winners"]
    best = max(winners, key=lambda w: w["tokens_per_s"])
    assert read_policy_file(tmp_path / "w.toml")[0].name == best["policy"]
    assert chosen == {
        "trace": "t.spac",
        "machine": "rtx4090-pcie4",
        "slots": best["slots"],
        "slots_per_layer": best["slots"] / 2,
        "mode": best["mode"],
        "draft_length": 3 if best["mode"] == "sd" else 0,
        "tokens_per_s": best["tokens_per_s"],
        "command": command,
    }


def test_a_cut_trace_is_replayed_with_a_warning_or_refused_o11(sim, tmp_path):
    whole = (tmp_path / "t.spac").read_bytes()
    (tmp_path / "cut.spac").write_bytes(whole[: -len(whole) // 8])
    code, _, err = sim("run", "cut.spac", "--slots", "3", *FAST)
    assert code == 0
    assert err.startswith("warning: cut.spac: incomplete: ")
    code, out, err = sim("run", "cut.spac", "--slots", "3", *FAST, "--strict")
    assert (code, out) == (2, "")
    assert "incomplete" in err


def test_json_is_the_metrics_file(sim, tmp_path):
    code, out, err = sim("run", "t.spac", "--slots", "4", "--out", "r", "--json", *FAST)
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "r/metrics.json").read_text())
    first = json.loads(out)["runs"][0]
    assert (first["policy"], first["mode"], first["status"], first["slots"]) == ("static", "sd", "ok", 8)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none.spac"], ["none.spac", "no such file"]),
        (["t.spac", "--policy", "moe-spc"], ["moe-spc", "moe-spac"]),
        (["t.spac", "--machine", "rtx1"], ["--machine", "rtx4090-pcie4"]),
        (["t.spac", "--machine", "bad.toml"], ["bad.toml", "link.bandwidth", "GB/s"]),
        (["t.spac", "--slots", "9"], ["--slots", "8 experts"]),
        (["t.spac", "--slots", "many"], ["--slots", "6,10,16"]),
        (["t.spac", "--cache-fraction", "1.5"], ["--cache-fraction", "8 experts"]),
        (["t.spac", "--cache-fraction", "nan"], ["--cache-fraction"]),
        (["t.spac", "--vram", "12 parsecs"], ["--vram", "24GiB"]),
        (["t.spac", "--vram", "1GiB"], ["--vram", "not one slot"]),
        (["t.spac", "--slots", "4", "--vram", "8GiB"], ["--slots and --vram"]),
        (["t.spac", "--mode", "fast"], ["--mode", "both, sd or ar"]),
        (["plain.spac", "--mode", "sd"], ["--mode sd", "--window"]),
        (["t.spac", "--window", "4"], ["--acceptance"]),
        (["t.spac", "--window", "4", "--acceptance", "0.5"], ["--window", "recorded drafts"]),
        (["t.spac", "--draft", "Qwen3-0.6B"], ["--draft", "--window"]),
        (["plain.spac", "--window", "2", "--acceptance", "0.5", "--draft", "Qwen4"], ["--draft Qwen4", "qwen3-0.6b"]),
        (["t.spac", "--kv-grows"], ["--kv-grows", "--vram"]),
        (["t.spac", "--draft-lengths", "1,many"], ["--draft-lengths", "0,1,2,4,8"]),
        (["t.spac", "--draft-lengths", "2", "--mode", "ar"], ["--draft-lengths", "nothing is drafted"]),
        (["t.spac", "--limit-steps", "1"], ["no decode steps"]),
        (["t.spac", "--save-winner", "t.spac/w.toml"], ["--save-winner"]),
        (["t.spac", "--out", "t.spac"], ["--out"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(sim, tmp_path, words, says):
    (tmp_path / "bad.toml").write_text(show_machine(load_machine("rtx4090-pcie4")).replace("25000.0 MB/s", "25 GHz"))
    code, out, err = sim("run", *words, *(() if "--policy" in words else FAST))
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    for word in says:
        assert word in err


def test_a_truncated_trace_is_replayed_unless_strict(sim, tmp_path):
    whole = (tmp_path / "t.spac").read_bytes()
    (tmp_path / "cut.spac").write_bytes(whole[: len(whole) - 40])
    code, _, err = sim("run", "cut.spac", "--strict", *FAST)
    assert code == 2
    assert "cut.spac" in err


def test_a_failing_policy_leaves_the_others_and_counts_with_strict(sim):
    words = ("run", "t.spac", "--slots", "3", *FAST, "--policy", "mine.py:Broken")
    code, out, _ = sim(*words)
    assert code == 0
    assert "mine.py:Broken failed: policy Broken, step" in out
    assert "static wins" in out
    assert sim(*words, "--strict")[0] == 1
    assert sim("run", "t.spac", "--slots", "3", "--no-plots", "--policy", "mine.py:Broken")[0] == 1


@pytest.mark.parametrize(("slots", "status"), [("0", "CACHE_INACTIVE"), ("1", "SLOTS_LT_TOPK")])
def test_a_cache_that_cannot_work_is_a_status_and_fails_with_strict_o32(sim, tmp_path, slots, status):
    words = ("run", "t.spac", "--slots", f"{slots},4", *FAST)
    code, out, err = sim(*words)
    assert code == 0
    assert status in out
    assert err.startswith(f"warning: {status}: ")
    assert len(err.splitlines()) == 1
    bad, good = ([r for r in runs(tmp_path) if r["slots"] == n] for n in (2 * int(slots), 8))
    assert {r["status"] for r in bad} == {status}
    assert {r["status"] for r in good} == {"ok"}
    row = next(line for line in out.splitlines() if line.startswith("│") and status in line)
    assert row.count("-") >= 4  # no numbers
    assert sim(*words, "--strict")[0] == 1


def runs(folder):
    return json.loads((folder / "runs/t-rtx4090-pcie4/metrics.json").read_text())["runs"]


def test_vram_prints_its_sum_for_each_mode_o37(sim, tmp_path):
    # 8 GiB less 2 GiB hold all 16 experts of 1 MB and 8 for staging.
    code, out, _ = sim("run", "t.spac", "--vram", "8GiB", *FAST)
    assert code == 0
    assert "SD --vram: 8.00 GiB - 1.75 GiB reserved" in out
    assert "AR --vram: 8.00 GiB - 1.75 GiB reserved" in out
    assert "24 slots, 8 of them for staging, 8.0 a layer" in out
    # 12 experts less 1 for the draft, staging and slots in 2 layers: plain decoding keeps one more.
    free = sum(load_machine("rtx4090-pcie4")[e] for e in ("gpu.reserved", "gpu.headroom"))
    code, out, _ = sim("run", "t.spac", "--vram", f"{round(free + 12.1e6)}B", *FAST[:-1], "ar-lru")
    assert code == 0
    slots = {r["mode"]: r["slots"] for r in runs(tmp_path) if not r["cut"]}
    assert slots == {"sd": 7, "ar": 8}


def test_the_default_size_is_the_paper_s_or_what_one_token_needs(sim):
    # 0.17 of 16 experts are 3 slots; one token needs 2 in each of 2 layers.
    code, out, _ = sim("run", "t.spac", "--json", *FAST)
    assert code == 0
    assert json.loads(out)["runs"][0]["slots"] == 4


def test_assumed_drafts_on_a_plain_trace(sim, tmp_path):
    code, out, _ = sim("run", "plain.spac", "--window", "3", "--acceptance", "0.7", *FAST, "--out", "r")
    assert code == 0
    assert "assumed speculation" in out
    assert "drafting is free here; --draft MODEL charges it" in out
    taken = json.loads((tmp_path / "r/run.json").read_text())["trace"]["taken"]
    assert taken == {"limit": 0, "window": 3, "acceptance": 0.7, "seed": 0, "batch": 1, "draft": None}
    free = json.loads((tmp_path / "r/metrics.json").read_text())["runs"][0]["tokens_per_s"]
    words = ("run", "plain.spac", "--window", "3", "--acceptance", "0.7", "--draft", "Qwen3-0.6B", *FAST, "--json")
    charged = json.loads(sim(*words)[1])["runs"][0]
    assert charged["gpu_draft_ms_per_token"] > 0
    assert charged["tokens_per_s"] < free


def test_draft_lengths_asked_for_are_tried_with_every_policy(sim, tmp_path):
    words = ("run", "t.spac", "--slots", "4", *FAST, "--policy", "ar-lru", "--draft-lengths", "0,1,2")
    code, out, _ = sim(*words)
    assert code == 0
    assert "Decode tokens/s by draft length K" in out
    found = {(r["policy"], r["draft_length"], r["cut"]) for r in runs(tmp_path)}
    assert found == {(p, n, n in (1, 2)) for p in ("static", "ar-lru") for n in (0, 1, 2, 3)}
    assert "draft length 2: measured at draft length 3, cut again at 2" in out
    assert "Best draft length of 0, 1, 2, 3: " in out


def test_sequences_at_once(sim):
    code, out, _ = sim("run", "t.spac", "--slots", "4", *FAST, "--batch", "2")
    assert code == 0
    assert "up to 2 sequences at once: " in out


def test_the_context_takes_slots_while_it_grows(sim, tmp_path):
    """Of 12.1 MB for experts of 1 MB, with staging 8 slots; 18 tokens that take 40 kB each cost one of them."""
    heavy = replace(speculated(6).header, target=replace(SHAPE, kv_bytes_per_token=40_000))
    write(Trace(heavy, speculated(6).listed), tmp_path / "kv.spac")
    free = sum(load_machine("rtx4090-pcie4")[e] for e in ("gpu.reserved", "gpu.headroom"))
    words = ("run", "kv.spac", "--vram", f"{round(free + 12.1e6)}B", *FAST[:-1], "ar-lru", "--mode", "ar", "--json")
    still, grown = (json.loads(sim(*words, *more)[1])["runs"][0] for more in ((), ("--kv-grows",)))
    assert (still["slots_least"], still["slots_most"]) == (7, 7)
    assert (grown["slots_least"], grown["slots_most"]) == (7, 8)


def test_protect_decode_and_regret_are_said(sim, tmp_path):
    code, out, _ = sim("run", "t.spac", "--slots", "4", "--no-plots", "--policy", "ar-lru", "--protect-decode",
                       "--regret", "--wide")  # fmt: skip
    assert code == 0
    assert re.search(r"optimal\s.*\n.*victims", out)  # a heading on two lines
    document = json.loads((tmp_path / "runs/t-rtx4090-pcie4/run.json").read_text())
    assert document["protect_decode"] is True
    assert all("victim_picks" in r for r in runs(tmp_path) if not r["cut"])


def test_a_plain_trace_runs_in_one_mode(sim):
    code, out, _ = sim("run", "plain.spac", *FAST)
    assert code == 0
    assert "no verdict on speculation" in out


def test_every_number_is_defined_on_request(sim):
    rows = {r["name"]: r for r in json.loads(sim("metrics", "--json")[1])}
    words = ("run", "t.spac", "--slots", "4", "--no-plots", "--policy", "static", "--regret", "--json")
    found = json.loads(sim(*words)[1])["runs"][0]
    about = {"policy", "size", "slots", "mode", "draft_length", "cut", "status", "reference", "lossless"}
    assert set(found) - about == set(rows)
    assert rows["tpot_ms_mean"]["unit"] == "ms"
    assert "gap_closed_time" in sim("metrics")[1]


def test_lists(sim):
    code, out, _ = sim("machines", "--json")
    rows = json.loads(out)
    assert code == 0
    assert {"rtx4090-pcie4", "rtx4060-laptop", "rtx3090-pcie4-ddr4"} <= {r["name"] for r in rows}
    assert all(r["vram_gib"] > 0 and r["assumed"] for r in rows)
    assert "rtx4060-laptop" in sim("machines")[1]
    names = {r["name"] for r in json.loads(sim("policies", "--json")[1])}
    assert {"ar-lru", "hybrimoe", "hybrimoe-release", "moe-spac", "moe-spac-release", "static", "min"} <= names
    assert "moe-spac-release" in sim("policies")[1]


def test_help_loads_no_heavy_library():
    code = (
        "import sys\nfrom moe_spac.simulator.cli import app\n"
        "app(['run', '--help'], standalone_mode=False)\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'pandas', 'simpy', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--cache-fraction" in done.stdout
    assert done.stdout.strip().endswith("[]")


def test_ctrl_c_is_130_and_leaves_no_files(sim, tmp_path, monkeypatch):
    from moe_spac.simulator import compare

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "simulate", interrupted)
    code, out, _ = sim("run", "t.spac", *FAST)
    assert (code, out) == (130, "")
    assert not (tmp_path / "runs").exists()


def test_slots_that_no_card_has_are_named(sim):
    said = sim("run", "gpt-oss-20b", "--machine", "rtx4060-laptop", "--slots", "8,32", "--limit-steps", "4", *FAST)[1]
    said = " ".join(said.split())
    assert "VRAM_EXCEEDED: 32 slots a layer take" in said
    assert said.count("VRAM_EXCEEDED") == 1
