"""The members of a run whom evidence convicts of a lie, as far as this member knows.

Evidence is checked before it counts, is passed on once to everybody who trains, and is shown to whoever forms a group
with the liar. A convicted peer is in no group of this member and votes in none, as long as this process runs. Nothing
follows from a peer's word: whoever sends evidence that proves nothing is not listened to again.

`RunMember` owns it; the check runs in the executor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from swarm_protocol.errors import IntegrityError, PeerViolation, SwarmError
from swarm_protocol.proof_messages import Evidence

from swarm.training.run.methods import short
from swarm.training.state.evidence import Verdict, check
from swarm.training.state.state_sync import RunContext

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0
"""For a megabyte of evidence over a slow line; others that get it pass it on."""
MAX_CONVICTED = 1024
"""Evidence that is kept: more peers than four full groups."""


class Convictions:
    """The convictions of one member of `context`. `on_new` is called with each new verdict."""

    def __init__(self, context: RunContext, on_new: Callable[[Verdict], None]) -> None:
        self._context = context
        self._on_new = on_new
        self._evidence: dict[str, bytes] = {}
        self._ignored: set[str] = set()
        self._checking = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def peers(self) -> frozenset[str]:
        return frozenset(self._evidence)

    async def take(self, data: bytes, sender: str) -> None:
        """Take evidence from `sender`, a peer or this member. Raises PeerViolation or IntegrityError if it proves
        nothing."""
        if sender in self._ignored:
            raise PeerViolation("its evidence has proved nothing before", peer_id=sender)
        async with self._checking:  # one at a time, whoever sends
            try:
                verdict = await self._verdict(data)
            except (PeerViolation, IntegrityError):
                if sender != self._context.network.peer_id:
                    self._ignored.add(sender)
                raise
        if verdict is None or len(self._evidence) >= MAX_CONVICTED:
            return
        self._evidence[verdict.peer_id] = data
        logger.warning("%s is convicted: %s", short(verdict.peer_id), verdict.reason)
        self._send(data, {*self._context.replica.roster} - {sender, verdict.peer_id})
        self._on_new(verdict)

    def show(self, peers: Iterable[str]) -> None:
        """Send all evidence to `peers`."""
        for data in self._evidence.values():
            self._send(data, peers)

    def close(self) -> None:
        for task in self._sending:
            task.cancel()

    async def _verdict(self, data: bytes) -> Verdict | None:
        """Return what the evidence in `data` proves; None if its peer is convicted already."""
        context, now = self._context, self._context.network.now()
        evidence = Evidence.from_bytes(data)
        signer, _ = context.signatures.read_part(evidence.statement, now)
        if signer in self._evidence:
            return None
        work = asyncio.get_running_loop().run_in_executor
        return await work(context.executor, check, evidence, context.signatures, context.replica.config, now)

    def _send(self, data: bytes, peers: Iterable[str]) -> None:
        for peer in peers:
            if peer != self._context.network.peer_id and peer not in self._evidence:
                task = asyncio.get_running_loop().create_task(self._send_to(peer, data))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _send_to(self, peer: str, data: bytes) -> None:
        network, methods = self._context.network, self._context.methods
        try:
            await network.call(peer, methods.evidence, data, timeout_s=SEND_TIMEOUT_S)
        except SwarmError as error:
            logger.info("%s did not take evidence: %s", short(peer), error)
