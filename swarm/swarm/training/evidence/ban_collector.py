"""Asks members of a run for the evidence that they hold: for members that join, and for observers.

The caller checks what a peer shows before it counts. No state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection

from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout, PeerViolation
from swarm_protocol.proof_messages import EvidenceRequest

from swarm.network.interface import EndOfStream
from swarm.training.evidence.bans import MAX_EVIDENCE_BYTES
from swarm.training.state.proof_reader import CALL_TIMEOUT_S, ProofReader

MAX_ASKED_FOR_EVIDENCE = 4
"""Members that are asked: evidence that an honest member holds is also shown to who forms a group with the liar."""
COLLECT_TIMEOUT_S = 60.0


async def collect(reader: ProofReader, peer: str, known: Collection[str]) -> AsyncGenerator[bytes, None]:
    """Yield the evidence that `peer` holds against others than `known`, unchecked. Close it after use.

    Raises SwarmError, and PeerViolation beyond MAX_BANS pieces or MAX_EVIDENCE_BYTES.
    """
    request = EvidenceRequest(run=reader.run, known=tuple(sorted(known)[: limits.MAX_BANS]))
    num_bytes = num_pieces = 0
    deadline_s = asyncio.get_running_loop().time() + COLLECT_TIMEOUT_S
    async with reader.network.stream(peer, reader.methods.bans, timeout_s=CALL_TIMEOUT_S) as stream:
        await stream.send(request.to_bytes())
        await stream.finish()
        while True:
            try:
                data = await stream.receive()
            except EndOfStream:
                return
            num_bytes, num_pieces = num_bytes + len(data), num_pieces + 1
            if num_bytes > MAX_EVIDENCE_BYTES or num_pieces > limits.MAX_BANS:
                raise PeerViolation("it shows more evidence than any member keeps", peer_id=peer)
            if asyncio.get_running_loop().time() > deadline_s:
                raise PeerTimeout("its evidence does not come", peer_id=peer)
            yield data
