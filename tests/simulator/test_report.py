import csv
import json

import pytest
from speculated import BROKEN, plain, speculated, write

from moe_spac.simulator.compare import AR, SD, Job, Source, cases_for, loads_for, run_cases
from moe_spac.simulator.definitions import METRICS
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.report import choice, lines, metrics_document, run_document, write_run
from moe_spac.simulator.tables import fitted, more_rows, table_rows
from moe_spac.traces.errors import InputError
from moe_spac.traces.reader import open_trace


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A job on a trace file, with outcomes of three policies, of which one fails, at two sizes in both modes."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "mine.py").write_text(BROKEN)
    source = Source(open_trace(write(speculated(), folder / "t.spac")))
    job = Job(source, load_machine("rtx4090-pcie4"), loads_for(source, [SD, AR]), bounded=True)
    policies = ["ar-lru", f"{folder / 'mine.py'}:Broken", "static"]
    return job, run_cases(job, cases_for(policies, [8, 12], [SD, AR]))


def test_the_table_has_a_row_for_every_size_and_policy_with_the_references_last(compared):
    _, outcomes = compared
    rows = table_rows(outcomes, layers=2)
    assert len(rows) == 10
    assert [r["slots"] for r in rows] == ["4"] * 5 + ["6"] * 5
    assert [r["policy"] for r in rows[3:5]] == [r["policy"] for r in rows[8:]] == ["min (ref)", "fluid bound (ref)"]
    assert len({tuple(r) for r in rows}) == 1


def test_numbers_of_a_row(compared):
    _, outcomes = compared
    row = table_rows(outcomes, layers=2)[0] | more_rows(outcomes, layers=2)[0]
    sd, ar = outcomes[0].metrics, outcomes[1].metrics
    assert str(row["SD tok/s"]) == f"{sd['tokens_per_s']:.1f}"
    assert str(row["AR tok/s"]) == f"{ar['tokens_per_s']:.1f}"
    assert str(row["SD/AR"]) == f"{sd['tokens_per_s'] / ar['tokens_per_s']:.2f}x"
    assert str(row["hit"]) == f"{sd['hit_rate_unique']:.3f}"
    assert str(row["hit by token"]) == f"{sd['hit_rate_assignment']:.3f}"
    assert str(row["MB/token"]) == f"{sd['h2d_bytes_per_token'] / 1e6:.2f}"
    assert (str(row["closed"]), str(row["in time"])) == ("0%", "0%")  # it is the base itself
    wait = outcomes[0].steps["gpu_wait_copy_ns"][1:].sum() / outcomes[0].steps["wall_ns"][1:].sum()
    assert str(row["copy wait"]) == f"{100 * wait:.0f}%"


def test_the_bound_is_a_row_that_no_other_row_exceeds(compared):
    for size in (8, 12):
        rows = table_rows([o for o in compared[1] if o.size == size], layers=2)
        speeds = [r["SD tok/s"].value for r in rows if r["SD tok/s"]]
        assert (
            max(speeds)
            == speeds[-1]
            == compared[1][0 if size == 8 else 8].bound.tokens_per_s(
                compared[1][0 if size == 8 else 8].bound.layered_ns
            )
        )


def test_the_table_fits_the_terminal(compared):
    rows = table_rows(compared[1], layers=2)
    assert printed_width(fitted(rows, 100)) <= 100
    assert printed_width(fitted(rows, 80)) <= 80
    assert {"policy", "hit", "closed", "in time", "status"} <= set(fitted(rows, 80)[0])
    ok = [r for r in rows if r["status"] == "ok"]
    assert "status" not in fitted(ok, 80)[0]
    assert fitted(ok, 1000) == ok


def printed_width(rows) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*("-" if v is None else str(v) for v in row.values()))
    console = Console(width=400)
    with console.capture() as got:
        console.print(table)
    return max(len(line.rstrip()) for line in got.get().splitlines())


def test_a_failed_policy_has_no_numbers(compared):
    row = table_rows(compared[1], layers=2)[1]
    assert row["status"] == "failed"
    assert all(value is None for name, value in row.items() if name not in ("policy", "slots", "status"))


def test_an_inactive_cache_never_makes_a_normal_row_o32():
    source = Source(plain())
    job = Job(source, load_machine("rtx4090-pcie4"), loads_for(source, [AR]))
    outcomes = run_cases(job, cases_for(["ar-lru"], [0], [AR], optimum=False))
    row = table_rows(outcomes, layers=2)[0]
    assert row == {"policy": "ar-lru", "slots": "0", "status": "CACHE_INACTIVE"}
    said = "\n".join(lines(job, "t", outcomes, 2))
    assert "CACHE_INACTIVE" in said
    assert "no winner" in said


def test_lines_say_where_the_numbers_are_from_and_what_they_mean(compared):
    job, outcomes = compared
    said = lines(job, "t", outcomes, 2)
    bases = [q.basis for q in job.machine.quantities.values()]
    known = f"{bases.count('assumed')} of its {len(bases)} entries assumed"
    assert said[0].startswith(f"t: recorded trace of tiny; simulated machine rtx4090-pcie4 ({known}")
    assert any("Broken failed: policy Broken, step" in line for line in said)
    assert sum("wins with" in line for line in said) == 2
    assert sum("speculative decoding" in line and "here: " in line for line in said) == 2
    assert sum("bottleneck: " in line for line in said) == 2


def test_a_trace_without_drafts_gets_no_verdict_but_a_way_to_one():
    source = Source(plain())
    job = Job(source, load_machine("rtx4090-pcie4"), loads_for(source, [AR]))
    said = "\n".join(lines(job, "t", run_cases(job, cases_for(["static"], [8], [AR])), 2))
    assert "no verdict on speculation" in said
    assert "--window" in said


def test_assumed_acceptance_is_said():
    source = Source(plain(), window=3, acceptance=0.5)
    job = Job(source, load_machine("rtx4090-pcie4"), loads_for(source, [SD, AR]))
    said = "\n".join(lines(job, "t", run_cases(job, cases_for(["static"], [8], [SD, AR])), 2))
    assert "assumed speculation: draft length 3" in said


def test_the_folder_holds_inputs_numbers_and_steps(compared, tmp_path):
    job, outcomes = compared
    written = write_run(tmp_path / "a" / "b", job, "t", outcomes, "spac-sim run t")
    names = ["layers.csv", "metrics.json", "run.json", "steps.csv"]
    assert [p.name for p in written] == sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == names
    run = json.loads((tmp_path / "a/b/run.json").read_text())
    assert run["trace"]["header"]["target"]["name"] == "tiny"
    assert len(run["trace"]["sha256"]) == 64
    assert run["machine"]["quantities"]["link.bandwidth"]["value"] == 25e9
    assert len(run["runs"]) == len(outcomes) == 16
    assert {"python", "moe-spac", "simpy"} <= set(run["versions"])


def test_steps_csv_adds_up_to_the_metrics(compared, tmp_path):
    job, outcomes = compared
    write_run(tmp_path, job, "t", outcomes, "")
    with (tmp_path / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    mine = [r for r in rows if (r["policy"], r["slots"], r["mode"]) == ("ar-lru", "8", "sd")]
    assert len(mine) == 13
    decode = [r for r in mine if r["kind"] != "prefill"]
    assert sum(int(r["wall_ns"]) for r in decode) == outcomes[0].metrics["decode_wall_ns"]
    assert sum(int(r["emitted"]) for r in decode) == outcomes[0].metrics["tokens"]
    for r in rows:
        assert sum(int(v) for k, v in r.items() if k.startswith("gpu_")) == int(r["wall_ns"])


def test_layers_csv_adds_up_to_the_metrics(compared, tmp_path):
    job, outcomes = compared
    write_run(tmp_path, job, "t", outcomes, "")
    with (tmp_path / "layers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * sum(not o.failed for o in outcomes)
    for o in (o for o in outcomes if not o.failed):
        mine = [r for r in rows if (r["policy"], r["slots"], r["mode"]) == (o.policy, str(o.slots), o.mode)]
        assert sum(int(r["needed"]) for r in mine) == o.metrics["needed"]
        assert sum(int(r["hits"]) for r in mine) / o.metrics["needed"] == pytest.approx(o.metrics["hit_rate_unique"])
        assert sum(int(r["wait_copy_ns"]) for r in mine) == o.metrics["gpu_wait_copy_ns"]
        assert sum(int(r["wait_cpu_ns"]) for r in mine) == o.metrics["gpu_wait_cpu_ns"]
        ratios = [float(r["union_ratio"]) for r in mine]
        assert (min(ratios), max(ratios)) == (o.metrics["union_ratio_layer_min"], o.metrics["union_ratio_layer_max"])


def test_the_same_comparison_writes_the_same_bytes_o30(compared, tmp_path):
    job, _ = compared
    for name in ("one", "two"):
        outcomes = run_cases(job, cases_for(["ar-lru", "static"], [8], [SD, AR]))
        write_run(tmp_path / name, job, "t", outcomes, "")
    for file in ("layers.csv", "metrics.json", "run.json", "steps.csv"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_an_interrupt_while_writing_leaves_nothing(compared, tmp_path):
    job, outcomes = compared

    def interrupted(folder):
        (folder / "half.png").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_run(tmp_path / "out", job, "t", outcomes, "", interrupted)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_is_bad_input(compared, tmp_path):
    job, outcomes = compared
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out"):
        write_run(tmp_path / "file", job, "t", outcomes, "")


def test_documents_are_plain_json(compared):
    job, outcomes = compared
    document = json.loads(json.dumps(metrics_document(outcomes), allow_nan=False))
    assert {"runs", "bounds", "verdicts", "winners"} == set(document)
    ok = next(r for r in document["runs"] if r["status"] == "ok")
    about = {"policy", "size", "slots", "mode", "draft_length", "cut", "status", "reference", "lossless"}
    assert set(ok) - about <= set(METRICS)
    assert {(b["size"], b["mode"]) for b in document["bounds"]} == {(8, "sd"), (8, "ar"), (12, "sd"), (12, "ar")}
    failed = [r for r in document["runs"] if r["status"] != "ok"]
    assert len(failed) == 4
    assert all("tokens_per_s" not in r for r in failed)
    assert run_document(job, "t", outcomes, "c")["command"] == "c"


def test_the_policy_to_save_is_the_fastest_of_all_sizes(compared):
    best = choice(compared[1])
    assert best
    assert best.speed == max(o.speed for o in compared[1] if not o.reference)
