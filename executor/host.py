"""What both clocks have in common: the host that a run drives, and the router's words as policies get them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..policies.driver import Driver
from ..policies.interface import StepInfo
from ..simulator.steptimes import StepTime
from .moe import Call
from .store import Arena, HostStore
from .times import StepTimes

# Slots beside the driver's, through which experts pass that no slot keeps.
RING = 2


@dataclass(frozen=True, slots=True)
class Routed:
    """One layer's routing as a trace holds it: ids [n, k] unsigned, weights [n, k] float16, ahead [n, J, k] or None."""

    ids: np.ndarray
    weights: np.ndarray
    ahead: np.ndarray | None = None


class Host(Protocol):
    """Owns time and buffers; asks the driver. Calls come in this order, from one thread."""

    driver: Driver
    arena: Arena

    @property
    def times(self) -> Sequence[StepTimes | StepTime]:
        """One entry for each step that has ended."""
        ...

    def draft_length(self, planned: int) -> int: ...

    def step_begins(self, step: StepInfo, context: int) -> None:
        """A forward pass of the target begins; `context` tokens are in its cache."""
        ...

    def layer(self, call: Call, route: Callable[[], Routed]) -> None:
        """Fill `call.rows`. `route` makes the router's words; its time is the policy's."""
        ...

    def step_ends(self, accepted: int, kept: np.ndarray, emitted: int) -> None: ...

    def close(self) -> None:
        """End every thread. May be called at any time, also twice."""
        ...


def fill_placement(driver: Driver, store: HostStore, arena: Arena) -> None:
    """The policy's initial placement: before the first step, and free."""
    for key, slot in driver.cache.resident.items():
        arena.load(slot, store.flat(key))
