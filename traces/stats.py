"""Statistics of routing: pure functions over experts [T, L, k] and sequence offsets [S+1] (sequence s is rows
offsets[s] to offsets[s+1]). Nothing reaches over the border of two sequences. E is the number of experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .schema import Kind, Step
from .views import Steps, autoregressive

ABSENT = -1


@dataclass(frozen=True, slots=True)
class Routing:
    """The text of a trace, token after generated token. `sequences` [S] are the ids of its sequences."""

    experts: np.ndarray
    offsets: np.ndarray
    sequences: np.ndarray


def decode_routing(trace: Steps) -> Routing:
    """Routing of all tokens in the final text but the prompts; rejected drafts are left out. T*L*k bytes of memory."""
    rows, owners = [], []
    for step in autoregressive(trace).steps():
        if step.kind is not Kind.PREFILL:
            rows.append(step.experts)
            owners.append(step.sequence)
    if not rows:
        shape = (0, len(trace.header.target.moe_layers), trace.header.target.top_k)
        return Routing(np.empty(shape, np.uint8), np.zeros(1, np.int64), np.empty(0, np.int64))
    order = np.argsort(owners, kind="stable")  # sequences that took turns become whole
    sequences, counts = np.unique(owners, return_counts=True)
    return Routing(np.concatenate(rows)[order], np.r_[0, np.cumsum(counts)], sequences)


def overlap(experts: np.ndarray, offsets: np.ndarray, lag: int = 1) -> np.ndarray:
    """[L] mean share of a token's experts that the token `lag` before it chose too; nan without such a pair."""
    tokens, layers, k = experts.shape
    inside = np.arange(tokens) - np.repeat(offsets[:-1], np.diff(offsets)) >= lag
    now = np.flatnonzero(inside)
    if not len(now):
        return np.full(layers, np.nan)
    before, after = experts[now - lag], experts[now]
    shared = np.zeros(layers, np.int64)
    for slot in range(k):
        shared += (after[:, :, slot, None] == before).sum(axis=(0, 2))
    return shared / (k * len(now))


def unions(experts: np.ndarray, offsets: np.ndarray, windows: Sequence[int]) -> np.ndarray:
    """[len(windows), L] mean distinct experts in n consecutive tokens, over all windows of n; nan without one.

    An expert counts in a window through its last use there: the use at t of an expert that comes back at n is the
    last one in the windows that end at t..n-1, so one pass over the uses answers for every window at once.
    """
    tokens, layers = experts.shape[:2]
    lengths = np.diff(offsets)
    at = np.arange(tokens)[:, None]
    begin, end = np.repeat(offsets[:-1], lengths)[:, None], np.repeat(offsets[1:], lengths)[:, None]
    found = np.full((len(windows), layers), np.nan)
    for layer in range(layers):
        again = next_use(experts[:, layer])
        for i, n in enumerate(windows):
            if total := np.maximum(lengths - n + 1, 0).sum():
                first_end = np.maximum(at, begin + n - 1)
                last_end = np.minimum(np.minimum(at + n, end), again) - 1
                found[i, layer] = np.maximum(last_end - first_end + 1, 0).sum() / total
    return found


def next_use(ids: np.ndarray) -> np.ndarray:
    """[T, k] row at which each id [T, k] is used next (T if never)."""
    tokens, k = ids.shape
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    after = np.full(flat.size, tokens, np.int64)
    same = flat[order[1:]] == flat[order[:-1]]
    after[order[:-1][same]] = order[1:][same] // k
    return after.reshape(tokens, k)


def shares(experts: np.ndarray, count: int) -> np.ndarray:
    """[L, E] share of each expert in the choices of its layer; zeros without tokens."""
    layers = experts.shape[1]
    keys = experts.astype(np.int64) + count * np.arange(layers)[:, None]
    picks = np.bincount(keys.reshape(-1), minlength=layers * count).reshape(layers, count)
    return picks / max(1, experts.shape[0] * experts.shape[2])


def top_share(share: np.ndarray, fraction: float = 0.2) -> np.ndarray:
    """[L] part of all choices that go to the busiest `fraction` of experts (their number is rounded)."""
    busiest = round(fraction * share.shape[1])
    return np.sort(share, axis=1)[:, share.shape[1] - busiest :].sum(axis=1)


def entropy(share: np.ndarray) -> np.ndarray:
    """[L] entropy of the choices over ln E: 1 is uniform, 0 a single expert."""
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return -(share * logs).sum(axis=1) / np.log(share.shape[1])


def gini(share: np.ndarray) -> np.ndarray:
    """[L] Gini coefficient of the choices over the experts: 0 is uniform, near 1 a single expert."""
    count = share.shape[1]
    ranked = np.sort(share, axis=1)
    total = ranked.sum(axis=1)
    weighted = (ranked * (2 * np.arange(1, count + 1) - count - 1)).sum(axis=1)
    return np.divide(weighted, count * total, out=np.zeros(len(share)), where=total > 0)


def independent_union(share: np.ndarray, top_k: int, n: int) -> np.ndarray:
    """[L] distinct experts that n tokens would choose with these shares [L, E] and no memory of each other."""
    chosen = np.minimum(share * top_k, 1.0)
    return (1 - (1 - chosen) ** n).sum(axis=1)


def independent_overlap(share: np.ndarray, top_k: int) -> np.ndarray:
    """[L] share of a token's experts that another token, without any memory of it, would choose too."""
    return (np.minimum(share * top_k, 1.0) ** 2).sum(axis=1) / top_k


def reuse(experts: np.ndarray, offsets: np.ndarray, within: Sequence[int]) -> np.ndarray:
    """[len(within), L] share of all uses of an expert that come at most n tokens after its last use in the sequence."""
    tokens, layers, k = experts.shape
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    found = np.full((len(within), layers), np.nan)
    for layer in range(layers if tokens else 0):
        again = next_use(experts[:, layer])
        at = np.broadcast_to(np.arange(tokens)[:, None], again.shape)
        follows = again < tokens
        distance = (again - at)[follows][owner[again[follows]] == owner[at[follows]]]
        found[:, layer] = [(distance <= n).sum() / (tokens * k) for n in within]
    return found


def lru_depths(experts: np.ndarray, offsets: np.ndarray, count: int, atomic: bool = True) -> np.ndarray:
    """[L, E+1] how many uses found their expert as the n-th most recently used of its layer (the last column: never
    used before in this sequence). An LRU cache with C slots a layer, empty when a sequence begins, hits the first C.

    atomic: a token's experts are all looked up before any is replaced, and its best counts as the most recent one
    (this is one layer event). Otherwise each use replaces at once, in the router's order.
    """
    layers, k = experts.shape[1:]
    lengths = np.diff(offsets)
    depths = np.zeros((layers, count + 1), np.int64)
    last = np.full((len(lengths), layers, count), ABSENT, np.int64)
    base = np.arange(layers)[:, None] * (count + 1)
    rank = np.arange(k)[::-1]

    def look_up(last_use: np.ndarray, ids: np.ndarray) -> None:
        mine = np.take_along_axis(last_use, ids, axis=2)
        newer = (last_use[:, :, None, :] > mine[..., None]).sum(axis=3)
        found = np.where(mine == ABSENT, count, newer)
        depths.ravel()[:] += np.bincount((found + base).reshape(-1), minlength=depths.size)

    for t in range(int(lengths.max(initial=0))):
        running = np.flatnonzero(lengths > t)
        ids, last_use = experts[offsets[running] + t].astype(np.int64), last[running]
        if atomic:
            look_up(last_use, ids)
            np.put_along_axis(last_use, ids, np.broadcast_to(t * k + rank, ids.shape), axis=2)
        else:
            for slot in range(k):
                one = ids[:, :, slot : slot + 1]
                look_up(last_use, one)
                np.put_along_axis(last_use, one, t * k + slot, axis=2)
        last[running] = last_use
    return depths


def hit_rate(depths: np.ndarray, slots: int) -> np.ndarray:
    """[L] hit rate of LRU with `slots` a layer, from `lru_depths`; nan without uses. All layers have as many uses."""
    never = depths.shape[1] - 1
    uses = depths.sum(axis=1)
    return np.divide(depths[:, : min(slots, never)].sum(axis=1), uses, out=np.full(len(uses), np.nan), where=uses > 0)


def cosines(share_by_domain: dict[str, np.ndarray]) -> dict[tuple[str, str], float]:
    """Cosine between the expert shares [L, E] of each pair of domains, mean over layers."""
    names = list(share_by_domain)
    unit = {n: s / np.linalg.norm(s, axis=1, keepdims=True) for n, s in share_by_domain.items()}
    return {(a, b): float((unit[a] * unit[b]).sum(axis=1).mean()) for i, a in enumerate(names) for b in names[i + 1 :]}


def domain_shares(routing: Routing, header_sequences: tuple[dict[str, Any], ...], count: int) -> dict[str, np.ndarray]:
    """[L, E] shares of each domain that the header names, in order of first appearance."""
    parts: dict[str, list[np.ndarray]] = {}
    for i, sequence in enumerate(routing.sequences.tolist()):
        if sequence < len(header_sequences) and (domain := header_sequences[sequence].get("domain")):
            parts.setdefault(domain, []).append(routing.experts[routing.offsets[i] : routing.offsets[i + 1]])
    return {domain: shares(np.concatenate(rows), count) for domain, rows in parts.items()}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of verify steps. rate: accepted over drafted tokens; tokens_per_verify: mean of accepted + 1;
    by_position[j]: share of the steps that drafted more than j tokens in which draft j (from 0) was accepted.
    """

    verify_steps: int
    rate: float
    tokens_per_verify: float
    by_position: tuple[float, ...]


def acceptance(steps: Iterable[Step]) -> Acceptance | None:
    """Statistics of all verify steps, or None if there are none (or nothing was drafted)."""
    pairs = [(int(s.drafted.sum()), s.accepted) for s in steps if s.kind is Kind.VERIFY]
    drafted, accepted = np.array(pairs, np.int64).reshape(-1, 2).T
    if not drafted.sum():
        return None
    by_position = tuple(float((accepted[drafted > j] > j).mean()) for j in range(drafted.max()))
    return Acceptance(len(pairs), float(accepted.sum() / drafted.sum()), float(accepted.mean() + 1), by_position)


@dataclass(frozen=True, slots=True)
class DraftLoad:
    """What drafting adds to the experts of a verify step, as means over steps and layers.

    experts: distinct experts a layer that all its tokens need; kept_experts: those that its kept tokens (the first
    and the accepted drafts) need; `ratio` the first over the second. rejected_found: share of the choices of
    rejected drafts that a kept token of the same step and layer makes too (None without a rejected draft);
    accepted_found: the same for accepted drafts against the step's first token.
    """

    experts: float
    kept_experts: float
    rejected_found: float | None
    accepted_found: float | None

    @property
    def ratio(self) -> float:
        return self.experts / self.kept_experts


def draft_load(steps: Iterable[Step], experts: int) -> DraftLoad | None:
    """Compare the routing of drafted tokens with that of the text, in all verify steps; None if there are none."""
    needed = kept_needed = events = 0
    found = {"rejected": [0, 0], "accepted": [0, 0]}
    for step in steps:
        if step.kind is not Kind.VERIFY:
            continue
        layers = np.arange(step.experts.shape[1])[:, None]
        by_all, by_kept, by_first = (np.zeros((len(layers), experts), bool) for _ in range(3))
        kept = step.kept
        by_all[layers, step.experts] = True
        by_kept[layers, step.experts[kept]] = True
        by_first[layers, step.experts[0]] = True
        needed, kept_needed, events = needed + by_all.sum(), kept_needed + by_kept.sum(), events + len(layers)
        for name, rows, mark in (("rejected", ~kept, by_kept), ("accepted", kept & step.drafted, by_first)):
            found[name][0] += int(mark[layers, step.experts[rows]].sum())
            found[name][1] += int(step.experts[rows].size)
    if not events:
        return None
    shares_found = {name: hits / total if total else None for name, (hits, total) in found.items()}
    return DraftLoad(
        float(needed / events), float(kept_needed / events), shares_found["rejected"], shares_found["accepted"]
    )
