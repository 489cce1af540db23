"""Views that the collector makes of a swarm's records: nodes that come and go, models, numbers. No error ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path

import pytest
from support.dashboard_world import SETTLED_S, World, node_record, trainer_record, world
from support.plain_records import serve_record
from swarm.network.membership import Membership
from swarm.network.memory import memory_network
from swarm.network.memory.memory_network import MemoryInternet
from swarm.network.traffic import PeerPath
from swarm.testing import virtual_time
from swarm_node.dashboard import view_builder
from swarm_node.dashboard.app import DashboardRole
from swarm_node.dashboard.collector import Collector, check_folders, running_collector
from swarm_node.dashboard.history.reader import ContributionTotal
from swarm_node.dashboard.history.recorder import StepFact
from swarm_node.dashboard.history.store import HistoryError
from swarm_node.dashboard.view_builder import SETTLE_S, unique_names
from swarm_node.dashboard.views import ModelView, PathView, StepView
from swarm_node.gateway.role import GatewayRole
from swarm_node.settings.config import Config
from swarm_protocol import limits
from swarm_protocol.envelope import seal_record
from swarm_protocol.errors import ConfigError, PeerTimeout
from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord, PathCounts, publish_key


def in_a_world(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    async def scene() -> None:
        async with world() as found:
            await test(found)

    @wraps(test)
    def run() -> None:
        virtual_time.run(scene())

    del run.__wrapped__  # or pytest would take it for a fixture
    return run


def committed(run: str, outer_step: int, group: tuple[str, ...]) -> StepFact:
    step = StepView(
        outer_step=outer_step,
        at=1.0,
        loss=2.0,
        digest="",
        num_members=len(group),
        num_tokens=15 * len(group),
        seconds=None,
        phases_s={},
        bytes_per_parameter=None,
        validation_loss=None,
    )
    return StepFact(run=run, group=group, step=step)


def the_model(found: World) -> ModelView:
    [model] = found.collector.overview().models
    return model


@in_a_world
async def test_overview_says_when_nothing_was_looked_up_yet(found: World) -> None:
    overview = found.collector.overview()
    assert overview.stale == "the network's records have not been read yet"
    assert (overview.num_nodes, overview.models, overview.runs) == (0, (), ())
    await found.looks()
    assert found.collector.overview().stale is None


@in_a_world
async def test_a_node_is_shown_with_its_own_counts_and_the_path_of_the_dashboard(found: World) -> None:
    alder = await found.join("alder", paths=PathCounts(direct=3, punched=2))
    birch = await found.join("birch", paths=PathCounts(relayed=1))
    await found.join("an older version")
    found.paths[alder] = PeerPath(kind="punched", sent_bytes=3 * 2**20 + 10, received_bytes=2**20 - 1)
    await found.membership.rtts_ms([alder])
    await asyncio.sleep(1)
    await found.looks(2)
    nodes = {node.name: node for node in found.collector.nodes()}
    assert {name: node.paths for name, node in nodes.items()} == {
        "alder": {"direct": 3, "dialled back": 0, "punched": 2, "relayed": 0},
        "birch": {"direct": 0, "dialled back": 0, "punched": 0, "relayed": 1},
        "an older version": None,
    }
    assert found.collector.overview().paths == {"direct": 3, "dialled back": 0, "punched": 2, "relayed": 1}
    path = nodes["alder"].from_here
    assert path is not None
    assert path.rtt_ms is not None
    assert path == PathView(kind="punched", rtt_ms=path.rtt_ms, sent_bytes=3 * 2**20, received_bytes=0), "whole MiB"
    assert nodes["birch"].from_here is None

    found.paths[birch] = PeerPath(kind="relayed", sent_bytes=1, received_bytes=2)
    del found.paths[alder]
    await found.looks(2)
    nodes = {node.name: node for node in found.collector.nodes()}
    assert nodes["birch"].from_here == PathView(kind="relayed", rtt_ms=None, sent_bytes=0, received_bytes=0)
    assert nodes["alder"].from_here is None


@in_a_world
async def test_dashboard_s_own_node_is_marked(found: World) -> None:
    await found.join("alder")
    found.membership.announce(node_record("the dashboard"))
    await asyncio.sleep(1)
    await found.looks(2)
    assert {node.name: node.is_observer for node in found.collector.nodes()} == {"alder": False, "the dashboard": True}


@in_a_world
async def test_nodes_are_counted_and_shown_by_name(found: World) -> None:
    await found.join("birch", reachability="relay")
    alder = await found.join("alder", decode_tokens_per_s=20.0)
    await asyncio.sleep(1)
    await found.looks(2)
    overview = found.collector.overview()
    assert overview.num_nodes == 2
    assert overview.nodes_by_state == {"alive": 2, "leaving": 0}
    assert {kind: n for kind, n in overview.nodes_by_reachability.items() if n} == {"public": 1, "relay": 1}
    assert [node.name for node in found.collector.nodes()] == ["alder", "birch"]
    detail = await found.collector.node(alder)
    assert detail is not None
    assert (detail.node.decode_tokens_per_s, detail.node.prefill_tokens_per_s) == (20.0, None)
    assert await found.collector.node("12D3KooWnobody") is None
    await asyncio.sleep(SETTLED_S)
    detail = await found.collector.node(alder)
    assert detail is not None
    assert detail.presence


@in_a_world
async def test_nodes_with_a_break_are_counted_with_the_time_of_the_first_to_lend_again(found: World) -> None:
    await found.join("alder", role="volunteer", pause="hours", lends_again_at=1795557600.0)
    await found.join("birch", role="volunteer", pause="budget", lends_again_at=1795471200.0)
    await found.join("cedar", role="volunteer", pause="budget")
    await found.join("door", role="volunteer")
    await asyncio.sleep(SETTLED_S)
    overview = found.collector.overview()
    assert (overview.num_paused, overview.lends_again_at) == (3, 1795471200.0)


@in_a_world
async def test_only_nodes_that_lend_their_machines_are_volunteers(found: World) -> None:
    await found.join("seed", role="seed")
    await found.join("door", role="gateway")
    await found.join("alder", trainer_record(3, tokens_per_s=8_000.0), role="volunteer")
    await found.join("birch", trainer_record(3, tokens_per_s=300.0))  # of a version that announces no role
    await asyncio.sleep(SETTLED_S)
    await found.join("doctor", role="visitor")
    await asyncio.sleep(5)
    overview = found.collector.overview()
    assert (overview.num_nodes, overview.num_volunteers) == (4, 2)
    assert (overview.tokens_per_s, overview.training_tokens_per_s) == (None, 8_300.0)
    assert "doctor" not in {node.name for node in found.collector.nodes()}
    assert overview.happenings == (), "a visitor has not come"
    said = {each.name: each.value for _, samples in found.history.samples[-1:] for each in samples}
    assert said["training_tokens_per_s"] == 8_300.0


@in_a_world
async def test_node_has_what_it_contributed_to_a_run_of_which_the_history_lists_others(found: World) -> None:
    async def of_others(_run: str) -> tuple[ContributionTotal, ...]:
        return ()  # MAX_CONTRIBUTORS others have contributed more

    peer_id = await found.join("alder", trainer_record(3))
    for run, outer_step in (("story", 2), ("story", 3), ("other", 7)):
        found.history.record(committed(run, outer_step, (peer_id, "eve")))
    found.history.contributions = of_others  # type: ignore[method-assign]
    await asyncio.sleep(5)
    detail = await found.collector.node(peer_id)
    assert detail is not None
    assert (detail.tokens_trained, detail.rounds) == (45, 3)
    assert [(each.run, each.tokens, each.rounds) for each in detail.training] == [("story", 30, 2)]


@in_a_world
async def test_arrivals_and_departures_are_reported_and_not_nodes_that_were_there_before(found: World) -> None:
    await found.join("alder")
    await asyncio.sleep(SETTLED_S)
    assert found.collector.overview().joins_24h == 0
    assert found.collector.overview().turnover_since is not None, "it has not looked for a day"
    birch = await found.join("birch", role="gateway")
    await asyncio.sleep(5)
    assert {node.name: node.role for node in found.collector.nodes()} == {"alder": "", "birch": "gateway"}
    await found.leave("birch")
    await asyncio.sleep(5)
    overview = found.collector.overview()
    assert (overview.joins_24h, overview.leaves_24h) == (1, 1)
    assert overview.turnover_since is not None
    assert overview.turnover_since < overview.at, "the history began when the collector did"
    assert [(each.kind, each.words) for each in overview.happenings] == [
        ("leave", "birch left"),
        ("join", "birch joined"),
    ]
    assert {node.name: node.state for node in found.collector.nodes()} == {"alder": "alive", "birch": "leaving"}
    await asyncio.sleep(2 * limits.RECORD_LIFETIME_S)
    assert {node.name: node.state for node in found.collector.nodes()} == {"alder": "alive", "birch": "gone"}
    assert len(found.collector.overview().happenings) == 2, "one departure must be reported once"
    detail = await found.collector.node(birch)
    assert detail is not None
    assert detail.node.age_s > limits.RECORD_LIFETIME_S


@in_a_world
async def test_no_arrival_or_departure_is_reported_after_the_dashboard_s_machine_slept(found: World) -> None:
    alder = await found.join("alder")
    await asyncio.sleep(SETTLED_S)
    before = found.collector.overview().happenings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_network, "EPOCH_S", memory_network.EPOCH_S + 3600)
        await found.looks(3)
        assert found.collector.overview().num_nodes == 0, "all records that it knew have expired"
        found.peers["alder"][1].renew()
        await asyncio.sleep(SETTLED_S)
        assert found.collector.overview().happenings == before
        assert found.history.present[-1] == {alder}
        await found.leave("alder")
        await asyncio.sleep(5)
        assert found.collector.overview().happenings[0].words == "alder left"


@in_a_world
async def test_arrival_is_reported_after_the_clock_was_set_back(found: World) -> None:
    await found.join("alder")
    await asyncio.sleep(SETTLED_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_network, "EPOCH_S", memory_network.EPOCH_S - 3600)
        await asyncio.sleep(SETTLED_S)
        await found.join("birch")
        await asyncio.sleep(5)
        assert "birch joined" in [each.words for each in found.collector.overview().happenings]


@in_a_world
async def test_node_that_starts_after_the_dashboard_is_an_arrival_while_others_are_still_being_found(
    found: World,
) -> None:
    await asyncio.sleep(5)
    await found.join("alder", started_at=1.0)  # it was there before, and is only found now
    birch = await found.join("birch", started_at=found.network.now())
    await asyncio.sleep(3)
    assert found.history.present == [], "a node that is not found yet has not left"
    assert [each.words for each in found.collector.overview().happenings] == ["birch joined"]
    await asyncio.sleep(SETTLED_S)
    first, *later = found.history.present
    assert later
    assert all(present - first == {birch} for present in later), "the history must count one that came"


@in_a_world
async def test_every_reported_arrival_is_counted_whenever_the_dashboard_has_found_all_others(found: World) -> None:
    await asyncio.sleep(SETTLE_S - 3)
    came = set()
    for number in range(12):
        came.add(await found.join(f"node-{number}", started_at=found.network.now()))
        await asyncio.sleep(0.5)
    await asyncio.sleep(5)
    first, *_, last = found.history.present
    assert last - first == {each.peer_id for each in found.history.told} == came


@in_a_world
async def test_node_that_falls_silent_is_gone_when_its_record_expires(found: World) -> None:
    await found.join("alder")
    await asyncio.sleep(SETTLED_S)
    await found.peers["alder"][0].close()  # as if its power had failed
    await asyncio.sleep(limits.RECORD_LIFETIME_S + 5)
    assert found.collector.overview().num_nodes == 0
    assert found.collector.overview().happenings[0].words == "alder is gone: its record has expired"


@in_a_world
async def test_nodes_of_one_name_are_distinguished_also_from_those_that_are_gone(found: World) -> None:
    first = await found.join("first", serve_record(), called="vm")
    await found.join("birch")
    await found.looks(2)
    assert [node.name for node in found.collector.nodes()] == ["birch", "vm"]
    await asyncio.sleep(SETTLED_S)
    second = await found.join("second", serve_record(), called="vm")
    await found.looks(2)
    both = {f"vm …{first[-8:]}", f"vm …{second[-8:]}"}
    assert {node.name for node in found.collector.nodes()} == {"birch", *both}
    model = await found.collector.model("tiny")
    assert model is not None
    assert {server.name for server in model.servers} == both
    assert {span.name for chain in model.chains for span in chain.spans} == both
    assert f"vm …{second[-8:]} joined" in {each.words for each in found.collector.overview().happenings}
    await found.peers["first"][0].close()
    await asyncio.sleep(limits.RECORD_LIFETIME_S + 5)
    states = {node.name: node.state for node in found.collector.nodes()}
    assert states == {"birch": "alive", f"vm …{first[-8:]}": "gone", f"vm …{second[-8:]}": "alive"}


def test_name_that_ends_like_a_peer_id_or_is_long_cannot_imitate_another() -> None:
    ids = [f"12D3Koo{letter * 12}" for letter in "abcd"]
    names = unique_names(dict(zip(ids, ["vm", "vm …bbbbbbbb", "n" * 64, "n" * 64], strict=True)))
    assert list(names.values()) == [
        "vm",
        "vm …bbbbbbbb …bbbbbbbb",
        f"{'n' * 35}… …cccccccc",
        f"{'n' * 35}… …dddddddd",
    ]


@in_a_world
async def test_other_weights_under_a_model_s_name_are_reported(found: World) -> None:
    for name in ("alder", "birch"):
        await found.join(name, serve_record())
    await asyncio.sleep(5)
    assert the_model(found).other_revisions == ()
    await found.join("cedar", serve_record(0, 2, revision="forged"))
    await found.join("elm", serve_record(revision="other"))
    await asyncio.sleep(5)
    model = the_model(found)
    assert (model.revision, model.num_servers) == ("r1", 2)
    assert [(each.revision, each.num_servers, each.is_whole) for each in model.other_revisions] == [
        ("forged", 1, False),
        ("other", 1, True),
    ]


@in_a_world
async def test_model_is_incomplete_then_thin_then_whole(found: World) -> None:
    await found.join("alder", serve_record(0, 2))
    await found.join("birch", serve_record(2, 4, state="joining"))
    await asyncio.sleep(5)
    model = the_model(found)
    assert (model.health, model.missing, model.weakest_replicas) == ("incomplete", ((2, 4),), 0)
    assert model.words == "It cannot answer: nobody serves blocks 2:4 of 4; 1 server is loading some of them."
    detail = await found.collector.model("tiny")
    assert detail is not None
    assert detail.chains == ()

    found.announce("birch", serve_record(2, 4))
    await asyncio.sleep(5)
    model = the_model(found)
    assert (model.health, model.missing, model.words) == (
        "thin",
        (),
        "It answers, but each of its 4 blocks has a single server.",
    )

    await found.join("cedar", serve_record(1, 4))
    await asyncio.sleep(5)
    assert the_model(found).words == "It answers, but block 0 of 4 has a single server."
    await found.join("elm", serve_record(0, 4))
    await asyncio.sleep(5)
    assert (the_model(found).health, the_model(found).weakest_replicas) == ("whole", 2)
    kinds = [(each.kind, each.words) for each in found.collector.overview().happenings]
    assert ("model", f"tiny is whole. {the_model(found).words}") in kinds


@in_a_world
async def test_server_that_the_gateway_beside_the_dashboard_cannot_reach_does_not_count(found: World) -> None:
    alder = await found.join("alder", serve_record(0, 4))
    await asyncio.sleep(5)
    assert the_model(found).health == "thin"
    found.collector.unreachable = lambda ages_s: {peer_id for peer_id in ages_s if peer_id == alder}
    await found.looks(2)
    assert (the_model(found).health, the_model(found).num_servers) == ("incomplete", 0)
    detail = await found.collector.model("tiny")
    assert detail is not None
    assert [server.unreachable for server in detail.servers] == [True]
    assert detail.chains == ()


@in_a_world
async def test_model_shows_chains_replicas_and_speed(found: World) -> None:
    await found.join("alder", serve_record(0, 4, decode_ms_per_block=1.0, tokens_per_s=8.0))
    await found.join("birch", serve_record(0, 2, decode_ms_per_block=9.0, tokens_per_s=4.0, relayed=True))
    await found.join("cedar", serve_record(2, 4, decode_ms_per_block=9.0, tokens_per_s=4.0, next_start=0, next_end=2))
    await asyncio.sleep(5)
    detail = await found.collector.model("tiny")
    assert detail is not None
    assert detail.replicas == (2, 2, 2, 2)
    assert [[span.name for span in chain.spans] for chain in detail.chains] == [["alder"], ["birch", "cedar"]]
    assert detail.chains[0].ms_per_token < detail.chains[1].ms_per_token
    assert [server.name for server in detail.servers] == ["birch", "alder", "cedar"]
    assert (detail.servers[0].relayed, detail.servers[2].next_start, detail.servers[2].next_end) == (True, 0, 2)
    assert detail.servers[1].next_end is None
    assert (detail.model.tokens_per_s, found.collector.overview().tokens_per_s) == (12.0, 12.0)
    series = await found.collector.series("tokens_per_s/tiny", 1)
    assert series is not None
    assert series.values[-1] == 12.0


@in_a_world
async def test_overview_shows_the_gateways_time_to_first_token(found: World) -> None:
    await found.join("alder", role="gateway", first_token_p50_s=0.5, first_token_p95_s=2.0)
    await found.join("birch", role="gateway", first_token_p50_s=1.5, first_token_p95_s=4.0)
    await found.join("cedar", role="volunteer")
    await asyncio.sleep(5)
    overview = found.collector.overview()
    assert (overview.first_token_p50_s, overview.first_token_p95_s) == (1.0, 3.0)


@in_a_world
async def test_records_that_are_forged_or_from_tomorrow_are_ignored(found: World) -> None:
    liar, key = Identity(b"l" * 32), publish_key(node_record(), Identity(b"l" * 32).peer_id)
    now = found.network.now()

    def sealed(name: str, issued_at: float) -> bytes:
        record = node_record("plain")
        object.__setattr__(record, "name", name)  # its own checks would refuse it
        payload = record.to_bytes()
        return seal_record(
            liar, network_id="test", key=key, payload=payload, issued_at=issued_at, lifetime_s=60
        ).to_bytes()

    await found.join("alder", started_at=now + 86400.0)
    await found.network.offer(key, sealed("tomorrow", now + 86400.0))
    await found.network.offer(key, sealed("forged", now).replace(b"forged", b"false!"))
    await found.looks(3)
    [node] = found.collector.nodes()
    assert node.name == "alder"
    assert node.started_at <= found.network.now()

    for name in ("\u202eright to left", "two\nlines", "x" * 7000):
        await found.network.offer(key, sealed(name, found.network.now()))
        await found.looks(2)
        assert [node.name for node in found.collector.nodes()] == ["alder"]
    assert found.membership.num_malformed == 3
    assert found.collector.overview().stale is None

    await found.join("<b>&amp;")  # the writer of HTML has to escape it
    await asyncio.sleep(5)
    assert "<b>&amp;" in {node.name for node in found.collector.nodes()}


@in_a_world
async def test_failed_lookup_is_reported_and_the_last_views_stay(found: World) -> None:
    await found.join("alder", serve_record())
    await asyncio.sleep(5)
    seen_at = found.collector.overview().at
    look_up, found.membership.nodes = found.membership.nodes, _failing  # type: ignore[method-assign]
    await asyncio.sleep(5)
    overview = found.collector.overview()
    assert overview.stale == "the network's records cannot be read: no answer"
    assert (overview.at - seen_at, overview.num_nodes, len(overview.models)) == (pytest.approx(0, abs=3), 1, 1)
    found.membership.nodes = look_up  # type: ignore[method-assign]
    await asyncio.sleep(5)
    assert found.collector.overview().stale is None
    assert found.collector.overview().at > seen_at


async def _failing() -> dict[str, NodeRecord]:
    raise PeerTimeout("no answer")


@in_a_world
async def test_lookup_of_one_model_that_fails_leaves_the_rest_fresh(found: World) -> None:
    await found.join("alder", serve_record())
    await asyncio.sleep(5)
    seen_at = found.collector.overview().at

    async def fail(_model: str) -> dict[str, object]:
        raise PeerTimeout("no answer")

    found.membership.servers = fail  # type: ignore[method-assign,assignment]
    await asyncio.sleep(5)
    overview = found.collector.overview()
    assert overview.stale == "tiny could not be looked up: no answer"
    assert overview.at > seen_at
    assert the_model(found).health == "thin"


@in_a_world
async def test_lookups_begin_by_the_clock_and_a_slow_one_skips_a_turn(found: World) -> None:
    clock, begun, nodes = asyncio.get_running_loop().time, list[float](), found.membership.nodes
    await found.looks()
    takes_s = [0.3, 0.9, 0.0, 2.4, 0.6, 0.1]

    async def timed() -> dict[str, NodeRecord]:
        begun.append(clock())
        await asyncio.sleep(takes_s[len(begun) - 1] if len(begun) <= len(takes_s) else 0.0)
        return await nodes()

    found.membership.nodes = timed  # type: ignore[method-assign]
    await asyncio.sleep(9.5)
    assert [round(at - begun[0], 3) for at in begun] == [0, 1, 2, 3, 6, 7, 8, 9][: len(begun)]
    assert len(begun) >= 7


@in_a_world
async def test_slow_lookup_is_reported_while_it_runs(found: World) -> None:
    await found.join("alder")
    await asyncio.sleep(5)

    async def slow() -> dict[str, NodeRecord]:
        await asyncio.sleep(60)
        return {}

    found.membership.nodes = slow  # type: ignore[method-assign]
    await asyncio.sleep(2)
    num_changes = 0
    async with asyncio.timeout(30):
        while num_changes < 5:
            await found.looks()
            num_changes += 1
    overview = found.collector.overview()
    assert overview.stale == "the network is slow to answer"
    assert overview.num_nodes == 1


@in_a_world
async def test_collector_goes_on_after_a_bug_in_making_views(found: World) -> None:
    await found.join("alder")
    await asyncio.sleep(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view_builder, "counted", _broken)
        await asyncio.sleep(5)
        assert "failed to read the network's records" in (found.collector.overview().stale or "")
        assert found.collector.overview().num_nodes == 1
    await asyncio.sleep(5)
    assert found.collector.overview().stale is None


def _broken(*_: object) -> None:
    raise ZeroDivisionError("a bug")


@in_a_world
async def test_failing_history_is_reported_and_everything_else_goes_on(found: World) -> None:
    alder = await found.join("alder", serve_record())
    found.history.failure = HistoryError("/home/ada/history.sqlite is locked", remedy="end the other program")
    await asyncio.sleep(5)
    overview = found.collector.overview()
    assert overview.stale == "the history cannot be used; the dashboard's log says why"
    assert (overview.num_nodes, overview.joins_24h, overview.happenings) == (1, None, ())
    detail = await found.collector.node(alder)
    assert detail is not None
    assert (detail.presence, detail.uptime_share) == ((), None)


@in_a_world
async def test_made_up_models_and_runs_do_not_make_a_lookup_slower(found: World) -> None:
    await found.join("alder", serve_record())
    for number in range(12):
        names = tuple(f"fake-{number}-{index}" for index in range(limits.MAX_MODELS_PER_NODE))
        network = found.internet.network()
        found.stack.push_async_callback(network.close)
        membership = await found.stack.enter_async_context(Membership(network))
        for name in names[:4]:
            membership.announce(serve_record(model=name))
        membership.announce(node_record(f"liar {number}"))
    await asyncio.sleep(2)
    asked: list[str] = []
    servers = found.membership.servers

    async def count(model: str) -> object:
        asked.append(model)
        return await servers(model)

    found.membership.servers = count  # type: ignore[method-assign,assignment]
    await found.looks(2)
    asked.clear()
    await found.looks(4)
    assert len(asked) <= 4 * 8
    assert len(set(asked)) == len(asked), "each must have its turn"
    assert len(found.collector.overview().models) <= 32


def test_collector_is_closed_when_its_user_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its background fetches would otherwise go on."""
    closed: list[Collector] = []

    async def close(collector: Collector) -> None:
        closed.append(collector)

    monkeypatch.setattr(Collector, "close", close)

    async def scene() -> None:
        network = MemoryInternet().network(Identity(bytes(32)))
        async with Membership(network) as membership:
            config = Config(home=tmp_path, name="test")
            running = running_collector(network, membership, config, tmp_path / "history.sqlite", dict)
            with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="enough")):
                async with running as collector:
                    raise ConfigError("enough")
            assert closed == [collector]
        await network.close()

    virtual_time.run(scene())


@pytest.mark.parametrize("place", ["{}/missing/history.sqlite", "sqlite:///{}/missing/history.sqlite"])
def test_history_in_a_directory_that_is_not_there_is_refused(tmp_path: Path, place: str) -> None:
    config = Config(home=tmp_path, name="test", history=place.format(tmp_path))
    with pytest.raises(ConfigError, match=r"no directory .*missing") as error:
        check_folders(config)
    assert error.value.remedy == "check --history"
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("kind", [GatewayRole, DashboardRole])
def test_directory_in_place_of_the_history_is_refused_before_the_node_starts(
    kind: type[GatewayRole | DashboardRole], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        kind(Config(home=tmp_path, name="test", history=str(tmp_path), port=0))
    assert str(error.value) == f"the history cannot be kept in the directory {tmp_path}: name a file with --history"


@pytest.mark.parametrize("kind", [GatewayRole, DashboardRole])
def test_checkpoints_in_a_directory_that_is_not_there_are_refused_before_the_node_starts(
    kind: type[GatewayRole | DashboardRole], tmp_path: Path
) -> None:
    config = Config(home=tmp_path, name="test", checkpoints=tmp_path / "missing", port=0)
    with pytest.raises(ConfigError, match=r"no directory .*missing") as error:
        kind(config)
    assert error.value.remedy == "check --checkpoints"
