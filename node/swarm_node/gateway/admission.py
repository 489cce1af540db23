"""Checks each request before a route sees it: the caller's API key and rates, and the limits on the body.

The key file has one key a line: `name key [requests_per_min] [tokens_per_min]`. A rate that is 0 or absent means the
gateway's own rate. `#` begins a comment. The gateway keeps only the hashes of keys and compares a given key with all of
them in constant time. A changed file is read again. If it has become invalid, the old keys stay in use and a warning is
given.

The middlewares are plain ASGI. Requests without a valid key are refused before their body is read, and no body is
buffered beyond the limit.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from swarm.held_counts import HeldCounts
from swarm_protocol.errors import ConfigError, reason_of

from swarm_node.gateway import http_limits
from swarm_node.http.addresses import caller_of
from swarm_node.http.http_error import HttpError
from swarm_node.http.rate_limit import RateLimiter, RateLimiters, Rates

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")

_KEY = re.compile(rf"[!-~]{{{http_limits.MIN_KEY_CHARS},{http_limits.MAX_KEY_CHARS}}}")

_RATE = re.compile(r"\d{1,9}")

_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One API key with its own rates. Only its digest is kept."""

    name: str
    digest: bytes
    rates: Rates


class KeyRing:
    """The keys of a file.

    Raises ConfigError if the file cannot be used. The message names the line and never the key. `on_unusable` is called
    with a message and a remedy when the file becomes unusable later, once for each different problem.
    """

    def __init__(self, path: Path, now_s: Callable[[], float]) -> None:
        self._path = path
        self._now_s = now_s
        self._checked_s = now_s()
        self._keys, self._stamp = _read_keys(path)
        self._trouble = ""
        self.on_unusable: Callable[[str, str], None] = lambda _message, _remedy: None

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret, or None."""
        self._refresh()
        digest = _digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def _refresh(self) -> None:
        if self._now_s() - self._checked_s < http_limits.KEYS_FRESH_S:
            return
        self._checked_s = self._now_s()
        if _stamp_of(self._path) == self._stamp:
            return
        try:
            self._keys, self._stamp = _read_keys(self._path)
        except ConfigError as error:
            if error.message != self._trouble:
                self._trouble = error.message
                logger.warning("the API keys stay as they were: %s", error)
                self.on_unusable(f"the API keys stay as they were: {error.message}", error.remedy)
        else:
            self._trouble = ""
            logger.info("read %d API keys from %s", len(self._keys), self._path)


def _read_keys(path: Path) -> tuple[list[Key], _Stamp]:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            _check(path, status)
            text = file.read(http_limits.MAX_KEY_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error) if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the file of API keys {path} cannot be read: {why}", remedy="check --api-keys") from error
    keys = [_parse(path, number, line) for number, line in enumerate(text.splitlines(), 1) if _content(line)]
    for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            raise ConfigError(f"{path} has the same {what} twice", remedy="give each key its own line and name")
    if not 0 < len(keys) <= http_limits.MAX_KEYS:
        raise ConfigError(
            f"{path} has {len(keys)} API keys", remedy=f"write 1 to {http_limits.MAX_KEYS} lines such as: name key"
        )
    return keys, _stamp(status)


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_size > http_limits.MAX_KEY_FILE_BYTES:
        raise ConfigError(
            f"{path} is not a file of API keys", remedy=f"give a text file below {http_limits.MAX_KEY_FILE_BYTES} bytes"
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path} holds API keys and is open to other users", remedy=f"run: chmod 600 {path}")


def _parse(path: Path, number: int, line: str) -> Key:
    name, secret, *rates = [*_content(line).split(), ""][:5]
    rates = [rate for rate in rates if rate]
    fits = _NAME.fullmatch(name) and _KEY.fullmatch(secret) and len(rates) <= 2 and all(map(_RATE.fullmatch, rates))
    if not fits:
        raise ConfigError(
            f"line {number} of {path} is not an API key",
            remedy=f"write: name key [requests_per_min] [tokens_per_min]; a key has {http_limits.MIN_KEY_CHARS} to "
            f"{http_limits.MAX_KEY_CHARS} printable characters",
        )
    requests_per_min, tokens_per_min = [*map(int, rates), 0, 0][:2]
    return Key(
        name=name, digest=_digest(secret), rates=Rates(requests_per_min=requests_per_min, tokens_per_min=tokens_per_min)
    )


def _content(line: str) -> str:
    return line.split("#", 1)[0].strip()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        return _stamp(path.stat())
    except OSError:
        return None  # the error of the read that follows says why


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino


RATE_LIMITER = "swarm_rate_limiter"
"""Key in a request's ASGI scope for the caller's RateLimiter."""

OPEN_PATHS = frozenset({"/health", "/openapi.json"})
"""Paths that need no key: load balancers and authors of clients use them, and they report nothing that a key
protects."""


class AccessControl:
    """Middleware: answers 401 without a valid key where keys are required, and 429 beyond the caller's rate.

    `rates` apply to a key without rates of its own or, where there are no keys, to each address.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing | None, rates: Rates, limiters: RateLimiters) -> None:
        self._app = app
        self._keys = keys
        self._rates = rates
        self._limiters = limiters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            limiter = scope[RATE_LIMITER] = self._identify(scope)
        except HttpError as error:
            await error(scope, receive, send)
            return
        send_with_rates = _with_rates(send, limiter)
        try:
            limiter.take_request()
        except HttpError as error:
            await error(scope, receive, send_with_rates)
            return
        await self._app(scope, receive, send_with_rates)

    def _identify(self, scope: Scope) -> RateLimiter:
        if self._keys is None:
            return self._limiters.get(caller_of(scope), self._rates)
        kind, _, secret = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not secret.strip():
            raise HttpError(
                401, "this gateway asks for an API key: send it as 'authorization: Bearer KEY'", code="missing_api_key"
            )
        key = self._keys.find(secret.strip().decode("latin-1"))
        if key is None:
            raise HttpError(401, "this gateway does not know that API key", code="invalid_api_key")
        rates = Rates(
            requests_per_min=key.rates.requests_per_min or self._rates.requests_per_min,
            tokens_per_min=key.rates.tokens_per_min or self._rates.tokens_per_min,
        )
        return self._limiters.get(f"key {key.name}", rates)


def _with_rates(send: Send, limiter: RateLimiter) -> Send:
    async def send_with_rates(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(limiter.headers())
        await send(message)

    return send_with_rates


class BodyLimit:
    """Middleware that reads the whole body and bounds it.

    It answers 413 for a body over `http_limits.MAX_HTTP_BODY_BYTES` or with over MAX_HTTP_VALUES values, and 408 for
    one that does not arrive in time. It answers 429 for a body over SMALL_HTTP_BODY_BYTES while all bodies on their way
    exceed MAX_ARRIVING_BYTES, or those of the same address exceed MAX_ADDRESS_ARRIVING_BYTES. It answers 415 for a body
    that is compressed, or not declared as JSON, so that a page in a browser cannot send one without a CORS preflight
    request. A body for no route may have any type: the application answers 404 or 405 without reading it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._arriving = HeldCounts[str]()  # bytes on their way, by caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._read(scope, receive)
        except HttpError as error:
            await error(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the whole body; None if the client left before it was sent."""
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        _check_size(int(declared) if declared.isdigit() else 0)
        body, caller = bytearray(), caller_of(scope)
        try:
            async with asyncio.timeout(http_limits.HTTP_BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    self._arriving[caller] += len(message.get("body", b""))
                    _check_size(len(body))
                    self._check_room(caller, len(body))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise HttpError(
                408,
                f"the request's body did not arrive within {http_limits.HTTP_BODY_TIMEOUT_S:g} s",
                code="request_timeout",
            ) from None
        finally:
            self._arriving[caller] -= len(body)
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if body and kind != b"application/json" and _has_route(scope):
            raise HttpError(415, "send JSON, with content-type: application/json", code="unsupported_media_type")
        if body and headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HttpError(
                415,
                "send the body uncompressed, without content-encoding",
                code="unsupported_media_type",
                headers={"accept-encoding": "identity"},
            )
        _check_values(body)
        return bytes(body)

    def _check_room(self, caller: str, num_bytes: int) -> None:
        if num_bytes <= http_limits.SMALL_HTTP_BODY_BYTES:
            return
        own, of_all = self._arriving[caller], self._arriving.total()
        if own > http_limits.MAX_ADDRESS_ARRIVING_BYTES or of_all > http_limits.MAX_ARRIVING_BYTES:
            raise HttpError(
                429,
                "the gateway is receiving as many large requests as it allows",
                code="rate_limit_exceeded",
                retry_after_s=http_limits.RETRY_AFTER_S,
            )


def _has_route(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


def _check_values(body: bytearray) -> None:
    """Refuse a body of too many values before it is parsed: a value of two bytes takes up to a hundred bytes of
    memory."""
    most = http_limits.MAX_HTTP_VALUES
    if has_more_values([body], most):
        raise HttpError(
            413,
            f"the request's body has over {most} objects, lists and strings: send fewer",
            code="request_too_large",
        )


def has_more_values(documents: Sequence[bytes | bytearray], most: int) -> bool:
    """Return whether JSON documents together have more than `most` objects, lists and strings, without parsing them."""
    # brackets inside strings are excluded only if the first count is too high: excluding them takes longer
    return sum(map(_num_values, documents)) > most and sum(_num_outside(each, most) for each in documents) > most


def _num_values(document: bytes | bytearray) -> int:
    return document.count(b"{") + document.count(b"[") + document.count(b'"') // 2


def _num_outside(document: bytes | bytearray, most: int) -> int:
    """Count the values of JSON in UTF-8, without brackets inside strings. UTF-8 JSON has no zero byte: a document that
    has one is taken for UTF-16, and all its brackets count."""
    return _num_values(document if b"\0" in document else _without_texts(document, most))


def _without_texts(document: bytes | bytearray, most: int) -> bytes | bytearray:
    """Return the JSON with its strings emptied. If there are more than `most` strings, return it with them."""
    unescaped = document.replace(b"\\\\", b"").replace(b'\\"', b"")
    return unescaped if unescaped.count(b'"') > 2 * most else b'""'.join(unescaped.split(b'"')[::2])


def _check_size(num_bytes: int) -> None:
    if num_bytes > http_limits.MAX_HTTP_BODY_BYTES:
        raise HttpError(
            413,
            f"the request's body is over {http_limits.MAX_HTTP_BODY_BYTES} bytes: send less",
            code="request_too_large",
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields `body` once. After that only a disconnect can follow."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
