"""Placements and caches of the engines whose published numbers are replayed, where no shipped policy is the same."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..policies.interface import Demand, Key, Policy, Setup, View, Where
from ..policies.orders import Lru
from ..policies.parts import Composed, Dispatcher, FirstIds, IfBetter, Parts, Placement

PLACEMENTS = ("frequency", "prompt")


class Placed(Policy):
    """These experts on the GPU for good, all others on the CPU; `serial`: the GPU waits until the CPU is done."""

    name: ClassVar[str] = "placed"
    scope = "global"

    def __init__(self, keys: Sequence[Key], serial: bool = False) -> None:
        self._keys, self.serial_tiers = keys, serial

    def placement(self) -> Iterable[Key]:
        return self._keys

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        return [(e, Where.GPU if view.resident(Key(demand.layer, e)) else Where.CPU) for e in demand.experts]


def placed(how: str, slots: int, counts: np.ndarray) -> list[Key]:
    """The most used experts: two ways of KTransformers that the shipped policies know from files and prompts only.

    frequency: of all, by `counts` [L, E] of other texts; prompt ("dynamic"): in each layer, by this text's prompt,
    because they choose anew after a prefill that goes layer by layer.
    """
    layers, experts = counts.shape
    if how == "frequency":
        chosen = np.argsort(-counts.reshape(-1), kind="stable")[:slots]
    else:
        each = [slots // layers + (layer < slots % layers) for layer in range(layers)]
        order = np.argsort(-counts, axis=1, kind="stable")
        chosen = np.concatenate([layer * experts + order[layer, :n] for layer, n in enumerate(each)])
    return [Key(*divmod(flat, experts)) for flat in sorted(chosen.tolist())]


class MissShare(Dispatcher):
    """Of a layer's misses the `share` is fetched, lowest ids first, the CPU computes the rest (FreeToken's q*).

    The share is what the engine reported. Whole experts are fetched, so that the share holds over time.
    """

    def __init__(self, share: float) -> None:
        self._share, self._owed = share, 0.0

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        hits = [(key.expert, Where.GPU) for key in demand.keys if view.resident(key)]
        misses = [key.expert for key in demand.keys if not view.resident(key)]
        self._owed += self._share * len(misses)
        fetched = min(len(misses), int(self._owed + 1e-9))
        self._owed -= fetched
        return hits + [(e, Where.FETCH if i < fetched else Where.CPU) for i, e in enumerate(misses)]


@dataclass
class Split(Composed):
    """One LRU pool for all layers that starts full; `share` of the misses is fetched, the CPU computes the rest."""

    name: ClassVar[str] = "split"
    scope = "global"
    share: float = 1.0

    def parts(self, setup: Setup) -> Parts:
        lru = Lru()
        return Parts(lru, IfBetter(lru), FirstIds(), dispatch=MissShare(self.share))


class Pinned(Placement):
    """In each layer the most used experts by counts [L, E], in one half of its slots."""

    def __init__(self, counts: np.ndarray) -> None:
        self._order = np.argsort(-counts, axis=1, kind="stable")

    def setup(self, setup: Setup) -> None:
        self._keys = [Key(la, int(e)) for la, n in enumerate(setup.slots) for e in sorted(self._order[la, : n // 2])]

    def keys(self) -> Iterable[Key]:
        return self._keys


class LruOfRest(Lru):
    """Least recently used first, but never what was placed before the first step."""

    def placed(self, keys: Sequence[Key]) -> None:
        self._spared = frozenset(keys)

    def used(self, demand: Demand, view: View) -> None:
        super().used(demand, view)
        for key in self._spared.intersection(demand.keys):
            self.forget(key)


class HalfPinned(Composed):
    """LRU in one half of a layer's slots; the other half holds the layer's most used experts for good (imp#2061).

    counts: [L, E] of the very text that is replayed, as theirs are.
    """

    name: ClassVar[str] = "half-pinned"
    scope = "layer"

    def __init__(self, counts: np.ndarray) -> None:
        self._counts = counts

    def parts(self, setup: Setup) -> Parts:
        lru = LruOfRest()
        return Parts(lru, IfBetter(lru), Pinned(self._counts))
