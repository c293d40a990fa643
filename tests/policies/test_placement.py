"""Placements by rule, by measured counts, by the first prompt and by hindsight; KTransformers, Fiddler, llama.cpp."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hand import decode, setup, step
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_loop import COSTS, Host, random_routing, sets
from speculated import speculated, write

from moe_spac.policies.driver import Driver, PolicyError
from moe_spac.policies.interface import Key, Setup, StepInfo
from moe_spac.policies.load import load_policy
from moe_spac.policies.placement import read_counts
from moe_spac.simulator.replay import count, count_sequential
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import Kind


def placed(spec, slots, layers=3, experts=4):
    driver = Driver(load_policy(spec), Setup(layers, experts, 2, 1, (slots,), COSTS))
    return sorted(driver.cache.resident)


def prompt(routing):
    return replace(step(routing), kind=Kind.PREFILL)


def test_uniform_front_and_random():
    assert placed("kt-uniform", 5) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert placed("kt-front", 5) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    drawn = placed("kt-random", 5)
    assert len(drawn) == 5
    assert placed("kt-random", 5) == drawn
    assert placed("kt-random:seed=7", 5) != drawn
    for spec in ("kt-uniform", "kt-front", "kt-random"):
        assert len(placed(spec, 99)) == 12


@pytest.mark.parametrize("spec", ["static", "kt-uniform", "kt-front", "kt-random", "kt-frequency:frequencies={}"])
@pytest.mark.parametrize("left", [8, 5, 1, 0])
def test_slots_taken_away_leave_what_fewer_slots_would_have_had(spec, left, tmp_path):
    counts = np.random.default_rng(0).permutation(12).reshape(3, 4)
    (tmp_path / "counts.json").write_text(json.dumps(counts.tolist()))
    spec = spec.format(tmp_path / "counts.json")
    driver = Driver(load_policy(spec), Setup(3, 4, 2, 1, (9,), COSTS))
    driver.resize((left,))
    assert sorted(driver.cache.resident) == placed(spec, left)


def test_whole_layers_only():
    assert placed("n-cpu-moe", 9) == [Key(layer, e) for layer in (1, 2) for e in range(4)]
    assert placed("n-cpu-moe:n=2", 9) == [Key(2, e) for e in range(4)]
    assert placed("n-cpu-moe:n=3", 9) == []
    with pytest.raises(PolicyError, match="n=0 needs 3 layers on the GPU; 2 fit"):
        placed("n-cpu-moe:n=0", 9)


def test_frequencies_from_a_file_and_from_a_trace(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([[5, 1, 0, 2], [0, 9, 9, 0], [3, 0, 0, 4]]))
    # Top 5 of all: 9, 9, 5, 4, 3.
    assert placed(f"kt-frequency:frequencies={path}", 5) == [(0, 0), (1, 1), (1, 2), (2, 0), (2, 3)]
    assert placed(f"fiddler:frequencies={path}", 2) == [(1, 1), (1, 2)]
    made = speculated(6)
    counts = np.zeros((2, 8))
    for one in made.listed:
        for row in one.experts[one.kept]:
            for layer in range(2):
                counts[layer, row[layer]] += 1
    trace = write(made, tmp_path / "t.spac")
    assert (read_counts(str(trace), 2, 8) == counts).all()
    with pytest.raises(PolicyError, match="counts of 2 x 8, and the model has 3 x 4"):
        placed(f"kt-frequency:frequencies={trace}", 5)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "[[1], [2, 3]]", "not a JSON list"),
        ("b.json", "[[1, -1]]", "one number from 0"),
        ("c.json", "7", "one list"),
    ],
)
def test_files_that_hold_no_counts(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        read_counts(str(path), 1, 2)


@pytest.mark.parametrize("spec", ["kt-frequency:frequencies=none.json", "fiddler:frequencies=nowhere.spac"])
def test_a_missing_file_is_refused_at_once(spec):
    with pytest.raises(InputError, match="no such file"):
        load_policy(spec)


@pytest.mark.parametrize("spec", ["kt-frequency", "fiddler"])
def test_without_a_file_the_first_prompt_decides_for_good(spec):
    first = prompt([[[0, 3], [1, 2]], [[0, 1], [1, 3]], [[0, 3], [1, 2]]])
    # Counts: layer 0: 0 three times, 3 twice, 1 once; layer 1: 1 three times, 2 twice, 3 once. Three slots in all.
    second = prompt([[[2, 1], [0, 3]]] * 5)
    driver = count([first, *decode([0, 3], layers=2), second, *decode([2, 1], layers=2)], load_policy(spec),
                   setup(2, 4, [3]))  # fmt: skip
    # The even start was (0, 0), (0, 1), (1, 0).
    assert sorted(driver.cache.resident) == [(0, 0), (0, 3), (1, 1)]
    assert (driver.total.prefetches, driver.total.evictions) == (2, 2)


@pytest.mark.parametrize("spec", ["kt-frequency:warmup=2", "fiddler:warmup=2"])
def test_without_a_prompt_the_first_steps_decide(spec):
    steps = decode([2, 3], [1, 3], [0, 1], [0, 1], [0, 1])
    driver = count(steps, load_policy(spec), setup(1, 4, [2]))
    # 3 twice, 1 and 2 once: 3 comes in for 0, and 1, which was there from the start, stays.
    assert sorted(driver.cache.resident) == [(0, 1), (0, 3)]
    assert (driver.total.hits, driver.total.prefetches) == (1 + 2 + 1 + 1, 1)


def rate(replay, spec, steps):
    return replay(steps, load_policy(spec), setup(1, 128, [10], top_k=8)).total.hits / (8 * len(steps))


def test_neither_pinning_nor_recency_always_wins_o18(tmp_path):
    """128 experts, top 8, 10 slots; pins learned on the first half and scored on the second. The rates expected are
    derived ones, for accesses one by one; a layer served as one event hits a little more often.
    """
    rng = np.random.default_rng(0)
    local = [rng.choice(128, 8, replace=False)]
    for _ in range(999):
        held = rng.choice(local[-1], 4, replace=False)
        local.append(np.concatenate([held, rng.choice(np.setdiff1d(np.arange(128), held), 4, replace=False)]))
    zipf = np.arange(1, 129) ** -1.2
    skewed = [rng.choice(128, 8, replace=False, p=zipf / zipf.sum()) for _ in range(1000)]
    for name, chosen, pinned, recent in (("local", local, 0.08, 0.52), ("zipf", skewed, 0.54, 0.30)):
        counts = np.bincount(np.concatenate(chosen[:500]), minlength=128).tolist()
        (tmp_path / f"{name}.json").write_text(json.dumps([counts]))
        steps = decode(*(ids.tolist() for ids in chosen[500:]))
        pin = rate(count, f"kt-frequency:frequencies={tmp_path / name}.json", steps)
        assert pin == pytest.approx(pinned, abs=0.03)
        assert rate(count_sequential, "ar-lru", steps) == pytest.approx(recent, abs=0.03)
        atomic = rate(count, "ar-lru", steps)
        assert recent - 0.03 < atomic < recent + 0.06
        assert (atomic > pin) == (recent > pinned)


def test_a_long_prompt_chooses_the_set_of_kt_dynamic():
    policy = load_policy("kt-dynamic:threshold=3")
    long = prompt([[[2, 3]], [[2, 3]], [[2, 1]]])  # 2 three times, 3 twice, 1 once
    short = prompt([[[0, 1]], [[0, 1]]])
    driver = count([*decode([2, 3]), short, long, *decode([2, 3], [0, 1])], policy, setup(1, 4, [2]))
    # Start: 0 and 1. The short prompt hits both and moves nothing. The long one keeps 2 and 3, whose copies it needed
    # anyhow; 1 hits. Then 2 and 3 hit, and 0 and 1 are the CPU's.
    assert sorted(driver.cache.resident) == [(0, 2), (0, 3)]
    assert (driver.prefill.hits, driver.prefill.fetches, driver.prefill.streams) == (3, 2, 0)
    assert (driver.decode.hits, driver.decode.cpu, driver.decode.copies) == (2, 4, 0)


def test_kt_dynamic_passes_the_rest_of_a_prompt_through():
    long = prompt([[[0, 3]], [[1, 3]], [[2, 3]], [[2, 0]]])  # 3: three, 0 and 2: two, 1: one
    driver = count([long], load_policy("kt-dynamic:threshold=4"), setup(1, 4, [2]))
    assert sorted(driver.cache.resident) == [(0, 0), (0, 3)]  # of 0 and 2 the lower id
    assert (driver.total.fetches, driver.total.streams, driver.total.evictions) == (1, 1, 1)


def best_static(routing, slots, layers, experts):
    """Most hits of any set of so many experts over all layers."""
    keys = [(layer, e) for layer in range(layers) for e in range(experts)]
    needed = [{(layer, e) for e in ids[:, layer].ravel().tolist()} for ids in routing for layer in range(layers)]
    return max(sum(len(event & set(chosen)) for event in needed) for chosen in combinations(keys, slots))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_hindsight_is_the_best_placement_there_is(seed, slots):
    routing = random_routing(np.random.default_rng(seed), 12, 2, 4, 2)
    shared = Host(load_policy("hindsight:scope=global"), Setup(2, 4, 2, 1, (2 * slots,), COSTS), routing).play().total
    own = Host(load_policy("hindsight"), Setup(2, 4, 2, 1, (slots, slots), COSTS), routing).play().total
    assert shared.hits == best_static(routing, 2 * slots, 2, 4)
    alone = [[ids[:, layer : layer + 1] for ids in routing] for layer in range(2)]
    assert own.hits == sum(best_static(one, slots, 1, 4) for one in alone)
    for spec in ("static", "kt-uniform", "kt-front", "kt-random"):
        other = Host(load_policy(spec), Setup(2, 4, 2, 1, (2 * slots,), COSTS), routing).play().total
        assert other.hits <= shared.hits
        assert other.copies == 0


def plan_of(spec, tokens, cpu=True):
    driver = Driver(load_policy(spec), Setup(1, 8, 1, 1, (2,), COSTS, cpu=cpu))
    return driver.gate(0, np.full((tokens, 1), 5))


def test_fiddler_takes_the_cheaper_side():
    # CPU: 10 + 2n us above 15 tokens; copy and GPU: 100 + 8 + max(2, 0.1n) us. 114 <= 113.2 fails first at n = 52.
    assert plan_of("fiddler", 51).cpu == (5,)
    there = plan_of("fiddler", 52)
    assert (there.copies, there.kept, there.cpu) == ((5,), frozenset(), ())
    assert plan_of("fiddler", 1, cpu=False).copies == (5,)


def test_the_release_of_fiddler_crosses_at_ten_tokens():
    assert plan_of("fiddler:release=true", 10).cpu == (5,)
    assert plan_of("fiddler:release=true", 11).copies == (5,)
    assert load_policy("fiddler:release=true").serial_tiers
    assert not load_policy("fiddler").serial_tiers


@pytest.mark.parametrize(("inserts", "hits", "cpu", "copies"), [(2, 3, 3, 3), (1, 3, 3, 2), (0, 0, 6, 0)])
def test_the_cache_that_nobody_waits_for(inserts, hits, cpu, copies):
    # Two slots. [0, 1]: both on the CPU; then both come in (2), or 0 (1). [0, 2]: 0 hits, 2 comes in, displacing 1 or
    # taking the free slot. [0, 2]: both hit.
    total = count(
        decode([0, 1], [0, 2], [0, 2]), load_policy(f"llamacpp-cache:inserts={inserts}"), setup(1, 4, [2])
    ).total
    assert (total.hits, total.cpu, total.prefetches) == (hits, cpu, copies)
    assert total.fetches == total.streams == 0


def test_the_cache_leaves_prefill_out_unless_told_otherwise():
    steps = [prompt([[[0, 1]]]), *decode([0, 1])]
    assert count(steps, load_policy("llamacpp-cache"), setup(1, 4, [2])).total.hits == 0
    assert count(steps, load_policy("llamacpp-cache:freeze_prefill=false"), setup(1, 4, [2])).total.hits == 2


def test_the_cache_brings_in_what_most_tokens_missed():
    steps = [step([[[0, 3]], [[3, 1]], [[3, 1]]])]  # 3 three times, 1 twice, 0 once
    driver = count(steps, load_policy("llamacpp-cache:inserts=2"), setup(1, 4, [3]))
    assert sorted(driver.cache.resident) == [(0, 1), (0, 3)]


def test_a_late_wish_of_the_cache_is_dropped():
    driver = Driver(load_policy("llamacpp-cache:inserts=1"), Setup(2, 4, 1, 1, (1, 1), COSTS))
    driver.step_begins(StepInfo(0, Kind.DECODE, np.zeros(1, np.int32), np.zeros(1, bool)))
    driver.gate(0, np.array([[3]]))
    driver.gate(0, np.array([[2]]))  # the link had no time for 3
    assert [driver.next_fetch(), driver.next_fetch()] == [(0, 2), None]


@pytest.mark.parametrize("spec", ["llamacpp-cache:order=lrfu,half_life=1000", "llamacpp-cache"])
def test_the_order_of_the_cache_decides_who_goes(spec):
    # 0 is used three times, then 1, then 2 needs a slot: by recency 0 goes, by frequency 1.
    driver = count(decode([0], [0], [0], [1], [2], [2]), load_policy(spec), setup(1, 4, [2], top_k=1))
    assert sorted(driver.cache.resident) == ([(0, 0), (0, 2)] if "lrfu" in spec else [(0, 1), (0, 2)])


def test_a_cache_of_all_slots_never_evicts():
    host = Host(load_policy("llamacpp-cache"), Setup(2, 4, 2, 1, (4, 4), COSTS), sets([0, 1], [2, 3], [0, 3], layers=2))
    assert host.play().total.evictions == 0
