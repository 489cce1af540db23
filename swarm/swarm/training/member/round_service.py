"""Answers the other members of a run: passes their requests to the replica, or to the driver of the step in question.

A peer that is behind gets this member's certificate at once. A peer that is ahead is asked for its own. A request about
a step that this member has not begun yet waits until it does. The only state is which driver runs.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from swarm_protocol.commit_messages import Abort, Certificate, Lock, Vote, VoteReply
from swarm_protocol.envelope import unverified
from swarm_protocol.errors import PeerRefused, PeerViolation, RoundError
from swarm_protocol.member_messages import FollowReply, FollowRequest, Standing, StandingRequest
from swarm_protocol.proof_messages import EVIDENCE_WANTED, EvidenceOffer, EvidenceRequest
from swarm_protocol.reduction_messages import GroupRequest, ReduceOpening
from swarm_protocol.training_messages import Ready, ReadyReply

from swarm.network.interface import Stream
from swarm.newest_items import NewestItems
from swarm.training.evidence.convictions import Convictions
from swarm.training.member.peer_calls import POLL_S
from swarm.training.member.round_driver import RoundDriver
from swarm.training.round.group_members import num_presentable, origin_complaint, signer_complaint
from swarm.training.round.round_events import AttemptLeft, Proven, Sighted, Voted
from swarm.training.round.round_state import RoundState, with_coordinator
from swarm.training.state.certificate import CREDENTIAL_MARGIN_S
from swarm.training.state.endorsement import contradicts, read_endorsement
from swarm.training.state.proof_reader import HISTORY_TIMEOUT_S
from swarm.training.state.run_context import RunContext, making_s
from swarm.training.state.state_transfer import Donor

OPENING_S = 60.0
"""Time for the first message of a peer's stream, which can wait behind all slices that its sender's uplink has to
carry, and for this member to begin the step that a follower is at."""
LATE_S = 10.0
"""Seconds between two steps after which this member refuses reports, beside those in which it can make the state
itself: fetching one over a slow line takes many minutes, and the others would wait for it as their coordinator."""
MAX_PENDING_REVOCATIONS = 64
"""Maximum revocations that a member keeps until the state knows them: each step takes in one."""
WATCHED_S = 5.0
"""Seconds after the last question of a peer that watches, in which it may ask again: `run watch` asks every second."""
MAX_WATCHERS = 64
"""Maximum peers that watch of which a member knows what they were shown: it forgets first those that asked first."""


class RoundService:
    """Serves the requests of one run. `open` registers the handlers with the network, which keeps them until it is
    closed."""

    def __init__(self, context: RunContext, convictions: Convictions) -> None:
        self.driver: RoundDriver | None = None
        self._context = context
        self._convictions = convictions
        self._changed = asyncio.Event()
        self._closed = False
        self._idle_since_s = math.inf
        self._shown = NewestItems[str, tuple[float, int]](MAX_WATCHERS)
        """The time of the last answer to each peer that watches, and the outer step that it was shown."""

    @property
    def is_watched(self) -> bool:
        """Return whether a peer that watches the run may soon ask for the newest state, which it was not shown yet."""
        newest, since_s = self._context.replica.outer_step, asyncio.get_running_loop().time() - WATCHED_S
        return any(step < newest and at_s > since_s for at_s, step in self._shown.values())

    async def open(self) -> None:
        self.set_driver(None)
        network, methods = self._context.network, self._context.methods
        self._convictions.in_group = self._group
        donor = Donor(self._context.replica)
        await network.serve(methods.alive, _on_alive)
        await network.serve(methods.standing, self._on_standing)
        await network.serve(methods.ready, self._on_ready)
        await network.serve(methods.group, self._on_group)
        await network.serve(methods.vote, self._on_vote)
        await network.serve(methods.abort, self._on_abort)
        await network.serve(methods.resume, self._on_resume)
        await network.serve(methods.endorse, self._on_endorse)
        await network.serve(methods.revoke, self._on_revoke)
        await network.serve(methods.evidence_offer, self._on_evidence_offer)
        await network.serve(methods.evidence, self._on_evidence)
        await network.serve(methods.manifest, donor.manifest)
        await network.serve(methods.chunk, donor.chunk)
        await network.serve_stream(methods.bans, self._on_bans)
        await network.serve_stream(methods.part, donor.part)
        await network.serve_stream(methods.reduce, self._on_reduce)
        await network.serve_stream(methods.history, self._on_history)
        await network.serve_stream(methods.follow, self._on_follow)

    def close(self) -> None:
        """Stop taking part in rounds. States and parts are still served until a later member of this run serves them,
        or the node has since left enough other runs or models."""
        self._closed = True
        self._context.network.release(*self._context.methods.all)
        self.set_driver(None)

    def set_driver(self, driver: RoundDriver | None) -> None:
        """Pass requests to `driver` from now on."""
        self.driver = driver
        self._idle_since_s = asyncio.get_running_loop().time() if driver is None else math.inf
        self._changed.set()
        self._changed = asyncio.Event()

    def _group(self) -> tuple[str, ...]:
        return self.driver.group if self.driver is not None else ()

    def _is_member(self, peer: str) -> bool:
        """Return whether `peer` is a member of the state, or of this member's group."""
        return peer in self._context.replica.roster or peer in self._group()

    async def _on_standing(self, peer: str, request: bytes) -> bytes:
        wanted = StandingRequest.from_bytes(request)
        known, attempt = tuple[str, ...](), 0
        if self.driver is not None and self.driver.setup.step == wanted.step:
            if not wanted.watches:
                # only the coordinator may do this: otherwise any peer could end all members' intervals before they have
                # contributed anything
                if wanted.hurry and _coordinates(self.driver.state, peer, wanted.attempt):
                    self.driver.hurry()
                self.driver.feed(Sighted(peer=peer, attempt=wanted.attempt))
            known, attempt = self.driver.known, self.driver.state.attempt
        replica = self._context.replica
        if wanted.watches:
            self._shown[peer] = asyncio.get_running_loop().time(), replica.outer_step
        return Standing(
            outer_step=replica.outer_step,
            state_digest=replica.digest,
            certificate=replica.certificate,
            known=known,
            attempt=attempt,
            endorsement=self._context.endorsements.shown(self._context.network.now()),
        ).to_bytes()

    async def _on_ready(self, peer: str, request: bytes) -> bytes:
        ready = Ready.from_bytes(request)
        if ready.run != self._context.run:
            raise PeerViolation("this is about another run", peer_id=peer)
        if len(ready.credentials) > 1 + num_presentable(self._context.replica.config.max_group):
            raise PeerViolation("it shows more credentials than a group has room for", peer_id=peer)
        self._context.signatures.check_report(ready, peer)
        now = self._context.network.now()
        self._context.signatures.check_credentials(ready.credentials, now, margin_s=CREDENTIAL_MARGIN_S)
        self._context.signatures.check_revocation(ready.revocation, now)
        self._context.signatures.check_slices(ready, peer, ready.step, ready.state_digest)
        if self._is_member(peer):
            self._convictions.heard.report(peer, ready)
        return (await self._answer(peer, ready)).to_bytes()

    async def _answer(self, peer: str, ready: Ready) -> ReadyReply:
        replica = self._context.replica
        proof = replica.proof
        begun = (replica.outer_step + 1, proof.next_attempt if proof else 0)
        sequence = replica.order.sequence if replica.order else 0
        if ready.sequence > sequence and self.driver is not None:
            self.driver.queries.look_at(peer)
        if ready.sequence != sequence or (ready.step, ready.attempt) < begun:
            return ReadyReply(kind="behind", state_digest=replica.digest, certificate=replica.certificate)
        try:
            async with asyncio.timeout(POLL_S):
                driver = await self._driver_at(ready.step, peer)
        except TimeoutError:
            if asyncio.get_running_loop().time() > self._idle_since_s + LATE_S + making_s(replica):
                raise PeerRefused("this member is not ready for the step: it still gets the state before it") from None
            return ReadyReply(kind="pending")
        if driver.state.abstains:
            raise PeerRefused("this member has lost the state that it voted from, and waits for it")
        if ready.lock is not None and ready.state_digest == driver.setup.state_digest:
            self._check_lock(driver, ready, ready.lock, peer)
        reply = await driver.reports.take(peer, ready)
        if reply.kind == "pending":
            self._refuse_if_closed()
        return reply

    def _check_lock(self, driver: RoundDriver, ready: Ready, lock: Lock, peer: str) -> None:
        """Check that enough members voted for the lock that `peer` reports, in a group in which it can have voted.
        Raises PeerViolation or IntegrityError if not."""
        setup, now = driver.setup, self._context.network.now()
        # first, since a group takes this member's loop for fifty milliseconds, and strangers can make one
        wrong = signer_complaint(setup, unverified(ready.origin).peer_id)
        if not wrong:
            origin = self._context.signatures.check_origin(
                ready.origin, lock.outcome, ready.step, ready.state_digest, now
            )
            wrong = origin_complaint(setup, origin)
        if wrong:
            raise PeerViolation(f"the group behind its lock is invalid: {wrong}", peer_id=peer)
        driver.groups.check_lock(lock, origin)

    async def _driver_at(self, step: int, peer: str) -> RoundDriver:
        """Return the driver of `step`, once this member has begun it. Raises PeerRefused if it never will."""
        while self.driver is None or self.driver.setup.step < step:
            self._refuse_if_closed()
            if self.driver is not None:
                self.driver.queries.look_at(peer)
            await self._changed.wait()
        self._refuse_if_closed()
        return self.driver

    def _refuse_if_closed(self) -> None:
        """Raise PeerRefused if this member has left: a peer that is told `pending` would ask again, and wait in
        vain."""
        if self._closed:
            raise PeerRefused("this member does not train any more")

    async def _on_vote(self, peer: str, request: bytes) -> bytes:
        vote = Vote.from_bytes(request)
        self._context.signatures.check_vote(vote, peer)
        if self._is_member(peer):
            self._convictions.heard.vote(peer, vote)
        if self.driver is not None and self.driver.setup.step == vote.step:
            self.driver.feed(Voted(peer=peer, vote=vote))
        return VoteReply(bytes_per_s=self._context.meter.rate_from(peer)).to_bytes()

    async def _on_abort(self, peer: str, request: bytes) -> bytes:
        abort = Abort.from_bytes(request)
        if self.driver is not None and (self.driver.setup.run, self.driver.setup.step) == (abort.run, abort.step):
            self.driver.feed(AttemptLeft(peer=peer, abort=abort))
        return b""

    async def _on_resume(self, _peer: str, request: bytes) -> bytes:
        """Take a resume order from any peer, since the run's author has signed it. Other members learn of it from this
        one."""
        if not Certificate.from_bytes(request).order:
            # otherwise anyone could make this member check the votes of made-up groups, on the threads that train
            raise PeerViolation("this is not a resume order")
        proof = await self._context.check(request)
        replica = self._context.replica
        if proof.order == replica.order:
            return b""
        if replica.order is not None and proof.sequence <= replica.order.sequence:
            raise PeerRefused(
                f"the run goes on by the resume order {replica.order.sequence}, which this one, {proof.sequence}, does "
                "not come after"
            )
        if self.driver is None:
            raise PeerRefused("this member is not yet at work")
        self.driver.feed(Proven(certificate=proof.certificate))
        return b""

    async def _on_endorse(self, _peer: str, request: bytes) -> bytes:
        """Take an endorsement from any peer, since the run's author has signed it, and show it to other peers from now
        on."""
        context = self._context
        endorsements, now = context.endorsements, context.network.now()
        endorsement = read_endorsement(request, context.signatures, now)
        if contradicts(endorsement, context.replica.history):
            raise PeerRefused(f"this member's history has another state of outer step {endorsement.outer_step}")
        if not endorsements.take(request, context.signatures, now) and endorsements.newest != endorsement:
            raise PeerRefused("this member knows a later endorsement")
        return b""

    async def _on_revoke(self, _peer: str, request: bytes) -> bytes:
        """Take a revocation from any peer, since the run's author has signed it. The next groups carry it."""
        context = self._context
        revocation = context.signatures.check_revocation(request, context.network.now())
        if revocation is None:
            raise PeerViolation("this revokes nothing")
        pending = context.revocations
        if request not in pending and context.replica.standings.is_news(revocation):
            if len(pending) >= MAX_PENDING_REVOCATIONS:
                raise PeerRefused("the run has not yet learned of earlier revocations: try again after some steps")
            pending.append(request)
        elif request not in pending and not context.replica.standings.knows(revocation):
            raise PeerRefused("the run's state has no room for further revocations")
        return b""

    async def _on_evidence_offer(self, _peer: str, request: bytes) -> bytes:
        """Say whether this member wants the evidence that is offered. It is no secret whom it has banned."""
        offer = EvidenceOffer.from_bytes(request)
        return EVIDENCE_WANTED if self._convictions.is_news(offer.peer, offer.step) else b""

    async def _on_evidence(self, peer: str, request: bytes) -> bytes:
        """Take evidence from members only: strangers could make this one check any amount of it."""
        if not self._is_member(peer):
            raise PeerRefused("evidence is taken from the run's members")
        await self._convictions.take(request, peer)
        return b""

    async def _on_bans(self, peer: str, stream: Stream) -> None:
        request = EvidenceRequest.from_bytes(await _first(stream))
        await self._convictions.answer(peer, request, stream)

    async def _on_history(self, _peer: str, stream: Stream) -> None:
        async with asyncio.timeout(HISTORY_TIMEOUT_S):
            wanted = StandingRequest.from_bytes(await stream.receive())
            for link in self._context.replica.history.since(wanted.step - 1):
                await stream.send(link.certificate)

    async def _on_follow(self, peer: str, stream: Stream) -> None:
        request, replica = FollowRequest.from_bytes(await _first(stream)), self._context.replica
        if request.run != self._context.run:
            raise PeerViolation("this is about another run", peer_id=peer)
        if request.credential is not None:
            shown, now = request.credential, self._context.network.now()
            if shown.peer_id != peer:
                raise PeerViolation("it shows the credential of another peer", peer_id=peer)
            self._context.signatures.check_credentials((shown,), now, margin_s=CREDENTIAL_MARGIN_S)
        if request.step <= replica.outer_step:
            await stream.send(FollowReply(kind="committed", certificate=replica.certificate).to_bytes())
            return
        async with asyncio.timeout(OPENING_S):
            driver = await self._driver_at(request.step, peer)
        await driver.follow(peer, request, stream)

    async def _on_reduce(self, peer: str, stream: Stream) -> None:
        opening = ReduceOpening.from_bytes(await _first(stream))
        if self.driver is None or self.driver.setup.step != opening.step:
            raise RoundError(f"this member is not at step {opening.step}")
        await self.driver.serve_part(peer, opening, stream)

    async def _on_group(self, _peer: str, request: bytes) -> bytes:
        """Show a group of this step to any node that knows its digest. Groups are no secret, since certificates contain
        them."""
        wanted = GroupRequest.from_bytes(request)
        if self.driver is None:
            raise PeerRefused("this member is not yet at work")
        return self.driver.groups.show(wanted)


def _coordinates(state: RoundState, peer: str, attempt: int) -> bool:
    """Return whether `peer` coordinates this member's attempt, or the later one that it is about to move to."""
    is_near = attempt in {state.attempt, state.attempts.later}
    return is_near and with_coordinator(replace(state, attempt=attempt)).coordinator == peer


async def _first(stream: Stream) -> bytes:
    """Return the first message of a peer's stream. Raises TimeoutError: streams are bounded in number, and those whose
    peers say nothing would keep others out."""
    async with asyncio.timeout(OPENING_S):
        return await stream.receive()


async def _on_alive(_peer: str, _request: bytes) -> bytes:
    return b""
