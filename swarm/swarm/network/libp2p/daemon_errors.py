"""Translates errors of the libp2p daemon, and of the unary connection, to PeerUnreachable, PeerRefused or `NotServed`.

The daemon gives its errors no codes, so their texts decide. Pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from swarm_protocol.errors import PeerRefused, PeerUnreachable

from swarm.network.interface import NotServed, too_many_calls
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.unary_connection import BUSY, NOT_SERVED, RemoteCallError, UnaryConnectionClosed

CONTROL_FAILURES = (ControlError, OSError, asyncio.IncompleteReadError)
"""The errors of a request to the daemon: the daemon's own error, its death, or a lack of resources of this process,
such as open files. The unary connection reports the daemon's death, so these errors need not end any other task."""

_DAEMON_ENDED = (ConnectionError, FileNotFoundError)
"""The errors that operating systems raise if the daemon has ended."""

NOT_DIALLED = ("failed to dial", "no addresses", "dial backoff", "all dials failed")
"""Parts of the daemon's errors for a peer that it did not reach, so that nothing was sent."""

WITHHELD = "this node was told of too many peers at its IP, and does not dial it for a minute"
"""The error of a dial that `paths.dialler` does not make, which says nothing about the peer."""

STREAM_RESET = "stream reset"
"""Part of the daemon's error for a stream that the other side reset, or whose connection ended."""

_REASONS = (
    ("NO_RESERVATION", "the peer has no reservation at its relay: it has left, or is about to return"),
    ("RESOURCE_LIMIT_EXCEEDED", "the peer's relay is full"),
    ("error opening relay circuit", "the peer's relay does not reach it"),
    ("connection refused", "connection refused: no program listens there"),
    ("no such host", "the peer's host name is not known"),
    ("no route to host", "no route to that host"),
    ("network is unreachable", "no route to that network"),
    ("i/o timeout", "no answer: there is a firewall, or the machine is off"),
    ("context deadline exceeded", "no answer: there is a firewall, or the machine is off"),
    ("dial backoff", "a dial failed a moment ago"),
    ("failed to negotiate security protocol", "the program that answers there is no libp2p host"),
    ("routing: not found", "no address of the peer is known"),
    ("failed to find any peer in table", "no address of the peer is known"),
    (STREAM_RESET, "the peer broke off"),
    ("no addresses", "no address of the peer is known"),
)


def translate(error: Exception, peer_id: str) -> PeerUnreachable | PeerRefused | NotServed:
    """Return Swarm's error for an error of the daemon or of the unary connection."""
    text = str(error)
    if "protocols not supported" in text or (isinstance(error, RemoteCallError) and text == NOT_SERVED):
        return NotServed(peer_id)
    if isinstance(error, RemoteCallError) and text == BUSY:
        return too_many_calls(peer_id)
    if isinstance(error, ControlError):
        kind = PeerRefused if text == WITHHELD else PeerUnreachable
        return kind(f"peer {peer_id} cannot be reached ({dial_failure(text)})", peer_id=peer_id)
    if isinstance(error, RemoteCallError):
        return PeerUnreachable(f"peer {peer_id} broke off", peer_id=peer_id)
    if isinstance(error, OSError) and not isinstance(error, _DAEMON_ENDED):
        return PeerUnreachable(
            f"this node cannot ask its libp2p daemon ({error.strerror or error})",
            remedy="check the limit of open files (ulimit -n) and the free memory of this machine",
            peer_id=peer_id,
        )
    return PeerUnreachable("the libp2p daemon has ended", remedy="restart this node or program", peer_id=peer_id)


@contextmanager
def translating(peer_id: str) -> Iterator[None]:
    """Raise Swarm's error in place of one of the daemon or of the unary connection. `peer_id` is the peer that was
    asked, or this node if only its daemon was."""
    try:
        yield
    except (*CONTROL_FAILURES, UnaryConnectionClosed, RemoteCallError) as error:
        raise translate(error, peer_id) from None


def dial_failure(text: str) -> str:
    """Return the reason of a failed dial in words, from the daemon's error."""
    if "remote key matches " in text:
        return f"another peer answers there: {text.partition('remote key matches ')[2].split(maxsplit=1)[0]}"
    for sign, reason in _REASONS:
        if sign in text:
            return reason
    return " ".join(text.split())[:200]
