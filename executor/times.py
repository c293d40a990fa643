"""Where the time of a live step went, in the fast device's own order of work (on CUDA by events, else by the clock)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from ..traces.schema import Kind


@dataclass(slots=True)
class LayerTimes:
    """One expert layer, in ns: `before` since the last layer's end (attention, norms, router), then its parts.

    `work` has (tokens, ns) of each expert computed on the fast device, `cpu_work` on the CPU tier. `kept` is for how
    long the link's thread kept the interpreter from the main one when one of the `calls` that did the work was over, or
    a copy was there for which it waited, where that is known. What is left of `wall` is deciding and bookkeeping, the
    first `decided` of it until work and copies are ordered.
    """

    before: int
    wall: int = 0
    wait_copy: int = 0
    wait_cpu: int = 0
    work: list[tuple[int, int]] = field(default_factory=list)
    cpu_work: list[tuple[int, int]] = field(default_factory=list)
    calls: int = 0
    kept: int = 0
    decided: int = 0

    @property
    def expert(self) -> int:
        return sum(ns for _, ns in self.work)

    @property
    def policy(self) -> int:
        return self.wall - self.expert - self.wait_copy - self.wait_cpu

    def scaled(self, factor: float) -> "LayerTimes":
        """Of a machine that takes `factor` times as long for everything."""
        names = ("before", "wall", "wait_copy", "wait_cpu", "kept", "decided")
        times = {name: round(getattr(self, name) * factor) for name in names}
        work, cpu_work = ([(n, round(ns * factor)) for n, ns in done] for done in (self.work, self.cpu_work))
        return replace(self, work=work, cpu_work=cpu_work, **times)


@dataclass(slots=True)
class StepTimes:
    """One forward pass. `draft` is the drafting before it, `tail` the time from the last layer's end to the step's.

    `busy`: ns that the link spent on demand and on prefetches and the CPU tier on experts, from the end of the step
    before to this one's; and, under "asked", what the link's thread spent on prefetches: on asking the policy for them,
    on sending and on noting down, and under "held" what these took longer on an emulated link because it did not get
    round to them. In that time `prefetches` have landed.
    """

    kind: Kind
    tokens: int
    draft: int
    layers: list[LayerTimes] = field(default_factory=list)
    tail: int = 0
    busy: dict[str, int] = field(default_factory=dict)
    prefetches: int = 0

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


@dataclass(frozen=True, slots=True)
class Deciding:
    """What deciding takes, in means of ns: of a layer before its work and copies are ordered and after that, of a call
    that computes experts, of the link for a prefetch.

    The main thread decides in the layer. The link's thread asks and sends, and keeps the interpreter from the main one
    meanwhile: around calls as that was measured; and between layers what it does for prefetches, by its share of the
    time, which is charged to their ends. What it takes of other times of a layer is in them. And a link whose thread
    asks for longer than a copy takes is late.
    """

    layer: float = 0.0
    ending: float = 0.0
    call: float = 0.0
    prefetch: float = 0.0

    @staticmethod
    def of(steps: Sequence[StepTimes]) -> "Deciding":
        layers = [x for step in steps for x in step.layers]
        n, before = max(1, len(layers)), sum(x.decided for x in layers)
        kept, calls = sum(x.kept for x in layers), max(1, sum(x.calls for x in layers))
        held, prefetches = sum(s.busy.get("held", 0) for s in steps), max(1, sum(s.prefetches for s in steps))
        after = max(0.0, sum(x.policy for x in layers) - before + asked_between(steps))
        return Deciding(before / n, after / n, kept / calls, held / prefetches)

    def scaled(self, factor: float) -> "Deciding":
        """On a machine that takes `factor` times as long for everything."""
        return Deciding(*(getattr(self, f.name) * factor for f in fields(self)))


def asked_between(steps: Sequence[StepTimes]) -> float:
    """ns that the link's thread spent on prefetches while the main one was between layers."""
    asked, wall = sum(step.busy.get("asked", 0) for step in steps), sum(step.wall_ns for step in steps)
    return asked * (1 - sum(x.wall for step in steps for x in step.layers) / max(1, wall))


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
