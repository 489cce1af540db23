"""The secret that the members of a private network share: it hides names and greetings from everybody else.

It opens no door: a node that has it still needs a certificate (`network_invitation`). It makes what strangers can see,
the names of protocols and packets in a local network, say nothing. Keys for its uses are derived by HMAC-SHA-256; what
is sealed is encrypted and authenticated with ChaCha20-Poly1305 (RFC 8439) under a random nonce.
"""

from __future__ import annotations

import base64
import hmac
import os
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from swarm_protocol.errors import PeerViolation

SECRET_BYTES = 32
NONCE_BYTES = 12
SEAL_BYTES = NONCE_BYTES + 16
"""Number of bytes by which a sealed message is longer than its content."""

_NUM_NAME_CHARS = 32
_MAX_REMEMBERED_NAMES = 4096


class NetworkSecret:
    """32 random bytes, and what follows from them. `repr` does not show them."""

    __slots__ = ("_key", "_names", "_secret")

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError for another length."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a network's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._names = _derived(secret, b"names")
        self._key = ChaCha20Poly1305(_derived(secret, b"seal"))

    def protocol_name(self, name: str) -> str:
        """Return the name under which a method is served on the wire: 160 bits that only the secret leads to."""
        return _hidden(self._names, name)

    @property
    def discovery_name(self) -> str:
        """The name that stands for the network in multicast DNS."""
        return _hidden(self._names, "multicast DNS").removeprefix("/")

    def seal(self, content: bytes, about: bytes) -> bytes:
        """Encrypt `content` for the members; `about` is not sent, and has to be the same to open it."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._key.encrypt(nonce, content, about)

    def open(self, sealed: bytes, about: bytes) -> bytes:
        """Return the content. Raises PeerViolation for what was not sealed with this secret, about this."""
        try:
            return self._key.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about)
        except (InvalidTag, ValueError):
            raise PeerViolation("a message was not sealed with the secret of this network") from None


def _derived(secret: bytes, use: bytes) -> bytes:
    return hmac.digest(secret, b"swarm private network: " + use, "sha256")


@lru_cache(maxsize=_MAX_REMEMBERED_NAMES)
def _hidden(key: bytes, name: str) -> str:
    digest = hmac.digest(key, name.encode(), "sha256")
    return "/" + base64.b32encode(digest).decode()[:_NUM_NAME_CHARS].lower()
