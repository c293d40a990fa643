"""DALI: greedy assignment to CPU and GPU, a cache that follows the loads of windows, prefetch of the next layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gates import GateAhead
from .interface import Demand, Key, Setup, StepInfo, View, Where
from .orders import Ranked
from .parts import Composed, Dispatcher, Parts, Prefetcher, next_absent
from .placement import Popular, check_source


class Greedy(Dispatcher):
    """The experts for which the choice matters most come first; each goes where it is done earlier."""

    def setup(self, setup: Setup) -> None:
        self._costs, self._cpu = setup.costs, setup.cpu

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        if not self._cpu:
            return [(e, Where.GPU if e in demand.held else Where.STREAM) for e in demand.experts]
        costs, items = self._costs, []
        for expert, load in zip(demand.experts, demand.loads, strict=True):
            held = expert in demand.held
            cpu, gpu = costs.cpu_ns(load), costs.gpu_ns(load) + (0 if held else costs.copy_ns)
            items.append((-abs(cpu - gpu), expert, cpu, gpu, Where.GPU if held else Where.STREAM))
        items.sort()
        answer, cpu_end, gpu_end = [], costs.cpu_first_ns, 0
        for _, expert, cpu, gpu, there in items:
            if gpu_end + gpu <= cpu_end + cpu:
                gpu_end += gpu
                answer.append((expert, there))
            else:
                cpu_end += cpu
                answer.append((expert, Where.CPU))
        return answer


class WindowLoads(Ranked):
    """Fewest tokens first, over the window of `width` tokens that is over and the one that runs."""

    def __init__(self, width: int) -> None:
        self._width = width

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self.window = np.zeros_like(self.scores)  # the one that is over
        self._running = np.zeros_like(self.scores)
        self._left = self._width
        self.over = 0  # windows

    def step_begins(self, step: StepInfo) -> None:
        if self._left <= 0:
            self.window, self._running = self._running, np.zeros_like(self._running)
            self.scores = self.window.copy()
            self._left = self._width
            self.over += 1
        self._left -= len(step.tokens)

    def used(self, demand: Demand, view: View) -> None:
        super().used(demand, view)
        row = demand.layer, list(demand.experts)
        self._running[row] += demand.loads
        self.scores[row] += demand.loads


class Swaps(Prefetcher):
    """When a window is over, the `most` absent experts of each layer that had most load come in."""

    def __init__(self, order: WindowLoads, most: int) -> None:
        self._order, self._most = order, most
        self._seen = 0
        self._wanted: list[Key] = []

    def next_fetch(self, view: View) -> Key | None:
        if self._order.over != self._seen:
            self._seen = self._order.over
            self._wanted = [key for layer in range(len(self._order.window)) for key in self._hottest(layer, view)][::-1]
        return next_absent(self._wanted, view)

    def _hottest(self, layer: int, view: View) -> list[Key]:
        loads = self._order.window[layer].copy()
        loads[view.residents(layer)] = 0
        hot = np.argsort(-loads, kind="stable")[: self._most]
        return [Key(layer, e) for e in hot.tolist() if loads[e] > 0]

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        return self._order.better(incoming, victim)


@dataclass
class Dali(Composed):
    """Greedy CPU/GPU assignment, workload-aware cache and next-layer prefetch (DALI, arXiv 2602.03495).

    Theirs: experts sorted by |t_cpu - t_gpu|, largest first, each given to the side on which it is done earlier, t_gpu
    of an absent one including its copy; copied ones are not cached; every w tokens the u experts with most load on the
    CPU change places with the u residents with least; the next layer's expert with most predicted load is brought in
    (`prefetch` = 1, theirs for Mixtral), predicted by its gate on this layer's hidden state plus that layer's mean
    residual.
    Ours: the gate without that correction, which needs hidden states (the "next-gate" channel; without it nothing is
    brought in); `w` = 16 and `u` = 1, which were not at hand; a swap is made while the link is free, if it still has
    more load than what it displaces, loads counted over the last whole window and the running one; what is brought in
    ahead takes a slot; the start, the lowest ids if no `frequencies` are given; times from this machine's `Costs`,
    the start-up of a layer's first CPU expert counted once.
    """

    name: ClassVar[str] = "dali"
    w: int = 16
    u: int = 1
    prefetch: int = 1
    frequencies: str = ""

    def __post_init__(self) -> None:
        check_source(self.frequencies)
        if self.w < 1 or self.u < 0 or self.prefetch < 0:
            raise ValueError("w must be at least 1, u and prefetch at least 0")

    def parts(self, setup: Setup) -> Parts:
        order = WindowLoads(self.w)
        ahead: list[Prefetcher] = [GateAhead(1, self.prefetch)] if self.prefetch else []
        popular = Popular(self.frequencies)
        return Parts(order, None, popular, [*ahead, Swaps(order, self.u)], Greedy())
