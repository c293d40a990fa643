"""Groups of 32 against the gguf package's own quantiser."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from moe_spac.executor.formats import EXACT, QUANTISED

KINDS = {"q8": GGMLQuantizationType.Q8_0, "q4": GGMLQuantizationType.Q4_0}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_groups_are_those_of_gguf(name, scale):
    matrix = torch.randn(24, 96, generator=torch.Generator().manual_seed(1)) * scale
    matrix[3, 32:64] = 0
    raw = QUANTISED[name].encode(matrix)
    theirs = quantize(matrix.numpy(), KINDS[name])
    np.testing.assert_array_equal(raw.numpy(), theirs)
    back = QUANTISED[name].decode(raw, torch.float32)
    np.testing.assert_allclose(back.numpy(), dequantize(theirs, KINDS[name]), rtol=1e-6)


@pytest.mark.parametrize("name", EXACT)
def test_plain_numbers_are_views(name):
    matrix = torch.randn(3, 8).to(EXACT[name].dtype)
    raw = EXACT[name].encode(matrix)
    back = EXACT[name].decode(raw, matrix.dtype)
    assert torch.equal(back, matrix)
    assert back.data_ptr() == raw.data_ptr()


def test_rows_must_hold_whole_groups():
    with pytest.raises(ValueError, match="groups of 32"):
        QUANTISED["q4"].row_bytes(48)
