"""The parts of a node's status that tell of the peers that it is connected to, and of what it relays for others.

The network counts the bytes and knows the paths, the membership measures the round trips; here they are put together
for the control socket, the node's record, and its dashboard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swarm.network.membership import Membership
from swarm.network.relay.relay import RelayCounts
from swarm.network.traffic import PeerPath
from swarm_protocol import limits
from swarm_protocol.control_messages import MAX_COUNT, PeerStatus, RelayStatus
from swarm_protocol.records import PathCounts

RTT_TIMEOUT_S = 2.0
"""Time for connected peers to answer. A round trip that takes longer is measured when it is asked for again."""


def count_paths(paths: Mapping[str, PeerPath]) -> PathCounts:
    """Return how many peers are reached over each kind of path."""
    counts = Counter(path.kind for path in paths.values())
    return PathCounts(
        direct=counts["direct"],
        dialled_back=counts["dialled back"],
        punched=counts["punched"],
        relayed=counts["relayed"],
    )


async def list_peers(
    paths: Mapping[str, PeerPath], membership: Membership, names: Mapping[str, str]
) -> tuple[PeerStatus, ...]:
    """Return the MAX_CONTROL_PEERS peers of `paths` with the most bytes, those with the most first.

    Round trips that nobody has measured of late are measured now, of a few peers at once; `names` are by peer id.
    """
    busiest = sorted(paths, key=lambda peer_id: -(paths[peer_id].sent_bytes + paths[peer_id].received_bytes))
    listed = busiest[: limits.MAX_CONTROL_PEERS]
    rtts_ms = await membership.rtts_ms(listed, max_peers=len(listed), timeout_s=RTT_TIMEOUT_S)
    return tuple(
        PeerStatus(
            peer_id=peer_id,
            name=names.get(peer_id, ""),
            path=paths[peer_id].kind,
            rtt_ms=min(rtts_ms[peer_id], limits.MAX_RTT_MS) if peer_id in rtts_ms else None,
            sent_bytes=paths[peer_id].sent_bytes,
            received_bytes=paths[peer_id].received_bytes,
        )
        for peer_id in listed
    )


def relay_status(counts: RelayCounts | None) -> RelayStatus | None:
    """Return what a node relays for others; None: it does not relay."""
    if counts is None:
        return None
    return RelayStatus(
        num_reservations=counts.reservations,
        num_circuits=counts.circuits,
        relayed_bytes=counts.relayed_bytes,
        num_refused=min(sum(counts.refusals.values()) - counts.refusals["idle"], MAX_COUNT),
        throttled_s=min(counts.throttled_s, limits.MAX_TIME_S),
    )
