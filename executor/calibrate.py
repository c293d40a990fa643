"""Measure this machine for one pair of models, or for a replay's experts, and write it down as a machine profile.

Everything is measured in place, by short runs on the real clock: with every expert on the fast device, on the CPU tier,
on both, copied, and with a draft in between. These runs take turns, round after round, each between two yardsticks, and
are kept as multiples of them, so that a machine whose speed drifts shows as spread and not as a difference between
tiers. An entry comes from all rounds together, and its source says least and most of a round alone. `rates_for` gives
the figures back for what was measured; for another model the profile is a guess.
Memory-bound terms are left out (bandwidths are written as practically infinite), because one size of experts does not
tell them from the fixed ones.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from ..simulator.machine import DEFAULTS, UNITS, Machine, Quantity, Rates, rates_for
from .cold import cold_and_warm
from .copies import measure_copies
from .fits import Fitted, Round, fit
from .probe import Asking, Prefetching, Probe, Seen, Subject
from .quiet import Pace

ENDLESS = 1e18  # bytes/s or FLOP/s of what is not the limit
ROUNDS = 3
YARD_NS = 100e6  # what a yardstick takes in the time in which observations are kept


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """The host-to-device link of a device that does not exist: bytes/s and ns per copy."""

    bandwidth: float = 100e6
    latency_ns: float = 20e3

    def entries(self) -> dict[str, Quantity]:
        """Of a profile."""
        return {
            "link.bandwidth": Quantity(self.bandwidth, "emulated", "--link-bandwidth"),
            "link.copy_fixed": Quantity(self.latency_ns, "emulated", "--link-latency"),
        }


def calibrate(
    subject: Subject, link: EmulatedLink | None = None, name: str = "this-machine", rounds: int = ROUNDS
) -> Machine:
    """A profile of this machine for this subject. On a CPU the link is what `link` says."""
    start = Machine(name, "", blank(subject, link or EmulatedLink()))
    pace = Pace(lambda: subject.yardstick(start), tries=1)
    yards: list[float] = []
    observed = [observe_round(subject, start, pace, yards) for _ in range(rounds)]
    made = profile(start, subject, fit(observed).scaled(fmean(yards) / YARD_NS))
    cold, warm = (ns / 1e3 for ns in cold_and_warm(subject))
    entry = made.quantities["cpu.expert_fixed"]
    said = f"{entry.source}; one token alone {cold:.3g} us from memory, {warm:.3g} us from the caches"
    return replace(made, quantities={**made.quantities, "cpu.expert_fixed": replace(entry, source=said)})


def observe_round(subject: Subject, start: Machine, pace: Pace, yards: list[float] | None = None) -> Round:
    """One round of all measurements; `start` gives the emulated link its times. `yards` gets the yardsticks (ns).

    Where there is a draft, all but the first is measured with it in between: it leaves cold caches and sleeping
    threads, as it does in use.
    """
    draft = subject.draft_shape is not None
    copy_ns = rates_for(start, subject.shape, subject.draft_shape).costs.copy_ns

    def see(probe: Callable[[], Probe], draft: bool = draft, brief: bool = False) -> list[Seen]:
        beside = pace.beside(lambda: subject.observe(probe(), start, draft=draft, brief=brief))
        if yards is not None:
            yards.append(beside.yard)
        return [replace(s, copy_ns=copy_ns).scaled(YARD_NS / beside.yard) for s in beside.found]

    return Round(
        alone=see(lambda: Probe("g"), draft=False),
        drafting=see(lambda: Probe("g")) if draft else [],
        asking=see(lambda: Asking("g")) if subject.gates else [],
        on_cpu=see(lambda: Probe("c")),
        halves=see(lambda: Probe("gc")),
        fifths=see(lambda: Probe("gcccc")),
        prefetching=see(lambda: Prefetching("gcccc")),
        layered=see(lambda: Probe("gcc", whole=True)),
        copying=see(lambda: Probe("s"), brief=True),
    )


def profile(start: Machine, subject: Subject, fitted: Fitted) -> Machine:
    """What was fitted, as entries from which `rates_for` makes the same times again."""
    found, rounds = fitted.all, fitted.rounds
    shape, draft = subject.shape, subject.draft_shape
    entries = dict(start.quantities)

    def put(entry: str, figure: str, what: str, value: float | None = None) -> None:
        scale, unit = (1.0, "") if figure == "overlap" else (1e3, " us")
        each = [getattr(one, figure) / scale for one in rounds]
        source = f"{what}: {len(rounds)} rounds, alone {min(each):.3g} to {max(each):.3g}{unit}"
        told = float(getattr(found, figure) if value is None else value)
        entries[entry] = Quantity(max(0.0, told), "measured", source)  # a fit to disturbed times may fall below nothing

    for entry, (figure, what) in PLAIN.items():
        put(entry, figure, what)
    # Of these, `rates_for` makes a time from a rate: asked with a rate of 1 a ns, it says what there is to do.
    unit = {entry: Quantity(1e9, "measured", "") for entry in RATES}
    work = rates_for(Machine("", "", entries | unit), shape)
    for entry, (figure, what) in RATES.items():
        ns = getattr(found, figure)
        put(entry, figure, what, _amount(work, figure) / ns * 1e9 if ns > 0 else ENDLESS)
    if draft is not None:
        known = rates_for(Machine("", "", entries), shape, draft).draft_token_ns
        put("gpu.draft_fixed", "draft", "a drafted token, of which so much is beside the launches of its layers",
            max(0.0, found.draft - known))  # fmt: skip
    kind = "CUDA device" if subject.device.type == "cuda" else "no GPU: slots in RAM stand for its memory"
    return Machine(start.name, f"{platform.machine()}, {os.cpu_count()} cores; {kind}; for {shape.name}", entries)


# Entries that are a figure: which, and what it is.
PLAIN = {
    "gpu.launch": ("dense_fixed", "a layer without its experts, beside what grows"),
    "gpu.first_expert": ("gpu_call", "computing experts together, beside what grows with them"),
    "gpu.expert_fixed": ("gpu_fixed", "an expert on the fast device, beside what grows with its tokens"),
    "gpu.after_draft": ("after_draft", "what a layer, or the first expert, takes longer after drafting: cold caches"),
    "gpu.ahead": ("ahead", "what a layer takes longer beside its experts where gates are asked ahead"),
    "gpu.step_fixed": ("step", "embedding, head and loop of a step"),
    "policy.layer": ("policy", "driver with a policy that decides nothing"),
    "link.landing": ("landing", "a prefetch that lands: what it costs all who compute beside it"),
    "link.arrival": ("arrival", "waiting for copies beyond their time: waking up, with cold caches"),
    "cpu.first_expert": ("cpu_first", "handing a layer to the CPU tier, which work on the fast device hides"),
    "cpu.expert_fixed": ("cpu_fixed", "an expert on the CPU tier, beside what grows with its tokens"),
    "cpu.hybrid_layer": (
        "hybrid",
        "a layer that uses the CPU tier, beyond its work: what nothing hides",
    ),
    "cpu.beside": ("beside", "a layer on both tiers, beyond what one on the CPU tier alone costs"),
    "cpu.overlap": ("overlap", "share that both tiers lose to each other while both compute"),
}
# Entries that are a rate: the figure (ns) is what there is to do, divided by it.
RATES = {
    "gpu.compute": ("gpu_token", "growth of an expert on the fast device with its tokens"),
    "gpu.dense_compute": ("dense_token", "growth of a layer without its experts with the tokens"),
    "gpu.context_bandwidth": ("dense_context", "growth of a layer with the tokens of context"),
    "cpu.compute": ("cpu_token", "growth of an expert on the CPU tier with its tokens"),
}


def _amount(work: Rates, figure: str) -> float:
    """FLOP or bytes behind a figure, from prices at a rate of one a ns."""
    return {
        "gpu_token": work.costs.gpu_token_ns,
        "dense_token": work.dense_token_ns,
        "dense_context": work.context_ns,
        "cpu_token": work.costs.cpu_token_ns,
    }[figure]


def blank(subject: Subject, link: EmulatedLink) -> dict[str, Quantity]:
    """Nothing measured yet: no cost anywhere but on the link."""
    unlimited = ("gpu.bandwidth", "gpu.compute", "host.bandwidth", "cpu.bandwidth", "cpu.compute")
    entries = {e: Quantity(ENDLESS if e in unlimited else 0.0, "assumed", "not told from fixed costs") for e in UNITS}
    entries |= {e: Quantity(value, "assumed", source) for e, (value, source) in DEFAULTS.items()}
    entries["gpu.kernels_per_layer"] = Quantity(1.0, "measured", "one unit: all of a layer but its experts")
    shape, draft = subject.shape, subject.draft_shape
    if subject.device.type == "cuda":
        return entries | measure_copies(subject)
    entries |= link.entries()
    vram = shape.dense_bytes + (draft.dense_bytes if draft else 0) + shape.all_expert_bytes // 2
    entries["gpu.vram"] = Quantity(vram, "emulated", "dense weights, the draft and half of the experts")
    return entries
