"""One printable word for a secret that people copy: a prefix, and base64 of the content with a check for typing errors.

Used by the invitations to private networks and to runs.
"""

from __future__ import annotations

import base64
import hashlib

from swarm_protocol.errors import ConfigError

_CHECK_BYTES = 4


def to_word(prefix: str, content: bytes) -> str:
    """Return `content` as one word, which `from_word` reads."""
    check = hashlib.sha256(content).digest()[:_CHECK_BYTES]
    return prefix + base64.urlsafe_b64encode(content + check).decode().rstrip("=")


def from_word(prefix: str, text: str, *, max_chars: int, remedy: str) -> bytes:
    """Return the content of a word; white space in it is ignored. Raises ConfigError, of which no word repeats the
    text."""
    word = "".join(text.split())
    if not word.startswith(prefix):
        raise ConfigError(f"this is not an invitation, which begins with {prefix}", remedy=remedy)
    if len(word) > max_chars:
        raise ConfigError(f"this invitation has more than {max_chars} characters", remedy=remedy)
    body = word.removeprefix(prefix)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except ValueError:  # another alphabet, or a length that no bytes have
        data = b""
    content, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if hashlib.sha256(content).digest()[:_CHECK_BYTES] != check:
        raise ConfigError("this invitation is damaged: characters are missing or changed", remedy=remedy)
    return content
