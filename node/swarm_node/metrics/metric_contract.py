"""Every metric: its kind, its labels, its meaning, and when it changes. The one source of docs/reference/metrics.md.

Dashboards and alerts are written against these names, so a metric may be added here but never renamed or given another
meaning. Names and units follow the conventions of Prometheus, and vLLM's names where the same thing is counted. No
label has a value that a client or a peer can choose. `docs/contracts.py` writes `docs/reference/metrics.md`, and a
test compares the two. The other modules of this package fill the metrics.
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
    """`about` is the help that Prometheus shows, `moves` says when the value changes. `labels` maps a label's name to
    its values in words; `buckets` are a histogram's upper bounds."""

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
    "how the peer is reached: `direct`, by a dial; `dialled_back`, by a dial of the side that nobody can dial; "
    "`punched`, by hole punching between two NATs; or `relayed`, through relays only"
)
_NOW = "read whenever somebody asks"

NODE: MetricGroup = {
    "swarm_node_info": _gauge(
        "1, with what this daemon is in its labels.",
        "never",
        version="of the software",
        network_id="the network it is in",
        peer_id="its own",
    ),
    "swarm_node_state": _gauge(
        "1 for what the daemon is doing, 0 for the rest.",
        "when its role begins or ends something; `draining` once it has been told to leave",
        state="`starting`, `seeding`, `idle`, `training`, `serving`, `gateway`, `dashboard`, `draining`, `paused`, or "
        "`other`",
    ),
    "swarm_node_num_peers": _gauge("Live nodes that it sees, itself included.", "every 10 s, from the DHT"),
    "swarm_node_num_convicted_servers": _gauge(
        "Servers that evidence convicts of a wrong proof, and that this node does not ask.",
        "with evidence that is found or that another node gives, and when it is over; nodes that serve or ask models",
    ),
    "swarm_node_server_evidence_refused_total": _counter(
        "Evidence about servers that proved nothing.", "when another node has given it; it is not listened to again"
    ),
    "swarm_node_start_time_seconds": _gauge("When the daemon was ready to work, in Unix seconds.", "never"),
    "swarm_libp2p_memory_bytes": _gauge("Resident memory of the libp2p daemon, a child process.", _NOW),
    "swarm_peer_rtt_seconds": _gauge(
        "Round trips to the peers that were measured within three minutes; absent while there are none.",
        "when a round trip is measured: servers do so every 20 s, gateways before they choose a chain",
        stat="`min`, `median` or `max` over the peers",
    ),
    "swarm_peer_path_rtt_seconds": _gauge(
        "Median round trip to the connected peers of which it is known; absent where there are none.",
        "as connections and round trips change, both measured ones and those that traffic shows",
        peer=_PATH,
    ),
}
NETWORK: MetricGroup = {
    "swarm_link_receive_bytes_per_second": _gauge(
        "Rates at which peers' long messages came, measured within ten minutes; absent while there are none.",
        "with each transfer of 128 KiB or more, by the median of a peer's last eight",
        stat="`min`, `median` or `max` over the peers",
    ),
    "swarm_network_sent_bytes_total": _counter(
        "Bytes of calls, answers and streams that were sent, without framing and encryption.",
        "as they are handed to libp2p; what a relay carries for others is not among them",
        peer=_PATH,
    ),
    "swarm_network_received_bytes_total": _counter("The same received.", "as they come in", peer=_PATH),
    "swarm_network_num_connected_peers": _gauge(
        "Peers with an open connection.", "every 3 s, when the connections are looked at", peer=_PATH
    ),
    "swarm_dht_num_records": _gauge(
        "Signed records that this node keeps for everyone.", "as nodes publish and records run out"
    ),
    "swarm_dht_num_peers": _gauge("Peers in the DHT's routing table.", "as peers are met and lost"),
    "swarm_dht_records_refused_total": _counter(
        "Records that others wanted to store here and that were not in order.",
        "when one is unsigned, signed by another, too large or out of its time: somebody's clock, version or intent",
    ),
    "swarm_membership_publish_failures_total": _counter(
        "Own records that no peer took in time; each is tried again.", "while this node is alone or cut off"
    ),
    "swarm_membership_records_malformed_total": _counter(
        "Records of others that were signed and made no sense.", "when a lookup meets a new one"
    ),
    "swarm_membership_records_dropped_total": _counter(
        "Records of others beyond what is listed.", "when one kind has more than 4,096 signers"
    ),
}
RELAY: MetricGroup = {
    "swarm_relay_num_reservations": _gauge("Nodes that are reached through this one.", "as they come and go"),
    "swarm_relay_num_circuits": _gauge("Connections that this node carries for others now.", "as they open and close"),
    "swarm_relay_bytes_total": _counter("Bytes carried for others, both ways.", "as they are passed on"),
    "swarm_relay_refusals_total": _counter(
        "Circuits and reservations not given, or ended.",
        "`refused`: no place, no reservation; `stranger`: of another network; `failed`: the target did not take it; "
        "`idle`: closed for want of a byte",
        reason="`refused`, `stranger`, `failed` or `idle`",
    ),
    "swarm_relay_throttled_seconds_total": _counter(
        "Time that circuits waited for their share of the relay's bytes a second, added up.",
        "while more is to be carried than `--relay-rate` allows",
    ),
}
SERVER: MetricGroup = {
    "swarm_server_num_requests_running": _gauge("Sessions whose step is being computed.", _NOW),
    "swarm_server_num_requests_waiting": _gauge(
        "Sessions whose step waits for the pass that is computed, or for a later one.", _NOW
    ),
    "swarm_server_num_sessions": _gauge("Open sessions, also those that say nothing now.", "as they open and end"),
    "swarm_server_num_lanes": _gauge(
        "Connections of clients and of servers before this one.", "as they open and close"
    ),
    "swarm_server_kv_cache_usage_perc": _gauge(
        "Share of the cache's room that is reserved: 1 is full, as in vLLM.", "as sessions open and end"
    ),
    "swarm_server_backlog_bytes": _gauge("Inputs that were received and not computed yet.", _NOW),
    "swarm_server_start_block": _gauge("First block that is served.", "when the server moves"),
    "swarm_server_end_block": _gauge("One past the last block that is served.", "when the server moves"),
    "swarm_server_prompt_tokens_total": _counter(
        "Positions computed in steps of several: prompts, and what is replayed after a failure.", "after each such step"
    ),
    "swarm_server_generation_tokens_total": _counter(
        "Positions computed in steps of one: answers, and prompts of one token.", "after each such step"
    ),
    "swarm_server_step_seconds": _histogram(
        "What this server took for one step of one session.",
        "`queue`: from a step's arrival until the first pass that has it; `compute`: in passes over the weights",
        _STEP_S,
        phase="`queue` or `compute`",
        step="`prompt` (several positions) or `generation` (one)",
    ),
    "swarm_server_challenges_total": _counter(
        "Challenges to other servers of a published model to prove one chunk.",
        "about every 90 s",
        outcome="`proven`, `failed` or `unanswered`",
    ),
    "swarm_server_challenge_bytes_total": _counter(
        "Bytes of the answers to these challenges.", "about every 90 s, 65 KiB at most"
    ),
    "swarm_server_refusals_total": _counter(
        "Sessions and connections that were not opened.",
        "`busy`: not now; `never`: not served here; `violation`: against the rules; `lanes`: too many connections",
        reason="`busy`, `never`, `violation` or `lanes`",
    ),
    "swarm_server_move_failures_total": _counter(
        "Moves to other blocks that failed; the old ones go on.", "when loading the other blocks fails"
    ),
}
TRAINER: MetricGroup = {
    "swarm_link_num_slow": _gauge(
        "Members, or links between two, that were slower than the others' in three rounds in a row.",
        "every 10 s, from the reports of the run's members",
        kind="`sender`, `receiver` or `link`",
    ),
    "swarm_link_own_slowdown": _gauge(
        "How many times slower this member sends or receives than is usual in its run; 1: it is not slower.",
        "every 10 s, from the reports of the run's members",
        direction="`send` or `receive`",
    ),
    "swarm_trainer_outer_step": _gauge("Committed outer step of this member's state.", "with each committed step"),
    "swarm_trainer_num_outer_steps": _gauge("Outer steps of the run.", "never"),
    "swarm_trainer_loss": _gauge("The group's mean training loss, weighted by tokens.", "with each committed step"),
    "swarm_trainer_validation_loss": _gauge("Loss on held-out data.", "at the beginning and at the end of a run"),
    "swarm_trainer_held_out_score": _gauge(
        "What contributions do to the held-out loss, in nats a step, as a slow average; above 0 is good. Absent while "
        "nobody has been measured.",
        "with each committed step",
        stat="`own`, this member's; `min` or `median` over the trainers",
    ),
    "swarm_trainer_group_size": _gauge("Members of the last committed round.", "with each committed step"),
    "swarm_trainer_tokens_per_second": _gauge("This member's speed in its last interval.", "after each interval"),
    "swarm_trainer_tokens_total": _counter("Tokens that this member trained on.", "after each interval"),
    "swarm_trainer_rounds_total": _counter(
        "Attempts at outer steps by their result.",
        "when an attempt ends; after `aborted` the committed state is untouched and the work is kept",
        result="`committed` or `aborted`",
    ),
    "swarm_trainer_intervals_failed_total": _counter(
        "Intervals that brought nothing.", "when the loss or the weights are not finite"
    ),
    "swarm_trainer_outer_step_seconds": _histogram(
        "From one committed state to the next.", "with each committed step that this member took part in", _ROUND_S
    ),
    "swarm_trainer_phase_seconds": _histogram(
        "What the phases of a committed round took.",
        "with each committed step that this member took part in, once for each phase that it went through",
        _ROUND_S,
        phase="`interval` (inner steps), `group` (until it is formed), `reduce`, `commit` (votes) or `apply`",
    ),
    "swarm_trainer_sent_bytes_total": _counter("Bytes this member sent for outer steps.", "with each committed step"),
    "swarm_trainer_fetched_bytes_total": _counter(
        "Bytes of state that had to be fetched from others.", "when it joins, was left behind, or mends a damaged copy"
    ),
    "swarm_trainer_refusals_total": _counter(
        "Contributions of other members that this one refused.",
        "when a member breaks the protocol in a round; the node's log and the dashboard say who and why",
    ),
    "swarm_trainer_convicted_total": _counter(
        "Members that evidence convicts of a lie.",
        "when this member has checked the evidence; `status`, the node's log and the dashboard say who and why",
    ),
    "swarm_trainer_intervals_validated_total": _counter(
        "Intervals of other members that this one computed once more.",
        "where the run's validation_rate draws one, or a member accuses another",
        tier="`exact`, `close` (within the run's tolerance) or `wrong`",
    ),
    "swarm_trainer_num_banned": _gauge(
        "Members of the run that this member keeps out of its rounds.",
        "when evidence convicts a member, also evidence that was kept from before the start, and when a ban ends",
    ),
    "swarm_trainer_digest_mismatches_total": _counter(
        "How often this member's state was found to differ from what was committed.",
        "when memory was damaged, or another version computes differently: above 0 needs attention",
    ),
}
GATEWAY: MetricGroup = {
    "swarm_gateway_http_requests_total": _counter(
        "HTTP requests by route and status.",
        "when a request has been answered or its client has left (`gone`)",
        route="the route's pattern; `other` for paths that do not exist",
        method="`GET`, `HEAD`, `POST` or `other`",
        status="the HTTP status, or `gone`",
    ),
    "swarm_gateway_refusals_total": _counter(
        "Requests that were not answered, by the error's code.", "with the error", reason="a code of the API's errors"
    ),
    "swarm_gateway_possession_checks_total": _counter(
        "Requests to servers of published models to prove that they hold the files.",
        "when a server has answered or not: one is asked when it is first used, and about once an hour",
        outcome="`proven`, `failed` or `unanswered`",
    ),
    "swarm_gateway_num_requests_running": _gauge("Requests with a first token.", "with first tokens and ends"),
    "swarm_gateway_num_requests_waiting": _gauge("Requests without one yet.", "with admissions and first tokens"),
    "swarm_gateway_time_to_first_token_seconds": _histogram(
        "From a request's admission to its first token.", "with the first token", _REQUEST_S
    ),
    "swarm_gateway_inter_token_latency_seconds": _histogram(
        "Between a choice's tokens.", "with every token but the first", _STEP_S
    ),
    "swarm_gateway_e2e_request_latency_seconds": _histogram(
        "From a request's admission to its end.", "when it has ended, however it did", _REQUEST_S
    ),
    "swarm_gateway_prompt_tokens_total": _counter("Tokens of prompts.", "when a request has ended"),
    "swarm_gateway_prompt_tokens_cached_total": _counter(
        "Of these, found in servers' caches.", "when a request has ended"
    ),
    "swarm_gateway_generation_tokens_total": _counter("Tokens of answers.", "when a request has ended"),
    "swarm_gateway_request_success_total": _counter(
        "Choices that were answered to their end, by reason.",
        "with their last token",
        finished_reason="`stop` or `length`",
    ),
    "swarm_gateway_hop_seconds": _histogram(
        "A server's mean time for a token after the first, as the chain's client saw it.",
        "when a request has ended, once for each server and part; `wire` is what was neither of the other two",
        _STEP_S,
        part="`compute`, `queue` or `wire`",
    ),
    "swarm_gateway_reroutes_total": _counter(
        "Spans that were lost in mid-answer and went on with other servers.",
        "when the request has ended; `handover`: the new servers took the cache over, `replay`: they ran it again",
        how="`replay` or `handover`",
    ),
    "swarm_gateway_replayed_tokens_total": _counter(
        "Positions that other servers had to run again.", "when a request has ended that lost a server"
    ),
    "swarm_gateway_failover_seconds": _histogram(
        "From the step that failed until the answer went on.", "when a request has ended, once for each loss", _STEP_S
    ),
    "swarm_gateway_spot_checks_total": _counter(
        "Spans of answers that were computed again by another server, by result.",
        "some time after an answer that was drawn has ended; `unchecked`: no other server has the blocks, or would "
        "compute them; `disputed`: no third server could decide",
        result="`passed`, `failed`, `disputed` or `unchecked`",
    ),
    "swarm_gateway_proved_lies_total": _counter(
        "Servers that a spot check proved to have computed, drawn or signed something else.", "with the check"
    ),
}
PROCESS: MetricGroup = {
    "process_cpu_seconds_total": _counter("Processor time, without the libp2p daemon's.", _NOW),
    "process_resident_memory_bytes": _gauge("Resident memory, without the libp2p daemon's.", _NOW),
    "process_virtual_memory_bytes": _gauge("Virtual memory.", _NOW),
    "process_start_time_seconds": _gauge("When the process started, in Unix seconds.", "never"),
    "process_open_fds": _gauge("Open files and sockets.", _NOW),
    "process_max_fds": _gauge("How many it may open.", "never"),
}
GROUPS: Mapping[str, tuple[str, MetricGroup]] = {
    "Every daemon": ("What it is and whom it sees.", NODE),
    "Network": ("Every daemon's traffic and records.", NETWORK),
    "Relay": ("What a seed, or another public node, carries for nodes behind a NAT; zeros elsewhere.", RELAY),
    "Server": ("Of `join` while it serves a model.", SERVER),
    "Trainer": ("Of `join` while it trains a run.", TRAINER),
    "Gateway": ("Of `gateway`.", GATEWAY),
    "Process": ("From the operating system, by prometheus_client; Linux only.", PROCESS),
}
METRICS: MetricGroup = {name: spec for _, part in GROUPS.values() for name, spec in part.items()}
