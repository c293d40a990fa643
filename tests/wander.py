"""A policy that does everything that a policy may do."""

from typing import ClassVar

from moe_spac.policies.interface import Key, Policy, Where


class Wander(Policy):
    """Answers by hash of what it is asked: every way to serve a miss, prefetches, arbitrary victims."""

    name: ClassVar[str] = "wander"

    def __init__(self, prefetch: bool, ways: tuple[Where, ...], serial: bool = False, back: bool = False) -> None:
        self.prefetch, self.ways, self.serial_tiers, self.write_back = prefetch, ways, serial, back
        self.deaf = frozenset() if prefetch else frozenset({"next_fetch"})

    def setup(self, setup):
        self.layers, self.experts, self.asked = setup.layers, setup.experts, 0

    def dispatch(self, demand, view):
        return [(e, Where.GPU if e in demand.held else self.ways[e % len(self.ways)]) for e in demand.experts]

    def next_fetch(self, view):
        self.asked += 1
        key = Key(self.asked // 3 % self.layers, self.asked % self.experts)
        return None if view.resident(key) or view.in_flight(key) or self.asked % 4 == 0 else key

    def victim(self, incoming, candidates, view):
        found = list(candidates)
        return found[incoming.expert % len(found)] if found and incoming.expert % 3 else None

    def keep_fetch(self, key, view):
        return key.expert % 2 == 0
