"""Examples of the messages between nodes of the record DHT."""

from __future__ import annotations

from swarm_protocol.dht_messages import (
    Contact,
    FindRequest,
    FindResponse,
    Found,
    StoreRequest,
    StoreResponse,
    dht_id_of,
)
from swarm_protocol.identity import Identity

PEERS = tuple(Identity(bytes([number]) * 32).peer_id for number in (1, 2))
ADDRS = ("/ip4/192.0.2.7/tcp/4001", f"/ip4/192.0.2.8/tcp/4001/p2p/{PEERS[1]}/p2p-circuit")
CONTACTS = (Contact(peer_id=PEERS[0], addrs=ADDRS), Contact(peer_id=PEERS[1]))

EXAMPLES: tuple[object, ...] = (
    FindRequest(keys=(dht_id_of("nodes/3"), dht_id_of(PEERS[0])), only_peers=True),
    FindRequest(addrs=ADDRS, max_records=16),
    FindRequest(),
    FindResponse(found=(Found(records=(b"one", b"two"), peers=CONTACTS), Found()), addrs=ADDRS),
    FindResponse(),
    FindResponse(found=(Found(records=(b"one",)),), is_cut=True),
    StoreRequest(record=b"an envelope"),
    StoreResponse(held=True),
    StoreResponse(held=False),
)
