"""A server of a published model challenges the others: now and then one of them, drawn by chance, to prove one chunk.

So liars are found while no client looks. A server that signs a wrong proof is convicted, and the evidence goes to the
other servers of the model (`swarm.serving.evidence.server_convictions`). Other failures and silence are counted, and
nothing follows from them: a server routes no requests, and clients see for themselves.

It costs at most one chunk and its path, some 65 KiB, in CHALLENGE_S / 2, however many servers there are. Each server is
challenged about as often as it challenges. `run` is one task of the server's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping

from swarm_protocol.errors import SwarmError
from swarm_protocol.manifest_messages import PublishedManifest
from swarm_protocol.records import ServeRecord

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.serving.evidence.possession_call import ProofOutcome, ask_for_proof
from swarm.serving.evidence.server_convictions import ServerConvictions

CHALLENGE_S = 90.0
"""Mean pause between two challenges. 40 chunks an hour, of the 64 that one server gives another in an hour."""

NUM_DRAWN = 1
"""Chunks of one challenge: many small ones find a server that lacks a part as soon as a few large ones would."""

logger = logging.getLogger(__name__)


class PeerChallenges:
    """The challenges of one server. `num_outcomes` counts them, and `num_bytes` those of the answers. `offered` returns
    the manifest of what is served now, None of an unpublished model."""

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
        """Challenge until cancelled, the first time after a pause."""
        is_first = True
        while True:
            pause_s = CHALLENGE_S
            try:
                if (published := self._offered()) is not None:
                    # a server that has left since an earlier lookup would be counted as one that gives no proof
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
