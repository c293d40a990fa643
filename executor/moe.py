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

from ..policies.demand import Needed
from ..policies.interface import Key
from . import kernels
from .device import host_buffer, indices
from .store import Arena, HostStore, Record, Weights

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
        on_host = self.hidden.device.type == "cpu"
        self.rows = self.hidden.new_empty((n * k, self.hidden.shape[1]), dtype=torch.float32 if on_host else None)
        self.places = {}
        for token, chosen in enumerate(self.ids):
            for j, expert in enumerate(chosen):
                self.places.setdefault(expert, []).append(token * k + j)

    @property
    def needed(self) -> Needed:
        """As `needed_by_layer` makes it of the ids."""
        experts = sorted(self.places)
        return tuple(experts), tuple([len(self.places[expert]) for expert in experts])

    @cached_property
    def host_hidden(self) -> torch.Tensor:
        """Hidden states for torch on the CPU tier; no copy where the fast device is emulated."""
        return self.hidden.to("cpu")

    @cached_property
    def plain_hidden(self) -> torch.Tensor:
        """Hidden states for the compiled kernels; no copy if they are float32 on the CPU already."""
        return self.hidden.to("cpu", torch.float32).contiguous()

    @cached_property
    def host_rows(self) -> torch.Tensor:
        """Where the CPU tier writes, float32; `rows` itself where the fast device is emulated."""
        place = self.rows.device
        return self.rows if place.type == "cpu" else host_buffer(tuple(self.rows.shape), torch.float32, place)

    @cached_property
    def _order(self) -> dict[int, torch.Tensor]:
        """The rows of each expert, on the device; all are sent there at once."""
        flat = indices([row for at in self.places.values() for row in at], self.rows.device)
        parts = flat.split([len(at) for at in self.places.values()])
        return dict(zip(self.places, parts, strict=True))

    def compute(self, expert: int, arena: Arena, slot: int) -> None:
        """All tokens of one expert on the fast device, which holds it in `slot`.

        Where the device is emulated the arithmetic is the CPU tier's, so that the result is too.
        """
        if self.rows.device.type == "cpu" and kernels.ready():
            self._run_compiled([expert], [arena.address(slot)], arena.record, torch.get_num_threads())
        else:
            self._run(expert, arena.weights(slot), self.hidden, self.rows)

    def compute_all(self, experts: Sequence[int], arena: Arena, slots: Sequence[int]) -> tuple[list[int], int]:
        """The same for several experts, in one call if there are compiled kernels; ns of each, which on a GPU are those
        of launching it. And ns for which the interpreter was kept from us when they were done, where that is known."""
        if self.rows.device.type == "cpu" and kernels.ready():
            addresses = [arena.address(slot) for slot in slots]
            return self._run_compiled(experts, addresses, arena.record, torch.get_num_threads())
        spent = []
        for expert, slot in zip(experts, slots, strict=True):
            begin = perf_counter_ns()
            self._run(expert, arena.weights(slot), self.hidden, self.rows)
            spent.append(perf_counter_ns() - begin)
        return spent, 0

    def fetch(self) -> None:
        """Bring to the host what the CPU tier will read, while the device has nothing else to do."""
        _ = self.plain_hidden if kernels.ready() else self.host_hidden

    def compute_on_host(self, experts: Sequence[int], store: HostStore, threads: int = 1) -> list[tuple[int, int]]:
        """All tokens of some experts on the CPU tier; `bring` takes the rows over. (tokens, ns) of each, in order."""
        tokens = [len(self.places[expert]) for expert in experts]
        if kernels.ready():
            addresses = [store.address(Key(self.layer, expert)) for expert in experts]
            return list(zip(tokens, self._run_compiled(experts, addresses, store.record, threads)[0], strict=True))
        spent = []
        for expert in experts:
            begin = perf_counter_ns()
            self._run(expert, store.weights(Key(self.layer, expert)), self.host_hidden, self.host_rows)
            spent.append(perf_counter_ns() - begin)
        return list(zip(tokens, spent, strict=True))

    def bring(self, experts: Iterable[int]) -> None:
        """Take the CPU tier's rows to the fast device."""
        if self.host_rows is not self.rows:
            at = torch.cat([self._order[expert] for expert in experts])
            self.rows[at] = self.host_rows.to(self.rows.device, non_blocking=True)[at].to(self.rows.dtype)

    def _run(self, expert: int, weights: Weights, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        at, k = self.places[expert], self.weights.shape[1]
        one = at[0] // k
        many = None
        if len(at) > 1:
            many = self._order[expert] if rows is self.rows else torch.tensor(at)
        x = hidden[one : one + 1] if many is None else hidden[many // k]
        y = F.linear(self._activate(F.linear(x, weights.up, weights.up_bias)), weights.down, weights.down_bias)
        if many is None:
            rows[at[0]] = y[0]
        else:
            rows[many] = y.to(rows.dtype)

    def _run_compiled(
        self, experts: Sequence[int], addresses: list[int], record: Record, threads: int
    ) -> tuple[list[int], int]:
        """Some experts in one call, or in two with the family's own gate between them. As `kernels.run` returns it."""
        places, k = [self.places[expert] for expert in experts], self.weights.shape[1]
        counts, targets = [len(at) for at in places], [row for at in places for row in at]
        sources, layout = [row // k for row in targets], record.matrices
        x, rows = self.plain_hidden, self.host_rows
        middle = torch.empty((len(targets), record.up_rows))

        def run(stages: int, x: torch.Tensor) -> tuple[list[int], int]:
            return kernels.run(layout, stages, addresses, counts, sources, targets, x, middle, rows, threads)

        if fuses(self.module, record):
            return run(kernels.UP | kernels.GATE | kernels.DOWN, x)
        up, kept = run(kernels.UP, x)
        down, late = run(kernels.DOWN, self._activate(middle).contiguous())
        return [one + other for one, other in zip(up, down, strict=True)], kept + late

    def _activate(self, up: torch.Tensor) -> torch.Tensor:
        """The family's own gate; gpt-oss interleaves its rows, others clamp."""
        return self.module._apply_gate(up) if self.module.has_gate else self.module.act_fn(up)

    def merge(self) -> torch.Tensor:
        """[n, H]: the weighted sum over each token's experts."""
        rows, weights = self.rows.view(*self.weights.shape, -1), self.weights.unsqueeze(-1)
        weighted = rows.mul_(weights) if rows.dtype == torch.float32 else rows * weights
        return weighted.sum(1).to(self.hidden.dtype)


def fuses(module: Any, record: Record) -> bool:
    """Whether the module's gate is silu(first half) * second half, which the kernels have. It is tried once, on numbers
    so large that a clamp shows."""
    known = getattr(module, "spac_fuses", None)
    if known is None:
        known = module.has_gate and _is_plain_gate(module, record.width)
        module.spac_fuses = known
    return known


def _is_plain_gate(module: Any, width: int) -> bool:
    both = torch.randn((4, 2 * width), generator=torch.Generator().manual_seed(0)) * 30
    gate, up = both.chunk(2, dim=-1)
    try:
        theirs = module._apply_gate(both)
    except (RuntimeError, TypeError):  # it wants what only the model has
        return False
    expected = F.silu(gate) * up
    return theirs.shape == expected.shape and torch.allclose(theirs, expected, rtol=1e-5, atol=1e-6)


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
