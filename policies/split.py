"""Who computes a layer's misses: as many are copied as makes the layer's time less what being kept will save least."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from .interface import Demand, Where
from .pool import WORTH, Pool

GPU, FETCH, CPU = Where.GPU, Where.FETCH, Where.CPU  # looking up a member costs ten times a name

Missing = tuple[float, int, float, int, int]  # see `most_worth_copying`


class Prices(NamedTuple):
    """Times in ns: what a use saves; an expert's by its tokens, on either tier; a copy's; what a layer that uses the
    CPU takes beside; and what host memory takes to give an expert its bytes, if CPU and link read at a time."""

    use_ns: float
    on_gpu: Mapping[int, int]
    on_cpu: Mapping[int, int]
    copy_ns: int
    cpu_more_ns: int
    host_ns: int


Answers = tuple[tuple[tuple[int, Where], ...], ...]


@lru_cache(maxsize=8)
def all_answers(experts: int) -> Answers:
    """What may be said of each expert: (it, GPU), (it, FETCH) and (it, CPU). Made once, for answers have many."""
    return tuple(tuple((expert, where) for expert in range(experts)) for where in (GPU, FETCH, CPU))


def most_worth_copying(missing: Sequence[Missing], gpu_ns: int, link_ns: int, prices: Prices) -> int:
    """How many of `missing`, from the front, are to be copied and kept; the CPU computes the others.

    missing: (what it is sorted by, expert, ns that its being kept will save later, its time on the CPU, on the GPU).
    The least of the layer's time less what the copies will save. The layer takes as long as the longest of: the GPU
    with its residents (`gpu_ns`) and the copied ones; the link, busy for `link_ns` already, and the last arrival's
    work; the CPU and the joining of both tiers; and host memory giving all the missing their bytes.
    """
    cpu_ns = sum([m[3] for m in missing]) + prices.cpu_more_ns
    host_ns, copy_ns, count = len(missing) * prices.host_ns, prices.copy_ns, len(missing)
    best, least, gained = 0, float(max(cpu_ns, gpu_ns, link_ns)), 0.0
    for copied, (_, _, gain, on_cpu, on_gpu) in enumerate(missing, 1):
        gained += gain
        cpu_ns -= on_cpu
        gpu_ns += on_gpu
        link_ns += copy_ns
        both = max(cpu_ns, host_ns) if copied < count else 0
        ns = max(gpu_ns, link_ns + on_gpu, both) - gained
        if ns < least:
            best, least = copied, ns
    return best


def split(
    pool: Pool,
    demand: Demand,
    joins: Collection[int],
    floor: float,
    link_ns: int,
    prices: Prices,
    answers: Answers,
) -> list[tuple[int, Where]]:
    """Where each needed expert goes, in order.

    joins: experts of this layer on their way here, for which the link is busy for another `link_ns`. floor: the worth
    of what has to go for a copied one. answers: `all_answers`.
    """
    gpu, fetch, cpu = answers
    worth = pool.array[WORTH, demand.layer]
    answer: list[tuple[int, Where]] = []
    missing: list[Missing] = []
    gpu_ns = 0
    for expert, load in zip(demand.experts, demand.loads, strict=True):
        if expert in demand.held or expert in joins:
            answer.append((gpu if expert in demand.held else fetch)[expert])
            gpu_ns += prices.on_gpu[load]
        else:
            gain, ns = max(0.0, worth.item(expert) - floor) * prices.use_ns, prices.on_cpu[load]
            missing.append((-gain - ns, expert, gain, ns, prices.on_gpu[load]))
    missing.sort()
    copied = most_worth_copying(missing, gpu_ns, link_ns, prices)
    answer += [(fetch if i < copied else cpu)[m[1]] for i, m in enumerate(missing)]
    return answer
