"""What every command prints fits a terminal of 80 columns; colour and progress are for terminals only."""

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.cells import cell_len
from speculated import speculated, write
from test_docs import app_of
from typer.testing import CliRunner

MACHINE = "--machine rtx4060-laptop"
DRAFTED = "--window 2 --acceptance 0.7 --draft-lengths 0,1,2"
COMMANDS = [
    "spac-trace info t.spac",
    "spac-trace stats t.spac",
    "spac-trace diff t.spac u.spac",
    "spac-trace synth --list",
    "spac-trace synth --like qwen3-30b-a3b -o q.spac --tokens 32",
    "spac-trace record -o r.spac --prompt-limit 1 --max-new-tokens 4",
    "spac-trace export t.spac -o t.parquet",
    "spac-trace import t.parquet -o back.spac",
    f"spac-sim run t.spac --policy ar-lru --policy moe-spac-release:k=4 --slots 3,4 --out run {MACHINE} --no-plots",
    f"spac-sim run gpt-oss-20b --policy hybrimoe --slots 8 --limit-steps 6 --out drafted {DRAFTED} --no-plots",
    f"spac-sim sweep t.spac --policy ar-lru --policy static --slots 3,4 {MACHINE} --out sweep",
    "spac-sim tune t.spac --policy lfu --param bypass=true,false --slots 3 --out tuned",
    "spac-sim ablate t.spac",
    "spac-sim fit Qwen3-30B-A3B --vram 12GiB --ram 32GiB --ctx 8192 --draft Qwen3-0.6B",
    "spac-sim machines",
    "spac-sim machines rtx4060-laptop",
    "spac-sim policies",
    "spac-sim policies moe-spac",
    "spac-sim metrics",
    "spac-sim plot run --only speed --only machines",
    "spac-sim report run -o page.html",
    "spac-sim planning t.spac --steps 2",
    "spac-sim validate copies",
    "spac-sim signs mrs --tokens 16",
    "spac-exec doctor",
    f"spac-exec generate --policy moe-spac --prompt-limit 1 --max-new-tokens 8 --clock virtual {MACHINE}",
    f"spac-exec bench --policy ar-lru --policy static -r 1 -p 4 -n 4 {MACHINE}",
]
SLOW = [
    "traces.cli record -o t.spac",
    "executor.cli generate hello",
    "executor.cli chat",
    "executor.cli serve --port 0 --json",
    "executor.cli bench --json",
    "executor.cli doctor",
    "executor.cli doctor --target Qwen/Qwen3-30B-A3B --json",
    "executor.cli calibrate -o m.toml",
    "executor.cli replay gpt-oss-20b",
    "executor.cli versus",
    "executor.gpu_check --device cpu",
]
HERE = Path(__file__).parent
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
EACH = """
import shlex, sys
from test_docs import app_of
for line in sys.stdin.read().splitlines():
    print(f"$ {line.split()[1]}", flush=True)
    app_of(line.split()[0])(shlex.split(line)[1:], standalone_mode=False)
"""


@pytest.fixture
def folder(tmp_path):
    write(speculated(6), tmp_path / "t.spac")
    write(speculated(7), tmp_path / "u.spac")
    return tmp_path


def on_a_terminal(folder: Path, words: list[str], given: str = "", path: Path = HERE) -> tuple[int, str]:
    """Exit code and all that 80 columns and 24 lines show of one process with both outputs there."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"TERM": "xterm", "PYTHONPATH": os.fspath(path)}
    process = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=follower, stderr=follower,
                               cwd=folder, env=env, text=True)  # fmt: skip
    os.close(follower)
    assert process.stdin is not None
    process.stdin.write(given)
    process.stdin.close()
    seen = b""
    try:
        while read := os.read(leader, 65536):
            seen += read
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    return process.wait(), seen.decode()


def test_no_line_is_wider_than_a_terminal(folder):
    code, seen = on_a_terminal(folder, ["-c", EACH], "\n".join(COMMANDS))
    assert code == 0, seen[-2000:]
    assert [line.split()[1] for line in re.findall(r"^\$ .*$", seen, re.MULTILINE)] == [c.split()[1] for c in COMMANDS]
    lines = [CODES.sub("", line) for line in re.split(r"[\r\n]+", seen)]
    assert [line for line in lines if cell_len(line) > 80 and not line.startswith("warning: ")] == []  # one line each
    assert CODES.search(seen)  # in colour
    assert seen.count("starting …\r\x1b[K") == 4  # record, doctor, generate, bench
    assert "measuring memory and copies" in seen  # while it lasts
    assert "generating, prompts: 1" in seen


def test_no_colour_and_no_progress_in_a_pipe(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    for command in (
        c for c in COMMANDS if c.split()[1] not in ("fit", "doctor")
    ):  # seconds; tests/test_docs.py has them
        program, *words = shlex.split(command)
        told = CliRunner().invoke(app_of(program), words)
        assert told.exit_code == (words[0] == "diff"), f"{command}\n{told.output}\n{told.exception}"
        assert not CODES.search(told.output), command
        assert all(line.startswith("warning: ") for line in told.stderr.splitlines()), command
        assert [ln for ln in told.stdout.splitlines() if ln[:1] in set("┏┃┡│└╭╰") and cell_len(ln) > 80] == [], command


@pytest.mark.parametrize("line", SLOW)
def test_commands_that_wait_for_torch_say_so_and_can_be_stopped(tmp_path, line):
    """In the place of torch a module that shows when it is imported, and stands for who then presses Ctrl-C."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, sys\nsys.stderr.write('[torch]')\nsys.stderr.flush()\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    module, *words = shlex.split(line)
    words = ["-m", f"moe_spac.{module}", *words]
    assert on_a_terminal(tmp_path, words, path=tmp_path) == (130, "\r\x1b[Kstarting …[torch]\r\x1b[K")
