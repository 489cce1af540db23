"""Which names this server answers to, against DNS rebinding: a stranger's web page that lets its own name lead here.

A browser sends the name that the page has, so it tells. An address, or a name without a dot such as `localhost` or a
neighbour's, is no stranger's, and the address that is listened on is ours; every other name has to be given.
Starlette's TrustedHostMiddleware would want each address by name and says no without a remedy.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm_node.formatting import clean
from swarm_node.settings.config import Config

ANY = "*"
MAX_TOLD_CHARS = 100
MISDIRECTED = 421


class KnownHosts:
    """Middleware: 421 in words for a name that is not ours. A client that sends none is no browser."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._names = frozenset({config.host.lower(), *config.allowed_hosts})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).getlist("host") if scope["type"] == "http" else []
        for host in given:
            if not self._knows(host):
                await _refusal(host)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        if ANY in self._names:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:  # of brackets around what is no address
            return False
        above = name.partition(".")[2]
        return name in self._names or f"{ANY}.{above}" in self._names or _is_nobodys(name)


def _is_nobodys(name: str) -> bool:
    """Whether no stranger can own it."""
    if not name or "." not in name or name.endswith(".localhost"):
        return bool(name)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(host: str) -> JSONResponse:
    told = clean(host, MAX_TOLD_CHARS).encode(errors="replace").decode()
    error = {
        "message": f"this server does not answer to the name {told}",
        "remedy": "if it is its own, name it in --allowed-hosts (SWARM_ALLOWED_HOSTS, allowed_hosts)",
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_host",
    }
    return JSONResponse({"error": error}, status_code=MISDIRECTED)
