"""What the dashboard sends to browsers: pages and the files they need, packed once, under one strict policy."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib import resources

from fastapi import Request, Response

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Body:
    """What goes out, as it is and compressed."""

    plain: bytes
    packed: bytes
    kind: str
    status: int = 200

    @classmethod
    def of(cls, data: bytes, kind: str, status: int = 200) -> Body:
        return cls(data, gzip.compress(data, 5, mtime=0), kind, status)

    def answer(self, request: Request) -> Response:
        packs = "gzip" in request.headers.get("accept-encoding", "")
        headers = {**HEADERS, "cache-control": "no-cache", "vary": "accept-encoding", "content-type": self.kind}
        if packs:
            headers["content-encoding"] = "gzip"
        return Response(self.packed if packs else self.plain, self.status, headers)


def static_files() -> dict[str, Body]:
    """By name, read once: the folder is part of the package."""
    folder = resources.files("swarm_node.dashboard") / "static"
    files = {file.name: file for file in folder.iterdir() if file.is_file()}
    return {
        name: Body.of(file.read_bytes(), kind)
        for name, file in files.items()
        for suffix, kind in KINDS.items()
        if name.endswith(suffix)
    }
