"""An independent cache simulator, libCacheSim in C, counts the same misses access by access (test extra only).

Its caches admit every miss, know one access at a time and one pool. Traps: its default hash table has 2^24 buckets
(hashpower=16 is fast); its Belady needs each record's next access, and without it is silently wrong, so traces go
through its oracleGeneral format. Its LFU forgets an object's count when it evicts it, and of the least used drops the
least recently used: that is `lfu-in-cache` here, while `lfu` keeps counting over evictions and need not agree.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hand import setup, step

from moe_spac.policies.load import load_policy
from moe_spac.simulator.replay import count_sequential
from moe_spac.traces.reader import open_trace
from moe_spac.traces.schema import Step

libcachesim = pytest.importorskip("libcachesim")

SAME = {"LRU": "ar-lru", "FIFO": "fifo", "LFU": "lfu-in-cache", "Belady": "min:bypass=false"}


def accesses(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """(layer, expert) in the order in which `count_sequential` replays them."""
    layers = range(steps[0].experts.shape[1])
    return [(la, int(e)) for s in steps for la in layers for e in np.unique(s.experts[:, la])]


def write_oracle(path: Path, keys: list[tuple[int, int]]) -> Path:
    """24-byte records: time, object, size, number of the next access to it or -1."""
    records = np.zeros(len(keys), [("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
    later: dict[tuple[int, int], int] = {}
    for at, (layer, expert) in reversed(list(enumerate(keys))):
        records[at] = at, 1 + layer * 1000 + expert, 1, later.get((layer, expert), -1)
        later[layer, expert] = at
    path.write_bytes(records.tobytes())
    return path


def their_misses(path: Path, requests: int, cache: str, size: int) -> int:
    unit_sizes = libcachesim.ReaderInitParam(ignore_obj_size=True)
    reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE, unit_sizes)
    ratio, _ = getattr(libcachesim, cache)(size, hashpower=16).process_trace(reader)
    misses = round(ratio * requests)
    assert abs(ratio * requests - misses) < 1e-6
    return misses


def our_misses(steps: Sequence[Step], policy: str, size: int, experts: int) -> int:
    spec = f"{policy}{',' if ':' in policy else ':'}scope=global"
    pool = setup(steps[0].experts.shape[1], experts, [size])
    total = count_sequential(steps, load_policy(spec), pool).total
    return total.needed - total.hits


def bundled() -> list[Step]:
    """60 tokens of gpt-oss-20b, 3 of its 24 layers: 720 accesses to 96 experts."""
    steps = islice(open_trace("gpt-oss-20b").steps(), 60)
    return [step(s.experts[:, ::8].tolist(), at) for at, s in enumerate(steps)]


def made(seed: int, layers: int, experts: int, top_k: int) -> list[Step]:
    rng = np.random.default_rng(seed)
    share = np.log(rng.dirichlet(np.full(experts, 0.4), size=layers) + 1e-3)
    return [
        step(np.argsort(share + rng.gumbel(size=(n, layers, experts)))[:, :, -top_k:].tolist(), at)
        for at, n in enumerate(rng.integers(1, 4, size=60).tolist())
    ]


@pytest.mark.parametrize("cache", SAME)
def test_misses_on_a_real_trace(cache, tmp_path):
    steps = bundled()
    keys = accesses(steps)
    path = write_oracle(tmp_path / "trace", keys)
    for size in (1, 4, 12, 24, 48, 72, 90, 96):
        assert our_misses(steps, SAME[cache], size, 32) == their_misses(path, len(keys), cache, size), size


@pytest.mark.parametrize("cache", SAME)
@pytest.mark.parametrize(("seed", "layers", "experts", "top_k"), [(0, 1, 16, 2), (1, 3, 8, 2), (2, 2, 12, 3)])
def test_misses_on_made_traces(cache, seed, layers, experts, top_k, tmp_path):
    steps = made(seed, layers, experts, top_k)
    keys = accesses(steps)
    path = write_oracle(tmp_path / "trace", keys)
    for size in (2, 5, 11):
        assert our_misses(steps, SAME[cache], size, experts) == their_misses(path, len(keys), cache, size), size


def test_counts_that_survive_eviction_are_another_rule(tmp_path):
    steps = bundled()
    keys = accesses(steps)
    path = write_oracle(tmp_path / "trace", keys)
    assert our_misses(steps, "lfu", 24, 32) != their_misses(path, len(keys), "LFU", 24)
