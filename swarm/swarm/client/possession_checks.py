"""Asks the servers of a published model to prove that they hold its files, while requests use them.

A server is asked when a request first uses its model, and about once in PROVEN_S after that. Requests do not wait for
the answer. A server whose proof is wrong is distrusted, its connections end, and its sessions continue on others. A
server that gives no answer is asked again with later requests. After MAX_UNANSWERED times it is used only if no other
server can answer, until it gives a proof: others can keep an honest server from answering, so silence convicts nobody.

The result also goes into the reputation, which routing uses and which outlives the client. A server that signed a wrong
proof is barred. A server whose answer is unusable, or that gave none MAX_UNANSWERED times, gets a dispute, which fades.
A server that refuses because it has proven enough for now gets none. Evidence against a server goes to `convict`.

There is one per client, on its event loop; `close` ends its tasks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarm_protocol.errors import PeerRefused, PeerUnreachable, SwarmError
from swarm_protocol.manifest_messages import PublishedManifest
from swarm_protocol.records import ServeRecord

from swarm.ended_tasks import end_tasks
from swarm.network.interface import Network
from swarm.newest_items import NewestItems
from swarm.serving.manifest.possession import AskedProof, ask_for_proof
from swarm.serving.session.peer_health import MAX_PEERS, PeerHealth
from swarm.trust.reputation import Outcome

PROVEN_S = 3600.0
"""Mean seconds until a server that has proven its files is asked again."""

RETRY_S = 60.0
"""Seconds until a server that gave no answer is asked again."""

MAX_UNANSWERED = 5
MAX_AT_ONCE = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedProof:
    """A server that failed to prove that it holds the files that it announces. `answer` is the proof that it sent."""

    peer_id: str
    model: str
    reason: str
    answer: bytes


@dataclass(frozen=True, slots=True)
class _Asked:
    """The time at which a server may be asked again, and how often in a row it gave no answer."""

    again_s: float
    num_unanswered: int = 0


class PossessionChecks:
    """Asks servers for proofs. Counts `num_proven` proofs, and `num_unanswered` and `num_failed` requests; `on_failure`
    is called with each failure."""

    def __init__(
        self,
        network: Network,
        health: PeerHealth,
        *,
        drop: Callable[[str], None],
        on_failure: Callable[[FailedProof], None],
        convict: Callable[[bytes], None],
    ) -> None:
        self.num_proven = 0
        self.num_unanswered = 0
        self.num_failed = 0
        self._network = network
        self._health = health
        self._drop = drop
        self._on_failure = on_failure
        self._convict = convict
        self._asked = NewestItems[tuple[str, bytes], _Asked](MAX_PEERS)
        self._tasks: dict[tuple[str, bytes], asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(MAX_AT_ONCE)
        self._rng = random.SystemRandom()

    def start(self, servers: Mapping[str, ServeRecord], published: PublishedManifest) -> None:
        """Start to ask the servers of a model that are due."""
        now_s = asyncio.get_running_loop().time()
        distrusted = self._health.distrusted
        for peer_id, record in servers.items():
            key = peer_id, published.digest
            is_due = key not in self._asked or self._asked[key].again_s <= now_s
            if is_due and key not in self._tasks and peer_id not in distrusted and record.state == "serving":
                task = asyncio.create_task(self._prove(peer_id, record, published), name=f"proof of {peer_id}")
                self._tasks[key] = task

    async def close(self) -> None:
        await end_tasks(*self._tasks.values())

    async def _prove(self, peer_id: str, record: ServeRecord, published: PublishedManifest) -> None:
        try:
            async with self._free:
                asked = await ask_for_proof(self._network, peer_id, record, published, self._rng)
        finally:
            del self._tasks[peer_id, published.digest]
        match asked.outcome:
            case "proven":
                self.num_proven += 1
                self._health.proven(peer_id)
                self._asked[peer_id, published.digest] = _Asked(self._later(PROVEN_S))
            case "failed":
                self._failed(peer_id, published, asked)
            case "unanswered":
                assert asked.error is not None
                self._unanswered(peer_id, published, asked.error)

    def _unanswered(self, peer_id: str, published: PublishedManifest, error: SwarmError) -> None:
        """Ask again later. A server may be busy, moving or gone; one that never answers may not hold the files."""
        self.num_unanswered += 1
        num = self._asked.get((peer_id, published.digest), _Asked(0.0)).num_unanswered
        if not isinstance(error, PeerUnreachable):
            num += 1
            if num == MAX_UNANSWERED:
                logger.warning(
                    "%s gave no proof of %s %d times and is used only where no other can answer: %s",
                    peer_id,
                    published.manifest.name,
                    num,
                    error.message,
                )
                if not isinstance(error, PeerRefused):
                    # strangers may have used up the server's budget, which must not affect it beyond this client
                    self._health.reputation.note(peer_id, "disputed", time.time())
        if num >= MAX_UNANSWERED:
            self._health.doubt(peer_id)
        wait_s = min(PROVEN_S, max(RETRY_S, error.retry_after_s)) if isinstance(error, PeerRefused) else RETRY_S
        self._asked[peer_id, published.digest] = _Asked(self._later(wait_s), num)

    def _failed(self, peer_id: str, published: PublishedManifest, asked: AskedProof) -> None:
        self.num_failed += 1
        reason = asked.error.message if asked.error is not None else ""
        failure = FailedProof(peer_id=peer_id, model=published.manifest.name, reason=reason, answer=asked.answer)
        logger.warning(
            "%s does not hold %s as it was published and is not used any more: %s", peer_id, failure.model, reason
        )
        self._asked[peer_id, published.digest] = _Asked(self._later(PROVEN_S))
        outcome: Outcome = "failed" if asked.evidence else "disputed"
        self._health.reputation.note(peer_id, outcome, time.time())
        self._health.distrust(peer_id, f"it does not hold {failure.model} as it was published: {reason}")
        self._drop(peer_id)
        self._on_failure(failure)
        if asked.evidence:
            self._convict(asked.evidence)

    def _later(self, wait_s: float) -> float:
        """Return an unpredictable time after about `wait_s`."""
        return asyncio.get_running_loop().time() + wait_s * self._rng.uniform(0.5, 1.5)
