"""Keeps the members that one node of a private network knows, with their capabilities, and the revoked serials. Pure.

A peer is added to the roll with the chain of certificates that it shows. It counts as a member until the chain expires
or its invitation is revoked. State belongs to the network's loop; the time is an argument.

`rights_to_call`, `right_to_answer` and `rights_to_publish` define which rights a peer needs to call a method, to answer
it, and to publish a record.
"""

from __future__ import annotations

import logging

from swarm_protocol.envelope import Envelope, read_record
from swarm_protocol.errors import ConfigError, PeerRefused, PeerViolation, SwarmError
from swarm_protocol.network_invitation import (
    Capability,
    NetworkInvitation,
    PrivateGreeting,
    Revocations,
    Right,
    check_chain,
    open_revocations,
)
from swarm_protocol.records import NodeRecord, ServeRecord, TrainerRecord
from swarm_protocol.version import Hello

from swarm.newest_items import NewestItems

MAX_MEMBERS = 8192
"""Maximum members that are remembered, former ones included. A member that was forgotten shows its chain again when it
returns."""

REMEDY = "ask the network's owner for a new invitation"

logger = logging.getLogger(__name__)


_FOR_MEMBERS = frozenset({"train.standing", "train.history", "train.run_file"})
"""Methods of training that every member may call: dashboards and `run watch` use them to read a run's file and its
certificates, but no weights."""

_RECORD_KINDS = ("nodes", "serve", "train")


def rights_to_call(method: str) -> tuple[Right, ...]:
    """Return the rights of which the caller of `method` needs one. Servers may call methods of serving, too, since a
    server pushes to the next one."""
    name = method.partition("/")[0]
    if name.startswith("serving."):
        return ("ask", "serve")
    if name.startswith("train.") and name not in _FOR_MEMBERS:
        return ("train",)
    return ("join",)


def right_to_answer(method: str) -> Right:
    """Return the right that a peer needs to answer `method`."""
    match method.partition(".")[0]:
        case "serving":
            return "serve"
        case "train":
            return "train"
    return "join"


def rights_to_publish(envelope: Envelope) -> frozenset[Right]:
    """Return the rights that the signer of a record needs; it needs all of them. Raises PeerViolation for a malformed
    record."""
    if envelope.subject.partition("#")[0].partition("/")[0] not in _RECORD_KINDS:
        return frozenset({"join"})
    rights: set[Right] = {"join"}
    match read_record(envelope):
        case ServeRecord():
            rights.add("serve")
        case TrainerRecord():
            rights.add("train")
        case NodeRecord() as node:
            rights.update({"serve"} if node.models else (), {"train"} if node.runs else ())
    return frozenset(rights)


def may_publish(envelope: Envelope, rights: frozenset[str]) -> bool:
    """Return whether a signer with these rights may publish the record. A malformed record may not be published."""
    try:
        return rights_to_publish(envelope) <= rights
    except PeerViolation:
        return False


class MemberRoll:
    """The members of a private network that this node knows, and the serials that its owner has revoked."""

    def __init__(self, invitation: NetworkInvitation, peer_id: str, now: float, *, revocations: bytes = b"") -> None:
        """`revocations` is the signed list that this node kept from an earlier run. Raises ConfigError if this node is
        no member by this invitation at `now`."""
        self.network_id, self.network_secret = invitation.network_id, invitation.network_secret
        self._peer_id = peer_id
        self._chain = invitation.chain_for(peer_id)
        self._members = NewestItems[str, Capability](MAX_MEMBERS)
        self._revoked: frozenset[int] = frozenset()
        self.number = 0
        self.revocations = b""
        self._has_warned = False  # once: a member could send invalid lists without end
        if revocations:
            self._hear(revocations, now)
        try:
            self.own = check_chain(self._chain, network_id=self.network_id, peer_id=peer_id, now=now)
        except SwarmError as error:
            raise ConfigError(error.message, remedy=error.remedy or REMEDY) from None
        if (trouble := self.trouble(now)) is not None:
            raise ConfigError(trouble, remedy=REMEDY)

    def greeting(self, hello: Hello) -> PrivateGreeting:
        """Return the greeting that this node sends to a peer."""
        return PrivateGreeting(hello=hello, chain=self._chain, revocations=self.revocations)

    def take_in(self, peer_id: str, greeting: PrivateGreeting, now: float) -> None:
        """Note a peer as a member by its greeting. Raises PeerRefused, PeerViolation or IntegrityError."""
        if greeting.refusal:
            raise PeerRefused(greeting.refusal, remedy=REMEDY, peer_id=peer_id)
        if greeting.hello is None:
            raise PeerViolation("the greeting is empty", peer_id=peer_id)
        capability = check_chain(greeting.chain, network_id=self.network_id, peer_id=peer_id, now=now)
        if greeting.revocations:
            self._hear(greeting.revocations, now)
        if capability.serial in self._revoked:
            raise PeerRefused("the invitation was revoked", remedy=REMEDY, peer_id=peer_id)
        self._members[peer_id] = capability

    def _hear(self, data: bytes, now: float) -> None:
        """Keep a list of revocations if it is valid and newer than the present one."""
        if data == self.revocations:
            return
        try:
            heard: Revocations = open_revocations(data, network_id=self.network_id, now=now)
        except SwarmError as error:
            logger.log(logging.DEBUG if self._has_warned else logging.WARNING, "ignored revocations: %s", error)
            self._has_warned = True
            return
        if heard.number > self.number:
            self.number, self.revocations, self._revoked = heard.number, data, frozenset(heard.serials)

    # --- what holds now ---------------------------------------------------------------------------------------------

    def trouble(self, now: float) -> str | None:
        """Return the reason why this node itself is no member any more, or None."""
        if self.own.serial in self._revoked:
            return "this node's invitation was revoked"
        return None if now < self.own.expires_at else "this node's invitation has expired"

    def rights_of(self, peer_id: str, now: float) -> frozenset[str]:
        """Return the rights of a peer; none if it is not known as a member, or is no member any more."""
        member = self._members.get(peer_id)
        return member.rights if member is not None and member.holds(self._revoked, now) else frozenset()

    def has_ended(self, peer_id: str, now: float) -> bool:
        """Return whether a peer was a member and is none any more."""
        member = self._members.get(peer_id)
        return member is not None and not member.holds(self._revoked, now)

    def check_own(self, method: str, peer_id: str, now: float) -> None:
        """Raises PeerRefused if this node itself may not call `method`, so that `peer_id` need not be asked."""
        if (trouble := self.trouble(now)) is not None:
            raise PeerRefused(trouble, remedy=REMEDY, peer_id=peer_id)
        wanted = rights_to_call(method)
        if self.own.rights.isdisjoint(wanted):
            raise PeerRefused(
                f"this node's invitation does not have the right to {wanted[0]}", remedy=REMEDY, peer_id=peer_id
            )

    def may_call(self, peer_id: str, method: str, now: float) -> bool:
        return not self.rights_of(peer_id, now).isdisjoint(rights_to_call(method))

    def check_answers(self, peer_id: str, method: str, now: float) -> None:
        """Raises PeerRefused if a peer may not answer `method`."""
        right = right_to_answer(method)
        if right not in self.rights_of(peer_id, now):
            raise PeerRefused(
                f"the peer's invitation does not have the right to {right}", remedy="ask another peer", peer_id=peer_id
            )

    def may_store(self, peer_id: str, envelope: Envelope, now: float) -> bool:
        """Return whether a peer may store this record here: only its own records, and only if its rights cover them."""
        return peer_id == envelope.peer_id and may_publish(envelope, self.rights_of(peer_id, now))

    def believes(self, envelope: Envelope, now: float) -> bool:
        """Return whether to use a record that another member stored. A record of an unknown signer is used, since this
        node asks nothing of that peer before the peer has shown its chain."""
        member = self._members.get(envelope.peer_id)
        if envelope.peer_id == self._peer_id or member is None:
            return True
        return member.holds(self._revoked, now) and may_publish(envelope, member.rights)
