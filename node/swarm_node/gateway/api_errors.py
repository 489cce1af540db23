"""How failures look to an OpenAI client: `{"error": {"message", "type", "param", "code"}}` with the right status.

The one place where Swarm's errors, pydantic's and Starlette's are translated. Nothing of an unexpected exception
reaches the client; it is logged here.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from swarm_protocol.errors import ConfigError, PeerError, PeerRefused, SessionError, SwarmError

from swarm_node.formatting import clean
from swarm_node.gateway import http_limits

log = logging.getLogger(__name__)

REFUSAL = "swarm_refusal"
"""Where a request's scope holds the code of its refusal, for the counters."""

CODES = {404: "not_found", 405: "method_not_allowed", 406: "not_acceptable", 415: "unsupported_media_type"}
MAX_PATH_CHARS = 100
"""Of a path that is repeated to whoever asked for it."""
PARSING = "There was an error parsing the body"
"""FastAPI's words for a body that is no JSON for another reason than its grammar: no UTF-8, too deep, a huge number."""


class ApiError(Exception):
    """A failure that the client is told, with its HTTP status. `retry_after_s` 0 means: no such header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        message = self.message.encode(errors="replace").decode()  # it may repeat what a client sent
        return {"error": {"message": message, "type": _kind(self.status), "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s > 0 else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, status_code=self.status, headers=headers)

    def note(self, scope: Scope) -> None:
        """Let the counters know why."""
        scope[REFUSAL] = self.code or str(self.status)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        self.note(scope)
        await self.response()(scope, receive, send)


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def from_exception(error: BaseException) -> ApiError:
    """What to tell the client about `error`, whatever it is; of several that tasks failed with, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SwarmError):
        return _from_swarm(error)
    if isinstance(error, TimeoutError):
        return ApiError(503, "the request ran out of time", code="timeout", retry_after_s=http_limits.RETRY_AFTER_S)
    log.error("unexpected error while answering a request", exc_info=error)
    return ApiError(500, "the gateway failed to answer; its log says why", code="internal_error")


def _from_swarm(error: SwarmError) -> ApiError:
    match error:
        case PeerRefused() if error.retry_after_s > 0:
            return ApiError(429, str(error), code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
        case PeerError() | SessionError():
            return ApiError(503, str(error), code="service_unavailable", retry_after_s=http_limits.RETRY_AFTER_S)
        case ConfigError():
            return ApiError(400, str(error), code="invalid_request")
        case _:
            return ApiError(500, str(error), code=error.code)


def _path(loc: Sequence[str | int]) -> list[str]:
    """Without the kinds' own names, as `list[TextPart]`, which are no part of what was sent."""
    return [part for part in map(str, loc) if part != "body" and re.fullmatch(r"[a-z0-9_]+", part)]


def _from_validation(error: RequestValidationError) -> ApiError:
    # of a field that may be of two kinds both are reported: the one that was meant got further
    first = max(error.errors(), key=lambda found: len(found["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the request body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    path = ".".join(_path(first["loc"]))
    match first["type"]:
        case "unsupported":
            name = first["ctx"]["name"]
            return ApiError(400, first["msg"], code="unsupported_parameter", param=f"{path}.{name}" if path else name)
        case "unfit":
            return ApiError(400, first["msg"], code="invalid_value", param=first["ctx"]["name"])
        case "extra_forbidden":
            name = clean(".".join([*_path(first["loc"][:-1]), str(first["loc"][-1])]), MAX_PATH_CHARS)
            return ApiError(400, f"unknown parameter '{name}': leave it out", code="unknown_parameter", param=name)
    return ApiError(400, f"{path or 'body'}: {first['msg']}", code="invalid_value", param=path or None)


def _from_http(error: HTTPException, request: Request) -> ApiError:
    if error.detail == PARSING:
        return ApiError(400, "the request body is not JSON in UTF-8 of a reasonable depth", code="invalid_json")
    code, said = CODES.get(error.status_code), str(error.detail)
    if code in {"not_found", "method_not_allowed"}:
        said = (
            f"there is no {request.method} {request.url.path[:MAX_PATH_CHARS]} here: /openapi.json lists what there is"
        )
    return ApiError(error.status_code, said, code=code)


def install(app: FastAPI) -> None:
    """Let every failure of `app`'s routes leave in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        match error:
            case RequestValidationError():
                told = _from_validation(error)
            case HTTPException():
                told = _from_http(error, request)
            case _:
                told = from_exception(error)
        told.note(request.scope)
        response = told.response()
        if isinstance(error, HTTPException):  # which methods there are
            response.headers.update(error.headers or {})
        return response

    for kind in (RequestValidationError, HTTPException, ApiError, SwarmError, TimeoutError, Exception):
        app.add_exception_handler(kind, answer)
