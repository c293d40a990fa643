"""MoE-SpAc's workload balancer: which utility makes an expert hot, so that CPU and GPU finish together.

The paper solves a small integer program a layer and gives no formula that we could read; the released code has a
constant. Objective and constraints are the paper's in words (least |T_cpu - T_gpu| under link time and GPU memory), the
formulas are ours.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from .interface import Costs


class ExpertTimes:
    """Time of an expert on either side by whole tokens, from the machine's costs; no tokens take no time."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._gpu = self._cpu = np.zeros(1)

    def of(self, loads: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """(GPU, CPU) ns for each expert, [E], given expected loads up to `most`, which are rounded to whole tokens."""
        tokens = np.rint(loads).astype(np.intp)
        if most >= len(self._gpu):
            self._gpu = np.array([0.0, *(self._costs.gpu_ns(n) for n in range(1, 2 * most + 1))])
            self._cpu = np.array([0.0, *(self._costs.cpu_ns(n) for n in range(1, 2 * most + 1))])
        return self._gpu[tokens], self._cpu[tokens]


def best_threshold(
    utility: np.ndarray,
    absent: np.ndarray,
    gpu_ns: np.ndarray,
    cpu_ns: np.ndarray,
    room: Sequence[int],
    copy_ns: float,
    budget_ns: float,
    cpu_first_ns: float = 0.0,
) -> int:
    """The threshold tau in 1..K+1 that balances a layer; experts with utility >= tau are hot.

    utility: [E] ints in 0..K; absent: [E] bool, not on the GPU; gpu_ns, cpu_ns: [E] time of each expert on either
    side; room: slots that could take an expert under each threshold 0..K+1 (so K = len(room) - 2). Minimises |T_cpu
    - T_gpu| with hot experts on the GPU and cold ones on the CPU (`cpu_first_ns` once, if any cold one has work)
    subject to copies * copy_ns <= budget_ns and copies <= room[tau], copies being the hot experts that are absent.
    Ties go to the larger tau, which copies less. tau = K+1 copies nothing and is always feasible. Trying all K+1
    values is the exact solution of the integer program.
    """
    levels = len(room) - 1
    gpu = np.bincount(utility, gpu_ns, levels).tolist()
    cpu = list(accumulate(np.bincount(utility, cpu_ns, levels).tolist()))  # of all up to a level
    missing = np.bincount(utility[absent], minlength=levels).tolist()
    best, least, copies, t_gpu = levels, float("inf"), 0, 0.0
    for tau in range(levels, 0, -1):
        if tau < levels:
            copies += missing[tau]
            t_gpu += gpu[tau]
        if copies * copy_ns > budget_ns:
            break
        t_cpu = cpu[tau - 1]
        gap = abs(t_cpu + (cpu_first_ns if t_cpu else 0.0) - t_gpu)
        if gap < least and copies <= room[tau]:
            best, least = tau, gap
    return best
