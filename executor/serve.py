"""One worker thread that loads a pair and answers requests one at a time, and the bounded queue before it.

Nothing here knows of HTTP. A job's `post` is called from the worker's thread with pieces of text and then once with
`Finished` or `Failed`.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from ..policies.interface import Policy
from ..traces.errors import InputError
from ..traces.speculate import Options
from .memory import trim
from .result import Answer
from .session import Session
from .text_stream import TextStream
from .totals import Totals

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much


class ClosingError(Exception):
    """The worker is told to end; raised into a load that reports its progress."""


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: the text that was still held back, the tokens it took and why it ended.

    `reason` is "stop" or "length"; `waited_s` is the time in the queue.
    """

    text: str
    tokens: int
    reason: str
    answer: Answer
    waited_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """No answer. `unavailable`: the server ends; else the policy or the model failed."""

    message: str
    unavailable: bool = False


Event = Said | Finished | Failed


@dataclass(slots=True, eq=False)
class Job:
    """One request: the whole text `ids`, and a policy's name where it asks for another than the server's."""

    ids: Sequence[int]
    options: Options
    post: Callable[[Event], None]
    stop: tuple[str, ...] = ()
    policy: str | None = None
    abandoned: threading.Event = field(default_factory=threading.Event)
    since: float = field(default_factory=monotonic)


class Worker:
    """Loads by `open_session`, then answers. `failed` is called from its thread if loading fails; `error` says why.

    `policy` is what jobs run under that name no other, as a user would name it; `policy_for` makes a policy of a name.
    `places`: jobs that may wait while one runs.
    """

    def __init__(
        self,
        open_session: Callable[[Progress], Session],
        policy: str,
        policy_for: Callable[[str], Policy],
        places: int,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.places = places
        self.totals = Totals()
        self.progress: tuple[str, int, int] = ("starting", 0, 0)
        self.session: Session | None = None  # once it is loaded
        self.error: BaseException | None = None
        self.running: Job | None = None
        self._open, self._policy_for, self._failed = open_session, policy_for, failed
        self._default = self._policy = policy
        self._waiting: deque[Job] = deque()
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spac-serve", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self.session is not None and not self._closing.is_set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, job: Job) -> bool:
        """Take a job; False if there is no place for it."""
        with self._wake:
            if self._closing.is_set() or len(self._waiting) >= self.places + (self.running is None):
                return False
            self._waiting.append(job)
            self._wake.notify()
            return True

    def abandon(self, job: Job) -> None:
        """Nobody waits for this job any more: give up its place, or end it before its next forward pass."""
        with self._wake:
            job.abandoned.set()
            if job in self._waiting:
                self._waiting.remove(job)
                self.totals.outcomes["abandoned"] += 1

    def stop(self) -> None:
        """Begin to end: no more jobs, and the running one ends before its next forward pass."""
        self._closing.set()
        # Called from a signal handler too, which may have interrupted a holder of the lock: the worker looks by itself.

    def close(self, seconds: float) -> bool:
        """End the thread; False if it is still busy after `seconds`."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def seconds_ahead(self) -> int:
        """About how long a new job would wait (s, at least 1), from the mean of those answered."""
        return max(1, round(self.totals.mean_seconds() * (len(self._waiting) + 1)))

    def _work(self) -> None:
        try:
            session = self._open(self._tell)
        except BaseException as error:
            self.error = error
            self._failed()
            return
        with session:
            self.session = session
            while (job := self._next()) is not None:
                self._answer(session, job)
                self.running = None
                trim()
            with self._wake:
                for job in self._waiting:
                    job.post(Failed("the server is ending", unavailable=True))

    def _tell(self, what: str, done: int, total: int) -> None:
        self.progress = (what, done, total)
        if self._closing.is_set():
            raise ClosingError

    def _next(self) -> Job | None:
        """The next job, or None at the end."""
        with self._wake:
            while not self._closing.is_set():
                if self._waiting:
                    self.running = self._waiting.popleft()
                    return self.running
                self._wake.wait(0.2)
        return None

    def _answer(self, session: Session, job: Job) -> None:
        try:
            self._switch(session, job.policy or self._default)
            self._generate(session, job)
        except InputError as error:
            self._fail(job, str(error))
        except Exception as error:  # one bad request does not end the server
            self._fail(job, f"{type(error).__name__}: {error}")

    def _fail(self, job: Job, message: str) -> None:
        self.totals.outcomes["failed"] += 1
        job.post(Failed(message))

    def _switch(self, session: Session, wanted: str) -> None:
        """The cache stays warm as long as the policy's name and parameters stay the same."""
        if wanted != self._policy:
            session.use(self._policy_for(wanted))
            self._policy = wanted

    def _generate(self, session: Session, job: Job) -> None:
        begin = monotonic()
        stream = TextStream(session.models.pair.tokenizer, job.stop, job.options.stop_tokens)

        def heard(tokens: Sequence[int]) -> None:
            if text := stream.push(tokens):
                job.post(Said(text))

        def over() -> bool:
            return stream.stopped or job.abandoned.is_set() or self._closing.is_set()

        answer = session.generate(job.ids, job.options, heard, over)
        self.totals.add(answer, stream.tokens, session)
        if answer.generation.interrupted and not stream.stopped:
            self.totals.outcomes["abandoned"] += 1
            job.post(Failed("the server is ending", unavailable=True))
            return
        rest = stream.finish()
        self.totals.outcomes["answered"] += 1
        reason = "stop" if stream.stopped or stream.ended else "length"
        job.post(Finished(rest, stream.tokens, reason, answer, begin - job.since))
