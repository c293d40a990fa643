import json
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import matplotlib
import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from result_folders import call, make_folders

from moe_spac.simulator.plot_style import COLUMN, NothingToShow, apart, panel_sizes
from moe_spac.simulator.plots import ACROSS, FIGURES, NAMES, draw_folder
from moe_spac.simulator.plots_drafts import against_acceptance, by_draft_length
from moe_spac.simulator.plots_maps import by_machine, memory_against_speed, pareto, residency
from moe_spac.simulator.plots_speed import PARTS, against_slots, by_policy, time_of_a_token
from moe_spac.simulator.results import read_slices, speed
from moe_spac.simulator.verdict import speedup
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import Provenance


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        where = tmp_path_factory.mktemp("results")
        patch.chdir(where)
        make_folders(where)
        yield where


@pytest.fixture(scope="module")
def run(folder):
    (part,) = read_slices(folder / "run")
    return part


@pytest.fixture(scope="module")
def sweep(folder):
    return read_slices(folder / "sweep")


def texts(figure) -> str:
    """All that can be read in a figure, line breaks apart."""
    return " ".join(t.get_text().replace("\n", " ") for t in figure.findobj(Text))


def xs(line) -> list[float]:
    return np.asarray(line.get_xdata(), float).tolist()


def ys(line) -> list[float]:
    return np.asarray(line.get_ydata(), float).tolist()


def line_of(axes, name) -> Line2D:
    return next(line for line in axes.lines if line.get_label() == name)


def bars(axes):
    return [p for p in axes.patches if isinstance(p, Rectangle)]


def test_every_figure_of_a_run_as_png_and_svg_without_a_display_o46(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    drawn = {d.figure: d for d in draw_folder(folder / "run", tmp_path)}
    assert list(drawn) == list(NAMES)
    assert [d.figure for d in drawn.values() if not d.files] == ["machines"]
    assert "only one machine" in drawn["machines"].why_not
    for name in set(NAMES) - {"machines"}:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        root = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        assert root.tag.endswith("svg")
        assert float(root.attrib["width"].removesuffix("pt")) == pytest.approx(72 * COLUMN, abs=0.1)


@pytest.mark.parametrize("name", [*FIGURES, "pareto"])
def test_a_figure_names_its_data_and_what_failed(name, run):
    """A policy that failed in every run stands in the pictures of policies, and breaks none."""
    figure = FIGURES[name](run) if name in FIGURES else ACROSS[name]([run])
    seen = texts(figure)
    assert "t: recorded trace of tiny; simulated rtx4090-pcie4; moe-spac 0.1.0" in seen
    if name in ("speed", "slots", "time"):
        assert "failed" in seen
        assert "min (ref)" in seen
    unit = {"speed": "tokens/s", "slots": "tokens/s", "time": "ms per output token", "acceptance": "speed-up over",
            "lengths": "tokens/s", "residency": "share of the time", "pareto": "GiB"}  # fmt: skip
    assert unit[name] in seen
    smallest = min(float(t.get_fontsize()) for t in figure.findobj(Text) if t.get_text().strip())
    assert smallest >= 5.5


def test_synthetic_data_say_so_in_the_title(run):
    made_up = replace(run, header=replace(run.header, provenance=Provenance.SYNTHETIC))
    assert "SYNTHETIC: Decode speed" in texts(by_policy(made_up))
    assert "SYNTHETIC: Against" in texts(against_slots(made_up))
    assert "SYNTHETIC" not in texts(by_policy(run)) + texts(against_slots(run))


def test_bars_are_as_long_as_the_numbers(run):
    widths = sorted(bar.get_width() for axes in by_policy(run).axes for bar in bars(axes))
    assert widths == pytest.approx(sorted(speed(r) for r in run.main if speed(r)))
    figure = time_of_a_token(run)
    ends = {}
    for panel, axes in enumerate(figure.axes):
        for bar in bars(axes):
            row = panel, round(bar.get_y(), 2)
            ends[row] = max(ends.get(row, 0), bar.get_x() + bar.get_width())
    assert sorted(ends.values()) == pytest.approx(sorted(r["tpot_ms_mean"] for r in run.main if speed(r)))


def test_bounds_are_lines_that_no_bar_crosses(run):
    for axes, size in zip(by_policy(run).axes, run.sizes, strict=True):
        limits = {r["fluid_bound_tokens_per_s"] for r in run.at(size) if speed(r)}
        lines = [xs(line)[0] for line in axes.lines]
        assert sorted(lines) == pytest.approx(sorted(limits))
        assert max(bar.get_width() for bar in bars(axes)) <= max(lines)


def test_lines_against_slots_are_the_numbers(run):
    figure = against_slots(run)
    top, share, hits, moved = figure.axes[:4]
    lines = {str(line.get_label()): line for line in top.lines if len(xs(line))}
    assert set(lines) == {"ar-lru", "static", "min (ref)", "bound of any policy"}
    mine = [r for r in run.main if r["policy"] == "ar-lru" and r["mode"] == "sd"]
    assert xs(lines["ar-lru"]) == [3, 4, 6]
    assert ys(lines["ar-lru"]) == [r["tokens_per_s"] for r in mine]
    for name in ("ar-lru", "static"):  # of the faster of the two; a reference has no share
        best = [max(r["tokens_per_s"] for r in run.at(size) if r["mode"] == "sd" and not r["reference"] and speed(r))
                for size in run.sizes]  # fmt: skip
        assert lines[name].get_ydata() / np.array(best) * 100 == pytest.approx(ys(line_of(share, name)))
    assert ys(line_of(share, "min (ref)")) == []
    assert ys(hits.lines[0]) == [r["hit_rate_unique"] for r in mine]
    assert ys(moved.lines[0]) == pytest.approx([r["h2d_bytes_per_token"] / 1e9 for r in mine])
    figure.draw_without_rendering()  # the second axis follows the first when it is drawn
    ticks = top.child_axes[0].get_xlim()
    assert ticks == pytest.approx([x * 2 * 10**6 / 2**30 for x in top.get_xlim()])


def test_policies_two_per_cent_apart_are_apart_in_the_picture(run):
    """In the panel of shares; who is far behind does not press the others together: its line leaves the panel."""
    slow = [{**r, "tokens_per_s": r["tokens_per_s"] * k, "policy": f"p{k}"} for r in run.main for k in (0.98, 0.4)
            if r["policy"] == "ar-lru"]  # fmt: skip
    figure = against_slots(replace(run, rows=[*slow, *(r for r in run.main if r["policy"] == "ar-lru")]))
    low, high = figure.axes[1].get_ylim()
    assert 98 - 2 < low < 98
    assert 100 < high < 101
    assert ys(line_of(figure.axes[1], "p0.4")) == pytest.approx([40] * 3)
    assert "less than 75 % of the fastest is not shown" in texts(figure)


def test_panels_of_lines_are_filled(run):
    """Nearly all of the height of the panels of a figure, together."""
    for figure in (by_draft_length(run), memory_against_speed([run])):
        seen = [y for axes in figure.axes for line in axes.lines for y in ys(line)]
        for axes in figure.axes:
            low, high = axes.get_ylim()
            assert low < min(seen) < max(seen) < high
            assert max(seen) - min(seen) > 0.8 * (high - low)


def lightness(colour) -> float:
    """CIE L*, 0 to 100, of an sRGB colour: what is left of it in grey."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def in_grey(artist) -> tuple[object, ...]:
    """What a reader of a grey print goes by, lightness in steps that can be told apart side by side."""
    if isinstance(artist, Line2D):
        return artist.get_marker(), str(artist._dash_pattern)  # type: ignore[attr-defined]
    return artist.get_hatch(), artist.get_linestyle(), lightness(artist.get_facecolor()) // 15


@pytest.fixture(scope="module")
def twelve(run):
    """As many policies as a figure may have to carry."""
    names = [f"p{i}" for i in range(11)]
    rows = [{**r, "policy": n} for n in names for r in run.rows if r["policy"] == "ar-lru"]
    return replace(run, rows=[*rows, *(r for r in run.rows if r["policy"] != "static")])


@pytest.mark.parametrize("name", ["slots", "lengths", "acceptance", "speed", "time"])
def test_any_two_of_a_figure_are_told_apart_in_grey(name, twelve):
    """By marker, dashes, hatch or lightness, never by colour alone."""
    figure = FIGURES[name](twelve)
    lines = {str(line.get_label()): line for axes in figure.axes for line in axes.lines if len(xs(line))}
    series = {label: line for label, line in lines.items() if not label.startswith("_")}
    keys = series if name in ("slots", "lengths", "acceptance") else dict(enumerate(figure.legends[0].legend_handles))
    assert len(keys) >= 12 or name in ("speed", "time")
    assert len({in_grey(key) for key in keys.values()}) == len(keys)


def test_parts_of_a_bar_that_may_touch_are_told_apart_in_grey():
    """Of all parts, whichever a run has."""
    seen = {(hatch, lightness(colour) // 15) for _, colour, hatch in PARTS.values()}
    assert len(seen) == len(PARTS)
    plain = sorted(lightness(colour) for _, colour, hatch in PARTS.values() if not hatch)
    assert min(b - a for a, b in pairwise(plain)) > 20


def test_names_stand_beside_their_lines_and_apart(twelve):
    figure = against_acceptance(twelve)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    names = [t for t in axes.texts if t.get_text() in twelve.policies]
    assert len(names) == 12
    boxes = sorted((t.get_window_extent() for t in names), key=lambda box: box.y0)
    assert all(above.y0 >= below.y1 - 1 for below, above in pairwise(boxes))
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)


def test_the_acceptance_curve_goes_through_the_trace_and_breaks_even_where_the_verdict_says(run):
    """Against the speed-up formula, from the metrics and not from the verdict."""
    size = run.winner()["size"]
    (axes,) = against_acceptance(run).axes
    lines = {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    for policy in ("ar-lru", "static"):
        sd, ar = (next(r for r in run.at(size) if (r["policy"], r["mode"]) == (policy, m)) for m in ("sd", "ar"))
        wanted = [speedup(a, sd["drafted_per_verify"], sd["verify_ms_mean"], 0, ar["step_ms_mean"])
                  for a in xs(lines[policy])]  # fmt: skip
        assert ys(lines[policy]) == pytest.approx(wanted)
    marks = [line for line in axes.lines if line.get_label() == "_trace"]
    for mark, policy in zip(marks, lines, strict=True):
        at, gain = float(xs(mark)[0]), float(ys(mark)[0])
        assert gain == pytest.approx(np.interp(at, xs(lines[policy]), ys(lines[policy])), rel=1e-3)


def test_speed_by_draft_length(run):
    """Recorded 3, cut to 1 and 2, plain decoding 0; the best of each policy is ringed."""
    figure = by_draft_length(run)
    assert len(figure.axes) == 3
    for axes, size in zip(figure.axes, run.sizes, strict=True):
        lines = {str(line.get_label()): line for line in axes.lines if line.get_label() != "_best"}
        assert set(lines) == {"ar-lru", "static"}
        for name, line in lines.items():
            assert xs(line) == [0, 1, 2, 3]
            assert ys(line) == [speed(run.by_length(name, size)[n]) for n in range(4)]
        rings = sorted(ys(line)[0] for line in axes.lines if line.get_label() == "_best")
        assert rings == sorted(max(ys(line)) for line in lines.values())


def test_the_heat_map_is_the_record_sorted_by_need(run, folder):
    best = run.winner()
    figure = residency(run)
    table = pyarrow.parquet.read_table(folder / "run" / "residency.parquet").to_pandas()
    mine = table[(table["slots"] == best["slots"]) & (table["mode"] == best["mode"])]
    for axes in [a for a in figure.axes if a.images]:
        policy = axes.get_title(loc="left").split(",")[0].removesuffix(" (ref)")
        for layer, shown in enumerate(np.asarray(axes.images[0].get_array())):
            rows = mine[(mine["policy"] == policy) & (mine["layer"] == layer)]
            rows = rows.sort_values(["needed", "expert"], ascending=[False, True])
            assert shown.tolist() == pytest.approx(rows["resident"].tolist())
    assert not figure.findobj(QuadMesh) or figure.axes[-1] is not None


def test_policies_by_machines(sweep):
    figure = by_machine(sweep)
    axes = figure.axes[0]
    machines = [t.get_text() for t in axes.get_xticklabels()]
    policies = [t.get_text() for t in axes.get_yticklabels()]
    assert machines == ["rtx4090\npcie4", "rtx4060\nlaptop"]
    cells = {t.get_position(): t.get_text() for t in axes.texts}
    for y, policy in enumerate(policies):
        for x, part in enumerate(sweep):
            best = max(speed(r) for r in part.rows if r["policy"] == policy and r["size"] == part.sizes[1])
            assert cells[x, y] == (f"{best:.1f}" if best else "failed")
    assert policies[-1] == "mine.py:Broken"
    small = [t for t in axes.texts if t.get_text().endswith("%")]
    for text in small:  # how far behind the best of its machine
        x, y = round(text.get_position()[0]), int(text.get_position()[1])
        best = max(float(cells[x, row]) for row in range(len(policies) - 1))
        assert text.get_text() == f"{float(cells[x, y]) / best - 1:.0%}"
    assert len(small) == len(sweep)
    assert "is the fastest everywhere, by" in texts(figure)
    for part in sweep:
        assert part.machine.name in texts(figure)


def test_memory_against_speed(run, sweep):
    rows = [r for r in run.rows if speed(r) and not r["reference"]]
    front = pareto(rows)
    for row in rows:  # by the definition
        beaten = any(o["vram_bytes"] <= row["vram_bytes"] and speed(o) >= speed(row) and o is not row for o in rows)
        assert (row in front) or beaten
    for a, b in pairwise(front):
        assert a["vram_bytes"] < b["vram_bytes"]
        assert speed(a) < speed(b)
    (axes,) = memory_against_speed([run]).axes
    marks = [line for line in axes.lines if line.get_label() in ("ar-lru", "static")]
    ringed = {(x, y) for line in marks for x, y in zip(xs(line), ys(line), strict=True)}
    assert ringed == {(r["vram_bytes"] / 2**30, speed(r)) for r in front}
    small = [(x, y) for ln in axes.lines if ln.get_label() == "_runs" for x, y in zip(xs(ln), ys(ln), strict=True)]
    assert sorted(small) == sorted((r["vram_bytes"] / 2**30, speed(r)) for r in rows if r not in front)
    assert "rtx4060-laptop" in texts(memory_against_speed(sweep))


def test_twelve_policies_have_marks_of_their_own(twelve):
    (axes,) = memory_against_speed([twelve]).axes
    named = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    assert len(named) == 12
    assert len({(line.get_marker(), to_rgb(line.get_markerfacecolor()) == (1, 1, 1)) for line in named}) == 12


def test_a_sweep_gets_a_folder_for_each_machine(folder, tmp_path):
    drawn = draw_folder(folder / "sweep", tmp_path, only=["speed", "machines", "residency"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["machines.png", "machines.svg", "t-rtx4060-laptop",
                                                        "t-rtx4090-pcie4"]  # fmt: skip
    assert {d.why_not for d in drawn if d.figure == "residency"} == {
        "the folder does not say who was resident (residency.parquet); sweeps keep no such record"
    }


def test_columns_are_found_by_name_and_those_that_lack_are_left_out_o46(folder, tmp_path):
    shutil.copytree(folder / "sweep", tmp_path / "s")
    table = pyarrow.parquet.read_table(tmp_path / "s" / "sweep.parquet")
    names = [n for n in reversed(table.column_names) if n != "vram_bytes"]
    pyarrow.parquet.write_table(table.select(names), tmp_path / "s" / "sweep.parquet")
    drawn = {d.figure: d for d in draw_folder(tmp_path / "s", tmp_path / "out", only=["machines", "pareto"])}
    assert drawn["machines"].files
    assert "vram_bytes" in drawn["pareto"].why_not


def test_a_folder_of_an_older_version_lacks_new_entries_of_a_profile(folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "old")
    told = json.loads((tmp_path / "old" / "run.json").read_text())
    del told["machine"]["quantities"]["link.arrival"]
    (tmp_path / "old" / "run.json").write_text(json.dumps(told))
    (part,) = read_slices(tmp_path / "old")
    assert part.machine["link.arrival"] == 0
    assert call("report", str(tmp_path / "old"), "-o", str(tmp_path / "old.html")) == 0


def test_nothing_but_failures_is_said_and_not_drawn(run):
    bad = [{**r, "status": "failed: policy x"} for r in run.rows]
    for draw in FIGURES.values():
        with pytest.raises(NothingToShow):
            draw(replace(run, rows=bad))


def test_the_same_data_give_the_same_bytes(folder, tmp_path):
    for out in ("a", "b"):
        draw_folder(folder / "run", tmp_path / out, only=["acceptance"])
    for suffix in ("png", "svg"):
        assert len({(tmp_path / out / f"acceptance.{suffix}").read_bytes() for out in ("a", "b")}) == 1


def test_our_style_is_not_the_callers_business(run):
    before = dict(matplotlib.rcParams)
    by_policy(run)
    assert dict(matplotlib.rcParams) == before


def test_many_sizes_are_shown_by_three(run):
    rows = [{**run.main[0], "size": f"{n} a layer", "slots": 2 * n} for n in (4, 16, 8, 6, 12)]
    assert panel_sizes(replace(run, rows=rows)) == ["4 a layer", "8 a layer", "16 a layer"]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-0.5, 0.5)), min_size=1, max_size=6))
def test_labels_are_apart_and_as_near_as_can_be(pairs):
    """No other places that are apart come nearer in squares."""
    wishes, others = sorted(w for w, _ in pairs), []
    found = apart(wishes, 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(found))
    for place, (_, moved) in zip(found, pairs, strict=True):
        others.append(max(place + moved, others[-1] + 0.1) if others else place + moved)

    def cost(places):
        return sum((p - w) ** 2 for p, w in zip(places, wishes, strict=True))

    assert cost(found) <= cost(others) + 1e-9


def test_the_command(folder, tmp_path, capsys):
    assert call("plot", "run", "-o", str(tmp_path / "p"), "--only", "speed", "--only", "machines") == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'p'}: speed (.png and .svg)" in said.replace("\n", "")
    assert "only one machine" in said
    assert call("plot", "sweep", "-o", str(tmp_path / "q"), "--only", "pareto", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [f.rsplit("/")[-1] for f in row["files"]] == ["pareto.png", "pareto.svg"]
    assert call("plot", "run", "--only", "nosuch") == 2
    assert "--only nosuch: no such figure; there are speed" in capsys.readouterr().err


def test_what_is_no_folder_of_results_is_one_line(folder, tmp_path, capsys):
    for bad, word in ((tmp_path, "neither run.json"), (tmp_path / "absent", "there is no such folder")):
        assert call("plot", str(bad)) == 2
        assert word in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be read as a run"):
        read_slices(tmp_path)
