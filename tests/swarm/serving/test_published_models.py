"""Published models: whom a client believes about a name, and that it uses only what the publisher signed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.published_models import PUBLISHER, STRANGER, published_copy
from swarm.client import AsyncClient, KnownPublishers, possession_checks
from swarm.client.async_client import ClientOptions
from swarm.client.possession_checks import MAX_UNANSWERED, PROVEN_S, RETRY_S, FailedProof
from swarm.client.publishers import MAX_REMEMBERED, parse_publisher
from swarm.router.routing import NoChain
from swarm.serving.evidence.server_convictions import ServerConvictions
from swarm.serving.model.model_files import open_model
from swarm.serving.peer_shares import Sharer
from swarm.serving.server import possession_server
from swarm.serving.server.deployment import DTYPES, ServerOptions
from swarm.serving.server.possession_server import CHALLENGE_S, HOUR_S, ChunkBudget
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, PeerViolation
from swarm_protocol.manifest_messages import CHUNK_BYTES, PublishedManifest
from swarm_protocol.records import SERVED_DTYPES
from swarm_protocol.serving_messages import FilesResponse

HALVES = [(0, 3), (3, 6)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, llama_dir: Path) -> Path:
    """Return the honest servers' model, as its publisher signed it."""
    place = tmp_path_factory.mktemp("published") / "tiny"
    published_copy(llama_dir, place)
    return place


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, write_tiny: Any) -> Callable[[str], Path]:
    """`others("strange")` returns other weights that another key published under that name; `others("bare")`,
    unpublished ones.
    """
    root = tmp_path_factory.mktemp("others")
    bare = write_tiny(root / "bare", "llama", seed=5)
    published_copy(bare, root / "strange", publisher=STRANGER)
    return lambda name: root / name


def manifest_in(place: Path) -> PublishedManifest:
    manifest = open_model(place).manifest
    assert manifest is not None
    return manifest


async def serve(box: Any, directory: Path, spans: Sequence[tuple[int, int]]) -> None:
    """Let servers of another directory join under the same name, and wait until all see them."""
    honest, box.directory = box.directory, directory
    for start, end in spans:
        await box.add(start, end)
    await box.known(len(box.servers))
    await asyncio.sleep(3)
    box.directory = honest


@asynccontextmanager
async def client_of(box: Any, publishers: KnownPublishers | Sequence[str]) -> AsyncIterator[None]:
    """Let the box's requests go through another client."""
    first = box.client
    box.client = AsyncClient(
        network=box.network, membership=box.membership, options=ClientOptions(publishers=publishers)
    )
    try:
        yield
    finally:
        await box.client.aclose()
        box.client = first


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("kind", ["strange", "bare"])
def test_newcomers_with_other_weights_cannot_take_a_published_name_from_two_honest_servers(
    boxes: Any, published: Path, others: Callable[[str], Path], kind: str
) -> None:
    """Without a believed publisher, six records outvote two.

    A pinned publisher's manifest outranks any number of them.
    """

    async def scenario() -> None:
        async with boxes(published, HALVES) as box:
            await serve(box, others(kind), HALVES * 3)
            async with client_of(box, [f"tiny={PUBLISHER.peer_id}"]):
                assert await box.tokens() == box.expected()
                (status,) = await box.client.models()
                assert (status.publisher, status.standing) == (PUBLISHER.peer_id, "pinned")
                assert (status.manifest, status.dtype) == (manifest_in(published).digest.hex(), "float32")
                assert [each.num_servers for each in status.others] == [6]
            async with client_of(box, [PUBLISHER.peer_id]):
                assert await box.tokens() == box.expected()
            assert await box.tokens() != box.expected(), (
                "a client that believes no publisher uses what most servers serve"
            )

    virtual_time.run(scenario())


def test_publisher_of_the_first_answer_is_remembered_and_a_change_is_reported(
    boxes: Any, published: Path, others: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[dict[str, str]] = []

    async def scenario() -> None:
        async with boxes(published, HALVES) as box:
            remembering = KnownPublishers(on_new=lambda known: kept.append(dict(known)))
            async with client_of(box, remembering):
                assert (await box.client.model("tiny")).standing == "new"
                assert await box.tokens() == box.expected()
                assert (await box.client.model("tiny")).standing == "remembered"
            assert kept == [{"tiny": PUBLISHER.peer_id}]
            await serve(box, others("strange"), HALVES * 2)
            with caplog.at_level(logging.WARNING, logger="swarm.client.catalog"):
                async with client_of(box, KnownPublishers(remembered=kept[0])):
                    for _ in range(2):
                        assert await box.tokens() == box.expected()
            revision = manifest_in(others("strange")).revision("float32")
            assert lines(caplog) == [
                f"tiny is now published by {STRANGER.peer_id}, too ({revision[:12]} by 4 servers); it is not used, "
                f"since this client believes {PUBLISHER.peer_id}. If the model has a new publisher, say so: "
                f"--publisher tiny={STRANGER.peer_id}"
            ]
            async with client_of(box, KnownPublishers([f"tiny={STRANGER.peer_id}"], remembered=kept[0])):
                assert await box.tokens() != box.expected(), "the new pin names the other publisher"

    virtual_time.run(scenario())


def test_request_is_not_answered_by_other_weights_when_the_publisher_s_servers_are_gone(
    boxes: Any, published: Path, others: Callable[[str], Path]
) -> None:
    async def scenario() -> None:
        async with boxes(published, [(0, 6)]) as box:
            await serve(box, others("bare"), [(0, 6)])
            async with client_of(box, KnownPublishers(remembered={"tiny": PUBLISHER.peer_id})):
                assert await box.tokens() == box.expected()
                await box.servers[box.who["s0"]].close()
                await asyncio.sleep(70)  # its record expires
                with pytest.raises(ConfigError, match=f"nobody serves tiny as {PUBLISHER.peer_id} published it"):
                    await box.tokens()
                other = open_model(others("bare")).revision()
                assert len(await box.tokens(model=f"tiny@{other}")) == 16, "a request may name the revision itself"
            async with client_of(box, [PUBLISHER.peer_id]):
                with pytest.raises(ConfigError, match="nobody serves tiny as"):
                    await box.tokens(model=f"tiny@{other}")

    virtual_time.run(scenario())


@pytest.mark.parametrize("liar", ["no manifest", "another's manifest", "a forged manifest", "of more blocks"])
def test_server_is_not_used_when_it_announces_a_manifest_without_its_files(
    boxes: Any, published: Path, others: Callable[[str], Path], liar: str
) -> None:
    """Its weights are not the publisher's, and no client that believes the publisher uses it."""

    async def scenario() -> None:
        async with boxes(others("bare"), [(0, 6)]) as box:
            (server,) = box.servers.values()
            loaded, honest = server.deployed.loaded, manifest_in(published)
            announced = replace(honest, digest=bytes(32)) if liar == "no manifest" else honest
            revision = announced.revision("float32") if liar != "another's manifest" else loaded.revision
            server.deployed.loaded = replace(loaded, manifest=announced, revision=revision)
            if liar == "a forged manifest":
                forged = bytearray(honest.signed)
                forged[-1] ^= 1
                server.deployed.loaded = replace(server.deployed.loaded, manifest=replace(honest, signed=bytes(forged)))
            if liar == "of more blocks":
                announced = replace(honest, manifest=replace(honest.manifest, blocks=honest.manifest.blocks[:5]))
                server.deployed.loaded = replace(server.deployed.loaded, manifest=announced)
                server.announcer._server.deployed.loaded.span.num_blocks = 7
            server.announcer.announce()
            await asyncio.sleep(3)
            async with client_of(box, [PUBLISHER.peer_id]):
                with pytest.raises(ConfigError, match="nobody serves tiny as"):
                    await box.tokens()

    virtual_time.run(scenario())


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "config.json"])
def test_swapped_file_is_refused_and_fetched_from_another_server(
    boxes: Any, published: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with boxes(published, [(0, 6), (0, 6)]) as box:
            first, second = box.servers.items()
            for peer_id, server in (first, second):
                response = FilesResponse.from_bytes(server.deployed.loaded.files)
                files = dict(response.files) | {name: response.files.get(name, b"") + b" "}
                bad = FilesResponse(revision=response.revision, files=files).to_bytes()
                server.deployed.loaded = replace(server.deployed.loaded, files=bad)
                with caplog.at_level(logging.WARNING, logger="swarm.client.assets_cache"):
                    if peer_id == first[0]:
                        assert await box.tokens() == box.expected()
                    else:
                        async with client_of(box, [PUBLISHER.peer_id]):
                            with pytest.raises(
                                PeerViolation, match=f"does not serve tiny as it was published: its {name}"
                            ):
                                await box.tokens()
                            assert box.client._state.health.distrusted == set(box.servers)
            told = [line for line in lines(caplog) if f"its {name} is not" in line]
            assert {line.split()[0] for line in told} == set(box.servers)

    virtual_time.run(scenario())


def test_unpublished_model_is_served_and_used(boxes: Any, others: Callable[[str], Path]) -> None:
    async def scenario() -> None:
        async with boxes(others("bare"), HALVES) as box:
            assert await box.tokens() == box.expected()
            (status,) = await box.client.models()
            assert (status.publisher, status.manifest, status.dtype, status.standing) == ("", "", "", "unpublished")

    virtual_time.run(scenario())


def test_client_is_delayed_only_once_by_a_stranger_that_never_sends_its_manifest(
    boxes: Any, published: Path, others: Callable[[str], Path]
) -> None:
    async def scenario() -> None:
        async with boxes(published, [(0, 6)]) as box:
            clock = asyncio.get_running_loop().time
            await serve(box, others("strange"), [(0, 6)])
            silent = list(box.servers.values())[1]
            asked = asyncio.Event()

            async def never(_peer_id: str, _request: bytes) -> bytes:
                asked.set()
                await asyncio.sleep(3600)
                return b""

            silent._network.release("serving.manifest/tiny")
            await silent._network.serve("serving.manifest/tiny", never)
            since_s = clock()
            await box.client.model("tiny")
            assert asked.is_set()
            assert clock() - since_s <= 6
            async with client_of(box, KnownPublishers(remembered={"tiny": PUBLISHER.peer_id})):
                assert await box.tokens() == box.expected()
                since_s = clock()
                assert await box.tokens() == box.expected()
                assert clock() - since_s < 2

    virtual_time.run(scenario())


@asynccontextmanager
async def proving(
    boxes: Any, published: Path, spans: Sequence[tuple[int, int]]
) -> AsyncIterator[tuple[Any, list[FailedProof]]]:
    """Return a box of servers with a client that believes the publisher, and the failed proofs."""
    failures: list[FailedProof] = []
    async with boxes(published, []) as box:
        for start, end in spans:
            await box.add(start, end, ServerOptions())
        await box.known(len(spans))
        first, box.client = (
            box.client,
            AsyncClient(
                network=box.network,
                membership=box.membership,
                options=ClientOptions(publishers=[PUBLISHER.peer_id], on_failed_proof=failures.append),
            ),
        )
        try:
            yield box, failures
        finally:
            await box.client.aclose()
            box.client = first


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.1)


def test_servers_prove_their_files_at_the_first_request_and_an_hour_later(
    boxes: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PROVEN_S == 3600
    monkeypatch.setattr(possession_checks, "PROVEN_S", 60.0)

    async def scenario() -> None:
        async with proving(boxes, published, HALVES) as (box, failures):
            for _ in range(3):
                assert await box.tokens() == box.expected()
            await until(lambda: box.client.possession.num_proven == 2)
            await asyncio.sleep(2 * 60)
            assert box.client.possession.num_proven == 2
            assert await box.tokens() == box.expected()
            await until(lambda: box.client.possession.num_proven == 4)
            assert (failures, box.client.possession.num_unanswered) == ([], 0)

    virtual_time.run(scenario())


def test_sessions_continue_elsewhere_when_a_server_lacks_the_published_files(
    boxes: Any, published: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tree is over bytes that differ from the publisher's in one tensor."""

    async def scenario() -> None:
        async with proving(boxes, published, [(0, 6), (0, 6)]) as (box, failures):
            liar, honest = box.servers
            lets_lie(box.servers[liar])
            box.servers[liar].possession._reads = asyncio.Semaphore(0)
            await box.servers[honest].drain()  # so that the liar is used first
            await asyncio.sleep(5)
            generation = box.generate()
            tokens = [(await anext(aiter(generation))).token_id]
            assert not failures
            box.servers[honest].state = "serving"
            box.servers[honest].announcer.announce()
            box.servers[liar].possession._reads.release()
            tokens += [token.token_id async for token in generation]
            assert tokens == box.expected()
            await until(lambda: bool(failures))
            assert [(each.peer_id, each.model) for each in failures] == [(liar, "tiny")]
            assert failures[0].answer, "the signed answer must be kept"
            assert box.client._state.health.distrusted == {liar}
            standing = box.client.checks.reputation.track_records[liar]
            assert standing.is_barred(standing.at), "the ban must outlast the client"
            assert any(f"{liar} does not hold tiny as it was published" in line for line in lines(caplog))
            for _ in range(3):
                assert await box.tokens() == box.expected()
                assert [hop["peer_id"] for hop in box.client.trace()["hops"]] == [honest]

    virtual_time.run(scenario())


@pytest.mark.parametrize("silence", ["refuses", "hangs"])
def test_server_without_a_proof_is_used_only_where_no_other_can_answer(
    boxes: Any, published: Path, caplog: pytest.LogCaptureFixture, silence: str
) -> None:
    """A server that lets the client wait is treated the same; a refusal can mean that strangers used up its budget."""

    async def scenario() -> None:
        async with proving(boxes, published, [(0, 6), (0, 6)]) as (box, failures):
            silent, honest = box.servers
            possession = box.servers[silent].possession
            offered, reads = possession._offered, possession._reads
            if silence == "refuses":
                possession._offered = lambda: None
            else:
                possession._reads = asyncio.Semaphore(0)
            for number in range(MAX_UNANSWERED):
                assert await box.tokens() == box.expected()
                await until(lambda number=number: box.client.possession.num_unanswered == number + 1)
                await asyncio.sleep(2 * RETRY_S)
            health = box.client._state.health
            assert health.unproven == {silent}
            told = [line for line in lines(caplog) if line.startswith(f"{silent} gave no proof of tiny 5 times")]
            assert len(told) == 1
            standing = box.client.checks.reputation.track_records.get(silent)
            assert (standing is None) == (silence == "refuses")
            assert standing is None or (standing.num_disputed, standing.is_barred(standing.at)) == (1.0, False)
            for _ in range(3):
                assert await box.tokens() == box.expected()
                assert [hop["peer_id"] for hop in box.client.trace()["hops"]] == [honest]
            await box.servers[honest].drain()
            await asyncio.sleep(5)
            assert await box.tokens() == box.expected()
            assert [hop["peer_id"] for hop in box.client.trace()["hops"]] == [silent]
            possession._offered, possession._reads = offered, reads
            await asyncio.sleep(2 * RETRY_S)
            assert await box.tokens() == box.expected()
            await until(lambda: not health.unproven)
            assert (failures, health.avoid) == ([], set())

    virtual_time.run(scenario())


def lets_lie(server: Any) -> None:
    """Let a server prove, for every file, the bytes and the tree of another one."""
    loaded = server.deployed.loaded
    trees = list(loaded.held.values())
    server.deployed.loaded = replace(loaded, held=dict(zip(loaded.held, [*trees[1:], trees[0]], strict=True)))


def test_client_avoids_a_convicted_server_that_it_never_checked(
    boxes: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only another server has challenged it, while no client was there."""
    monkeypatch.setattr(possession_checks.PossessionChecks, "start", lambda _checks, _servers, _published: None)

    async def scenario() -> None:
        async with proving(boxes, published, [(0, 6)] * 3) as (box, failures):
            liar, *honest = box.servers
            lets_lie(box.servers[liar])
            await until(lambda: any(liar in server.convictions.peers for server in box.servers.values()), within_s=900)
            await until(lambda: all(liar in box.servers[peer_id].convictions.peers for peer_id in honest))
            for _ in range(4):
                assert await box.tokens() == box.expected()
                assert {hop["peer_id"] for hop in box.client.trace()["hops"]} <= set(honest)
            assert box.client.convictions.peers == {liar}
            assert (failures, box.client.possession.num_proven, box.client.possession.num_failed) == ([], 0, 0)
            for peer_id in honest:
                await box.servers[peer_id].drain()
            await asyncio.sleep(5)
            with pytest.raises(NoChain):
                await box.tokens()

    virtual_time.run(scenario())


def test_servers_challenge_each_other_at_a_low_rate_and_count_the_bytes(boxes: Any, published: Path) -> None:
    async def scenario() -> None:
        async with proving(boxes, published, HALVES) as (box, _failures):
            await asyncio.sleep(1200)
            for server in box.servers.values():
                asked = server.challenges
                assert asked.num_outcomes.keys() == {"proven"}
                assert 1200 / (1.5 * CHALLENGE_S) - 1 <= asked.num_outcomes["proven"] <= 1200 / (0.5 * CHALLENGE_S)
                assert asked.num_bytes <= asked.num_outcomes["proven"] * (CHUNK_BYTES + 2048)
                assert not server.convictions.peers

    virtual_time.run(scenario())


def test_server_that_has_left_is_not_challenged(boxes: Any, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record has expired by the time of the draw, and was valid when the pause before it began."""
    monkeypatch.setattr(possession_server, "CHALLENGE_S", 200.0)

    async def scenario() -> None:
        async with proving(boxes, published, HALVES) as (box, _failures):
            await asyncio.sleep(5)
            gone, stays = box.servers
            box.internet.crash(gone)
            await asyncio.sleep(1000)
            assert not box.servers[stays].challenges.num_outcomes

    virtual_time.run(scenario())


def test_convictions_that_others_use_stay_open_when_a_server_or_client_closes(boxes: Any, published: Path) -> None:
    async def scenario() -> None:
        async with boxes(published, []) as box:
            shared = ServerConvictions(box.network, box.membership)
            server = await box.add(0, 6, ServerOptions(convictions=shared))
            client = AsyncClient(network=box.network, membership=box.membership, convictions=shared)
            under_way = shared._spawn(asyncio.sleep(30.0))
            await server.close()
            assert len(shared._listeners) == 1
            await client.aclose()
            assert not shared._listeners, "a closed client must be neither notified nor kept alive"
            await asyncio.sleep(60)
            assert under_way.done()
            assert not under_way.cancelled()
            await shared.close()

    virtual_time.run(scenario())


class UsedUp(ChunkBudget):
    """A budget that other peers have always used up."""

    def take(self, _sharer: Sharer, _num_chunks: int, _now_s: float) -> float:
        return HOUR_S


def test_servers_are_still_used_when_strangers_use_up_their_proofs(
    boxes: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers keep using up all that a server proves in an hour, and the client has no session that lasts."""
    monkeypatch.setattr(possession_checks, "PROVEN_S", 60.0)

    async def scenario() -> None:
        async with proving(boxes, published, HALVES) as (box, failures):
            for server in box.servers.values():
                server.possession._users_budget = server.possession._others_budget = UsedUp()
            num_asked = 0
            while num_asked < 2 * MAX_UNANSWERED:
                assert await box.tokens() == box.expected()
                await asyncio.sleep(2 * RETRY_S)
                num_asked = box.client.possession.num_unanswered
            health = box.client._state.health
            assert await box.tokens() == box.expected()
            await until(lambda: health.unproven == set(box.servers))
            assert await box.tokens() == box.expected()
            assert (failures, health.distrusted, health.barred) == ([], set(), set())
            (status,) = await box.client.models()
            assert status.unreachable == ()
            assert not box.client.checks.reputation.track_records, "nothing may outlive the client"

    virtual_time.run(scenario())


def test_weight_dtypes_are_those_of_servers() -> None:
    assert tuple(DTYPES) == SERVED_DTYPES


def test_publishers_are_parsed_bounded_and_refused_with_one_line() -> None:
    peer_id, other = PUBLISHER.peer_id, STRANGER.peer_id
    assert parse_publisher(peer_id) == ("", peer_id)
    assert parse_publisher(f"owner/story={peer_id}") == ("owner/story", peer_id)
    for wrong in ("", "story", f"={peer_id}", f"a b={peer_id}", f"story={peer_id}x"):
        with pytest.raises(ConfigError, match="is not a publisher"):
            parse_publisher(wrong)
    known = KnownPublishers([peer_id, f"story={other}"], remembered={"tiny": other})
    assert known.believed("story") == {other}
    assert known.believed("tiny") == known.believed("any") == {peer_id}
    many = KnownPublishers(remembered={f"m{i}": peer_id for i in range(MAX_REMEMBERED + 9)})
    assert not many.believed("m8")
    assert many.believed("m9")
    with pytest.raises(ValueError, match="peer id"):
        KnownPublishers(remembered={"story": "nobody"})
