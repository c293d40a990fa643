"""How soon experts are needed again: a linear forecast from how often and how lately they were, learnt as it goes."""

from collections.abc import Sequence

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
        size = RATES + len(HALF_LIVES)
        self.features = np.zeros((layers, size, experts), np.float32)
        self.features[:, 0] = 1.0
        self.demand = np.zeros((layers, experts), np.float32)
        self.weights = np.zeros(size, np.float32)
        self.weights[RATES:] = 1 / len(HALF_LIVES)
        self._square = np.eye(size) * PRIOR
        self._cross = self._square @ self.weights
        # Of each layer, features from which its running window is forecast, and passes that needed the expert since.
        self._window = np.zeros((layers, size + 1, experts), np.float32)
        self._window[:, 0] = 1.0
        self._left = [1 + layer % WINDOW for layer in range(layers)]  # passes until it ends; the first ones are short
        self._need = np.zeros(experts, np.float32)
        self._pairs = np.zeros((layers, experts, experts), np.float32)  # [l, a, b]: b was needed right after a
        self._uses = np.ones((layers, experts), np.float32)
        self._last = np.zeros((layers, experts), np.float32)  # 1: needed by the pass before
        self._ended = np.zeros_like(self._window)  # windows not yet learnt, in order
        self._count = 0  # of them

    def seen(self, layer: int, experts: Sequence[int]) -> None:
        """A pass needs these experts; the layer's row of `demand` is made anew."""
        if compiled:
            arrays = self.features, self._pairs, self._uses, self._last, self._window, self.demand
            compiled.see(layer, experts, *arrays, self.weights, KEEP, self._need)
        else:
            self._see(layer, experts)
        self._left[layer] -= 1
        if not self._left[layer]:
            self._end_window(layer)

    def _see(self, layer: int, experts: Sequence[int]) -> None:
        """Features, counts and forecast after one more pass: what `compiled.see` computes, to the last bit."""
        features, last, need = self.features[layer], self._last[layer], self._need
        need[:] = 0
        need[list(experts)] = 1
        recency = features[RECENCY]
        recency /= 1 + recency
        np.maximum(recency, need, out=recency)
        rates = features[RATES:]
        rates += (1 - KEEP) * (need - rates)
        features[SEQUEL] = self._sequel(layer, np.flatnonzero(last), np.flatnonzero(need))
        self._window[layer, -1] += need
        last[:] = need
        self._forecast(layer)

    def _sequel(self, layer: int, before: np.ndarray, now: np.ndarray) -> np.ndarray:
        """[E]: mean over the experts needed now of the share of passes after theirs that needed each expert, drawn to
        its rate of half-life 64 with the weight of one pass."""
        pairs, uses = self._pairs[layer], self._uses[layer]
        pairs[before] += self._need
        uses[before] += 1
        weights = 1 / (len(now) * uses[now])
        rate = self.features[layer, RATES + HALF_LIVES.index(64)]
        return (weights[:, None] * (pairs[now] + rate)).sum(axis=0)

    def read(self, layer: int, experts: Sequence[int], shares: Sequence[float], tokens: int) -> None:
        """A prompt counts as `tokens` passes, each of which needs `experts` with the chances `shares`."""
        need = self._need
        need[:] = 0
        need[list(experts)] = shares
        rates = self.features[layer, RATES:]
        rates += (1 - KEEP**tokens) * (need - rates)
        self._last[layer] = 0  # what came before says nothing of what comes after
        self._begin_window(layer)
        self._forecast(layer)

    def _forecast(self, layer: int) -> None:
        # Row by row, not `@`, whose order of additions is the library's own.
        self.demand[layer] = (self.weights[:, None] * self.features[layer]).sum(axis=0)

    def _begin_window(self, layer: int) -> None:
        self._window[layer, :-1] = self.features[layer]
        self._window[layer, -1] = 0
        self._left[layer] = WINDOW

    def _end_window(self, layer: int) -> None:
        self._ended[self._count] = self._window[layer]
        self._count += 1
        self._begin_window(layer)
        if layer == 0 or self._count == len(self._ended):  # once in a few passes
            self._learn()
            self._forecast(layer)

    def _learn(self) -> None:
        """Weights from all windows that have ended: each fades what was learnt before it."""
        count, self._count = self._count, 0
        ended = self._ended[:count]
        fade = FADE ** np.arange(count)[::-1]
        products = np.tensordot(fade, ended @ ended.transpose(0, 2, 1), 1)
        self._square = FADE**count * self._square + products[:-1, :-1]
        self._cross = FADE**count * self._cross + products[:-1, -1] / WINDOW
        self.weights = np.linalg.solve(self._square, self._cross).astype(np.float32)
