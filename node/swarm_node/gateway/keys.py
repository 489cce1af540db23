"""The file of API keys, and whom a key belongs to.

One key a line: `name key [requests_per_min] [tokens_per_min]`; 0 or nothing: the gateway's own rates; `#` begins a
comment. Only hashes are kept, and all are compared in constant time. A file that changes is read again; one that has
become unusable changes nothing, with a warning.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarm_protocol.errors import ConfigError, reason_of

from swarm_node.gateway import http_limits
from swarm_node.http.rate_limit import Rates

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_KEY = re.compile(rf"[!-~]{{{http_limits.MIN_KEY_CHARS},{http_limits.MAX_KEY_CHARS}}}")
_RATE = re.compile(r"\d{1,9}")
_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One API key, known by its digest alone, with its own rates."""

    name: str
    digest: bytes
    rates: Rates


class KeyRing:
    """The keys of a file. Raises ConfigError if it cannot be used, with the line but never the key."""

    def __init__(self, path: Path, now_s: Callable[[], float]) -> None:
        self._path = path
        self._now_s = now_s
        self._checked_s = now_s()
        self._keys, self._stamp = _read(path)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret."""
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
        try:
            if _stamp(self._path.stat()) != self._stamp:
                self._keys, self._stamp = _read(self._path)
                logger.info("read %d API keys from %s", len(self._keys), self._path)
        except (OSError, ConfigError) as error:
            logger.warning("the API keys stay as they were: %s", error)


def _read(path: Path) -> tuple[list[Key], _Stamp]:
    try:
        # without waiting for a writer, should it be a pipe
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
            raise ConfigError(f"{path} has the same {what} twice", remedy="let each key have a line and a name")
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
            remedy=f"write: name key [requests_per_min] [tokens_per_min], the key of {http_limits.MIN_KEY_CHARS} to "
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


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino
