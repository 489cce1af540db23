"""Examples of each message between a node's daemon and the commands on its machine."""

from __future__ import annotations

from swarm_protocol.control_messages import (
    LeaveReply,
    LeaveRequest,
    LimitStatus,
    PeerStatus,
    RelayStatus,
    ServingStatus,
    SpotCheckStatus,
    StatusReply,
    StatusRequest,
    TrainingStatus,
)
from swarm_protocol.records import PathCounts

EXAMPLES: tuple[object, ...] = (
    StatusRequest(),
    StatusReply(
        peer_id="12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq",
        name="Ada's desk",
        version="0.1.0",
        pid=4711,
        uptime_s=12.5,
        network_id="swarm-main",
        addrs=("/ip4/127.0.0.1/tcp/4001",),
        reachability="public",
        num_peers=4,
        state="training",
        training=TrainingStatus(
            run="stdlib-1f00ba44",
            outer_step=2,
            num_outer_steps=8,
            loss=2.5,
            tokens_per_s=900.0,
            waits_for="7R3pq1",
            waits_s=3.5,
            steps_left=3,
            probation_steps=4,
            endorsed_step=2,
            other_history="another state of outer step 1 is shown by …7R3pq1",
        ),
        serving=ServingStatus(model="stdlib-1m", start=0, end=2, num_sessions=1, tokens_per_s=30.0),
        memory_bytes=2**30,
        relaying=RelayStatus(num_reservations=3, num_circuits=2, relayed_bytes=10**9, num_refused=4, throttled_s=1.5),
        spot_checks=SpotCheckStatus(
            num_passed=40, num_unchecked=2, barred=("12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi",)
        ),
        limits=LimitStatus(
            max_upload_bytes_per_s=2_500_000, upload_bytes_per_s=153_000.5, hours=("22:00-07:00", "12:00-13:00")
        ),
        paths=PathCounts(direct=1, dialled_back=1),
        peers=(
            PeerStatus(
                peer_id="12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi",
                name="Bob's attic",
                path="dialled back",
                rtt_ms=23.5,
                sent_bytes=2**20,
                received_bytes=5,
            ),
            PeerStatus(peer_id="12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq", path="direct"),
        ),
    ),
    LeaveRequest(drain=True),
    LeaveReply(pid=4711, seconds=30.0),
)
