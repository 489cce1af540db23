"""Who visits, by address, and how much of the dashboard one visitor may take. There is no login, so that is all.

Where a proxy stands in front, on this machine or in a private network, the address is the last one that it names; who
is in that network could name any, and so take more than their share, never more than all visitors have together.
"""

from __future__ import annotations

import ipaddress
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm_node.dashboard.answers import Refused
from swarm_node.gateway.access import network_of
from swarm_node.gateway.errors import ApiError
from swarm_node.gateway.limits import Allowances, Rates

PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")))
"""Where proxies and load balancers live: RFC 1918 and RFC 4193."""

REQUESTS_PER_MIN = 600
"""Of one address. A page with its files and its newest state is ten requests, then one every two seconds."""


def address_of(scope: Scope) -> str:
    """Of IPv6 the network: whoever has one address there has them all."""
    host = (scope.get("client") or ("", 0))[0]
    if _may_be_proxy(host):
        told = Headers(scope=scope).get("x-forwarded-for", "").rpartition(",")[2].strip()
        return network_of(told) if _is_address(told) else host
    return network_of(host)


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


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _may_be_proxy(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or any(address in network for network in PRIVATE)
