"""A placement that never changes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from .interface import Candidates, Demand, Key, Policy, Setup, View, Where
from .prefill import cheaper_absent


@dataclass
class Static(Policy):
    """Last layers' experts on the GPU, the rest on the CPU for good (llama.cpp `--n-cpu-moe`).

    Theirs: the experts of the first layers stay on the CPU, those of the last layers on the GPU, nothing moves during
    decoding, and a batch of `offload_tokens` or more has its absent weights streamed to the GPU and dropped.
    Ours: slots that do not fill a whole layer go to the lowest ids of the next layer from the end (`partial=true`, the
    default, so that policies are compared at equal memory; llama.cpp places whole layers only, which is
    `partial=false`); `offload_tokens=auto` streams where this machine's costs say that a layer's absent experts take
    less time that way; without a CPU tier every absent expert is streamed.
    """

    name: ClassVar[str] = "static"
    scope = "global"
    partial: bool = True
    offload_tokens: int | Literal["auto"] = 32

    def setup(self, setup: Setup) -> None:
        self._setup = setup

    def placement(self) -> Iterable[Key]:
        experts = self._setup.experts
        slots = min(sum(self._setup.slots), self._setup.layers * experts)
        whole, rest = divmod(slots, experts)
        first = self._setup.layers - whole
        yield from (Key(layer, e) for layer in range(first, self._setup.layers) for e in range(experts))
        if self.partial and rest:
            yield from (Key(first - 1, e) for e in range(rest))

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        resident = [view.resident(Key(demand.layer, e)) for e in demand.experts]
        loads = [n for n, here in zip(demand.loads, resident, strict=True) if not here]
        absent = self._absent(len(demand.ids), loads)
        return [(e, Where.GPU if here else absent) for e, here in zip(demand.experts, resident, strict=True)]

    def _absent(self, tokens: int, loads: Sequence[int]) -> Where:
        if not self._setup.cpu:
            return Where.STREAM
        if self.offload_tokens == "auto":
            return cheaper_absent(loads, self._setup.costs)
        return Where.CPU if tokens < self.offload_tokens else Where.STREAM

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        """As with fewer slots from the start."""
        return min(candidates, key=lambda key: (key.layer, -key.expert), default=None)
