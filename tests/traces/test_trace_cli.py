"""The `spac-trace` command line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_spac.traces.cli import main

FIXTURE = str(Path(__file__).parent / "fixtures" / "v1.spac")


def spac_trace(capsys, monkeypatch, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["spac-trace", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_info_prints_header_and_counts(capsys, monkeypatch):
    """O07, O09: what a reader needs to know before trusting a trace."""
    code, out, _ = spac_trace(capsys, monkeypatch, "info", FIXTURE)
    assert code == 0
    for text in (
        "complete",
        "synthetic, from made for the tests",
        "3 prefill, 1 decode, 4 verify",
        "24 computed, 11 emitted, in 2 sequences",
        "10, of which 6 accepted",
        "bytes/token (ids alone 4, packed)",
        "tiny-draft",
        "top 2 of 6 in 2 of 3 layers",
        "1-2",
        "float32",
        "temperature 0.7, seed 3",
        "routing weights, scores (router logits), gates of the next 1 layers",
        "moe-spac 0.1.0",
    ):
        assert text in out, text


def test_info_as_json(capsys, monkeypatch):
    code, out, _ = spac_trace(capsys, monkeypatch, "info", FIXTURE, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["header"]["target"]["moe_layers"] == [1, 2]
    assert found["summary"]["tokens"] == 24
    assert found["summary"]["state"] == "complete"


def test_info_of_a_cut_file_says_so_and_strict_refuses(capsys, monkeypatch, tmp_path):
    """O11."""
    cut = tmp_path / "cut.spac"
    cut.write_bytes(Path(FIXTURE).read_bytes()[:-2000])
    code, out, _ = spac_trace(capsys, monkeypatch, "info", str(cut))
    assert code == 0
    assert "incomplete: 6 steps, tail dropped" in out
    code, out, err = spac_trace(capsys, monkeypatch, "info", str(cut), "--strict")
    assert (code, out) == (2, "")
    assert "incomplete: 6 steps" in err
    code, _, err = spac_trace(capsys, monkeypatch, "stats", str(cut))
    assert code == 0
    assert f"warning: {cut}: incomplete: 6 steps, tail dropped" in err


def test_stats_as_tables_and_json(capsys, monkeypatch):
    code, out, _ = spac_trace(capsys, monkeypatch, "stats", FIXTURE)
    assert code == 0
    assert "0.600 of drafted tokens in 4 verify steps" in out
    assert "between domains" in out
    code, out, _ = spac_trace(capsys, monkeypatch, "stats", FIXTURE, "--json")
    found = json.loads(out)
    assert [layer["layer"] for layer in found["layers"]] == [1, 2]
    assert found["tokens"] == 11
    assert found["mean"]["overlap_64"] is None
    assert found["acceptance"]["tokens_per_verify"] == 2.5
    assert found["slots"] == [2, 4]


def test_import_and_export(capsys, monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((2, 24, 32)), axis=-1)[..., :4].astype(np.uint8)
    np.savez(tmp_path / "a.npz", expert_ids=ids, expert_probs_u8=ids, seq_offsets=[0, 2])
    record = {"dataset": "d", "category": "c", "row_index": 0, "first_position": 0, "tokens": 2}
    (tmp_path / "a_meta.jsonl").write_text(json.dumps(record))
    trace, table = str(tmp_path / "t.spac"), str(tmp_path / "t.parquet")
    code, out, _ = spac_trace(capsys, monkeypatch, "import", str(tmp_path / "a.npz"), "-o", trace)
    assert (code, out.startswith(f"{trace}: 2 tokens in 1 sequences")) == (0, True)
    code, out, _ = spac_trace(capsys, monkeypatch, "export", trace, "-o", table)
    assert (code, out) == (0, f"{table}: 2 rows\n")
    code, _, err = spac_trace(capsys, monkeypatch, "export", trace, "-o", str(tmp_path / "none" / "t.parquet"))
    assert code == 2
    assert "cannot write" in err


@pytest.mark.parametrize(
    "args",
    [
        ["info", "missing.spac"],
        ["stats", "missing.spac"],
        ["info", __file__],
        ["import", "missing.npz", "-o", "t.spac"],
        ["export", "missing.spac", "-o", "t.parquet"],
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, monkeypatch, args):
    code, out, err = spac_trace(capsys, monkeypatch, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert args[1] in err


def test_exit_codes_of_the_process_and_no_heavy_imports():
    script = "import sys; from moe_spac.traces.cli import main; sys.argv[1:] = ['info', 'missing.spac']; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    script = (
        "import sys, moe_spac.traces.cli; assert not {'torch', 'transformers', 'pandas', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
