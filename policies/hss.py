"""Splitting one layer's experts between GPU, CPU and link: HybriMoE's scheduler (HSS), twice, as pure functions.

Both take the loads (tokens) of the resident and of the missing experts, each in descending order, and answer with
positions: 0..R-1 name residents, R..R+M-1 the missing ones in the order given.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Schedule:
    """gpu: residents in working order. copies: missing experts to bring over, in order. cpu: in working order.

    makespan_ns: when the later of CPU and GPU is done, by the plan's own reckoning.
    """

    gpu: tuple[int, ...]
    copies: tuple[int, ...]
    cpu: tuple[int, ...]
    makespan_ns: int


class _Lanes:
    """Three clocks and two queues while a layer is being planned."""

    def __init__(self, resident: Sequence[int], missing: Sequence[int], costs: Costs) -> None:
        self.loads = (*resident, *missing)
        price = {load: (costs.gpu_ns(load), costs.cpu_ns(load)) for load in set(self.loads)}
        self.gpu_ns = [price[load][0] for load in self.loads]
        self.cpu_ns = [price[load][1] for load in self.loads]
        self.copy_ns, self.cpu_first_ns = costs.copy_ns, costs.cpu_first_ns
        self.residents = len(resident)
        self.queue = list(range(len(resident)))  # for the GPU, highest load first
        self.queue_ns = sum(self.gpu_ns[: self.residents])
        self.missing = deque(range(len(resident), len(self.loads)))
        self.arriving: deque[tuple[int, int]] = deque()
        self.cpu_at = self.gpu_at = self.link_at = 0
        self.gpu: list[int] = []
        self.copies: list[int] = []
        self.cpu: list[int] = []

    def gpu_ready(self) -> float:
        """When the GPU can take its next expert."""
        if self.queue:
            return self.gpu_at
        return max(self.gpu_at, self.arriving[0][0]) if self.arriving else NEVER

    def cpu_ready(self) -> float:
        """When the CPU can take its next expert: a missing one, else a resident that it would finish in time."""
        if self.missing:
            return self.cpu_at
        if not self.queue or self.queue[-1] >= self.residents:
            return NEVER
        return self.cpu_at if self.cpu_done(self.queue[-1]) < self.gpu_at + self.queue_ns else NEVER

    def cpu_done(self, item: int) -> int:
        """When the CPU would end `item` if it took it next."""
        return self.cpu_at + self.cpu_ns[item] + (0 if self.cpu else self.cpu_first_ns)

    def work_cpu(self) -> None:
        if self.missing:
            item = self.missing.pop()
        else:
            item = self.queue.pop()
            self.queue_ns -= self.gpu_ns[item]
        self.cpu_at = self.cpu_done(item)
        self.cpu.append(item)

    def work_gpu(self) -> None:
        now = self.gpu_ready()
        while self.arriving and self.arriving[0][0] <= now:
            item = self.arriving.popleft()[1]
            at = bisect_right(self.queue, -self.loads[item], key=lambda i: -self.loads[i])
            self.queue.insert(at, item)
            self.queue_ns += self.gpu_ns[item]
        item = self.queue.pop(0)
        self.queue_ns -= self.gpu_ns[item]
        self.gpu_at = int(now) + self.gpu_ns[item]
        if item < self.residents:
            self.gpu.append(item)

    def copy(self, item: int) -> None:
        self.link_at += self.copy_ns
        self.arriving.append((self.link_at, item))
        self.copies.append(item)


def paper_schedule(
    resident: Sequence[int], missing: Sequence[int], costs: Costs, cpu: bool = True, coming: int = 0
) -> Schedule:
    """The paper's simulation of three timelines (arXiv 2504.05897 section IV-B).

    GPU: residents by descending load; CPU: missing ones by ascending load; link: missing ones by descending load,
    which join the GPU's queue at their load's place when they land. The timeline that is free first takes its next
    expert, until all are placed; an idle CPU may take residents, lowest load first.
    Ours: at equal times CPU before GPU before link; the CPU takes a resident only if it ends before the GPU would
    have worked off its whole queue; the first `coming` of the missing ones are already on the link, a whole copy each.
    """
    lanes = _Lanes(resident, missing, costs)
    for _ in range(coming):
        lanes.copy(lanes.missing.popleft())
    while True:
        cpu_at = lanes.cpu_ready() if cpu else NEVER
        gpu_at = lanes.gpu_ready()
        link_at = lanes.link_at if lanes.missing else NEVER
        first = min(cpu_at, gpu_at, link_at)
        if first == NEVER:
            break
        if first == cpu_at:
            lanes.work_cpu()
        elif first == gpu_at:
            lanes.work_gpu()
        else:
            lanes.copy(lanes.missing.popleft())
    return Schedule(tuple(lanes.gpu), tuple(lanes.copies), tuple(lanes.cpu), max(lanes.cpu_at, lanes.gpu_at))


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
