"""Defines the messages by which two nodes find a direct path to each other: observed addresses, dial back and
introductions."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.dht_messages import Addrs
from swarm_protocol.identity import PeerId
from swarm_protocol.proto import paths_pb2
from swarm_protocol.wire import WireMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class PathAddrs(WireMessage):
    """A request to dial back these addresses of the asker."""

    PROTO = paths_pb2.PathAddrs
    MAX_BYTES = limits.MAX_PATH_MESSAGE_BYTES

    addrs: Addrs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction(WireMessage):
    """A request for a direct path.

    To a relay, `peer_id` is the peer that the asker wants to reach, and `addrs` are further addresses of the asker.
    From a relay, `peer_id` is the asker, and `addrs` are addresses at which the relay sees it, or that share their IP.
    """

    PROTO = paths_pb2.Introduction
    MAX_BYTES = limits.MAX_PATH_MESSAGE_BYTES

    peer_id: PeerId
    addrs: Addrs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PathAnswer(WireMessage):
    """The answer to a question about paths: whether it was `agreed` to, and addresses.

    Depending on the method, these are the addresses at which the asker is seen, the asker's addresses that answered a
    dial, or the addresses of the wanted peer.
    """

    PROTO = paths_pb2.PathAnswer
    MAX_BYTES = limits.MAX_PATH_MESSAGE_BYTES

    agreed: bool = False
    addrs: Addrs = ()
