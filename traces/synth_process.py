"""The random process behind synthetic routing, for all L layers and E experts of a model at once.

The score of an expert for a token is

    popularity + domain + sequence + drift_t + Gumbel(0, 1)

and the k best scores are the token's experts. All but the last are normal with mean 0 and a standard deviation for
each layer: `popularity` is drawn once for a model, `domain` once for each kind of text, `sequence` once for each
sequence; `drift_t` moves from token to token as an AR(1) process with the coefficient `memory`. The Gumbel term makes
a single choice proportional to exp(all the rest).

Only sums and products of float32 and one table are used, so that the same seed gives the same ids on every machine
with the same NumPy streams.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

BLOCK = 32  # tokens generated together: the block's arrays stay in a CPU's cache
LEVELS = 1 << 16
STREAMS = ("popularity", "domain", "sequence", "text", "aside", "acceptance")


@dataclass(frozen=True, slots=True)
class Process:
    """Standard deviations [L] of the parts of the score, and the memory [L] of the drift from token to token.

    The lasting parts (popularity, domain and sequence) together go no higher than `ceiling` [L]; `emphasis` is a factor
    on them for each domain. `seed` draws popularity and domains: it belongs to the model, not to a trace.
    """

    experts: int
    top_k: int
    popularity: np.ndarray
    domain: np.ndarray
    sequence: np.ndarray
    drift: np.ndarray
    memory: np.ndarray
    ceiling: np.ndarray
    emphasis: tuple[float, ...]
    seed: int = 0

    def lasting(self, domain: int, seed: int, sequence: int) -> np.ndarray:
        """[L, E] the part of the score that does not change within a sequence."""
        total = np.zeros((len(self.popularity), self.experts), np.float32)
        parts = (
            (self.popularity, stream("popularity", self.seed)),
            (self.domain, stream("domain", self.seed, domain)),
            (self.sequence, stream("sequence", seed, sequence)),
        )
        for deviation, chance in parts:
            total += _normal(chance, total.shape) * _column(deviation)
        return np.minimum(total, _column(self.ceiling)) * np.float32(self.emphasis[domain])


class Chain:
    """The tokens of one sequence, in order, and side branches of other tokens that could have followed."""

    def __init__(self, process: Process, domain: int, seed: int, sequence: int) -> None:
        self._process = process
        self._lasting = process.lasting(domain, seed, sequence)
        self._memory = _column(process.memory)
        self._fresh = _column(process.drift * np.sqrt(1 - process.memory**2))
        self._text = stream("text", seed, sequence)
        self._aside = stream("aside", seed, sequence)
        self._drift = _normal(self._text, self._lasting.shape) * _column(process.drift)

    def advance(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens: experts [count, L, k], best first, and their drift [count, L, E]."""
        drift = _normal(self._text, (count, *self._lasting.shape))
        drift *= self._fresh
        now = self._drift
        for row in drift:
            row += now * self._memory
            now = row
        self._drift = now.copy()
        return self._choose(drift, self._text), drift

    def branch(self, drift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One token after each of n states drift [n, L, E], independent of what the sequence did next: experts
        [n, L, k] and the new states.
        """
        after = _normal(self._aside, drift.shape)
        after *= self._fresh
        after += drift * self._memory
        return self._choose(after, self._aside), after

    def _choose(self, drift: np.ndarray, chance: np.random.Generator) -> np.ndarray:
        score = _gumbel().take(chance.integers(0, LEVELS, drift.shape, np.uint16))
        score += drift
        score += self._lasting
        return best(score, self._process.top_k)


def stream(use: str, seed: int, number: int = 0) -> np.random.Generator:
    """Random numbers of one use (see STREAMS), independent of all others.

    Counted from 1: NumPy takes keys that differ only by zeros at the end for the same.
    """
    return np.random.default_rng([seed, number, 1 + STREAMS.index(use)])


def best(score: np.ndarray, k: int) -> np.ndarray:
    """[..., k] indices of the k highest scores [..., E] float32, highest first, in the smallest unsigned type.

    The index takes the place of each score's last bits: values are sorted several times as fast as indices, and what
    is lost is less than 1/10,000 of a score.
    """
    experts = score.shape[-1]
    mask = np.uint32((1 << (experts - 1).bit_length()) - 1)
    packed = score.view(np.uint32) & ~mask
    packed |= np.arange(experts, dtype=np.uint32)
    top = np.partition(packed.view(np.float32), experts - k, axis=-1)[..., experts - k :]
    top.sort(axis=-1)
    ids = np.ascontiguousarray(top[..., ::-1]).view(np.uint32) & mask
    return ids.astype(np.min_scalar_type(experts - 1))


def _normal(chance: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return chance.standard_normal(shape, np.float32)


def _column(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32)[:, None]


@cache
def _gumbel() -> np.ndarray:
    """[LEVELS] float32: equally likely values of the standard Gumbel distribution."""
    return (-np.log(-np.log((np.arange(LEVELS) + 0.5) / LEVELS))).astype(np.float32)
