"""The views of a model: assumptions about a chain's time, and what is kept between snapshots."""

from __future__ import annotations

import pytest
from support.plain_records import serve_record
from swarm.router.routing import DEFAULT_RTT_MS
from swarm_node.dashboard.model_views import model_detail
from swarm_node.network_snapshot import Listed
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import manifest_revision

PEERS = {name: Identity(bytes([number]) * 32).peer_id for number, name in enumerate("ab", 1)}


@pytest.mark.parametrize(
    ("rtts_ms", "link_ms", "num_ways"),
    [
        ({}, {}, 3),
        ({"a": 1.0}, {}, 2),
        ({"a": 1.0, "b": 1.0}, {}, 1),
        ({"a": 1.0}, {"a": 2.0}, 1),
        ({"a": 1.0, "b": 1.0}, {"a": 2.0}, 0),
    ],
)
def test_chain_names_the_assumed_time_of_links_without_a_measured_round_trip(
    rtts_ms: dict[str, float], link_ms: dict[str, float], num_ways: int
) -> None:
    servers = {
        PEERS["a"]: serve_record(0, 2),
        PEERS["b"]: serve_record(2, 4, rtt_ms={PEERS[each]: ms for each, ms in link_ms.items()}),
    }
    known = {PEERS[each]: ms for each, ms in rtts_ms.items()}
    listed = Listed(records=servers, ages_s=dict.fromkeys(servers, 0.0))
    detail = model_detail("tiny", listed, {}, known, publishers={}, convicted={}, unreachable=())
    assert detail is not None
    [chain] = detail.chains
    assert chain.assumed_ms == num_ways * DEFAULT_RTT_MS / 2
    assert chain.assumed_ms <= chain.ms_per_token


def test_convicted_server_is_marked_and_does_not_count() -> None:
    servers = {PEERS["a"]: serve_record(0, 4), PEERS["b"]: serve_record(0, 2)}
    listed = Listed(records=servers, ages_s={})
    detail = model_detail("tiny", listed, {}, {}, publishers={}, convicted={PEERS["a"]: "lied"}, unreachable=())
    assert detail is not None
    assert {server.peer_id: server.convicted for server in detail.servers} == {PEERS["a"]: "lied", PEERS["b"]: None}
    assert (detail.model.num_servers, detail.model.health, detail.model.missing) == (1, "incomplete", ((2, 4),))
    assert (detail.replicas, detail.chains) == ((1, 1, 0, 0), ())


@pytest.mark.parametrize("is_known", [True, False])
def test_model_is_shown_with_its_publisher_once_its_manifest_is_known(*, is_known: bool) -> None:
    digest, publisher = bytes(32), PEERS["b"]
    published = serve_record(0, 4, manifest=digest, revision=manifest_revision(digest, "int4"))
    made_up = serve_record(0, 4, manifest=digest)
    for record, expected in ((published, digest.hex()), (made_up, None), (serve_record(0, 4), None)):
        listed = Listed(records={PEERS["a"]: record}, ages_s={})
        known = {digest: publisher} if is_known else {}
        detail = model_detail("tiny", listed, {}, {}, publishers=known, convicted={}, unreachable=())
        assert detail is not None
        assert detail.model.manifest == expected
        assert detail.model.publisher == (publisher if is_known and expected else None)
