"""Checks the host name of each request, and determines the address that a request comes from.

Host names are checked against DNS rebinding, where a stranger's web page has a name that resolves to this server. A
browser sends the name of the page. An IP address, or a name without a dot such as `localhost`, cannot belong to a
stranger. Every other name must be configured. Starlette's TrustedHostMiddleware is not used: it needs each address by
name, and its error has no remedy.

Behind a reverse proxy, the visitor's address is taken from the headers of proxies in `trusted_proxies`, and from no
others. Each proxy appends an address to the header. So the last address that is not a trusted proxy's is the visitor's;
the visitor may have invented all addresses before it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm_node.formatting import clean
from swarm_node.http.http_error import HttpError
from swarm_node.settings.config import Config

ANY = "*"
MAX_HOST_CHARS = 100
"""The longest host name that an error message repeats."""
MISDIRECTED = 421

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# RFC 7239: commas and semicolons inside quotes are not separators
_ELEMENT = re.compile(r'(?:[^,"]|"[^"]*")+')
_PAIR = re.compile(r'(?:^|;)\s*(\w{1,32})\s*=\s*("[^"]*"|[^;"]*)')
_WITH_PORT = re.compile(r"\[([^\]]+)\](?::\d+)?|([\d.]+):\d+")


def checked(app: ASGIApp, config: Config) -> ASGIApp:
    """Return `app` wrapped in both middlewares."""
    return TrustedProxies(KnownHosts(app, config), config.trusted_proxies)


class KnownHosts:
    """Middleware: answers 421 for a host name that is not this server's. A client that sends no name is not a
    browser."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._names = frozenset({config.host.lower(), *config.allowed_hosts})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for host in Headers(scope=scope).getlist("host"):
            if not self._knows(host):
                refusal = HttpError(
                    MISDIRECTED,
                    f"this server does not answer to the name {clean(host, MAX_HOST_CHARS)}",
                    remedy="if this is its name, add it to --allowed-hosts (SWARM_ALLOWED_HOSTS, allowed_hosts)",
                    code="unknown_host",
                )
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        if ANY in self._names:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:  # brackets around something that is not an address
            return False
        above = name.partition(".")[2]
        return name in self._names or f"{ANY}.{above}" in self._names or _cannot_be_owned(name)


def _cannot_be_owned(name: str) -> bool:
    """Return whether no stranger can own this name."""
    if not name or "." not in name or name.endswith(".localhost"):
        return bool(name)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class OriginForm:
    """Middleware: answers a target such as http://host/path as /path of that host, whatever the header says (RFC 9112,
    3.2.2). A client sends such targets if it takes this server for its proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope if scope["path"].startswith("/") else _in_origin_form(scope), receive, send)


def _in_origin_form(scope: Scope) -> Scope:
    try:
        target = urlsplit(scope["raw_path"].decode())
    except ValueError:  # brackets around something that is not an address
        return scope
    if target.scheme not in {"http", "https"}:
        return scope
    path = target.path or "/"
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    headers = [(b"host", target.netloc.encode()), *others]
    return {**scope, "path": unquote(path), "raw_path": path.encode(), "headers": headers}


class TrustedProxies:
    """Middleware: sets a request's client address. `trusted` has addresses, or networks such as 10.0.0.0/8."""

    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        self._app = app
        self._trusted = networks_of(trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._trusted and scope.get("client"):
            host, port = scope["client"]
            scope = {**scope, "client": (self._visitor(host, Headers(scope=scope)), port)}
        await self._app(scope, receive, send)

    def _visitor(self, host: str, headers: Headers) -> str:
        if not _is_in(_address(host), self._trusted):
            return host
        chains = [
            [part.strip() for part in ",".join(headers.getlist("x-forwarded-for")).split(",") if part.strip()],
            [_forwarded_for(part) for part in _elements(",".join(headers.getlist("forwarded")))],
        ]
        named = {self._last_untrusted(host, chain) for chain in chains if chain}
        # if the two headers differ, the visitor sent one of them and the proxy passed it on
        return named.pop() if len(named) == 1 else host

    def _last_untrusted(self, host: str, chain: Sequence[str]) -> str:
        """Return the last address that is not a trusted proxy's. At an entry that is not an address, return the address
        after it."""
        for part in reversed(chain):
            address = _address(part)
            if address is None:
                return host
            host = str(address)
            if not _is_in(address, self._trusted):
                return host
        return host


def networks_of(addresses: Sequence[str]) -> list[Network]:
    return [ipaddress.ip_network(each) for each in addresses]


def party_at(host: str, port: int, proxies: Sequence[Network]) -> str:
    """Return who counts as one party at the other end of a connection. Each connection of a proxy may be of another
    visitor, so it counts alone."""
    return f"{host} {port}" if _is_in(_address(host), proxies) else party_of(host)


def caller_of(scope: Scope) -> str:
    """Return the caller of a request for limits (see `party_of`)."""
    return party_of((scope.get("client") or ("", 0))[0])


def party_of(host: str) -> str:
    """Return who counts as one party at address `host`: the address, or for IPv6 its /64 network.

    The owner of one IPv6 address has the whole network.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return str(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(host)


def _is_in(address: Address | None, networks: Sequence[Network]) -> bool:
    return address is not None and any(address in network for network in networks)


def _elements(header: str) -> list[str]:
    """Return the elements of a Forwarded header. The last one is from the nearest proxy.

    If a quote does not end, the last element cannot be found, so no element is believed.
    """
    if header.count('"') % 2:
        return [""]
    return [part for part in _ELEMENT.findall(header) if part.strip()]


def _forwarded_for(element: str) -> str:
    """Return the address in one element of a Forwarded header (RFC 7239)."""
    named = (value for name, value in _PAIR.findall(element) if name.lower() == "for")
    return next(named, "").strip().strip('"')


def _address(text: str) -> Address | None:
    """Parse an address, with or without a port. Return None for anything else."""
    if match := _WITH_PORT.fullmatch(text):
        text = match[1] or match[2]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
