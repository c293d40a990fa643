"""Made-up forecasts of a stated quality, for traces in which nobody asked the next layers' gates.

Synthetic and most imported traces have no `ahead`, without which a policy that prefetches by next-gate forecasts does
nothing. What such forecasts would be worth can be asked by assuming how often they are right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..traces.errors import InputError
from ..traces.schema import Header, Step, id_dtype
from ..traces.views import Steps


@dataclass(frozen=True, slots=True)
class Foretold:
    """A trace with `ahead` made up: of the experts that a token chooses j layers on, each is named with the chance
    `recall[j - 1]`, and the rest of the top-k is drawn evenly from those that it does not choose.

    So precision and recall of one token's forecast are the same. Draws depend on (seed, sequence, position, row), not
    on what was read before. InputError for chances outside 0..1 or a trace that has forecasts of its own.
    """

    trace: Steps
    recall: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.recall or not all(0 <= chance <= 1 for chance in self.recall):
            raise InputError(f"--forecast {_words(self.recall)}: give chances from 0 to 1, one for each layer ahead")
        if self.trace.header.lookahead:
            raise InputError("--forecast: the trace has forecasts of its own; leave it out")

    @property
    def header(self) -> Header:
        header = self.trace.header
        note = f"Next-gate forecasts are made up: right with probability {_words(self.recall)}, seed {self.seed}."
        return replace(header, lookahead=len(self.recall), notes=f"{header.notes} {note}".strip())

    def steps(self) -> Iterator[Step]:
        experts = self.trace.header.target.experts
        for step in self.trace.steps():
            yield replace(step, ahead=self._ahead(step, experts))

    def _ahead(self, step: Step, experts: int) -> np.ndarray:
        """[n, L, J, k]."""
        rng = np.random.default_rng((self.seed, step.sequence, step.turn, int(step.positions[0])))
        n, layers, k = step.experts.shape
        later = np.arange(layers)
        named = []
        for j, chance in enumerate(self.recall, 1):
            true = step.experts[:, np.minimum(later + j, layers - 1)].astype(np.intp)
            order = rng.random((n, layers, experts), np.float32)  # of those that are not chosen
            kept = rng.random((n, layers, k)) < chance
            np.put_along_axis(order, true, np.where(kept, -1.0, 2.0).astype(np.float32), axis=2)
            named.append(np.argpartition(order, k - 1, axis=2)[:, :, :k])
        return np.stack(named, axis=2).astype(id_dtype(experts))


def foretold(trace: Steps, text: str | None, seed: int = 0) -> Steps:
    """The trace with the forecasts that `--forecast` asks for; as it is without. InputError as `Foretold`."""
    return trace if text is None else Foretold(trace, _chances(text), seed)


def _chances(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--forecast {text}: not a list of chances; write for example 0.8,0.7,0.6") from None


def _words(recall: Sequence[float]) -> str:
    return ",".join(f"{chance:g}" for chance in recall)
