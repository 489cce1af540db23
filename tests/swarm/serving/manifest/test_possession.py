"""Proofs of possession: which chunks are drawn, what an honest answer contains, and how each lie is detected."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support import wrong_possession
from support.plain_records import serve_record
from support.published_models import PUBLISHER, STRANGER, flip_a_byte, published_copy
from swarm.network.memory.memory_network import MemoryInternet
from swarm.serving.manifest.possession import (
    MAX_AGE_S,
    STATEMENT_LIFETIME_S,
    AskedProof,
    ask_for_proof,
    check_answer,
    check_possession,
    draw,
)
from swarm.serving.manifest.verification import tree_of
from swarm.serving.peer_shares import Sharer
from swarm.serving.server.deployment import LoadedSpan, ServerOptions, load
from swarm.serving.server.possession_server import HOUR_S, MAX_CHUNKS, ChunkBudget, PossessionServer
from swarm.testing import virtual_time
from swarm_protocol.envelope import Envelope, seal
from swarm_protocol.errors import IntegrityError, PeerRefused, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import (
    CHUNK_BYTES,
    POSSESSION_METHOD,
    BlockBytes,
    ByteRange,
    DrawnChunk,
    ModelManifest,
    PossessionRequest,
    PossessionResponse,
    PublishedManifest,
    WeightFile,
)
from swarm_protocol.served_evidence_messages import WrongPossession

SERVER, ASKER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
SPAN = (2, 4)


@pytest.fixture
def published(llama_dir: Path, tmp_path: Path) -> PublishedManifest:
    return published_copy(llama_dir, tmp_path / "tiny")


@pytest.fixture
def loaded(published: PublishedManifest, tmp_path: Path) -> LoadedSpan:
    return load(tmp_path / "tiny", *SPAN, ServerOptions())


def request_of(published: PublishedManifest, seed: int = 0) -> PossessionRequest:
    drawn = draw(published.manifest, *SPAN, random.Random(seed))
    return PossessionRequest(manifest=published.digest, nonce=bytes(32), drawn=drawn)


def ask(
    loaded: LoadedSpan,
    request: PossessionRequest,
    change: Callable[[bytes], bytes] = lambda answer: answer,
    *,
    identity: Identity = SERVER,
) -> bytes:
    """Have a server answer, check the answer, and return the signed statement."""

    async def scenario() -> bytes:
        network = MemoryInternet().network(identity=identity)
        server = PossessionServer(network, "tiny", offered=lambda: loaded, users=set)
        answer = change(await server.answer(ASKER.peer_id, request.to_bytes()))
        assert loaded.manifest is not None
        return check_answer(
            loaded.manifest.manifest,
            request,
            answer,
            asker=ASKER.peer_id,
            peer_id=SERVER.peer_id,
            network_id=network.network_id,
            now=network.now(),
        )

    return virtual_time.run(scenario())


def convicted(published: PublishedManifest, statement: bytes) -> str:
    """Return what a third party finds in the evidence, or "" if it convicts nobody."""
    wrong = WrongPossession(manifest=published.signed, statement=statement)
    try:
        return check_possession(wrong, MemoryInternet().network().network_id).peer_id
    except PeerViolation:
        return ""


def test_request_can_draw_every_byte_of_a_span_and_no_other() -> None:
    file = WeightFile(name="weights", num_bytes=40 * CHUNK_BYTES, sha256=bytes(32), root=bytes(32))
    blocks = tuple(
        BlockBytes(ranges=(ByteRange(file=0, start=start * CHUNK_BYTES, num_bytes=size * CHUNK_BYTES),))
        for start, size in ((2, 3), (5, 10), (15, 5))
    )
    before, after = (
        (ByteRange(file=0, start=0, num_bytes=9),),
        (ByteRange(file=0, start=39 * CHUNK_BYTES, num_bytes=9),),
    )
    manifest = ModelManifest(
        name="tiny",
        publisher=PUBLISHER.peer_id,
        published_at=1,
        files=(),
        weights=(file,),
        before=before,
        blocks=blocks,
        after=after,
    )
    rng = random.Random(0)
    counts = Counter(each.index for _ in range(2000) for each in draw(manifest, 0, 2, rng))
    assert set(counts) - {0} == set(range(2, 15))
    assert max(counts.values()) < 1.5 * min(count for index, count in counts.items() if index)
    assert {each.index for _ in range(500) for each in draw(manifest, 2, 3, rng)} - {39} == set(range(15, 20))


def test_honest_server_proves_its_files_to_any_peer_with_the_manifest(
    loaded: LoadedSpan, published: PublishedManifest
) -> None:
    for seed in range(20):
        assert convicted(published, ask(loaded, request_of(published, seed))) == ""


def test_server_fails_and_convicts_itself_when_one_tensor_is_changed(
    loaded: LoadedSpan, published: PublishedManifest
) -> None:
    """Like honest software over a changed file, it answers with its own bytes and a tree over them."""
    statements: list[bytes] = []

    def kept(answer: bytes) -> bytes:
        statements.append(PossessionResponse.from_bytes(answer).statement)
        return answer

    target = next(iter(published.manifest.blocks[2].ranges)).file
    path = loaded.held[target].path
    honest = tree_of(path)
    flip_a_byte(path, at=next(iter(published.manifest.blocks[2].ranges)).start)
    lying = replace(loaded, held={**loaded.held, target: replace(loaded.held[target], tree=tree_of(path))})
    assert tree_of(path).root != honest.root
    drawn = (DrawnChunk(file=target, index=published.manifest.blocks[2].ranges[0].start // CHUNK_BYTES),)
    with pytest.raises(IntegrityError, match=f"{path.name} is not the file that {PUBLISHER.peer_id} published"):
        ask(lying, replace(request_of(published), drawn=drawn), kept)
    assert convicted(published, statements[0]) == SERVER.peer_id
    with pytest.raises(PeerViolation, match="is not what was signed"):
        ask(loaded, replace(request_of(published), drawn=drawn))  # the old tree over the changed bytes


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda sent: replace(sent, chunks=(b"x", *sent.chunks[1:])), "is not what was signed"),
        (lambda sent: replace(sent, chunks=sent.chunks[1:]), "another number of chunks"),
        (lambda sent: replace(sent, statement=sent.statement[:-1]), "malformed"),
        (lambda sent: replace(sent, statement=sent.statement[:-64] + bytes(64)), "signature"),
        (lambda sent: replace(sent, statement=b""), "malformed"),
    ],
)
def test_made_up_answer_is_no_evidence(loaded: LoadedSpan, published: PublishedManifest, lie: Any, why: str) -> None:
    with pytest.raises((PeerViolation, IntegrityError), match=why):
        ask(loaded, request_of(published), lambda answer: lie(PossessionResponse.from_bytes(answer)).to_bytes())


def test_answer_to_another_request_or_by_another_key_is_no_evidence(
    loaded: LoadedSpan, published: PublishedManifest
) -> None:
    earlier: list[bytes] = []
    ask(loaded, request_of(published), lambda answer: earlier.append(answer) or answer)  # type: ignore[func-returns-value]
    fresh = replace(request_of(published), nonce=bytes(31) + b"1")
    with pytest.raises(PeerViolation, match="to another request"):
        ask(loaded, fresh, lambda _answer: earlier[0])
    with pytest.raises(PeerViolation, match="signed by another"):
        ask(loaded, fresh, identity=STRANGER)


def test_backdated_answer_is_no_evidence(loaded: LoadedSpan, published: PublishedManifest) -> None:
    """Its signer would be barred for a shorter time because of it."""

    def dated_back(answer: bytes) -> bytes:
        sent = PossessionResponse.from_bytes(answer)
        signed = Envelope.parse(sent.statement)
        earlier = signed.issued_at - MAX_AGE_S - 1
        again = seal(
            SERVER,
            purpose=signed.purpose,
            network_id=signed.network_id,
            subject=signed.subject,
            payload=signed.payload,
            issued_at=earlier,
            expires_at=earlier + STATEMENT_LIFETIME_S,
        )
        return replace(sent, statement=again.to_bytes()).to_bytes()

    with pytest.raises(PeerViolation, match="signed long ago"):
        ask(loaded, request_of(published), dated_back)


@pytest.mark.parametrize("ahead_s", [60.0, -MAX_AGE_S - 60.0])
def test_check_is_unanswered_and_not_failed_when_the_servers_clock_differs(
    loaded: LoadedSpan, published: PublishedManifest, ahead_s: float
) -> None:
    """The asking peer's clock may be the wrong one, and then no server would remain."""

    async def scenario() -> AskedProof:
        internet = MemoryInternet()
        asker, network = internet.network(identity=ASKER), internet.network(identity=SERVER)
        now, record = network.now, serve_record(*SPAN)
        server = PossessionServer(network, "tiny", offered=lambda: loaded, users=set)
        await network.serve(f"{POSSESSION_METHOD}/tiny", server.answer)
        with patch.object(network, "now", lambda: now() + ahead_s):
            return await ask_for_proof(asker, SERVER.peer_id, record, published, random.Random(0))

    asked = virtual_time.run(scenario())
    assert (asked.outcome, asked.evidence) == ("unanswered", b"")
    assert asked.error is not None
    assert "clock" in asked.error.message


def test_server_refuses_a_request_and_reads_no_file_when_it_does_not_serve_the_model(
    loaded: LoadedSpan, published: PublishedManifest
) -> None:
    request = request_of(published)
    other = next(i for i in range(len(published.manifest.weights)) if i not in loaded.held)
    held = next(iter(loaded.held))
    for drawn in (DrawnChunk(file=other, index=0), DrawnChunk(file=held, index=10**6)):
        with pytest.raises(PeerViolation, match="no file that is served here"):
            ask(loaded, replace(request, drawn=(drawn,)))
    with pytest.raises(PeerRefused, match="that manifest of tiny is not served here"):
        ask(loaded, replace(request, manifest=bytes(32)))


def test_budget_bounds_peers_networks_and_all_peers_and_refills() -> None:
    budget, peer = ChunkBudget(), Sharer("lan", "a")
    most_of_all, most_of_network, most_of_peer = MAX_CHUNKS
    got = sum(not budget.take(peer, 4, now_s=float(second)) for second in range(int(HOUR_S))) * 4
    assert most_of_peer <= got <= 2 * most_of_peer + 4
    while not budget.take(peer, 4, now_s=HOUR_S):
        pass
    wait_s = budget.take(peer, 4, now_s=HOUR_S)
    assert 0 < wait_s <= 4 * HOUR_S / most_of_peer
    assert budget.take(peer, 4, now_s=HOUR_S + wait_s + 1e-6) == 0
    budget, names = ChunkBudget(), [f"peer {number}" for number in range(2000)]
    assert sum(not budget.take(Sharer("lan", name), 4, now_s=0.0) for name in names) * 4 == most_of_network
    got = sum(not budget.take(Sharer(name, name), 4, now_s=0.0) for name in names) * 4
    assert got == most_of_all - most_of_network


def test_peers_with_a_session_get_proofs_when_strangers_use_up_the_budget(
    loaded: LoadedSpan, published: PublishedManifest
) -> None:
    async def scenario() -> None:
        server = PossessionServer(
            MemoryInternet().network(identity=SERVER), "tiny", offered=lambda: loaded, users=lambda: {"user"}
        )
        request = replace(request_of(published), drawn=request_of(published).drawn[:1]).to_bytes()
        server._others_budget = ChunkBudget((1, 1, 1))
        await server.answer(ASKER.peer_id, request)
        with pytest.raises(PeerRefused, match="enough was proven for now") as refused:
            await server.answer(STRANGER.peer_id, request)
        assert refused.value.retry_after_s > 0
        server._users = lambda: {STRANGER.peer_id}
        assert await server.answer(STRANGER.peer_id, request)

    virtual_time.run(scenario())


def test_proofs_for_many_keys_of_one_network_leave_some_for_another_network(
    loaded: LoadedSpan, published: PublishedManifest
) -> None:
    async def scenario() -> None:
        internet = MemoryInternet()
        server = PossessionServer(internet.network(identity=SERVER), "tiny", offered=lambda: loaded, users=set)
        server._others_budget = ChunkBudget((4, 2, 1))
        request = replace(request_of(published), drawn=request_of(published).drawn[:1]).to_bytes()
        keys = [Identity(bytes([90 + number]) * 32).peer_id for number in range(4)]
        internet.providers = dict.fromkeys(keys, "one network")
        for key in keys[:2]:
            await server.answer(key, request)
        for key in keys[2:]:
            with pytest.raises(PeerRefused, match="enough was proven for now"):
                await server.answer(key, request)
        assert await server.answer(STRANGER.peer_id, request)

    virtual_time.run(scenario())


def test_check_fails_without_a_request_when_a_server_announces_blocks_beyond_the_manifest() -> None:
    announced = replace(wrong_possession.record(), num_blocks=9, start=7, end=8)

    async def scenario() -> None:
        network = MemoryInternet().network(identity=Identity(bytes([61]) * 32))
        asked = await ask_for_proof(network, SERVER.peer_id, announced, wrong_possession.manifest(), random.Random(0))
        assert (asked.outcome, asked.evidence, type(asked.error)) == ("failed", b"", PeerViolation)
        one = replace(announced, start=0, end=1)
        asked = await ask_for_proof(network, SERVER.peer_id, one, wrong_possession.manifest(), random.Random(0))
        assert asked.outcome == "unanswered", "it was asked and did not answer"

    virtual_time.run(scenario())
