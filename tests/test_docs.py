"""What pages show can be typed: every command is run, in the order of its page, but for those named below.

Not run as shown, since it cannot be done here: models whose weights are not at hand (30B and more) and `--device cuda`.
Such a command is run on the embedded pair without a GPU, and its options are checked as shown. Long ones are cut short,
as `INSTEAD` and `SMALL` say. Synopses (with `[`, `|` or `…`) and commands within sentences: their options are checked.
"""

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner

from moe_spac.executor import kernels
from moe_spac.executor.device import has_gpu

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "tests" / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "traces" / "pair" / "README.md"]
SPEAKING = [*PAGES, *sorted((ROOT / "traces").rglob("README.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]
SOURCES = [p for part in ("traces", "policies", "simulator", "executor") for p in sorted((ROOT / part).rglob("*.py"))]
INSTEAD = [
    # no such weights here: the embedded pair; no GPU: slots in RAM
    (r" --(?:target|draft) Qwen/\S+", ""),
    (r" --store q4", " --store exact"),  # whose experts' rows are no multiple of 32
    (r" --device cuda", ""),
    # long: shorter
    (r" --prompts mt-bench( --prompt-limit \d+)?( --max-new-tokens \d+)?", " --prompts mt-bench --prompt-limit 1 "
     "--max-new-tokens 4"),
    (r" --prompts held-out", " --prompts held-out --prompt-limit 2 --max-new-tokens 4"),
    (r"spac-exec calibrate", "spac-exec calibrate --rounds 1"),
    (r"spac-exec bench", "spac-exec bench -r 1 -p 8 -n 8"),
    (r"(synth --like \S+ -o T)$", r"\1 --tokens 256"),
    (r"stats gpt-oss-20b --plot", "stats pair.spac --plot"),  # a minute; tests/traces/test_stats.py reads all of it
    (r" --tokens 4096", " --tokens 256"),
    (r" --limit-steps (300|1000)", " --limit-steps 20"),
    (r"(spac-exec (?:generate|serve)(?!.*--machine).*)", r"\1 --machine rtx4060-laptop"),  # not measured at each start
    # any port that is free
    (r" --port 8080", " --port 0"),
]  # fmt: skip
# What a page takes for granted: a policy file or trace that its reader has already, and this machine's profile.
WINNER = "spac-sim run gpt-oss-20b --policy moe-spac --slots 8 --limit-steps 5 --no-plots --save-winner"
GIVEN = {
    "README.md": f"{WINNER} W.toml",
    "running.md": f"{WINNER} winner.toml",
    "trace-statistics/README.md": "spac-trace record -o pair.spac --prompt-limit 1 --max-new-tokens 4",
}
# Scripts: what is run in place of what is shown. Fewer tokens, rounds and prompts of the same.
SMALL = [
    (r"bench_engine\.py(?: --quick| --only ac)?", "bench_engine.py --tokens 8"),
    (r"bench_(record|lanes)\.py", r"bench_\1.py --tokens 4 --rounds 1"),
    (r"bench_floor\.py", "bench_floor.py --rounds 1"),
    (r"bench_kernels\.py", "bench_kernels.py --megabytes 1 --repeats 1"),
    (r"bench_marginal\.py(?: -o \S+)?", "bench_marginal.py --quick --tokens 10 --jobs 1 -o docs/marginal-results.md"),
    (r"load_peak\.py", "load_peak.py --quick"),
    (r"-m timeit", "-m timeit -n 1 -r 1"),
    (r"exact\.py", "exact.py --policy moe-spac"),
    (r"--split", "--split --layers 1 --tokens 6"),
    (r"--minutes 30", "--minutes 0.01 --prompts 2"),
    (r"synth_fit NAME", "synth_fit deepseek-v2-lite"),
    (r"pair\.measure", "pair.measure --prompts two.jsonl --new-tokens 9"),
]
TWO = '{"text": "And God said", "domain": "scripture"}\n{"text": "def add(a, b):", "domain": "code"}\n'
SCRIPT = re.compile(r"python ((?:tests/benchmarks/\w+\.py|-m (?:timeit|moe_spac\.[\w.]+))[^`\n]*?)(?=`|$|  )", re.M)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
WITHIN = re.compile(r"`(spac-(?:trace|sim|exec) [a-z][^`]*)`")
SAID = re.compile(r"spac-(?:trace|sim|exec) [a-z]+(?:-[a-z]+)*(?: --[a-z-]+)*")


@cache
def app_of(program: str):
    if program == "spac-trace":
        from moe_spac.traces.cli import app
    elif program == "spac-sim":
        from moe_spac.simulator.cli import app
    else:
        from moe_spac.executor.cli import app
    return app


def shown(text: str) -> list[str]:
    """Commands of a page in its order: in `sh` blocks and in indented lines, a backslash going on with the next line,
    without comments and explanations."""
    found, fenced = [], False
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = line == "```sh"
        elif match := re.match(r" *" if fenced else r" {4,}", line):
            command = re.sub(r"^(\S+) +", r"\1 ", line[match.end() :])
            if re.match(r"spac-(trace|sim|exec) [a-z]", command):
                found.append(command if "[" in command else re.split(r"  +", command)[0])
    return found


def synopsis(command: str) -> bool:
    return any(mark in command for mark in ("[", "|", "…", "..."))


def typed(page: Path) -> list[str]:
    return [command for command in shown(page.read_text()) if not synopsis(command)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


@pytest.mark.parametrize("page", [p for p in PAGES if typed(p)], ids=name)
def test_commands_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if mine := re.search(r"```python\n(# mine\.py\n.*?)```", page.read_text(), re.DOTALL):
        Path("mine.py").write_text(mine[1])
    shutil.copy(ROOT / "simulator" / "machines" / "rtx4060-laptop.toml", "this-machine.toml")
    given = GIVEN.get(name(page))
    for command in [*([given] if given else []), *typed(page)]:
        for pattern, other in INSTEAD:
            command = re.sub(pattern, other, command)
        program, *words = shlex.split(command)
        if words[0] == "serve":
            serves(words)
            continue
        result = CliRunner().invoke(app_of(program), words, input="And God said\n")
        assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception}"


def serves(words: list[str]) -> None:
    """The server comes up, answers, and ends with Ctrl-C."""
    command = [sys.executable, "-c", "from moe_spac.executor.cli import main; main()", *words, "--json", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        told = ""
        while not told.endswith("}\n"):
            told += server.stdout.readline()
        url = json.loads(told)["url"]
        while httpx.get(f"{url}/health").status_code == 503:
            time.sleep(0.05)
        asked = {"prompt": "And God said", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 130
    finally:
        server.kill()
        server.communicate()


@cache
def help_of(program: str, command: str) -> str:
    told = CliRunner().invoke(app_of(program), [command, "--help"], env={"COLUMNS": "200"})
    assert told.exit_code == 0, f"{program} has no {command}"
    return told.output


def asked_for() -> list[tuple[str, str]]:
    """Commands as they stand, of pages, notebooks, messages and docstrings."""
    found = [(name(p), command) for p in PAGES for command in shown(p.read_text())]
    for page in SPEAKING:
        found += [(name(page), command) for command in WITHIN.findall(page.read_text())]
    return found + [(name(p), command) for p in SOURCES for command in SAID.findall(p.read_text())]


def test_options_exist():
    """A line may show several commands, `a | b`."""
    asked = sorted(set(asked_for()))
    assert len(asked) > 100
    for page, line in asked:
        program, _, rest = line.partition(" ")
        for part in re.split(r" \| (?=[a-z]+\b(?! *\|)(?!\]))", rest.strip()):
            command = part.split()[0]
            if command in ("or", "and", "has", "on", "under"):
                continue
            for option in re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", part):
                assert option in help_of(program, command), f"{page}: {line}: {command} has no {option}"


def test_the_story_is_the_one_that_is_shown():
    """Its commands are run by tests/test_story.py; the README shortens them where it says …"""
    from moe_spac.__main__ import story

    told = [" ".join(words) for _, words in story(Path("spac-demo"))]
    lines = re.findall(r"^\$ (spac-.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == len(told)
    for line, command in zip(lines, told, strict=True):
        parts = [re.escape(part.strip()) for part in line.split("…")]
        assert re.fullmatch(".*".join(parts), command), f"{line}\n{command}"


def test_what_stores_take_is_as_computed():
    """The Python line of docs/models.md gives its table."""
    page = (ROOT / "docs" / "models.md").read_text()
    (line,) = re.findall(r"^ {4}(python -c .*?\")$", page, re.MULTILINE | re.DOTALL)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(shlex.split(line)[2].replace("\n    ", "\n"), {})
    sizes = ast.literal_eval(told.getvalue())
    assert [f"{size:.2f}" for size in sizes] == re.findall(r"MiB \| ([\d.]+) GiB \|", page)


def scripts() -> list[str]:
    """Commands of Python that pages show, each once, as they are run: small."""
    found = []
    for page in [*PAGES, BENCHMARKS / "README.md"]:
        for command in SCRIPT.findall(re.sub(r"\\\n +", "", page.read_text())):
            for pattern, other in SMALL:
                command = re.sub(pattern, other, command)
            found.append(command.strip())
    return list(dict.fromkeys(found))


def test_every_benchmark_is_shown():
    named = {command.split()[0] for command in scripts()}
    assert named >= {f"tests/benchmarks/{p.name}" for p in BENCHMARKS.glob("*.py") if "__main__" in p.read_text()}


@pytest.mark.parametrize("command", scripts())
def test_scripts_run(command, tmp_path, monkeypatch, capfd):
    """In a copy of the folders that they write to. What needs a GPU or llama.cpp says so in one line."""
    if command.endswith("gpu_check") and has_gpu():
        pytest.skip("minutes; tests/executor/test_gpu.py has it")
    if "bench_kernels" in command and not kernels.ready():
        pytest.skip("the kernels are not built")
    if "load_peak" in command and not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "traces" / "synthetic", tmp_path / "traces" / "synthetic")
    (tmp_path / "traces" / "pair").mkdir()
    (tmp_path / "two.jsonl").write_text(TWO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moe_spac.traces.synth.FOLDER", tmp_path / "traces" / "synthetic")
    first, *words = shlex.split(command)
    place = words.pop(0) if first == "-m" else str(ROOT / first)
    monkeypatch.setattr(sys, "argv", [place, *words])
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.delitem(sys.modules, place, raising=False)  # as in an interpreter of its own
    threads = torch.get_num_threads()
    try:
        (runpy.run_module if first == "-m" else runpy.run_path)(place, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        torch.set_num_threads(threads)
    out, err = capfd.readouterr()
    if command.endswith(("--llama-python P", "gpu_check")):
        assert (code, out, err.count("\n"), err[:7]) == (2, "", 1, "error: ")
    else:
        assert code == 0, f"{out}\n{err}"
        assert out or "synth_fit" in command


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_every_entry_of_a_profile_is_explained():
    from moe_spac.simulator.machine import UNITS

    page = (ROOT / "docs" / "machines.md").read_text()
    assert set(re.findall(r"^\| `([a-z]+\.[a-z0-9_]+)`", page, re.MULTILINE)) == set(UNITS)
