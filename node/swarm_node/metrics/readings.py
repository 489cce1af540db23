"""Fills the metrics of a node, its network, a model server and a member of a run.

Most values are read at a scrape (`read_…`). `ServerMetrics` counts each step and `TrainerMetrics` each event.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, get_args

import psutil
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.link_diagnosis import SlowKind, SlowLink
from swarm.network.traffic import PATH_KINDS
from swarm.training import trainer_events as events
from swarm_protocol.records import PathKind, RoundReport
from swarm_protocol.version import software_version

from swarm_node.metrics.metric_registry import Reading, Registry, start_at_zero

if TYPE_CHECKING:
    # these import torch, which a node that neither serves nor trains must not load
    from swarm.serving.server.span_placer import SpanPlacer
    from swarm.training.member.run_member import RunMember

    from swarm_node.node import Node

STATES = ("starting", "seeding", "idle", "training", "serving", "gateway", "dashboard", "draining", "paused")


def read_starting(network_id: str, peer_id: str) -> Iterator[Reading]:
    """Read the metrics of a daemon that has not joined its network yet."""
    return _read_state(network_id, peer_id, "starting", num_peers=0)


def _read_state(network_id: str, peer_id: str, state: str, num_peers: int) -> Iterator[Reading]:
    about = {"version": software_version(), "network_id": network_id, "peer_id": peer_id}
    yield Reading("swarm_node_info", 1, about)
    yield Reading("swarm_node_num_peers", num_peers)
    for each in (*STATES, "other"):
        yield Reading("swarm_node_state", each == (state if state in STATES else "other"), {"state": each})


def read_node(node: Node) -> Iterator[Reading]:
    state = "draining" if node.work_end.leaving.is_set() else node.activity.state
    yield from _read_state(node.network.network_id, node.network.peer_id, state, node.num_peers)
    yield Reading("swarm_node_start_time_seconds", node.started_at)
    yield from _stats("swarm_peer_rtt_seconds", node.membership.all_known_rtts_s(), "min", "median", "max")
    yield from _rtts_by_path(node)
    yield Reading("swarm_membership_publish_failures_total", node.membership.num_publish_failures)
    yield Reading("swarm_membership_records_malformed_total", node.membership.num_malformed)
    yield Reading("swarm_membership_records_dropped_total", node.membership.num_dropped)


def _rtts_by_path(node: Node) -> Iterator[Reading]:
    paths = node.peer_paths()
    rtts_ms = node.membership.known_rtts_ms(paths)
    for kind in PATH_KINDS:
        if known := [rtt_ms for peer_id, rtt_ms in rtts_ms.items() if paths[peer_id].kind == kind]:
            yield Reading("swarm_peer_path_rtt_seconds", statistics.median(known) / 1e3, _label(kind))


def _stats(name: str, values: Sequence[float], *stats: str) -> Iterator[Reading]:
    """Read the `stats` of values. Without values there are no readings."""
    found: Mapping[str, Callable[[Sequence[float]], float]] = {"min": min, "median": statistics.median, "max": max}
    for stat in stats if values else ():
        yield Reading(name, found[stat](values), {"stat": stat})


def _label(kind: PathKind) -> dict[str, str]:
    return {"peer": kind.replace(" ", "_")}


def read_network(network: Libp2pNetwork) -> Iterator[Reading]:
    traffic, dht, relay = network.traffic, network.dht_counts, network.relay_counts
    num_connected = traffic.num_connected
    for kind in PATH_KINDS:
        peer = _label(kind)
        yield Reading("swarm_network_sent_bytes_total", traffic.sent_bytes[kind], peer)
        yield Reading("swarm_network_received_bytes_total", traffic.received_bytes[kind], peer)
        yield Reading("swarm_network_num_connected_peers", num_connected[kind], peer)
    yield from _stats("swarm_link_receive_bytes_per_second", network.links.all_rates(), "min", "median", "max")
    yield Reading("swarm_dht_num_records", dht.num_records)
    yield Reading("swarm_dht_num_peers", dht.num_peers)
    yield Reading("swarm_dht_records_refused_total", dht.num_refused)
    yield Reading("swarm_relay_num_reservations", relay.reservations)
    yield Reading("swarm_relay_num_circuits", relay.circuits)
    yield Reading("swarm_relay_bytes_total", relay.relayed_bytes)
    yield Reading("swarm_relay_throttled_seconds_total", relay.throttled_s)
    for reason, number in relay.refusals.items():
        yield Reading("swarm_relay_refusals_total", number, {"reason": reason})
    with suppress(psutil.Error):  # it has just ended, so this node will end too
        yield Reading("swarm_libp2p_memory_bytes", psutil.Process(network.daemon_pid).memory_info().rss)


class ServerMetrics:
    """Counts a server's steps: pass `step` to the server as `on_step`, and `drafts` as `on_drafts`. A registry has at
    most one active at a time."""

    def __init__(self, registry: Registry) -> None:
        seconds = registry.histogram("swarm_server_step_seconds")
        self._prompt_tokens = registry.counter("swarm_server_prompt_tokens_total")
        self._generation_tokens = registry.counter("swarm_server_generation_tokens_total")
        # looked up once: a lookup at each step would cost more than everything else
        self._prompt = [seconds.labels(phase, "prompt") for phase in ("compute", "queue")]
        self._generation = [seconds.labels(phase, "generation") for phase in ("compute", "queue")]

    def step(self, num_positions: int, compute_ms: float, queue_ms: float) -> None:
        if num_positions == 1:
            self._generation_tokens.inc()
            compute, queue = self._generation
        else:
            self._prompt_tokens.inc(num_positions)
            compute, queue = self._prompt
        compute.observe(compute_ms / 1000)
        queue.observe(queue_ms / 1000)

    def drafts(self, num_right: int) -> None:
        self._generation_tokens.inc(num_right)


def read_server(placer: SpanPlacer) -> Iterator[Reading]:
    """Read a server's metrics. Without blocks there are hardly any."""
    yield Reading("swarm_server_move_failures_total", placer.num_failed_moves)
    server = placer.server
    if server is None:
        return
    for reason, number in server.connections.num_refused.items():
        label = "lanes" if reason == "connections" else reason  # label values stay, though the code was renamed
        yield Reading("swarm_server_refusals_total", number, {"reason": label})
    yield Reading("swarm_server_num_sessions", len(server.sessions))
    yield Reading("swarm_server_num_lanes", server.connections.num_connections)
    yield Reading("swarm_server_backlog_bytes", server.connections.backpressure.num_bytes)
    yield Reading("swarm_server_start_block", server.start_block)
    yield Reading("swarm_server_end_block", server.end_block)
    for outcome in ("proven", "failed", "unanswered"):
        yield Reading("swarm_server_challenges_total", server.challenges.num_outcomes[outcome], {"outcome": outcome})
    yield Reading("swarm_server_challenge_bytes_total", server.challenges.num_bytes)
    load = server.load
    yield Reading("swarm_server_num_requests_running", load.num_running)
    yield Reading("swarm_server_num_requests_waiting", load.num_waiting)
    yield Reading("swarm_server_kv_cache_usage_perc", load.cache_usage)


class TrainerMetrics:
    """Counts the events of a trainer, which must all be passed to it. A registry has one."""

    def __init__(self, registry: Registry, num_outer_steps: int) -> None:
        self._outer_step = registry.gauge("swarm_trainer_outer_step")
        self._loss = registry.gauge("swarm_trainer_loss")
        self._validation_loss = registry.gauge("swarm_trainer_validation_loss")
        self._group_size = registry.gauge("swarm_trainer_group_size")
        self._tokens_per_s = registry.gauge("swarm_trainer_tokens_per_second")
        self._tokens = registry.counter("swarm_trainer_tokens_total")
        rounds = registry.counter("swarm_trainer_rounds_total")
        self._committed, self._aborted = rounds.labels("committed"), rounds.labels("aborted")
        self._failed = registry.counter("swarm_trainer_intervals_failed_total")
        self._step_s = registry.histogram("swarm_trainer_outer_step_seconds")
        self._phase_s = registry.histogram("swarm_trainer_phase_seconds")
        self._refusals = registry.counter("swarm_trainer_refusals_total")
        self._convicted = registry.counter("swarm_trainer_convicted_total")
        self._validated = registry.counter("swarm_trainer_intervals_validated_total")
        self._sent = registry.counter("swarm_trainer_sent_bytes_total")
        self._fetched = registry.counter("swarm_trainer_fetched_bytes_total")
        start_at_zero(self._validated, ("exact", "close", "wrong"))
        registry.gauge("swarm_trainer_num_outer_steps").set(num_outer_steps)

    def count(self, event: events.TrainingEvent) -> None:
        match event:
            case events.IntervalDone():
                self._tokens.inc(event.num_tokens)
                self._tokens_per_s.set(event.tokens_per_s)
            case events.IntervalFailed():
                self._failed.inc()
            case events.RoundAborted():
                self._aborted.inc()
            case events.IntervalValidated():
                self._validated.labels(event.tier).inc()
            case events.MemberConvicted():
                self._convicted.inc()
            case events.StateFetched():
                self._outer_step.set(event.step)
                self._fetched.inc(event.num_bytes)
            case events.HeldOutMeasured():
                self._validation_loss.set(event.loss)
            case events.OuterStep():
                self._committed.inc()
                self._outer_step.set(event.step)
                self._loss.set(event.loss)
                self._group_size.set(len(event.group))
                self._sent.inc(event.bytes_sent)
                self._step_s.observe(event.seconds)
            case _:
                pass

    def report(self, report: RoundReport) -> None:
        """Count the phases and refusals of a committed round."""
        for phase, seconds in report.phases_s.items():
            self._phase_s.labels(phase).observe(seconds)
        self._refusals.inc(len(report.refused))


def read_trainer(trainer: RunMember, slow: Sequence[SlowLink], me: str) -> Iterator[Reading]:
    for kind in get_args(SlowKind):
        yield Reading("swarm_link_num_slow", sum(each.kind == kind for each in slow), {"kind": kind})
    for direction, kind in (("send", "sender"), ("receive", "receiver")):
        own = [each.slowdown for each in slow if each.kind == kind and each.peers == (me,)]
        yield Reading("swarm_link_own_slowdown", own[0] if own else 1.0, {"direction": direction})
    scores = trainer.held_out_scores
    if me in scores:
        yield Reading("swarm_trainer_held_out_score", scores[me], {"stat": "own"})
    yield from _stats("swarm_trainer_held_out_score", list(scores.values()), "min", "median")
    yield Reading("swarm_trainer_num_banned", len(trainer.bans))
    yield Reading("swarm_trainer_digest_mismatches_total", trainer.num_mismatches)
