"""Where the wall time of a live step went, measured on the main thread."""

from dataclasses import dataclass, field

from ..traces.schema import Kind


@dataclass(slots=True)
class LayerTimes:
    """One expert layer, in ns: `before` since the last layer's end (attention, norms, router), then its parts.

    `work` has (tokens, ns) of each expert computed on this thread, `cpu_work` on the CPU tier. What is left of
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


@dataclass(slots=True)
class StepTimes:
    """One forward pass. `draft` is the drafting before it, `tail` the time from the last layer's end to the step's."""

    kind: Kind
    tokens: int
    draft: int
    layers: list[LayerTimes] = field(default_factory=list)
    tail: int = 0

    @property
    def wall_ns(self) -> int:
        return self.draft + sum(x.before + x.wall for x in self.layers) + self.tail

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
