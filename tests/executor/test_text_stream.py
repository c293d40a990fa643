"""Text that comes piece by piece is the text of the whole, for any tokens and any stop strings."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY_VOCAB

from moe_spac.executor.conversation import encode_conversation, plain
from moe_spac.executor.text_stream import TextStream
from moe_spac.traces.errors import InputError
from moe_spac.traces.models import find_pair


@cache
def embedded():
    return find_pair(None, "none")[0].tokenizer


def whole(ids) -> str:
    return embedded().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pushed(stream: TextStream, ids, sizes) -> str:
    text, at = "", 0
    for size in [*sizes, len(ids)]:
        text += stream.push(ids[at : at + size])
        at += size
    return text + stream.finish()


tokens = st.lists(st.integers(0, TINY_VOCAB + 100), max_size=30)  # bytes of broken characters among them
sizes = st.lists(st.integers(1, 4), max_size=30)


@settings(max_examples=150, deadline=None)
@given(tokens, sizes)
def test_pieces_add_up_to_the_whole(ids, sizes):
    stream = TextStream(embedded())
    assert pushed(stream, ids, sizes) == whole(ids) == stream.text
    assert stream.tokens == len(ids)


@settings(max_examples=150, deadline=None)
@given(st.text("abc ", max_size=12), st.lists(st.text("abc ", min_size=1, max_size=3), max_size=3), sizes)
def test_text_ends_before_the_stop_string_that_is_complete_first(text, stops, sizes):
    ids = embedded().encode(text)
    stream = TextStream(embedded(), stops)
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
    expected = text
    if ends:
        # Tokens come whole: all strings that are complete with the token of the first one compete by their ends.
        expected = text[: min(ends[0] - len(s) for s in stops if text[: ends[0]].endswith(s))]
    assert pushed(stream, ids, sizes) == expected
    assert stream.stopped == bool(ends)


@given(st.lists(st.sampled_from(["ab", "abc", "é", "日本", "\n"]), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_no_piece_has_half_a_character(words):
    text = "".join(words)
    stream = TextStream(embedded())
    pieces = [stream.push([token]) for token in embedded().encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text


def test_a_stop_token_ends_the_text_and_has_none():
    ids = [*embedded().encode("And God"), 0, *embedded().encode(" said")]
    stream = TextStream(embedded(), stop_tokens=(0,))
    assert pushed(stream, ids, []) == "And God"
    assert (stream.ended, stream.stopped) == (True, False)


class Templated:
    """The embedded tokenizer with a chat template."""

    chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )

    def apply_chat_template(self, messages, **more):
        return embedded().apply_chat_template(messages, chat_template=self.chat_template, **more)

    def encode(self, text, **more):
        return embedded().encode(text, **more)


def test_conversations_go_through_the_template_or_are_plain():
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": " I."},
        {"role": "user", "content": "Why?"},
    ]
    assert plain(talk) == "Be brief.\n\nWho? I.\n\nWhy?"
    assert encode_conversation(embedded(), talk) == embedded().encode(plain(talk))
    rendered = "[system]Be brief.\n[user]Who?\n[assistant] I.\n[user]Why?\n[assistant]"
    assert whole(encode_conversation(Templated(), talk)) == rendered
    with pytest.raises(InputError, match="system first"):
        encode_conversation(Templated(), talk[::-1])
