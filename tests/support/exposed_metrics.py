"""A registry that every part of a daemon has put its metrics into, and its exposition as samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import MagicMock
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from swarm.network.dht.record_dht import DhtCounts
from swarm.network.link_diagnosis import SlowLink
from swarm.network.relay.relay import RelayCounts
from swarm.network.traffic import PATH_KINDS, PeerPath, Traffic
from swarm.serving.checking.finished_answer import CheckReport
from swarm.serving.engine.engine import EngineLoad
from swarm.training.trainer_events import (
    HeldOutMeasured,
    IntervalDone,
    IntervalFailed,
    IntervalValidated,
    OuterStep,
    RoundAborted,
    StateFetched,
)
from swarm_node.gateway.metrics import Metrics, RequestTimes, SpotCheckCounter, read_possession
from swarm_node.gateway.responses import usage_of
from swarm_node.metrics.metric_registry import Registry
from swarm_node.metrics.readings import (
    ServerMetrics,
    TrainerMetrics,
    read_network,
    read_node,
    read_server,
    read_trainer,
)
from swarm_node.roles.kept_convictions import read_convictions
from swarm_protocol.identity import Identity
from swarm_protocol.records import Refusal, RoundReport

PEER = Identity(b"x" * 32).peer_id
SLOW = (
    SlowLink(kind="receiver", receiver="me", slowdown=4.0),
    SlowLink(kind="link", sender="a", receiver="b", slowdown=9.0),
)
PHASES_S = {"interval": 4.0, "group": 0.5, "reduce": 1.0, "commit": 0.25, "apply": 0.25}
OUTER_STEP = OuterStep(
    step=7, loss=2.5, digest="d", group=("a", "b"), num_trainers=2, num_tokens=100, bytes_sent=4000, seconds=6.0,
    round_s=2.0, tokens_per_s=25.0,
)  # fmt: skip
TRACE = {
    "session_id": "s",
    "num_prompt_tokens": 3,
    "num_tokens": 5,
    "opening_ms": 20.0,
    "first_token_ms": 50.0,
    "hops": [
        {"peer_id": peer_id, "start": start, "end": start + 2, "num_steps": num_steps, "prompt_ms": 0.0, **times}
        for peer_id, start, num_steps, times in (
            ("a", 0, 4, {"compute_ms": 40.0, "queue_ms": 4.0, "wire_ms": 8.0}),
            ("b", 2, 4, {"compute_ms": 80.0, "queue_ms": 0.0, "wire_ms": 16.0}),
            ("c", 2, 0, {"compute_ms": 0.0, "queue_ms": 0.0, "wire_ms": 0.0}),
        )
    ],
    "replays": [
        {
            "lost_peer": "b", "start": 2, "end": 4, "reason": "gone", "new_peers": ("c",), "num_tokens": 6,
            "failover_ms": 300.0, "was_handed_over": handed,
        }
        for handed in (False, True)
    ],
}  # fmt: skip


@contextmanager
def whole_registry() -> Iterator[Registry]:
    """Every source is read while the context lasts, every event was counted once."""
    registry = Registry()
    node = MagicMock(num_peers=3, started_at=1.75e9)
    node.activity.state = "serving"
    node.work_end.leaving.is_set = lambda: False
    node.network.network_id, node.network.peer_id = "tests", "12D3Koo"
    node.membership.all_known_rtts_s = lambda: [0.01, 0.02, 0.3]
    node.peer_paths = lambda: {
        kind: PeerPath(kind=kind, sent_bytes=1, received_bytes=2) for kind in PATH_KINDS if kind != "dialled back"
    }
    node.membership.known_rtts_ms = lambda paths: {"direct": 20.0, "relayed": 300.0}
    node.membership.num_publish_failures, node.membership.num_malformed, node.membership.num_dropped = 1, 2, 3
    relay = RelayCounts(throttled_s=2.5)
    relay.refusals["idle"] = 4
    network = MagicMock(traffic=Traffic(), relay_counts=relay, daemon_pid=1)
    network.links.all_rates = lambda: [1e5, 2e5, 9e6]
    network.dht_counts = DhtCounts(num_records=5, num_refused=6, num_peers=7, num_addresses=8)
    server = MagicMock(sessions=(1, 2), start_block=4, end_block=8)
    server.load = EngineLoad(num_running=1, num_waiting=2, cache_usage=0.5)
    server.connections.num_refused = {"busy": 1, "never": 2, "violation": 3, "connections": 4}
    server.challenges.num_outcomes, server.challenges.num_bytes = {"proven": 7, "failed": 1, "unanswered": 2}, 455
    server.connections.num_connections, server.connections.backpressure.num_bytes = 9, 10
    _count(registry)
    scores = {"me": 0.5, "b": -0.25, "c": 0.75}
    member = MagicMock(num_mismatches=2, bans=("one", "two", "three"), held_out_scores=scores)
    volunteer = MagicMock(server=server, num_failed_moves=1)
    with (
        registry.reading(lambda: read_node(node)),
        registry.reading(lambda: read_network(network)),
        registry.reading(lambda: read_server(volunteer)),
        registry.reading(lambda: read_possession(MagicMock(num_proven=11, num_failed=1, num_unanswered=2))),
        registry.reading(lambda: read_trainer(member, SLOW, "me")),
        registry.reading(lambda: read_convictions(MagicMock(peers={"12D3KooW"}, num_refused=4))),
    ):
        yield registry


def whole_exposition() -> list[Sample]:
    with whole_registry() as registry:
        return samples(registry.exposition().decode())


def _count(registry: Registry) -> None:
    steps = ServerMetrics(registry)
    steps.step(1, 20.0, 1.0)
    steps.step(32, 300.0, 50.0)
    steps.drafts(4)
    trainer = TrainerMetrics(registry, 40)
    trainer.count(IntervalDone(step=7, num_steps=5, num_tokens=50, loss=2.6, seconds=4.0, tokens_per_s=12.5))
    trainer.count(IntervalFailed(step=7, reason="the loss is not finite"))
    trainer.count(RoundAborted(step=7, attempt=0, reason="gone", missing=("b",)))
    trainer.count(StateFetched(step=6, digest="d", donors=("a",), num_bytes=900, seconds=1.0))
    trainer.count(HeldOutMeasured(step=7, loss=2.4))
    trainer.count(IntervalValidated(step=6, peer_id=PEER, tier="close", distance=0.1))
    trainer.count(OUTER_STEP)
    trainer.report(
        RoundReport(outer_step=7, phases_s=PHASES_S, bytes_sent=4000, refused=(Refusal(peer_id=PEER, reason="lied"),))
    )
    gateway = Metrics(registry)
    with RequestTimes(gateway) as times:
        times.token(0)
        times.token(0)
    gateway.used(usage_of(prompt_tokens=3, completion_tokens=5, cached_tokens=2), [TRACE])
    gateway.http.labels("/v1/completions", "POST", "200").inc()
    gateway.refusals.labels("not_found").inc()
    gateway.success.labels("stop").inc()
    checks = SpotCheckCounter(registry)
    for result, named in (("passed", ""), ("failed", "12D3KooW")):
        checks.add(CheckReport(peer_id="12D3KooW", start=0, end=3, result=result, named=named))


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def scraped(url: str) -> dict[str, float]:
    """What a daemon answers there now: values by name and labels, `name,label,label`."""
    with urlopen(url, timeout=10) as response:
        assert response.headers["content-type"].startswith("text/plain")
        text = response.read().decode()
    return {
        sample.name + "".join(f",{value}" for value in sample.labels.values()): sample.value for sample in samples(text)
    }
