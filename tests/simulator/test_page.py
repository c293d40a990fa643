"""The report page: what it says, that it needs nothing but itself, and how it looks in a real browser."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from result_folders import call, make_folders

from moe_spac.simulator.compare import AR, SD, Case, Job, Source, loads_for, run_case
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.page import Findings, sections
from moe_spac.simulator.results import read_slices, speed
from moe_spac.simulator.whatif import Range, chosen, fits, lead_holds, runner_up, what_if
from moe_spac.traces.errors import InputError
from moe_spac.traces.reader import open_trace
from moe_spac.traces.schema import Provenance

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        where = tmp_path_factory.mktemp("report")
        patch.chdir(where)
        make_folders(where)
        assert call("report", "run", "-o", "page.html") == 0
        yield where


@pytest.fixture(scope="module")
def run(folder):
    (part,) = read_slices(folder / "run")
    return part


def winner(part):
    best = chosen(part)
    assert best is not None
    return best


def rival(part, best):
    second = runner_up(part, best)
    assert second is not None
    return second


class Outline(HTMLParser):
    """Tags that were opened and not closed, text by tag, ids, and whatever a browser would fetch."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: dict[str, str] = {}
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.ids += [str(named["id"])] if "id" in named else []
        for name in ("src", "href", "xlink:href"):
            target = named.get(name) or "#"
            if not target.startswith(("#", "data:")):
                self.fetched.append(target)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in self.open:
            self.said[tag] = self.said.get(tag, "") + data


def test_one_page_that_needs_nothing_else(folder):
    text = (folder / "page.html").read_text()
    outline = Outline(text)
    assert outline.open == []
    assert outline.fetched == []
    assert "<script" not in text
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(set(outline.ids)) == len(outline.ids)
    assert text.count("<svg ") == 7  # all but the matrix of machines
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(outline.ids)


def test_the_verdict_comes_first_and_is_the_fastest_run_that_fits(folder, run):
    best = winner(run)
    said = Outline((folder / "page.html").read_text()).said
    assert said["main"].index(said["h1"]) < said["main"].index("All policies at")
    assert best["policy"] in said["h1"]
    assert f"{speed(best):.1f} tokens a second" in said["h1"]
    assert speed(best) == max(speed(r) for r in run.rows if not r["reference"])
    for word in ("What limits it", "What would help most", "Does speculation pay?", "How sure is this?",
                 "recorded here", "What did not run", "evicts expert", "spac-sim run t.spac"):  # fmt: skip
        assert word in said["main"]


def test_a_cache_that_the_card_cannot_hold_is_not_recommended(run):
    rows = [{**r, "vram_bytes": r["slots"] * 2**30} for r in run.rows]
    small = replace(run, rows=rows, machine=load_machine("rtx4060-laptop"))  # 8 GiB
    assert {r["slots"] for r in rows} == {6, 8, 12}
    assert winner(small)["slots"] <= 8
    assert not fits(rows[-1], small.machine) or rows[-1]["slots"] <= 8
    text = sections([Findings(small, winner(small), None, "not asked")])
    assert "Not considered" in text
    assert "6 slots per layer" in text
    assert "Not known: not asked" in text


def test_changes_are_real_runs_of_the_same_steps(folder, run):
    """Against runs set up by hand: the same policy with more slots, and on a machine with a faster link."""
    best = winner(run)
    found = what_if(folder / "run", run, best)
    changes = {c.name: c for c in found.changes}
    source = Source(open_trace(str(folder / "t.spac")))
    slots = min(2 * best["slots"], 16)
    machine = load_machine("rtx4090-pcie4")
    entries = {e: replace(machine.quantities[e], value=2 * machine[e]) for e in ("link.bandwidth", "link.d2h_bandwidth",
               "link.pageable_bandwidth")}  # fmt: skip
    faster = replace(machine, quantities={**machine.quantities, **entries})
    length = best["draft_length"] if best["cut"] else None

    def again(machine, slots):
        view = Case(best["policy"], slots, best["mode"], length)
        job = Job(source, machine, loads_for(source, [SD, AR]))
        job.loads[view.view] = job.loads[best["mode"]] if not best["cut"] else _load(source, best)
        return run_case(job, view).speed

    assert found.base == pytest.approx(speed(best))
    assert changes[
        "all experts on the GPU" if slots < 2 * best["slots"] else "twice the expert cache"
    ].tokens_per_s == (pytest.approx(again(machine, slots)))
    assert changes["a link of twice the speed"].tokens_per_s == pytest.approx(again(faster, best["slots"]))
    for change in found.changes:
        assert change.gain == pytest.approx(change.tokens_per_s / found.base - 1)
    assert [c.gain for c in found.changes] == sorted((c.gain for c in found.changes), reverse=True)
    first, second = found.ranges
    assert (first.policy, second.policy) == (best["policy"], rival(run, best)["policy"])
    for ends in found.ranges:
        assert ends.low <= ends.middle <= ends.high


def _load(source, best):
    from moe_spac.simulator.metrics import load_of

    return load_of(source.view(SD, best["draft_length"]))


def test_a_lead_holds_if_it_does_so_at_both_ends():
    mine = Range("a", 5, 6, 7)
    assert lead_holds([mine, Range("b", 4, 5, 7)])
    assert not lead_holds([mine, Range("b", 4, 5, 7.1)])
    assert lead_holds([mine]) is None


def test_a_trace_that_is_gone_costs_the_changes_only(folder, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moe_spac.simulator.page.FIGURES", {})  # none of them matters here
    assert call("report", str(folder / "run"), "-o", "p.html") == 0
    captured = capsys.readouterr()
    assert "warning: what would help most is not in the page" in captured.err
    assert "Not known: " in (tmp_path / "p.html").read_text()
    shutil.copy(folder / "t.spac", tmp_path / "t.spac")
    with (tmp_path / "t.spac").open("ab") as file:
        file.write(b" ")
    with pytest.raises(InputError):
        what_if(folder / "run", run, winner(run))


def test_a_sweep_says_who_wins_where(folder):
    parts = read_slices(folder / "sweep")
    text = sections([Findings(p, winner(p), what_if(folder / "sweep", p, winner(p))) for p in parts])
    outline = Outline(text)
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert re.search(r"is fastest on [12] of 2", outline.said["h1"])
    for part in parts:
        best = winner(part)
        wanted = f't on {part.machine.name}: <span class="name">{best["policy"]}</span>, {speed(best):.1f} tokens/s'
        assert wanted in text


def test_synthetic_data_and_failures_are_said(run):
    made_up = replace(run, header=replace(run.header, provenance=Provenance.SYNTHETIC))
    assert "synthetic: no model ran" in sections([Findings(made_up, winner(made_up), None, "x")])
    bad = replace(run, rows=[{**r, "status": "failed: <b>policy</b> x"} for r in run.rows])
    text = sections([Findings(bad, chosen(bad), None, "x")])
    assert "No policy ran to its end" in text
    assert "failed: &lt;b&gt;policy&lt;/b&gt; x" in text


# In a browser


def browse(where: Path, *words: str) -> str:
    assert CHROMIUM
    profile = where / "profile"
    done = subprocess.run([CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *words], capture_output=True, timeout=120)
    shutil.rmtree(profile, ignore_errors=True)
    return done.stdout.decode()


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium")
MEASURE = """<script>
const wide = [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll, svg") &&
  e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName + "." + e.className);
const small = [...document.querySelectorAll("main *")].filter(e => !e.closest("svg") && e.children.length == 0 &&
  e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.tagName);
parent.postMessage(JSON.stringify({inner: innerWidth, scroll: document.documentElement.scrollWidth, wide, small,
  pictures: document.querySelectorAll("svg").length}), "*");
</script></body>"""
FRAME = """<!doctype html><iframe style="border:0;width:{width}px;height:2000px" src="measured.html"></iframe>
<script>addEventListener("message", e => {{ document.body.dataset.found = e.data; }})</script>"""


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen_and_no_text_is_tiny(folder, tmp_path, width):
    """In a frame of the width of a phone, because a browser's own window has a least width."""
    text = (folder / "page.html").read_text()
    (tmp_path / "measured.html").write_text(text.replace("</body>", MEASURE))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    dom = browse(tmp_path, "--window-size=1400,2100", "--virtual-time-budget=4000", "--dump-dom",
                 (tmp_path / "frame.html").as_uri())  # fmt: skip
    (said,) = re.findall(r'data-found="([^"]*)"', dom)
    found = json.loads(said.replace("&quot;", '"'))
    assert found == {"inner": width, "scroll": width, "wide": [], "small": [], "pictures": 7}


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_it_looks_right_by_day_and_by_night(folder, tmp_path, width, height):
    """Ground, ink and the winner's accent are where they belong; nothing is printed in black on black."""
    seen = {}
    for scheme, setting in (("light", 1), ("dark", 0)):
        shot = tmp_path / f"{scheme}.png"
        browse(tmp_path, f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={setting}",
               f"--screenshot={shot}", (folder / "page.html").as_uri())  # fmt: skip
        seen[scheme] = np.asarray(imread(shot))[..., :3]
    for scheme, ground, ink in (("light", 0xF6, 0x1A), ("dark", 0x12, 0xEC)):
        picture = seen[scheme]
        assert picture.shape[:2] == (height, width)
        grey = picture.mean(axis=2) * 255
        assert np.median(grey) == pytest.approx(ground, abs=4)
        first = grey[: height // 3]
        assert abs(first - ink).min() < 12  # the headline
        assert (abs(first - ground) > 60).mean() > 0.01
        right = grey[:, -6:]  # the margin is empty: nothing runs out of the page
        assert abs(right - ground).max() < 4
    assert abs(seen["light"].mean() - seen["dark"].mean()) > 0.5
