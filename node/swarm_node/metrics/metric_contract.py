"""Every metric: its kind, labels, meaning, and when it changes. The only source of docs/reference/metrics.md.

Dashboards and alerts rely on these names: a metric may be added, but never renamed or given another meaning. Names and
units follow the conventions of Prometheus, and vLLM's names where both measure the same. No label has a value that a
client or a peer can choose. `docs/contracts.py` writes `docs/reference/metrics.md`, and a test compares the two. The
other modules of this package set the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

MetricKind = Literal["counter", "gauge", "histogram"]

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
_REQUEST_S = (0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0, 1800.0)
_ROUND_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric. `about` is the help text in Prometheus, and `moves` says when the value changes.

    `labels` maps a label's name to a description of its values. `buckets` are a histogram's upper bounds.
    """

    kind: MetricKind
    about: str
    moves: str
    labels: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


MetricGroup: TypeAlias = Mapping[str, MetricSpec]


def _counter(about: str, moves: str, **labels: str) -> MetricSpec:
    return MetricSpec(kind="counter", about=about, moves=moves, labels=labels)


def _gauge(about: str, moves: str, **labels: str) -> MetricSpec:
    return MetricSpec(kind="gauge", about=about, moves=moves, labels=labels)


def _histogram(about: str, moves: str, buckets: tuple[float, ...], **labels: str) -> MetricSpec:
    return MetricSpec(kind="histogram", about=about, moves=moves, labels=labels, buckets=buckets)


_PATH = (
    "how the connection came about: `direct` (an ordinary dial), `dialled_back` (one side cannot be dialled, so it "
    "dialled the other on request), `punched` (hole punching between two NATs) or `relayed` (through relays only)"
)
_NOW = "computed at each scrape"

NODE: MetricGroup = {
    "swarm_node_info": _gauge(
        "Always 1; the labels describe the daemon.",
        "never",
        version="software version",
        network_id="network that the daemon is in",
        peer_id="the daemon's own peer id",
    ),
    "swarm_node_state": _gauge(
        "1 for the daemon's current state, 0 for all others.",
        "when the daemon starts or finishes a kind of work; `draining` once it was told to leave",
        state="`starting`, `seeding`, `idle`, `training`, `serving`, `gateway`, `dashboard`, `draining`, `paused`, or "
        "`other`",
    ),
    "swarm_node_num_peers": _gauge(
        "Live nodes known to this node, itself included; 0 until it has joined its network.", "every 10 s, from the DHT"
    ),
    "swarm_node_num_convicted_servers": _gauge(
        "Servers that this node does not use because evidence convicts them of a wrong proof.",
        "when this node finds or receives evidence, and when a conviction expires; only on nodes that serve or use "
        "models",
    ),
    "swarm_node_server_evidence_refused_total": _counter(
        "Evidence about servers that other nodes sent and that proved nothing.",
        "when such evidence arrives; this node accepts no more evidence from its sender",
    ),
    "swarm_node_start_time_seconds": _gauge(
        "Unix time at which the daemon joined its network; absent before.", "never"
    ),
    "swarm_libp2p_memory_bytes": _gauge("Resident memory of the libp2p daemon, a child process.", _NOW),
    "swarm_peer_rtt_seconds": _gauge(
        "Round-trip times to peers, measured in the last three minutes; absent if there are none.",
        "when a round trip is measured: servers do so every 20 s, gateways before they choose a chain",
        stat="`min`, `median` or `max` over the peers",
    ),
    "swarm_peer_path_rtt_seconds": _gauge(
        "Median round-trip time to connected peers whose round-trip time is known; absent if there are none.",
        "when connections or round-trip times change; includes round trips derived from traffic",
        peer=_PATH,
    ),
}
NETWORK: MetricGroup = {
    "swarm_link_receive_bytes_per_second": _gauge(
        "Receive rates of large messages from peers, measured in the last ten minutes; absent if there are none.",
        "with each transfer of 128 KiB or more: a peer's rate is the median of its last eight transfers",
        stat="`min`, `median` or `max` over the peers",
    ),
    "swarm_network_sent_bytes_total": _counter(
        "Bytes of calls, responses and streams sent, without framing and encryption.",
        "when bytes are handed to libp2p; traffic relayed for others is not counted",
        peer=_PATH,
    ),
    "swarm_network_received_bytes_total": _counter(
        "Bytes of calls, responses and streams received, without framing and encryption.",
        "when bytes arrive; traffic relayed for others is not counted",
        peer=_PATH,
    ),
    "swarm_network_num_connected_peers": _gauge("Peers with an open connection.", "checked every 3 s", peer=_PATH),
    "swarm_dht_num_records": _gauge(
        "Signed records that this node stores for the DHT.", "when nodes publish records and when records expire"
    ),
    "swarm_dht_num_peers": _gauge("Peers in the DHT's routing table.", "when peers are added or removed"),
    "swarm_dht_records_refused_total": _counter(
        "Invalid records that other nodes tried to store on this node.",
        "when a record is unsigned, signed by another key, too large, expired or dated in the future; the cause is a "
        "wrong clock, another version or an attack",
    ),
    "swarm_membership_publish_failures_total": _counter(
        "This node's own records that no peer stored in time; each is retried.",
        "while this node has no peers or is cut off",
    ),
    "swarm_membership_records_malformed_total": _counter(
        "Records of other nodes with a valid signature and invalid content.", "when a lookup finds a new one"
    ),
    "swarm_membership_records_dropped_total": _counter(
        "Records of other nodes dropped because there were too many of one kind.",
        "when one kind has more than 4,096 signers, or 4 MiB",
    ),
}
RELAY: MetricGroup = {
    "swarm_relay_num_reservations": _gauge(
        "Nodes that other nodes reach through this one.", "when reservations are made or end"
    ),
    "swarm_relay_num_circuits": _gauge(
        "Open connections that this node relays for others.", "when circuits open or close"
    ),
    "swarm_relay_bytes_total": _counter("Bytes relayed for others, in both directions.", "when bytes are forwarded"),
    "swarm_relay_refusals_total": _counter(
        "Reservations and circuits that were refused or closed by this relay.",
        "`refused`: the relay is full, or the target has no reservation; `stranger`: the peer is of another network; "
        "`failed`: the target did not accept the circuit; `idle`: closed because no data was sent",
        reason="`refused`, `stranger`, `failed` or `idle`",
    ),
    "swarm_relay_throttled_seconds_total": _counter(
        "Total time that circuits waited because of the relay's rate limit.",
        "while the traffic exceeds `--relay-rate`",
    ),
}
SERVER: MetricGroup = {
    "swarm_server_num_requests_running": _gauge("Sessions with a step in the current forward pass.", _NOW),
    "swarm_server_num_requests_waiting": _gauge(
        "Sessions with a step that waits for its first forward pass, or for the next one.", _NOW
    ),
    "swarm_server_num_sessions": _gauge("Open sessions, idle ones included.", "when sessions open or close"),
    "swarm_server_num_lanes": _gauge(
        "Connections from clients and from the preceding servers of chains.", "when connections open or close"
    ),
    "swarm_server_kv_cache_usage_perc": _gauge(
        "Reserved share of the KV cache, from 0 to 1, as in vLLM.", "when sessions open or close"
    ),
    "swarm_server_backlog_bytes": _gauge("Bytes of inputs that were received and not computed yet.", _NOW),
    "swarm_server_start_block": _gauge("First block served.", "when the server moves to other blocks"),
    "swarm_server_end_block": _gauge("One past the last block served.", "when the server moves to other blocks"),
    "swarm_server_prompt_tokens_total": _counter(
        "Positions computed in steps of several positions: prompts, and replays after a failure.",
        "after each such step",
    ),
    "swarm_server_generation_tokens_total": _counter(
        "Positions computed in steps of one position, and drafts that were right: generated tokens, and prompts of one "
        "token.",
        "after each such step",
    ),
    "swarm_server_step_seconds": _histogram(
        "Duration of one step of one session on this server.",
        "after each step; `queue`: from arrival to the start of its first forward pass; `compute`: in forward passes",
        _STEP_S,
        phase="`queue` or `compute`",
        step="`prompt` (several positions) or `generation` (one, with any drafts)",
    ),
    "swarm_server_challenges_total": _counter(
        "Challenges sent to other servers of a published model, each to prove possession of one chunk.",
        "about every 90 s",
        outcome="`proven`, `failed` or `unanswered`",
    ),
    "swarm_server_challenge_bytes_total": _counter(
        "Bytes received in answers to these challenges.", "about every 90 s, by 65 KiB at most"
    ),
    "swarm_server_refusals_total": _counter(
        "Sessions and connections that this server refused.",
        "`busy`: no capacity at present; `never`: the request cannot be served here; `violation`: the client broke "
        "the protocol; `lanes`: too many connections",
        reason="`busy`, `never`, `violation` or `lanes`",
    ),
    "swarm_server_move_failures_total": _counter(
        "Failed moves to other blocks; the server keeps its current blocks.", "when the new blocks cannot be loaded"
    ),
}
TRAINER: MetricGroup = {
    "swarm_link_num_slow": _gauge(
        "Members, or links between two members, that were slower than the others in four rounds in a row.",
        "every 10 s, from the reports of the run's members",
        kind="`sender`, `receiver` or `link`",
    ),
    "swarm_link_own_slowdown": _gauge(
        "Factor by which this member's transfers are slower than the run's usual ones; 1 means not slower.",
        "every 10 s, from the reports of the run's members",
        direction="`send` or `receive`",
    ),
    "swarm_trainer_outer_step": _gauge("Committed outer step of this member's state.", "with each committed step"),
    "swarm_trainer_num_outer_steps": _gauge("Total outer steps of the run.", "never"),
    "swarm_trainer_loss": _gauge("Mean training loss of the group, weighted by tokens.", "with each committed step"),
    "swarm_trainer_validation_loss": _gauge(
        "Loss on held-out data.", "when this member measures it, as the run's `validation_interval` says"
    ),
    "swarm_trainer_held_out_score": _gauge(
        "Moving average of the change that contributions make to the held-out loss, in nats a step; positive values "
        "are improvements. Absent before the first measurement.",
        "with each committed step",
        stat="`own`: this member's; `min` or `median`: over all trainers",
    ),
    "swarm_trainer_group_size": _gauge("Members of the last committed round.", "with each committed step"),
    "swarm_trainer_tokens_per_second": _gauge(
        "Training speed of this member in its last interval.", "after each interval"
    ),
    "swarm_trainer_tokens_total": _counter("Tokens that this member trained on.", "after each interval"),
    "swarm_trainer_rounds_total": _counter(
        "Attempts at outer steps, by result.",
        "when an attempt ends; after `aborted` the committed state is unchanged and the interval's work is kept",
        result="`committed` or `aborted`",
    ),
    "swarm_trainer_intervals_failed_total": _counter(
        "Intervals that produced no contribution.", "when the loss or the weights are not finite"
    ),
    "swarm_trainer_outer_step_seconds": _histogram(
        "Time between two consecutive committed states.",
        "with each committed step that this member took part in",
        _ROUND_S,
    ),
    "swarm_trainer_phase_seconds": _histogram(
        "Durations of the phases of committed rounds.",
        "with each committed step that this member took part in, once for each phase that it went through",
        _ROUND_S,
        phase="`interval` (inner steps), `group` (forming the group), `reduce`, `commit` (votes) or `apply`",
    ),
    "swarm_trainer_sent_bytes_total": _counter(
        "Bytes that this member sent for outer steps.", "with each committed step"
    ),
    "swarm_trainer_fetched_bytes_total": _counter(
        "Bytes of state that this member fetched from others.",
        "when the member joins, falls behind, or repairs a damaged state",
    ),
    "swarm_trainer_refusals_total": _counter(
        "Contributions of other members that this member refused, or of which it counted less than half.",
        "when a member breaks the protocol in a round, is left out of it, or contributes what differs much from the "
        "others; the dashboard names the member and the reason",
    ),
    "swarm_trainer_convicted_total": _counter(
        "Members that evidence convicts of lying.",
        "when this member has verified the evidence; `status`, the node's log and the dashboard name the member and "
        "the reason",
    ),
    "swarm_trainer_intervals_validated_total": _counter(
        "Intervals of other members that this member recomputed.",
        "when the run's `validation_rate` selects an interval, or another member is accused",
        tier="`exact`, `close` (within the run's tolerance) or `wrong`",
    ),
    "swarm_trainer_num_banned": _gauge(
        "Members that this member excludes from its rounds.",
        "when evidence convicts a member, at the start from stored evidence, and when a ban ends",
    ),
    "swarm_trainer_digest_mismatches_total": _counter(
        "Times that this member's state differed from the committed state.",
        "when memory is corrupt or another version computes differently; values above 0 need attention",
    ),
}
GATEWAY: MetricGroup = {
    "swarm_gateway_http_requests_total": _counter(
        "HTTP requests, by route and status.",
        "when a request was answered or its client disconnected (`gone`)",
        route="the route's pattern; `other` for unknown paths, and where key, rate or the body's form is refused",
        method="`GET`, `HEAD`, `POST` or `other`",
        status="the HTTP status, or `gone`",
    ),
    "swarm_gateway_refusals_total": _counter(
        "Requests that failed, by error code.", "when the error is sent", reason="an error code of the API"
    ),
    "swarm_gateway_possession_checks_total": _counter(
        "Challenges sent to servers of published models to prove that they hold the model's files.",
        "when a server answers or the challenge times out; a server is challenged before its first use and about once "
        "an hour",
        outcome="`proven`, `failed` or `unanswered`",
    ),
    "swarm_gateway_num_requests_running": _gauge(
        "Requests that have their first token.", "with each first token and each end of a request"
    ),
    "swarm_gateway_num_requests_waiting": _gauge(
        "Requests that wait for their first token.", "with each admission and each first token"
    ),
    "swarm_gateway_time_to_first_token_seconds": _histogram(
        "Time from a request's admission to its first token.", "with the first token", _REQUEST_S
    ),
    "swarm_gateway_inter_token_latency_seconds": _histogram(
        "Time between two consecutive tokens of a choice.", "with each token but the first", _STEP_S
    ),
    "swarm_gateway_e2e_request_latency_seconds": _histogram(
        "Time from a request's admission to its end.", "when the request ends, whether it succeeded or not", _REQUEST_S
    ),
    "swarm_gateway_prompt_tokens_total": _counter("Prompt tokens.", "when a request ends"),
    "swarm_gateway_prompt_tokens_cached_total": _counter(
        "Prompt tokens found in servers' prefix caches.", "when a request ends"
    ),
    "swarm_gateway_generation_tokens_total": _counter("Generated tokens.", "when a request ends"),
    "swarm_gateway_request_success_total": _counter(
        "Completed choices, by finish reason.", "with the last token of a choice", finished_reason="`stop` or `length`"
    ),
    "swarm_gateway_hop_seconds": _histogram(
        "Mean time that a server took for a token after the first, as measured by the gateway.",
        "when a request ends, once for each server and part; `wire`: the time that is neither `compute` nor `queue`",
        _STEP_S,
        part="`compute`, `queue` or `wire`",
    ),
    "swarm_gateway_reroutes_total": _counter(
        "Spans that failed or became slow during an answer and were continued on other servers.",
        "when the request ends; `handover`: the new servers received the KV cache; `replay`: they recomputed it",
        how="`replay` or `handover`",
    ),
    "swarm_gateway_replayed_tokens_total": _counter(
        "Positions that other servers recomputed after a failure.", "when a request ends that lost a server"
    ),
    "swarm_gateway_failover_seconds": _histogram(
        "Time from a failed step until the answer continued.", "when a request ends, once for each failure", _STEP_S
    ),
    "swarm_gateway_spot_checks_total": _counter(
        "Spans of answers that another server recomputed, by result.",
        "some time after a selected answer; `unchecked`: no other server has the blocks or accepts the check; "
        "`disputed`: no third server could decide",
        result="`passed`, `failed`, `disputed` or `unchecked`",
    ),
    "swarm_gateway_proved_lies_total": _counter(
        "Servers that a spot check proved to have computed, sampled or signed a wrong result.", "after the spot check"
    ),
}
PROCESS: MetricGroup = {
    "process_cpu_seconds_total": _counter("CPU time, without the libp2p daemon's.", _NOW),
    "process_resident_memory_bytes": _gauge("Resident memory, without the libp2p daemon's.", _NOW),
    "process_virtual_memory_bytes": _gauge("Virtual memory.", _NOW),
    "process_start_time_seconds": _gauge("Unix time at which the process started.", "never"),
    "process_open_fds": _gauge("Open file descriptors.", _NOW),
    "process_max_fds": _gauge("Maximum number of open file descriptors.", "never"),
}
GROUPS: Mapping[str, tuple[str, MetricGroup]] = {
    "Every daemon": ("The daemon's identity and state, and the peers that it knows.", NODE),
    "Network": ("Traffic and DHT records of every daemon.", NETWORK),
    "Relay": ("Traffic that a seed or another public node relays for nodes behind a NAT; 0 on other nodes.", RELAY),
    "Server": ("`join`, while it serves a model.", SERVER),
    "Trainer": ("`join`, while it trains a run.", TRAINER),
    "Gateway": ("`gateway`.", GATEWAY),
    "Process": ("Process metrics of prometheus_client; Linux only.", PROCESS),
}
METRICS: MetricGroup = {name: spec for _, part in GROUPS.values() for name, spec in part.items()}
