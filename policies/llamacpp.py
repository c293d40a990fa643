"""What the llama.cpp family does: whole layers on the CPU, or a cache whose misses the CPU computes."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..traces.schema import Kind
from .frequency import Crf
from .interface import Demand, Key, Scope, Setup, StepInfo, View
from .orders import Lru
from .parts import Composed, Never, OnCpu, Parts, Prefetcher, VictimOrder, next_absent
from .static import Static


@dataclass
class NCpuMoe(Static):
    """The experts of the first layers on the CPU, those of the other layers on the GPU (llama.cpp `--n-cpu-moe`).

    As llama.cpp does it: whole layers only. `n` of them are the CPU's; without it, as few as the slots allow.
    `static` is the same with the rest of the slots filled, for comparisons at equal memory.
    """

    name: ClassVar[str] = "n-cpu-moe"
    partial: bool = False
    n: int | None = None

    def placement(self) -> Iterable[Key]:
        keys = [key for key in super().placement() if self.n is None or key.layer >= self.n]
        layers = len({key.layer for key in keys})
        if self.n is not None and layers < self._setup.layers - self.n:
            raise ValueError(f"n={self.n} needs {self._setup.layers - self.n} layers on the GPU; {layers} fit")
        return keys


class BackgroundInserts(Prefetcher):
    """What a layer missed comes in behind its back, the most used first, at most `most` a layer and step.

    A layer's wishes are replaced when it runs again; prefill wishes nothing if it is `frozen`.
    """

    def __init__(self, order: VictimOrder, most: int, frozen: bool) -> None:
        self._order, self._most, self._frozen = order, most, frozen
        self._wanted: OrderedDict[int, list[Key]] = OrderedDict()
        self._closed = False

    def step_begins(self, step: StepInfo) -> None:
        self._closed = self._frozen and step.kind is Kind.PREFILL

    def used(self, demand: Demand, view: View) -> None:
        self._wanted.pop(demand.layer, None)
        if self._closed:
            return
        missed = [(-n, k) for k, n in zip(demand.keys, demand.loads, strict=True) if k.expert not in demand.held]
        if missed:
            self._wanted[demand.layer] = [key for _, key in sorted(missed)[: self._most]][::-1]

    def next_fetch(self, view: View) -> Key | None:
        while self._wanted:
            layer, keys = next(iter(self._wanted.items()))
            if (key := next_absent(keys, view)) is not None:
                return key
            del self._wanted[layer]
        return None

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        return self._order.better(incoming, victim)


@dataclass
class LlamacppCache(Composed):
    """A cache that nobody waits for: hits on the GPU, misses on the CPU, copies in the background (llama.cpp forks).

    Theirs: the CPU computes a miss at once (pull requests 24524 and 27861); missed experts come in behind, at most
    `inserts` = 2 a layer and step (27861), evicting the least recently used of the layer, or by a score that mixes
    recency and frequency (31233, `order=lrfu`); prefill leaves the cache alone (`freeze_prefill`), because one prompt
    would sweep it empty; batches of `offload_tokens` or more stream the missing weights.
    Ours: which of a layer's misses come in, by tokens and then id; a wish that has not started when its layer runs
    again is dropped; a copy does not displace what was used since; verify batches use the cache, which several of
    these forks switch off; half-life as for `lrfu`.
    """

    name: ClassVar[str] = "llamacpp-cache"
    scope: Scope = "layer"
    inserts: int = 2
    order: Literal["lru", "lrfu"] = "lru"
    half_life: float = 32.0
    freeze_prefill: bool = True
    offload_tokens: int | Literal["auto"] = 32

    def __post_init__(self) -> None:
        if self.inserts < 0 or not self.half_life > 0:
            raise ValueError("inserts must be at least 0 and half_life above 0")

    def parts(self, setup: Setup) -> Parts:
        order = Lru() if self.order == "lru" else Crf(self.half_life)
        inserts = BackgroundInserts(order, self.inserts, self.freeze_prefill)
        return Parts(order, Never(), prefetch=[inserts], dispatch=OnCpu(self.offload_tokens))
