"""The seam with transformers: our function in its registry of experts implementations, and the expert arithmetic.

transformers calls the function with a layer's module, hidden states and the router's choice; we compute the chosen
experts from wherever their weights are. The result does not depend on where or when an expert was computed: each
writes its rows into a place of its own, and these are weighted and added in the router's order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter_ns
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ExpertsInterface

from ..policies.interface import Key
from .store import Arena, HostStore, Weights

IMPLEMENTATION = "spac"


@dataclass
class Call:
    """The expert work of one layer for n tokens.

    layer: MoE order. hidden: [n, H]. ids: n lists of k expert ids, in the router's order. weights: [n, k] as applied.
    """

    layer: int
    module: Any
    hidden: torch.Tensor
    ids: list[list[int]]
    weights: torch.Tensor
    rows: torch.Tensor = field(init=False)  # [n * k, H]; row t * k + j is token t through its j-th expert
    places: dict[int, list[int]] = field(init=False)  # expert -> its rows

    def __post_init__(self) -> None:
        n, k = self.weights.shape
        self.rows = self.hidden.new_empty((n * k, self.hidden.shape[1]))
        self.places = {}
        for token, chosen in enumerate(self.ids):
            for j, expert in enumerate(chosen):
                self.places.setdefault(expert, []).append(token * k + j)

    @cached_property
    def host_hidden(self) -> torch.Tensor:
        """Hidden states for the CPU tier; no copy where the fast device is emulated."""
        return self.hidden.to("cpu")

    @cached_property
    def host_rows(self) -> torch.Tensor:
        """Where the CPU tier writes; `rows` itself where the fast device is emulated."""
        return self.rows if self.rows.device.type == "cpu" else torch.empty_like(self.rows, device="cpu")

    def compute(self, expert: int, arena: Arena, slot: int) -> None:
        """All tokens of one expert on the fast device, which holds it in `slot`."""
        self._run(expert, arena.weights(slot), self.hidden, self.rows)

    def compute_on_host(self, experts: Sequence[int], store: HostStore, threads: int = 1) -> list[tuple[int, int]]:
        """All tokens of some experts on the CPU tier; `bring` takes the rows over. (tokens, ns) of each, in order."""
        work = []
        for expert in experts:
            begin = perf_counter_ns()
            self._run(expert, store.weights(Key(self.layer, expert)), self.host_hidden, self.host_rows)
            work.append((len(self.places[expert]), perf_counter_ns() - begin))
        return work

    def bring(self, experts: Iterable[int]) -> None:
        """Take the CPU tier's rows to the fast device."""
        if self.host_rows is not self.rows:
            at = [row for expert in experts for row in self.places[expert]]
            self.rows[at] = self.host_rows[at].to(self.rows.device)

    def _run(self, expert: int, weights: Weights, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        at, k = self.places[expert], self.weights.shape[1]
        one = at[0] // k
        x = hidden[one : one + 1] if len(at) == 1 else hidden[[row // k for row in at]]
        y = F.linear(self._activate(F.linear(x, weights.up, weights.up_bias)), weights.down, weights.down_bias)
        if len(at) == 1:
            rows[at[0]] = y[0]
        else:
            rows[at] = y

    def _activate(self, up: torch.Tensor) -> torch.Tensor:
        """The family's own gate; gpt-oss interleaves its rows, others clamp."""
        return self.module._apply_gate(up) if self.module.has_gate else self.module.act_fn(up)

    def merge(self) -> torch.Tensor:
        """[n, H]: the weighted sum over each token's experts."""
        n, k = self.weights.shape
        return (self.rows.view(n, k, -1) * self.weights.unsqueeze(-1)).sum(1)


class Listener(Protocol):
    """Who does the work of the layers."""

    def layer(self, call: Call) -> None:
        """Fill `call.rows`."""
        ...


def register() -> None:
    """Make `experts_implementation="spac"` known to transformers. Must come before the model is built."""
    ExpertsInterface.register(IMPLEMENTATION, _forward)


def attach(experts: Iterable[torch.nn.Module], listener: Listener) -> None:
    """Send the layers' work (experts modules in MoE order) to `listener` from now on."""
    for layer, module in enumerate(experts):
        module.spac = (layer, listener)  # pyright: ignore[reportArgumentType]


def _forward(module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """hidden: [n, H]; top_k_index: [n, k] int64; top_k_weights: [n, k], normalised. Returns [n, H]."""
    layer, listener = module.spac
    call = Call(layer, module, hidden, top_k_index.tolist(), top_k_weights)
    listener.layer(call)
    return call.merge()
