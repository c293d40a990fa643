"""SLRU and S3-FIFO against short programs written from their papers' rules."""

from collections import deque

import numpy as np
import pytest
from policy_loop import Host, make_setup, one_by_one, random_routing

from moe_spac.policies.load import load_policy
from moe_spac.traces.errors import InputError


def s3_fifo(keys, slots, small_share=0.1):
    """Hits of S3-FIFO as its paper's pseudocode has it: a small, a main and a ghost queue, and two bits of count."""
    small, main, ghost, freq, hits = deque(), deque(), deque(), {}, 0

    def evict_main():
        while True:
            key = main.popleft()
            if freq[key] == 0:
                return
            freq[key] -= 1
            main.append(key)

    def evict_small():
        while small:
            key = small.popleft()
            if freq[key] < 2:
                ghost.append(key)
                while len(ghost) > round((1 - small_share) * slots):
                    ghost.popleft()
                return True
            freq[key] = 0
            main.append(key)
        return False

    for key in keys:
        if key in small or key in main:
            hits += 1
            freq[key] = min(3, freq[key] + 1)
            continue
        remembered = key in ghost
        if remembered:
            ghost.remove(key)
        if len(small) + len(main) == slots and not (len(small) >= max(1, round(small_share * slots)) and evict_small()):
            evict_main()
        (main if remembered else small).append(key)
        freq[key] = 0
    return hits


def slru(keys, slots, share):
    probation, protected, hits, most = [], [], 0, int(share * slots)
    for key in keys:
        if key in probation or key in protected:
            hits += 1
            (probation if key in probation else protected).remove(key)
            protected.append(key)
            while len(protected) > most:
                probation.append(protected.pop(0))
            continue
        if len(probation) + len(protected) == slots:
            (probation or protected).pop(0)
        probation.append(key)
    return hits


def hits(spec, keys, slots, experts=60):
    policy = load_policy(spec)
    return Host(policy, make_setup(policy, 1, experts, slots, 1), one_by_one(*keys)).play().total.hits


def skewed(seed, length=300):
    return ((np.random.default_rng(seed).zipf(1.15, length) - 1) % 60).tolist()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("slots", [1, 7, 20])
def test_s3_fifo_as_in_its_paper(seed, slots):
    assert hits("s3-fifo", skewed(seed), slots) == s3_fifo(skewed(seed), slots)
    assert hits("s3-fifo:small=0.5", skewed(seed), slots) == s3_fifo(skewed(seed), slots, 0.5)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("slots", "share"), [(1, 0.8), (7, 0.8), (20, 0.5), (20, 0.0)])
def test_slru_as_defined(seed, slots, share):
    assert hits(f"slru:protected={share}", skewed(seed), slots) == slru(skewed(seed), slots, share)


def test_nothing_protected_is_lru():
    for slots in (3, 12):
        assert hits("slru:protected=0", skewed(9), slots) == hits("ar-lru", skewed(9), slots)


def test_a_sweep_does_not_displace_what_was_used_again():
    # 0 and 1 are used twice; then twelve others once each; then 0 and 1 again.
    keys = [0, 1, 0, 1, *range(10, 22), 0, 1]
    assert hits("ar-lru", keys, 4) == 2
    assert hits("slru", keys, 4) == 4
    # S3-FIFO promotes on two hits in the small queue: used three times, the pair stays as well.
    assert hits("s3-fifo", [0, 1, *keys], 4) == 4 + 2


@pytest.mark.parametrize("spec", ["slru", "s3-fifo"])
def test_layers_that_need_more_than_their_slots(spec):
    routing = random_routing(np.random.default_rng(1), 40, 2, 8, 4, tokens=3)
    policy = load_policy(spec)
    host = Host(policy, make_setup(policy, 2, 8, 3, 4), routing)
    total = host.play().total
    assert total.hits + total.fetches + total.streams == total.needed
    assert total.hits > 0


@pytest.mark.parametrize("spec", ["slru:protected=1.5", "s3-fifo:small=-1", "s3-fifo:promote=0"])
def test_parameters_out_of_range(spec):
    with pytest.raises(InputError, match="must lie"):
        load_policy(spec)
