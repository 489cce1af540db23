"""Translates every failure of the gateway into an error response that an OpenAI client understands.

This is the one place where Swarm's errors, pydantic's and Starlette's are translated. Nothing of an unexpected
exception reaches the client; it is logged here.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from swarm.client.request import ContextExceeded
from swarm_protocol.errors import ConfigError, PeerError, PeerRefused, SessionError, SwarmError

from swarm_node.formatting import clean
from swarm_node.gateway import http_limits
from swarm_node.http.field_words import wanted, words
from swarm_node.http.http_error import CODES, HttpError, install_errors

logger = logging.getLogger(__name__)

MAX_PATH_CHARS = 100
"""The most of a request's path or field name that an error message repeats."""
TEXT_FIELDS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/embeddings": "input"}
"""Names that these routes have for what the SDK calls `prompt`."""
NAMES = MappingProxyType({"template_kwargs": "chat_template_kwargs"})
OTHER_KINDS = frozenset({"string_type", "list_type", "literal_error", "model_attributes_type"})
"""Errors of a value that is of another kind than is allowed. A field that may be of two kinds has one for each."""
TAGS = MappingProxyType({"unknown_role": "role", "union_tag_invalid": "type", "union_tag_not_found": "type"})
"""Errors of an object that are about one of its fields, by which its kind is known."""
NO_NAMES: Mapping[str, str] = MappingProxyType({})
UNDER_V1 = {"/v1/models", *TEXT_FIELDS}
"""Paths that clients miss whose base URL lacks its end."""
BASE_URL = "OpenAI's API is under /v1: give the client a base URL that ends with /v1"
PARSING = "There was an error parsing the body"
"""FastAPI's words for a body that is no JSON for another reason than its grammar: no UTF-8, too deep, a huge number."""


def install(app: FastAPI) -> None:
    """Let every failure of `app`'s routes leave in OpenAI's form."""
    kinds = (RequestValidationError, HTTPException, HttpError, SwarmError, TimeoutError, Exception)
    install_errors(app, _from_route, *kinds)


def from_exception(error: BaseException, path: str, names: Mapping[str, str] = NO_NAMES) -> HttpError:
    """Translate any exception of the route `path`; of several that tasks failed with, the first.

    `names` are those that the request has for settings that the SDK calls otherwise.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    match error:
        case HttpError():
            return error
        case SwarmError():
            return _from_swarm(error, {**NAMES, "prompt": TEXT_FIELDS.get(path, ""), **names})
        case TimeoutError():
            message = "the request ran out of time"
            return HttpError(503, message, code="timeout", retry_after_s=http_limits.RETRY_AFTER_S)
    logger.error("unexpected error while answering a request", exc_info=error)
    return HttpError(500, "the gateway failed to answer; its log says why", code="internal_error")


def _from_swarm(error: SwarmError, names: Mapping[str, str]) -> HttpError:
    match error:
        case PeerRefused() if error.retry_after_s > 0:
            return HttpError(429, str(error), code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
        case PeerError() | SessionError():
            return HttpError(503, str(error), code="service_unavailable", retry_after_s=http_limits.RETRY_AFTER_S)
        case ConfigError():
            # by the first code clients know that they have to shorten the conversation
            code = "context_length_exceeded" if isinstance(error, ContextExceeded) else "invalid_request"
            param = names.get(error.field, error.field)
            return HttpError(400, str(error), code=code, param=param or None)
    return HttpError(500, str(error), code=error.code)


def _from_route(error: Exception, request: Request) -> HttpError:
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    return _from_http(error, request) if isinstance(error, HTTPException) else from_exception(error, request.url.path)


def _from_validation(error: RequestValidationError) -> HttpError:
    # of a field that may be of two kinds both are reported: the one that was meant got further
    errors = error.errors()
    first = max(errors, key=lambda found: (len(found["loc"]), found["type"] not in {"string_type", "list_type"}))
    path, kind = _as_sent(_path(first["loc"]), error.body), first["type"]
    if kind == "json_invalid" or (kind == "missing" and not path):
        found = "empty: send a JSON object" if kind == "missing" else f"not valid JSON: {first['ctx']['error']}"
        return HttpError(400, f"the request body is {found}", code="invalid_json")
    if kind == "unsupported":
        param = ".".join([*path, first["ctx"]["name"]])
        message = f"'{param}' is not supported by this gateway: leave it out"
        return HttpError(400, message, code="unsupported_parameter", param=param)
    if kind == "extra_forbidden":
        name = clean(".".join([*_path(first["loc"][:-1]), str(first["loc"][-1])]), MAX_PATH_CHARS)
        return HttpError(400, f"unknown parameter '{name}': leave it out", code="unknown_parameter", param=name)
    name, what = _what(errors, first)
    param = ".".join([*path, name] if name else path)
    message = f"{param}: {what}" if param else f"the request body {what.removeprefix('it ')}"
    return HttpError(400, message, code="invalid_value", param=param or None)


def _what(errors: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field within the object at `first` that is wrong, or an empty text, and in words what is wrong."""
    kind = first["type"]
    if kind == "unfit":
        return first["ctx"]["name"], first["ctx"]["why"]
    if kind in TAGS:
        return TAGS[kind], words({**first, "input": first["input"].get(TAGS[kind])})
    same = [found for found in errors if found["type"] in OTHER_KINDS and _path(found["loc"]) == _path(first["loc"])]
    others = [wanted(found) for found in same if found is not first] if kind in OTHER_KINDS else []
    return "", " or ".join([words(first), *others])


def _path(loc: Sequence[str | int]) -> list[str]:
    """Return the path of a field, without the names of types, which are no part of what was sent: such as
    `list[TextPart]`, and after `response_format` the value of its `type`."""
    parts = [part for part in map(str, loc) if part != "body" and re.fullmatch(r"[a-z0-9_]+", part)]
    return [part for before, part in zip(("", *parts), parts, strict=False) if before != "response_format"]


def _as_sent(path: Sequence[str], body: object) -> list[str]:
    """Return the path in the body that was sent, where one prompt or stop may stand for a list of it."""
    found = list[str]()
    for number, part in enumerate(path, 1):
        if isinstance(body, list) and part.isdecimal() and int(part) < len(body):
            item = body[int(part)]
            if number < len(path) and not isinstance(item, list | dict):
                continue  # a list of token ids is taken for a list that holds it
            body = item
        elif isinstance(body, dict):
            body = body.get(part)
        else:
            break
        found.append(part)
    return found


def _from_http(error: HTTPException, request: Request) -> HttpError:
    if error.detail == PARSING and type(error.__cause__) is ValueError:  # from int, which bounds its digits
        digits = sys.get_int_max_str_digits()
        return HttpError(400, f"the request body has a number of over {digits} digits", code="invalid_value")
    if error.detail == PARSING:
        return HttpError(400, "the request body is not JSON in UTF-8 of a reasonable depth", code="invalid_json")
    code, message = CODES.get(error.status_code), str(error.detail)
    if code in {"not_found", "method_not_allowed"}:
        path = request.url.path[:MAX_PATH_CHARS]
        hint = BASE_URL if f"/v1{path}" in UNDER_V1 else "/openapi.json lists what there is"
        message = f"there is no {request.method} {path} here: {hint}"
    allowed = {"Allow": _methods(request)} if code == "method_not_allowed" else {}
    return HttpError(error.status_code, message, code=code, headers={**(error.headers or {}), **allowed})


def _methods(request: Request) -> str:
    """Return the methods of the request's path. Several routes may have it, and Starlette names those of the first."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    found = [each for each in routes if each.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for each in found for method in each.methods or ()}))
