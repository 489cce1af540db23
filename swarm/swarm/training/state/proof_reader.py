"""Asks peers of a run for the certificates of their states and for evidence, as a member or from outside.

Certificates are checked here. Callers check evidence themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection
from concurrent.futures import Executor
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field

from swarm_protocol import limits
from swarm_protocol.errors import IntegrityError, PeerTimeout, PeerViolation, SwarmError
from swarm_protocol.identity import Identity, short_id
from swarm_protocol.member_messages import Standing, StandingRequest
from swarm_protocol.proof_messages import EvidenceRequest

from swarm.network.interface import EndOfStream, Network
from swarm.newest_items import NewestItems
from swarm.threads import in_executor
from swarm.training.run.methods import Methods
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import (
    MAX_HISTORY_BYTES,
    MAX_HISTORY_LINKS,
    CertificateHistory,
    Proof,
)
from swarm.training.state.endorsement import Endorsements
from swarm.training.trainer_events import OtherHistory

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
"""Deadline of a small message over a bad link."""
HISTORY_TIMEOUT_S = 60.0
"""Deadline for all links that a peer shows: MAX_HISTORY_BYTES at 2 Mbit/s."""
EVIDENCE_TIMEOUT_S = 60.0
"""Deadline for all evidence that a peer shows."""
MAX_HELD_EVIDENCE_BYTES = 128 << 20
"""Maximum evidence that is kept, or taken from one peer: thousands of pieces of the usual size, or two of the
largest."""

MAX_APART = 64
"""Maximum peers with a state that does not follow from the trusted one that are remembered."""

SMALL_BYTES = 1 << 13
"""The largest certificate or manifest that is checked on the event loop, in ten milliseconds at most."""

MAX_REMEMBERED = 32
MAX_REMEMBERED_BYTES = 1 << 21
"""Limits of the cache of checked certificates, which peers show again every few seconds. Those of a run with a thousand
trainers are large."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProofReader:
    """Asks peers of one run for the certificates of their states, and checks them. `executor` checks large ones; None:
    the event loop's default. `endorsements` takes in the author's endorsements that peers show. `apart` are peers whose
    states do not follow from the trusted one, each with a state that the peer has shown."""

    network: Network
    signatures: RunSignatures
    methods: Methods
    executor: Executor | None = None
    endorsements: Endorsements = field(default_factory=Endorsements)
    apart: dict[str, Proof] = field(default_factory=dict)
    _remembered: NewestItems[bytes, Proof] = field(default_factory=lambda: NewestItems(MAX_REMEMBERED), repr=False)
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @classmethod
    def of_outsider(cls, network: Network, run: SignedRun) -> ProofReader:
        """Return a reader for a process that is not a member of `run` and signs nothing."""
        signatures = RunSignatures.of_run(run, Identity.generate(), network.network_id)
        return cls(network=network, signatures=signatures, methods=Methods(run.run_id))

    @property
    def run(self) -> str:
        return self.signatures.run

    async def check(self, certificate: bytes, *, is_own: bool = False) -> Proof:
        """Return what `certificate` proves. Checked certificates are cached. Large ones are checked off the loop, one
        at a time, since strangers can send some, too; one that this member made itself (`is_own`) does not wait for
        them. Raises PeerViolation or IntegrityError."""
        check, now, remembered = self.signatures.check_certificate, self.network.now(), self._remembered
        if certificate in remembered:
            remembered.move_to_end(certificate)
        elif len(certificate) <= SMALL_BYTES:
            self._remember(certificate, check(certificate, now))
        else:
            async with nullcontext() if is_own else self._checking:
                if certificate not in remembered:
                    self._remember(certificate, await in_executor(self.executor, check, certificate, now))
        return remembered[certificate]

    def _remember(self, certificate: bytes, proof: Proof) -> None:
        remembered = self._remembered
        remembered[certificate] = proof
        while sum(map(len, remembered)) > MAX_REMEMBERED_BYTES:
            remembered.popitem(last=False)

    def note_apart(self, peer: str, link: Proof) -> None:
        """Remember that `peer` shows `link`, which does not follow from the trusted state as far as is known."""
        if peer in self.apart or len(self.apart) < MAX_APART:
            self.apart[peer] = link

    def other_history(self, own: CertificateHistory) -> OtherHistory | None:
        """Return the peers that showed another history than `own`; None if there are none. Forget the others, so that
        strangers with made-up links do not take the room of these."""
        links = {peer: each for peer, each in self.apart.items() if own.stays_apart(each)}
        self.apart.clear()
        self.apart.update(links)
        if not links:
            return None
        return OtherHistory(step=min(each.outer_step for each in links.values()), peers=tuple(links))

    async def standing(self, peer: str, request: StandingRequest) -> Standing:
        """Return the standing of `peer`, without checking its certificate. Raises SwarmError."""
        data = await self.network.call(
            peer, self.methods.standing, request.to_bytes(), timeout_s=CALL_TIMEOUT_S, max_bytes=Standing.MAX_BYTES
        )
        standing = Standing.from_bytes(data)
        if standing.endorsement:
            try:
                self.endorsements.take(standing.endorsement, self.signatures, self.network.now())
            except (PeerViolation, IntegrityError) as error:
                # an honest member's endorsement may have expired: its standing still counts
                logger.info("%s shows no valid endorsement: %s", short_id(peer), error)
        return standing

    async def newest(self, peer: str, request: StandingRequest) -> Proof | None:
        """Return the proof of `peer`'s state; None if that is the run's initial state. Raises SwarmError."""
        certificate = (await self.standing(peer, request)).certificate
        return await self.check(certificate) if certificate else None

    async def newest_of(
        self, peers: Collection[str], request: StandingRequest
    ) -> tuple[dict[str, Proof], list[SwarmError]]:
        """Ask all `peers` at once. Return the proofs of their states by peer, and the failures."""
        shown, failures = dict[str, Proof](), list[SwarmError]()

        async def ask(peer: str) -> None:
            try:
                if (proof := await self.newest(peer, request)) is not None:
                    shown[peer] = proof
            except SwarmError as error:
                failures.append(error)

        async with asyncio.TaskGroup() as tasks:
            for peer in peers:
                tasks.create_task(ask(peer))
        return shown, failures

    async def history(self, peer: str, request: StandingRequest) -> AsyncGenerator[Proof, None]:
        """Yield the links from the state before step `request.step` to the state of `peer`, each checked. Close it
        after use.

        Raises SwarmError, and PeerViolation beyond MAX_HISTORY_LINKS links or MAX_HISTORY_BYTES.
        """
        links = self._shown(
            peer, self.methods.history, request.to_bytes(), max_items=MAX_HISTORY_LINKS, max_bytes=MAX_HISTORY_BYTES
        )
        async with aclosing(links):
            async for data in links:
                await asyncio.sleep(0)  # megabytes of links may have arrived already, and each check takes milliseconds
                yield await self.check(data)

    async def evidence(self, peer: str, known: Collection[str]) -> AsyncGenerator[bytes, None]:
        """Yield the evidence that `peer` holds against others than `known`, unchecked. Close it after use.

        Raises SwarmError, and PeerViolation beyond MAX_BANS pieces or MAX_HELD_EVIDENCE_BYTES.
        """
        request = EvidenceRequest(run=self.run, known=tuple(sorted(known)[: limits.MAX_BANS])).to_bytes()
        deadline_s = asyncio.get_running_loop().time() + EVIDENCE_TIMEOUT_S
        pieces = self._shown(
            peer, self.methods.bans, request, max_items=limits.MAX_BANS, max_bytes=MAX_HELD_EVIDENCE_BYTES
        )
        async with aclosing(pieces):
            async for data in pieces:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise PeerTimeout("its evidence does not arrive in time", peer_id=peer)
                yield data

    async def _shown(
        self, peer: str, method: str, request: bytes, *, max_items: int, max_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield the items that `peer` shows over a stream of `method`. Raises PeerViolation beyond the limits."""
        num_bytes = num_items = 0
        async with self.network.stream(peer, method, timeout_s=CALL_TIMEOUT_S) as stream:
            await stream.send(request)
            await stream.finish()
            while True:
                try:
                    data = await stream.receive()
                except EndOfStream:
                    return
                num_bytes, num_items = num_bytes + len(data), num_items + 1
                if num_bytes > max_bytes or num_items > max_items:
                    raise PeerViolation("it shows more than any member keeps", peer_id=peer)
                yield data
