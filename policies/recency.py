"""Fetch on demand, evict the least recently used."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .interface import Candidates, Demand, Key, Policy, Scope, Setup, View, Where


@dataclass
class ArLru(Policy):
    """On-demand loading with LRU eviction (Mixtral-Offloading, arXiv 2312.17238).

    Theirs: each layer is its own eviction group; residents work first, then the misses, which the GPU computes after
    their copy; the whole demand counts as used before a victim is chosen; no prefetch in the release. "AR" is the
    MoE-SpAc paper's word for it: no speculation goes into its decisions.
    Ours: weights are read-only, so a victim is dropped and not copied back (their swap is an artefact of one fixed
    host buffer); the cache starts empty instead of with the first ids; a resident that this very layer needed is not
    evicted for a sibling of the same layer, which passes through instead; `scope` may be "global".
    """

    name: ClassVar[str] = "ar-lru"
    scope: Scope = "layer"

    def setup(self, setup: Setup) -> None:
        groups = setup.layers if self.scope == "layer" else 1
        self._uses: list[OrderedDict[Key, int]] = [OrderedDict() for _ in range(groups)]
        self._event = 0

    def _group(self, layer: int) -> OrderedDict[Key, int]:
        return self._uses[layer if self.scope == "layer" else 0]

    def dispatch(self, demand: Demand, view: View) -> Sequence[tuple[int, Where]]:
        self._event += 1
        uses = self._group(demand.layer)
        hits, misses = [], []
        for expert in demand.experts:
            key = Key(demand.layer, expert)
            uses[key] = self._event
            uses.move_to_end(key)
            if view.resident(key):
                hits.append((expert, Where.GPU))
            else:
                misses.append((expert, Where.FETCH))
        return hits + misses

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        uses = self._group(incoming.layer)
        newest = uses.get(incoming, self._event)
        gone = []
        found = None
        for key, event in uses.items():
            if event >= newest:
                break
            if key in candidates:
                found = key
                break
            if not view.resident(key):
                gone.append(key)
        for key in gone:
            del uses[key]
        return found
