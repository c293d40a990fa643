"""The governor: fits, acceptance and the best draft length by hand, and the policy that it steers."""

import numpy as np
import pytest
from policy_loop import make_setup
from speculated import speculated

from moe_spac.policies.governor import Governor, Line, best_length
from moe_spac.policies.interface import LayerReport, StepInfo
from moe_spac.policies.load import load_policy
from moe_spac.simulator.machine import load_machine
from moe_spac.simulator.run import simulate
from moe_spac.traces.schema import Kind


def test_a_line_through_its_points():
    line = Line(0.9)
    assert line.at(3) == 0
    for x in (1, 4, 2):
        line.add(x, 3 + 2 * x)
    assert line.at(5) == pytest.approx(13)
    level = Line(0.9)
    for y in (4, 6):
        level.add(2, y)
    assert level.at(9) == pytest.approx((0.9 * 4 + 6) / 1.9)


def test_the_best_length_by_hand():
    """Four in five are accepted, a cycle takes 10 + 5 k: .0533 .0720 .0781 .0787 .0768 accepted for k = 1 to 5."""
    accepted = np.cumsum(0.8 ** np.arange(1, 9))
    assert best_length(range(1, 9), lambda k: accepted[k - 1], lambda k: 10 + 5 * k) == 4
    assert best_length(range(1, 9), lambda k: 1.0, lambda k: 1.0) == 1


def governor(**more):
    made = Governor(**{"shortest": 1, "draft_ms": 0.0, "pass_ms": 0.0, "smoothing": 0.5, "bonus": False} | more)
    made.setup(make_setup(load_policy("governed"), 2, 8, 4, draft_length=3))
    return made


def verified(made, drafted, accepted, wall=100_000, waited=0):
    n = drafted + 1
    made.step_begins(StepInfo(0, Kind.VERIFY, np.zeros(n, np.int32), np.arange(n) > 0))
    made.layer_ends(LayerReport(0, wall, 0, 0, waited, 0))
    made.step_ends(accepted, np.arange(n) <= accepted)


def test_acceptance_by_position():
    made = governor()
    verified(made, 3, 1)
    assert made.p.tolist() == [1, 0.5, 1]  # the third was never put to the test
    verified(made, 3, 0)
    assert made.p.tolist() == [0.5, 0.5, 1]
    assert made.accepted(3) == 0.5 + 0.25 + 0.25
    verified(made, 1, 1)
    assert made.p.tolist() == [0.75, 0.5, 1]
    assert governor(bonus=True).accepted(2) == 3


def test_what_a_cycle_takes():
    """Two passes: 4 tokens in 400 us of which 100 waited for copies, 2 tokens in 200: 150 + 50 n... less the wait,
    300 and 200, so 100 + 50 n. Drafting 0.02 ms a token, 0.5 ms elsewhere: for k = 2, 40 + 500 + 250."""
    made = governor(draft_ms=0.02, pass_ms=0.5)
    verified(made, 3, 3, 400_000, 100_000)
    verified(made, 1, 1, 200_000)
    assert made.cycle_ns(2) == pytest.approx(790_000)


def test_it_tries_both_ends_first():
    made, lengths = governor(), []
    for _ in range(4):
        lengths.append(k := made.draft_length(3))
        verified(made, k, k)
    assert lengths == [3, 1, 3, 1]
    assert made.draft_length(3) == 3  # all is accepted, and time is level
    assert made.draft_length(0) == 0
    for _ in range(12):
        verified(made, 3, 0, wall=400_000)
    assert made.draft_length(3) == 1  # nothing is, and long passes take longer


@pytest.mark.parametrize("misses", ["fetch", "cpu"])
def test_dear_drafts_are_short_and_cheap_ones_long(misses):
    """The same text: where drafting a token is given as a second nothing is worth it, where the rest of a pass is,
    every token is."""
    for given, length in (("draft_ms=1000", 1), ("pass_ms=1000", 3)):
        policy = load_policy(f"governed:misses={misses},{given}")
        run = simulate(speculated(40), policy, load_machine("rtx4060-laptop"), 8)
        assert run.error is None
        lengths = [s.drafted for s in run.steps if s.kind is Kind.VERIFY and s.drafted]
        assert lengths[:4] == [3, 1, 3, 1]
        assert sum(k == length for k in lengths[4:]) > 0.9 * len(lengths[4:])
