"""What a routing trace is: the only place that names a field.

A trace is a header (model, provenance, settings) and a sequence of steps. A step is one forward pass of the target:
`prefill` (a chunk of the prompt), `decode` (one token) or `verify` (the last accepted token and the drafted ones).
Layers are counted in MoE order 0..L-1 everywhere; `ModelShape.moe_layers` maps them to absolute layer numbers.
"""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

FORMAT_VERSION = 1


class Kind(StrEnum):
    """What a forward pass of the target was for."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


class Provenance(StrEnum):
    """Where the routing came from. Synthetic data is never presented as recorded."""

    RECORDED = "recorded"
    IMPORTED = "imported"
    SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape and byte sizes of a target model.

    `layers` counts all decoder layers, `moe_layers` lists the absolute indices of those with experts.
    `expert_bytes` is one expert (gate, up and down) in `dtype`; `dense_bytes` all other weights;
    `embedding_bytes` is the part of these of which a pass reads only rows (0 where the head shares the table);
    `kv_bytes_per_token` the keys and values of all layers for one token of context.
    """

    name: str
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    expert_width: int
    dtype: str
    expert_bytes: int
    dense_bytes: int
    kv_bytes_per_token: int
    embedding_bytes: int = 0

    @property
    def all_expert_bytes(self) -> int:
        return len(self.moe_layers) * self.experts * self.expert_bytes


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The drafting model: all its weights are read for every drafted token."""

    name: str
    layers: int
    dense_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything about a trace that is not a step. `sequences` gives a name and a domain for each sequence id.

    `acceptance` is "measured" where a draft really ran, "none" for plain decoding, and otherwise says which model
    of acceptance cut an autoregressive trace into verify windows. `scores` names the stored router quantity.
    """

    target: ModelShape
    provenance: Provenance
    source: str
    draft: DraftShape | None = None
    draft_length: int = 0
    acceptance: str = "none"
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "seed": 0})
    weights: bool = False
    scores: str | None = None
    lookahead: int = 0
    sequences: tuple[dict[str, Any], ...] = ()
    tools: dict[str, str] = field(default_factory=dict)
    notes: str = ""
    format_version: int = FORMAT_VERSION

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "Header":
        """Inverse of `to_dict`; unknown keys are errors, so that a format change cannot pass unnoticed."""
        target = ModelShape(**{**d["target"], "moe_layers": tuple(d["target"]["moe_layers"])})
        draft = DraftShape(**d["draft"]) if d.get("draft") else None
        rest = {
            **d,
            "target": target,
            "draft": draft,
            "provenance": Provenance(d["provenance"]),
            "sequences": tuple(d["sequences"]),
        }
        return cls(**rest)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass of the target over n tokens, L MoE layers, top-k of E experts.

    positions, tokens: [n] int32. drafted: [n] bool. experts: [n, L, k] unsigned, in the router's order.
    weights: [n, L, k] float16 as applied. scores: [n, L, E] float16, the quantity that the header names.
    ahead: [n, L, J, k] unsigned: what the gates of layers l+1..l+J say of layer l's gate input (repeats the last
    layer where l+j does not exist).
    `accepted` counts the drafted tokens that verification kept; rows after them are rejected, and are real load.
    """

    sequence: int
    turn: int
    kind: Kind
    positions: np.ndarray
    tokens: np.ndarray
    drafted: np.ndarray
    accepted: int
    experts: np.ndarray
    weights: np.ndarray | None = None
    scores: np.ndarray | None = None
    ahead: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def emitted(self) -> int:
        """Output tokens that this step settles: the accepted drafts and one of the target's own; none in prefill."""
        return 0 if self.kind is Kind.PREFILL else self.accepted + 1

    @property
    def context(self) -> int:
        """Tokens before this pass, whose keys and values it reads."""
        return int(self.positions[0])

    @property
    def kept(self) -> np.ndarray:
        """[n] bool: rows that belong to the final text (all but the rejected drafts)."""
        return kept_rows(self.drafted, self.accepted)


def kept_rows(drafted: np.ndarray, accepted: int) -> np.ndarray:
    """[n] bool: all rows of a step but its rejected drafts; drafted: [n] bool."""
    return ~drafted | (np.cumsum(drafted) <= accepted)


def id_dtype(experts: int) -> np.dtype:
    """Smallest unsigned type that holds the ids 0..experts-1 (more than 256 experts need two bytes)."""
    return np.min_scalar_type(experts - 1)
