"""Which experts sit in which slot. Capacity and physical slots are kept here, preferences are not.

Assumptions: all experts have one size; experts are read-only, so evicting one needs no copy; a copy on its way
already owns the slot it will land in; experts fetched for the running layer wait in staging slots until the layer ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from .interface import Key


def even_shares(slots: int, layers: int) -> tuple[int, ...]:
    """Slots of each layer where a total is shared out evenly, the remainder to the first ones."""
    return tuple(slots // layers + (i < slots % layers) for i in range(layers))


@lru_cache(maxsize=8)
def all_keys(layers: int, experts: int) -> tuple[tuple[Key, ...], ...]:
    """Every expert's key by layer; the same objects in every run, as making them takes longer than a short run."""
    return tuple(tuple(Key(layer, expert) for expert in range(experts)) for layer in range(layers))


class Residency:
    """Slots, their occupants, and the copies that are on their way into one.

    `capacity` has one entry a layer, or a single one for a pool shared by all layers; it may be lowered and raised
    again up to what it was at first. Physical slots are numbered from 0; `staging` of them are beyond the capacity.
    `keys` has every expert's key by layer, `by_layer` the slots of each layer's resident experts; `used` are the slots
    taken in each scope and `evictable` the residents there that may go: read, do not change.
    """

    def __init__(self, layers: int, experts: int, capacity: tuple[int, ...], staging: int) -> None:
        self.capacity = capacity
        self.staging = staging
        self.physical_slots = sum(capacity) + staging
        self.keys = all_keys(layers, experts)
        self.by_layer: list[dict[int, int]] = [{} for _ in range(layers)]
        self.resident = Residents(self.by_layer, self.keys)
        self.flying: dict[Key, int] = {}
        self.staged: dict[Key, int] = {}
        self.used = [0] * len(capacity)
        self.scopes = list(range(layers)) if len(capacity) > 1 else [0] * layers
        parts = [slice(None)] if len(capacity) == 1 else [slice(layer, layer + 1) for layer in range(layers)]
        self.evictable = [Evictable(self.by_layer[part], self.keys[part]) for part in parts]
        self._free = list(range(self.physical_slots))[::-1]

    def free(self, layer: int) -> int:
        scope = self.scopes[layer]
        return self.capacity[scope] - self.used[scope]

    def residents(self, layer: int) -> list[int]:
        return sorted(self.by_layer[layer])

    def slot(self, key: Key) -> int:
        """Physical slot of a resident, staged or flying expert; KeyError if it is none of these."""
        slot = self.by_layer[key.layer].get(key.expert)
        if slot is None:
            slot = self.staged.get(key)
        return self.flying[key] if slot is None else slot

    def stage(self, layer: int, experts: Sequence[int]) -> None:
        assert len(self.staged) + len(experts) <= self.staging
        keys = self.keys[layer]
        for expert in experts:
            self.staged[keys[expert]] = self._free.pop()

    def unstage(self, key: Key) -> None:
        self._free.append(self.staged.pop(key))

    def admit(self, key: Key) -> None:
        """Keep a staged expert: its staging slot becomes its own, nothing is copied. Not yet `evictable`."""
        scope = self.scopes[key[0]]
        assert self.used[scope] < self.capacity[scope]
        self.used[scope] += 1
        self.by_layer[key[0]][key[1]] = self.staged.pop(key)

    def exchange(self, victim: Key, key: Key) -> None:
        """`evict` and `admit` in one, for two of one scope."""
        layer, expert = key
        self._free.append(self.by_layer[victim[0]].pop(victim[1]))
        self.by_layer[layer][expert] = self.staged.pop(key)
        self.evictable[self.scopes[layer]].remove(victim)

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
        self.by_layer[key[0]][key[1]] = self.flying.pop(key)
        self.evictable[self.scopes[key[0]]].add(key)

    def call_off(self, key: Key) -> None:
        """Give back the slot of a copy that will not be completed."""
        self._free.append(self.flying.pop(key))
        self.used[self.scopes[key[0]]] -= 1

    def evict(self, key: Key) -> None:
        scope = self.scopes[key[0]]
        self._free.append(self.by_layer[key[0]].pop(key[1]))
        self.evictable[scope].remove(key)
        self.used[scope] -= 1

    def check(self) -> None:
        """Every slot is used once and no scope holds more than its capacity. Tests call this after every step."""
        slots = [*self.resident.values(), *self.flying.values(), *self.staged.values(), *self._free]
        assert sorted(slots) == list(range(self.physical_slots))
        used = [0] * len(self.capacity)
        for key in (*self.resident, *self.flying):
            used[self.scopes[key.layer]] += 1
        assert used == self.used
        assert all(u <= c for u, c in zip(used, self.capacity, strict=True))
        assert list(self.resident) == [key for scope in self.evictable for key in scope]
        assert all(len(scope) == len(list(scope)) for scope in self.evictable)


class Residents(Mapping[Key, int]):
    """Slots of all residents, in ascending order of their keys."""

    def __init__(self, by_layer: Sequence[dict[int, int]], keys: Sequence[tuple[Key, ...]]) -> None:
        self._by_layer, self._keys = by_layer, keys

    def __getitem__(self, key: Key) -> int:
        return self._by_layer[key[0]][key[1]]

    def __iter__(self) -> Iterator[Key]:
        for experts, keys in zip(self._by_layer, self._keys, strict=True):
            yield from (keys[e] for e in sorted(experts))

    def __len__(self) -> int:
        return sum(map(len, self._by_layer))

    def __contains__(self, key: object) -> bool:
        layer, expert = key  # type: ignore[misc]
        return 0 <= layer < len(self._by_layer) and expert in self._by_layer[layer]


class Evictable(set[Key]):
    """The residents of some layers that may be evicted now; iterates in ascending order.

    A set that is kept up to date, because a policy may ask for membership of every resident at every miss.
    """

    def __init__(self, by_layer: Sequence[dict[int, int]], keys: Sequence[tuple[Key, ...]]) -> None:
        super().__init__()
        self._by_layer, self._keys = by_layer, keys

    def __iter__(self) -> Iterator[Key]:
        for experts, keys in zip(self._by_layer, self._keys, strict=True):
            for expert in sorted(experts):
                if (key := keys[expert]) in self:
                    yield key
