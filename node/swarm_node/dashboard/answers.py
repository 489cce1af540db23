"""How the dashboard says no: `{"error": {"message", "remedy"}}`, with the right status. All failures pass here."""

from __future__ import annotations

import logging
import math

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from swarm_node.dashboard.view_sanitizing import shown

log = logging.getLogger(__name__)

MAX_REPEATED_CHARS = 100
"""Of what a visitor sent, in the answer to it."""


class ErrorDetail(BaseModel):
    message: str
    remedy: str


class ErrorBody(BaseModel):
    """Every failure."""

    error: ErrorDetail


class Refused(Exception):
    """What a visitor is told instead of an answer. `retry_after_s` 0: no such header. `allow`: methods, with a 405."""

    def __init__(
        self, status: int, message: str, *, remedy: str = "", retry_after_s: float = 0.0, allow: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.remedy = remedy
        self.retry_after_s = retry_after_s
        self.allow = allow

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s > 0 else {}
        headers |= {"allow": self.allow} if self.allow else {}
        body = ErrorBody(error=ErrorDetail(message=self.message, remedy=self.remedy))
        return JSONResponse(body.model_dump(), status_code=self.status, headers=headers)


def unknown(what: str, name: str, remedy: str) -> Refused:
    """404 for a name that nobody has."""
    return Refused(404, f"there is no {what} {shown(name, max_chars=MAX_REPEATED_CHARS)} here", remedy=remedy)


def install(app: FastAPI) -> None:
    """Let every failure of `app`'s routes leave in this shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return _told(error, request).response()

    for kind in (Refused, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _told(error: Exception, request: Request) -> Refused:
    match error:
        case Refused():
            return error
        case RequestValidationError():
            first = error.errors()[0]
            where = shown(str(first["loc"][-1]), max_chars=MAX_REPEATED_CHARS)
            return Refused(400, f"{where}: {shown(first['msg'])}", remedy="see /api/v1/openapi.json")
        case HTTPException():
            path = shown(request.url.path, max_chars=MAX_REPEATED_CHARS)
            message = f"{request.method} {path}: {shown(str(error.detail)).lower()}"
            allow = (error.headers or {}).get("Allow", "")
            return Refused(error.status_code, message, remedy="/api/v1/openapi.json lists what there is", allow=allow)
        case _:
            log.error("unexpected error while answering a visitor", exc_info=error)
            return Refused(500, "the dashboard failed to answer", remedy="its log says why")
