"""The error responses of both HTTP servers, how exceptions become responses, and the description of all responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

REFUSAL = "swarm_refusal"
"""Key in a request's ASGI scope for the code of its refusal, which is counted."""


CODES = {404: "not_found", 405: "method_not_allowed", 406: "not_acceptable", 415: "unsupported_media_type"}
"""The error codes by status, for errors without a code of their own."""


class ErrorDetail(BaseModel):
    """The error fields that OpenAI's clients read, and a remedy if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None
    remedy: str = ""


class ErrorBody(BaseModel):
    """The body of every failed request, and the last event of a failed stream."""

    error: ErrorDetail


class HttpError(Exception):
    """A failure that is reported to the client, with an HTTP status, in OpenAI's form.

    `retry_after_s` 0 omits that header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        remedy: str = "",
        retry_after_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message.encode(errors="replace").decode()  # it may repeat invalid Unicode that a client sent
        self.code = code or CODES.get(status)
        self.param = param
        self.remedy = remedy
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "rate_limit_error" if self.status == 429 else "server_error"
        if self.status < 500 and self.status != 429:
            kind = "invalid_request_error"
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code, remedy=self.remedy)
        return {"error": detail.model_dump(exclude=None if self.remedy else {"remedy"})}

    def note(self, scope: Scope) -> None:
        """Record the reason of the refusal, for the counters."""
        scope[REFUSAL] = self.code or str(self.status)

    def response(self) -> JSONResponse:
        headers = dict(self.headers)
        if self.retry_after_s > 0:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, status_code=self.status, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error as the response, as an ASGI application."""
        self.note(scope)
        await self.response()(scope, receive, send)


def install_errors(app: FastAPI, translate: Callable[[Exception, Request], HttpError], *kinds: type[Exception]) -> None:
    """Turn every exception of `kinds` that leaves a route of `app` into the response that `translate` returns for
    it."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        failure = translate(error, request)
        failure.note(request.scope)
        return failure.response()

    for kind in kinds:
        app.add_exception_handler(kind, answer)
    described = app.openapi

    def openapi() -> dict[str, Any]:
        """Return FastAPI's description without status 422, which it adds and which is never sent."""
        schema = described()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def install_description(app: FastAPI, path: str) -> None:
    """Answer `path` with the description of `app`, encoded once. FastAPI's own route encodes it for each request, which
    takes six times as long as a refusal; a gateway lets anyone ask for it at any rate."""

    @cache
    def encoded() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    async def answer(_request: Request) -> Response:
        return Response(encoded(), media_type="application/json")

    app.add_route(path, answer, include_in_schema=False)
