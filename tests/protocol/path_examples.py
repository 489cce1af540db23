"""Examples of the messages by which nodes find a direct path."""

from __future__ import annotations

from swarm_protocol.identity import Identity
from swarm_protocol.path_messages import Introduction, PathAddrs, PathAnswer

PEER = Identity(bytes([3]) * 32).peer_id

EXAMPLES: tuple[object, ...] = (
    PathAddrs(addrs=("/ip4/192.0.2.7/tcp/4001", "/ip6/2001:db8::7/tcp/4001")),
    PathAddrs(),
    Introduction(peer_id=PEER, addrs=("/ip4/192.0.2.7/tcp/4001",)),
    Introduction(peer_id=PEER),
    PathAnswer(agreed=True, addrs=("/ip4/192.0.2.7/tcp/4001",)),
    PathAnswer(),
)
