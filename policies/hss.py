"""Splitting one layer's experts between GPU, CPU and link: HybriMoE's scheduler (HSS), twice, as pure functions.

Both take the loads (tokens) of the resident and of the missing experts, each in descending order, and answer with
positions: 0..R-1 name residents, R..R+M-1 the missing ones in the order given.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .demand import PerLoad
from .interface import Costs

# The constants in HybriMoE's released code (508a85b), in ns, "need to be tested" by its own comment.
RELEASE_COSTS = Costs(
    gpu_fixed_ns=500_000,
    gpu_memory_ns=0,
    gpu_token_ns=0.0,
    cpu_first_ns=790_000,
    cpu_fixed_ns=0,
    cpu_memory_ns=0,
    cpu_token_ns=1_000_000.0,
    hybrid_ns=0,
    copy_fixed_ns=0,
    copy_bytes_ns=417_910,
)

REMEMBERED = 1 << 14  # plans at most


@dataclass(frozen=True, slots=True)
class Schedule:
    """gpu: residents in working order. copies: missing experts to bring over, in order. cpu: in working order.

    makespan_ns: when the later of CPU and GPU is done, by the plan's own reckoning.
    """

    gpu: tuple[int, ...]
    copies: tuple[int, ...]
    cpu: tuple[int, ...]
    makespan_ns: int


class Planner:
    """The paper's simulation of three timelines (arXiv 2504.05897 section IV-B), remembering what it has worked out.

    GPU: residents by descending load; CPU: missing ones by ascending load; link: missing ones by descending load,
    which join the GPU's queue at their load's place when they land. The timeline that is free first takes its next
    expert, until all are placed; an idle CPU may take residents, lowest load first.
    Ours: at equal times CPU before GPU before link; the CPU takes a resident only if it ends before the GPU would
    have worked off its whole queue.
    """

    def __init__(self, costs: Costs, cpu: bool = True) -> None:
        self._costs, self._cpu = costs, cpu
        self._copy_ns = max(costs.copy_ns, 1)  # so that a copy lands after it has begun
        self._gpu_ns, self._cpu_ns = PerLoad(costs.gpu_ns), PerLoad(costs.cpu_ns)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...], int], Schedule] = {}

    def plan(self, resident: tuple[int, ...], missing: tuple[int, ...], coming: int = 0) -> Schedule:
        """The first `coming` of the missing ones are already on the link, a whole copy each."""
        key = resident, missing, coming
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = self._known[key] = self._work_out((*resident, *missing), len(resident), coming)
        return found

    def makespan(self, resident: Sequence[int], missing: Sequence[int]) -> int:
        """`plan(resident, missing).makespan_ns`, mostly without planning.

        While anything is missing, CPU and link do not ask what the GPU does. The GPU never idles with work at hand,
        so if it works alone its end does not depend on the order; and the CPU takes no resident from it if even the
        lightest one, taken at once, would end later than that.
        """
        copied, cpu_ns, start_ns = self._shared_out(missing, 0)
        price = self._gpu_ns
        gpu_ns, lands = sum([price[load] for load in resident]), 0
        for load in missing[:copied]:
            lands += self._copy_ns
            gpu_ns = (lands if lands > gpu_ns else gpu_ns) + price[load]
        if self._cpu and resident and cpu_ns + start_ns + self._cpu_ns[resident[-1]] < gpu_ns:
            return self.plan(tuple(resident), tuple(missing)).makespan_ns
        return max(cpu_ns, gpu_ns)

    def _shared_out(self, missing: Sequence[int], coming: int) -> tuple[int, int, int]:
        """How many of the missing are copied, from the front, the others being the CPU's; when the CPU has done these;
        and what its next expert costs beside its own time."""
        low, high, cpu_ns, link_ns = coming, len(missing), 0, coming * self._copy_ns
        if not self._cpu:
            return high, 0, 0
        price, copy_ns, start_ns = self._cpu_ns, self._copy_ns, self._costs.cpu_first_ns
        while low < high:
            if cpu_ns <= link_ns:
                high -= 1
                cpu_ns += price[missing[high]] + start_ns
                start_ns = 0
            else:
                low += 1
                link_ns += copy_ns
        return low, cpu_ns, start_ns

    def _work_out(self, loads: tuple[int, ...], residents: int, coming: int) -> Schedule:
        """Items are positions in `loads`. The GPU's queue is `queue` from `head` on."""
        copied, cpu_at, start_ns = self._shared_out(loads[residents:], coming)
        copies = range(residents, residents + copied)
        cpu = list(range(len(loads) - 1, residents + copied - 1, -1))
        gpu: list[int] = []
        queue, head, gpu_at, landed = list(range(residents)), 0, 0, 0
        gpu_ns = [self._gpu_ns[load] for load in loads]
        queue_ns = sum(gpu_ns[:residents])
        while head < len(queue) or landed < copied:
            now = gpu_at if head < len(queue) else max(gpu_at, self._copy_ns * (landed + 1))
            last = queue[-1] if self._cpu and head < len(queue) else residents
            if last < residents and cpu_at <= now:
                cpu_done = cpu_at + self._cpu_ns[loads[last]] + start_ns
                if cpu_done < gpu_at + queue_ns:
                    cpu_at, start_ns = cpu_done, 0
                    cpu.append(queue.pop())
                    queue_ns -= gpu_ns[last]
                    continue
            while landed < copied and self._copy_ns * (landed + 1) <= now:
                item = copies[landed]
                landed += 1
                queue.insert(bisect_right(queue, -loads[item], head, key=lambda i: -loads[i]), item)
                queue_ns += gpu_ns[item]
            item = queue[head]
            head += 1
            queue_ns -= gpu_ns[item]
            gpu_at = now + gpu_ns[item]
            if item < residents:
                gpu.append(item)
        return Schedule(tuple(gpu), tuple(copies), tuple(cpu), max(cpu_at, gpu_at))


def paper_schedule(
    resident: Sequence[int], missing: Sequence[int], costs: Costs, cpu: bool = True, coming: int = 0
) -> Schedule:
    """One plan of a `Planner`."""
    return Planner(costs, cpu).plan(tuple(resident), tuple(missing), coming)


def release_schedule(resident: Sequence[int], missing: Sequence[int], costs: Costs, cpu: bool = True) -> Schedule:
    """The head/tail rule of HybriMoE's released code (508a85b).

    Residents then missing ones, each by descending load, form one list. If the GPU would finish its head no later than
    the CPU its tail, the GPU takes the head, else the CPU takes the tail. A missing head makes the GPU wait for the
    serial copies so far and its own.
    """
    loads = (*resident, *missing)
    gpu_at = cpu_at = move_at = 0
    gpu: list[int] = []
    copies: list[int] = []
    on_cpu: list[int] = []
    head, tail = 0, len(loads) - 1
    while head <= tail:
        absent = head >= len(resident)
        wait = max(0, move_at + costs.copy_ns - gpu_at) if absent else 0
        gpu_done = gpu_at + wait + costs.gpu_ns(loads[head])
        cpu_done = cpu_at + costs.cpu_ns(loads[tail], first=not on_cpu)
        if gpu_done <= cpu_done or not cpu:
            gpu_at = gpu_done
            move_at += costs.copy_ns if absent else 0
            (copies if absent else gpu).append(head)
            head += 1
        else:
            cpu_at = cpu_done
            on_cpu.append(tail)
            tail -= 1
    return Schedule(tuple(gpu), tuple(copies), tuple(on_cpu), max(cpu_at, gpu_at))
