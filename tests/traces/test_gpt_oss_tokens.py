"""Token numbers of the bundled gpt-oss-20b trace."""

import gzip
import json

import pytest

from moe_spac.traces.errors import InputError
from moe_spac.traces.gpt_oss_tokens import number, with_token_numbers


def test_every_text_begins_as_the_models_answers_do():
    """gpt-oss opens each answer with the same three tokens: <|channel|>, analysis, <|message|>."""
    begins: dict[int, list[int]] = {}
    known = 0
    for step in with_token_numbers().steps():
        token = int(step.tokens[0])
        assert token <= known, "numbers come by first appearance"
        known = max(known, token + 1)
        begins.setdefault(step.sequence, []).append(token)
    assert len(begins) == 165
    assert all(tokens[:3] == [0, 1, 2] for tokens in begins.values())
    assert known > 5000


def test_texts_of_another_trace_are_refused(tmp_path):
    source = tmp_path / "tokens.jsonl.gz"
    with gzip.open(source, "wt", encoding="utf-8") as lines:
        lines.write(json.dumps({"generated_tokens": ["a", "b", "a"]}) + "\n")
    with pytest.raises(InputError, match=r"tokens\.jsonl\.gz: 2 tokens for the 57499 rows of the trace"):
        number(source, tmp_path / "out.npz")
