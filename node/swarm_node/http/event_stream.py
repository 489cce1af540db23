"""Server-sent events, for OpenAI's token streams and the dashboard's live events."""

from __future__ import annotations

from starlette.types import Receive, Send

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream"
HEADERS = {
    "content-type": f"{EVENT_STREAM}; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx keeps events until the last one, or until its buffer is full
}


class EventStream:
    """One response of server-sent events. The headers are sent with the first event. `server` cuts off a reader that
    stalls."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = {**HEADERS, **headers}
        self.started = False

    async def send(self, events: bytes) -> None:
        """Send one or more encoded events in one write."""
        if not self.started:
            self.started = True
            headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


def event(data: str, kind: str = "") -> bytes:
    """Encode an event. `data` is JSON without line breaks."""
    return f"event: {kind}\ndata: {data}\n\n".encode(errors="replace") if kind else f"data: {data}\n\n".encode()


async def wait_disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
