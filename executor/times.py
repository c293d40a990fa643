"""Where the time of a live step went, in the fast device's own order of work (on CUDA by events, else by the clock)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..traces.schema import Kind


@dataclass(slots=True)
class LayerTimes:
    """One expert layer, in ns: `before` since the last layer's end (attention, norms, router), then its parts.

    `work` has (tokens, ns) of each expert computed on the fast device, `cpu_work` on the CPU tier. What is left of
    `wall` is deciding and bookkeeping.
    """

    before: int
    wall: int = 0
    wait_copy: int = 0
    wait_cpu: int = 0
    work: list[tuple[int, int]] = field(default_factory=list)
    cpu_work: list[tuple[int, int]] = field(default_factory=list)

    @property
    def expert(self) -> int:
        return sum(ns for _, ns in self.work)

    @property
    def policy(self) -> int:
        return self.wall - self.expert - self.wait_copy - self.wait_cpu

    def scaled(self, factor: float) -> "LayerTimes":
        """Of a machine that takes `factor` times as long for everything."""
        before, wall, copy, cpu = (round(ns * factor) for ns in (self.before, self.wall, self.wait_copy, self.wait_cpu))
        work, cpu_work = ([(n, round(ns * factor)) for n, ns in done] for done in (self.work, self.cpu_work))
        return LayerTimes(before, wall, copy, cpu, work, cpu_work)


@dataclass(slots=True)
class StepTimes:
    """One forward pass. `draft` is the drafting before it, `tail` the time from the last layer's end to the step's.

    `busy`: ns that the link spent on demand and on prefetches and the CPU tier on experts, from the end of the step
    before to this one's; and, under "asked", what its thread spent on asking the policy what to prefetch.
    """

    kind: Kind
    tokens: int
    draft: int
    layers: list[LayerTimes] = field(default_factory=list)
    tail: int = 0
    busy: dict[str, int] = field(default_factory=dict)

    @property
    def wall_ns(self) -> int:
        return self.draft + sum(x.before + x.wall for x in self.layers) + self.tail

    def scaled(self, factor: float) -> "StepTimes":
        """Of a machine that takes `factor` times as long for everything."""
        busy = {name: round(ns * factor) for name, ns in self.busy.items()}
        drafting, tail = round(self.draft * factor), round(self.tail * factor)
        return replace(self, draft=drafting, layers=[x.scaled(factor) for x in self.layers], tail=tail, busy=busy)

    def split(self) -> dict[str, int]:
        """ns of the step by what they went to, named as the simulator names them; they add up to `wall_ns`.

        What the first layer's `before` has beyond the others' mean is the embedding, and goes to the step.
        """
        names = ("expert", "wait_copy", "wait_cpu", "policy")
        total = {name: sum(getattr(x, name) for x in self.layers) for name in names}
        others = [x.before for x in self.layers[1:]]
        step = self.tail + (self.layers[0].before - sum(others) // len(others) if others else 0)
        dense = self.wall_ns - self.draft - step - sum(total.values())
        return {"draft": self.draft, "step": step, "dense": dense, **total}

    def exposed(self) -> dict[str, int]:
        """ns that the link and the CPU tier were busy, and how much of it the fast device stood waiting for them."""
        wait_copy, wait_cpu = (sum(getattr(x, name) for x in self.layers) for name in ("wait_copy", "wait_cpu"))
        copies = self.busy.get("demand", 0) + self.busy.get("prefetch", 0)
        return {"link": copies, "link_exposed": wait_copy, "cpu": self.busy.get("cpu", 0), "cpu_exposed": wait_cpu}


def decision_ns(steps: Sequence[StepTimes]) -> float:
    """Mean ns of a layer that went into deciding: on the main thread, and on the link's, which is asked for prefetches
    and takes the interpreter from the main one meanwhile, where that does not wait or compute experts without it."""
    layers = [x for step in steps for x in step.layers]
    asked, wall = sum(step.busy.get("asked", 0) for step in steps), sum(step.wall_ns for step in steps)
    outside = sum(x.expert + x.wait_copy + x.wait_cpu for x in layers)
    return (sum(x.policy for x in layers) + asked * (1 - outside / max(1, wall))) / max(1, len(layers))


def exposed(steps: list[StepTimes]) -> dict[str, float | None]:
    """How much of the lanes' work was hidden behind the fast device's: 1 is all of it, None if there was none."""
    total = {"link": 0, "link_exposed": 0, "cpu": 0, "cpu_exposed": 0}
    for step in steps:
        for name, ns in step.exposed().items():
            total[name] += ns
    return {
        f"{lane}_hidden": max(0.0, 1 - total[f"{lane}_exposed"] / total[lane]) if total[lane] else None
        for lane in ("link", "cpu")
    }
