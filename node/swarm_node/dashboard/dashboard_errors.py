"""The dashboard's error responses: `{"error": {"message", "remedy"}}`, with the right status."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from swarm_node.formatting import shown
from swarm_node.http.http_error import HttpError, install_errors

log = logging.getLogger(__name__)

MAX_REPEATED_CHARS = 100
"""The most of what a visitor sent that the answer to it repeats."""


class RemedyDetail(BaseModel):
    message: str
    remedy: str


class RemedyBody(BaseModel):
    """The body of every failed request."""

    error: RemedyDetail


class DashboardError(HttpError):
    """A failure that a visitor is told, with a remedy."""

    @property
    def body(self) -> dict[str, Any]:
        return RemedyBody(error=RemedyDetail(message=self.message, remedy=self.remedy)).model_dump()


def unknown(what: str, name: str, remedy: str) -> DashboardError:
    """Return a 404 for a name that nobody has."""
    return DashboardError(404, f"there is no {what} {_repeated(name)} here", remedy=remedy)


def install(app: FastAPI) -> None:
    """Let every failure of `app`'s routes leave in the dashboard's form."""
    install_errors(app, _translated, DashboardError, RequestValidationError, HTTPException, Exception)


def _translated(error: Exception, request: Request) -> HttpError:
    match error:
        case DashboardError():
            return error
        case RequestValidationError():
            first = error.errors()[0]
            message = f"{_repeated(str(first['loc'][-1]))}: {shown(first['msg'])}"
            return DashboardError(400, message, remedy="see /api/v1/openapi.json")
        case HTTPException():
            message = f"{request.method} {_repeated(request.url.path)}: {shown(str(error.detail)).lower()}"
            remedy = "/api/v1/openapi.json lists what there is"
            return DashboardError(error.status_code, message, remedy=remedy, headers=error.headers)
        case _:
            log.error("unexpected error while answering a visitor", exc_info=error)
            return DashboardError(500, "the dashboard failed to answer", remedy="its log says why")


def _repeated(text: str) -> str:
    return shown(text, max_chars=MAX_REPEATED_CHARS)
