"""How good a policy's victims are, judged with the future: costly, so only on request."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..policies.future import NEVER, Future
from ..policies.interface import Candidates, Demand, Key, Policy, StepInfo, View
from ..traces.schema import Kind
from .definitions import Metrics, per


@dataclass(slots=True)
class Picks:
    """Victims of decode that were chosen among several residents.

    Regret of a pick: by how many events (one layer of one step) it is needed sooner than the resident that MIN would
    give up; the end of the trace stands for "never". A pick without regret is in the optimal set, ties included.
    """

    future: Future
    layers: int
    steps: int
    step: int = 0
    layer: int = -1
    counted: bool = False
    picks: int = 0
    optimal: int = 0
    regret: int = 0

    def begins(self, step: StepInfo) -> None:
        self.step, self.layer, self.counted = step.index, -1, step.kind is not Kind.PREFILL

    def next_event(self, key: Key) -> int:
        """Number of the next event that needs `key`, at most that of the trace's end."""
        over = key.layer <= self.layer  # this step's event of that layer is over, or is the present one
        step = self.future.next_use(key, self.step if over else self.step - 1)
        return self.layers * self.steps if step == NEVER else step * self.layers + key.layer

    def judge(self, victim: Key | None, candidates: Iterable[Key]) -> None:
        if victim is None or not self.counted:
            return
        events = [self.next_event(key) for key in candidates]
        if len(events) > 1:
            lost = max(events) - self.next_event(victim)
            self.picks += 1
            self.regret += lost
            self.optimal += lost == 0

    def metrics(self) -> Metrics:
        return {
            "victim_picks": self.picks,
            "victim_optimal_share": per(self.optimal, self.picks),
            "victim_regret_events_mean": per(self.regret, self.picks),
        }


def watch(policy: Policy, future: Future, layers: int, steps: int) -> Picks:
    """Judge the victims that `policy` names from now on; its answers stay what they are.

    The object gets a subclass of its own class, so that a host sees the same methods overridden as before.
    """
    picks = Picks(future, layers, steps)
    own = type(policy)

    class Watched(own):
        __slots__ = ()

        def step_begins(self, step: StepInfo) -> None:
            picks.begins(step)
            super().step_begins(step)

        def dispatch(self, demand: Demand, view: View):
            picks.layer = demand.layer
            return super().dispatch(demand, view)

        def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
            chosen = super().victim(incoming, candidates, view)
            picks.judge(chosen, candidates)
            return chosen

    policy.__class__ = Watched
    return picks
