"""Makes and checks invitations to a private network: certificates that its owner signs, with rights, an expiry and a
serial.

A private network is named by its owner's key, `private-` and the owner's peer id, so that everyone who knows the name
can check who is a member. The owner signs a certificate for an *invitation key*, which the invitation's text contains.
The holder of that key signs a link to its own node's key. The two together are the node's *chain*. libp2p proves a
node's key in each connection, so nobody else can use a chain that they saw. A *bound* certificate names the node's key
itself, and no link continues it.

The owner revokes by serial, in a signed list whose newest edition all members keep.

An invitation also contains the members' shared secret, which gives no access: a node that has it still needs a
certificate. The secret hides the names of protocols, and of packets in a local network, from strangers. Keys for its
uses are derived by HMAC-SHA-256. Sealed messages are encrypted and authenticated with ChaCha20-Poly1305 (RFC 8439)
under a random nonce.
"""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, TypeAlias, get_args

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from swarm_protocol import limits
from swarm_protocol.checks import Addr, Checked, distinct, one_line, one_of, up_to, whole
from swarm_protocol.credential_text import check_key, from_word, link_to, to_word
from swarm_protocol.envelope import Envelope, OutOfTime, seal_now, unseal, unverified
from swarm_protocol.errors import ConfigError, IntegrityError, PeerRefused, PeerViolation, SwarmError
from swarm_protocol.identity import Identity, check_peer_id
from swarm_protocol.proto import private_pb2
from swarm_protocol.version import Hello
from swarm_protocol.wire import WireMessage

Right: TypeAlias = Literal["join", "serve", "train", "ask"]
RIGHTS: tuple[Right, ...] = get_args(Right)

_NETWORK = "private-"
TERMS_PURPOSE = "network-invitation"
LINK_PURPOSE = "network-member"
LIST_PURPOSE = "network-revocations"
_LIST_SUBJECT = "revocations"

TEXT_PREFIX = "swarm1-"
_COPY_IT = "copy the whole line that swarm-node invite printed"
MAX_TEXT_CHARS = 8192
"""Eight seeds with the longest addresses, as base64."""

SECRET_BYTES = 32
NONCE_BYTES = 12
SEAL_BYTES = NONCE_BYTES + 16
"""Number of bytes that sealing adds to a message."""

_NUM_NAME_CHARS = 32
_MAX_REMEMBERED_NAMES = 4096


def network_id_of(owner_id: str) -> str:
    """Return the id of the private network that belongs to this key."""
    return _NETWORK + owner_id


def owner_of(network_id: str) -> str | None:
    """Return the peer id of a private network's owner, or None for an open network."""
    owner_id = network_id.removeprefix(_NETWORK)
    if owner_id == network_id:
        return None
    try:
        return check_peer_id(owner_id)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitationTerms(WireMessage):
    """The terms of a certificate. Every certificate grants the right to join. If `is_bound`, it does so for the holder
    of the named key only."""

    PROTO = private_pb2.InvitationTerms
    MAX_BYTES = limits.MAX_INVITATION_TERMS_BYTES

    serial: Annotated[int, whole(2**64 - 1, low=1)]
    rights: Annotated[tuple[Annotated[str, one_of(RIGHTS)], ...], distinct(len(RIGHTS))]
    is_bound: bool = False

    def __post_init__(self) -> None:
        if "join" not in self.rights:
            raise ValueError("rights do not contain join")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocations(WireMessage):
    """The serials that the owner has revoked and whose certificates have not expired, in the edition `number`."""

    PROTO = private_pb2.Revocations
    MAX_BYTES = limits.MAX_REVOCATIONS_BYTES

    number: Annotated[int, whole(2**53)] = 0
    serials: Annotated[tuple[int, ...], distinct(limits.MAX_REVOKED)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateGreeting(WireMessage):
    """The message that both sides of a connection in a private network send each other. With a `refusal` it has nothing
    else."""

    PROTO = private_pb2.PrivateGreeting
    MAX_BYTES = limits.MAX_PRIVATE_GREETING_BYTES

    hello: Hello | None
    chain: Annotated[tuple[bytes, ...], up_to(2)] = ()
    revocations: bytes = b""
    refusal: Annotated[str, one_line(limits.MAX_REFUSAL_CHARS)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability(Checked):
    """The rights that a checked chain gives to `peer_id`, until `expires_at` (Unix seconds) or a revocation."""

    peer_id: str
    serial: int
    rights: frozenset[str]
    expires_at: float

    def holds(self, revoked: frozenset[int], now: float) -> bool:
        """Return whether the capability has neither expired nor been revoked."""
        return now < self.expires_at and self.serial not in revoked


class NetworkSecret:
    """The secret of a network: 32 random bytes, and the keys that follow from them. `repr` does not show them."""

    __slots__ = ("_key", "_names")

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError for another length."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a network's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._names = _derived(secret, b"names")
        self._key = ChaCha20Poly1305(_derived(secret, b"seal"))

    def protocol_name(self, name: str) -> str:
        """Return the name under which a method is served on the wire: 160 bits that can be derived only with the
        secret."""
        return _hidden(self._names, name)

    @property
    def discovery_name(self) -> str:
        """The name that stands for the network in multicast DNS."""
        return _hidden(self._names, "multicast DNS").removeprefix("/")

    def seal(self, content: bytes, about: bytes) -> bytes:
        """Encrypt `content` for the members. `about` is not sent, and must be the same to open it."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._key.encrypt(nonce, content, about)

    def open(self, sealed: bytes, about: bytes) -> bytes:
        """Decrypt and return the content. Raises PeerViolation unless it was sealed with this secret and this
        `about`."""
        try:
            return self._key.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about)
        except (InvalidTag, ValueError):
            raise PeerViolation("a message was not sealed with the secret of this network") from None


def _derived(secret: bytes, use: bytes) -> bytes:
    return hmac.digest(secret, b"swarm private network: " + use, "sha256")


@lru_cache(maxsize=_MAX_REMEMBERED_NAMES)
def _hidden(key: bytes, name: str) -> str:
    digest = hmac.digest(key, name.encode(), "sha256")
    return "/" + base64.b32encode(digest).decode()[:_NUM_NAME_CHARS].lower()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NetworkInvitation(WireMessage):
    """An invitation to a private network, which is itself the secret: `repr` shows its serial only.

    Raises ValueError if its parts do not belong together. Its expiry is not checked.
    """

    PROTO = private_pb2.NetworkInvitation
    MAX_BYTES = MAX_TEXT_CHARS

    certificate: bytes
    secret: bytes
    key: bytes = b""
    seeds: Annotated[tuple[Addr, ...], distinct(limits.MAX_CONTACT_ADDRS)] = ()

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError("its secret has another length")
        envelope, terms = self._opened()
        if terms.is_bound != (not self.key):
            raise ValueError("its key is missing")
        check_key(self.key, envelope)

    def __repr__(self) -> str:
        return f"NetworkInvitation({serial_text(self.terms.serial)})"

    @property
    def terms(self) -> InvitationTerms:
        return self._opened()[1]

    @property
    def network_id(self) -> str:
        return self._opened()[0].network_id

    @property
    def holder(self) -> str:
        """The peer id that the certificate names: of the invitation key, or of the node that it is bound to."""
        return self._opened()[0].subject

    @property
    def expires_at(self) -> float:
        return self._opened()[0].expires_at

    @property
    def network_secret(self) -> NetworkSecret:
        return NetworkSecret(self.secret)

    def chain_for(self, peer_id: str) -> tuple[bytes, ...]:
        """Return the chain that makes the node `peer_id` a member. Raises ConfigError if the invitation is bound to
        another node."""
        envelope, terms = self._opened()
        if terms.is_bound:
            if peer_id != envelope.subject:
                raise ConfigError(
                    f"this invitation is for the node {envelope.subject} alone",
                    remedy="use it with that node's home, or ask the network's owner for one of your own",
                )
            return (self.certificate,)
        return (self.certificate, link_to(peer_id, self.key, envelope, LINK_PURPOSE))

    def text(self) -> str:
        """Return the invitation as one word, which `parse_invitation` reads."""
        return to_word(TEXT_PREFIX, self.to_bytes())

    def _opened(self) -> tuple[Envelope, InvitationTerms]:
        """Raises ValueError."""
        try:
            return _open_certificate(self.certificate)
        except SwarmError as error:
            raise ValueError(f"its certificate is invalid: {error.message}") from None


def invite(
    owner: Identity,
    *,
    rights: Sequence[Right],
    now: float,
    lifetime_s: float,
    secret: bytes,
    seeds: Sequence[str] = (),
    node: str = "",
) -> NetworkInvitation:
    """Sign an invitation, bound to the peer id `node` if there is one. Raises ValueError if anything is out of
    bounds."""
    holder = Identity.generate()
    terms = InvitationTerms(
        serial=int.from_bytes(os.urandom(8), "big") or 1,
        rights=tuple(right for right in RIGHTS if right == "join" or right in rights),
        is_bound=bool(node),
    )
    certificate = seal_now(
        owner,
        network_id_of(owner.peer_id),
        purpose=TERMS_PURPOSE,
        subject=node or holder.peer_id,
        payload=terms.to_bytes(),
        now=now,
        lifetime_s=lifetime_s,
    )
    key = b"" if node else holder.seed
    return NetworkInvitation(certificate=certificate, secret=secret, key=key, seeds=tuple(seeds))


def parse_invitation(text: str) -> NetworkInvitation:
    """Read an invitation's text. Raises ConfigError, which never quotes the text, since that is a secret."""
    decode = NetworkInvitation.from_bytes
    return from_word(TEXT_PREFIX, text, decode, max_chars=MAX_TEXT_CHARS, remedy=_COPY_IT)


def given_invitation(given: object) -> NetworkInvitation | None:
    """Return the invitation that a caller gave as an object or as its text, or None. Raises ConfigError."""
    if given is None or isinstance(given, NetworkInvitation):
        return given
    if not isinstance(given, str):
        raise ConfigError(f"invite is {given!r:.80} and not an invitation", remedy=f'give invite="{TEXT_PREFIX}…"')
    return parse_invitation(given)


def check_chain(chain: Sequence[bytes], *, network_id: str, peer_id: str, now: float) -> Capability:
    """Return the capability that `chain` gives to `peer_id`, whose key the connection has proved.

    Raises PeerRefused if it has expired or is not valid yet, and PeerViolation or IntegrityError if it is no chain of
    this network and peer. The caller must check revocations (`Capability.holds`).
    """
    if not 1 <= len(chain) <= 2:
        raise PeerViolation("there is no chain of certificates", peer_id=peer_id)
    envelope, terms = _open_certificate(chain[0], now)
    if envelope.network_id != network_id:
        raise PeerViolation("the certificate is for another network", peer_id=peer_id)
    expires_at, holder = envelope.expires_at, envelope.subject
    if len(chain) == 2:
        if terms.is_bound:
            raise PeerViolation("the certificate is bound to one node, and not to be passed on", peer_id=peer_id)
        link = _unseal(chain[1], LINK_PURPOSE, network_id, now)
        if link.peer_id != holder or link.payload:
            raise PeerViolation("the certificate is for another key", peer_id=peer_id)
        expires_at, holder = min(expires_at, link.expires_at), link.subject
    elif not terms.is_bound:
        raise PeerViolation("the certificate is for an invitation, not for a node", peer_id=peer_id)
    if holder != peer_id:
        raise PeerViolation("the chain of certificates is another node's", peer_id=peer_id)
    if expires_at <= now:
        raise PeerRefused(
            "the invitation has expired",
            remedy="ask the network's owner for a new one, and check this machine's clock",
            peer_id=peer_id,
        )
    return Capability(peer_id=peer_id, serial=terms.serial, rights=frozenset(terms.rights), expires_at=expires_at)


def _open_certificate(data: bytes, now: float = limits.MAX_TIME_S) -> tuple[Envelope, InvitationTerms]:
    """Return a certificate that its network's owner signed, expired or not. Raises PeerViolation or IntegrityError."""
    network_id = unverified(data).network_id
    envelope = _unseal(data, TERMS_PURPOSE, network_id, now)
    if envelope.peer_id != owner_of(network_id):
        raise IntegrityError("the certificate is not signed by the owner of its network", peer_id=envelope.peer_id)
    try:
        check_peer_id(envelope.subject)
    except ValueError as error:
        raise PeerViolation(f"the certificate is for no key: {error}") from None
    return envelope, InvitationTerms.from_bytes(envelope.payload)


def _unseal(data: bytes, purpose: str, network_id: str, now: float) -> Envelope:
    try:
        return unseal(
            data,
            purpose=purpose,
            network_id=network_id,
            now=now,
            max_payload_bytes=limits.MAX_INVITATION_TERMS_BYTES,
            expired_too=True,
        )
    except OutOfTime as error:  # signed in the future: one that has expired is read, too
        ahead_s = unverified(data).issued_at - now
        raise PeerRefused(
            f"the invitation was signed {ahead_s:.0f} s in the future; one of the two clocks is wrong",
            remedy="set the clock that is wrong, for example by turning on network time",
            peer_id=error.peer_id,
        ) from None


def seal_revocations(owner: Identity, revocations: Revocations, now: float) -> bytes:
    """Return the list, signed by the network's owner."""
    return seal_now(
        owner,
        network_id_of(owner.peer_id),
        purpose=LIST_PURPOSE,
        subject=_LIST_SUBJECT,
        payload=revocations.to_bytes(),
        now=now,
        lifetime_s=limits.MAX_SIGNED_LIFETIME_S,
    )


def open_revocations(data: bytes, *, network_id: str, now: float) -> Revocations:
    """Return the list that the network's owner signed, which does not expire. Raises PeerViolation or
    IntegrityError."""
    envelope = unseal(
        data,
        purpose=LIST_PURPOSE,
        network_id=network_id,
        now=now,
        max_payload_bytes=limits.MAX_REVOCATIONS_BYTES,
        expired_too=True,
    )
    if envelope.peer_id != owner_of(network_id) or envelope.subject != _LIST_SUBJECT:
        raise IntegrityError("the list of revocations is not signed by the network's owner", peer_id=envelope.peer_id)
    return Revocations.from_bytes(envelope.payload)


def serial_text(serial: int) -> str:
    """Return a serial as people read and type it: 16 hexadecimal digits."""
    return f"{serial:016x}"
