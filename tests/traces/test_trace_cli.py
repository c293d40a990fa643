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
    monkeypatch.setenv("COLUMNS", "200")  # no sentence is broken
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
    monkeypatch.setenv("COLUMNS", "200")
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


def test_stats_draws_a_page(capsys, monkeypatch, tmp_path):
    """O46: without a screen; the same data give the same bytes, and synthetic data say so."""
    monkeypatch.delenv("DISPLAY", raising=False)
    code, out, _ = spac_trace(capsys, monkeypatch, "stats", FIXTURE, "--plot", str(tmp_path / "new"))
    assert code == 0
    files = [tmp_path / "new" / f"statistics.{suffix}" for suffix in ("png", "svg", "json", "md")]
    assert all(str(file) in out for file in files)
    assert files[0].read_bytes().startswith(b"\x89PNG")
    picture = files[1].read_text()
    for word in ("SYNTHETIC, not recorded: ", "lag, tokens", "slots a layer, of 6 experts", "place in the draft"):
        assert word in picture or word.replace(" ", "&#160;") in picture or "<!-- " + word in picture, word
    found = json.loads(files[2].read_text())
    assert (len(found["popularity"]), len(found["lru_curve"]["mean"])) == (2, 6)
    assert found["lru_curve"]["mean"][1] == found["mean"]["lru_atomic_2"]
    page = files[3].read_text()
    assert "**Synthetic, not recorded.**" in page
    assert "![Statistics in pictures](statistics.png)" in page
    assert f"| mean | {found['mean']['overlap_1']:.3f} |" in page
    spac_trace(capsys, monkeypatch, "stats", FIXTURE, "--plot", str(tmp_path / "again.png"), "--json")
    assert [(tmp_path / f"again{f.suffix}").read_bytes() for f in files[:3]] == [f.read_bytes() for f in files[:3]]


def test_diff(capsys, monkeypatch, tmp_path):
    code, out, _ = spac_trace(capsys, monkeypatch, "diff", FIXTURE, FIXTURE)
    assert (code, "the same routing in all 8 steps" in out) == (0, True)
    cut = tmp_path / "cut.spac"
    cut.write_bytes(Path(FIXTURE).read_bytes()[:-2000])
    code, out, err = spac_trace(capsys, monkeypatch, "diff", FIXTURE, str(cut), "--json")
    assert code == 1
    assert json.loads(out)["first"] == {"step": 6, "what": "length", "sequence": 1, "missing_in": "B"}
    assert "tail dropped" in err


@pytest.mark.parametrize("form", ["csv", "jsonl", "npz", "parquet"])
def test_export_and_import_again(capsys, monkeypatch, tmp_path, form):
    path, back = str(tmp_path / f"t.{form}"), str(tmp_path / "t.spac")
    assert spac_trace(capsys, monkeypatch, "export", FIXTURE, "-o", path)[0] == 0
    code, out, _ = spac_trace(capsys, monkeypatch, "import", path, "-o", back)
    assert (code, out.startswith(f"{back}: 24 tokens in 2 sequences")) == (0, True)
    assert spac_trace(capsys, monkeypatch, "diff", FIXTURE, back)[0] == 0


def test_import_with_sizes_in_units(capsys, monkeypatch, tmp_path):
    (tmp_path / "t.csv").write_text("layer,expert\n0,1\n0,2\n1,0\n1,2\n")
    args = ["--top-k", "2", "--experts", "4", "--hidden", "8", "--expert-width", "4", "--kv-size", "1KiB"]
    args = ["import", str(tmp_path / "t.csv"), "-o", str(tmp_path / "t.spac"), *args]
    code, _, err = spac_trace(capsys, monkeypatch, *args)
    assert (code, "or --dense-size" in err) == (2, True)
    code, out, _ = spac_trace(capsys, monkeypatch, *args, "--dense-size", "2MB", "--expert-size", "0.5KiB")
    assert (code, "Token ids are not known" in out) == (0, True)
    target = json.loads(spac_trace(capsys, monkeypatch, "info", str(tmp_path / "t.spac"), "--json")[1])["header"][
        "target"
    ]
    assert (target["expert_bytes"], target["dense_bytes"], target["kv_bytes_per_token"]) == (512, 2_000_000, 1024)


@pytest.mark.parametrize(
    "args",
    [
        ["info", "missing.spac"],
        ["diff", "missing.spac", "missing.spac"],
        ["stats", FIXTURE, "--plot", "missing/x.png"],
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
    assert args[1] in err or args[-1] in err


def test_exit_codes_of_the_process_and_no_heavy_imports():
    script = "import sys; from moe_spac.traces.cli import main; sys.argv[1:] = ['info', 'missing.spac']; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    script = (
        "import sys, moe_spac.traces.cli; assert not {'torch', 'transformers', 'pandas', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
