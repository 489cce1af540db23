"""Who is asking, and whether they may: the API key, else the address, and the rates of either.

Plain ASGI, before the body is read: who may not ask costs next to nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_node.gateway.api_errors import ApiError
from swarm_node.gateway.keys import KeyRing
from swarm_node.gateway.rate_limit import Allowance, Allowances, Rates

ALLOWANCE = "swarm_allowance"
"""Where a request's scope holds its caller's Allowance."""

OPEN_PATHS = frozenset({"/health", "/openapi.json"})
"""For load balancers and for whoever writes a client: they tell nothing that a key protects."""


class Access:
    """Middleware: 401 without a key where there are keys, 429 beyond the caller's rate.

    A key without rates of its own, and where there are no keys an address, has `rates`.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing | None, rates: Rates, allowances: Allowances) -> None:
        self._app = app
        self._keys = keys
        self._rates = rates
        self._allowances = allowances

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            allowance = scope[ALLOWANCE] = self._identify(scope)
        except ApiError as error:
            await error.answer(scope, receive, send)
            return
        say = _with_rates(send, allowance)
        try:
            if scope["path"] != "/metrics":
                allowance.take_request()
        except ApiError as error:
            await error.answer(scope, receive, say)
            return
        await self._app(scope, receive, say)

    def _identify(self, scope: Scope) -> Allowance:
        if self._keys is None:
            return self._allowances.of(network_of((scope.get("client") or ("", 0))[0]), self._rates)
        secret = _bearer(dict(scope["headers"]))
        if not secret:
            raise ApiError(
                401, "this gateway asks for an API key: send it as 'authorization: Bearer KEY'", code="missing_api_key"
            )
        key = self._keys.find(secret)
        if key is None:
            raise ApiError(401, "this gateway does not know that API key", code="invalid_api_key")
        rates = Rates(
            requests_per_min=key.rates.requests_per_min or self._rates.requests_per_min,
            tokens_per_min=key.rates.tokens_per_min or self._rates.tokens_per_min,
        )
        return self._allowances.of(f"key {key.name}", rates)


def _bearer(headers: Mapping[bytes, bytes]) -> str:
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    return secret.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""


def network_of(host: str) -> str:
    """The caller that an address stands for. Of IPv6 the network: whoever has one address there has them all."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host


def _with_rates(send: Send, allowance: Allowance) -> Send:
    async def say(message: Message) -> None:
        if message["type"] == "http.response.start" and (headers := allowance.headers()):
            written = [(name.encode(), value.encode()) for name, value in headers.items()]
            message = {**message, "headers": [*message.get("headers", ()), *written]}
        await send(message)

    return say
