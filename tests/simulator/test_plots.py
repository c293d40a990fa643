import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from speculated import BROKEN, speculated

from moe_spac.simulator.compare import AR, SD, Job, Source, cases_for, loads_for, run_cases
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.plots import against_slots, draw_all, lengths, panel_sizes, speed, time

ORIGIN = "t: recorded trace of tiny; machine rtx4090-pcie4"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    mine = tmp_path_factory.mktemp("plots") / "mine.py"
    mine.write_text(BROKEN)
    source = Source(speculated(5))
    job = Job(source, load_machine("rtx4090-pcie4"), loads_for(source, [SD, AR]), bounded=True)
    found = run_cases(job, cases_for(["ar-lru", f"{mine}:Broken", "static"], [4, 8], [SD, AR]))
    return [replace(o, policy="broken") if "Broken" in o.policy else o for o in found]


def texts(figure) -> str:
    """All that can be read in a figure."""
    from matplotlib.text import Text

    return "\n".join(t.get_text() for t in figure.findobj(Text))


def test_all_plots_are_written_as_png_and_svg_without_a_display_o46(outcomes, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    draw_all(tmp_path, outcomes, 2, ORIGIN)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"{n}.{s}" for n in ("speed", "slots", "time") for s in ("png", "svg")
    )
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    for path in tmp_path.glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def bars(axes):
    from matplotlib.patches import Rectangle

    return [p for p in axes.patches if isinstance(p, Rectangle)]


@pytest.mark.parametrize("draw", [speed, against_slots, time])
def test_a_plot_names_its_data_its_units_and_what_failed(draw, outcomes):
    figure = draw(outcomes, 2, ORIGIN)
    seen = texts(figure)
    assert "recorded trace of tiny; machine rtx4090-pcie4" in seen
    assert "imulated" in seen
    assert "tokens/s" in seen or "ms per output token" in seen
    assert "failed" in seen
    assert "min (ref)" in seen
    assert "fluid bound" in seen or draw is time
    assert figure.legends


def test_bars_are_as_long_as_the_numbers(outcomes):
    figure = speed(outcomes, 2, ORIGIN)
    lengths = sorted(bar.get_width() for axes in figure.axes for bar in bars(axes))
    assert lengths == pytest.approx(sorted(o.speed for o in outcomes if not o.failed))
    ends = {}
    figure = time([o for o in outcomes if o.size == 8], 2, ORIGIN)
    for bar in bars(figure.axes[0]):
        row = round(bar.get_y(), 2)
        ends[row] = max(ends.get(row, 0), bar.get_x() + bar.get_width())
    wanted = [o.metrics["tpot_ms_mean"] for o in outcomes if o.size == 8 and not o.failed]
    assert sorted(ends.values()) == pytest.approx(sorted(wanted))


def test_lines_can_be_told_apart_in_grey(outcomes):
    lines = against_slots(outcomes, 2, ORIGIN).axes[0].lines
    assert (
        len({(line.get_marker(), line.get_linestyle()) for line in lines}) == len(lines) == 5
    )  # four policies and the bound


def test_speed_by_draft_length(outcomes, tmp_path):
    """Cut runs stand in their own plot only; plain decoding is length 0, the recorded length is 3."""
    cut = [
        replace(o, cut=True, draft_length=n) for o in outcomes if (o.policy, o.mode) == ("static", SD) for n in (1, 6)
    ]
    figure = lengths([*outcomes, *cut], 2, ORIGIN)
    assert [np.asarray(line.get_xdata()).tolist() for axes in figure.axes for line in axes.lines] == [[0, 1, 3, 6]] * 2
    assert "draft length K" in texts(figure)
    draw_all(tmp_path, [o for o in [*outcomes, *cut] if o.size == 8 and o.policy == "static"], 2, ORIGIN)
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["lengths.png", "speed.png", "time.png"]


def test_many_sizes_are_shown_by_three(outcomes):
    many = [replace(outcomes[0], size=n) for n in (4, 16, 8, 6, 12)]
    assert panel_sizes(many) == [4, 8, 16]
