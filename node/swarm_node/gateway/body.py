"""Reads a request's body before anything else sees it: no more bytes and no more seconds than the limits allow.

Plain ASGI, so that a refused body is never buffered beyond the bound.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_node.gateway import http_limits
from swarm_node.gateway.api_errors import ApiError


class BoundedBody:
    """Middleware: 413 for a body over `http_limits.MAX_HTTP_BODY_BYTES`, 408 for one that does not arrive in time.

    415 for one that is not said to be JSON: so no page in a browser can send one without asking first.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(scope, receive)
        except ApiError as error:
            await error.answer(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)


async def _read(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body; None if the client left before it was sent."""
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > http_limits.MAX_HTTP_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(http_limits.HTTP_BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > http_limits.MAX_HTTP_BODY_BYTES:
                    raise _too_large()
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ApiError(
            408,
            f"the request's body did not arrive within {http_limits.HTTP_BODY_TIMEOUT_S:g} s",
            code="request_timeout",
        ) from None
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if body and kind != b"application/json":
        raise ApiError(415, "send JSON, with content-type: application/json", code="unsupported_media_type")
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the request's body is over {http_limits.MAX_HTTP_BODY_BYTES} bytes: send less",
        code="request_too_large",
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hand `body` out once; after that only a disconnect can follow."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
