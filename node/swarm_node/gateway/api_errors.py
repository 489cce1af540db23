"""Translates every failure of the gateway into an error response that an OpenAI client understands.

This is the one place that translates the errors of Swarm, pydantic and Starlette. Details of an unexpected exception
are logged here and never sent to the client.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from swarm.client import NoRoom
from swarm.client.request import ContextExceeded
from swarm_protocol.errors import ConfigError, PeerError, PeerRefused, SessionError, SwarmError

from swarm_node.formatting import clean
from swarm_node.gateway import http_limits
from swarm_node.http.field_words import wanted, words
from swarm_node.http.http_error import CODES, HttpError, install_errors

logger = logging.getLogger(__name__)

MAX_PATH_CHARS = 100
"""The most characters of a request's path or field name that an error message repeats."""
MAX_TOLD = 4
"""Errors of one body that are told. Each unknown field costs another validation, some 0.3 s a megabyte, so in a large
body only one is told."""
NOT_HERE = frozenset({"unknown_parameter", "unsupported_parameter"})
TEXT_FIELDS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
}
"""The field of each of these routes that the SDK calls `prompt`."""
NAMES: Mapping[str, str] = {"template_kwargs": "chat_template_kwargs"}
OTHER_KINDS = frozenset({"string_type", "list_type", "literal_error", "model_attributes_type"})
"""Errors of values with a wrong type. A field that allows two types has one error for each."""
TAGS: Mapping[str, str] = {
    "unknown_role": "role",
    "unknown_item": "type",
    "union_tag_invalid": "type",
    "union_tag_not_found": "type",
}
"""Errors of an object that are about the field that names its type."""
FORMATS = frozenset({"response_format", "format"})
NO_NAMES: Mapping[str, str] = {}
NO_HEADERS: Mapping[str, str] = {}
BESIDE_V1 = ("/tokenize", "/detokenize", "/health", "/metrics")
UNDER_V1 = ("/v1/models", *TEXT_FIELDS)
BASE_URL = "give the client a base URL that ends with /v1, directly after the host"
AZURE = "clients of Azure are not supported: use one of OpenAI, with a base URL that ends with /v1"
ORIGIN = "a page of another origin may use this gateway only if --allowed-origins names it"
NOT_STORED = "responses are not stored: keep the answer of POST /v1/responses, and send the whole conversation as input"
ROUTES = "this gateway serves a part of OpenAI's API, and /openapi.json lists all routes"
INSTEAD: Mapping[str, str] = {
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_json": "response_format",
    "structured_outputs": "response_format",
    "background": "stream: true",
    "conversation": "the whole conversation as input",
    "previous_response_id": "the whole conversation as input",
    "prompt": "its text as instructions and input",
}
"""The fields that do what these older ones, or vLLM's, do elsewhere."""
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {
        "messages": "prompt",
        "input": "prompt",
        "instructions": "prompt",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
    },
    "/v1/chat/completions": {
        "prompt": "messages",
        "input": "messages",
        "instructions": "messages",
        "text": "response_format",
        "max_output_tokens": "max_completion_tokens",
        "reasoning": "reasoning_effort",
        "enable_thinking": "chat_template_kwargs",
        "extra_body": "its fields beside the others",
        "n_predict": "max_tokens",
        "response_format.schema": "the type json_schema",
    },
    "/v1/responses": {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    },
}
"""The fields of each of these routes that the others, or other servers, have under other names."""
PARSING = "There was an error parsing the body"
"""FastAPI's message for a body that is not JSON for a reason other than its grammar: not UTF-8, too deep, or a huge
number."""


def install(app: FastAPI) -> None:
    """Turn every failure of `app`'s routes into an error response in OpenAI's form."""
    kinds = (RequestValidationError, HTTPException, HttpError, SwarmError, TimeoutError, Exception)
    install_errors(app, _from_route, *kinds)


def from_exception(error: BaseException, path: str, names: Mapping[str, str] = NO_NAMES) -> HttpError:
    """Translate any exception of the route `path`. Of a group of exceptions, the first one counts.

    `names` maps the SDK's names of settings to the request's fields where these differ.
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
        case NoRoom():
            return HttpError(429, str(error), code="rate_limit_exceeded", retry_after_s=http_limits.RETRY_AFTER_S)
        case PeerError() | SessionError():
            return HttpError(503, str(error), code="service_unavailable", retry_after_s=http_limits.RETRY_AFTER_S)
        case ConfigError():
            # "context_length_exceeded" tells clients to shorten the conversation
            code = "context_length_exceeded" if isinstance(error, ContextExceeded) else "invalid_request"
            param = names.get(error.field, error.field)
            return HttpError(400, str(error), code=code, param=param or None)
    # no caller can mend it, and the text may name this machine's files: damaged ones of a model, for example
    logger.error("a request failed: %s", error)
    return HttpError(500, "the gateway failed to answer; its log says why", code=error.code)


def _from_route(error: Exception, request: Request) -> HttpError:
    if isinstance(error, RequestValidationError):
        return _from_validation(error, request)
    return _from_http(error, request) if isinstance(error, HTTPException) else from_exception(error, request.url.path)


def _from_validation(error: RequestValidationError, request: Request) -> HttpError:
    """Return the error of the body, which tells what is wrong with each field. In a small body, fields that are not
    known here do not hide what is wrong with the others."""
    path, body, errors = request.url.path, error.body, error.errors()
    found = [_from_fields(errors, body, path)]
    headers = request.headers
    num_bytes = int(headers.get("content-length", http_limits.MAX_HTTP_BODY_BYTES))
    # of a body in chunks, the declared length says nothing
    is_small = num_bytes <= http_limits.SMALL_HTTP_BODY_BYTES and "transfer-encoding" not in headers
    most = MAX_TOLD if is_small else 1
    while found[-1].code in NOT_HERE and isinstance(body, dict) and found[-1].param in body and len(found) < most:
        body = {name: value for name, value in body.items() if name != found[-1].param}
        _, errors = request.scope["route"].body_field.validate(body, loc=("body",))
        if not errors:
            break
        found.append(_from_fields(errors, body, path))
    by_field: dict[Any, list[Mapping[str, Any]]] = {}
    for each in errors:
        by_field.setdefault(each["loc"][:2], []).append(each)
    found += [_from_fields(those, body, path) for those in by_field.values()]
    messages = list(dict.fromkeys(each.message for each in found))[:MAX_TOLD]
    return HttpError(400, "; ".join(messages), code=found[0].code, param=found[0].param)


def _from_fields(errors: Sequence[Mapping[str, Any]], body: object, route: str) -> HttpError:
    """Return the error that is told first: of an unknown field, after which the others can be told, too. A field that
    takes two types reports both errors: the longer path is that of the type that was meant."""

    def weight(found: Mapping[str, Any]) -> tuple[bool, int, bool]:
        kind, depth = found["type"], len(found["loc"])
        return kind == "extra_forbidden" and depth == 2, depth, kind not in {"string_type", "list_type"}

    first = max(errors, key=weight)
    path, kind = _as_sent(_path(first["loc"]), body), first["type"]
    if kind == "json_invalid" or (kind == "missing" and not path):
        found = "empty: send a JSON object" if kind == "missing" else f"not valid JSON: {first['ctx']['error']}"
        return HttpError(400, f"the request body is {found}", code="invalid_json")
    if kind == "unsupported":
        param = ".".join([*path, first["ctx"]["name"]])
        way = f"send {INSTEAD[param]} in its place" if param in INSTEAD else "leave it out"
        message = f"'{param}' is not supported by this gateway: {way}"
        return HttpError(400, message, code="unsupported_parameter", param=param)
    if kind in {"misspelt", "extra_forbidden"}:
        given = [*path, first["ctx"]["name"]] if kind == "misspelt" else [*_path(first["loc"][:-1]), first["loc"][-1]]
        name = clean(".".join(map(str, given)), MAX_PATH_CHARS)
        near = ELSEWHERE.get(route, {}).get(name) or first.get("ctx", {}).get("near")
        way = f"did you mean {near}?" if near else "leave it out"
        return HttpError(400, f"unknown parameter '{name}': {way}", code="unknown_parameter", param=name)
    name, what = _what(errors, first)
    param = ".".join([*path, name] if name else path)
    message = f"{param}: {what}" if param else f"the request body {what.removeprefix('it ')}"
    return HttpError(400, message, code="invalid_value", param=param or None)


def _what(errors: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> tuple[str, str]:
    """Return the wrong field within the object at `first`, or "", and a message that says what is wrong."""
    kind = first["type"]
    if kind == "unfit":
        return first["ctx"]["name"], first["ctx"]["why"]
    if kind in TAGS:
        return TAGS[kind], words({**first, "input": first["input"].get(TAGS[kind])})
    same = [found for found in errors if found["type"] in OTHER_KINDS and _path(found["loc"]) == _path(first["loc"])]
    others = [wanted(found) for found in same if found is not first] if kind in OTHER_KINDS else []
    what = " or ".join([words(first), *others])
    return "", what.replace("it must", "each name must") if first["loc"][-1] == "[key]" else what


def _path(loc: Sequence[str | int]) -> list[str]:
    """Return a field's path in the request body.

    Names of types in pydantic's path are left out, such as `list[TextPart]`, and so is the value of `type` after a
    field of `FORMATS`.
    """
    parts = [part for part in map(str, loc) if part != "body" and re.fullmatch(r"[a-z0-9_]{1,64}", part)]
    return [part for before, part in zip(("", *parts), parts, strict=False) if before not in FORMATS]


def _as_sent(path: Sequence[str], body: object) -> list[str]:
    """Return the path in the body as it was sent: one prompt or stop string may stand for a list of one."""
    found = list[str]()
    for number, part in enumerate(path, 1):
        if isinstance(body, list) and part.isdecimal() and int(part) < len(body):
            item = body[int(part)]
            if number < len(path) and not isinstance(item, list | dict):
                continue  # the body's list of token ids became the only item of a list
            body = item
        elif isinstance(body, dict):
            body = body.get(part)
        else:
            break
        found.append(part)
    return found


def _from_http(error: HTTPException, request: Request) -> HttpError:
    # int() raised it: it bounds the number of digits
    if error.detail == PARSING and type(error.__cause__) is ValueError:
        digits = sys.get_int_max_str_digits()
        return HttpError(400, f"the request body has a number of over {digits} digits", code="invalid_value")
    if error.detail == PARSING:
        return HttpError(400, "the request body is not JSON in UTF-8, or is nested too deeply", code="invalid_json")
    code, message, allowed = CODES.get(error.status_code), str(error.detail), NO_HEADERS
    if code in {"not_found", "method_not_allowed"}:
        path, methods = request.url.path[:MAX_PATH_CHARS], _methods(request) if error.status_code == 405 else ""
        message = f"there is no {request.method} {path} here: {_advice(request.method, path, methods)}"
        allowed = {"Allow": methods} if methods else {}
    return HttpError(error.status_code, message, code=code, headers={**(error.headers or {}), **allowed})


def _advice(method: str, path: str, methods: str) -> str:
    """Return what to do instead of a request for a route that does not exist.

    `methods` are those of its path, "" if there is no such path.
    """
    if method == "OPTIONS":
        return ORIGIN
    if methods:
        return f"send {' or '.join(methods.split(', '))}"
    if "/deployments/" in path:
        return AZURE
    if path.startswith("/v1/responses/") and (method != "POST" or path.endswith("/cancel")):
        return NOT_STORED
    # a client appends the route's part after /v1 to its base URL
    meant = max((each for each in UNDER_V1 if path.endswith(each.removeprefix("/v1"))), key=len, default="")
    if meant:
        return f"send it to {meant}: {BASE_URL}"
    near = get_close_matches(path, (*UNDER_V1, *BESIDE_V1), n=1, cutoff=0.8)
    return f"did you mean {near[0]}?" if near else ROUTES


def _methods(request: Request) -> str:
    """Return the methods that the request's path allows. Several routes may have this path; Starlette names the first
    one's only."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    found = [each for each in routes if each.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for each in found for method in each.methods or ()}))
