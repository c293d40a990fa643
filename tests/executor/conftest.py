"""Tiny pairs loaded once, and what transformers itself writes for the prompts."""

from typing import Any

import pytest

PROMPTS = ("the expert that the router chose", "To be, or not")
NEW_TOKENS = 12


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    """Threads that wait for each other on a busy machine take longer than the work."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def load_live(tiny_target, tiny_draft):
    """Models by draft: "none", "own" (the target drafts for itself, so all is accepted) or "tiny" (little is)."""
    from functools import cache

    from moe_spac.executor.models import load_models

    @cache
    def load(draft: str):
        return load_models(tiny_target, {"none": None, "own": tiny_target, "tiny": tiny_draft}[draft])

    return load


@pytest.fixture(scope="session")
def live_prompts():
    from moe_spac.traces.prompts import Prompt

    return [Prompt(f"p{i}", "", (text,)) for i, text in enumerate(PROMPTS)]


@pytest.fixture(scope="session")
def greedy_texts(tiny_target):
    """Prompt and greedy continuation of each prompt, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_target)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    texts = []
    for prompt in PROMPTS:
        rows = torch.tensor([tokenizer.encode(prompt)])
        out = model.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None
        )
        texts.append(out[0].tolist())
    return texts


@pytest.fixture(scope="session")
def live_machine():
    """A preset with a slow emulated link, so that copies are seen and tests are quick."""
    from moe_spac.simulator.machine import Machine, Quantity, load_machine

    preset = load_machine("rtx4060-laptop")
    link = {
        "link.bandwidth": Quantity(200e6, "emulated", "test"),
        "link.copy_fixed": Quantity(20e3, "emulated", "test"),
    }
    return Machine("test", "", {**preset.quantities, **link})
