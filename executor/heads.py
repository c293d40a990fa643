"""HTTP/1.1 connections that are not kept open for requests that do not come, and not more of them than some.

uvicorn closes a connection that is idle after an answer, and takes that back at the first byte: half of a request's
head, or of a body that was refused before it came, would hold a connection for ever.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .openai_api import ApiError


def hurried(seconds: float, most: int) -> type[H11Protocol]:
    """uvicorn's protocol; a connection on which no answer is owed is closed `seconds` after it was opened or answered,
    and at once if there are `most` others.

    Status 408 where part of a head has come, 503 where there are too many.
    """

    class Hurried(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:  # each takes a file descriptor
                transport.write(_answer(503, "Service Unavailable", f"there are {most} connections already"))
                transport.close()
            self._look()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

        def _look(self) -> None:
            """Bytes that come do not start the time anew."""
            if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
                self._stop()
            elif self._timer is None and not self.transport.is_closing():
                self._timer = self.loop.call_later(seconds, self._give_up)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
                late = f"the request's head did not come within {seconds:g} s"
                self.transport.write(_answer(408, "Request Timeout", late))
            self.transport.close()

    return Hurried


def _answer(status: int, reason: str, message: str) -> bytes:
    body = json.dumps(ApiError(status, message).body()).encode()
    head = (
        f"HTTP/1.1 {status} {reason}", "Content-Type: application/json", f"Content-Length: {len(body)}",
        "Connection: close", "", "",
    )  # fmt: skip
    return "\r\n".join(head).encode() + body
