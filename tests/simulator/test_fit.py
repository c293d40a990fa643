"""`spac-sim fit`: the figures of research rows O20, O21, O27 to O29 and O35 to O38, and the flags it prints."""

import json
import sys

import pytest
from hand import step, trace
from speculated import speculated, write

from moe_spac.simulator.cli import main
from moe_spac.simulator.fit import Wanted, llama_flags, plan, unions, with_entry
from moe_spac.simulator.fit_speed import Drafting, Sample, synthetic_sample, traced_sample
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.parameters import count
from moe_spac.simulator.sizing import find_size, format_for
from moe_spac.traces.errors import InputError
from moe_spac.traces.reader import open_trace
from moe_spac.traces.writer import TraceWriter

GIB = 2**30
MACHINE = load_machine("rtx4090-pcie4")


def wanted(vram: float, quant: str = "bf16", draft: str | None = "Qwen3-0.6B", **more) -> Wanted:
    size = find_size("Qwen3-30B-A3B", "MODEL")
    small = find_size(draft, "--draft") if draft else None
    return Wanted(size, format_for(quant, size), round(vram * GIB), **{"context": 4096, "draft": small, **more})


@pytest.fixture
def fit(tmp_path, monkeypatch, capsys):
    """Run `spac-sim` in an empty folder; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["spac-sim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


O35 = [
    ("bf16", 8, 3),
    ("bf16", 12, 12),
    ("bf16", 16, 22),
    ("bf16", 24, 41),
    ("4.5bit", 8, 29),
    ("4.5bit", 12, 63),
    ("4.5bit", 16, 97),
    ("4.5bit", 24, 128),
]


@pytest.mark.parametrize(("quant", "vram", "slots"), O35)
def test_slots_per_layer_o35(quant, vram, slots):
    """The published sum keeps nothing free and counts staging as slots."""
    p = plan(wanted(vram, quant), with_entry(MACHINE, "gpu.headroom", 0, ""))
    assert abs(min(128, p.fit.places // 48) - slots) <= 1
    # Staging is one slot for each of a layer's, so that one slot in 49 stages.
    assert p.slots <= p.fit.places - p.staging
    assert p.host_bytes - 2 * GIB == p.wanted.shape.all_expert_bytes


def test_what_the_headroom_costs():
    with_, without = (plan(wanted(12), with_entry(MACHINE, "gpu.headroom", h, "")) for h in (256 * 2**20, 0))
    assert without.fit.places - with_.fit.places in (28, 29)  # 256 MiB in experts of 9 MiB


def test_fewer_slots_than_experts_per_token_is_said_plainly_o35(fit):
    code, out, _ = fit("fit", "Qwen3-30B-A3B", "--vram", "8GiB", "--headroom", "0MiB", "--draft", "Qwen3-0.6B",
                       "--quant", "bf16", "--policy", "ar-lru", "--tokens", "2")  # fmt: skip
    assert code == 0
    assert "fewer slots (3) than experts per token (8)" in out
    assert "SLOTS_LT_TOPK" in out
    assert "experts 54.00 GiB" in out  # host memory
    assert "context: 4096 tokens" in out


def test_the_draft_takes_slots_o37():
    with_, without = plan(wanted(12), MACHINE), plan(wanted(12, draft=None), MACHINE)
    taken = 596_042_752 * 2 + 4096 * 114_688
    assert with_.fit.left == without.fit.left - taken
    assert without.slots - with_.slots == pytest.approx(taken / (9 * 2**20) * 48 / 49, abs=2)


def test_speculation_is_judged_with_the_slots_it_leaves_o37(fit):
    words = ("fit", "Qwen3-30B-A3B", "--vram", "12GiB", "--draft", "Qwen3-0.6B", "--policy", "ar-lru", "--tokens", "8")
    code, out, _ = fit(*words, "--json")
    found = json.loads(out)
    ar, sd = found["speeds"]
    assert code == 0
    assert (ar["mode"], sd["mode"]) == ("ar", "sd")
    assert sd["slots_per_layer"] == found["slots_per_layer"]
    assert ar["slots_per_layer"] == found["draft"]["slots_per_layer_without"] > sd["slots_per_layer"]
    assert len(found["speculation"]) == 1
    assert ("do not use speculative decoding here" in found["speculation"][0]) == (sd["middle"] < ar["middle"])


def test_windows_pins_o38(fit):
    """Resident 19,456 MiB and 8,192 MiB to pin on a card of 24 GiB: refused, with the reason."""
    words = ("fit", "Qwen3-30B-A3B", "--quant", "bf16", "--platform", "windows", "--pin", "8192MiB",
             "--machine", "rtx3090-pcie4-ddr4", "--policy", "static", "--tokens", "1")  # fmt: skip
    code, out, _ = fit(*words, "--slots", "33")
    assert code == 1
    assert "does not fit" in out
    assert "Windows charges pinned memory to the card" in out
    resident = round(1.75 * GIB) + 2 * 1_541_016_576 + 4096 * 98_304 + 33 * 49 * 9 * 2**20
    assert resident / 2**20 == pytest.approx(19_670, abs=15)
    code, out, _ = fit(*words, "--slots", "23")  # 15,300 MiB: the first row
    assert code == 0
    # Left to itself, fit takes the pins off the card before it counts slots.
    code, out, _ = fit(*words, "--json")
    found = json.loads(out)
    assert (code, found["pin"]["fits"]) == (0, True)
    assert found["taken"]["pinned host memory, which Windows charges to the card"] == 8 * GIB


def test_copies_are_pageable_where_nothing_can_be_pinned():
    linux, windows = (plan(wanted(12, platform=p), MACHINE) for p in ("linux", "windows"))
    assert linux.machine["host.pin_limit"] == 0  # no limit known
    assert windows.machine["host.pin_limit"] == 1  # not one expert
    assert any("none of the experts can lie there" in limit for limit in windows.limits)
    some = plan(wanted(12, platform="windows", pin=GIB), MACHINE)
    assert (some.machine["host.pin_limit"], some.pin.fits) == (GIB, True)
    assert any("1.00 GiB of 54.00 GiB of the experts" in limit for limit in some.limits)
    # The card is the smaller of the two: what is left of 24 GiB cannot be pinned on a card of 12.
    assert (windows.pin.most or 0) < GIB


def test_host_memory_that_is_too_small(fit):
    code, out, _ = fit("fit", "mixtral-8x7b", "--ram", "64GiB", "--policy", "static", "--tokens", "1")
    assert code == 1
    assert "host memory: 86.00 GiB are needed" in out  # 45.1 B expert parameters in bf16, and the process


def test_expected_unions_o20():
    found = unions(wanted(12), (1, 2, 4, 8))
    assert list(found.values()) == pytest.approx([8, 15.5, 29.123, 51.62], abs=0.001)


def test_the_measured_union_is_that_of_the_trace_o20():
    """{0, 1} and {1, 2} are three loads, not four."""
    steps = [step([[[0, 1]]]), step([[[0, 1]], [[1, 2]]], drafted=1)]
    assert Sample(trace(steps, 4), "", None).unions == {1: 2.0, 2: 3.0}


def test_llama_flags_by_hand():
    # 24 GiB less 1.75, 0.25, 0.87 of dense weights, 0.375 of keys and values leave 20.75 GiB; a layer's experts in
    # q4 take 128 x 4,718,592 x 4.862 / 8 bytes = 350 MiB, so all 48 (16.4 GiB) fit; with 12 GiB 8.75 hold 25.
    assert " --n-cpu-moe 0 -c 4096" in llama_flags(plan(wanted(24, "q4", None), MACHINE))
    assert " --n-cpu-moe 23 -c 4096" in llama_flags(plan(wanted(12, "q4", None), MACHINE))
    flags = llama_flags(plan(wanted(12, "q4", kv="q8_0"), MACHINE), 4)
    assert flags.endswith("-fa on -ctk q8_0 -ctv q8_0 -md Qwen3-0.6B.gguf -ngld 99 --draft-max 4")


def test_dense_layers_count_for_llama():
    size = find_size("deepseek-v2-lite", "MODEL")
    p = plan(Wanted(size, format_for("q4", size), 4 * GIB, 1024), MACHINE)
    on_card = p.whole_layers
    assert 0 < on_card < 26
    assert f"--n-cpu-moe {27 - on_card} " in llama_flags(p)


@pytest.mark.parametrize("draft", [None, "Qwen3-0.6B"])
def test_one_estimator_o27(fit, tmp_path, draft):
    """`run` on the steps that `fit` times gives the slots and the speed of `fit`, policy by policy and mode by mode."""
    asked = ("--policy", "ar-lru", "--policy", "static")
    more = ("--draft", draft) if draft else ()
    code, out, _ = fit("fit", "Qwen3-30B-A3B", "--vram", "12GiB", "--tokens", "6", "--json", *asked, *more)
    found = json.loads(out)
    assert code == 0
    sample = synthetic_sample(plan(wanted(12, draft=draft), MACHINE), 6, 0, Drafting())
    with TraceWriter(tmp_path / "t.spac", sample.trace.header) as writer:
        for one in sample.trace.steps():
            writer.append(one)
    assert len(found["speeds"]) == (4 if draft else 2)
    for s in found["speeds"]:
        words = ("--policy", s["policy"], "--mode", s["mode"], "--no-optimum", "--no-plots", "--json")
        code, out, _ = fit("run", "t.spac", "--vram", "12GiB", *words)
        (run,) = (r for r in json.loads(out)["runs"] if r["policy"] == s["policy"] and r["mode"] == s["mode"])
        assert run["slots"] / 48 == s["slots_per_layer"]
        assert run["tokens_per_s"] == pytest.approx(s["run"], rel=1e-3)
        assert s["low"] <= s["middle"] <= s["high"]


def test_the_middle_of_a_drafted_run_has_the_assumed_acceptance(fit):
    """A sample's verify steps accept by chance; `run` shows that, `middle` what was assumed."""
    words = ("fit", "Qwen3-30B-A3B", "--vram", "12GiB", "--draft", "Qwen3-0.6B", "--policy", "static", "--tokens", "6")
    none, all_ = (json.loads(fit(*words, "--acceptance", a, "--json")[1])["speeds"][1] for a in ("0", "1"))
    assert none["middle"] == pytest.approx(none["run"])  # one token a step, whatever the chances
    assert all_["middle"] == pytest.approx(all_["run"])
    assert all_["middle"] > none["middle"]


def test_a_card_nobody_measured_gets_a_range_o29(fit):
    words = ("fit", "gpt-oss-20b", "--vram", "12GiB", "--policy", "static", "--tokens", "4")
    card = ("--machine", "RTX 4070 Ti", "--gpu-bandwidth", "504GB/s", "--link", "gen4 x16")
    code, out, err = fit(*words, *card, "--json")
    found = json.loads(out)
    assert code == 0
    assert "uncalibrated card; --ram-bandwidth would narrow the range" in err
    assert found["calibration"] == "uncalibrated"
    (speed,) = found["speeds"]
    assert (speed["middle"], speed["run"]) == (None, None)
    assert 0 < speed["low"] < speed["high"]
    basis = {row["entry"]: row for row in found["basis"]}
    assert {"gpu.bandwidth", "link.bandwidth", "link.copy_fixed", "cpu.bandwidth", "gpu.launch"} <= set(basis)
    assert all(row["source"] and row["basis"] in ("assumed", "spec") for row in basis.values())
    assert "spac-exec calibrate" in found["measure_with"]
    code, out, _ = fit(*words, *card)
    assert "uncalibrated" in out
    assert "spac-exec calibrate" in out
    assert "expected" not in out.split("tokens/s while decoding")[1]
    code, _, err = fit(*words[:2], "--machine", "RTX 4070 Ti")
    assert code == 2
    assert "--vram" in err


def test_every_known_model_fits_somewhere():
    for name in ("qwen3-235b-a22b", "qwen3-next-80b-a3b", "gpt-oss-120b", "glm-4.5-air", "olmoe"):
        size = find_size(name, "MODEL")
        p = plan(Wanted(size, format_for("q4", size), 24 * GIB, 8192), MACHINE)
        held = sum(p.fit.taken.values()) + (p.slots + p.staging) * p.wanted.shape.expert_bytes
        assert p.slots > 0
        assert held <= 24 * GIB
        assert synthetic_sample(p, 3, 0, Drafting()).trace.header.target == p.wanted.shape


def test_routing_of_another_shape_is_said_and_fits_it():
    config = {"hidden_size": 512, "num_hidden_layers": 7, "num_attention_heads": 4, "intermediate_size": 64,
              "num_experts": 12, "num_experts_per_tok": 3, "vocab_size": 100}  # fmt: skip
    size = count(config, "mine", "config.json")
    p = plan(Wanted(size, size.published, 24 * GIB, 8192), MACHINE)
    sample = synthetic_sample(p, 5, 0, Drafting())
    steps = list(sample.trace.steps())
    assert "the nearest that are known" in sample.words
    assert [len(s) for s in steps[1:]] == [1] * 5
    assert steps[1].experts.shape == (1, 7, 3)
    assert max(int(s.experts.max()) for s in steps) < 12
    assert steps[-1].positions[-1] == 8191  # the last token of the context


def test_a_trace_of_another_model_is_refused(tmp_path):
    write(speculated(4), tmp_path / "t.spac")
    p = plan(wanted(12), MACHINE)
    with pytest.raises(InputError, match=r"--trace t\.spac: routing of .*48 layers of 128 experts, top-8"):
        traced_sample(open_trace(str(tmp_path / "t.spac")), "t.spac", p, 4, Drafting(), 0)


def test_a_bundled_trace_can_be_timed_with(fit):
    code, out, _ = fit("fit", "gpt-oss-20b", "--machine", "rtx4060-laptop", "--trace", "gpt-oss-20b", "--tokens", "6",
                       "--policy", "static", "--json")  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert found["sample"] == "imported trace gpt-oss-20b, first 6 steps"
    assert list(found["measured_union"]) == ["1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "known: "),
        (["Qwen3-0.6B"], "no routed experts"),
        (["olmoe", "--vram", "12"], "--vram 12GiB"),
        (["olmoe", "--quant", "q99"], "--quant q99"),
        (["olmoe", "--machine", "missing.toml"], "missing.toml"),
    ],
)
def test_bad_input_is_one_line(fit, words, said):
    code, _, err = fit("fit", *words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_one_machine_is_shown_with_its_sources(fit):
    code, out, _ = fit("machines", "rtx3090-pcie4-ddr4", "--json")
    found = json.loads(out)
    rows = {row["entry"]: row for row in found["entries"]}
    assert code == 0
    assert rows["link.bandwidth"] == {
        "entry": "link.bandwidth",
        "value": 23.8e9,
        "unit": "bytes/s",
        "basis": "measured",
        "source": "FreeToken#281",
    }
    assert 64 < found["prefill"]["crossing_tokens"] <= 2048
    out = fit("machines", "rtx3090-pcie4-ddr4")[1]
    assert "23.8 GB/s" in out
    assert f"below {found['prefill']['crossing_tokens']} prompt tokens" in out
