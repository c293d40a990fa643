"""Gates that take more than hidden states, asked ahead in a live run as the recorder asks them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from tiny import family_model

from moe_spac.executor.live import Live, routers_of
from moe_spac.executor.moe import attach, register
from moe_spac.executor.probe import PairSubject
from moe_spac.traces.models import model_shape, moe_blocks
from moe_spac.traces.recorder import RouterRecorder
from moe_spac.traces.routers import asking
from moe_spac.traces.speculate import Options, Speculation

PROMPT = list(range(5, 17))


class OwnWeights:
    """A host that computes every expert from the model's own parameters, at once."""

    def draft_length(self, planned: int) -> int:
        return planned

    def step_begins(self, step, context):
        pass

    def layer(self, call, route):
        route()
        for expert, rows in call.places.items():
            x = call.hidden[[row // call.weights.shape[1] for row in rows]]
            gated = call.module._apply_gate(F.linear(x, call.module.gate_up_proj[expert]))
            call.rows[rows] = F.linear(gated, call.module.down_proj[expert])

    def step_ends(self, accepted, kept, emitted):
        pass


def live_models(model, shape) -> Any:
    """As much of `Models` as routers are read from."""
    register()
    model.set_experts_implementation("spac")
    blocks = moe_blocks(model)
    return SimpleNamespace(
        blocks=blocks, experts=[b.experts for b in blocks], pair=SimpleNamespace(target=model, shape=shape)
    )


@pytest.mark.parametrize(("family", "can"), [("qwen3_moe", True), ("deepseek_v4", False)])
def test_gates_that_cannot_be_asked_ahead_are_not_calibrated(family, can):
    model = family_model(family)
    assert PairSubject(live_models(model, model_shape(model.config, family))).gates is can


@pytest.mark.parametrize("family", ["qwen3_moe", "afmoe", "minimax_m2", "lfm2_moe", "gemma4_text"])
def test_next_gates_are_asked_as_the_recorder_asks_them(family):
    model = family_model(family)
    shape = model_shape(model.config, family)
    theirs, ours = [], []
    recorder = RouterRecorder(model, shape, theirs.append, lookahead=2)
    with recorder.watching():
        text = Speculation(model, None, Options(4), recorder).generate(PROMPT).tokens
    models = live_models(model, shape)
    host: Any = OwnWeights()
    live = Live(host, models, routers_of(models, 2), 2, ours.append)
    attach(models.experts, live)
    with asking(models.blocks, live.asked, shape.experts, values=False):
        assert Speculation(model, None, Options(4), live).generate(PROMPT).tokens == text
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a.experts, b.experts)
        assert np.array_equal(a.ahead, b.ahead)
