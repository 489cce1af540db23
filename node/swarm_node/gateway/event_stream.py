"""Server-sent events, as OpenAI streams them."""

from __future__ import annotations

import json

from starlette.types import Send

from swarm_node.gateway.responses import Json

DONE = b"data: [DONE]\n\n"


class EventStream:
    """The headers go out with the first event. A reader that stalls is cut off by `connections`."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        self.started = False

    async def send(self, *objects: Json) -> None:
        """One event each, in one write."""
        if not self.started:
            self.started = True
            headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        data = "".join(
            f"data: {json.dumps(item, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"
            for item in objects
        )
        await self._write(data.encode(errors="replace"), more=True)

    async def end(self, last: bytes = b"") -> None:
        await self._write(last, more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
