"""Fiddler: for every missing expert, compute it where it lies or copy it, whichever takes less time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .interface import Demand, Setup, View, Where
from .parts import Composed, Dispatcher, Never, Parts
from .placement import check_source, popular_parts

RELEASE_CPU, RELEASE_GPU = 7, 70  # the release's latencies: a token on the CPU, an expert copied and run on the GPU


class Cheaper(Dispatcher):
    """Each missing expert on its own: the CPU if it is no slower than copy and GPU together."""

    def __init__(self, release: bool) -> None:
        self._release = release

    def setup(self, setup: Setup) -> None:
        self._cpu, self._costs = setup.cpu, setup.costs

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        loads = zip(demand.experts, demand.loads, strict=True)
        hits = [(e, Where.GPU) for e in demand.experts if e in demand.held]
        return hits + [(e, self._missing(load)) for e, load in loads if e not in demand.held]

    def _missing(self, load: int) -> Where:
        if not self._cpu:
            return Where.STREAM
        if self._release:
            return Where.CPU if RELEASE_CPU * load <= RELEASE_GPU else Where.STREAM
        there, here = self._costs.cpu_ns(load), self._costs.gpu_ns(load) + self._costs.copy_ns
        return Where.CPU if there <= here else Where.STREAM


@dataclass
class Fiddler(Composed):
    """Misses go to the CPU or over the link by a latency model, the GPU holds the popular experts (arXiv 2402.07033).

    Theirs: an expert with s tokens runs on the CPU if cpu(s) <= gpu(s) + copy, else its weights are copied, used and
    dropped; the GPU's experts are the most popular of other text and never change. `release=true` decides by the
    constants of the code (227715b: 7 for a token on the CPU, 70 for copy and GPU, so up to 10 tokens stay on the CPU)
    and lets the GPU wait for the CPU, as it does.
    Ours: the times are this machine's `Costs`, the start-up of a layer's first CPU expert left out, because each expert
    is judged alone; `frequencies`, and `warmup` without it, as for `kt-frequency`.
    """

    name: ClassVar[str] = "fiddler"
    scope = "global"
    frequencies: str = ""
    warmup: int = 64
    release: bool = False

    def __post_init__(self) -> None:
        check_source(self.frequencies, self.warmup)
        self.serial_tiers = self.release

    def parts(self, setup: Setup) -> Parts:
        popular, measure = popular_parts(self.frequencies, self.warmup)
        return Parts(popular, Never(), popular, measure, Cheaper(self.release))
