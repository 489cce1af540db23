"""What the nodes of the record DHT say to each other."""

from __future__ import annotations

from swarm_protocol.dht_messages import FindRequest, FindResponse, Found, StoreRequest, StoreResponse, place_of
from swarm_protocol.identity import Identity

PEERS = tuple(Identity(bytes([number]) * 32).peer_id for number in (1, 2))

EXAMPLES: tuple[object, ...] = (
    FindRequest(keys=(place_of("nodes/3"), place_of(PEERS[0])), only_peers=True),
    FindRequest(),
    FindResponse(found=(Found(records=(b"one", b"two"), peers=PEERS), Found())),
    FindResponse(),
    StoreRequest(record=b"an envelope"),
    StoreResponse(held=True),
    StoreResponse(held=False),
)
