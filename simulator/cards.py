"""A profile for a card that nobody measured: the figures on its box, and the share of such that others achieved."""

import re
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Box:
    """What a user says of a card and its host; None: not said. `vram` in bytes."""

    vram: int
    gpu_bandwidth: str | None = None
    link: str | None = None
    ram_bandwidth: str | None = None


@dataclass(frozen=True, slots=True)
class _Guess:
    value: float
    spread: Spread
    source: str


def uncalibrated(name: str, box: Box) -> Profile:
    """A profile of a card by that name whose every entry is assumed. InputError for a figure that cannot be read."""
    gpu = _achieved(GPU, _rate(GPU.flag, box.gpu_bandwidth))
    ram = _achieved(RAM, _rate(RAM.flag, box.ram_bandwidth))
    guesses = {
        "gpu.bandwidth": gpu,
        "gpu.compute": _of(gpu, COMPUTE),
        "link.bandwidth": _achieved(LINK, _link(box.link)),
        "host.bandwidth": ram,
        "cpu.bandwidth": _of(ram, CPU),
        "cpu.compute": _Guess(400e9, (0.5, 2.0), "200 to 800 GFLOP/s: desktop CPUs of 6 to 16 cores"),
    }
    lent = load_machine(HOST)
    quantities = {
        entry: replace(q, basis="assumed", source=f"as on {lent.name}: {q.source}")
        for entry, q in lent.quantities.items()
    }
    quantities |= {entry: Quantity(g.value, "assumed", g.source) for entry, g in guesses.items()}
    quantities["gpu.vram"] = Quantity(float(box.vram), "spec", "--vram")
    machine = Machine(name, "uncalibrated: nobody measured this card", quantities)
    spread = {**calibrated(machine).spread, **{entry: g.spread for entry, g in guesses.items()}}
    return Profile(machine, False, spread)


def missing(box: Box) -> list[str]:
    """Flags that would narrow the range."""
    given: Sequence[tuple[str, str | None]] = (
        (GPU.flag, box.gpu_bandwidth),
        (LINK.flag, box.link),
        (RAM.flag, box.ram_bandwidth),
    )
    return [flag for flag, text in given if text is None]


def _achieved(figure: Figure, stated: float | None) -> _Guess:
    share = figure.share
    middle, low, high = figure.unknown if stated is None else (stated, stated, stated)
    value = middle * share.usual
    said = f"{figure.flag} not given, {figure.guess}" if stated is None else f"{figure.flag} {stated / 1e9:g} GB/s"
    spread = low * share.worst / value, high * share.best / value
    return _Guess(value, spread, f"{said}; {share.worst:g} to {share.best:g} of it is achieved: {share.why}")


def _of(base: _Guess, share: Share) -> _Guess:
    slow, fast = base.spread
    spread = slow * share.worst / share.usual, fast * share.best / share.usual
    words = f"{share.worst:g} to {share.best:g} of the bandwidth: {share.why}; {base.source}"
    return _Guess(base.value * share.usual, spread, words)


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
