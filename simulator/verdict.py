"""Does speculative decoding pay? Its arithmetic, for any cost of a verify step.

Model of acceptance where one is needed: every drafted token is accepted with the same chance, independently
(Leviathan et al. 2023, arXiv 2211.17192, equation 1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def expected_tokens(acceptance: float, drafted: float) -> float:
    """Output tokens of a verify step, the target's own included: (1 - a^(K+1)) / (1 - a), from 1 to K+1."""
    if acceptance >= 1:
        return drafted + 1
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def acceptance_for(tokens: float, drafted: float) -> float | None:
    """The acceptance at which a verify step gives `tokens`; None if none is enough. Inverts `expected_tokens`."""
    if tokens > drafted + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, drafted) < tokens else (low, middle)
    return high if tokens > 1 else 0.0


def speedup(acceptance: float, drafted: int, verify_ns: float, draft_ns: float, token_ns: float) -> float:
    """Tokens/s with speculation over tokens/s without: E[tokens] * c(1) / (c(K+1) + K d).

    verify_ns: c(K+1), one forward of K+1 rows; draft_ns: d, one drafted token; token_ns: c(1), one plain token.
    """
    return expected_tokens(acceptance, drafted) * token_ns / (verify_ns + drafted * draft_ns)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`cost`: a draft-and-verify step in units of a plain token's time, which is also the tokens a verify step must
    give to break even. Acceptances are per drafted token; `break_even_acceptance` None: none is enough. `size` names
    the cache size in the comparison. `speedups`: over plain decoding, by draft length where others were tried."""

    policy: str
    size: int
    draft_length: int
    pays: bool
    speedup: float
    cost: float
    tokens_per_verify: float
    break_even_acceptance: float | None
    acceptance: float | None
    speedups: dict[int, float] = field(default_factory=dict)

    @property
    def best_draft_length(self) -> int | None:
        """The fastest of the lengths tried, the shortest of equals, 0 being plain decoding; None if only one was."""
        tried = {0: 1.0, **self.speedups}
        return max(sorted(tried), key=lambda n: tried[n]) if len(tried) > 2 else None

    def words(self) -> str:
        need = (
            "no acceptance would be enough"
            if self.break_even_acceptance is None
            else f"it breaks even where each draft is accepted with a chance of {self.break_even_acceptance:.2f}"
        )
        seen = "" if self.acceptance is None else f" (this trace: {self.acceptance:.2f})"
        return (
            f"{self._answer()}: {self.speedup:.2f}x with {self.policy}. A verify step costs as much as {self.cost:.2f} "
            f"plain tokens and yields {self.tokens_per_verify:.2f}; {need}{seen}{self._lengths()}"
        )

    def _answer(self) -> str:
        if self.pays:
            return "speculative decoding pays here"
        if self.best_draft_length:
            return f"do not use speculative decoding here with drafts of {self.draft_length}"
        return "do not use speculative decoding here"

    def _lengths(self) -> str:
        best = self.best_draft_length
        if best is None:
            return ""
        tried = ", ".join(str(n) for n in sorted({0, *self.speedups}))
        if best == 0:
            return f". Best draft length of {tried}: 0, none pays"
        return f". Best draft length of {tried}: {best} ({self.speedups[best]:.2f}x)"


def judge(
    policy: str,
    size: int,
    sd: Mapping[str, Any],
    ar: Mapping[str, Any],
    speeds: Mapping[int, float] | None = None,
    draft_length: int = 0,
) -> Verdict | None:
    """From one policy's metrics with and without speculation on one machine; None where a run verified nothing.

    speeds: tokens/s by draft length, where others than the recorded `draft_length` were tried.
    """
    if not sd["verify_steps"] or not sd["tokens_per_s"] or not ar["tokens_per_s"]:
        return None
    cost = sd["verify_ms_mean"] / ar["step_ms_mean"]
    gain = sd["tokens_per_s"] / ar["tokens_per_s"]
    drafted, tokens = sd["drafted_per_verify"], sd["tokens_per_verify"]
    return Verdict(
        policy=policy,
        size=size,
        draft_length=draft_length,
        pays=gain > 1,
        speedup=gain,
        cost=cost,
        tokens_per_verify=tokens,
        break_even_acceptance=acceptance_for(cost, drafted),
        acceptance=acceptance_for(tokens, drafted),
        speedups={n: speed / ar["tokens_per_s"] for n, speed in (speeds or {}).items()},
    )
