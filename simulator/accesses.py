"""A trace as one long list of accesses: what a cache sees, and all that counts and bounds depend on."""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from ..traces.schema import Kind
from ..traces.views import Steps

BATCH = 256  # steps that are sorted together


@dataclass(frozen=True)
class Accesses:
    """Every needed expert of every event (one layer of one step), in the order of the events, ascending within each.

    keys: [A], layer * experts + expert. loads: [A], tokens that chose it. begins: [S + 1], step s has the accesses
    begins[s]:begins[s + 1]. assignments: [S], a layer's choices in a step, tokens x top-k. decode: [S] bool, False for
    prefill. It takes 16 bytes an access, so memory grows with the trace.
    """

    layers: int
    experts: int
    keys: np.ndarray
    loads: np.ndarray
    begins: np.ndarray
    assignments: np.ndarray
    decode: np.ndarray

    @classmethod
    def of(cls, trace: Steps) -> "Accesses":
        shape = trace.header.target
        layers, experts = len(shape.moe_layers), shape.experts
        nothing = np.zeros(0, np.int64)
        keys, loads, sizes, assignments, decode = [nothing], [nothing], [nothing], [], []
        steps = iter(trace.steps())
        while batch := [(s.experts, s.kind) for s in islice(steps, BATCH)]:
            places, tokens = np.unique(_places([ids for ids, _ in batch], layers, experts), return_counts=True)
            step, key = np.divmod(places, layers * experts)
            keys.append(key)
            loads.append(tokens)
            sizes.append(np.bincount(step, minlength=len(batch)))
            assignments += [len(ids) * ids.shape[2] for ids, _ in batch]
            decode += [kind is not Kind.PREFILL for _, kind in batch]
        begins = np.r_[0, np.cumsum(np.concatenate(sizes))]
        columns = np.concatenate(keys), np.concatenate(loads), begins, np.array(assignments, np.int64)
        return cls(layers, experts, *columns, np.array(decode, bool))

    @property
    def steps(self) -> int:
        return len(self.decode)

    @cached_property
    def step_of(self) -> np.ndarray:
        """[A]: the step of each access."""
        return np.repeat(np.arange(self.steps), np.diff(self.begins))

    @cached_property
    def events(self) -> np.ndarray:
        """[A]: step * layers + layer of each access."""
        return self.step_of * self.layers + self.keys // self.experts

    @property
    def ids(self) -> np.ndarray:
        """[A]: the bare expert of each access."""
        return self.keys % self.experts

    @cached_property
    def run_starts(self) -> np.ndarray:
        """[S] bool: decode steps that follow prefill, or nothing."""
        return ~np.r_[False, self.decode[:-1]] & self.decode

    def only_decode(self) -> "Accesses":
        """The decode and verify steps alone. Where runs begin is lost: take `run_starts` before."""
        of_decode = self.decode[self.step_of]
        begins = np.r_[0, np.cumsum(np.diff(self.begins)[self.decode])]
        kept = self.decode[self.decode]
        columns = self.keys[of_decode], self.loads[of_decode], begins, self.assignments[self.decode]
        return Accesses(self.layers, self.experts, *columns, kept)

    def by_event(self, values: np.ndarray) -> np.ndarray:
        """[S, L]: sums of whole numbers, [A], over the accesses of each event."""
        sums = np.bincount(self.events, weights=values, minlength=self.steps * self.layers)
        return sums.astype(np.int64).reshape(self.steps, self.layers)

    @cached_property
    def _by_key(self) -> np.ndarray:
        """[A]: accesses by key, and by time for each."""
        return np.argsort(self.keys, kind="stable")

    @cached_property
    def following(self) -> np.ndarray:
        """[A]: the next access of the same key, or 0, which follows none."""
        order, following = self._by_key, np.zeros(len(self.keys), np.int64)
        same = self.keys[order[1:]] == self.keys[order[:-1]]
        following[order[:-1][same]] = order[1:][same]
        return following

    @cached_property
    def uses(self) -> np.ndarray:
        """[A]: how often the key was accessed until then, this access included."""
        order = self._by_key
        uses = np.empty(len(order), np.int64)
        firsts = np.searchsorted(self.keys[order], self.keys[order])
        uses[order] = np.arange(len(order)) - firsts + 1
        return uses

    @cached_property
    def _timeline(self) -> np.ndarray:
        return self.keys[self._by_key] * len(self.keys) + self._by_key

    def first_from(self, access: int) -> np.ndarray:
        """The first access from `access` on of each key that has one, ascending."""
        every = np.arange(self.layers * self.experts)
        at = np.searchsorted(self._timeline, every * len(self.keys) + access)
        found = self._by_key[np.minimum(at, len(self.keys) - 1)]
        there = (at < len(self.keys)) & (self.keys[found] == every)
        return np.sort(found[there])


def _places(batch: list[np.ndarray], layers: int, experts: int) -> np.ndarray:
    """Each assignment of some steps as a position in [steps, L, E]; one [n, L, k] of ids a step."""
    steps = np.repeat(np.arange(len(batch)), [len(ids) for ids in batch])
    rows = steps[:, None, None] * layers + np.arange(layers)[:, None]
    return (rows * experts + np.concatenate(batch)).reshape(-1)
