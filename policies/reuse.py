"""How soon experts are needed again: a linear forecast from how often and how lately they were, learnt as it goes."""

from collections.abc import Sequence

import numpy as np

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
        self._then = self.features.copy()  # the features from which the running window is forecast
        self._since = np.zeros((layers, experts), np.float32)  # passes of that window that needed the expert
        self._left = [1 + layer % WINDOW for layer in range(layers)]  # passes until it ends; the first ones are short
        self._need = np.zeros(experts, np.float32)
        self._pairs = np.zeros((layers, experts, experts), np.float32)  # [l, a, b]: b was needed right after a
        self._uses = np.ones((layers, experts), np.float32)
        self._last: list[list[int]] = [[] for _ in range(layers)]

    def seen(self, layer: int, experts: Sequence[int]) -> np.ndarray:
        """A pass needs these experts; the layer's new row of `demand`, [E]."""
        features, need, used = self.features[layer], self._need, list(experts)
        need[:] = 0
        need[used] = 1
        recency = features[RECENCY]
        recency /= 1 + recency
        np.maximum(recency, need, out=recency)
        rates = features[RATES:]
        rates += (1 - KEEP) * (need - rates)
        features[SEQUEL] = self._sequel(layer, used, need)
        self._since[layer] += need
        self._left[layer] -= 1
        if not self._left[layer]:
            self._learn(layer)
        return self._forecast(layer)

    def _sequel(self, layer: int, used: list[int], need: np.ndarray) -> np.ndarray:
        """[E]: mean over the experts needed now of the share of passes after theirs that needed each expert, drawn to
        its rate of half-life 64 with the weight of one pass."""
        pairs, uses = self._pairs[layer], self._uses[layer]
        if last := self._last[layer]:
            pairs[last] += need
            uses[last] += 1
        self._last[layer] = used
        weights = (1 / len(used)) / uses[used]
        return weights @ pairs[used] + self.features[layer, RATES + HALF_LIVES.index(64)] * weights.sum()

    def read(self, layer: int, experts: Sequence[int], shares: Sequence[float], tokens: int) -> np.ndarray:
        """A prompt counts as `tokens` passes, each of which needs `experts` with the chances `shares`."""
        need = self._need
        need[:] = 0
        need[list(experts)] = shares
        rates = self.features[layer, RATES:]
        rates += (1 - KEEP**tokens) * (need - rates)
        self._last[layer] = []  # what came before says nothing of what comes after
        self._begin_window(layer)
        return self._forecast(layer)

    def _forecast(self, layer: int) -> np.ndarray:
        self.demand[layer] = row = self.weights @ self.features[layer]
        return row

    def _learn(self, layer: int) -> None:
        then = self._then[layer]
        self._square = FADE * self._square + then @ then.T
        self._cross = FADE * self._cross + then @ (self._since[layer] / WINDOW)
        if layer == 0:  # once in a few passes
            self.weights = np.linalg.solve(self._square, self._cross).astype(np.float32)
        self._begin_window(layer)

    def _begin_window(self, layer: int) -> None:
        self._then[layer] = self.features[layer]
        self._since[layer] = 0
        self._left[layer] = WINDOW
