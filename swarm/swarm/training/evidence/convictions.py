"""The convictions of a run's members, as far as this member knows them.

Evidence is checked before it counts. It is then stored on disk, sent once to all members of the roster, and shown to
members that form a group with the liar, to members that join, and to observers. This member forms no group with a
convicted peer, and counts no vote of it, for the run's `ban_steps`. Once a peer's evidence proves nothing, its further
evidence is refused.

Evidence comes in by `take` (from a peer over `RoundService`, or found by this member), `recall` (from the disk), `ask`
(from members, on joining) or `heard` (two statements that differ). `_take` reads who is accused, checks the evidence
(`evidence.check`; findings of an interval are gathered in `wrong_interval` until they are enough), and adds the ban
(`bans`). `_keep` stores it (`EvidenceFolder`), `_send` sends it to others, and `show` and `answer` show it later.

`OuterSteps` owns it; checks and disk access run in the executor.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from swarm_protocol.commit_messages import Certificate
from swarm_protocol.errors import IntegrityError, PeerRefused, PeerViolation, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.proof_messages import (
    EQUIVOCATION,
    WRONG_INTERVAL,
    Equivocation,
    Evidence,
    EvidenceOffer,
    EvidenceRequest,
)

from swarm.evidence_folder import EvidenceFolder
from swarm.network.interface import Stream
from swarm.newest_items import NewestItems
from swarm.threads import in_executor
from swarm.training.allreduce.peer_connections import SLOWEST_MEMBER_BYTES_PER_S
from swarm.training.evidence.bans import MAX_IGNORED, Ban, Bans
from swarm.training.evidence.equivocation import EquivocationWatch
from swarm.training.evidence.evidence import KINDS, accused, check
from swarm.training.evidence.wrong_interval import IntervalAccusations, IntervalCase
from swarm.training.state.lease import trainers_of
from swarm.training.state.run_context import RunContext

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0
"""Deadline for sending evidence, in addition to its time at SLOWEST_MEMBER_BYTES_PER_S. Other members also send it."""
MAX_SENDING = 4
"""Peers to which evidence is sent at one time. They share this member's uplink; with more, none would get it in
time."""
SHOW_TIMEOUT_S = 60.0
MAX_CERTIFICATES = 64
"""Certificates that are remembered so that their votes are noted only once: peers show the same one repeatedly."""
MAX_ASKED_FOR_EVIDENCE = 4
"""Members that are asked. Honest members also show their evidence to all that form a group with the liar."""
MAX_SHOWING = 4
"""Peers to which all evidence is shown at one time, over one stream each. Anyone may ask for it."""


class Convictions:
    """The convictions that one member holds. `on_new` is called with each new ban, `on_accusation` with each accusation
    of an interval that does not convict yet. `store` keeps evidence for the next process."""

    def __init__(
        self,
        context: RunContext,
        on_new: Callable[[Ban], None],
        store: EvidenceFolder | None,
        on_accusation: Callable[[IntervalCase], None],
    ) -> None:
        self._context = context
        self._on_new = on_new
        self._store = store
        self._on_accusation = on_accusation
        self._accusations = IntervalAccusations(context)
        self._bans = Bans(context.replica.config)
        self._on_disk: set[str] = set()
        self.in_group: Callable[[], Collection[str]] = tuple
        """Returns the members of this member's present group, of which some may be in no committed state yet."""
        self._ignored = NewestItems[str, None](MAX_IGNORED)
        self._checking = asyncio.Lock()
        self._working: set[asyncio.Task[None]] = set()
        self._showing_to: set[str] = set()
        self._sends = asyncio.Semaphore(MAX_SENDING)
        self.heard = EquivocationWatch(context.network.peer_id, self._convict_soon, self._is_heard)
        """The watch for signed statements of others: two that differ convict their signer."""
        self._certificates = NewestItems[bytes, None](MAX_CERTIFICATES)

    @property
    def bans(self) -> tuple[Ban, ...]:
        """The bans that hold in the next round, newest last."""
        return self._bans.at(self._step)

    @property
    def peers(self) -> frozenset[str]:
        """Return the peers that are banned in the next round."""
        return self._bans.peers(self._step)

    def is_news(self, peer: str, step: int) -> bool:
        """Return whether this member has not banned `peer` for a lie at `step` or later."""
        return self._bans.is_news(peer, step)

    async def recall(self) -> None:
        """Take the evidence in the store."""
        if self._store is None:
            return
        for data in await in_executor(self._context.executor, self._store.read):
            try:
                await self._take(data, passes_on=False, was_kept=True)
            except (PeerViolation, IntegrityError) as error:
                logger.warning("stored evidence proves nothing: %s", error)

    async def ask(self, peers: Iterable[str]) -> None:
        """Take the evidence that the first of `peers`, members of the run, hold, such as of lies while this member was
        away."""
        asked = 0
        for peer in peers:
            if asked == MAX_ASKED_FOR_EVIDENCE or peer == self._context.network.peer_id:
                continue
            asked += 1
            try:
                async with aclosing(self._context.evidence(peer, self.peers)) as shown:
                    async for data in shown:
                        await self.take(data, peer, passes_on=False)
            except SwarmError as error:
                logger.info("%s does not say who is banned: %s", short_id(peer), error)

    async def take(self, data: bytes, sender: str, *, passes_on: bool = True) -> None:
        """Take evidence from `sender`, a peer or this member. Raises PeerViolation or IntegrityError if it proves
        nothing."""
        if sender in self._ignored:
            raise PeerViolation("its earlier evidence proved nothing", peer_id=sender)
        try:
            await self._take(data, passes_on=passes_on, sender=sender)
        except (PeerViolation, IntegrityError):
            if sender != self._context.network.peer_id:
                self._ignored[sender] = None
            raise

    async def convict(self, evidence: Sequence[Evidence]) -> None:
        """Take the evidence that this member found of one lie by one or several members. The first conviction cancels
        the attempt that awaits this call, so each piece is taken in its own task. Raises PeerViolation or
        IntegrityError if the first piece proves nothing."""
        first, *others = evidence
        for each in others:
            self._spawn(self._convict_logged(each))
        await asyncio.shield(self._spawn(self.take(first.to_bytes(), self._context.network.peer_id)))

    def hear(self, certificate: bytes) -> None:
        """Note the votes of a checked certificate of this run."""
        context, digest = self._context, hashlib.sha256(certificate).digest()
        if digest in self._certificates:
            return
        self._certificates[digest] = None
        read = Certificate.from_bytes(certificate)
        if read.group:
            self.heard.certificate(read, context.signatures.read_group(read.group, context.network.now()))

    async def lapse(self) -> frozenset[str]:
        """Forget the bans that have ended, and return their peers."""
        lapsed = self._bans.lapse(self._step)
        await self._forget(lapsed)
        return lapsed

    def show(self, peers: Iterable[str]) -> None:
        """Send all evidence to `peers`."""
        for ban in self.bans:
            self._send(ban.data, ban.verdict.peer_id, ban.verdict.step, peers)

    async def answer(self, peer: str, request: EvidenceRequest, stream: Stream) -> None:
        """Show `peer` the evidence that it does not know. Raises PeerRefused while it is shown to this peer already, or
        to many others."""
        if request.run != self._context.run:
            raise PeerViolation("this is about another run")
        if peer in self._showing_to or len(self._showing_to) >= MAX_SHOWING:
            raise PeerRefused("it is showing its evidence to this peer, or to many others, now")
        self._showing_to.add(peer)
        try:
            async with asyncio.timeout(SHOW_TIMEOUT_S):
                for ban in self._bans.unknown_to(request.known, self._step):
                    await stream.send(ban.data)
        finally:
            self._showing_to.remove(peer)

    def close(self) -> None:
        for task in self._working:
            task.cancel()

    @property
    def _step(self) -> int:
        return self._context.replica.outer_step + 1

    async def _take(self, data: bytes, *, passes_on: bool, sender: str = "", was_kept: bool = False) -> None:
        context = self._context
        async with self._checking:  # one at a time, of all senders
            evidence = Evidence.from_bytes(data)
            if evidence.kind not in KINDS:  # of a newer version: it may be right
                return
            peer, step = accused(evidence, context.signatures)
            if not self._bans.is_news(peer, step):
                return
            # others can show statements of strangers, and this member finds equivocations in those, too
            is_own = sender == context.network.peer_id and evidence.kind != EQUIVOCATION
            if not was_kept and not is_own and not self._concerns(peer, step, len(data)):
                return
            if evidence.kind == WRONG_INTERVAL:
                case = await self._accusations.gather(evidence, was_kept=was_kept)
                if case is None:
                    return
                data = case.evidence.evidence().to_bytes()
                if not case.is_enough(context.network.peer_id):
                    self._accuse(case, data, sender)
                    return
                verdict = case.verdict
            else:
                verdict = await in_executor(
                    self._context.executor, check, evidence, context.signatures, context.replica.config
                )
            ban = self._bans.add(verdict, data)
            if not ban.holds_at(self._step):
                self._bans.lapse(self._step)
                await self._forget({peer})
                return
            try:
                await self._keep(peer, data)
            finally:  # also if the sender leaves, which cancels this: the same evidence would not be news again
                logger.warning("%s is convicted: %s", short_id(peer), verdict.reason)
                if passes_on:
                    self._send(data, peer, step, {*context.replica.roster} - {sender, peer})
                self._on_new(ban)

    def _convict_soon(self, found: Equivocation) -> None:
        """Convict the signer, unless the run has a `min_group` of 1, whose members may sign two statements."""
        if self._context.replica.config.min_group > 1:
            self._spawn(self._convict_logged(found.evidence()))

    async def _convict_logged(self, evidence: Evidence) -> None:
        try:
            await self.take(evidence.to_bytes(), self._context.network.peer_id)
        except (PeerViolation, IntegrityError) as error:
            logger.warning("evidence that this member found proves nothing: %s", error)

    def _is_heard(self, peer: str) -> bool:
        """Return whether `peer` is in the roster or in this member's group; anyone is before there is a roster."""
        roster = self._context.replica.roster
        return not roster or peer in roster or peer in self.in_group()

    def _accuse(self, case: IntervalCase, data: bytes, sender: str) -> None:
        """Handle an accusation that does not convict yet: send this member's own to all others, report another's."""
        if sender == self._context.network.peer_id:
            liar = case.member.peer_id
            self._send(data, liar, case.step, {*self._context.replica.roster} - {liar})
        else:
            self._on_accusation(case)

    def _concerns(self, peer: str, step: int, size: int) -> bool:
        """Return whether evidence against `peer` is worth a check: the step is no later than the run's next one, and
        `peer` is known to the run or there is room for a stranger."""
        replica = self._context.replica
        if step > self._step:
            return False
        known = {*replica.roster, *trainers_of(replica.current.manifest.stripes), *self.in_group()}
        known.update(*(link.origin.peer_ids for link in replica.history.since(0)))
        return self._bans.has_room_for(peer, size, known)

    async def _keep(self, peer: str, data: bytes) -> None:
        """Store the evidence against `peer`, and delete what `Bans` no longer holds."""
        if self._store is None:
            return
        if peer in self._bans.held:
            await in_executor(self._context.executor, self._store.keep, peer, data)
            self._on_disk.add(peer)
        await self._forget(self._on_disk - self._bans.held)

    async def _forget(self, peers: Iterable[str]) -> None:
        for peer in frozenset(peers):
            self._on_disk.discard(peer)
            if self._store is not None:
                await in_executor(self._context.executor, self._store.forget, peer)

    def _send(self, data: bytes, liar: str, step: int, peers: Iterable[str]) -> None:
        """Send the evidence `data` of a lie of `liar` at `step` to those of `peers` that want it."""
        banned, offer = self.peers, EvidenceOffer(peer=liar, step=step).to_bytes()
        order = list(peers)
        random.shuffle(order)  # or all who send this would send it to the same members at one time
        for peer in order:
            if peer != self._context.network.peer_id and peer not in banned:
                self._spawn(self._send_to(peer, offer, data))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    async def _send_to(self, peer: str, offer: bytes, data: bytes) -> None:
        network, methods = self._context.network, self._context.methods
        timeout_s = SEND_TIMEOUT_S + len(data) / SLOWEST_MEMBER_BYTES_PER_S
        try:
            async with self._sends:
                # evidence has megabytes, and most members have it from another one by the time that it is their turn
                wanted = await network.call(peer, methods.evidence_offer, offer, timeout_s=SEND_TIMEOUT_S)
                if wanted:
                    await network.call(peer, methods.evidence, data, timeout_s=timeout_s)
        except SwarmError as error:
            logger.info("%s did not take evidence: %s", short_id(peer), error)
