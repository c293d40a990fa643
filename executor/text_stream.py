"""From tokens to text while they come."""

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer writes for the first bytes of a character


class TextStream:
    """Gives the text of tokens piece by piece: whole characters, nothing of a stop string, nothing after one.

    `tokens` counts those taken, the one that completed a stop string included. `stop_tokens` have no text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), stop_tokens: Sequence[int] = ()) -> None:
        self._tokenizer, self._stops, self._ends = tokenizer, [s for s in stop if s], frozenset(stop_tokens)
        self._ids: list[int] = []
        self._before = self._read = 0  # ids[before:read] is context, whose text has been given
        self._waiting = ""  # may be the beginning of a stop string
        self.tokens = 0
        self.text = ""
        self.stopped = False  # by a stop string
        self.ended = False  # by a stop token

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is sure after these tokens; what follows a stop is dropped."""
        said = ""
        for token in tokens:
            if self.stopped or self.ended:
                break
            self.tokens += 1
            if token in self._ends:
                self.ended = True
            else:
                self._ids.append(token)
                said += self._take(self._new_text(last=False))
        self.text += said
        return said

    def finish(self) -> str:
        """What was held back."""
        said = ""
        if not self.stopped:
            said = self._take(self._new_text(last=True))
            if not self.stopped:
                said, self._waiting = said + self._waiting, ""
        self.text += said
        return said

    def _new_text(self, last: bool) -> str:
        """Text since the last call; a character that is not complete waits, unless nothing more will come."""
        given, now = self._decode(self._ids[self._before : self._read]), self._decode(self._ids[self._before :])
        if not last and (len(now) <= len(given) or now.endswith(UNFINISHED)):
            return ""
        self._before, self._read = self._read, len(self._ids)
        return now[len(given) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _take(self, text: str) -> str:
        """What may be shown of the waiting text and `text`. Of several stop strings the first to be complete counts."""
        text = self._waiting + text
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, s) for s in self._stops), default=0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
