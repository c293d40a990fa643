"""The compiled twins of what the policy `marginal` computes, for tests that compare both."""

import pytest

try:
    from moe_spac.policies import _marginal as compiled
except ImportError:
    compiled = None

built = pytest.mark.skipif(compiled is None, reason="the C extension was not built")
