"""How failures look to an OpenAI client: `{"error": {"message", "type", "param", "code"}}` with the right status.

The one place where Swarm's errors, pydantic's and Starlette's are translated. Nothing of an unexpected exception
reaches the client; it is logged here.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from swarm_protocol.errors import ConfigError, PeerError, PeerRefused, SessionError, SwarmError

from swarm_node.gateway import bounds

log = logging.getLogger(__name__)


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
        return {"error": {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s > 0 else None
        return JSONResponse(self.body, status_code=self.status, headers=headers)


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def from_exception(error: BaseException) -> ApiError:
    """What to tell the client about `error`, whatever it is."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SwarmError):
        return _from_swarm(error)
    if isinstance(error, TimeoutError):
        return ApiError(503, "the request ran out of time", code="timeout", retry_after_s=bounds.RETRY_AFTER_S)
    log.error("unexpected error while answering a request", exc_info=error)
    return ApiError(500, "the gateway failed to answer; its log says why", code="internal_error")


def _from_swarm(error: SwarmError) -> ApiError:
    match error:
        case PeerRefused() if error.retry_after_s > 0:
            return ApiError(429, str(error), code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
        case PeerError() | SessionError():
            return ApiError(503, str(error), code="service_unavailable", retry_after_s=bounds.RETRY_AFTER_S)
        case ConfigError():
            return ApiError(400, str(error), code="invalid_request")
        case _:
            return ApiError(500, str(error), code=error.code)


def _from_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the request body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    path = ".".join(str(part) for part in first["loc"] if part != "body")
    code = "unsupported_parameter" if first["type"] == "unsupported" else "invalid_value"
    param = first["ctx"].get("name", path) if first["type"] == "unsupported" else path
    message = first["msg"] if first["type"] == "unsupported" else f"{path or 'body'}: {first['msg']}"
    return ApiError(400, message, code=code, param=param or None)


def _from_http(error: HTTPException) -> ApiError:
    return ApiError(error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else None)


def install(app: FastAPI) -> None:
    """Let every failure of `app`'s routes leave in OpenAI's shape."""

    async def answer(_request: Request, error: Exception) -> JSONResponse:
        match error:
            case RequestValidationError():
                return _from_validation(error).response()
            case HTTPException():
                return _from_http(error).response()
            case _:
                return from_exception(error).response()

    for kind in (RequestValidationError, HTTPException, ApiError, SwarmError, TimeoutError, Exception):
        app.add_exception_handler(kind, answer)
