"""Shared fixtures: the tiny models of `tiny.py`, saved once a session."""

import os
from pathlib import Path

import pytest

# These models are so small that a second thread only waits; on a shared machine it waits long. Subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    """Folder of TINY-T: Qwen3-MoE, 2 layers, 8 experts, top-2."""
    from tiny import save_tiny_target

    return save_tiny_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory) -> Path:
    """Folder of TINY-D: dense Qwen3, 1 layer, the target's tokenizer."""
    from tiny import save_tiny_draft

    return save_tiny_draft(tmp_path_factory.mktemp("tiny-draft"))


@pytest.fixture(scope="session")
def tiny_shape(tiny_target):
    """ModelShape of TINY-T in float32."""
    from tiny import tiny_config

    from moe_spac.traces.models import model_shape

    return model_shape(tiny_config(), str(tiny_target))
