"""The HTTP side of `spac-exec serve`: an OpenAI-compatible API, health and metrics. Needs the extra `serve`.

The event loop never waits for a model: texts become tokens in one thread of their own, answers come from the worker.
"""

import asyncio
import hmac
import json
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..traces.errors import InputError
from .conversation import encode_conversation
from .heads import hurried
from .openai_api import (
    CHAT,
    TEXT,
    ApiError,
    ChatBody,
    CompletionBody,
    Limits,
    Reply,
    Shape,
    options_for,
    read_body,
)
from .serve import Event, Failed, Finished, Job, Said, Worker
from .session import Session
from .totals import CONTENT_TYPE, exposition

LAST_SECONDS = 1  # that connections have to end in after Ctrl-C


@dataclass(frozen=True, slots=True)
class Rules:
    """What the server allows. `key`: asked of every request but those for health. `check_policy` raises InputError.

    More than so many `connections` at a time, a head slower than `head_seconds`, and a body larger than `body_bytes` or
    slower than `body_seconds` are refused.
    `model`: the name that requests have to use if they give one; `context`, `new_tokens`: in tokens, 0 for the model's.
    """

    model: str | None = None
    key: str | None = None
    connections: int = 256
    head_seconds: float = 10.0
    body_bytes: int = 2**20
    body_seconds: float = 30.0
    context: int = 0
    new_tokens: int = 1024
    check_policy: Callable[[str], None] | None = None


class Api:
    """The handlers, over one worker."""

    def __init__(self, worker: Worker, rules: Rules) -> None:
        self.worker, self.rules = worker, rules
        self._tokenizing = ThreadPoolExecutor(1, "tokens")

    # What is asked about the server

    async def health(self) -> Response:
        worker = self.worker
        if worker.ready:
            return JSONResponse({"status": "ok"})
        what, done, total = worker.progress
        state = "failed" if worker.error else "loading" if worker.session is None else "ending"
        words = {"status": state, "doing": what, "done": done, "of": total, "progress": done / total if total else None}
        return JSONResponse(words, 503, {"Retry-After": "1"})

    async def metrics(self, request: Request) -> Response:
        self._check_key(request)
        worker = self.worker
        page = exposition(worker.totals, worker.waiting, worker.running is not None, worker.places, worker.session)
        return PlainTextResponse(page, media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        session = self._session()
        shape = session.models.pair.shape
        more = {
            "layers": shape.layers,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "context": self._limits().context,
        }
        one = {"id": self.model_name(), "object": "model", "created": 0, "owned_by": "moe-spac", "meta": more}
        return JSONResponse({"object": "list", "data": [one]})

    # Answers

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, ChatBody, CHAT)

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, CompletionBody, TEXT)

    async def _respond(self, request: Request, kind: Any, shape: Shape) -> Response:
        self._check_key(request)
        body = read_body(kind, await self._json(request))
        session = self._session()
        if body.model is not None and body.model != self.model_name():
            known = f"no model {body.model!r} here; there is {self.model_name()}"
            raise ApiError(404, known, "model", "model_not_found")
        policy = self._policy(body.policy)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        ids = await loop.run_in_executor(self._tokenizing, _tokens, session, body)
        options = options_for(body, len(ids), self._limits(), session.settings.options)

        def post(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it who asked
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(ids, options, post, body.stops, policy)
        if not self.worker.submit(job):
            self.worker.totals.outcomes["refused"] += 1
            seconds = str(self.worker.seconds_ahead())
            message = f"all {self.worker.places} places in the queue are taken; try again in about {seconds} s"
            raise ApiError(429, message, None, "rate_limit_exceeded", Retry_After=seconds)
        reply = Reply.new(shape, self.model_name())
        if body.stream:
            parts = self._stream(request, events, job, reply, len(ids) if body.with_usage else None)
            return StreamingResponse(parts, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(request, events, job, reply, session)

    async def _whole(
        self, request: Request, events: "asyncio.Queue[Event]", job: Job, reply: Reply, session: Session
    ) -> Response:
        text = ""
        async for event in self._events(request, events, job):
            if isinstance(event, Failed):
                raise _failure(event)
            text += event.text
            if isinstance(event, Finished):
                return JSONResponse(reply.whole(text, len(job.ids), event, session))
        return Response(status_code=499)  # nobody is there to read it

    async def _stream(
        self, request: Request, events: "asyncio.Queue[Event]", job: Job, reply: Reply, prompt: int | None
    ) -> AsyncIterator[str]:
        """Server-sent events; `prompt`: its tokens, where the usage is wanted at the end."""
        if first := reply.first():
            yield _sent(first)
        async for event in self._events(request, events, job):
            if isinstance(event, Failed):
                yield _sent(_failure(event).body())
                return
            if event.text:
                yield _sent(reply.piece(event.text))
            if isinstance(event, Finished):
                yield _sent(reply.last(event, self._session()))
                if prompt is not None:
                    yield _sent(reply.usage(prompt, event))
        yield "data: [DONE]\n\n"

    async def _events(self, request: Request, events: "asyncio.Queue[Event]", job: Job) -> AsyncIterator[Event]:
        """The job's events to the last one, or until the client is gone; then the job is given up."""
        gone = asyncio.ensure_future(_hung_up(request))
        coming: asyncio.Future[Event] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(events.get())
                await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    return
                event = coming.result()
                yield event
                if not isinstance(event, Said):
                    return
        finally:
            gone.cancel()
            if coming is not None:
                coming.cancel()
            self.worker.abandon(job)

    # Inside

    def model_name(self) -> str:
        name = self._session().models.pair.shape.name
        return self.rules.model or name.rstrip("/").rsplit("/", 1)[-1].replace(" ", "-")

    def _session(self) -> Session:
        """Raises ApiError (503) as long as there is none."""
        worker = self.worker
        if not worker.ready or worker.session is None:
            what = "ending" if worker.session is not None else f"loading ({worker.progress[0]})"
            raise ApiError(503, f"the server is {what}", None, "loading", Retry_After="1")
        return worker.session

    def _limits(self) -> Limits:
        pair = self._session().models.pair
        models = pair.models
        most = min(m.config.get_text_config().max_position_embeddings for m in models)
        return Limits(min(self.rules.context or most, most), self.rules.new_tokens)

    def _policy(self, name: str | None) -> str | None:
        if name is None:
            return None
        if self.rules.check_policy is None:
            raise ApiError(400, "policy: this server does not let requests choose one", "policy", "invalid_value")
        try:
            self.rules.check_policy(name)
        except InputError as error:
            raise ApiError(400, str(error).removeprefix("--"), "policy", "invalid_value") from None
        return name

    def _check_key(self, request: Request) -> None:
        key = self.rules.key
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            message = "wrong or missing API key; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, None, "invalid_api_key", WWW_Authenticate="Bearer")

    async def _json(self, request: Request) -> Any:
        """The body. A page in a browser cannot send this type to another server without being asked to show itself."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send the body as Content-Type: application/json")
        most, body = self.rules.body_bytes, b""
        if int(request.headers.get("content-length") or 0) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(self.rules.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise _too_large(most)
        except TimeoutError:
            message = f"the body did not come within {self.rules.body_seconds:g} s"
            raise ApiError(408, message, Connection="close") from None
        except ClientDisconnect:
            raise ApiError(400, "the body was not sent to its end") from None  # nobody is there to read it
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None


def _tokens(session: Session, body: Any) -> list[int]:
    tokenizer = session.models.pair.tokenizer
    if isinstance(body, ChatBody):
        try:
            return encode_conversation(tokenizer, body.conversation())
        except InputError as error:
            raise ApiError(400, str(error), "messages", "invalid_value") from None
    prompt = body.prompt
    if isinstance(prompt[0], str):
        return tokenizer.encode(prompt[0])
    vocab = session.models.pair.target.config.get_text_config().vocab_size
    if not all(0 <= token < vocab for token in prompt):
        raise ApiError(400, f"prompt: token ids are 0 to {vocab - 1}", "prompt", "invalid_value")
    return prompt


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than this server's {most} bytes", None, "too_large", Connection="close")


def _failure(event: Failed) -> ApiError:
    return ApiError(503 if event.unavailable else 500, event.message)


def _sent(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def make_app(worker: Worker, rules: Rules) -> FastAPI:
    app = FastAPI(openapi_url=None)
    api = Api(worker, rules)
    app.get("/health")(api.health)
    app.get("/metrics")(api.metrics)
    app.get("/v1/models")(api.models)
    app.post("/v1/chat/completions")(api.chat)
    app.post("/v1/completions")(api.completions)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(found.body(), found.status, error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, f"{type(error).__name__}: {error}").body(), 500)

    return app


class Serving(uvicorn.Server):
    """uvicorn, which tells the worker of a signal at once."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._worker.stop()
        super().handle_exit(sig, frame)


def serving(worker: Worker, rules: Rules) -> Serving:
    """The server; `run(sockets=[...])` it. A signal that ends it is raised again when it has ended."""
    config = uvicorn.Config(
        make_app(worker, rules),
        http=hurried(rules.head_seconds, rules.connections),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=LAST_SECONDS,
    )
    return Serving(config, worker)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises InputError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise InputError(f"--host {host} --port {port}: cannot listen there ({error}); choose another") from None
