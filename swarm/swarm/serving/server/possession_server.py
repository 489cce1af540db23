"""Answers requests for proofs that a server holds the files of its blocks, and challenges other servers to give such
proofs.

Chunks are read from the files again for each answer (`PossessionServer`). A budget limits the chunks per hour, for each
peer and for all together, so that proofs cannot be used to download a model or to keep a disk busy. Peers that have a
session here share a separate budget. The counts are changed only in the network's event loop.

From time to time a server of a published model challenges another one, drawn at random, to prove one chunk
(`PeerChallenges`), so that liars are found even when no client checks. A server that signs a wrong proof is convicted,
and the evidence goes to the other servers of the model (`swarm.serving.evidence.server_convictions`). Other failures
and silence are only counted: servers do not route requests, and clients check for themselves. A server's challenges
cost at most one chunk and its path, some 65 KiB, per CHALLENGE_S / 2, however many servers there are. Each server is
challenged about as often as it challenges. `PeerChallenges.run` is a task of the server.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from swarm_protocol.errors import PeerRefused, PeerViolation, SwarmError
from swarm_protocol.manifest_messages import (
    POSSESSION_PURPOSE,
    ChunkPath,
    DrawnChunk,
    PossessionRequest,
    PossessionResponse,
    PossessionStatement,
    PublishedManifest,
)
from swarm_protocol.records import ServeRecord

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.newest_items import NewestItems
from swarm.serving.evidence.server_convictions import ServerConvictions
from swarm.serving.manifest.possession import STATEMENT_LIFETIME_S, ProofOutcome, ask_for_proof
from swarm.serving.manifest.verification import HeldFile, read_chunk
from swarm.serving.peer_shares import Limits, Party, Sharer
from swarm.serving.server.deployment import LoadedSpan

logger = logging.getLogger(__name__)

CHALLENGE_S = 90.0
"""Mean seconds between two challenges: 40 chunks an hour, of the 64 that one server gives another in an hour."""

NUM_DRAWN = 1
"""Chunks of one challenge: many small challenges find a server that lacks a part as soon as a few large ones would."""

MAX_CHUNKS: Limits = (1024, 512, 64)
"""Maximum chunks in an hour for all peers without a session, and again for all with one, for those of one provider's
network, and for one peer: 64 MiB, 16 MiB, and 4 MiB, a proof every few minutes."""

HOUR_S = 3600.0
MAX_PEERS = 1024
MAX_READS = 2
"""Maximum answers that are read from the disk at the same time."""


class ChunkBudget:
    """A token bucket for chunks, for each peer, each network and all peers, that refills within an hour. It is pure:
    the time is an argument."""

    def __init__(self, max_chunks: Limits = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._left = NewestItems[Party, tuple[float, float]](MAX_PEERS)  # chunks left, and when

    def take(self, sharer: Sharer, num_chunks: int, now_s: float) -> float:
        """Take chunks for a peer and return 0. If too few are left, return the seconds until there are enough."""
        most = {sharer[:depth]: limit for depth, limit in enumerate(self._max_chunks)}
        left = {key: self._left_at(key, most[key], now_s) - num_chunks for key in most}
        wait_s = max(-left[key] * HOUR_S / most[key] for key in most)
        if wait_s <= 0:
            for key in most:
                self._left[key] = left[key], now_s
        return max(0.0, wait_s)

    def _left_at(self, key: Party, most: int, now_s: float) -> float:
        left, since_s = self._left.get(key, (most, now_s))
        return min(most, left + (now_s - since_s) * most / HOUR_S)


class PossessionServer:
    """Proves possession of the span that `offered` returns. `users` returns the peers that have sessions here."""

    def __init__(
        self,
        network: Network,
        name: str,
        *,
        offered: Callable[[], LoadedSpan | None],
        users: Callable[[], Collection[str]],
    ) -> None:
        self._network = network
        self._name = name
        self._offered = offered
        self._users = users
        self._users_budget = ChunkBudget()
        self._others_budget = ChunkBudget()
        self._reads = asyncio.Semaphore(MAX_READS)

    async def answer(self, peer_id: str, data: bytes) -> bytes:
        """Answer a PossessionRequest. Raises PeerRefused, PeerViolation, and IntegrityError if a file is gone."""
        request = PossessionRequest.from_bytes(data)
        loaded = self._offered()
        if loaded is None or loaded.manifest is None or loaded.manifest.digest != request.manifest:
            raise PeerRefused(f"that manifest of {self._name} is not served here", remedy="ask another server")
        held = loaded.held
        for drawn in request.drawn:
            if drawn.file not in held or drawn.index >= held[drawn.file].tree.num_leaves:
                raise PeerViolation("the request draws a chunk of no file that is served here", peer_id=peer_id)
        now_s = asyncio.get_running_loop().time()
        budget = self._users_budget if peer_id in self._users() else self._others_budget
        sharer = Sharer(self._network.provider_of(peer_id), peer_id)
        wait_s = budget.take(sharer, len(request.drawn), now_s)
        if wait_s:
            raise PeerRefused("enough was proven for now", remedy="ask again later", retry_after_s=wait_s)
        async with self._reads:
            chunks = await asyncio.to_thread(_chunks, held, request.drawn)
        statement = self._statement(peer_id, request, held)
        return PossessionResponse(statement=statement, chunks=chunks).to_bytes()

    def _statement(self, asker: str, request: PossessionRequest, held: Mapping[int, HeldFile]) -> bytes:
        statement = PossessionStatement(
            manifest=request.manifest,
            nonce=request.nonce,
            asker=asker,
            drawn=request.drawn,
            paths=tuple(_path(held[each.file], each.index) for each in request.drawn),
        )
        return self._network.sign(POSSESSION_PURPOSE, self._name, statement.to_bytes(), lifetime_s=STATEMENT_LIFETIME_S)


def _path(held: HeldFile, index: int) -> ChunkPath:
    [leaf] = held.tree.leaves(index, index + 1)
    return ChunkPath(digest=leaf, siblings=b"".join(held.tree.proof(index, index + 1)))


def _chunks(held: Mapping[int, HeldFile], drawn: Sequence[DrawnChunk]) -> tuple[bytes, ...]:
    return tuple(read_chunk(held[each.file].path, each.index) for each in drawn)


class PeerChallenges:
    """Challenges other servers from one server. `num_outcomes` counts the outcomes, and `num_bytes` the bytes of the
    answers. `offered` returns the manifest of the model that is served now, or None if it is unpublished."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        name: str,
        convictions: ServerConvictions,
        *,
        offered: Callable[[], PublishedManifest | None],
    ) -> None:
        self.num_outcomes: Counter[ProofOutcome] = Counter()
        self.num_bytes = 0
        self._network = network
        self._membership = membership
        self._name = name
        self._convictions = convictions
        self._offered = offered
        self._rng = random.SystemRandom()

    async def run(self) -> None:
        """Challenge servers until cancelled, for the first time after a pause."""
        is_first = True
        while True:
            pause_s = CHALLENGE_S
            try:
                if (published := self._offered()) is not None:
                    # looked up each time: a server that has left since would be counted as one that gives no proof
                    servers = await self._membership.servers(self._name)
                    await self._convictions.learn(self._name, servers)
                    if not is_first:
                        await self._challenge(servers, published)
                    is_first, pause_s = False, CHALLENGE_S * self._rng.uniform(0.5, 1.5)
            except SwarmError as error:
                logger.info("cannot see whom to challenge about %s: %s", self._name, error)
            except Exception:  # a defect here, which must not end the server
                logger.exception("a challenge of another server of %s failed", self._name)
            await asyncio.sleep(pause_s)

    async def _challenge(self, servers: Mapping[str, ServeRecord], published: PublishedManifest) -> None:
        left_out = self._convictions.peers | {self._network.peer_id}
        others = [
            peer_id
            for peer_id, record in servers.items()
            if record.manifest == published.digest and record.state == "serving" and peer_id not in left_out
        ]
        if not others:
            return
        peer_id = self._rng.choice(others)
        asked = await ask_for_proof(self._network, peer_id, servers[peer_id], published, self._rng, num_drawn=NUM_DRAWN)
        self.num_outcomes[asked.outcome] += 1
        self.num_bytes += len(asked.answer)
        if asked.outcome != "proven":
            logger.info("%s did not prove that it holds %s: %s", peer_id, self._name, asked.error)
        if asked.evidence:
            self._convictions.found(asked.evidence)
