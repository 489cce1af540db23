"""Holds the parts that invitations to private networks and to runs share: the link of an invitation key, and the
printable word.

A certificate names the invitation key, which is in the word. The holder of the word signs a link from that key to its
own peer id. The word has a prefix, then base64 of the content with a checksum against typing errors.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import TypeVar

from swarm_protocol.envelope import Envelope, seal_now
from swarm_protocol.errors import ConfigError, PeerViolation
from swarm_protocol.identity import KEY_BYTES, Identity

_CHECK_BYTES = 4
T = TypeVar("T")


def check_key(key: bytes, certificate: Envelope) -> None:
    """Check that the certificate names this invitation key, which is empty for a bound certificate. Raises
    ValueError."""
    if key and (len(key) != KEY_BYTES or Identity(key).peer_id != certificate.subject):
        raise ValueError("its key is another's")


def link_to(peer_id: str, key: bytes, certificate: Envelope, purpose: str) -> bytes:
    """Sign, with an invitation key, that its certificate is for `peer_id`, for as long as the certificate holds."""
    return seal_now(
        Identity(key),
        certificate.network_id,
        purpose=purpose,
        subject=peer_id,
        payload=b"",
        now=certificate.issued_at,
        lifetime_s=certificate.expires_at - certificate.issued_at,
    )


def to_word(prefix: str, content: bytes) -> str:
    """Return `content` as one word, which `from_word` reads."""
    check = hashlib.sha256(content).digest()[:_CHECK_BYTES]
    return prefix + base64.urlsafe_b64encode(content + check).decode().rstrip("=")


def from_word(prefix: str, text: str, decode: Callable[[bytes], T], *, max_chars: int, remedy: str) -> T:
    """Decode the content of a word with `decode`; white space in it is ignored. Raises ConfigError, which never quotes
    the text, since that is a secret."""
    word = "".join(text.split())
    if not word.startswith(prefix):
        raise ConfigError(f"this is not an invitation, which begins with {prefix}", remedy=remedy)
    if len(word) > max_chars:
        raise ConfigError(f"this invitation has more than {max_chars} characters", remedy=remedy)
    body = word.removeprefix(prefix)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except ValueError:  # another alphabet, or an impossible length
        data = b""
    content, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if hashlib.sha256(content).digest()[:_CHECK_BYTES] != check:
        raise ConfigError("this invitation is damaged: characters are missing or changed", remedy=remedy)
    try:
        return decode(content)
    except PeerViolation as violation:
        raise ConfigError(f"this invitation is damaged: {violation.message}", remedy=remedy) from None
