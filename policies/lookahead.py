"""Clairvoyant policies that see a little of the future: what is a forecast worth as a reason to evict?"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .frequency import FrequencyByAge
from .future import NEVER, Future
from .interface import Demand, Key, Scope, Setup, StepInfo, View
from .orders import BestFirst
from .parts import Composed, IfBetter, Parts, Prefetcher
from .predictors import check_share, spoiled

SEEN = float(1 << 40)  # above every rank of what is not foreseen, and small enough for exact sums of event numbers
Beyond = Literal["lru", "lfru"]


class Foreseen(FrequencyByAge):
    """What is not foreseen goes first, by recency or by frequency over age; then what is needed last.

    ahead: how many steps after an event are seen, to the same layer; None: all. within_step: instead of that, the
    layers of the present step that are still to come. recall: share of the true needs that are seen. Each of the others
    is missed, or, with `garble`, another expert of the layer is seen in its place, so that precision falls as recall
    does. What is seen wrongly is so from every distance. The draw depends on the run's seed.
    """

    def __init__(
        self, ahead: int | None, beyond: Beyond, recall: float, garble: bool, within_step: bool = False
    ) -> None:
        super().__init__()
        self._ahead, self._beyond, self._within_step = ahead, beyond, within_step
        self._recall, self._garble = recall, garble

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self._layers, self._seed = setup.layers, setup.seed
        self._event = -1  # in the future's numbering: step * layers + layer
        self._step = 0

    def reveal(self, future: Future) -> None:
        """Take the whole future in, and from it `coming` [L, E]: the next event that is foreseen for each expert."""
        if self._recall < 1:
            future = noisy(future, *self.last.shape, self._recall, self._garble, self._seed)
        self._future = future
        self.coming = np.full(self.last.shape, NEVER, dtype=np.int64)
        for layer in range(self._layers):
            self._look(layer, np.arange(self.last.shape[1]), -1)

    def _look(self, layer: int, experts: np.ndarray, step: int) -> None:
        for expert in experts.tolist():
            use = self._future.next_use(Key(layer, expert), step)
            self.coming[layer, expert] = NEVER if use == NEVER else use * self._layers + layer

    def step_begins(self, step: StepInfo) -> None:
        self._step = step.index
        self._event = step.index * self._layers - 1

    def used(self, demand: Demand, view: View) -> None:
        super().used(demand, view)
        self._event = self._step * self._layers + demand.layer
        over = np.flatnonzero(self.coming[demand.layer] <= self._event)
        self._look(demand.layer, over, self._step)

    @property
    def horizon(self) -> int:
        """The last event that is seen."""
        if self._within_step:
            return (self._step + 1) * self._layers - 1
        return NEVER - 1 if self._ahead is None else self._event + self._ahead * self._layers

    def ranks(self, layers: slice) -> np.ndarray:
        coming, horizon = self.coming[layers], self.horizon
        unseen = super().ranks(layers) if self._beyond == "lfru" else 0.0
        return np.where(coming <= horizon, 2 * SEEN - (coming - self._event), unseen)


def noisy(future: Future, layers: int, experts: int, recall: float, garble: bool, seed: int) -> Future:
    """A forecast of `future` that is right with probability `recall` for each use; see `Foreseen`."""
    rng = np.random.default_rng(seed)
    needs: dict[tuple[int, int], list[int]] = {}  # by (step, layer)
    for layer in range(layers):
        for expert in range(experts):
            for step in future.uses(Key(layer, expert)):
                needs.setdefault((step, layer), []).append(expert)
    forecast = Future(layers, experts)
    for step, layer in sorted(needs):
        seen = spoiled(np.array(needs[step, layer]), experts, recall, None if garble else 1.0, rng)
        for expert in np.concatenate(seen).tolist():
            forecast.add(Key(layer, expert), step)
    return forecast


@dataclass
class Lookahead(Composed):
    """The optimum of on-demand caching with a short sight: exact for `ahead` steps, by habit beyond (O3).

    After each event those stay that are foreseen to be needed soonest, then the others as `beyond` ranks them. With
    `ahead=none` it hits as often as `min`, with `ahead=0` it is `ar-lru` or `lfru`. `recall` below 1 spoils the
    forecast (`garble=false`: needs are only missed). A step is a token where nothing is drafted. What lies between is
    the value of a draft as a sensor for eviction; it never prefetches.
    """

    name: ClassVar[str] = "lookahead"
    clairvoyant: ClassVar[bool] = True
    ahead: int | None = 4
    beyond: Beyond = "lru"
    recall: float = 1.0
    garble: bool = True
    scope: Scope = "layer"

    def __post_init__(self) -> None:
        if self.ahead is not None and self.ahead < 0:
            raise ValueError("ahead must be at least 0, or none for the whole future")
        check_share("recall", self.recall)

    def parts(self, setup: Setup) -> Parts:
        order = Foreseen(self.ahead, self.beyond, self.recall, self.garble)
        return Parts(order, IfBetter(order), dispatch=BestFirst(order))


class InThisStep(Prefetcher):
    """Bring in what the layers to come need in this step, in their order, at the cost only of what it does not need."""

    def __init__(self, order: Foreseen) -> None:
        self._order = order
        self._layer = -1
        self._wanted: list[list[int]] = []

    def step_begins(self, step: StepInfo) -> None:
        self._layer = -1
        # The order may have been told of this step before or after: what is foreseen for it is the same.
        layers = len(self._order.coming)
        self._wanted = np.argwhere(self._order.coming < (step.index + 1) * layers)[::-1].tolist()

    def used(self, demand: Demand, view: View) -> None:
        self._layer = demand.layer

    def next_fetch(self, view: View) -> Key | None:
        while self._wanted:
            key = Key(*self._wanted.pop())
            if key.layer > self._layer and not view.resident(key) and not view.in_flight(key):
                return key
        return None

    def replaces(self, incoming: Key, victim: Key, view: View) -> bool:
        return self._order.better(incoming, victim)

    def keep_fetch(self, key: Key, view: View) -> bool:
        return key.layer > self._layer


@dataclass
class OracleWindow(Composed):
    """A perfect forecast of the present step: what its later layers need is kept, and with `prefetch` brought in.

    What a draft could say at best about the very window that is being verified. Residents that this step still needs
    go last, the soonest needed very last; the others go as `beyond` ranks them. One pool, since a layer's own slots
    hold nothing that a later layer needs. `recall` and `garble` as for `lookahead`.
    """

    name: ClassVar[str] = "oracle-window"
    clairvoyant: ClassVar[bool] = True
    scope = "global"
    beyond: Beyond = "lru"
    prefetch: bool = True
    recall: float = 1.0
    garble: bool = True

    def __post_init__(self) -> None:
        check_share("recall", self.recall)

    def parts(self, setup: Setup) -> Parts:
        order = Foreseen(None, self.beyond, self.recall, self.garble, within_step=True)
        ahead = [InThisStep(order)] if self.prefetch else []
        return Parts(order, IfBetter(order), prefetch=ahead, dispatch=BestFirst(order))
