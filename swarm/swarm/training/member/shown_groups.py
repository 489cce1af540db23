"""Holds the signed groups of one step that this member has seen and checked, and fetches groups that streams name.

A stream of a reduction names its group by the digest, since a full group is larger than a small part. A member usually
gets its group from the coordinator. If a stream names a group that the member does not have, it asks the sender: the
coordinator may have withheld the group, or have signed two.

The driver of the step owns `ShownGroups`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

from swarm_protocol.commit_messages import Lock
from swarm_protocol.envelope import issued_at, unverified
from swarm_protocol.errors import PeerRefused, PeerViolation, RoundError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.reduction_messages import GroupRequest
from swarm_protocol.training_messages import SignedGroup

from swarm.newest_items import NewestItems
from swarm.training.member.current_step import CurrentStep
from swarm.training.round.round_events import Grouped
from swarm.training.state.proof_reader import CALL_TIMEOUT_S

logger = logging.getLogger(__name__)

ASK_AFTER_S = 0.5
"""Seconds to wait for the coordinator's own answer before another member is asked: that answer usually arrives at the
time of the stream."""

MAX_GROUPS = 8
"""Maximum groups that are kept, of up to half a megabyte each. Each attempt has one, and a step that does not end may
have thousands of attempts."""

MAX_GROUP_AGE_S = 300.0
"""Maximum age of a group that lets newcomers in: a coordinator could otherwise sign a group with an earlier time, for
an invitation that has expired. Clocks differ by seconds, and members ask for their group all the time."""


class ShownGroups:
    """The newest groups of one step that this member has seen and checked, by digest."""

    def __init__(self, step: CurrentStep) -> None:
        self._step = step
        self._context = step.context
        self._groups = NewestItems[bytes, bytes](MAX_GROUPS)
        self._asking: set[str] = set()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._groups

    def add(self, signed: SignedGroup) -> None:
        self._groups[signed.digest] = signed.data

    def show(self, request: GroupRequest) -> bytes:
        """Return the group that is asked for. Raises PeerRefused if this member has not seen it."""
        if request.group_digest not in self._groups:
            raise PeerRefused("this member has not seen this group")
        return self._groups[request.group_digest]

    def read(self, data: bytes) -> SignedGroup:
        """Return the group that the coordinator has signed in `data`, checked and kept. Raises as `check`."""
        signed = self._context.signatures.read_group(data, self._context.network.now())
        self.check(signed)
        return signed

    def check(self, signed: SignedGroup) -> None:
        """Check the signatures of the reports and of the lock in a group of this step, and of the reports in the group
        that it resumes, and keep the group. Raises PeerViolation or IntegrityError if one is not genuine."""
        group, signatures = signed.group, self._context.signatures
        if signed.digest in self or group.attempt < self._step.state.attempt:
            return  # attempts only grow, so a group of an earlier one is ignored
        if group.credentials and issued_at(signed.data) < self._context.network.now() - MAX_GROUP_AGE_S:
            raise PeerViolation("a group that lets newcomers in was signed long ago", peer_id=signed.signer)
        signatures.check_reports(signed)
        self._step.convictions.heard.group(signed)
        if group.lock is not None and signed.origin is not None:
            self.check_lock(group.lock, signed.origin)
            signatures.check_reports(signed.origin)  # otherwise it could say that a member leaves, which does not
        self.add(signed)

    def check_lock(self, lock: Lock, origin: SignedGroup) -> None:
        """Check that enough members have voted for the lock's outcome, which is from the group `origin`. Raises
        PeerViolation or IntegrityError if not."""
        roster = self._step.setup.roster
        self._context.signatures.check_lock(lock, origin, roster)
        self._step.convictions.heard.lock(lock, origin, roster)

    async def ask(self, peer: str, digest: bytes, *, after_s: float) -> None:
        """Ask `peer` for the group with this digest, unless it arrives otherwise within `after_s`. At most one request
        to a peer runs at a time."""
        if digest in self._groups or peer in self._asking:
            return
        self._asking.add(peer)
        try:
            await asyncio.sleep(after_s)
            if digest not in self._groups:
                signed = await self._asked(peer, digest)
                self.check(signed)
                self._step.feed(Grouped(signed=signed))
        except SwarmError as error:
            logger.info("%s shows no group for its part: %s", short_id(peer), error)
        finally:
            self._asking.discard(peer)

    async def _asked(self, peer: str, digest: bytes) -> SignedGroup:
        """Return the group that `peer` shows. Raises SwarmError. The cheapest checks come first: a group may hold
        hundreds of signatures, and anyone can make one."""
        context = self._context
        request = GroupRequest(run=context.run, group_digest=digest).to_bytes()
        data = await context.network.call(peer, context.methods.group, request, timeout_s=CALL_TIMEOUT_S)
        if hashlib.sha256(data).digest() != digest:
            raise PeerViolation("it shows another group than its part is of", peer_id=peer)
        if unverified(data).peer_id != self._step.state.coordinator:
            raise RoundError("the group of this part is not one that this member can be in")
        signed = context.signatures.read_group(data, context.network.now())
        if not {peer, context.network.peer_id} <= set(signed.group.peer_ids):
            raise PeerViolation("the group of this part does not contain both of us", peer_id=peer)
        return signed
