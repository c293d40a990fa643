"""`spac-exec chat`: a conversation on the terminal, with where the experts were on the last line."""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TextIO

from ..policies.interface import Policy
from ..traces.errors import InputError
from .conversation import encode_conversation
from .result import Answer
from .session import Session
from .text_stream import TextStream
from .totals import hit_rate

HELP = """/policy NAME   decide by another policy from now on; without NAME: say which
/reset         forget the conversation
/help          this
/exit          leave (also Ctrl-D; Ctrl-C stops an answer, and leaves where there is none)
"""


@dataclass
class Chat:
    """A conversation with one session. `out` takes the answers, `status` what is going on (None: nobody looks).

    `system`: the first message. `top_p` and the seed of the session's options plus the turn's number are sampled with.
    """

    session: Session
    policy_for: Callable[[str], Policy]
    out: TextIO
    status: "StatusLine | None" = None
    system: str | None = None
    top_p: float = 1.0
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.session.forget()

    def take(self, line: str) -> bool:
        """One line of the user: a command or words to answer. False: leave."""
        words = line.split()
        try:
            match words:
                case []:
                    pass
                case ["/exit" | "/quit"]:
                    return False
                case ["/reset"]:
                    self.reset()
                    self._tell("forgotten")
                case ["/policy"]:
                    self._tell(f"{self.session.policy!r}")
                case ["/policy", name]:
                    self.session.use(self.policy_for(name))
                    self._tell(f"policy {name}; its slots start as it places them")
                case [command, *_] if command.startswith("/"):
                    self._tell(HELP.rstrip() if command == "/help" else f"{command}: unknown; /help lists commands")
                case _:
                    self.answer(line)
        except InputError as error:
            self._tell(f"error: {error}")
        return True

    def answer(self, text: str) -> Answer | None:
        """Answer one message, as far as Ctrl-C lets it; None where nothing could be said.

        Raises InputError for a conversation that the model's context does not hold; the message is forgotten then.
        """
        session = self.session
        tokenizer, options = session.models.pair.tokenizer, session.settings.options
        ids = encode_conversation(tokenizer, [*self.messages, {"role": "user", "content": text}])
        left = context_of(session) - len(ids)
        if left < 1:
            raise InputError(f"the conversation has {len(ids)} tokens, more than the model holds; /reset forgets it")
        turn = len(self.messages)
        own = replace(
            options, max_new_tokens=min(options.max_new_tokens, left), top_p=self.top_p, seed=options.seed + turn
        )
        stream = TextStream(tokenizer, stop_tokens=own.stop_tokens)
        driver, begin = session.host.driver, perf_counter()
        hits, needed = driver.decode.hits, driver.decode.needed

        def heard(tokens: Sequence[int]) -> None:
            self._write(stream.push(tokens))
            if self.status is not None:
                since = driver.decode.needed - needed
                rate = (driver.decode.hits - hits) / since if since else None
                self.status.show(words_for(session.policy.name, rate, stream.tokens, perf_counter() - begin))

        with stopping() as stopped:
            answer = session.generate(ids, own, heard, stopped)
        self._write(stream.finish() + "\n")
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": stream.text}]
        if self.status is not None:
            words = words_for(answer.policy, hit_rate(answer), stream.tokens, answer.seconds)
            accepted = answer.generation.acceptance
            drafts = "" if accepted is None else f", drafts {accepted:.0%}"
            self.status.show(f"{words}{drafts}, {answer.reused}/{answer.prompt} read before")
        return answer

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()

    def _tell(self, text: str) -> None:
        sys.stderr.write(text + "\n")


def context_of(session: Session) -> int:
    """Tokens that both models hold."""
    models = session.models.pair.models
    return min(m.config.get_text_config().max_position_embeddings for m in models)


def words_for(policy: str, rate: float | None, tokens: int, seconds: float) -> str:
    hits = "no experts yet" if rate is None else f"{rate:.1%} hits"
    return f"{policy}: {hits}, {tokens} tokens, {tokens / seconds:.1f} tokens/s"


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Ctrl-C in here once makes the yielded function say True; the second one is a KeyboardInterrupt."""
    asked = False

    def heard(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, heard)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


class StatusLine:
    """The last line of a terminal, apart from what scrolls above it (DECSTBM, a VT100's scrolling region)."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._rows = 0

    def __enter__(self) -> "StatusLine":
        self._divide()
        return self

    def __exit__(self, *_: object) -> None:
        self._terminal.write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
        self._terminal.flush()

    def show(self, text: str) -> None:
        columns, rows = shutil.get_terminal_size()
        if rows != self._rows:
            self._divide()
        self._terminal.write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{text[: columns - 1]}\x1b[0m\x1b8")
        self._terminal.flush()

    def _divide(self) -> None:
        self._rows = shutil.get_terminal_size().lines
        # A line feed and back, so that the cursor is not on the last line; setting the region moves it.
        self._terminal.write(f"\n\x1b[1A\x1b7\x1b[1;{self._rows - 1}r\x1b8")
        self._terminal.flush()


def lines_of(terminal: bool) -> Iterator[str]:
    """What the user writes, to the end of the input."""
    if not terminal:
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    import readline  # noqa: F401  (gives `input` its editing and history)

    while True:
        try:
            yield input("> ")
        except EOFError:
            return
