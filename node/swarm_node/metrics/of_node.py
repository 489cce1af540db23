"""What every daemon tells: itself, its network, its records, and what it relays. All read when somebody asks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import suppress

import psutil
from swarm.network.libp2p.libp2p_network import Libp2pNetwork
from swarm.network.traffic import PEER_CLASSES
from swarm_protocol.version import software_version

from swarm_node.metrics.metric_registry import Reading
from swarm_node.node import Node

STATES = ("starting", "seeding", "idle", "training", "serving", "gateway", "dashboard", "draining")


def read_node(node: Node) -> Iterator[Reading]:
    network = node.network
    about = {"version": software_version(), "network_id": network.network_id, "peer_id": network.peer_id}
    yield Reading("swarm_node_info", 1, about)
    yield Reading("swarm_node_num_peers", node.num_peers)
    yield Reading("swarm_node_start_time_seconds", node.started_at)
    state = "draining" if node.departure.leaving.is_set() else node.activity.state
    for each in (*STATES, "other"):
        yield Reading("swarm_node_state", each == (state if state in STATES else "other"), {"state": each})
    rtts_s = node.membership.all_known_rtts_s()
    for stat, of in (("min", min), ("median", statistics.median), ("max", max)):
        if rtts_s:
            yield Reading("swarm_peer_rtt_seconds", of(rtts_s), {"stat": stat})
    counters = node.membership.counters
    yield Reading("swarm_membership_publish_failures_total", counters.num_publish_failures)
    yield Reading("swarm_membership_records_malformed_total", counters.num_malformed)
    yield Reading("swarm_membership_records_dropped_total", counters.num_dropped)


def read_network(network: Libp2pNetwork) -> Iterator[Reading]:
    traffic, dht, relay = network.traffic, network.dht_counts, network.relay_counts
    for peer_class in PEER_CLASSES:
        peer = {"peer": str(peer_class)}
        yield Reading("swarm_network_sent_bytes_total", traffic.sent_bytes[peer_class], peer)
        yield Reading("swarm_network_received_bytes_total", traffic.received_bytes[peer_class], peer)
        yield Reading("swarm_network_num_connected_peers", traffic.num_connected[peer_class], peer)
    yield Reading("swarm_dht_num_records", dht.num_records)
    yield Reading("swarm_dht_num_peers", dht.num_peers)
    yield Reading("swarm_dht_records_refused_total", dht.num_refused)
    yield Reading("swarm_relay_num_reservations", relay.reservations)
    yield Reading("swarm_relay_num_circuits", relay.circuits)
    yield Reading("swarm_relay_bytes_total", relay.relayed_bytes)
    for reason, number in (("refused", relay.num_refused), ("failed", relay.num_failed), ("idle", relay.num_idle)):
        yield Reading("swarm_relay_refusals_total", number, {"reason": reason})
    with suppress(psutil.Error):  # it has just ended, and so will we
        yield Reading("swarm_libp2p_memory_bytes", psutil.Process(network.daemon_pid).memory_info().rss)
