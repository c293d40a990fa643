"""How sure a profile is: the range that its unmeasured entries leave open.

A measured entry is taken as it is. One that is assumed may be off: rates by 0.8 to 1.1, times and counts by 2 to 0.5
(our judgement; no statistics stand behind it). Sizes stay: they decide how many slots there are, which is said apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .machine import COMPUTE, COUNT, RATE, TIME, UNITS, Machine

LOW, HIGH = 0, 1
RATE_SPREAD, COST_SPREAD = (0.8, 1.1), (2.0, 0.5)  # at the slow and at the fast end
Spread = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine and how far each of its entries may be off: factors (slow, fast) by entry; none for a measured one."""

    machine: Machine
    calibrated: bool = True
    spread: Mapping[str, Spread] = field(default_factory=dict)

    def at(self, side: int) -> Machine:
        """The machine with every uncertain entry at its slow (`LOW`) or fast (`HIGH`) end."""
        quantities = {
            entry: replace(q, value=_moved(entry, q.value, self.spread[entry][side])) if entry in self.spread else q
            for entry, q in self.machine.quantities.items()
        }
        return replace(self.machine, quantities=quantities)

    def basis(self) -> list[dict[str, Any]]:
        """Every entry: value and range in base units (bytes, bytes/s, ns, FLOP/s), how it is known and from where."""
        rows = []
        for entry, q in self.machine.quantities.items():
            ends = [_moved(entry, q.value, f) for f in self.spread[entry]] if entry in self.spread else [q.value] * 2
            row = {"entry": entry, "value": q.value, "low": min(ends), "high": max(ends), "unit": base_unit(entry)}
            rows.append(row | {"basis": q.basis, "source": q.source})
        return rows


def base_unit(entry: str) -> str:
    """The unit of an entry's value in a `Machine`."""
    for units, unit in ((TIME, "ns"), (RATE, "bytes/s"), (COMPUTE, "FLOP/s"), (COUNT, "")):
        if UNITS[entry] is units:
            return unit
    return "bytes"


def _moved(entry: str, value: float, factor: float) -> float:
    moved = value * factor
    return min(1.0, moved) if entry == "link.both_ways" else moved


def calibrated(machine: Machine) -> Profile:
    """A preset or a measured profile: the entries marked as assumed are those that may be off."""
    spread: dict[str, Spread] = {}
    for entry in machine.assumed:
        if UNITS[entry] in (RATE, COMPUTE) or entry == "link.both_ways":
            spread[entry] = RATE_SPREAD
        elif UNITS[entry] in (TIME, COUNT):
            spread[entry] = COST_SPREAD
    return Profile(machine, True, spread)
