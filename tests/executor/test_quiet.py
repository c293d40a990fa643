"""What others take of the machine, seen with a process that does take it."""

import os
import subprocess
import sys
import time

import pytest

from moe_spac.executor.quiet import Pace, others_seconds

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only /proc says it")


@pytest.fixture
def burner():
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def nap() -> int:
    time.sleep(0.1)
    return 100


def test_a_disturbed_measurement_is_repeated_with_its_yardsticks(burner):
    yards, tried = [], []

    def yardstick() -> int:
        if len(yards) == 3:  # the one before the second try, which is left alone
            burner.kill()
            burner.wait()
        yards.append(nap())
        return len(yards)

    def measure() -> int:
        tried.append(time.sleep(0.3))
        return len(tried)

    found, yard, _ = Pace(yardstick, tries=2).beside(measure)
    assert len(tried) == 2
    assert yard == {1: 2.5, 2: 4.5}[found]  # the second, unless yet others took as much


def test_what_is_always_disturbed_is_measured_all_the_same(burner):
    found, _, cores = Pace(nap, tries=1).beside(lambda: time.sleep(0.2) or "measured")
    assert found == "measured"
    assert cores > 0.1


def test_a_measurement_stands_between_two_yardsticks():
    """The one after a measurement is the one before the next; the first of all warms up."""
    yards = iter([1_000, 10, 30, 70])
    pace = Pace(lambda: next(yards), tries=1)
    assert (pace.yard, pace.beside(lambda: "a").yard, pace.beside(lambda: "b").yard, pace.yard) == (10, 20, 50, 70)


def test_only_others_count():
    """Half a second of our own is not among theirs, whatever they do meanwhile."""
    before, own = others_seconds(), time.process_time()
    begin = time.perf_counter()
    while time.process_time() - own < 0.5:
        pass
    wall = time.perf_counter() - begin
    taken = others_seconds() - before
    assert taken < wall * (os.cpu_count() or 1) - 0.4
