"""`spac-trace diff`: the same, or where not."""

from dataclasses import replace

import numpy as np
import pytest
from trace_files import FIXTURES, random_step, small_header, write

from moe_spac.traces import open_trace
from moe_spac.traces.diff import compare
from moe_spac.traces.schema import Kind

HEADER = small_header(weights=True)


def steps_of(count: int = 6):
    rng = np.random.default_rng(0)
    kinds = [(Kind.PREFILL, 4), (Kind.VERIFY, 3)] + [(Kind.DECODE, 1)] * (count - 2)
    return [random_step(rng, HEADER, kind, n, positions=np.arange(n) + 10 * i) for i, (kind, n) in enumerate(kinds)]


def compared(folder, ours, theirs, header=HEADER):
    a, b = write(folder / "a.spac", HEADER, ours), write(folder / "b.spac", header, theirs)
    return compare(open_trace(a), open_trace(b))


def test_the_same_routing(tmp_path):
    found = compared(tmp_path, steps_of(), steps_of(), replace(HEADER, notes="another"))
    assert (found["same"], found["first"], found["steps_differing"]) == (True, None, 0)
    assert found["header"] == [{"field": "notes", "A": "", "B": "another"}]
    assert found["weights_differ_by"] == 0
    assert found["verdict"] == "the same routing in all 6 steps"
    assert found["statistics"][0] == found["statistics"][1]


def test_weights_alone_do_not_make_another_routing(tmp_path):
    theirs = steps_of()
    assert theirs[2].weights is not None
    theirs[2] = replace(theirs[2], weights=(theirs[2].weights.astype(np.float16) + np.float16(0.25)))
    found = compared(tmp_path, steps_of(), theirs)
    assert found["same"]
    assert found["weights_differ_by"] == pytest.approx(0.25, abs=1e-3)
    assert "weights differ by up to 0.25" in found["verdict"]


def test_the_first_difference_is_named(tmp_path):
    theirs = steps_of()
    ids = theirs[1].experts.copy()
    ids[2, 1] = [e for e in range(6) if e not in ids[2, 1]][:2]
    theirs[1] = replace(theirs[1], experts=ids)
    theirs[4] = replace(theirs[4], experts=theirs[4].experts[..., ::-1])
    found = compared(tmp_path, steps_of(), theirs)
    assert found["first"] == {
        "step": 1,
        "what": "experts",
        "sequence": 0,
        "token": 2,
        "position": 12,
        "layer": 2,
        "a": steps_of()[1].experts[2, 1].tolist(),
        "b": ids[2, 1].tolist(),
        "order_only": False,
    }
    assert (found["same"], found["steps_differing"], found["order_only"]) == (False, 2, 1)
    assert "step 1, token 2 (sequence 0), position 12, layer 2: experts" in found["verdict"]
    assert "2 of 6 steps differ, 1 of them only in order" in found["verdict"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sequence": 1}, "sequence"),
        ({"turn": 1}, "turn"),
        ({"accepted": 0}, "accepted"),
        ({"positions": np.arange(3)}, "positions"),
        ({"tokens": np.arange(3)}, "tokens"),
        ({"drafted": np.array([False, False, True])}, "drafted"),
    ],
)
def test_any_field_of_a_step_counts(tmp_path, change, what):
    ours = steps_of()
    ours[1] = replace(ours[1], accepted=1)
    theirs = [*ours[:1], replace(ours[1], **change), *ours[2:]]
    found = compared(tmp_path, ours, theirs)
    assert (found["first"]["step"], found["first"]["what"]) == (1, what)


def test_a_trace_that_ends_before_the_other(tmp_path):
    found = compared(tmp_path, steps_of(), steps_of()[:4])
    assert found["first"]["what"] == "length"
    assert found["verdict"] == "different: B ends before step 4, up to which they are the same"
    assert found["steps_differing"] == 2


def test_traces_of_different_models(tmp_path):
    a, b = open_trace(FIXTURES / "v1.spac"), open_trace(write(tmp_path / "b.spac", HEADER, steps_of()))
    found = compare(a, b)
    assert not found["same"]
    assert "target.dense_bytes" not in {row["field"] for row in found["header"]}
    assert {"draft_length", "scores"} <= {row["field"] for row in found["header"]}
