"""Does speculative decoding pay? Its arithmetic, for any cost of a verify step.

Model of acceptance where one is needed: every drafted token is accepted with the same chance, independently
(Leviathan et al. 2023, arXiv 2211.17192, equation 1).
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
    give to break even. Acceptances are per drafted token; `break_even_acceptance` None: none is enough."""

    policy: str
    slots: int
    pays: bool
    speedup: float
    cost: float
    tokens_per_verify: float
    break_even_acceptance: float | None
    acceptance: float | None

    def words(self) -> str:
        pays = "speculative decoding pays here" if self.pays else "do not use speculative decoding here"
        need = (
            "no acceptance would be enough"
            if self.break_even_acceptance is None
            else f"it breaks even where each draft is accepted with a chance of {self.break_even_acceptance:.2f}"
        )
        seen = "" if self.acceptance is None else f" (this trace: {self.acceptance:.2f})"
        return (
            f"{pays}: {self.speedup:.2f}x with {self.policy}. A verify step costs as much as {self.cost:.2f} plain "
            f"tokens and yields {self.tokens_per_verify:.2f}; {need}{seen}"
        )


def judge(policy: str, slots: int, sd: Mapping[str, Any], ar: Mapping[str, Any]) -> Verdict | None:
    """From one policy's metrics with and without speculation on one machine; None where a run verified nothing."""
    if not sd["verify_steps"] or not sd["tokens_per_s"] or not ar["tokens_per_s"]:
        return None
    cost = sd["verify_ms_mean"] / ar["step_ms_mean"]
    gain = sd["tokens_per_s"] / ar["tokens_per_s"]
    drafted, tokens = sd["drafted_per_verify"], sd["tokens_per_verify"]
    return Verdict(
        policy, slots, gain > 1, gain, cost, tokens, acceptance_for(cost, drafted), acceptance_for(tokens, drafted)
    )
