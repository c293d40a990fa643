"""Signals of which experts the next pass will need, told one pass after another, and what each of them is worth.

A signal sees only what has happened. After each pass it scores every expert of every layer (`after`), and once more
when the next pass's tokens are known and its layers' gates have been asked in advance (`before`). Layers are worked on
together, as rows; no signal here carries anything from one layer to another, so this is the same as layer by layer.
What the scores are good for is measured in `signal_values`. Prompts are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..policies.reuse import HALF_LIVES as HALF_LIVES
from ..policies.reuse import WINDOW
from ..policies.utility import UtilityEstimator, scaled_constants
from ..traces.schema import Kind
from ..traces.views import Steps


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of n rows. counts, kept: [L, E] rows that chose the expert, and those that stayed in the text (which a
    policy learns only when the pass has ended). last: [L, E] bool, by the last row that stayed. experts: [n, L, k];
    tokens, stays: [n]; `goes_on`: the text is that of the pass before. named: [J, L, E], rows for which the gate of
    layer l, asked j + 1 layers early, chose the expert; None if they were not asked.
    """

    counts: np.ndarray
    kept: np.ndarray
    last: np.ndarray
    experts: np.ndarray
    tokens: np.ndarray
    stays: np.ndarray
    goes_on: bool
    sequence: int
    named: np.ndarray | None = None

    @property
    def needs(self) -> np.ndarray:
        """[L, E] bool."""
        return self.counts > 0


def passes(trace: Steps, most: int | None = None) -> list[Pass]:
    """The decode and verify passes of a trace, the first `most`."""
    size = trace.header.target.experts
    found: list[Pass] = []
    before = (-1, -1)
    for step in trace.steps():
        if step.kind is Kind.PREFILL:
            continue
        if most is not None and len(found) == most:
            break
        stays = step.kept
        counts = chosen(step.experts, size)
        kept = counts if stays.all() else chosen(step.experts[stays], size)
        last = chosen(step.experts[stays][-1:], size) > 0
        named = None if step.ahead is None else _named(step.ahead, size)
        here = (step.sequence, step.turn)
        found.append(Pass(counts, kept, last, step.experts, step.tokens, stays, here == before, step.sequence, named))
        before = here
    return found


def chosen(experts: np.ndarray, size: int) -> np.ndarray:
    """[L, E] rows that chose each expert; experts: [n, L, k]."""
    layers = experts.shape[1]
    flat = (np.arange(layers)[:, None] * size + experts).reshape(-1)
    return np.bincount(flat, minlength=layers * size).reshape(layers, size).astype(np.int16)


def _named(ahead: np.ndarray, size: int) -> np.ndarray:
    """[J, L, E]: what was said of layer l by layer l - j - 1; nothing of the first layers. ahead: [n, L, J, k]."""
    found = np.zeros((ahead.shape[2], ahead.shape[1], size), np.int16)
    for j in range(len(found)):
        found[j, j + 1 :] = chosen(ahead[:, : -(j + 1), j], size)
    return found


class Signal:
    """A score [L, E] of every expert: the higher, the sooner or the likelier its next use."""

    def after(self, now: Pass) -> np.ndarray:
        """A pass has ended."""
        raise NotImplementedError

    def before(self, tokens: np.ndarray, named: np.ndarray | None) -> np.ndarray | None:
        """The next pass's tokens [n] are known, and what its gates, asked early, say of its layers; None: the signal
        has nothing to do with either."""
        return None


def scored(signal: Signal, told: Sequence[Pass], late: bool = False) -> np.ndarray:
    """[T, L, E] float32: scores after each pass; `late`: when the tokens and gates of the pass after it are known."""
    scores = np.empty((len(told), *told[0].counts.shape), np.float32)
    for t, now in enumerate(told):
        score = signal.after(now)
        if late and t + 1 < len(told):
            coming = signal.before(told[t + 1].tokens, told[t + 1].named)
            score = score if coming is None else coming
        scores[t] = score
    return scores


class Scored(Signal):
    """Repeats scores that were worked out before, [T, L, E], so that several combinations can have them.

    late: those of `scored(late=True)`, if the signal has any.
    """

    def __init__(self, scores: np.ndarray, late: np.ndarray | None = None) -> None:
        self._scores, self._late, self._at = scores, late, -1

    def after(self, now: Pass) -> np.ndarray:
        self._at += 1
        return self._scores[self._at]

    def before(self, tokens: np.ndarray, named: np.ndarray | None) -> np.ndarray | None:
        return None if self._late is None else self._late[self._at]


class Of(Signal):
    """A function of the last pass."""

    def __init__(self, function: Callable[[Pass], np.ndarray]) -> None:
        self._function = function

    def after(self, now: Pass) -> np.ndarray:
        return self._function(now)


def counts(now: Pass) -> np.ndarray:
    """Share of the pass's rows."""
    return now.counts / len(now.tokens)


def kept_counts(now: Pass) -> np.ndarray:
    """Share of the rows that stayed in the text."""
    return now.kept / max(1, int(now.stays.sum()))


def last_row(now: Pass) -> np.ndarray:
    """Chosen by the last row that stayed."""
    return now.last.astype(np.float32)


def only_rejected(now: Pass) -> np.ndarray:
    """Needed for nothing but rejected drafts."""
    return ((now.counts > 0) & (now.kept == 0)).astype(np.float32)


def needs(now: Pass) -> np.ndarray:
    """Needed by the pass."""
    return now.needs.astype(np.float32)


class Rate(Signal):
    """Exponentially decayed mean, of needs or of another function of a pass; half-life in passes."""

    def __init__(self, half_life: float, of: Callable[[Pass], np.ndarray] = needs) -> None:
        self._keep, self._of = np.float32(2 ** (-1 / half_life)), of
        self._rate: np.ndarray | float = 0.0

    def after(self, now: Pass) -> np.ndarray:
        self._rate = self._keep * self._rate + (1 - self._keep) * self._of(now)
        return np.asarray(self._rate)


class Recency(Signal):
    """1 / (passes since the last use, from 1); 0 if there was none."""

    def __init__(self) -> None:
        self.age: np.ndarray | None = None

    def after(self, now: Pass) -> np.ndarray:
        if self.age is None:
            self.age = np.full(now.counts.shape, np.inf)
        self.age += 1
        self.age[now.needs] = 1
        return 1 / self.age


class Frequency(Signal):
    """Share of all passes so far; `by_age`: over the passes since the last use."""

    def __init__(self, by_age: bool = False) -> None:
        self._uses: np.ndarray | float = 0.0
        self._passes, self._recency = 0, Recency() if by_age else None

    def after(self, now: Pass) -> np.ndarray:
        self._uses = self._uses + now.needs
        self._passes += 1
        share = self._uses / self._passes
        return share if self._recency is None else share * self._recency.after(now)


class Utility(Signal):
    """MoE-SpAc's utility, with the constants and moving boundaries of `moe-spac`, as a share of its top level."""

    def __init__(self, layers: int, experts: int, draft_length: int, smoothing: float = 0.1) -> None:
        self._top, up, down = scaled_constants(draft_length, 5)
        self._estimator = UtilityEstimator(layers, experts, self._top, up, down, smoothing)

    def after(self, now: Pass) -> np.ndarray:
        for layer, row in enumerate(now.counts.astype(np.int64)):
            self._estimator.update(layer, row)
        return self._estimator.u / self._top


class Followers(Signal):
    """What a layer needed in the pass after one that needed this expert: mean over the experts needed now of the share
    of such passes, drawn to the rate of the last 64 with the weight of one pass."""

    def __init__(self, layers: int, experts: int) -> None:
        self._both = np.zeros((layers, experts, experts), np.float32)
        self._times = np.ones((layers, experts), np.float32)
        self._rate, self._before = Rate(64), np.zeros((layers, experts), np.float32)

    def after(self, now: Pass) -> np.ndarray:
        need = needs(now)
        if now.goes_on:
            self._both += self._before[:, :, None] * need[:, None, :]
            self._times += self._before
        self._before = need
        seen = need / self._times / need.sum(1, keepdims=True)  # weight of each expert that is needed now
        prior = self._rate.after(now) * seen.sum(1, keepdims=True)
        return np.matmul(seen[:, None, :], self._both)[:, 0] + prior


class TokenTable:
    """Experts by token id, learnt from rows: [L, E] chance that a row chooses each, drawn to the mean of all rows with
    the weight of one row."""

    def __init__(self, layers: int, experts: int) -> None:
        self._sums: dict[int, np.ndarray] = {}
        self._times: dict[int, int] = {}
        self._all, self._rows = np.zeros((layers, experts), np.float32), 0

    def learn(self, token: int, row: np.ndarray) -> None:
        """row: [L, k], what one row chose."""
        one = chosen(row[None], self._all.shape[1])
        self._sums[token] = self._sums.get(token, 0) + one
        self._times[token] = self._times.get(token, 0) + 1
        self._all += one
        self._rows += 1

    def chance(self, token: int) -> np.ndarray:
        mean = self._all / max(1, self._rows)
        return (self._sums.get(token, 0) + mean) / (self._times.get(token, 0) + 1)


class OwnTokens(Signal):
    """Chance that any of the next pass's tokens needs the expert, each as its earlier occurrences did, independently.
    Before they are known: the tokens of the last pass."""

    def __init__(self, layers: int, experts: int) -> None:
        self._table = TokenTable(layers, experts)

    def after(self, now: Pass) -> np.ndarray:
        for token, row in zip(now.tokens.tolist(), now.experts, strict=True):
            self._table.learn(token, row)
        return self.before(now.tokens, None)

    def before(self, tokens: np.ndarray, named: np.ndarray | None) -> np.ndarray:
        return 1 - np.prod([1 - self._table.chance(token) for token in tokens.tolist()], axis=0)


class NextTokens(Signal):
    """What the row after this token chose before: chances after the last token that stayed."""

    def __init__(self, layers: int, experts: int) -> None:
        self._table, self._last = TokenTable(layers, experts), -1

    def after(self, now: Pass) -> np.ndarray:
        tokens = now.tokens[now.stays].tolist()
        earlier = [self._last if now.goes_on else None, *tokens[:-1]]
        for token, row in zip(earlier, now.experts[now.stays], strict=True):
            if token is not None:
                self._table.learn(token, row)
        self._last = tokens[-1]
        return self._table.chance(self._last)


class Gates(Signal):
    """Share of the next pass's rows for which a layer's gate, asked `early` layers before it, chooses the expert."""

    def __init__(self, early: int) -> None:
        self._at = early - 1

    def after(self, now: Pass) -> np.ndarray:
        self._none = np.zeros(now.counts.shape)
        return self._none

    def before(self, tokens: np.ndarray, named: np.ndarray | None) -> np.ndarray:
        assert named is not None, "a trace with lookahead"
        return named[self._at] / len(tokens)


class Combined(Signal):
    """Forecast of the mean demand of the next `window` passes: ridge regression over other signals, learnt online.

    All experts of all layers share the weights; each pass is learnt from once the demand that followed is known, with
    `fade` of what was learnt before. The first guess is that every signal counts alike, and weighs as much as `prior`
    observed experts.
    """

    def __init__(self, *parts: Signal, window: int = WINDOW, fade: float = 0.999, prior: float = 100.0) -> None:
        self._parts, self._window, self._fade = parts, window, fade
        size = len(parts) + 1
        self.weights = np.r_[0.0, np.full(len(parts), 1 / len(parts))]
        self._square = np.eye(size) * prior
        self._cross = self._square @ self.weights
        self._asked: list[np.ndarray] = []  # [experts, parts + 1] of the last passes
        self._came: list[np.ndarray] = []

    def after(self, now: Pass) -> np.ndarray:
        self._came.append(needs(now))
        if len(self._asked) == self._window:
            self._learn(self._asked.pop(0), np.mean(self._came[-self._window :], axis=0))
            del self._came[: -self._window]
        self._columns = [np.ones(now.counts.shape), *(part.after(now) for part in self._parts)]
        self._asked.append(self._table())
        return self._score(now.counts.shape)

    def before(self, tokens: np.ndarray, named: np.ndarray | None) -> np.ndarray:
        for at, part in enumerate(self._parts, 1):
            said = part.before(tokens, named)
            self._columns[at] = self._columns[at] if said is None else said
        self._asked[-1] = self._table()
        return self._score(self._columns[0].shape)

    def _table(self) -> np.ndarray:
        return np.stack([column.reshape(-1) for column in self._columns], axis=1).astype(np.float32)

    def _score(self, shape: tuple[int, ...]) -> np.ndarray:
        return (self._asked[-1] @ self.weights).reshape(shape)

    def _learn(self, asked: np.ndarray, came: np.ndarray) -> None:
        self._square = self._fade * self._square + asked.T @ asked
        self._cross = self._fade * self._cross + asked.T @ came.reshape(-1)
        self.weights = np.linalg.solve(self._square, self._cross)
