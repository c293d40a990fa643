"""From what a user says to a session that stays open: for `chat` and `serve`."""

from collections.abc import Callable
from dataclasses import dataclass

from ..policies.interface import Policy
from ..traces.speculate import Options
from .cli_options import (
    LogOptions,
    PairOptions,
    SizeOptions,
    draft_length_of,
    live_policy,
    machine_of,
    policy_of,
    slots_for,
)
from .memory import CONTEXT
from .session import Session, Settings


@dataclass(frozen=True, slots=True)
class Opening:
    """The options of the command line that make a session. Memory is left for `context` tokens' keys and values."""

    policy: str
    pair: PairOptions
    size: SizeOptions
    log: LogOptions
    context: int | None
    draft_length: str | None
    max_new_tokens: int
    temperature: float
    seed: int
    allow_lossy: bool

    def check(self) -> None:
        """Raise InputError for what can be told before a model is loaded."""
        self.checked_policy(self.policy)
        draft_length_of(self.draft_length, {})
        self.log.check()
        self.size.check()

    def checked_policy(self, spec: str) -> Policy:
        """The policy that `spec` names. Raises InputError for one that cannot or may not run."""
        return live_policy(spec, self.allow_lossy)[0]

    def open(self, tell: Callable[[str, int, int], None] | None = None) -> Session:
        """Load the pair and make the session. `tell`: what is being done, how far it is, and of how much (bytes)."""
        said = tell or (lambda what, done, total: None)
        policy, chosen = policy_of(self.policy)
        length, adaptive = draft_length_of(self.draft_length, chosen)
        said("finding the models", 0, 0)
        watch = None if tell is None else lambda done, total: said("reading weights", done, total)
        models = self.pair.load(length > 0, self.context, watch)
        said("measuring this machine" if self.size.machine is None else "reading the machine's profile", 0, 0)
        machine = machine_of(self.size.machine, "real", models)
        slots = slots_for(self.size, chosen, models, machine, policy, self.context or CONTEXT)
        options = Options(
            self.max_new_tokens, length, self.temperature, seed=self.seed, stop_tokens=models.pair.stop_tokens,
            adaptive=adaptive, draft_invariant=adaptive,
        )  # fmt: skip
        said("filling slots", 0, 0)
        settings = Settings(
            machine, slots, "real", options, self.seed, self.size.budget, events=self.log.events,
            most_events=self.log.most,
        )  # fmt: skip
        return Session(models, policy, settings)
