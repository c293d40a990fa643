"""FreeToken: the misses of a layer are split between link and CPU by their bandwidths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from .interface import Demand, Setup, View, Where
from .orders import Lru
from .parts import Composed, Dispatcher, IfBetter, Parts

Memory = Literal["shared", "apart"]


class Split(Dispatcher):
    """Of m misses round(m * share) are fetched, those with most tokens; the CPU computes the others in place."""

    def __init__(self, memory: Memory, offload_tokens: int) -> None:
        self._memory, self._offload_tokens = memory, offload_tokens

    def setup(self, setup: Setup) -> None:
        self._cpu = setup.cpu
        there, here = setup.costs.cpu_ns(1), setup.costs.copy_ns
        self._part, self._whole = there, max(1, here if self._memory == "shared" else there + here)

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        hits, misses = [], []
        for expert, load in zip(demand.experts, demand.loads, strict=True):
            if expert in demand.held:
                hits.append((expert, Where.GPU))
            else:
                misses.append((-load, expert))
        misses.sort()
        fetched = len(misses)
        if self._cpu and len(demand.ids) < self._offload_tokens:
            fetched = self.fetched(fetched)
        return hits + [(e, Where.FETCH if i < fetched else Where.CPU) for i, (_, e) in enumerate(misses)]

    def fetched(self, misses: int) -> int:
        """q* of so many misses, halves rounded up; never more than there are."""
        return min(misses, (2 * misses * self._part + self._whole) // (2 * self._whole))


@dataclass
class FreeToken(Composed):
    """Misses split between link and CPU by bandwidth, fetched ones kept in one LRU pool (FreeToken, arXiv 2608.16157).

    Theirs: of a layer's m misses q* = m * B_link / B_host are copied and enter a global LRU cache, the CPU computes the
    rest where they lie. The bandwidths come from a measurement of the machine.
    Ours: why that is a balance: if B_host is all that host memory gives, the CPU is left B_host - B_link, and with q*
    both sides end together. B_link / B_host = CPU time / copy time of an expert with one token, from this machine's
    `Costs`, so the fixed parts of both count as lower bandwidth; rounding to the nearest whole expert, so that below a
    share of one half a single miss stays with the CPU; the experts with most tokens are fetched; batches of
    `offload_tokens` or more (a prompt) fetch everything. `memory=apart` is q = m * B_link / (B_link + B_host), the
    balance where link and CPU do not take bandwidth from each other (ours).
    """

    name: ClassVar[str] = "freetoken"
    scope = "global"
    memory: Memory = "shared"
    offload_tokens: int = 32

    def parts(self, setup: Setup) -> Parts:
        lru = Lru()
        return Parts(lru, IfBetter(lru), dispatch=Split(self.memory, self.offload_tokens))
