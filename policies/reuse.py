"""How soon experts are needed again: a linear forecast from how often and how lately they were, learnt as it goes."""

from collections.abc import Collection, Sequence

import numpy as np

try:
    from . import _marginal as compiled  # csrc/reuse.c
except ImportError:
    compiled = None  # there was no C compiler; numpy computes the same bits, in more time

HALF_LIVES = (1, 4, 16, 64, 256)  # passes
WINDOW = 3  # passes whose demand is forecast
PRIOR = 100.0  # experts seen for a window that the first guess weighs as much as
FADE = 0.999  # what is left of the weight of what was learnt, each time something is

RECENCY, SEQUEL, RATES = 1, 2, 3  # rows of a layer's features beside the constant; the rates are the last ones
FEATURES = RATES + len(HALF_LIVES)  # as many
# Rows of a layer's state. First its features; then those from which its running window is forecast, and the passes that
# needed an expert since; whom the last pass needed (1); passes that needed an expert and have a next one, and one more;
# and, a row for every expert a, in how many of its next passes each b was needed.
WINDOW_BEGAN, SINCE, NEED, USES, PAIRS = FEATURES, 2 * FEATURES, 2 * FEATURES + 1, 2 * FEATURES + 2, 2 * FEATURES + 3
KEEP = np.array([2 ** (-1 / h) for h in HALF_LIVES], np.float32)[:, None]


class Reuse:
    """`demand` [L, E]: the expected share of a layer's next `WINDOW` passes that need the expert.

    Features of an expert: 1 / passes since its last use; how often the layer needed it in the pass after one that
    needed what it needs now (`_sequel`); and its rate of use in means of five half-lives. Ridge
    regression over the experts of all layers finds their weights as the run goes on, starting from the mean of the
    rates; from every layer each `WINDOW`-th pass is learnt, once the demand that followed it is known. What rejected
    drafts needed counts like all else, for the next pass will draft such tokens again (measured in notebook 8).
    """

    def __init__(self, layers: int, experts: int) -> None:
        # Not `zeros`, whose pages are made when first written to, which would be while deciding.
        self._state = np.full((layers, PAIRS + experts, experts), 0, np.float32)
        self._state[:, [0, WINDOW_BEGAN, USES]] = 1
        self.demand = np.zeros((layers, experts), np.float32)
        self.weights = np.zeros(FEATURES, np.float32)
        self.weights[RATES:] = 1 / len(HALF_LIVES)
        self._square = np.eye(FEATURES) * PRIOR
        self._cross = self._square @ self.weights
        self._left = [1 + layer % WINDOW for layer in range(layers)]  # passes until a window ends, at first fewer
        self._ended = np.full((layers, FEATURES + 1, experts), 0, np.float32)  # windows not yet learnt, in order
        self._count = 0  # of them

    @property
    def features(self) -> np.ndarray:
        """[L, FEATURES, E]"""
        return self._state[:, :FEATURES]

    def seen(self, layer: int, experts: Sequence[int], named: Collection[int] = ()) -> int:
        """A pass needs these experts; the layer's row of `demand` is made anew. How many of `named` it needs."""
        ends = self._left[layer] == 1
        at = self._count if ends else -1
        if compiled:
            arrays = self._state, self.demand, self._ended, self.weights, KEEP
            right = compiled.see(layer, experts, named, at, *arrays)
        else:
            right = self._see(layer, experts, named, at)
        self._left[layer] = WINDOW if ends else self._left[layer] - 1
        if ends:
            self._count += 1
            if layer == 0 or self._count == len(self._ended):  # once in a few passes
                self._learn()
                self._forecast(layer)
        return right

    def _see(self, layer: int, experts: Sequence[int], named: Collection[int], ends_at: int) -> int:
        """All that one more pass changes but what is learnt: what `compiled.see` computes, to the last bit.

        ends_at: where the layer's window, which ends, goes in `_ended`; below 0: it does not end.
        """
        state = self._state[layer]
        need, recency, rates = state[NEED], state[RECENCY], state[RATES:FEATURES]
        before = np.flatnonzero(need)
        need[:] = 0
        need[list(experts)] = 1
        recency /= 1 + recency
        np.maximum(recency, need, out=recency)
        rates += (1 - KEEP) * (need - rates)
        state[SEQUEL] = self._sequel(layer, before, np.flatnonzero(need))
        state[SINCE] += need
        self._forecast(layer)
        if ends_at >= 0:
            self._ended[ends_at] = state[WINDOW_BEGAN : SINCE + 1]
            self._begin_window(layer)
        return int(need[list(named)].sum())

    def _sequel(self, layer: int, before: np.ndarray, now: np.ndarray) -> np.ndarray:
        """[E]: mean over the experts needed now of the share of passes after theirs that needed each expert, drawn to
        its rate of half-life 64 with the weight of one pass."""
        state = self._state[layer]
        pairs, uses, rate = state[PAIRS:], state[USES], state[RATES + HALF_LIVES.index(64)]
        pairs[before] += state[NEED]
        uses[before] += 1
        weights = 1 / (len(now) * uses[now])
        return (weights[:, None] * (pairs[now] + rate)).sum(axis=0)

    def read(self, layer: int, experts: Sequence[int], shares: Sequence[float], tokens: int) -> None:
        """A prompt counts as `tokens` passes, each of which needs `experts` with the chances `shares`."""
        need = np.zeros(self.demand.shape[1], np.float32)
        need[list(experts)] = shares
        rates = self._state[layer, RATES:FEATURES]
        rates += (1 - KEEP**tokens) * (need - rates)
        self._state[layer, NEED] = 0  # what came before says nothing of what comes after
        self._begin_window(layer)
        self._left[layer] = WINDOW
        self._forecast(layer)

    def _forecast(self, layer: int) -> None:
        # Row by row, not `@`, whose order of additions is the library's own.
        self.demand[layer] = (self.weights[:, None] * self._state[layer, :FEATURES]).sum(axis=0)

    def _begin_window(self, layer: int) -> None:
        state = self._state[layer]
        state[WINDOW_BEGAN:SINCE] = state[:FEATURES]
        state[SINCE] = 0

    def _learn(self) -> None:
        """Weights from all windows that have ended: each fades what was learnt before it."""
        count, self._count = self._count, 0
        ended = self._ended[:count]
        fade = FADE ** np.arange(count)[::-1]
        products = fade @ (ended @ ended.transpose(0, 2, 1)).reshape(count, -1)
        products = products.reshape(FEATURES + 1, FEATURES + 1)
        self._square = FADE**count * self._square + products[:-1, :-1]
        self._cross = FADE**count * self._cross + products[:-1, -1] / WINDOW
        self.weights = np.linalg.solve(self._square, self._cross).astype(np.float32)
