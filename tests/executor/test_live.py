"""Live runs: the tokens are transformers' own, and the simulator replaying the trace decides the same."""

import signal
import threading
import time
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import pytest

from moe_spac.executor.device import PoolError
from moe_spac.executor.session import Clock, Settings, run
from moe_spac.executor.times import StepTimes
from moe_spac.policies.interface import Policy, Where
from moe_spac.policies.load import OWN, load_policy
from moe_spac.simulator.run import simulate
from moe_spac.traces.errors import InputError
from moe_spac.traces.reader import open_trace
from moe_spac.traces.schema import Kind, Provenance
from moe_spac.traces.speculate import Options

LIVE = sorted(cls.name for cls in OWN if cls.lossless and not cls.clairvoyant)
MAIN = ("ar-lru", "hybrimoe", "hybrimoe-release", "moe-spac", "moe-spac-release", "static")
NONE, TOP_K, SOME, ALL = 0, 4, 10, 16  # slots over 2 layers of 8 experts, top-2
NEW_TOKENS = 12
DRAFTS = ("own", "tiny", "none")


def options_for(length: int = 4) -> Options:
    return Options(max_new_tokens=NEW_TOKENS, draft_length=length)


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("spac-")]


def cases() -> list:
    """The main policies with every cache size, the others with one each. Drafts and draft lengths 1..8 take turns so
    that each size meets each."""
    sizes = (NONE, TOP_K, SOME, ALL)
    others = [(policy, sizes[number % 4]) for number, policy in enumerate(p for p in LIVE if p not in MAIN)]
    found = []
    for number, (policy, slots) in enumerate([*product(MAIN, sizes), *others]):
        for draft in DRAFTS if policy == "moe-spac" else (DRAFTS[(number + number // 4) % 3],):
            name = f"{policy}-{slots}-{draft}-{number % 8 + 1}"
            found.append(pytest.param(policy, slots, draft, number % 8 + 1, id=name))
    return found


@pytest.mark.parametrize(("policy", "slots", "draft", "length"), cases())
def test_virtual_run_writes_greedy_tokens_and_replays_exactly(
    policy, slots, draft, length, load_live, live_prompts, live_machine, greedy_texts, tmp_path
):
    models, trace = load_live(draft), tmp_path / "run.spac"
    settings = Settings(live_machine, slots, "virtual", options_for(length), record=trace)
    result = run(models, load_policy(policy), live_prompts, settings)
    assert result.texts == greedy_texts
    verify_rows = {len(s) for s in open_trace(trace).steps() if s.kind is Kind.VERIFY}
    assert (max(verify_rows) == length + 1) if draft != "none" else not verify_rows
    record: list = []
    replayed = simulate(open_trace(trace), load_policy(policy), live_machine, slots, record=record)
    assert replayed.error is None
    assert (replayed.prefill, replayed.decode) == (result.prefill, result.decode)
    assert record == result.decisions
    assert list(replayed.steps) == list(result.times)


@pytest.mark.parametrize("length", range(1, 9))
def test_verify_batches_of_2_to_9_rows(length, load_live, live_prompts, live_machine, greedy_texts):
    settings = Settings(live_machine, SOME, "virtual", options_for(length))
    assert run(load_live("own"), load_policy("ar-lru"), live_prompts, settings).texts == greedy_texts


REAL = (*MAIN, "llamacpp-cache", "fiddler", "lfru")


@pytest.mark.parametrize(("policy", "slots"), [*product(REAL, (SOME,)), ("ar-lru", NONE), ("hybrimoe", TOP_K)])
def test_real_run_writes_greedy_tokens_and_counts_add_up(
    policy, slots, load_live, live_prompts, live_machine, greedy_texts
):
    settings = Settings(live_machine, slots, "real", options_for())
    result = run(load_live("own"), load_policy(policy), live_prompts, settings)
    assert result.texts == greedy_texts
    assert our_threads() == []
    for count in (result.prefill, result.decode):  # none of these policies sends a resident expert to the CPU
        assert count.needed == count.hits + count.joins + count.fetches + count.streams + count.cpu
        assert count.insertions <= count.fetches
    for step in result.times:
        assert isinstance(step, StepTimes)
        assert sum(step.split().values()) == step.wall_ns
        assert all(layer.policy >= 0 for layer in step.layers)
    assert result.tokens_per_s > 0


def test_real_and_virtual_clock_decide_the_same_without_prefetching(load_live, live_prompts, live_machine):
    """LRU asks for nothing ahead, so time cannot change what it does."""
    results = [
        run(load_live("own"), load_policy("ar-lru"), live_prompts, Settings(live_machine, SOME, clock, options_for()))
        for clock in ("real", "virtual")
    ]
    assert results[0].decisions == results[1].decisions


def test_sampling_is_the_same_under_every_policy_and_clock(load_live, live_prompts, live_machine):
    options = Options(max_new_tokens=12, draft_length=3, temperature=0.8, seed=5)
    runs: list[tuple[str, int, Clock]] = [
        ("ar-lru", NONE, "virtual"),
        ("moe-spac", SOME, "real"),
        ("static", ALL, "real"),
    ]
    texts = [
        run(
            load_live("tiny"), load_policy(policy), live_prompts[:1], Settings(live_machine, slots, clock, options)
        ).texts
        for policy, slots, clock in runs
    ]
    assert texts[0] == texts[1] == texts[2]


def test_recorded_header_tells_the_run(load_live, live_prompts, live_machine, tmp_path):
    trace = tmp_path / "run.spac"
    run(
        load_live("tiny"), load_policy("hybrimoe"), live_prompts,
        Settings(live_machine, SOME, "real", options_for(3), record=trace), source="a test",
    )  # fmt: skip
    opened = open_trace(trace, strict=True)
    header = opened.header
    assert (header.provenance, header.source, header.draft_length, header.lookahead) == (
        Provenance.RECORDED,
        "a test",
        3,
        3,
    )
    assert [s["name"] for s in header.sequences] == ["p0", "p1"]
    assert {s.sequence for s in opened.steps()} == {0, 1}


def test_recorder_and_live_run_write_the_same_routing(
    tiny_target, tiny_draft, load_live, live_prompts, live_machine, tmp_path
):
    from moe_spac.traces.models import load_pair
    from moe_spac.traces.recorder import record

    ours, theirs = tmp_path / "ours.spac", tmp_path / "theirs.spac"
    run(
        load_live("tiny"), load_policy("hybrimoe"), live_prompts,
        Settings(live_machine, SOME, "virtual", options_for(3), record=ours),
    )  # fmt: skip
    record(load_pair(tiny_target, tiny_draft), live_prompts, theirs, options_for(3), lookahead=3)
    for a, b in zip(open_trace(ours).steps(), open_trace(theirs).steps(), strict=True):
        assert (a.kind, a.accepted, a.tokens.tolist()) == (b.kind, b.accepted, b.tokens.tolist())
        assert a.experts.tolist() == b.experts.tolist()
        assert a.ahead.tolist() == b.ahead.tolist()  # pyright: ignore[reportOptionalMemberAccess]


@dataclass
class Failing(Policy):
    """Prefetches something that is not there, which is noticed in the link's thread or in the caller's."""

    name: ClassVar[str] = "failing"
    after: int = 6

    def setup(self, setup):
        self._asked = 0

    def next_fetch(self, view):
        self._asked += 1
        if self._asked > self.after:
            raise RuntimeError("no idea")
        return


@pytest.mark.parametrize("clock", ["real", "virtual"])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_failing_policy_is_named_and_nothing_hangs(after, clock, load_live, live_prompts, live_machine):
    with pytest.raises(InputError, match=r"policy failing, step \d+.*no idea"):
        run(load_live("own"), Failing(after), live_prompts, Settings(live_machine, SOME, clock, options_for()))
    assert our_threads() == []


@dataclass
class OnCpu(Policy):
    name: ClassVar[str] = "on-cpu"

    def dispatch(self, demand, view):
        return [(e, Where.CPU) for e in demand.experts]


def test_an_error_in_the_cpu_tier_reaches_the_caller(load_live, live_prompts, live_machine, monkeypatch):
    from moe_spac.executor.moe import Call

    def broken(self, experts, store, threads=1):
        raise MemoryError("the kernels need more")

    monkeypatch.setattr(Call, "compute_on_host", broken)
    with pytest.raises(PoolError, match=r"keys, values and activations: .* free; lower --slots"):
        run(load_live("none"), OnCpu(), live_prompts, Settings(live_machine, SOME, "real", options_for()))
    assert our_threads() == []


def test_interrupt_ends_the_run_at_once(load_live, live_prompts, live_machine, tmp_path):
    """Ctrl-C while the link is in the middle of a copy of ten seconds."""
    from moe_spac.simulator.machine import Machine, Quantity

    slow = Machine("slow", "", {**live_machine.quantities, "link.bandwidth": Quantity(2e3, "emulated", "test")})
    trace = tmp_path / "run.spac"
    settings, sent = Settings(slow, SOME, "real", options_for(), record=trace), []
    main = threading.get_ident()

    def interrupt(policy, demand, view):
        def send():
            sent.append(time.monotonic())
            signal.pthread_kill(main, signal.SIGINT)

        threading.Timer(0.3, send).start()
        return Where.FETCH

    with pytest.raises(KeyboardInterrupt):
        run(load_live("none"), type("Stopped", (OnCpu,), {"dispatch": interrupt})(), live_prompts, settings)
    assert time.monotonic() - sent[0] < 2
    assert our_threads() == []
    assert open_trace(trace).summary().state == "interrupted"


def test_what_cannot_run_live_is_refused(load_live, live_prompts, live_machine):
    models = load_live("none")
    with pytest.raises(InputError, match=r"min.*future"):
        run(models, load_policy("min"), live_prompts, Settings(live_machine, SOME, options=options_for()))
    with pytest.raises(InputError, match="top-k"):
        run(models, load_policy("ar-lru"), live_prompts, Settings(live_machine, TOP_K - 1, options=options_for()))
    with pytest.raises(InputError, match="budget"):
        run(
            models,
            load_policy("ar-lru"),
            live_prompts,
            Settings(live_machine, SOME, options=options_for(), budget=1000),
        )
    assert our_threads() == []
