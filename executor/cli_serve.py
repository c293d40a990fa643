"""`spac-exec serve`: an OpenAI-compatible server."""

import ipaddress
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..traces.console import parse_size, say, show_json, starting, warn
from ..traces.errors import InputError
from .cli_options import (
    AllowLossy,
    AsJson,
    DraftLength,
    LogOptions,
    PairOptions,
    PolicyName,
    SizeOptions,
    spread,
)

if TYPE_CHECKING:
    from .opening import Opening
    from .serve import Worker
    from .web import Rules

CLOSE_SECONDS = 1.0  # that a step which is under way has to end in
LARGEST = 10_000  # number that a request may give a policy; some allocate so many arrays of all experts


@spread
def serve(
    policy: PolicyName = "ar-lru",
    host: Annotated[
        str, typer.Option(help="Address to listen at; others than this machine's own need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option(envvar="SPAC_API_KEY", help="Ask it of every request.", show_envvar=True)
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Listen on the network without a key: anybody there can use it.")
    ] = False,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; beyond them 429.")] = 8,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Of a request; beyond it 413.")] = "1MiB",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most that a request may ask for, and its default.")
    ] = 1024,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer. Default: the model's.")
    ] = None,
    alias: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
    policy_in_requests: Annotated[
        bool, typer.Option("--policy-in-requests", help='Let a request name a policy: {"policy": "ar-lru"}.')
    ] = False,
    draft_length: DraftLength = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Where a request gives none. 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the policy.")] = 0,
    allow_lossy: AllowLossy = False,
    json: AsJson = False,
    *,
    pair: PairOptions,
    size: SizeOptions,
    log: LogOptions,
) -> None:
    """Serve an OpenAI-compatible API: /v1/chat/completions, /v1/completions, /v1/models; /health and /metrics.

    One request is answered at a time, under the policy; the expert cache stays warm from one to the next.
    """
    try:
        with starting():
            from .web import Rules, listen
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "starlette", "pydantic"):
            raise
        raise InputError(f"serve: needs {error.name}; install it with pip install 'moe-spac[serve]'") from None
    from .opening import Opening

    check_address(host, api_key, open_to_all)
    opening = Opening(
        policy, pair, size, log, context, draft_length, max_new_tokens, temperature, seed, allow_lossy
    )  # fmt: skip
    opening.check()
    rules = Rules(
        model=alias,
        key=api_key,
        body_bytes=parse_size(max_body, "--max-body"),
        context=context or 0,
        new_tokens=max_new_tokens,
        check_policy=(lambda name: check_remote_policy(name, opening)) if policy_in_requests else None,
    )
    sock = listen(host, port)
    tell_address(sock, json)
    run_server(opening, rules, queue, sock)


def check_address(host: str, key: str | None, open_to_all: bool) -> None:
    """Refuse to be open to a network without a key, unless that is asked for in so many words."""
    if key is not None and not key.strip():
        raise InputError("--api-key: it is empty; give one, or leave it out")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if loopback or key:
        return
    if not open_to_all:
        raise InputError(
            f"--host {host}: others could use this server; give --api-key KEY, or confirm by --open-to-all"
        )
    warn(f"anybody who reaches {host} can use this server: it asks for no key")


def check_remote_policy(name: str, opening: "Opening") -> None:
    """A request may name a policy that is installed here, with parameters; no file, whose code would be run."""
    if "/" in name or "\\" in name or ".py" in name or name.endswith(".toml"):
        raise InputError("--policy: a request may name an installed policy, not a file")
    for parameter in name.partition(":")[2].split(","):
        with suppress(ValueError):  # no number: what the policy's own types say of it comes next
            if not abs(float(parameter.partition("=")[2])) <= LARGEST:  # nor is nan
                raise InputError(f"--policy: {parameter}: a request may give numbers up to {LARGEST} only")
    opening.checked_policy(name)


def tell_address(sock: socket.socket, json: bool) -> None:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    if json:
        show_json({"url": url, "base_url": f"{url}/v1"})
    else:
        say(f"listening at {url} (base URL {url}/v1); loading; Ctrl-C ends")
    sys.stdout.flush()


def run_server(opening: "Opening", rules: "Rules", places: int, sock: socket.socket) -> None:
    """Until a signal, or until loading fails, whose error is raised."""
    from .memory import share_pool
    from .serve import Worker
    from .web import serving

    share_pool()

    def failed() -> None:
        server.should_exit = True

    worker = Worker(opening.open, opening.policy, opening.checked_policy, places, failed)
    server = serving(worker, rules)
    signal.signal(signal.SIGTERM, _terminated)  # uvicorn raises its signals again when it has ended
    try:
        worker.start()
        server.run(sockets=[sock])
        if worker.error is not None:
            raise worker.error
    finally:
        sock.close()
        if not worker.close(CLOSE_SECONDS):
            _leave(worker)


def _terminated(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _leave(worker: "Worker") -> None:
    """A read or a copy in the middle of which the thread is cannot be ended; the process can."""
    warn(f"ended while {worker.progress[0] if worker.session is None else 'answering'}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)
