"""The bodies of an OpenAI-compatible API: what is read from a request, and what an answer looks like.

Shapes: https://platform.openai.com/docs/api-reference (chat completions, legacy completions, models, errors). `timings`
has the names and units of llama.cpp's server (tools/server/README.md there). What is not supported is refused by name.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..traces.speculate import Options
from .result import status_of
from .serve import Finished
from .session import Session
from .totals import hit_rate, stalls

COOLEST = 1e-3  # a temperature between this and 0 gives numbers beyond what can be sampled from

# Parameters that this server does not have, with the values that ask for nothing. None does so everywhere.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none",),
    "functions": ([],), "function_call": ("none",), "parallel_tool_calls": (False, True), "store": (False,),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "service_tier": ("auto", "default"),
}  # fmt: skip


class ApiError(Exception):
    """A refusal, in OpenAI's shape."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_parts)]
    name: str | None = None


class StreamOptions(_Strict):
    include_usage: bool = False


class _Body(_Strict):
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[Text], Field(max_length=4), BeforeValidator(_listed)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    policy: str | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(_Body):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> list[dict[str, str]]:
        return [{"role": m.role, "content": "".join(part.text for part in m.content)} for m in self.messages]


class CompletionBody(_Body):
    prompt: Annotated[
        Annotated[list[Text], Field(min_length=1, max_length=1)] | Annotated[list[int], Field(min_length=1)],
        BeforeValidator(_listed),
    ]


def read_body(kind: type[ChatBody] | type[CompletionBody], given: Any) -> Any:
    """A body of `kind` from what JSON gave. Raises ApiError (400), naming the parameter."""
    if not isinstance(given, dict):
        raise ApiError(400, "the body is no JSON object; send one")
    given = dict(given)
    for name, values in NEUTRAL.items():
        value = given.pop(name, None)
        if value is not None and value not in values:
            only = " or ".join(map(repr, values)) if values else "leaving it out"
            raise ApiError(400, f"{name}: not supported here; only {only} is", name, "unsupported_parameter")
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _refusal(first["type"], [str(part) for part in first["loc"]], first["msg"], kind) from None
    if body.temperature is not None and 0 < body.temperature < COOLEST:
        raise ApiError(400, f"temperature: 0 (greedy), or at least {COOLEST:g}", "temperature", "invalid_value")
    return body


def _refusal(kind: str, where: list[str], message: str, body: type[BaseModel]) -> ApiError:
    name = where[0] if where else None
    if kind == "extra_forbidden":
        known = ", ".join(body.model_fields)
        where_words = ".".join(where)
        return ApiError(400, f"{where_words}: unknown; there are {known}", name, "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{'.'.join(where)}: missing; it is required", name, "missing_required_parameter")
    if name == "prompt":
        return ApiError(400, "prompt: one text, a list of one text, or a list of token ids", name, "invalid_value")
    return ApiError(400, f"{'.'.join(where)}: {message[:1].lower()}{message[1:]}", name, "invalid_value")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for: tokens of prompt and answer together, and of an answer (its default too)."""

    context: int
    new_tokens: int


def options_for(body: _Body, prompt: int, limits: Limits, defaults: Options) -> Options:
    """How to answer a prompt of so many tokens. Raises ApiError (400) for what is beyond the limits."""
    left = limits.context - prompt
    text = "messages" if isinstance(body, ChatBody) else "prompt"
    if prompt < 1:
        raise ApiError(400, "the prompt has no tokens; give at least one", text, "invalid_value")
    if left < 1:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens and the context holds {limits.context}, one of them new; shorten it",
            text,
            "context_length_exceeded",
        )
    name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
    wanted = body.limit
    if wanted is not None and wanted > limits.new_tokens:
        raise ApiError(400, f"{name}: {wanted} is more than this server's {limits.new_tokens}", name, "invalid_value")
    if wanted is not None and wanted > left:
        raise ApiError(
            400,
            f"{name}: {wanted} and {prompt} tokens of prompt are more than the context of {limits.context} tokens",
            name,
            "context_length_exceeded",
        )
    return Options(
        max_new_tokens=min(limits.new_tokens, left) if wanted is None else wanted,
        draft_length=defaults.draft_length,
        adaptive=defaults.adaptive,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=uuid.uuid4().int >> 66 if body.seed is None else body.seed,
        draft_invariant=body.seed is not None,  # who gives a seed wants the same text again, whatever is drafted
        stop_tokens=defaults.stop_tokens,
        prefill_chunk=defaults.prefill_chunk,
    )


def usage(prompt: int, finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": finished.tokens,
        "total_tokens": prompt + finished.tokens,
        "prompt_tokens_details": {"cached_tokens": finished.answer.reused},
    }


def timings(finished: Finished) -> dict[str, Any]:
    """As llama-server names them. The time of the target's last prompt token is the first generated one's here."""
    answer = finished.answer
    read, prompt_ms = answer.prompt - answer.reused, answer.prompt_s * 1e3
    predicted_ms = (answer.seconds - answer.prompt_s) * 1e3
    draft = {"draft_n": answer.generation.drafted, "draft_n_accepted": answer.generation.accepted}
    return {
        "cache_n": answer.reused,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read,
        "prompt_per_second": read / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": finished.tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(1, finished.tokens),
        "predicted_per_second": finished.tokens / predicted_ms * 1e3 if predicted_ms else 0.0,
        **(draft if answer.generation.drafted else {}),
    }


def experts(finished: Finished, session: Session) -> dict[str, Any]:
    """What no other server has: where the experts were. Counts are of everything after the prompt."""
    answer = finished.answer
    drafts = session.models.pair.draft is not None and session.settings.options.draft_length > 0
    return {
        "status": status_of(session.settings.slots, answer.prefill + answer.decode, drafts, [answer.generation]),
        "policy": answer.policy,
        "hit_rate": hit_rate(answer),
        "experts_on_cpu": answer.decode.cpu,
        "copied_bytes": answer.decode.copies * session.models.pair.shape.expert_bytes,
        "stall_ms": {cause: seconds * 1e3 for cause, seconds in stalls(answer).items()},
        "queued_ms": finished.waited_s * 1e3,
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """The one of the two APIs that a request came by."""

    prefix: str
    whole: str
    part: str
    choice: Callable[[str], dict[str, Any]]
    delta: Callable[[str], dict[str, Any]]
    first: Mapping[str, Any] | None = None  # a delta before all others


CHAT = Shape(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text}},
    lambda text: {"delta": {"content": text} if text else {}},
    {"delta": {"role": "assistant", "content": ""}},
)
TEXT = Shape("cmpl-", "text_completion", "text_completion", lambda text: {"text": text}, lambda text: {"text": text})


@dataclass(frozen=True, slots=True)
class Reply:
    """Makes the objects of one answer, which share an id."""

    shape: Shape
    model: str
    id: str
    created: int

    @classmethod
    def new(cls, shape: Shape, model: str) -> "Reply":
        return cls(shape, model, shape.prefix + uuid.uuid4().hex, int(time.time()))

    def whole(self, text: str, prompt: int, finished: Finished, session: Session) -> dict[str, Any]:
        choice = {"index": 0, **self.shape.choice(text), "logprobs": None, "finish_reason": finished.reason}
        return self._object(self.shape.whole, [choice]) | {"usage": usage(prompt, finished)} | _more(finished, session)

    def first(self) -> dict[str, Any] | None:
        first = self.shape.first
        return None if first is None else self._object(self.shape.part, [self._choice(dict(first), None)])

    def piece(self, text: str) -> dict[str, Any]:
        return self._object(self.shape.part, [self._choice(self.shape.delta(text), None)])

    def last(self, finished: Finished, session: Session) -> dict[str, Any]:
        choice = self._choice(self.shape.delta(""), finished.reason)
        return self._object(self.shape.part, [choice]) | _more(finished, session)

    def usage(self, prompt: int, finished: Finished) -> dict[str, Any]:
        return self._object(self.shape.part, []) | {"usage": usage(prompt, finished)}

    def _choice(self, what: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **what, "logprobs": None, "finish_reason": reason}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _more(finished: Finished, session: Session) -> dict[str, Any]:
    return {"timings": timings(finished), "experts": experts(finished, session)}
