"""One request to a server to prove that it holds the files of its blocks, and what its answer comes to."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarm_protocol import limits
from swarm_protocol.envelope import OutOfTime
from swarm_protocol.errors import IntegrityError, PeerViolation, SwarmError
from swarm_protocol.manifest_messages import (
    POSSESSION_METHOD,
    PossessionRequest,
    PossessionResponse,
    PublishedManifest,
)
from swarm_protocol.records import ServeRecord

from swarm.network.interface import Network
from swarm.serving.evidence.wrong_possession import possession_evidence
from swarm.serving.manifest.possession import NUM_DRAWN, check_answer, draw

DEADLINE_S = 30.0
"""256 KiB over 70 kbit/s. A server that takes longer is of no use for answers either."""

ProofOutcome: TypeAlias = Literal["proven", "failed", "unanswered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedProof:
    """Says what a request came to. `failed` is a wrong or unusable `answer`, and `evidence` what convicts the server by
    it, empty if nothing does; `error` says why a proof failed, or why there was no answer."""

    outcome: ProofOutcome
    answer: bytes = b""
    evidence: bytes = b""
    error: SwarmError | None = None


async def ask_for_proof(
    network: Network,
    peer_id: str,
    record: ServeRecord,
    published: PublishedManifest,
    rng: random.Random,
    *,
    num_drawn: int = NUM_DRAWN,
) -> AskedProof:
    """Ask the server of `record` for `num_drawn` chunks of its blocks, within DEADLINE_S. One that announces blocks
    that the manifest does not have has failed, and is not asked."""
    if record.end > published.manifest.num_blocks:
        error = PeerViolation(
            f"it announces blocks up to {record.end} of {published.manifest.num_blocks}", peer_id=peer_id
        )
        return AskedProof(outcome="failed", error=error)
    request = PossessionRequest(
        manifest=published.digest,
        nonce=secrets.token_bytes(limits.DIGEST_BYTES),
        drawn=draw(published.manifest, record.start, record.end, rng, num_drawn),
    )
    try:
        answer = await network.call(
            peer_id,
            f"{POSSESSION_METHOD}/{published.manifest.name}",
            request.to_bytes(),
            timeout_s=DEADLINE_S,
            max_bytes=PossessionResponse.MAX_BYTES,
        )
    except SwarmError as error:
        return AskedProof(outcome="unanswered", error=error)
    try:
        check_answer(
            published.manifest,
            request,
            answer,
            asker=network.peer_id,
            peer_id=peer_id,
            network_id=network.network_id,
            now=network.now(),
        )
    except (IntegrityError, PeerViolation) as error:
        evidence = possession_evidence(published, peer_id, answer, network.network_id)
        # the wrong clock may be this one's, and all servers would fail
        is_failed = bool(evidence) or not isinstance(error, OutOfTime)
        return AskedProof(
            outcome="failed" if is_failed else "unanswered", answer=answer, evidence=evidence, error=error
        )
    return AskedProof(outcome="proven", answer=answer)
