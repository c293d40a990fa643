"""A profile for a card that nobody measured: the figures on its box, and the share of such that others achieved."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..traces.errors import InputError
from .machine import RATE, Machine, Quantity, load_machine, read_quantity
from .ranges import Profile, Spread, calibrated

HOST = "rtx4090-pcie4"  # the preset that lends the entries which no box states
MEASURE = "spac-exec calibrate -o mine.toml; then use --machine mine.toml"
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # raw bytes/s of one PCIe lane


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a box's figure is achieved: as a rule, at worst, at best; `why` names the evidence."""

    usual: float
    worst: float
    best: float
    why: str


@dataclass(frozen=True, slots=True)
class Figure:
    """What a flag states, and what stands in for it where it is not given: a middle, a low and a high value."""

    flag: str
    share: Share
    unknown: tuple[float, float, float]
    guess: str


GPU = Figure(
    "--gpu-bandwidth",
    Share(0.78, 0.63, 0.91, "0.63 in decoding (homelab file, two cards) to 0.91 in a device copy (clpeak#106)"),
    (504e9, 256e9, 1792e9),
    "cards with presets: 256 to 1,792 GB/s",
)
LINK = Figure(
    "--link",
    Share(0.8, 0.75, 0.85, "pinned: 0.76 to 0.84 of gen4 x16 (nvbandwidth#15); rule of 0.85 (club-3090#1098)"),
    (16 * LANE[4], 16 * LANE[3], 16 * LANE[5]),
    "gen3 x16 to gen5 x16",
)
RAM = Figure(
    "--ram-bandwidth",
    Share(0.75, 0.64, 0.9, "read: 62 of 96 GB/s (one-CCD DDR5-6000) to 46 of 51.2 (DDR4-3200, guru3d)"),
    (76.8e9, 42.7e9, 96e9),
    "dual-channel DDR4-2666 to DDR5-6000",
)
COMPUTE = Share(80.0, 40.0, 160.0, "FLOP for each byte/s: 40 to 100 on cards with presets, half of their bf16 peak")
CPU = Share(0.8, 0.75, 0.85, "expert GEMV against stream on three hosts (FreeToken#281, homelab file)")
BOTH = Share(
    0.875, 0.81, 0.95, "CPU experts and copies together against stream on four hosts (FreeToken#232, #281, #436, #444)"
)


@dataclass(frozen=True, slots=True)
class Box:
    """What a user says of a card and its host; None: not said. `vram` in bytes."""

    vram: int | None = None
    gpu_bandwidth: str | None = None
    link: str | None = None
    ram_bandwidth: str | None = None


@dataclass(frozen=True, slots=True)
class Guess:
    """An entry's value, how far it may be off (slow, fast), and why."""

    value: float
    spread: Spread
    source: str


ANY_CPU = Guess(400e9, (0.5, 2.0), "200 to 800 GFLOP/s: desktop CPUs of 6 to 16 cores")


def uncalibrated(name: str, box: Box) -> Profile:
    """A profile of a card by that name whose every entry is assumed; `box.vram` must be said.

    InputError for a figure that cannot be read.
    """
    lent = load_machine(HOST)
    quantities = {
        entry: replace(q, basis="assumed", source=f"as on {lent.name}: {q.source}")
        for entry, q in lent.quantities.items()
    }
    quantities["gpu.vram"] = Quantity(float(box.vram or 0), "spec", "--vram")
    machine = Machine(name, "uncalibrated: nobody measured this card", quantities)
    gpu, link, ram = _rate(GPU.flag, box.gpu_bandwidth), _link(box.link), _rate(RAM.flag, box.ram_bandwidth)
    guesses = {**_card(gpu), **_copies(link), **_host(ram), "cpu.compute": ANY_CPU}
    return replace(_guessed(calibrated(machine), guesses), calibrated=False)


def adapted(machine: Machine, box: Box) -> Profile:
    """A preset with another card's, link's or host's figures where the box states them; these are assumed."""
    guesses: dict[str, Guess] = {}
    if (gpu := _rate(GPU.flag, box.gpu_bandwidth)) is not None:
        guesses |= _card(gpu)
    if (link := _link(box.link)) is not None:
        guesses |= _copies(link)
    if (ram := _rate(RAM.flag, box.ram_bandwidth)) is not None:
        guesses |= _host(ram)
    return _guessed(calibrated(machine), guesses)


def _guessed(profile: Profile, guesses: Mapping[str, Guess]) -> Profile:
    found = {entry: Quantity(g.value, "assumed", g.source) for entry, g in guesses.items()}
    machine = replace(profile.machine, quantities={**profile.machine.quantities, **found})
    return replace(profile, machine=machine, spread={**profile.spread, **{e: g.spread for e, g in guesses.items()}})


def _card(stated: float | None) -> dict[str, Guess]:
    bandwidth = _achieved(GPU, stated)
    return {"gpu.bandwidth": bandwidth, "gpu.compute": _of(bandwidth, COMPUTE)}


def _copies(stated: float | None) -> dict[str, Guess]:
    return {"link.bandwidth": _achieved(LINK, stated)}


def _host(stated: float | None) -> dict[str, Guess]:
    stream = _achieved(RAM, stated)
    return {"host.bandwidth": _of(stream, BOTH), "cpu.bandwidth": _of(stream, CPU)}


def missing(box: Box) -> list[str]:
    """Flags that would narrow the range."""
    given: Sequence[tuple[str, str | None]] = (
        (GPU.flag, box.gpu_bandwidth),
        (LINK.flag, box.link),
        (RAM.flag, box.ram_bandwidth),
    )
    return [flag for flag, text in given if text is None]


def _achieved(figure: Figure, stated: float | None) -> Guess:
    share = figure.share
    middle, low, high = figure.unknown if stated is None else (stated, stated, stated)
    value = middle * share.usual
    said = f"{figure.flag} not given, {figure.guess}" if stated is None else f"{figure.flag} {stated / 1e9:g} GB/s"
    spread = low * share.worst / value, high * share.best / value
    return Guess(value, spread, f"{said}; {share.worst:g} to {share.best:g} of it is achieved: {share.why}")


def _of(base: Guess, share: Share) -> Guess:
    slow, fast = base.spread
    spread = slow * share.worst / share.usual, fast * share.best / share.usual
    words = f"{share.worst:g} to {share.best:g} of the bandwidth: {share.why}; {base.source}"
    return Guess(base.value * share.usual, spread, words)


def _rate(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    value = read_quantity(text, RATE)
    if not value:
        raise InputError(f'{flag} {text}: not a rate; write for example "504GB/s"')
    return value


def _link(text: str | None) -> float | None:
    """ "gen4 x16" or a rate, both as on the box: before protocol overhead."""
    match = re.fullmatch(r"\s*(?:pcie\s*)?(?:gen\s*)?([1-6])(?:\.0)?\s*x\s*(1|2|4|8|16)\s*", text or "", re.IGNORECASE)
    if match:
        return LANE[int(match[1])] * int(match[2])
    try:
        return _rate(LINK.flag, text)
    except InputError:
        raise InputError(f'{LINK.flag} {text}: not a link; write for example "gen4 x16" or "32GB/s"') from None
