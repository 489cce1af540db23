"""Nodes as they say they are, and the sums over them. Pure: records in, views out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median

from swarm_protocol.records import NodeRecord

from swarm_node.dashboard.memo import Made
from swarm_node.dashboard.view_sanitizing import shown
from swarm_node.dashboard.views import NodeView, PresenceView
from swarm_node.formatting import REACHES, reach
from swarm_node.network_snapshot import Listed

MONTH_S = 30 * 86400.0


def node_view(peer_id: str, record: NodeRecord) -> NodeView:
    """All that stays as it is until the node signs another record: its age is that of the next look."""
    return NodeView(
        peer_id=peer_id,
        name=shown(record.name),
        version=shown(record.version),
        device=shown(record.device),
        state=record.state,
        reachability=reach(record.reachability, record.addrs),
        role=record.role,
        memory_bytes=record.memory_bytes,
        free_memory_bytes=record.free_memory_bytes,
        prefill_tokens_per_s=record.prefill_tokens_per_s or None,
        decode_tokens_per_s=record.decode_tokens_per_s or None,
        training_tokens_per_s=record.training_tokens_per_s or None,
        started_at=record.started_at,
        age_s=0.0,
        models=tuple(map(shown, record.models)),
        runs=tuple(map(shown, record.runs)),
    )


def node_views(nodes: Listed[NodeRecord], at: float, made: Made[NodeRecord, NodeView]) -> dict[str, NodeView]:
    """`made` is of the look before, by `node_view`."""
    return {
        # nobody has started tomorrow, whatever their clock says
        peer_id: view.model_copy(update={"started_at": min(view.started_at, at), "age_s": nodes.age_s(peer_id)})
        for peer_id, view in made.of(nodes.records).items()
    }


def counted(nodes: Iterable[NodeView]) -> tuple[dict[str, int], dict[str, int]]:
    """How many there are by state and, of those that are alive, by reachability."""
    by_state = Counter(node.state for node in nodes)
    by_reachability = Counter(node.reachability for node in nodes if node.state == "alive")
    return (
        {state: by_state[state] for state in ("alive", "leaving")},
        {kind: by_reachability[kind] for kind in REACHES},
    )


def num_volunteers(nodes: Iterable[NodeView]) -> int:
    """Count the nodes that are alive and serve, train or wait for work."""
    return sum(node.state == "alive" and bool(node.role == "volunteer" or node.models or node.runs) for node in nodes)


def first_token_s(nodes: Mapping[str, NodeRecord]) -> tuple[float | None, float | None]:
    """The gateways' times to a first token, p50 and p95: of several gateways the median of what each says."""
    alive = [record for record in nodes.values() if record.state == "alive"]
    p50s = [record.first_token_p50_s for record in alive if record.first_token_p50_s is not None]
    p95s = [record.first_token_p95_s for record in alive if record.first_token_p95_s is not None]
    return median(p50s) if p50s else None, median(p95s) if p95s else None


def uptime_share(presence: Iterable[PresenceView], at: float) -> float | None:
    """Of the time since a node was first seen, at most 30 days. None if it was never seen, or only just."""
    periods = [(max(period.since, at - MONTH_S), period.until or at) for period in presence]
    first = min((since for since, _ in periods), default=at)
    there_s = sum(max(0.0, until - since) for since, until in periods)
    return min(1.0, there_s / (at - first)) if at > first else None
