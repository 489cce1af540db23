"""Who asks, where a proxy stands in front: the address that a trusted proxy names takes the place of the proxy's own.

The one rule for the gateway's rates and the dashboard's bounds. Headers are believed from `trusted_proxies` alone: with
none, what they say is ignored. Proxies append to what they are sent, so of the addresses named the last one that is no
trusted proxy is the visitor; all before it the visitor may have made up.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# RFC 7239: within quotes neither commas nor semicolons divide anything
_ELEMENT = re.compile(r'(?:[^,"]|"[^"]*")+')
_PAIR = re.compile(r'(?:^|;)\s*(\w{1,32})\s*=\s*("[^"]*"|[^;"]*)')
_WITH_PORT = re.compile(r"\[([^\]]+)\](?::\d+)?|([\d.]+):\d+")


class BehindProxies:
    """Middleware: sets a request's client. `trusted`: addresses, or networks such as 10.0.0.0/8."""

    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        self._app = app
        self._trusted = [ipaddress.ip_network(network) for network in trusted]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._trusted and scope.get("client"):
            host, port = scope["client"]
            scope = {**scope, "client": (self._visitor(host, Headers(scope=scope)), port)}
        await self._app(scope, receive, send)

    def _visitor(self, host: str, headers: Headers) -> str:
        if not self._is_trusted(_address(host)):
            return host
        chains = [
            [part.strip() for part in ",".join(headers.getlist("x-forwarded-for")).split(",") if part.strip()],
            [_forwarded_for(part) for part in _elements(",".join(headers.getlist("forwarded")))],
        ]
        named = {self._last_untrusted(host, chain) for chain in chains if chain}
        # where the two differ, one is the visitor's own, that the proxy has passed on
        return named.pop() if len(named) == 1 else host

    def _last_untrusted(self, host: str, chain: Sequence[str]) -> str:
        """The nearest address that is no trusted proxy; the last known one where something else is named."""
        for part in reversed(chain):
            address = _address(part)
            if address is None:
                return host
            host = str(address)
            if not self._is_trusted(address):
                return host
        return host

    def _is_trusted(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _elements(header: str) -> list[str]:
    """The last one is the nearest proxy's, unless a quote that does not end hides where it begins: then there is none
    to believe."""
    if header.count('"') % 2:
        return [""]
    return [part for part in _ELEMENT.findall(header) if part.strip()]


def _forwarded_for(element: str) -> str:
    """The address in one element of a Forwarded header (RFC 7239)."""
    named = (value for name, value in _PAIR.findall(element) if name.lower() == "for")
    return next(named, "").strip().strip('"')


def _address(text: str) -> Address | None:
    """An address, with a port or without; None for other names."""
    if match := _WITH_PORT.fullmatch(text):
        text = match[1] or match[2]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
