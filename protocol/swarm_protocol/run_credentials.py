"""Defines the credentials that let a newcomer into a training run without probation: an invitation by its author, or
vouches of its members.

An invitation is a certificate for an *invitation key*, signed by the run's author or by a key that the run's file names
as an inviter, with a serial, an expiry and a number of uses. Its text holds that key, and the holder of the text signs
a link from the key to its own peer id, as for private networks (`network_invitation`). A certificate that is *bound*
names the newcomer's own key, and no link continues it. A vouch is a member's signature that names the newcomer.

Credentials travel in signed groups, so that every reader of a certificate can check them: they have to be valid when
the group was signed, by its coordinator's clock. `swarm.training.standing.entrance` decides whether the run's state
honours them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from swarm_protocol import limits
from swarm_protocol.checks import Checked, Name, are_sorted, distinct, up_to, whole
from swarm_protocol.credential_text import check_key, from_word, link_to, to_word
from swarm_protocol.envelope import Envelope, seal_now, unseal
from swarm_protocol.errors import ConfigError, PeerViolation
from swarm_protocol.identity import Identity, PeerId
from swarm_protocol.proto import credentials_pb2
from swarm_protocol.wire import WireMessage

CERTIFICATE_PURPOSE = "run-invitation"
LINK_PURPOSE = "run-invitee"
VOUCH_PURPOSE = "run-vouch"
REVOCATION_PURPOSE = "run-revocation"
MAX_USES = 256
TEXT_PREFIX = "swarmrun1-"
MAX_TEXT_CHARS = 2048
_COPY_IT = "copy the whole line that swarm-node run invite or run vouch printed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms(WireMessage):
    """The terms of an invitation's certificate: `max_uses` peers may enter `run`. If `is_bound`, only the holder of the
    named key may."""

    PROTO = credentials_pb2.RunTerms
    MAX_BYTES = limits.MAX_RUN_TERMS_BYTES

    run: Name
    serial: Annotated[int, whole(2**64 - 1, low=1)]
    max_uses: Annotated[int, whole(MAX_USES, low=1)] = 1
    is_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRevocation(WireMessage):
    """A revocation by the author of `run`: of the invitations with these `serials`, and of the right of these
    `inviters`."""

    PROTO = credentials_pb2.RunRevocation
    MAX_BYTES = limits.MAX_RUN_REVOCATION_BYTES

    run: Name
    serials: Annotated[tuple[Annotated[int, whole(2**64 - 1, low=1)], ...], distinct(limits.MAX_RUN_REVOKED)] = ()
    inviters: Annotated[tuple[PeerId, ...], distinct(limits.MAX_REVOKED_INVITERS)] = ()

    def __post_init__(self) -> None:
        if not self.serials and not self.inviters:
            raise ValueError("it revokes nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCredential(Checked):
    """The credential that `peer_id` shows: a `chain` of a certificate and a link, or of a bound certificate; or
    `vouches`."""

    peer_id: PeerId
    chain: Annotated[tuple[bytes, ...], up_to(2)] = ()
    vouches: Annotated[tuple[bytes, ...], up_to(limits.MAX_VOUCHERS)] = ()

    def __post_init__(self) -> None:
        if bool(self.chain) == bool(self.vouches):
            raise ValueError("a credential holds either an invitation or vouches")
        if any(len(each) > limits.MAX_RUN_CREDENTIAL_BYTES for each in (*self.chain, *self.vouches)):
            raise ValueError("a credential is too large")

    def digest(self) -> bytes:
        """Return the 32 bytes by which a report names it."""
        parts = (self.peer_id.encode(), bytes([len(self.chain)]), *self.chain, *self.vouches)
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The content of a credential: the `serial`, `inviter` and uses of an invitation, or the sorted `vouchers`. Times
    are Unix seconds. Only `check_credential` checks signatures and times."""

    peer_id: str
    serial: int = 0
    inviter: str = ""
    max_uses: int = 0
    vouchers: tuple[str, ...] = ()
    expires_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunInvitation(WireMessage):
    """An invitation or a `vouch`, which a newcomer gets as one word. An invitation is a secret unless it is bound.
    `repr` shows neither. Raises ValueError if its parts do not belong together."""

    PROTO = credentials_pb2.RunInvitation
    MAX_BYTES = MAX_TEXT_CHARS

    certificate: bytes = b""
    key: bytes = b""
    vouch: bytes = b""

    def __post_init__(self) -> None:
        if bool(self.certificate) == bool(self.vouch):
            raise ValueError("it holds neither an invitation nor a vouch, or both")
        envelope = self.envelope
        if self.vouch:
            if self.key or envelope.purpose != VOUCH_PURPOSE:
                raise ValueError("it is no vouch")
            return
        terms = self.terms
        if envelope.purpose != CERTIFICATE_PURPOSE or terms is None or terms.is_bound != (not self.key):
            raise ValueError("its key is missing, or it is no invitation")
        check_key(self.key, envelope)

    def __repr__(self) -> str:
        return f"RunInvitation({self.run})"

    @property
    def envelope(self) -> Envelope:
        """The certificate or the vouch. Raises ValueError."""
        return Envelope.parse(self.certificate or self.vouch)

    @property
    def terms(self) -> RunTerms | None:
        """The terms of an invitation, or None for a vouch. Raises ValueError."""
        if self.vouch:
            return None
        try:
            return RunTerms.from_bytes(self.envelope.payload)
        except PeerViolation as error:
            raise ValueError(error.message) from None

    @property
    def run(self) -> str:
        """The run's id."""
        return self.terms.run if self.terms else self.envelope.subject.partition("/")[0]

    def text(self) -> str:
        """Return the one word, which `parse_run_invitation` reads."""
        return to_word(TEXT_PREFIX, self.to_bytes())


def invite_to_run(
    inviter: Identity, run: str, *, network_id: str, now: float, lifetime_s: float, max_uses: int = 1, node: str = ""
) -> RunInvitation:
    """Sign an invitation to `run`, bound to the peer id `node` if there is one. Raises ValueError if anything is out of
    bounds."""
    holder = Identity.generate()
    terms = RunTerms(run=run, serial=int.from_bytes(os.urandom(8), "big") or 1, max_uses=max_uses, is_bound=bool(node))
    certificate = seal_now(
        inviter,
        network_id,
        purpose=CERTIFICATE_PURPOSE,
        subject=node or holder.peer_id,
        payload=terms.to_bytes(),
        now=now,
        lifetime_s=lifetime_s,
    )
    return RunInvitation(certificate=certificate, key=b"" if node else holder.seed)


def vouch_for(
    member: Identity, run: str, newcomer: str, *, network_id: str, now: float, lifetime_s: float
) -> RunInvitation:
    """Sign a vouch, as a member of `run`, for the peer id `newcomer`. Raises ValueError if anything is out of
    bounds."""
    vouch = seal_now(
        member,
        network_id,
        purpose=VOUCH_PURPOSE,
        subject=_vouch_subject(run, newcomer),
        payload=b"",
        now=now,
        lifetime_s=lifetime_s,
    )
    return RunInvitation(vouch=vouch)


def parse_run_invitation(text: str) -> RunInvitation:
    """Read the word of an invitation or a vouch. Raises ConfigError, which never quotes the text, since that is a
    secret."""
    return from_word(TEXT_PREFIX, text, RunInvitation.from_bytes, max_chars=MAX_TEXT_CHARS, remedy=_COPY_IT)


def check_given(given: Sequence[RunInvitation], peer_id: str, run: str, *, network_id: str) -> None:
    """Check the given invitations and vouches. Raises ConfigError if one is for another run or network, or for another
    node than `peer_id`, which is empty for a node that has no key yet."""
    for each in given:
        envelope, terms = each.envelope, each.terms
        what = "vouch" if each.vouch else "invitation"
        is_others = (
            envelope.subject != _vouch_subject(run, peer_id)
            if each.vouch
            else bool(terms and terms.is_bound) and envelope.subject != peer_id
        )
        if each.run != run:
            raise ConfigError(
                f"this {what} is to the run {each.run}, not to {run}",
                remedy=f"give --invitation one to {run}, or --run the run {each.run}",
            )
        if envelope.network_id != network_id:
            raise ConfigError(
                f"this {what} is for the network {envelope.network_id}, not for {network_id}",
                remedy=f"give --invitation one for {network_id}, or --network-id {envelope.network_id}",
            )
        if is_others:
            raise ConfigError(
                f"this {what} is for another node",
                remedy="give --invitation one for this node's peer id, which swarm-node identity shows",
            )


def credential_of(
    given: Sequence[RunInvitation], peer_id: str, run: str, *, network_id: str, now: float
) -> RunCredential | None:
    """Return the credential that the node `peer_id` shows for `run`: an invitation if it was given one, else its
    vouches; None if all have expired at `now`. Raises ConfigError if one is for another run, network or node."""
    check_given(given, peer_id, run, network_id=network_id)
    usable = [each for each in given if each.envelope.expires_at > now]
    if not usable:
        return None
    invitations = [each for each in usable if each.certificate]
    if not invitations:
        vouches = {each.envelope.peer_id: each.vouch for each in usable}
        kept = tuple(vouches[peer] for peer in sorted(vouches)[: limits.MAX_VOUCHERS])
        return RunCredential(peer_id=peer_id, vouches=kept)
    latest = max(invitations, key=lambda each: each.envelope.expires_at)
    if not latest.key:
        return RunCredential(peer_id=peer_id, chain=(latest.certificate,))
    link = link_to(peer_id, latest.key, latest.envelope, LINK_PURPOSE)
    return RunCredential(peer_id=peer_id, chain=(latest.certificate, link))


def grant_of(credential: RunCredential) -> Grant:
    """Read a credential without checking signatures. Raises ValueError if it is malformed."""
    if credential.vouches:
        envelopes = [Envelope.parse(each) for each in credential.vouches]
        vouchers = tuple(each.peer_id for each in envelopes)
        if not are_sorted(vouchers):
            raise ValueError("the vouchers are not sorted and distinct")
        expires_at = min(each.expires_at for each in envelopes)
        return Grant(peer_id=credential.peer_id, vouchers=vouchers, expires_at=expires_at)
    envelope = Envelope.parse(credential.chain[0])
    try:
        terms = RunTerms.from_bytes(envelope.payload)
    except PeerViolation as error:
        raise ValueError(error.message) from None
    return Grant(
        peer_id=credential.peer_id,
        serial=terms.serial,
        inviter=envelope.peer_id,
        max_uses=terms.max_uses,
        expires_at=envelope.expires_at,
    )


def any_expires_by(at: float, credentials: Iterable[RunCredential]) -> bool:
    return any(grant_of(each).expires_at <= at for each in credentials)


def check_credential(
    credential: RunCredential, run: str, *, network_id: str, inviters: Collection[str], at: float
) -> Grant:
    """Return what `credential` grants. Raises PeerViolation or IntegrityError unless it is for `run`, all signatures in
    it are genuine, the certificate's is of one of `inviters`, and all is valid at the time `at`."""
    try:
        grant = grant_of(credential)
    except ValueError as error:
        raise PeerViolation(f"its credential is malformed: {error}", peer_id=credential.peer_id) from None
    if credential.vouches:
        _check_vouches(credential, run, network_id, at)
    else:
        _check_invitation(credential, run, network_id, inviters, at)
    return grant


def _check_vouches(credential: RunCredential, run: str, network_id: str, at: float) -> None:
    for each in credential.vouches:
        vouch = _unseal(each, VOUCH_PURPOSE, network_id, at)
        if vouch.subject != _vouch_subject(run, credential.peer_id) or vouch.payload:
            raise PeerViolation("a vouch is for another newcomer or run, or holds more", peer_id=credential.peer_id)


def _check_invitation(
    credential: RunCredential, run: str, network_id: str, inviters: Collection[str], at: float
) -> None:
    certificate = _unseal(credential.chain[0], CERTIFICATE_PURPOSE, network_id, at)
    terms, holder = RunTerms.from_bytes(certificate.payload), certificate.subject
    if certificate.peer_id not in inviters:
        raise PeerViolation("its invitation is signed by nobody who may invite", peer_id=credential.peer_id)
    if terms.run != run:
        raise PeerViolation("its invitation is to another run", peer_id=credential.peer_id)
    if terms.is_bound != (len(credential.chain) == 1):
        raise PeerViolation("its invitation is bound to one node, or lacks its link", peer_id=credential.peer_id)
    if not terms.is_bound:
        link = _unseal(credential.chain[1], LINK_PURPOSE, network_id, at)
        if link.peer_id != holder or link.payload:
            raise PeerViolation("its invitation is for another key, or its link holds more", peer_id=credential.peer_id)
        holder = link.subject
    if holder != credential.peer_id:
        raise PeerViolation("its invitation is another node's", peer_id=credential.peer_id)


def sign_revocation(author: Identity, revocation: RunRevocation, *, network_id: str, now: float) -> bytes:
    """Sign `revocation` as the run's author."""
    return seal_now(
        author,
        network_id,
        purpose=REVOCATION_PURPOSE,
        subject=_revocation_subject(revocation.run),
        payload=revocation.to_bytes(),
        now=now,
        lifetime_s=limits.MAX_SIGNED_LIFETIME_S,
    )


def read_revocation(data: bytes, run: str, *, network_id: str, author: str, now: float) -> RunRevocation:
    """Return the revocation by the author of `run`, which does not expire. Raises PeerViolation or IntegrityError."""
    envelope = unseal(
        data,
        purpose=REVOCATION_PURPOSE,
        network_id=network_id,
        now=now,
        max_payload_bytes=limits.MAX_RUN_REVOCATION_BYTES,
        expired_too=True,
    )
    if envelope.peer_id != author or envelope.subject != _revocation_subject(run):
        raise PeerViolation("a revocation is not of the author of this run", peer_id=envelope.peer_id)
    revocation = RunRevocation.from_bytes(envelope.payload)
    if revocation.run != run:
        raise PeerViolation("a revocation is of another run", peer_id=envelope.peer_id)
    return revocation


def revocation_in(data: bytes) -> RunRevocation | None:
    """Read a revocation without checking its signature: those in signed groups were checked. Return None for empty
    bytes and for a malformed one."""
    if not data:
        return None
    try:
        return RunRevocation.from_bytes(Envelope.parse(data).payload)
    except (ValueError, PeerViolation):
        return None


def _revocation_subject(run: str) -> str:
    return f"{run}/revocation"


def _unseal(data: bytes, purpose: str, network_id: str, at: float) -> Envelope:
    return unseal(data, purpose=purpose, network_id=network_id, now=at, max_payload_bytes=limits.MAX_RUN_TERMS_BYTES)


def _vouch_subject(run: str, newcomer: str) -> str:
    return f"{run}/{newcomer}"
