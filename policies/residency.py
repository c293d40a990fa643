"""Which experts sit in which slot. Capacity and physical slots are kept here, preferences are not.

Assumptions: all experts have one size; experts are read-only, so evicting one needs no copy; a copy on its way
already owns the slot it will land in; experts fetched for the running layer wait in staging slots until the layer ends.
"""

from collections.abc import Collection, Iterator, Sequence

from .interface import Key


def even_shares(slots: int, layers: int) -> tuple[int, ...]:
    """Slots of each layer where a total is shared out evenly, the remainder to the first ones."""
    return tuple(slots // layers + (i < slots % layers) for i in range(layers))


class Residency:
    """Slots, their occupants, and the copies that are on their way into one.

    `capacity` has one entry a layer, or a single one for a pool shared by all layers; it may be lowered and raised
    again up to what it was at first. Physical slots are numbered from 0; `staging` of them are beyond the capacity.
    `by_layer` holds the resident experts of each layer and `used` the slots taken in each scope: read, do not change.
    """

    def __init__(self, layers: int, capacity: tuple[int, ...], staging: int) -> None:
        self.capacity = capacity
        self.staging = staging
        self.physical_slots = sum(capacity) + staging
        self.resident: dict[Key, int] = {}
        self.flying: dict[Key, int] = {}
        self.staged: dict[Key, int] = {}
        self.by_layer: list[set[int]] = [set() for _ in range(layers)]
        self.used = [0] * len(capacity)
        self.scopes = list(range(layers)) if len(capacity) > 1 else [0] * layers
        self._free = list(range(self.physical_slots))[::-1]

    def free(self, layer: int) -> int:
        scope = self.scopes[layer]
        return self.capacity[scope] - self.used[scope]

    def residents(self, layer: int) -> list[int]:
        return sorted(self.by_layer[layer])

    def slot(self, key: Key) -> int:
        """Physical slot of a resident, staged or flying expert; KeyError if it is none of these."""
        for where in (self.resident, self.staged, self.flying):
            if key in where:
                return where[key]
        raise KeyError(key)

    def stage(self, keys: Sequence[Key]) -> None:
        assert len(self.staged) + len(keys) <= self.staging
        for key in keys:
            self.staged[key] = self._free.pop()

    def unstage(self, key: Key) -> None:
        self._free.append(self.staged.pop(key))

    def admit(self, key: Key) -> None:
        """Keep a staged expert: its staging slot becomes its own, nothing is copied."""
        scope = self.scopes[key[0]]
        assert self.used[scope] < self.capacity[scope]
        self.used[scope] += 1
        self.resident[key] = self.staged.pop(key)
        self.by_layer[key[0]].add(key[1])

    def place(self, key: Key) -> None:
        """Make an expert resident at once, before the first step."""
        self.take_off(key)
        self.land(key)

    def take_off(self, key: Key) -> None:
        """Reserve a slot for a copy that starts now."""
        scope = self.scopes[key[0]]
        assert self.used[scope] < self.capacity[scope]
        self.used[scope] += 1
        self.flying[key] = self._free.pop()

    def land(self, key: Key) -> None:
        self.resident[key] = self.flying.pop(key)
        self.by_layer[key[0]].add(key[1])

    def call_off(self, key: Key) -> None:
        """Give back the slot of a copy that will not be completed."""
        self._free.append(self.flying.pop(key))
        self.used[self.scopes[key[0]]] -= 1

    def evict(self, key: Key) -> None:
        self._free.append(self.resident.pop(key))
        self.by_layer[key[0]].remove(key[1])
        self.used[self.scopes[key[0]]] -= 1

    def candidates(self, layer: int, spared: Collection[Key]) -> "Evictable":
        """Residents that may make room for an expert of `layer`; `spared` may grow meanwhile."""
        layers = range(len(self.by_layer)) if len(self.capacity) == 1 else range(layer, layer + 1)
        return Evictable(self, layers, spared)

    def check(self) -> None:
        """Every slot is used once and no scope holds more than its capacity. Tests call this after every step."""
        slots = [*self.resident.values(), *self.flying.values(), *self.staged.values(), *self._free]
        assert sorted(slots) == list(range(self.physical_slots))
        used = [0] * len(self.capacity)
        for key in (*self.resident, *self.flying):
            used[self.scopes[key.layer]] += 1
        assert used == self.used
        assert all(u <= c for u, c in zip(used, self.capacity, strict=True))
        assert {Key(la, e) for la, experts in enumerate(self.by_layer) for e in experts} == self.resident.keys()


class Evictable:
    """A live view of the residents of some layers, without the spared ones; ascending by (layer, expert)."""

    __slots__ = ("_layers", "_residency", "_spared")

    def __init__(self, residency: Residency, layers: range, spared: Collection[Key]) -> None:
        self._residency, self._layers, self._spared = residency, layers, spared

    def __contains__(self, key: object) -> bool:
        return key in self._residency.resident and key[0] in self._layers and key not in self._spared  # type: ignore[index]

    def __iter__(self) -> Iterator[Key]:
        for layer in self._layers:
            for expert in self._residency.residents(layer):
                key = Key(layer, expert)
                if key not in self._spared:
                    yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)
