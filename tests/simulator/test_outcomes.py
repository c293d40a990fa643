"""What users reported, as outcomes that must come out (cases O17 to O34): who wins, what moves, what is said."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
from hand import Trace, rates, setup, shape, step, trace
from speculated import plain, speculated

from moe_spac.policies.driver import Driver
from moe_spac.policies.interface import Key, Policy
from moe_spac.policies.llamacpp import NCpuMoe
from moe_spac.policies.load import load_policy
from moe_spac.policies.prefill import crossing, expected_union
from moe_spac.simulator.compare import AR, SD, Job, Source, cases_for, find, loads_for, run_cases
from moe_spac.simulator.counting import count_fast
from moe_spac.simulator.engine import Engine, replay_step
from moe_spac.simulator.machine import Machine, load_machine, rates_for
from moe_spac.simulator.metrics import load_of
from moe_spac.simulator.replay import count
from moe_spac.simulator.report import lines
from moe_spac.simulator.run import simulate
from moe_spac.simulator.verdict import judge, speedup
from moe_spac.traces.batch import Batch, batched, joined, parts_of
from moe_spac.traces.errors import InputError
from moe_spac.traces.schema import Header, Kind, Provenance, Step

MACHINE = "rtx4090-pcie4"


def compared(source: Source, policies: list[str], slots: int, **more):
    modes = [SD, AR] if source.speculates else [AR]
    job = Job(source, load_machine(MACHINE), loads_for(source, modes), **more)
    return job, run_cases(job, cases_for(policies, [slots], modes))


def decode_trace(ids: np.ndarray, experts: int, layers: int = 1) -> Trace:
    """A plain trace from [T, k], the same in every layer."""
    steps = [step([[row] * layers], position) for position, row in enumerate(ids.tolist())]
    return trace(steps, experts)


# O17: always show the ceiling


@pytest.mark.parametrize("policy", ["ar-lru", "lfu", "moe-spac"])
def test_every_run_shows_the_optimum_and_the_gap_o17(policy):
    _, outcomes = compared(Source(plain(40)), [policy], 6, bounded=True)
    mine, best = find(outcomes, policy, 6, AR), find(outcomes, "min", 6, AR)
    assert mine is not None
    assert best is not None
    assert mine.metrics["gap_to_optimum"] == best.metrics["hit_rate_unique"] - mine.metrics["hit_rate_unique"]
    if policy != "moe-spac":  # which prefetches and starts full
        assert mine.metrics["gap_to_optimum"] >= 0
    assert mine.bound is not None
    assert mine.metrics["decode_wall_ns"] >= mine.bound.layered_ns


# O18: no policy is hard-wired as the winner


@dataclass
class Pinned(Policy):
    """Some experts for ever, the rest on the CPU."""

    name: ClassVar[str] = "pinned"
    pins: list[int] = field(default_factory=list)

    def placement(self):
        return [Key(0, e) for e in self.pins]

    def dispatch(self, demand, view):
        return []  # residents on the GPU, the rest falls back


def sticky(rng: np.random.Generator) -> np.ndarray:
    """2,000 tokens of top-8 of 128; each keeps 4 of the last 8 experts, the rest is uniform."""
    rows = [rng.choice(128, 8, replace=False)]
    while len(rows) < 2000:
        kept = rng.choice(rows[-1], 4, replace=False)
        others = np.setdiff1d(np.arange(128), kept)
        rows.append(np.r_[kept, rng.choice(others, 4, replace=False)])
    return np.sort(rows, axis=1)


def skewed(rng: np.random.Generator) -> np.ndarray:
    """The same size; every token draws its 8 from a Zipf law of exponent 1.2."""
    share = np.arange(1, 129) ** -1.2
    share = rng.permutation(share / share.sum())  # an id says nothing, so that ties go either way
    return np.array([np.sort(rng.choice(128, 8, replace=False, p=share)) for _ in range(2000)])


def one_by_one(ids: np.ndarray, slots: int) -> np.ndarray:
    """[T] hits of LRU when every expert is a request of its own, as in key-value caches."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = np.zeros(len(ids), np.int64)
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            hits[token] += expert in cache
            cache[expert] = None
            cache.move_to_end(expert)
            if len(cache) > slots:
                cache.popitem(last=False)
    return hits


@pytest.mark.parametrize(("make", "lru", "pin"), [(sticky, 0.52, 0.08), (skewed, 0.30, 0.54)])
def test_recency_wins_on_one_trace_and_popularity_on_another_o18(make, lru, pin):
    """The figures of LRU are those of requests one by one, which evict experts that the same event still needs. An
    event at a time, as here, LRU hits more, by 0.02 and 0.06; who wins stays the same."""
    ids = make(np.random.default_rng(18))
    assert one_by_one(ids, 10)[1000:].mean() / 8 == pytest.approx(lru, abs=0.03)
    recent = count_fast(decode_trace(ids, 128), "ar-lru", 10)
    rate = recent.hits[1000:].sum() / recent.needed[1000:].sum()
    assert lru - 0.03 < rate < lru + 0.09
    pins = np.argsort(-np.bincount(ids[:1000].reshape(-1), minlength=128), kind="stable")[:10].tolist()
    pinned = count(decode_trace(ids[1000:], 128).steps(), Pinned(pins), setup(1, 128, [10], top_k=8)).decode
    assert pinned.hits / pinned.needed == pytest.approx(pin, abs=0.03)
    assert (rate > pinned.hits / pinned.needed) == (lru > pin)


def test_the_report_prints_slots_over_top_k_o18():
    job, outcomes = compared(Source(plain(20)), ["ar-lru"], 10)
    assert outcomes[0].metrics["slots_per_layer_over_top_k"] == 2.5
    assert any("5 slots a layer (2.5x top-k): " in line for line in lines(job, "t", outcomes, 2))


# O19: the verdict


def test_the_verdict_is_the_formula_o19():
    """Cost c(m) = 10 + 4 m for m rows, a draft token 3: E(0.8, 4) c(1) / (c(5) + 4 x 3) = 3.3616 x 14 / 42."""
    assert speedup(0.8, 4, verify_ns=30, draft_ns=3, token_ns=14) == pytest.approx(3.3616 * 14 / 42)
    sd = {"verify_steps": 1, "verify_ms_mean": 42, "tokens_per_verify": 3.3616, "drafted_per_verify": 4}
    sd["tokens_per_s"] = 3361.6 / 42
    verdict = judge("p", 1, sd, {"tokens_per_s": 1000 / 14, "step_ms_mean": 14})
    assert verdict is not None
    assert verdict.speedup == pytest.approx(3.3616 * 14 / 42)
    enough = verdict.break_even_acceptance
    assert enough is not None
    assert sum(enough**i for i in range(5)) == pytest.approx(3)  # a step of 42 costs 3 plain tokens
    assert "breaks even" in verdict.words()


# O20: the union of experts in verification


UNIONS = [(8, 2, 3, 4.625), (128, 8, 2, 15.5), (128, 8, 4, 29.123), (128, 8, 8, 51.62)]


@pytest.mark.parametrize(("n", "k", "b", "union"), UNIONS)
def test_the_union_without_a_trace_o20(n, k, b, union):
    assert expected_union(n, k, b) == pytest.approx(union, rel=1e-3)


def test_the_union_of_a_trace_is_measured_o20():
    both = step([[[0, 1]], [[1, 2]]], drafted=1)
    run = simulate(trace([both], 8), load_policy("ar-lru"), load_machine(MACHINE), 8)
    assert (run.decode.needed, run.decode.copies, run.decode.assignments) == (3, 3, 4)
    # 25.7 % of the experts shared between two rows are 1.743 times the weights of one; 1.77 tokens in 1.59 times the
    # time are 1.113 times the speed.
    assert pytest.approx(1.743) == (8 - 0.257 * 4) / 4
    assert speedup(0.77, 1, verify_ns=159, draft_ns=0, token_ns=100) == pytest.approx(1.113, abs=1e-3)


# O21: prefill streams or computes


def test_long_prompts_stream_and_short_ones_do_not_o21():
    """Qwen3-30B-A3B in 4-bit on an RTX 3090 behind PCIe 4: a layer's 128 experts are 367 MB."""
    from moe_spac.simulator.sizing import find_size, format_for

    size = find_size("Qwen3-30B-A3B", "")
    rate = rates_for(load_machine("rtx3090-pcie4-ddr4"), size.shape(format_for("q4_k_m", size)))
    at = crossing(128, 8, rate.costs)
    assert at is not None
    assert 64 < at <= 2048
    copied = 48 * 128 * rate.costs.copy_bytes_ns / 1e9
    assert copied == pytest.approx(0.73, rel=0.05)


# O22 and O23 stand in test_engine.py: they need no more than hand-made costs. O24 stands in test_lanes.py.


# O25: pinned and pageable memory


def pinned_and_pageable() -> tuple[Machine, Machine]:
    machine = load_machine(MACHINE)
    pageable = dict(machine.quantities)
    pageable["host.pin_limit"] = replace(pageable["host.pin_limit"], value=1.0)  # not one expert
    return machine, replace(machine, quantities=pageable)


def test_a_pageable_copy_is_three_times_slower_and_nothing_overlaps_it_o25():
    """An expert of 864 KiB: pinned 27.3 + 2.8 us and pageable 92.3 + 76.2 us were measured (imp#1409)."""
    size = 864 * 1024
    header = Header(replace(shape(10, 4, 1), expert_bytes=size), Provenance.SYNTHETIC, "by hand")
    both = [rates_for(machine, header.target) for machine in pinned_and_pageable()]
    fast, slow = (r.costs for r in both)
    assert slow.copy_ns >= 3 * fast.copy_ns or slow.copy_ns >= 92_000
    assert slow.copy_fixed_ns > fast.copy_fixed_ns > 0
    assert slow.copy_bytes_ns > fast.copy_bytes_ns > 0


class Ahead(Policy):
    """Prefetches expert 0 of every layer, in layer order."""

    name: ClassVar[str] = "ahead"
    scope = "global"

    def setup(self, setup):
        self.layers = setup.layers

    def next_fetch(self, view):
        keys = (Key(layer, 0) for layer in range(self.layers))
        return next((k for k in keys if not view.resident(k) and not view.in_flight(k)), None)


@pytest.mark.parametrize(("pinned", "ms"), [(-1, 43), (0, 70)])
def test_pageable_copies_do_not_overlap_o25(pinned, ms):
    """10 layers, copy 4 ms, compute 3 ms: 43 ms with pinned memory (O23), one after the other without."""
    steps = [step([[[0]] * 10])]
    times = replace(rates(copy=4 * 10**6, gpu=3 * 10**6), pinned_experts=pinned, pageable_bytes_ns=4 * 10**6)
    engine = Engine(Driver(Ahead(), setup(10, 8, [80], times.costs)), times)
    replay_step(engine, 0, steps[0])
    assert engine.now == ms * 10**6


# O26: the static split


def test_the_static_split_is_linear_in_its_layers_o26():
    """48 layers, one expert each: a CPU layer costs 7, a GPU layer 2, the step 11."""
    one = step([[[0]] * 48])
    walls = []
    for n in range(0, 49, 6):
        times = rates(gpu=2, cpu=7, step_ns=11)
        told = setup(48, 4, [4 * 48], times.costs, top_k=1)
        engine = Engine(Driver(NCpuMoe(n=n), told), times)
        replay_step(engine, 0, one)
        walls.append(engine.now)
    assert walls == [n * 7 + (48 - n) * 2 + 11 for n in range(0, 49, 6)]
    assert walls == sorted(walls)


# O33: prefill must not wipe the decode set


def chunk(*experts: int) -> Step:
    """64 prompt tokens that take turns at these experts."""
    n = len(experts)
    routing = [[[experts[i % n], experts[(i + 1) % n]]] for i in range(64)]
    return replace(step(routing), kind=Kind.PREFILL)


def answer(*pair: int) -> list[Step]:
    return [step([[list(pair)]], 64 + i) for i in range(10)]


def protected(steps: list[Step]):
    """Metrics of AR-LRU with 3 slots in one layer of 8 experts, without and with the option."""
    found = []
    for protect in (False, True):
        _, outcomes = compared(Source(trace(steps, 8)), ["ar-lru"], 3, protect=protect)
        found.append(outcomes[0].metrics)
    return found


def test_protect_decode_changes_only_decode_o33():
    free, kept = protected([chunk(*range(8)), *answer(0, 1)])
    prefill = {name for name in free if name.startswith("prefill_")}
    assert {"prefill_hit_rate_unique", "prefill_h2d_bytes", "prefill_wall_ns"} <= prefill
    assert {n: free[n] for n in prefill} == {n: kept[n] for n in prefill}
    assert kept["prefill_h2d_bytes"] == 8 * 1000  # each expert once, though 16 tokens chose it
    assert (free["hit_rate_unique"], kept["hit_rate_unique"]) == (1, 0.9)  # the prompt warmed the cache, or did not


def test_a_second_prompt_does_not_wipe_a_protected_cache_o33():
    prompt = [chunk(*range(8)), chunk(*range(6))]
    free, kept = protected([*prompt, *answer(6, 7), *prompt, *answer(6, 7)])
    assert free["hit_rate_unique"] == 36 / 40  # both experts miss after either prompt
    assert kept["hit_rate_unique"] == 38 / 40  # only at the first token ever
    assert kept["prefill_hit_rate_unique"] == 2 / 28  # they outlive the first answer
    assert kept["prefill_h2d_bytes"] == 26 * 1000


# O34: two sequences at once


def two_sequences(turns: int = 4) -> Trace:
    made = []
    for sequence, experts in enumerate(([0, 1], [1, 2])):
        made += [replace(step([[experts]], i), sequence=sequence) for i in range(turns)]
    return trace(made, 4)


def test_two_sequences_share_what_both_need_o34():
    together = batched(two_sequences(), 2)
    steps = list(together.steps())
    assert [(len(s), s.emitted, [p.sequence for p in parts_of(s)]) for s in steps] == [(2, 2, [0, 1])] * 4
    load = load_of(together)
    assert load.unions == (0, 0, 0, 4, 0)  # 3 experts a step
    run = simulate(together, load_policy("ar-lru"), load_machine(MACHINE), 2)  # slots for none of the unions
    assert run.decode.needed == 3 * 4
    assert (run.decode.events, run.decode.assignments) == (4, 16)


def test_speed_for_all_and_for_each_o34():
    job, outcomes = compared(Source(two_sequences(), batch=2), ["ar-lru"], 4)
    alone = compared(Source(two_sequences()), ["ar-lru"], 4)[1][0].metrics
    m = outcomes[0].metrics
    assert m["tokens"] == alone["tokens"] == 8
    assert m["tokens_per_s_per_sequence"] == pytest.approx(m["tokens_per_s"] / 2)
    assert alone["tokens_per_s_per_sequence"] == alone["tokens_per_s"]
    said = "\n".join(lines(job, "t", outcomes, 1))
    assert f"up to 2 sequences at once: {m['tokens_per_s_per_sequence']:.1f} tokens/s for each" in said


def test_a_batch_keeps_every_sequence_s_own_fate_o34():
    first = step([[[0, 1]], [[2, 3]], [[0, 2]]], 5, drafted=2, accepted=1)
    second = replace(step([[[1, 2]], [[1, 3]]], 9, drafted=1, accepted=0), sequence=1)
    both = joined([first, second])
    assert isinstance(both, Batch)
    assert (both.emitted, both.accepted, both.context) == (3, 1, 14)
    assert both.kept.tolist() == [True, True, False, True, False]
    assert both.drafted.tolist() == [False, True, True, False, True]
    assert joined([first]) is first


def test_sequences_of_unlike_length_leave_the_batch_o34():
    trace_of = two_sequences(3)
    longer = Trace(trace_of.header, [*trace_of.listed, replace(step([[[0, 3]]], 3), sequence=1)])
    assert [len(s) for s in batched(longer, 2).steps()] == [2, 2, 2, 1]
    assert [len(s) for s in batched(longer, 1).steps()] == [1] * 7
    with pytest.raises(InputError, match="at least 1"):
        batched(longer, 0)


def test_speculation_in_a_batch_o34():
    """Two sequences of the same speculative text: acceptance and text are those of one."""
    one = speculated(6)
    again = [replace(s, sequence=1) for s in one.listed]
    both = Trace(one.header, [*one.listed, *again])
    _, single = compared(Source(one), ["ar-lru"], 8)
    _, double = compared(Source(both, batch=2), ["ar-lru"], 8)
    for a, b in zip(single, double, strict=True):
        assert b.metrics["tokens"] == 2 * a.metrics["tokens"]
        assert b.metrics["decode_steps"] == a.metrics["decode_steps"]
        assert b.metrics["acceptance_rate"] == a.metrics["acceptance_rate"]
        assert b.metrics["hit_rate_unique"] == pytest.approx(a.metrics["hit_rate_unique"], abs=0.1)
