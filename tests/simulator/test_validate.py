"""Validation against published numbers: the rows, the routing drawn for them, the fits, the page."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Demand, Key, Where
from moe_spac.policies.load import load_policy
from moe_spac.simulator import validate_cases
from moe_spac.simulator.cli import app
from moe_spac.simulator.engine import setup_for
from moe_spac.simulator.machine import Quantity, load_machine, rates_for
from moe_spac.simulator.replay import count
from moe_spac.simulator.validate import Report, Result, _solve, machine_for, validate
from moe_spac.simulator.validate_cases import Study, fingerprint, shape_of, studies
from moe_spac.simulator.validate_policies import HalfPinned, MissShare, Split, placed
from moe_spac.simulator.validate_replay import predict, shared
from moe_spac.simulator.validate_report import by_study, document, misses
from moe_spac.simulator.validate_routing import Router, decoded, even, synthetic, trace_of
from moe_spac.simulator.validate_routing import given as routing_of
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import Kind

PAGE = Path(__file__).parents[2] / "docs" / "validation.md"


@pytest.fixture(scope="module")
def all_studies() -> dict[str, Study]:
    return {s.name: s for s in studies()}


@pytest.fixture(scope="module")
def small(all_studies: dict[str, Study]) -> Report:
    """Two studies that take a fraction of a second."""
    return validate([all_studies["homelab-quadro-rtx5000"], all_studies["kt-minimax"]])


def part(study: Study, *ids: str) -> Study:
    """A study with some of its rows."""
    rows = tuple(r for r in study.rows if r.id in ids)
    diagonals = tuple(replace(d, rows=tuple(i for i in d.rows if i in ids)) for d in study.diagonals)
    orders = tuple(o for o in study.orders if {o.first, o.second} <= set(ids))
    return replace(study, rows=rows, diagonals=diagonals, orders=orders)


def test_every_row_says_where_it_is_from(all_studies: dict[str, Study]) -> None:
    rows = [row for study in all_studies.values() for row in study.rows]
    assert len({row.id for row in rows}) == len(rows) > 100
    for row in rows:
        assert row.source, row.id
        assert row.setup, row.id
        assert row.measured > 0, row.id
        assert row.routing in ("any", "given", "even", "synthetic"), row.id
        assert (row.hit > 0) == (row.routing == "given") or row.id == "imp-1365-staging", row.id
    for study in all_studies.values():
        assert {f.row for f in study.fits} <= {r.id for r in study.rows}
        assert len(study.fits) <= 2
        assert len(study.fits) < len(study.rows)
        for q in study.machine.quantities.values():
            assert q.source


@pytest.mark.parametrize(
    ("study", "row", "measured"),
    [  # read off the sources once more
        ("kt-4x4090-qwen3-next", "KT-random-70", 74.40),
        ("kt-4x4090-qwen3-next", "KT-frequency-80", 100.67),
        ("kt-4x4090-qwen3-next", "KT-dynamic-10", 70.22),
        ("imp-rtx5090", "B1-24", 10.51),
        ("imp-rtx5090", "B1-244", 51.86),
        ("imp-qwen3.8-flash-next", "B3-pinned-512", 85.3),
        ("lucebox-3090-strix-halo", "lucebox-8274", 48.2),
        ("freetoken-trpro-4090", "B5-hybrid", 12.753),
    ],
)
def test_rows_hold_the_published_numbers(all_studies: dict[str, Study], study: str, row: str, measured: float) -> None:
    assert all_studies[study].row(row).measured == measured


def test_sizes_of_a_row(all_studies: dict[str, Study]) -> None:
    """Qwen3-30B-A3B in Q4_K_M: 4.862 bits, 4,718,592 weights an expert; with 40 of 48 layers on the CPU 8 are left."""
    row = all_studies["homelab-quadro-rtx5000"].row("R9")
    shape = shape_of(row)
    assert shape.expert_bytes == round(4_718_592 * 4.862 / 8)
    assert (shape.experts, shape.top_k, len(shape.moe_layers)) == (128, 8, 48)
    assert row.slots == 8 * 128


def test_a_placement_by_hand(all_studies: dict[str, Study]) -> None:
    """One token of R11 from the profile's numbers: what the engine replays is this sum."""
    study = all_studies["homelab-quadro-rtx5000"]
    row, machine = study.row("R11"), study.machine
    shape, costs = shape_of(row), rates_for(machine, shape_of(row)).costs
    read = 1e9 / machine["gpu.bandwidth"]
    launches = 48 * machine["gpu.kernels_per_layer"] * machine["gpu.launch"]
    dense = (
        (shape.dense_bytes - shape.embedding_bytes) * read + launches + 48 * 516 * shape.kv_bytes_per_token / 48 * read
    )
    on_gpu = 32 * 8 * (machine["gpu.expert_fixed"] + shape.expert_bytes * read)
    each = machine["cpu.expert_fixed"] + shape.expert_bytes * 1e9 / machine["cpu.bandwidth"]
    on_cpu = 16 * (machine["cpu.first_expert"] + 8 * each + machine["cpu.hybrid_layer"])
    assert costs.hybrid_ns == machine["cpu.hybrid_layer"]
    wanted = 1e9 / (machine["gpu.step_fixed"] + dense + on_gpu + on_cpu)
    assert predict(row, machine) == pytest.approx(wanted, rel=1e-3)


def test_the_summary_is_what_the_rows_say(small: Report) -> None:
    told = document(small)
    errors = [abs(r["predicted"] / r["measured"] - 1) for r in told["rows"] if not r["fitted"]]
    assert [r["row"] for r in told["rows"] if r["fitted"]] == ["R9", "B13-9355-2k"]
    whole = told["summary"][0]
    assert whole["rows"] == len(errors) == 6
    assert whole["median_absolute_error"] == pytest.approx(float(np.median(errors)))
    assert abs(whole["worst_error"]) == pytest.approx(max(errors))
    assert whole["within_15_percent"] == sum(e <= 0.15 for e in errors)
    assert misses(small) == {}
    assert by_study(small) == pytest.approx(median([median(errors[:4]), median(errors[4:])]))


def test_hit_rates_are_also_told_by_misses(small: Report) -> None:
    """90 for 80 % and 55 for 50 %: 10 and 5 points; misses of 10 for 20 and 45 for 50 are 50 and 10 % off."""
    rows = [replace(small.results[0].row, what="hit", measured=m) for m in (80.0, 50.0)]
    report = Report(tuple(Result("s", row, p, False) for row, p in zip(rows, (90.0, 55.0), strict=True)), (), ())
    assert misses(report)["median_points"] == pytest.approx(7.5)
    assert misses(report)["median_absolute_error_of_misses"] == pytest.approx(0.3)


def test_a_row_far_off_fails_and_counts(small: Report) -> None:
    """Doubling every measured number halves the predictions: all fail but those that were fitted."""
    off = Report(tuple(replace(r, row=replace(r.row, measured=2 * r.row.measured)) for r in small.results), (), ())
    assert len(off.failures) == off.summary(off.counted)["beyond_30_percent"] == 6
    assert Result("s", small.results[0].row, 1e6, True).fails is False


def test_fits_reach_their_row_and_are_labelled(all_studies: dict[str, Study], small: Report) -> None:
    for fitted in small.fits:
        assert fitted.reached
    fitted = next(r for r in small.results if r.row.id == "R9")
    assert fitted.predicted == pytest.approx(37.0, rel=2e-3)
    machine = machine_for(all_studies["kt-minimax"], fitted.row, {"cpu.bandwidth": 2.0})
    assert machine["cpu.bandwidth"] == 800e9
    assert "cpu.bandwidth" in machine.assumed


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 20), st.floats(0.1, 10), st.floats(0, 10))
def test_the_solver_finds_any_scale(answer: float, slope: float, fixed: float) -> None:
    u, reached = _solve(lambda u: fixed + slope * u, fixed + slope * answer)
    assert reached
    assert slope * abs(u - answer) <= 2e-3 * (fixed + slope * answer)


def test_the_solver_says_when_nothing_fits() -> None:
    assert _solve(lambda u: 5 + u, 1)[1] is False
    assert _solve(lambda u: 5.0, 1)[1] is False


def test_offload_beats_hybrid_as_it_was_measured(all_studies: dict[str, Study]) -> None:
    """B5: 14.9 tok/s at 69 % miss against 12.75 at 43 %."""
    report = validate([all_studies["freetoken-trpro-4090"]])
    assert all(check.holds for check in report.checks)
    hybrid = next(r for r in report.results if r.row.id == "B5-hybrid")
    assert abs(hybrid.error) < 0.3


def test_without_a_crossing_cost_the_order_turns(all_studies: dict[str, Study]) -> None:
    """The check can fail: with the preset's 60 us a hybrid layer wins."""
    study = all_studies["freetoken-trpro-4090"]
    rows = tuple(replace(r, tokens=4) for r in study.rows)
    machine = replace(study.machine, quantities=dict(study.machine.quantities))
    offload, hybrid = (predict(r, machine) for r in rows)
    assert hybrid > offload


def test_spread_placements_fall_below_the_diagonal(all_studies: dict[str, Study]) -> None:
    """KTransformers: 70 % of experts at random save less than 70 % of the time; whole layers save about their share."""
    ids = ("KT-random-0", "KT-random-70", "KT-random-100", "KT-uniform-70", "KT-front-70")
    report = validate([part(all_studies["kt-4x4090-qwen3-next"], *ids)])
    assert [c.holds for c in report.checks] == [True, True]
    times = {r.row.id: 1 / r.predicted for r in report.results}
    way = {i: (times["KT-random-0"] - times[i]) / (times["KT-random-0"] - times["KT-random-100"]) for i in ids}
    assert way["KT-random-70"] < 0.62
    assert way["KT-uniform-70"] < 0.62
    assert way["KT-front-70"] == pytest.approx(0.7, abs=0.03)
    assert all(abs(r.error) < 0.3 for r in report.results)


def test_shared_memory_is_max_min_fair() -> None:
    """78 GB/s for 63.8 and 24.9: the smaller wish is met, the rest is the other's."""
    machine = load_machine("rtx4090-pcie4")
    given = {"host.bandwidth": 78e9, "cpu.bandwidth": 63.8e9, "link.bandwidth": 24.9e9}
    quantities = machine.quantities | {k: Quantity(v, "assumed", "test") for k, v in given.items()}
    both = shared(replace(machine, quantities=quantities))
    assert both["link"] == pytest.approx(24.9, rel=0.01)
    assert both["cpu"] == pytest.approx(78 - 24.9, rel=0.01)
    assert both["sum"] == pytest.approx(78, rel=0.01)


@pytest.mark.parametrize(
    ("policy", "hit", "each"), [("ar-lru", 0.366, 8), ("ar-lru", 0.894, 48.667), ("split", 0.31, 21)]
)
def test_given_hit_rates_come_out(all_studies: dict[str, Study], policy: str, hit: float, each: float) -> None:
    shape = shape_of(all_studies["imp-rtx5090"].row("B1-24"))
    shape = replace(shape, layers=8, moe_layers=tuple(range(8)))
    rates, slots = rates_for(load_machine("rtx4090-pcie4"), shape), round(8 * each)
    make = (lambda: Split(0.25)) if policy == "split" else (lambda: load_policy(policy))
    steps = list(routing_of(shape, rates, make(), slots, hit, 40, 100).steps())
    assert [s.kind for s in steps[-40:]] == [Kind.DECODE] * 40
    assert all(len(set(layer.tolist())) == 8 for s in steps[-40:] for layer in s.experts[0])
    one = make()
    counted = count(steps, one, setup_for(shape, rates, one, slots, 0)).decode
    assert counted.needed == 40 * 8 * 8
    assert counted.hits / counted.needed == pytest.approx(hit, abs=0.015)


def test_even_and_synthetic_routing() -> None:
    router = Router(4, 64, 6)
    ids = even(router, 300)
    assert ids.shape == (300, 4, 6)
    assert all(len(set(row)) == 6 for row in ids[:, 0].tolist())
    assert np.bincount(ids.reshape(-1), minlength=64) == pytest.approx(300 * 4 * 6 / 64, rel=0.35)
    local = synthetic(router, 60, sequences=2)
    assert local.shape == (60, 4, 6)
    again = np.mean([np.isin(local[i + 1, 2], local[i, 2]).mean() for i in range(29)])
    assert again > 2 * 6 / 64  # a token repeats far more of the last one's experts than by chance
    assert np.array_equal(local, synthetic.__wrapped__(router, 60, sequences=2))


def test_placements() -> None:
    counts = np.arange(12).reshape(3, 4)[:, ::-1]
    assert placed("frequency", 5, counts) == [Key(1, 0), *(Key(2, e) for e in range(4))]
    assert placed("prompt", 6, counts) == [Key(layer, e) for layer in range(3) for e in (0, 1)]


class Nothing:
    def resident(self, key: Key) -> bool:
        return key.expert == 0


def test_a_share_of_the_misses_is_fetched() -> None:
    share = MissShare(0.3)
    ids = np.array([[0, 1, 2, 3, 4]])
    demand = Demand(0, (0, 1, 2, 3, 4), (1,) * 5, ids)
    answers = [dict(share.dispatch(demand, Nothing())) for _ in range(10)]  # type: ignore[arg-type]
    assert all(a[0] is Where.GPU for a in answers)
    fetched = [sum(w is Where.FETCH for w in a.values()) for a in answers]
    assert fetched == [1, 1, 1, 1, 2] * 2  # 1.2 a layer, as whole experts
    assert sum(w is Where.CPU for a in answers for w in a.values()) == 28


def test_pinned_halves_stay(all_studies: dict[str, Study]) -> None:
    shape = replace(shape_of(all_studies["imp-rtx5090"].row("B1-24")), layers=2, moe_layers=(0, 1), experts=16, top_k=3)
    rates = rates_for(load_machine("rtx4090-pcie4"), shape)
    ids = even(Router(2, 16, 3), 50)
    counts = np.zeros((2, 16))
    counts[:, [3, 7]] = 5
    policy = HalfPinned(counts)
    driver: Driver = count(trace_of(shape, decoded(ids, 0)).steps(), policy, setup_for(shape, rates, policy, 10, 0))
    for layer in range(2):
        assert {3, 7} <= set(driver.cache_view.residents(layer))
        assert len(driver.cache_view.residents(layer)) == 5
    assert driver.decode.evictions > 50


def test_the_page_is_in_step_with_files_and_code(small: Report) -> None:
    """The page's inputs are today's, and what it says of two studies is what they give now."""
    text = PAGE.read_text(encoding="utf-8")
    assert fingerprint() in text.splitlines()[0], "run: spac-sim validate -o docs/validation.md"
    for r in small.results:
        line = re.search(rf"^\| {re.escape(r.row.id)} \|.*$", text, re.M)
        assert line, r.row.id
        assert f"| {r.predicted:.4g} |" in line[0], "run: spac-sim validate -o docs/validation.md"


def test_failures_on_the_page_are_explained(all_studies: dict[str, Study]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    failing = re.findall(r"^- \*\*(.+?)\*\* \((T[12])", text, re.M)
    rows = {r.id: r for s in all_studies.values() for r in s.rows}
    assert all(rows[i].why for i, _ in failing)
    assert text.count(" fails |") == len(failing)


def test_command(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["validate", "kt-minimax-8488c", "--json"])
    assert run.exit_code == 0
    told = json.loads(run.stdout)
    assert [r["row"] for r in told["rows"]] == ["B13-8488c-2k", "B13-8488c-8k", "B13-8488c-32k"]
    assert told["fits"][0]["entries"][0]["entry"] == "cpu.bandwidth"
    assert "median absolute error" in CliRunner().invoke(app, ["validate", "kt-minimax-8488c"]).stdout


@pytest.mark.parametrize("words", [["nothing-of-that-name"], ["kt-minimax", "-o", "x.md"]])
def test_command_refuses(words: list[str]) -> None:
    run = CliRunner().invoke(app, ["validate", *words])
    assert isinstance(run.exception, InputError)
    assert words[-1].removeprefix("-") in str(run.exception) or "STUDY" in str(run.exception)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('tier = "T2"', 'tier = "T9"'), "tier"),
        (("cpu_layers = 62", "cpu_layer = 62"), "unknown field cpu_layer"),
        (("400 GB/s", "400 pounds"), "cpu.bandwidth"),
        (("measured = [32.1, 31.4, 27.6]", "measured = [32.1, 31.4, 27.6"), "cannot be read"),
        (('id = ["B13-9355-2k", "B13-9355-8k", "B13-9355-32k"]', 'id = "x"'), "as many ids"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], said: str
) -> None:
    text = (validate_cases.FOLDER / "kt-minimax.toml").read_text()
    assert change[0] in text
    (tmp_path / "kt-minimax.toml").write_text(text.replace(*change))
    monkeypatch.setattr(validate_cases, "FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"validation/kt-minimax\.toml") as error:
        studies()
    assert said in str(error.value)
