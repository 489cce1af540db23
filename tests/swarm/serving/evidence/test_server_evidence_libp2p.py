"""Evidence about servers, and challenges between them, over real libp2p connections."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from support.network_worlds import libp2p_node
from support.wrong_possession import CHUNKS, MODEL, TREE, against_nobody, manifest, record
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.serving.evidence.server_convictions import ServerConvictions
from swarm.serving.manifest.possession import STATEMENT_LIFETIME_S, ask_for_proof
from swarm_protocol.envelope import seal_now
from swarm_protocol.errors import PeerViolation
from swarm_protocol.hash_tree import leaf_digest
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import (
    POSSESSION_METHOD,
    POSSESSION_PURPOSE,
    ChunkPath,
    PossessionRequest,
    PossessionResponse,
    PossessionStatement,
)
from swarm_protocol.served_evidence_messages import SERVER_EVIDENCE_METHOD


async def prove(network: Network, identity: Identity, *, lies: bool) -> None:
    """Answer challenges about the made-up model as a server does, from its own chunks or from others."""

    async def answer(peer_id: str, data: bytes) -> bytes:
        request = PossessionRequest.from_bytes(data)
        chunks = [bytes(len(CHUNKS[each.index])) if lies else CHUNKS[each.index] for each in request.drawn]
        said = PossessionStatement(
            manifest=request.manifest,
            nonce=request.nonce,
            asker=peer_id,
            drawn=request.drawn,
            paths=tuple(
                ChunkPath(digest=leaf_digest(chunk), siblings=b"".join(TREE.proof(each.index, each.index + 1)))
                for each, chunk in zip(request.drawn, chunks, strict=True)
            ),
        )
        sealed = seal_now(
            identity,
            network.network_id,
            purpose=POSSESSION_PURPOSE,
            subject=MODEL,
            payload=said.to_bytes(),
            now=network.now(),
            lifetime_s=STATEMENT_LIFETIME_S,
        )
        return PossessionResponse(statement=sealed, chunks=tuple(chunks)).to_bytes()

    await network.serve(f"{POSSESSION_METHOD}/{MODEL}", answer)


def test_libp2p_evidence_from_one_challenge_convicts_a_liar_at_nodes_that_receive_or_ask(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:

            async def node(name: str, peers: tuple[str, ...] = ()) -> tuple[Network, Membership, ServerConvictions]:
                network = await libp2p_node(tmp_path / name, peers=peers)
                stack.push_async_callback(network.close)
                membership = await stack.enter_async_context(Membership(network))
                held = ServerConvictions(network, membership)
                stack.push_async_callback(held.close)
                return network, membership, held

            asker, _, found = await node("asker")
            addrs = tuple(await asker.addrs())
            liar, liars, _ = await node("liar", addrs)
            honest, others, heard = await node("honest", addrs)
            for membership in (liars, others):
                membership.announce(record())
            await prove(liar, Identity.load(tmp_path / "liar"), lies=True)
            await prove(honest, Identity.load(tmp_path / "honest"), lies=False)
            for held in (found, heard):
                await held.serve(MODEL)

            chance = random.Random(0)
            asked = await ask_for_proof(asker, honest.peer_id, record(), manifest(), chance, num_drawn=1)
            assert (asked.outcome, asked.evidence) == ("proven", b"")
            asked = await ask_for_proof(asker, liar.peer_id, record(), manifest(), chance, num_drawn=1)
            assert asked.outcome == "failed"
            assert asked.evidence
            async with asyncio.timeout(100):
                while honest.peer_id not in await found._membership.servers(MODEL):
                    await asyncio.sleep(0.1)
                found.found(asked.evidence)
                while not heard.peers == found.peers == {liar.peer_id}:  # the evidence was sent to it
                    await asyncio.sleep(0.05)
            client, _, learned = await node("client", addrs)
            await learned.learn(MODEL, {honest.peer_id: record()}, within_s=10.0)  # and returned to a peer that asks
            assert learned.peers == {liar.peer_id}
            nothing = against_nobody(Identity(b"x" * 32), client.network_id, client.now())
            for reason in ("the statement is correct", "earlier evidence proved nothing"):
                with pytest.raises(PeerViolation, match=reason):
                    await client.call(honest.peer_id, f"{SERVER_EVIDENCE_METHOD}/{MODEL}", nothing, timeout_s=60.0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
