"""From what a user says to a session that stays open: for `chat` and `serve`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..policies.interface import Policy
from ..traces.console import parse_size
from ..traces.speculate import Options
from .cli_options import default_device, draft_length_of, live_policy, machine_of, policy_of, slots_for
from .models import load_models
from .session import Session, Settings
from .stores import Choice

DEFAULT_CONTEXT = 4096  # tokens whose keys and values `--vram` leaves room for


@dataclass(frozen=True, slots=True)
class Opening:
    """The options of the command line that make a session."""

    policy: str
    target: str | None
    draft: str | None
    machine: str | None
    slots: int | None
    cache_fraction: float | None
    vram: str | None
    context: int | None
    draft_length: str | None
    max_new_tokens: int
    temperature: float
    seed: int
    store: str
    store_memory: str
    store_folder: Path | None
    tokenizer: str | None
    dtype: str
    device: str | None
    allow_lossy: bool
    events: Path | None

    def check(self) -> None:
        """Raise InputError for what can be told before a model is loaded."""
        self.checked_policy(self.policy)
        draft_length_of(self.draft_length, {})
        if self.vram:
            parse_size(self.vram, "--vram")

    def checked_policy(self, spec: str) -> Policy:
        """The policy that `spec` names. Raises InputError for one that cannot or may not run."""
        return live_policy(spec, self.allow_lossy)[0]

    def open(self, tell: Callable[[str, int, int], None] | None = None) -> Session:
        """Load the pair and make the session. `tell`: what is being done, how far it is, and of how much (bytes)."""
        said = tell or (lambda what, done, total: None)
        policy, chosen = policy_of(self.policy)
        length, adaptive = draft_length_of(self.draft_length, chosen)
        said("finding the models", 0, 0)
        models = load_models(
            self.target,
            self.draft if length else "none",
            self.dtype,
            self.device or default_device(),
            Choice(self.store, self.store_memory, self.store_folder),
            self.tokenizer,
            None if tell is None else lambda done, total: said("reading weights", done, total),
        )
        said("measuring this machine" if self.machine is None else "reading the machine's profile", 0, 0)
        machine = machine_of(self.machine, "real", models)
        budget = parse_size(self.vram, "--vram") if self.vram else None
        sizes = self.slots, self.cache_fraction, budget
        slots = slots_for(*sizes, chosen, models, machine, policy, self.context or DEFAULT_CONTEXT)
        stops = models.pair.stop_tokens
        options = Options(
            self.max_new_tokens, length, self.temperature, seed=self.seed, stop_tokens=stops, adaptive=adaptive
        )
        said("filling slots", 0, 0)
        settings = Settings(machine, slots, "real", options, self.seed, budget, events=self.events)
        return Session(models, policy, settings)
