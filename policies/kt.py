"""KTransformers: a fixed set of experts on the GPU, chosen in five ways; all others are the CPU's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..traces.schema import Kind
from .interface import Candidates, Demand, Key, Scope, Setup, StepInfo, View, Where
from .parts import Admission, Composed, Dispatcher, FirstIds, Never, OnCpu, Parts, VictimOrder, split
from .placement import Drawn, Filled, HighestFirst, check_source, popular_parts

Offload = int | Literal["auto"]


@dataclass
class KtUniform(Composed):
    """The same number of experts of every layer on the GPU, for good (KTransformers' default placement, 95009ea6).

    Theirs: a fixed set over (layer, expert) pairs, misses on the CPU, nothing moves while decoding; prompts of
    `offload_tokens` or more are computed on the GPU, for which 400 to 4096 are in use.
    Ours: which experts of a layer is not said, so the lowest ids; the weights of such a prompt are streamed.
    """

    name: ClassVar[str] = "kt-uniform"
    scope = "global"
    offload_tokens: Offload = 400

    def parts(self, setup: Setup) -> Parts:
        order = HighestFirst(lambda key: (key.expert, key.layer))
        return Parts(order, Never(), FirstIds(), dispatch=OnCpu(self.offload_tokens))


@dataclass
class KtFront(Composed):
    """The first layers' experts on the GPU, for good (KTransformers' front-loading, 95009ea6).

    As `kt-uniform`, but whole layers from the first on. Ours: slots that do not fill one go to its lowest ids.
    """

    name: ClassVar[str] = "kt-front"
    scope = "global"
    offload_tokens: Offload = 400

    def parts(self, setup: Setup) -> Parts:
        return Parts(HighestFirst(lambda key: key), Never(), Filled(), dispatch=OnCpu(self.offload_tokens))


@dataclass
class KtRandom(Composed):
    """Experts drawn at random on the GPU, for good (KTransformers' random placement, seed 42, 95009ea6).

    As `kt-uniform`, but any experts of any layers. Ours: the generator, so the set is another than theirs.
    """

    name: ClassVar[str] = "kt-random"
    scope = "global"
    seed: int = 42
    offload_tokens: Offload = 400

    def parts(self, setup: Setup) -> Parts:
        drawn = Drawn(self.seed)
        return Parts(drawn, Never(), drawn, dispatch=OnCpu(self.offload_tokens))


@dataclass
class KtFrequency(Composed):
    """The most used experts of all layers on the GPU, for good (KTransformers' frequency placement, 95009ea6).

    Theirs: the top N over all (layer, expert) pairs by activations measured beforehand.
    `frequencies`: a trace (of other text than the one replayed, or the result is hindsight), or a JSON file with a list
    for each MoE layer of one number for each expert. Ours: without it nothing is known before the run, so the start is
    that of `kt-uniform`, and once, in the background, it is replaced by what the run's first prompt used most, or, of a
    run without a prompt, its first `warmup` steps.
    """

    name: ClassVar[str] = "kt-frequency"
    scope: Scope = "global"
    frequencies: str = ""
    warmup: int = 64
    offload_tokens: Offload = 400

    def __post_init__(self) -> None:
        check_source(self.frequencies, self.warmup)

    def parts(self, setup: Setup) -> Parts:
        popular, measure = popular_parts(self.frequencies, self.warmup)
        return Parts(popular, Never(), popular, measure, OnCpu(self.offload_tokens))


class PromptChoice(Dispatcher, Admission, VictimOrder):
    """Of a long prompt's layer, the experts chosen most so far are kept and all others passed through."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold

    def setup(self, setup: Setup) -> None:
        self._slots, self._cpu = setup.slots, setup.cpu
        self._counts = np.zeros((setup.layers, setup.experts))
        self._chosen: list[frozenset[int]] = [frozenset()] * setup.layers
        self._prompt = self._long = False

    def slots_changed(self, slots: tuple[int, ...]) -> None:
        self._slots = slots

    def step_begins(self, step: StepInfo) -> None:
        before, self._prompt = self._prompt, step.kind is Kind.PREFILL
        self._long = self._prompt and len(step.tokens) >= self._threshold
        if self._long and not before:
            self._counts[:] = 0

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        if not self._long:
            return split(demand, Where.CPU if self._cpu else Where.STREAM)
        row = self._counts[demand.layer]
        row[list(demand.experts)] += demand.loads
        most = np.argsort(-row, kind="stable")[: self._slots[demand.layer]]
        self._chosen[demand.layer] = frozenset(most.tolist())
        return split(demand, Where.FETCH)

    def admits(self, key: Key, view: View) -> bool:
        return self._is_chosen(key)

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        return min(candidates, key=lambda key: (self._is_chosen(key), self._counts[key], key), default=None)

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        return not self._is_chosen(victim)

    def _is_chosen(self, key: Key) -> bool:
        return key.expert in self._chosen[key.layer]


@dataclass
class KtDynamic(Composed):
    """The GPU's set is chosen anew by every long prompt's own routing (KTransformers' dynamic update, 95009ea6).

    Theirs: a prompt of `threshold` tokens or more is computed on the GPU layer by layer, and the set is then what that
    prompt used most; until the next such prompt it is fixed, misses are the CPU's. The start is uniform.
    Ours: every layer keeps its number of slots, so that the choice is made while the layer's weights pass through and
    costs no copy of its own; a prompt in several chunks is judged by each chunk's length and its counts add up;
    threshold 400, the lowest in use.
    """

    name: ClassVar[str] = "kt-dynamic"
    scope: Scope = "layer"
    threshold: int = 400

    def parts(self, setup: Setup) -> Parts:
        choice = PromptChoice(self.threshold)
        return Parts(choice, choice, FirstIds(), dispatch=choice)
