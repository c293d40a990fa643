"""What would help most, and how sure is it: the winner of a folder simulated again with one thing changed.

Everything runs over the same first steps of the trace, so that gains are compared with like; a gain is what the change
alone brings. Doubling is the yardstick: one PCIe generation doubles the link, DDR4 to DDR5 nearly doubles RAM.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..traces.errors import InputError
from ..traces.reader import open_trace
from ..traces.schema import DraftShape
from .compare import AR, Case, Job, Source, loads_of, run_case
from .machine import Machine
from .ranges import HIGH, LOW, calibrated
from .report import sha256
from .results import Row, Slice, best_of
from .sizing import find_size

STEPS = 150  # of the trace that every re-simulation takes
FACTOR = 2
UPGRADES = {
    "a link of twice the speed": ("link.bandwidth", "link.d2h_bandwidth", "link.pageable_bandwidth"),
    "RAM of twice the speed": ("host.bandwidth", "cpu.bandwidth"),
    "a GPU of twice the speed": ("gpu.bandwidth", "gpu.compute"),
}
BASE, CACHE = ("base", ""), ("cache", "")
OTHERS = ("ar-lru", "hybrimoe", "moe-spac", "static", "dali", "freetoken", "llamacpp-cache", "fiddler")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing changed: its name, what it means here in words, and the winner's tokens/s with it."""

    name: str
    words: str
    tokens_per_s: float
    gain: float  # share by which it is faster than without


@dataclass(frozen=True, slots=True)
class Range:
    """A policy's tokens/s with every assumed entry of the machine at its slow end, as assumed, and at its fast end."""

    policy: str
    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """base: tokens/s of the winner over the first `steps` steps; `changes`: best first; `ranges`: winner, runner-up."""

    base: float
    steps: int
    changes: list[Change]
    ranges: list[Range]


def fits(row: Row, machine: Machine) -> bool:
    """Whether a run needs no more than the card has; an emulated card is as large as it has to be."""
    card = machine.quantities["gpu.vram"]
    return card.basis == "emulated" or (row.get("vram_bytes") or 0) <= card.value


def chosen(part: Slice) -> Row | None:
    """The fastest run that may be ranked and fits the card; of all that may be ranked if none fits."""
    return best_of([r for r in part.rows if fits(r, part.machine)]) or part.best()


def runner_up(part: Slice, best: Row) -> Row | None:
    """The fastest of another policy at the same cache size."""
    return best_of([r for r in part.rows if r["size"] == best["size"] and r["policy"] != best["policy"]])


def what_if(folder: Path, part: Slice, best: Row, tell: Callable[[int], None] | None = None) -> WhatIf:
    """Simulate the winner again under every change. `tell` hears how many per cent are done.

    InputError if the trace or a policy's file is not where the command of the folder found it, or has changed.
    """
    job, second = _job(folder, part, best), runner_up(part, best)
    runs = _runs(part, best, second)
    speeds: dict[tuple[str, str], float] = {}
    for key, (machine, policy, slots) in runs.items():
        speeds[key] = _simulated(job, machine, best, policy, slots)
        if tell:
            tell(100 * len(speeds) // len(runs))
    base, slots = speeds[BASE], runs[CACHE][2]
    found = [_more_slots(part, best, slots, speeds[CACHE], base)] if slots > best["slots"] else []
    found += [_upgrade(name, part.machine, speeds["machine", name], base) for name in UPGRADES]
    tried = {policy: tokens_per_s for (what, policy), tokens_per_s in speeds.items() if what == "policy"}
    found += [_best_other(tried, base)] if tried else []
    middles = {best["policy"]: base} | ({second["policy"]: tried[second["policy"]]} if second else {})
    ranges = [Range(p, speeds["slow", p], middle, speeds["fast", p]) for p, middle in middles.items()]
    return WhatIf(base, job.source.limit, sorted(found, key=lambda c: -c.gain), ranges)


def _runs(part: Slice, best: Row, second: Row | None) -> dict[tuple[str, str], tuple[Machine, str, int]]:
    """Machine, policy and slots of every run to do, by what it is for."""
    machine, mine, slots = part.machine, best["policy"], best["slots"]
    rivals = [second["policy"]] if second else []
    profile = calibrated(machine)
    ends = {"slow": profile.at(LOW), "fast": profile.at(HIGH)}
    return {
        BASE: (machine, mine, slots),
        CACHE: (machine, mine, min(slots * FACTOR, part.layers * part.header.target.experts)),
        **{("machine", name): (_faster(machine, entries), mine, slots) for name, entries in UPGRADES.items()},
        **{("policy", p): (machine, p, slots) for p in (*OTHERS, *rivals) if p in rivals or p not in part.policies},
        **{(end, p): (there, p, slots) for end, there in ends.items() for p in (mine, *rivals)},
    }


def _simulated(job: Job, machine: Machine, like: Row, policy: str, slots: int) -> float:
    """Tokens/s of one run; 0 if it failed."""
    source, length = job.source, None
    if source.window and like["mode"] != AR:
        source = replace(source, window=like["draft_length"])
    elif like["cut"]:
        length = like["draft_length"]
    case = Case(policy, slots, like["mode"], length)
    outcome = run_case(replace(job, source=source, machine=machine, loads=loads_of(source, [case])), case)
    return float(outcome.metrics.get("tokens_per_s") or 0.0)


def _faster(machine: Machine, entries: Sequence[str]) -> Machine:
    faster = {e: replace(machine.quantities[e], value=machine[e] * FACTOR) for e in entries}
    return replace(machine, quantities={**machine.quantities, **faster})


def _gain(tokens_per_s: float, base: float) -> float:
    return tokens_per_s / base - 1 if base else 0.0


def _more_slots(part: Slice, best: Row, slots: int, tokens_per_s: float, base: float) -> Change:
    more = (slots - best["slots"]) * part.header.target.expert_bytes / 2**30
    words = f"{best['slots'] / part.layers:.3g} to {slots / part.layers:.3g} slots a layer, {more:.1f} GiB of VRAM more"
    name = "twice the expert cache" if slots == FACTOR * best["slots"] else "all experts on the GPU"
    return Change(name, words, tokens_per_s, _gain(tokens_per_s, base))


def _upgrade(name: str, machine: Machine, tokens_per_s: float, base: float) -> Change:
    entry = UPGRADES[name][0]
    words = f"{machine[entry] / 1e9:.3g} to {FACTOR * machine[entry] / 1e9:.3g} GB/s"
    return Change(name, words, tokens_per_s, _gain(tokens_per_s, base))


def _best_other(tried: dict[str, float], base: float) -> Change:
    name = max(tried, key=lambda p: tried[p])
    words = f"{name}, the fastest of {len(tried)} others tried"
    return Change("another policy", words, tried[name], _gain(tried[name], base))


# Finding the trace again


def _job(folder: Path, part: Slice, best: Row) -> Job:
    if "--kv-grows" in shlex.split(part.command):
        raise InputError(f"{folder}: a cache that shrinks as the text grows (--kv-grows) is not simulated again")
    if (folder / "run.json").is_file():
        run = json.loads((folder / "run.json").read_text())
        taken, seed, protect = run["trace"]["taken"], run["seed"], run["protect_decode"]
        draft = DraftShape(**taken["draft"]) if taken["draft"] else None
        given, digest = shlex.split(part.command)[2], run["trace"]["sha256"]
        limit, window, chance, batch = (taken[n] for n in ("limit", "window", "acceptance", "batch"))
    else:
        given, digest, limit, seed = (best[n] for n in ("trace", "trace_sha256", "limit_steps", "seed"))
        batch, protect, assumed = 1, False, best["draft"].startswith("assumed")
        window = best["draft_length"] if assumed else 0
        chance = float(_option(part.command, "--acceptance") or 0) if assumed else 0.0
        name = _option(part.command, "--draft")
        draft = find_size(name, "--draft").as_draft() if name and assumed else None
    trace = open_trace(given)
    if sha256(trace.path) != digest:
        raise InputError(f"{given}: not the trace of {folder}, it has changed since")
    source = Source(trace, min(limit or STEPS, STEPS), window, chance, seed, draft, batch)
    return Job(source, part.machine, {}, seed, protect)


def _option(command: str, flag: str) -> str | None:
    words = shlex.split(command)
    return words[words.index(flag) + 1] if flag in words else None


def lead_holds(ranges: Sequence[Range]) -> bool | None:
    """Whether the winner stays ahead of the runner-up at both ends of what is assumed; None if it has no rival."""
    if len(ranges) < 2:
        return None
    first, second = ranges
    return first.low >= second.low and first.high >= second.high
