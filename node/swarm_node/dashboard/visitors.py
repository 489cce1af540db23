"""Who visits, by address, and how much of the dashboard one visitor may take. There is no login, so that is all.

Where a proxy stands in front, `gateway.proxies` has found out whose address that is.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from swarm_node.dashboard.answers import Refused
from swarm_node.gateway.access import network_of
from swarm_node.gateway.api_errors import ApiError
from swarm_node.gateway.rate_limit import Allowances, Rates

REQUESTS_PER_MIN = 600
"""Of one address. A page with its files and its newest state is ten requests, then one every two seconds."""


def address_of(scope: Scope) -> str:
    """Of IPv6 the network: whoever has one address there has them all."""
    return network_of((scope.get("client") or ("", 0))[0])


class Bounded:
    """Middleware: 429 in words for an address that asks too often."""

    def __init__(self, app: ASGIApp, *, requests_per_min: int = REQUESTS_PER_MIN) -> None:
        self._app = app
        self._rates = Rates(requests_per_min=requests_per_min)
        self._allowances = Allowances(time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._allowances.of(address_of(scope), self._rates).take_request()
            except ApiError as error:
                refused = Refused(
                    429, error.message, remedy="follow /api/v1/events instead", retry_after_s=error.retry_after_s
                )
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
