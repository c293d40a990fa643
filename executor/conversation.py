"""A conversation as one text: in the model's chat template, or plain where it has none."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from ..traces.errors import InputError

Message = Mapping[str, str]  # "role" and "content"


def encode_conversation(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's next words begin.

    Raises InputError where the model's template refuses it.
    """
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.encode(plain(messages))
    try:
        text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise InputError(f"messages: the model's chat template refuses them: {error}") from None
    return tokenizer.encode(text, add_special_tokens=False)


def plain(messages: Sequence[Message]) -> str:
    """For models that continue texts: an answer follows its question at once, all else after an empty line."""
    text = ""
    for message in messages:
        gap = "" if not text or message["role"] == "assistant" else "\n\n"
        text += gap + message["content"]
    return text
