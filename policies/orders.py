"""Victim orders that policies share: recency, and any score that is kept for every expert."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from .interface import Candidates, Demand, Key, Setup, View, Where
from .parts import Dispatcher, VictimOrder, split
from .residency import all_keys


class Lru(VictimOrder):
    """Least recently used first. A whole demand counts as used at once; a prefetched expert as used when it lands."""

    def setup(self, setup: Setup) -> None:
        pooled, keys = len(setup.slots) == 1, all_keys(setup.layers, setup.experts)
        # An expert counts by its id in its layer's group, or by layer * experts + id in that of a pool.
        self._base = [layer * setup.experts if pooled else 0 for layer in range(setup.layers)]
        self._keys = [tuple(key for row in keys for key in row)] * setup.layers if pooled else keys
        groups = [OrderedDict[int, int]() for _ in setup.slots]  # event of the last use, oldest first
        self._uses = groups * setup.layers if pooled else groups
        self._event = 0

    def _last(self, key: Key, unused: int) -> int:
        layer, expert = key
        return self._uses[layer].get(self._base[layer] + expert, unused)

    def _touch(self, key: Key) -> None:
        uses, id_ = self._uses[key.layer], self._base[key.layer] + key.expert
        uses[id_] = self._event
        uses.move_to_end(id_)

    def forget(self, key: Key) -> None:
        """As if it had never been used, so that it is no victim either."""
        del self._uses[key.layer][self._base[key.layer] + key.expert]

    def placed(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._touch(key)

    def used(self, demand: Demand, view: View) -> None:
        self._event = event = self._event + 1
        uses, base, ids = self._uses[demand.layer], self._base[demand.layer], demand.experts
        move = uses.move_to_end
        for id_ in [base + e for e in ids] if base else ids:
            uses[id_] = event
            move(id_)

    def older(self, incoming: Key, candidates: Candidates) -> Key | None:
        """The oldest candidate if `incoming` was used after it: `first` and `better` together. It is then evicted."""
        layer, expert = incoming
        uses, keys = self._uses[layer], self._keys[layer]
        newest = uses.get(self._base[layer] + expert, self._event)
        for id_, event in uses.items():
            if event >= newest:
                return None
            if (key := keys[id_]) in candidates:
                del uses[id_]
                return key
        return None

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        if self._last(key, -1) < self._event:  # what the running layer fetched keeps its place by id
            self._touch(key)

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        uses, keys = self._uses[layer], self._keys[layer]
        gone = []
        found = None
        for id_ in uses:
            key = keys[id_]
            if key in candidates:
                found = key
                break
            if not view.resident(key) and not view.in_flight(key):
                gone.append(id_)
        for id_ in gone:
            del uses[id_]
        return found

    def better(self, incoming: Key, victim: Key) -> bool:
        return self._last(incoming, -1) > self._last(victim, -1)


class Ranked(VictimOrder):
    """Lowest (score, last use, layer, expert) first. A subclass keeps `scores` [L, E], or overrides `ranks`.

    `last` [L, E] is the event of the last use and `now` the present one; an event is one layer of one step, and events
    are counted through all layers. A prefetched expert counts as used, not as scored, when it lands.
    """

    def setup(self, setup: Setup) -> None:
        shape = setup.layers, setup.experts
        self.scores = np.zeros(shape)
        self.last = np.full(shape, -1, dtype=np.int64)
        self.now = 0
        # Every resident and perhaps some that are gone: policies are not told of refusals, so `first` finds these.
        self._there = np.zeros(shape, dtype=bool)
        self._missed: list[Key] = []
        self._pooled = len(setup.slots) == 1

    def placed(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._there[key] = True

    def used(self, demand: Demand, view: View) -> None:
        """A subclass calls this first and then changes `scores`."""
        self.now += 1
        experts = list(demand.experts)
        self.last[demand.layer, experts] = self.now
        self._there[demand.layer, experts] = True
        self._missed = [key for key in demand.keys if key.expert not in demand.held]

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        self.last[key] = self.now
        self._there[key] = True

    def ranks(self, layers: slice) -> np.ndarray:
        """Scores of some layers as of `now`, [layers, E], all below infinity."""
        return self.scores[layers]

    def first(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        """Without sorting: in a pool, where a layer may displace dozens, a sort for each would be slow."""
        layers = slice(None) if self._pooled else slice(layer, layer + 1)
        base, experts = 0 if self._pooled else layer, self.last.shape[1]
        ranks = np.where(self._there[layers], self.ranks(layers), np.inf).reshape(-1)
        last = self.last[layers].reshape(-1)
        for key in self._missed:  # what the running layer fetched waits for its slot, and is often lowest
            if (self._pooled or key.layer == layer) and key not in candidates:
                ranks[(key.layer - base) * experts + key.expert] = np.inf
        while (least := ranks.min()) < np.inf:
            lowest = np.flatnonzero(ranks == least)
            id_ = int(lowest[last[lowest].argmin()])
            key = Key(base + id_ // experts, id_ % experts)
            if key in candidates:
                return key
            if not view.resident(key) and not view.in_flight(key):
                self._there[key] = False
            ranks[id_] = np.inf
        return None

    def better(self, incoming: Key, victim: Key) -> bool:
        return self._rank(incoming) > self._rank(victim)

    def _rank(self, key: Key) -> tuple[float, int]:
        score = self.ranks(slice(key.layer, key.layer + 1))[0, key.expert]
        return float(score), int(self.last[key])


class BestFirst(Dispatcher):
    """Residents, then the misses from the highest rank down.

    What was kept for a layer cannot be evicted for a sibling, so `IfBetter` leaves the best of residents and fetched
    ones only if these come in this order.
    """

    def __init__(self, order: Ranked) -> None:
        self._order = order

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        ranks = self._order.ranks(slice(demand.layer, demand.layer + 1))[0]
        answer = split(demand, Where.FETCH)
        return sorted(answer, key=lambda pair: (pair[1] is Where.FETCH, -ranks[pair[0]], pair[0]))
