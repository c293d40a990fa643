"""The seam between the draft/verify loop, the target's expert layers, and the policy's host.

The loop's observer is also the listener of the target's expert layers, so it sees a step whole: its tokens, the
routing of every layer, and what verification kept.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from ..policies.interface import StepInfo
from ..traces.routers import Asked, Routers, asking, gate_choice, read_routers
from ..traces.schema import Kind, Step, id_dtype, kept_rows
from ..traces.speculate import Observer
from .host import Host, Routed
from .models import Models
from .moe import Call, attach


class Live(Observer):
    """Tells the host of every step and layer, and gathers the routing for `write`.

    `on_tokens` is told the tokens that a step settled, and `should_stop` is asked before every forward pass.
    """

    def __init__(
        self,
        host: Host,
        models: Models,
        routers: Routers | None = None,
        lookahead: int = 0,
        write: Callable[[Step], None] | None = None,
    ) -> None:
        self.host = host
        self.sequence = self.turn = 0
        self.on_tokens: Callable[[Sequence[int]], None] | None = None
        self.should_stop: Callable[[], bool] | None = None
        self.asked: dict[int, Asked] = {}  # filled by `asking` where gates are asked ahead
        self._gates, self._routers = [block.gate for block in models.blocks], routers
        self._ids = id_dtype(models.pair.shape.experts)
        self._lookahead, self._write = lookahead, write
        self._index = -1
        self._routed: list[Routed] = []

    def listen(self, models: Models, stack: ExitStack) -> None:
        """Hear the target's expert layers from now on, and until `stack` is closed what its gates are asked, if they
        are to be asked ahead."""
        if self._lookahead:
            stack.enter_context(asking(models.blocks, self.asked, models.pair.shape.experts, values=False))
        attach(models.experts, self)

    def stop(self) -> bool:
        return self.should_stop is not None and self.should_stop()

    def draft_length(self, planned: int) -> int:
        return self.host.draft_length(planned)

    def step_begins(self, kind: Kind, tokens: np.ndarray, positions: np.ndarray, drafted: np.ndarray) -> None:
        self._index += 1
        self._positions, self._step = positions, StepInfo(self._index, kind, tokens, drafted)
        self._routed.clear()
        self.host.step_begins(self._step, int(positions[0]))

    def layer(self, call: Call) -> None:
        def route() -> Routed:
            ids = np.array(call.ids, dtype=self._ids)
            self._routed.append(Routed(ids, call.weights.half().cpu().numpy(), self._ahead(call.layer)))
            return self._routed[-1]

        self.host.layer(call, route)

    def step_ends(self, accepted: int, emitted: Sequence[int]) -> None:
        self.host.step_ends(accepted, kept_rows(self._step.drafted, accepted), len(emitted))
        if self._write is not None:
            self._write(self._whole_step(accepted))
        if emitted and self.on_tokens is not None:
            self.on_tokens(emitted)

    def _ahead(self, layer: int) -> np.ndarray | None:
        """[n, J, k]: what the next layers' gates say of this layer's gate input; the last layer repeats at the end."""
        if not self._lookahead:
            return None
        assert self._routers is not None
        hidden = self.asked.pop(layer).args[0]
        choices: dict[int, torch.Tensor] = {}
        later = [min(layer + j, len(self._gates) - 1) for j in range(1, self._lookahead + 1)]
        for one in set(later):
            args, kwargs = self._routers.extras[one]
            choices[one] = gate_choice(self._gates[one], hidden, *args, **kwargs)
        return torch.stack([choices[one] for one in later], 1).cpu().numpy().astype(self._ids)

    def _whole_step(self, accepted: int) -> Step:
        layers = self._routed
        ahead = [r.ahead for r in layers if r.ahead is not None]
        return Step(
            sequence=self.sequence,
            turn=self.turn,
            kind=self._step.kind,
            positions=self._positions,
            tokens=self._step.tokens,
            drafted=self._step.drafted,
            accepted=accepted,
            experts=np.stack([r.ids for r in layers], 1),
            weights=np.stack([r.weights for r in layers], 1),
            ahead=np.stack(ahead, 1) if ahead else None,
        )


class _NoExperts:
    """Listener of a pass in which only the gates are of interest."""

    def layer(self, call: Call) -> None:
        call.rows.zero_()


def routers_of(models: Models, lookahead: int) -> Routers:
    """What gates take beside hidden states. Raises InputError for gates that cannot be asked ahead.

    Experts compute nothing until the next `attach`.
    """
    attach(models.experts, _NoExperts())
    return read_routers(models.pair.target, models.blocks, models.pair.shape.experts, False, lookahead > 0)
