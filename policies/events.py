"""The event log of a policy: everything it is told and asked, in order, with its answers, one JSON object a line.

The first line names the policy. A line of a told event has "tell" and its arguments, one of a question has "ask", its
arguments, "saw" (what the policy was shown of the cache before it answered, in order) and "answer". So a fresh object
of the policy can be taken through the log without a host, and must give the same answers. A log that had reached its
limit ends with a line that has "full".
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np

from ..traces.console import warn
from ..traces.errors import InputError
from ..traces.schema import Kind
from .interface import (
    Answer,
    Candidates,
    Costs,
    Demand,
    Forecast,
    Key,
    LayerReport,
    Policy,
    Setup,
    StepInfo,
    View,
    Where,
)

Line = dict[str, Any]
TOLD = ("step_begins", "forecast", "transfer_done", "transfer_dropped", "slots_changed", "work_done", "layer_ends")
QUESTIONS = ("next_fetch", "victim", "surrender", "keep_fetch", "draft_length")


class EventLog:
    """A file that takes the lines, up to `most` bytes: the first ones, for a replay has to begin at the beginning.

    Raises InputError if it cannot be written.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.path, self._left, self._full = path, most, False
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--events {path}: cannot be written ({error.strerror})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __call__(self, line: Line) -> None:
        if self._full:
            return
        text = in_words(line) + "\n"
        if self._left is not None:
            self._left -= len(text)  # all of it is ASCII
            if self._left < 0:
                self._full, text = True, '{"full":true}\n'
                warn(f"--events {self.path}: it has reached its limit; what follows is not logged")
        self._file.write(text)


def in_words(value: Any) -> str:
    """One text for one value, so that equal answers are equal bytes."""
    return json.dumps(value, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "rows": value.tolist()}
    raise TypeError(f"{type(value).__name__} has no place in an event log")


def _array(value: Any) -> Any:
    """Inverse of `_plain` for arrays."""
    return None if value is None else np.array(value["rows"], dtype=value["dtype"])


class Recording(Policy):
    """A policy that answers as `inner` does and writes down everything that it is told and asked.

    Hosts spare the calls that would do nothing with `inner`, as they do without the recording. Raises InputError for a
    clairvoyant policy: the future is no event.
    """

    def __init__(self, inner: Policy, write: Callable[[Line], None]) -> None:
        if inner.clairvoyant:
            raise InputError(f"policy {inner.name}: it is told the future, which an event log does not hold")
        self.inner, self._write = inner, write
        self._shown: dict[int, set[Key]] = {}
        self._take_on()

    def _take_on(self) -> None:
        """Be to the host what `inner` is; it may change in `setup`."""
        inner = self.inner
        for name in ("name", "channels", "lossless", "serial_tiers", "write_back", "scope"):
            setattr(self, name, getattr(inner, name))
        default = [n for n in (*TOLD, *QUESTIONS) if getattr(type(inner), n) is getattr(Policy, n)]
        self.deaf = inner.deaf | frozenset(default)

    # Told

    def setup(self, setup: Setup) -> None:
        self._write(_about(self.inner))
        self._write({"tell": "setup", "args": [asdict(setup)]})
        self._shown = {}
        self.inner.setup(setup)
        self._take_on()

    def step_begins(self, step: StepInfo) -> None:
        self._tell("step_begins", [step.index, step.kind, step.tokens, step.drafted])
        self.inner.step_begins(step)

    def forecast(self, forecast: Forecast) -> None:
        counts = list(forecast.counts.items())
        self._tell("forecast", [forecast.source, forecast.layer, counts, forecast.confidence])
        self.inner.forecast(forecast)

    def transfer_done(self, key: Key, size: int, ns: int) -> None:
        self._tell("transfer_done", [key, size, ns])
        self.inner.transfer_done(key, size, ns)

    def transfer_dropped(self, key: Key) -> None:
        self._tell("transfer_dropped", [key])
        self.inner.transfer_dropped(key)

    def slots_changed(self, slots: tuple[int, ...]) -> None:
        self._tell("slots_changed", [slots])
        self.inner.slots_changed(slots)

    def work_done(self, key: Key, where: Where, tokens: int, ns: int) -> None:
        self._tell("work_done", [key, where, tokens, ns])
        self.inner.work_done(key, where, tokens, ns)

    def layer_ends(self, report: LayerReport) -> None:
        self._tell("layer_ends", [report])
        self.inner.layer_ends(report)

    def step_ends(self, accepted: int, kept: np.ndarray) -> None:
        self._tell("step_ends", [accepted, kept])
        self.inner.step_ends(accepted, kept)

    # Asked

    def placement(self) -> Iterable[Key]:
        answer = list(self.inner.placement())
        self._write({"ask": "placement", "args": [], "saw": [], "answer": answer})
        return answer

    def dispatch(self, demand: Demand, view: View) -> Answer:
        seen = _Seen(view)
        answer = self.inner.dispatch(demand, seen)
        held = sorted(demand.held)
        args = [demand.layer, demand.experts, demand.loads, demand.ids, demand.weights, demand.scores, held]
        self._answered("dispatch", args, seen, answer)
        return answer

    def next_fetch(self, view: View) -> Key | None:
        seen = _Seen(view)
        answer = self.inner.next_fetch(seen)
        self._answered("next_fetch", [], seen, answer)
        return answer

    def victim(self, incoming: Key, candidates: Candidates, view: View) -> Key | None:
        seen = _Seen(view)
        shown = self._candidates(incoming.layer, candidates, seen)
        answer = self.inner.victim(incoming, shown, seen)
        self._answered("victim", [incoming], seen, answer)
        return answer

    def surrender(self, layer: int, candidates: Candidates, view: View) -> Key | None:
        seen = _Seen(view)
        answer = self.inner.surrender(layer, self._candidates(layer, candidates, seen), seen)
        self._answered("surrender", [layer], seen, answer)
        return answer

    def keep_fetch(self, key: Key, view: View) -> bool:
        seen = _Seen(view)
        answer = self.inner.keep_fetch(key, seen)
        self._answered("keep_fetch", [key], seen, answer)
        return answer

    def draft_length(self, longest: int) -> int:
        answer = self.inner.draft_length(longest)
        self._write({"ask": "draft_length", "args": [longest], "saw": [], "answer": answer})
        return answer

    # Inside

    def _tell(self, name: str, args: list[Any]) -> None:
        self._write({"tell": name, "args": args})

    def _answered(self, name: str, args: list[Any], seen: "_Seen", answer: Any) -> None:
        self._write({"ask": name, "args": args, "saw": seen.answers, "answer": answer})

    def _candidates(self, layer: int, candidates: Candidates, seen: "_Seen") -> "_Shown":
        pool = layer if self.scope == "layer" else 0
        return _Shown(candidates, self._shown.setdefault(pool, set()), seen)


def _about(policy: Policy) -> Line:
    """Name and parameters, as far as they are words and numbers."""
    given = {f.name: getattr(policy, f.name) for f in fields(policy) if f.init} if is_dataclass(policy) else {}
    plain = {k: v for k, v in given.items() if v is None or isinstance(v, int | float | str)}
    return {"policy": policy.name, "parameters": plain}


class _Seen:
    """A view that keeps what it said."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.answers: list[Any] = []

    def _keep(self, answer: Any) -> Any:
        self.answers.append(answer)
        return answer

    def resident(self, key: Key) -> bool:
        return self._keep(self._view.resident(key))

    def in_flight(self, key: Key) -> bool:
        return self._keep(self._view.in_flight(key))

    def residents(self, layer: int) -> list[int]:
        return self._keep(list(self._view.residents(layer)))

    def free(self, layer: int) -> int:
        return self._keep(self._view.free(layer))


class _Shown:
    """Candidates that are kept, once the policy looks, as what has changed since it last looked at this pool."""

    def __init__(self, candidates: Iterable[Key], known: set[Key], seen: _Seen) -> None:
        self._candidates, self._known, self._seen = candidates, known, seen
        self._keys: list[Key] | None = None

    def _look(self) -> list[Key]:
        if self._keys is None:
            self._keys = list(self._candidates)
            now = set(self._keys)
            self._seen.answers.append([sorted(now - self._known), sorted(self._known - now)])
            self._known ^= now ^ self._known
        return self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._look())

    def __contains__(self, key: object) -> bool:
        return key in self._look()

    def __len__(self) -> int:
        return len(self._look())


# Replay


class DecisionError(Exception):
    """A policy does otherwise than the log says."""


class _Said:
    """A view that repeats what the log says the policy was shown."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = iter(answers)

    def next(self) -> Any:
        try:
            return next(self._answers)
        except StopIteration:
            raise DecisionError("it looks at more of the cache than it did") from None

    def resident(self, key: Key) -> bool:
        return self.next()

    def in_flight(self, key: Key) -> bool:
        return self.next()

    def residents(self, layer: int) -> list[int]:
        return self.next()

    def free(self, layer: int) -> int:
        return self.next()


class _Recalled:
    """Candidates as the log says they were."""

    def __init__(self, known: set[Key], said: _Said) -> None:
        self._known, self._said = known, said
        self._keys: list[Key] | None = None

    def _look(self) -> list[Key]:
        if self._keys is None:
            added, gone = self._said.next()
            self._known |= {Key(*key) for key in added}
            self._known -= {Key(*key) for key in gone}
            self._keys = sorted(self._known)
        return self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._look())

    def __contains__(self, key: object) -> bool:
        return key in self._look()

    def __len__(self) -> int:
        return len(self._look())


def replay_events(policy: Policy, log: Path) -> int:
    """Take a fresh object of a policy through an event log; the number of questions, all answered byte for byte alike.

    Raises InputError, naming the line, at the first answer that differs, for a log of another policy, and for what is
    no event log.
    """
    known: dict[int, set[Key]] = {}
    asked = 0
    try:
        with log.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    asked += _play(policy, json.loads(text), known)
                except DecisionError as error:
                    raise InputError(f"{log}: line {number}: policy {policy.name} decides otherwise: {error}") from None
                except (ValueError, LookupError, TypeError) as error:
                    raise InputError(f"{log}: line {number} is no event ({error})") from None
    except OSError as error:
        raise InputError(f"{log}: cannot be read ({error.strerror})") from None
    return asked


def _play(policy: Policy, line: Line, known: dict[int, set[Key]]) -> bool:
    """One line; True if it was a question."""
    if "policy" in line:
        if in_words(line) != in_words(_about(policy)):
            raise DecisionError(f"the log is of {in_words(line)}, this is {in_words(_about(policy))}")
        known.clear()
    elif "full" in line:
        return False
    elif "tell" in line:
        args = _READ[line["tell"]](*line["args"])
        getattr(policy, line["tell"])(*args)
    else:
        name, said = line["ask"], _Said(line["saw"])
        answer = _ask(policy, name, line["args"], said, known)
        ours, logged = in_words(answer), in_words(line["answer"])
        if ours != logged:
            raise DecisionError(f"{name} gives {ours}, the log has {logged}")
        return True
    return False


def _ask(policy: Policy, name: str, args: list[Any], said: _Said, known: dict[int, set[Key]]) -> Any:
    match name:
        case "placement":
            return list(policy.placement())
        case "draft_length":
            return policy.draft_length(*args)
        case "dispatch":
            return policy.dispatch(_demand(*args), said)
        case "next_fetch":
            return policy.next_fetch(said)
        case "keep_fetch":
            return policy.keep_fetch(Key(*args[0]), said)
    layer = args[0] if name == "surrender" else args[0][0]
    candidates = _Recalled(known.setdefault(layer if policy.scope == "layer" else 0, set()), said)
    if name == "victim":
        return policy.victim(Key(*args[0]), candidates, said)
    if name == "surrender":
        return policy.surrender(layer, candidates, said)
    raise KeyError(name)


def _demand(layer: int, experts: list[int], loads: list[int], ids: Any, weights: Any, scores: Any, held: list[int]):
    arrays = _array(ids), _array(weights), _array(scores)
    return Demand(layer, tuple(experts), tuple(loads), *arrays, held=frozenset(held))


def _setup(given: Line) -> list[Setup]:
    return [Setup(**{**given, "slots": tuple(given["slots"]), "costs": Costs(**given["costs"])})]


_READ: dict[str, Callable[..., list[Any]]] = {
    "setup": _setup,
    "step_begins": lambda i, kind, tokens, drafted: [StepInfo(i, Kind(kind), _array(tokens), _array(drafted))],
    "forecast": lambda source, layer, counts, sure: [Forecast(source, layer, dict(counts), sure)],
    "transfer_done": lambda key, size, ns: [Key(*key), size, ns],
    "transfer_dropped": lambda key: [Key(*key)],
    "slots_changed": lambda slots: [tuple(slots)],
    "work_done": lambda key, where, tokens, ns: [Key(*key), Where(where), tokens, ns],
    "layer_ends": lambda report: [LayerReport(*report)],
    "step_ends": lambda accepted, kept: [accepted, _array(kept)],
}
