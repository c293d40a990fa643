"""Forecasts of which experts a layer will need: what is done with them, and modelled ones of a stated accuracy.

A predictor that no trace holds (a trained one, a draft's hidden states in the target's gates) cannot be replayed. What
can be is its accuracy: the true needs are taken from the trace and spoiled, so such policies are clairvoyant and say
that their forecasts are modelled.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from ..traces.schema import Kind
from .future import Future
from .interface import Candidates, Demand, Key, Setup, StepInfo, View
from .orders import Lru
from .parts import Prefetcher

Known = Literal["draft", "verify"]


def spoiled(
    needed: np.ndarray, experts: int, recall: float, precision: float | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A forecast of what a layer needs: right and wrong ones. needed: ascending ids out of `experts`.

    Each need is seen with probability `recall`. precision: expected share of right ones among all; None: as many are
    forecast as are needed, another expert in the place of each that is missed, so that precision falls as recall does.
    """
    right = needed[rng.random(len(needed)) < recall]
    if precision == 1:
        return right, needed[:0]
    others = np.ones(experts, dtype=bool)
    others[needed] = False
    others = rng.permutation(np.flatnonzero(others))
    if precision is None:
        return right, others[: len(needed) - len(right)]
    wrong = len(right) * (1 - precision) / precision
    return right, others[: int(wrong + rng.random())]


def check_share(name: str, value: float | None, above_zero: bool = False) -> None:
    """ValueError unless the value lies between 0 and 1 (None may stand)."""
    if value is not None and not (0 < value <= 1 if above_zero else 0 <= value <= 1):
        raise ValueError(f"{name} must be {'above 0 and up to' if above_zero else '0 to'} 1")


class Modelled:
    """A predictor of stated recall and precision, see `spoiled`. The same seed gives the same forecast of a step."""

    def __init__(self, recall: float, precision: float | None) -> None:
        self._recall, self._precision = recall, precision

    def reveal(self, setup: Setup, future: Future) -> None:
        """Take in the true needs of all steps: 12 bytes for each."""
        self._setup = setup
        keys = [Key(layer, e) for layer in range(setup.layers) for e in range(setup.experts)]
        steps = [np.array(future.uses(key), np.int64) for key in keys]
        ids = np.repeat(np.arange(len(keys), dtype=np.int32), [len(s) for s in steps])
        step_of = np.concatenate(steps)
        order = np.argsort(step_of, kind="stable")
        self._steps, self._ids = step_of[order], ids[order]

    def window(self, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Right and wrong forecasts for every layer of a step; none after the last one."""
        layers, experts = self._setup.layers, self._setup.experts
        rng = np.random.default_rng((self._setup.seed, step))
        ids = self._ids[slice(*np.searchsorted(self._steps, (step, step + 1)))]
        bounds = np.searchsorted(ids, np.arange(layers + 1) * experts)
        needs = (ids[a:b] - layer * experts for layer, (a, b) in enumerate(pairwise(bounds.tolist())))
        return [spoiled(needed, experts, self._recall, self._precision, rng) for needed in needs]

    def forecasts(self, step: int) -> list[list[int]]:
        """What is forecast for every layer of a step, ascending: right and wrong ones are not told apart."""
        return [sorted([*right.tolist(), *wrong.tolist()]) for right, wrong in self.window(step)]


class Ahead(Prefetcher):
    """Copies for layers to come, the nearest layer first: on one link with copies of one size the earliest deadline
    first makes the largest delay smallest.

    What has not begun when its layer does is dropped; what has is given up if demand pushes it aside after that. A
    prefetch never displaces what is forecast for a layer to come. A subclass says by `name` what is forecast.
    """

    def setup(self, setup: Setup) -> None:
        self._setup = setup
        self._clear()

    def _clear(self) -> None:
        self.layer = -1  # the last one that has begun
        self._named: list[frozenset[int]] = [frozenset()] * self._setup.layers
        self._wanted: list[list[int]] = [[] for _ in range(self._setup.layers)]

    def name(self, layer: int, experts: Sequence[int]) -> None:
        """These are forecast for a layer, the most wanted first; an older forecast for it is forgotten."""
        self._named[layer] = frozenset(experts)
        self._wanted[layer] = list(experts[::-1])

    def awaited(self, key: Key) -> bool:
        """Forecast for a layer that has not begun."""
        return key.layer > self.layer and key.expert in self._named[key.layer]

    def step_begins(self, step: StepInfo) -> None:
        self._clear()

    def used(self, demand: Demand, view: View) -> None:
        self.layer = demand.layer

    def next_fetch(self, view: View) -> Key | None:
        for layer in range(self.layer + 1, self._setup.layers):
            wanted = self._wanted[layer]
            while wanted:
                key = Key(layer, wanted.pop())
                if not view.resident(key) and not view.in_flight(key) and self._has_room(key, view):
                    return key
        return None

    def _has_room(self, key: Key, view: View) -> bool:
        """A layer's own slots may all hold what is forecast; a refusal would let the link idle until the next gate."""
        if len(self._setup.slots) == 1 or view.free(key.layer) > 0:
            return True
        return any(self.replaces(key, Key(key.layer, e), view) for e in view.residents(key.layer))

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        return not self.awaited(victim)

    def keep_fetch(self, key: Key, view: View) -> bool:
        return key.layer > self.layer


class WindowAhead(Ahead):
    """Modelled forecasts of everything that a verify pass will need, and none of other passes.

    Drafts tell them token by token. A trace of verify passes does not say when, so they are all there when drafting
    begins (`known` = "draft", more than is possible) or all when it ends ("verify", less). A subclass calls `name` in
    `plan`.
    """

    def __init__(self, predictor: Modelled, known: Known) -> None:
        self.predictor, self._known = predictor, known

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self._early = self._known == "draft" and setup.draft_length > 0
        self._step, self._planned = -1, -1
        self.drafting = False

    def reveal(self, future: Future) -> None:
        self.predictor.reveal(self._setup, future)

    def plan(self, step: int) -> None:
        """Say what is forecast for the layers of this step."""
        raise NotImplementedError

    def _look(self, step: int) -> None:
        self._clear()
        self._planned = step
        self.plan(step)

    def step_begins(self, step: StepInfo) -> None:
        self._step, self.layer, self.drafting = step.index, -1, False
        if step.kind is not Kind.VERIFY:
            self._clear()
        elif self._planned != step.index:
            self._look(step.index)

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        self.drafting = self._early
        if self._early:
            self._look(self._step + 1)
        else:
            self._clear()


class PatientLru(Lru):
    """Least recently used first; to make room for a prefetch, what is forecast itself goes last."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        if layer > self._ahead.layer:  # layers that have begun copy on demand only
            others = super().first(layer, Others(candidates, self._ahead.awaited), view)
            if others is not None:
                return others
        return super().first(layer, candidates, view)


class Others:
    """Candidates but for those that are spared."""

    def __init__(self, candidates: Candidates, spared: Callable[[Key], bool]) -> None:
        self._candidates, self._spared = candidates, spared

    def __contains__(self, key: object) -> bool:
        return key in self._candidates and not self._spared(key)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Key]:
        return (key for key in self._candidates if not self._spared(key))

    def __len__(self) -> int:
        return sum(1 for _ in self)
