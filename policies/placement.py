"""Where experts start, for policies that move few or none: by rule, by measured counts, by hindsight."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from ..traces.errors import InputError
from ..traces.schema import Kind
from .future import Future
from .interface import Candidates, Demand, Key, Scope, Setup, StepInfo, View
from .parts import Composed, Never, OnCpu, Parts, Placement, Prefetcher, VictimOrder, even, next_absent


def best(counts: np.ndarray, slots: tuple[int, ...]) -> list[Key]:
    """The experts with most counts, [L, E], as many as there are slots in each layer, or in one pool; ties by key."""
    experts = counts.shape[1]
    if len(slots) == 1:
        order = np.argsort(-counts.reshape(-1), kind="stable")[: slots[0]]
        return [Key(*divmod(id_, experts)) for id_ in order.tolist()]
    rows = [np.argsort(-row, kind="stable")[:n].tolist() for row, n in zip(counts, slots, strict=True)]
    return [Key(layer, e) for layer, row in enumerate(rows) for e in row]


class Filled(Placement):
    """Whole layers from the first on, and the lowest ids of the next one."""

    def setup(self, setup: Setup) -> None:
        self._setup = setup

    def keys(self) -> Iterable[Key]:
        experts = self._setup.experts
        ids = range(min(sum(self._setup.slots), self._setup.layers * experts))
        return (Key(*divmod(id_, experts)) for id_ in ids)


class Drawn(Placement, VictimOrder):
    """Any experts of any layers, drawn with a seed; the last drawn goes first."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def setup(self, setup: Setup) -> None:
        order = np.random.default_rng(self._seed).permutation(setup.layers * setup.experts)
        self._drawn = [Key(*divmod(id_, setup.experts)) for id_ in order[: sum(setup.slots)].tolist()]

    def keys(self) -> Iterable[Key]:
        return self._drawn

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        return next((key for key in reversed(self._drawn) if key in candidates), None)


@dataclass
class HighestFirst(VictimOrder):
    """The highest `rank` goes first: what a placement by rule would not have with fewer slots from the start."""

    rank: Callable[[Key], tuple[int, int]]

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        return max(candidates, key=self.rank, default=None)


class Popular(Placement, VictimOrder):
    """Most counts [L, E] stay. They come from a trace or a file; without one the start is even, and `Warmup` counts."""

    def __init__(self, frequencies: str = "") -> None:
        self._frequencies = frequencies

    def setup(self, setup: Setup) -> None:
        self._setup = setup
        self.slots = setup.slots
        self.counts = np.zeros((setup.layers, setup.experts))
        if self._frequencies:
            self.counts = read_counts(self._frequencies, setup.layers, setup.experts)

    def keys(self) -> Iterable[Key]:
        return best(self.counts, self.slots) if self._frequencies else even(self._setup)

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        return min(candidates, key=lambda key: (self.counts[key], key), default=None)

    def better(self, incoming: Key, victim: Key) -> bool:
        return bool(self.counts[incoming] > self.counts[victim])


class Warmup(Prefetcher):
    """Counts what the run's first prompt chose, or of a run that has none its first `steps` steps, and then brings in
    the experts chosen most, once and for all."""

    def __init__(self, popular: Popular, steps: int) -> None:
        self._popular, self._left = popular, steps
        self._prompt, self._counting = False, True
        self._wanted: list[Key] = []

    def step_begins(self, step: StepInfo) -> None:
        if not self._counting:
            return
        prompt = step.kind is Kind.PREFILL
        if not prompt and (self._prompt or not self._left):
            self._counting = False
            counts = self._popular.counts
            self._wanted = [key for key in best(counts, self._popular.slots) if counts[key]][::-1]
        self._prompt |= prompt
        self._left -= not prompt

    def used(self, demand: Demand, view: View) -> None:
        if self._counting:
            self._popular.counts[demand.layer, list(demand.experts)] += demand.loads

    def next_fetch(self, view: View) -> Key | None:
        return next_absent(self._wanted, view)

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        return self._popular.better(incoming, victim)


def popular_parts(frequencies: str, warmup: int) -> tuple[Popular, list[Prefetcher]]:
    """Placement by measured counts, and what measures them if no file does."""
    popular = Popular(frequencies)
    return popular, [] if frequencies else [Warmup(popular, warmup)]


def check_source(frequencies: str, warmup: int = 1) -> None:
    """InputError if there is no such trace or file of counts ("" is none), ValueError without a warm-up."""
    if warmup < 1:
        raise ValueError("warmup must be at least 1")
    if frequencies and not frequencies.endswith(".json"):
        from ..traces.reader import resolve

        resolve(frequencies)
    elif frequencies and not Path(frequencies).is_file():
        raise InputError(f"frequencies={frequencies}: no such file")


@lru_cache(maxsize=2)
def read_counts(frequencies: str, layers: int, experts: int) -> np.ndarray:
    """[L, E] counts: from a JSON file, L lists of E numbers, or of a trace's choices (rejected drafts left out).

    InputError if there is no such file, or its shape is another model's.
    """
    check_source(frequencies)
    counts = _listed(frequencies) if frequencies.endswith(".json") else _counted(frequencies)
    if counts.shape != (layers, experts):
        is_, wanted = (" x ".join(map(str, shape)) for shape in (counts.shape, (layers, experts)))
        raise InputError(f"frequencies={frequencies}: counts of {is_}, and the model has {wanted} (layers x experts)")
    return counts


def _listed(path: str) -> np.ndarray:
    try:
        counts = np.array(json.loads(Path(path).read_text()), dtype=float)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"frequencies={path}: not a JSON list of lists of numbers: {error}") from None
    if counts.ndim != 2 or not np.isfinite(counts).all() or (counts < 0).any():
        raise InputError(f"frequencies={path}: give one list for each MoE layer, of one number from 0 for each expert")
    return counts


def _counted(path: str) -> np.ndarray:
    from ..traces.reader import open_trace

    trace = open_trace(path)
    shape = trace.header.target
    layers = np.arange(len(shape.moe_layers))
    counts = np.zeros((len(layers), shape.experts))
    for step in trace.steps():
        ids = step.experts[step.kept]
        np.add.at(counts, (layers[:, None], ids), 1)
    return counts


class Hindsights(Popular):
    """Counts the steps of the future that need each expert."""

    def reveal(self, future: Future) -> None:
        for layer, row in enumerate(self.counts):
            for expert in range(len(row)):
                row[expert] = len(future.uses(Key(layer, expert)))

    def keys(self) -> Iterable[Key]:
        return best(self.counts, self.slots)


@dataclass
class Hindsight(Composed):
    """The best placement that never changes, chosen from the whole trace: what moving experts is worth.

    The experts that most layer events need are resident, the rest runs on the CPU. `scope=layer` gives every layer
    the same number of slots, `scope=global` the number that serves best. Among static placements no other has more
    hits (distinct experts of a layer event); it needs the future and cannot run live.
    """

    name: ClassVar[str] = "hindsight"
    clairvoyant: ClassVar[bool] = True
    scope: Scope = "layer"
    offload_tokens: int | Literal["auto"] = 32

    def parts(self, setup: Setup) -> Parts:
        seen = Hindsights()
        return Parts(seen, Never(), seen, dispatch=OnCpu(self.offload_tokens))
