"""Seals a payload in a signed envelope, with its subject, network, purpose and validity.

Each content has exactly one encoding, so bytes can be compared and hashed, and any change breaks the signature:

    version 1 | purpose | network id | subject | public key | issued at | expires at | payload | signature

purpose, network id, subject (UTF-8) and payload each follow their length as 4 bytes big-endian; the public key is 32
bytes, the times big-endian IEEE doubles, the signature 64 bytes, and nothing follows. The signature is over
`b"swarm-envelope:"` and all that precedes it. Prefix and purpose keep a signature from being used for something else:
libp2p signs with the same key, for example `noise-libp2p-static-key:…`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from swarm_protocol import limits
from swarm_protocol.checks import Checked, named, one_line, sized
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, PeerId, peer_id_of, public_key_of, verify
from swarm_protocol.records import NodeRecord, Record, ServeRecord, TrainerRecord, publish_key
from swarm_protocol.version import NetworkId

ENVELOPE_VERSION = 1
_DOMAIN = b"swarm-envelope:"
_LENGTH_BYTES = 4
_TIMES = struct.Struct(">dd")

RECORD_PURPOSE = "record"
_KINDS: dict[str, type[NodeRecord] | type[ServeRecord] | type[TrainerRecord]] = {
    "nodes": NodeRecord,
    "serve": ServeRecord,
    "train": TrainerRecord,
}


class OutOfTime(PeerViolation):
    """An envelope has expired by this machine's clock, or is not valid yet. Either side's clock may be wrong, and may
    be corrected in a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope(Checked):
    """A well-formed envelope. Only those that `seal` and `unseal` return have a valid signature. Times are Unix
    seconds."""

    purpose: Annotated[str, named(limits.MAX_PURPOSE_BYTES)]
    network_id: NetworkId
    subject: Annotated[str, one_line(limits.MAX_SUBJECT_BYTES, empty=False)]
    peer_id: PeerId
    issued_at: float
    expires_at: float
    payload: bytes
    signature: Annotated[bytes, sized(SIGNATURE_BYTES)]

    def __post_init__(self) -> None:
        if len(self.subject.encode()) > limits.MAX_SUBJECT_BYTES:
            raise ValueError(f"subject has more than {limits.MAX_SUBJECT_BYTES} bytes")
        _check_times(self.issued_at, self.expires_at)
        if not isinstance(self.payload, bytes) or len(self.payload) > limits.MAX_SIGNED_PAYLOAD_BYTES:
            raise ValueError(f"payload is not bytes, at most {limits.MAX_SIGNED_PAYLOAD_BYTES} of them")

    def to_bytes(self) -> bytes:
        return _signed_bytes(self) + self.signature

    def holds_at(self, now: float) -> bool:
        """Return whether the envelope has not expired at `now`, and was not issued more than MAX_CLOCK_SKEW_S after
        it."""
        return self.issued_at <= now + limits.MAX_CLOCK_SKEW_S and now < self.expires_at

    @classmethod
    def parse(cls, data: bytes) -> Envelope:
        """Read an envelope without checking its signature. Raises ValueError unless `data` is exactly one."""
        reader = _Reader(data)
        version = reader.take(1)[0]
        if version != ENVELOPE_VERSION:
            raise ValueError(f"version {version}, and this node reads {ENVELOPE_VERSION}")
        purpose, network_id, subject = (reader.take_prefixed().decode() for _ in range(3))
        peer_id = peer_id_of(reader.take(KEY_BYTES))
        issued_at, expires_at = _TIMES.unpack(reader.take(_TIMES.size))
        envelope = cls(
            purpose=purpose,
            network_id=network_id,
            subject=subject,
            peer_id=peer_id,
            issued_at=issued_at,
            expires_at=expires_at,
            payload=reader.take_prefixed(),
            signature=reader.take(SIGNATURE_BYTES),
        )
        if reader.num_left:
            raise ValueError(f"{reader.num_left} bytes too many")
        return envelope


def seal(
    identity: Identity,
    *,
    purpose: str,
    network_id: str,
    subject: str,
    payload: bytes,
    issued_at: float,
    expires_at: float,
) -> Envelope:
    """Sign `payload`. Raises ValueError if anything is out of bounds."""
    envelope = Envelope(
        purpose=purpose,
        network_id=network_id,
        subject=subject,
        peer_id=identity.peer_id,
        issued_at=float(issued_at),
        expires_at=float(expires_at),
        payload=payload,
        signature=bytes(SIGNATURE_BYTES),
    )
    # set directly: nobody else has the envelope yet, and `replace` would check all fields again
    object.__setattr__(envelope, "signature", identity.sign(_DOMAIN + _signed_bytes(envelope)))
    return envelope


def seal_now(
    identity: Identity, network_id: str, *, purpose: str, subject: str, payload: bytes, now: float, lifetime_s: float
) -> bytes:
    """Sign `payload` as `seal` does, valid from `now` on for `lifetime_s`. Raises ValueError."""
    envelope = seal(
        identity,
        purpose=purpose,
        network_id=network_id,
        subject=subject,
        payload=payload,
        issued_at=now,
        expires_at=now + lifetime_s,
    )
    return envelope.to_bytes()


def unseal(
    data: bytes,
    *,
    purpose: str,
    network_id: str,
    now: float,
    max_payload_bytes: int = limits.MAX_SIGNED_PAYLOAD_BYTES,
    max_lifetime_s: float = limits.MAX_SIGNED_LIFETIME_S,
    expired_too: bool = False,
) -> Envelope:
    """Return the envelope in `data`, signed by its `peer_id` for this purpose and network, and valid at `now`.

    Raises PeerViolation if it is malformed, too large, for something else, or too long-lived, OutOfTime if it has
    expired (unless `expired_too`) or was issued more than MAX_CLOCK_SKEW_S after `now`, and IntegrityError if the
    signature is wrong. The caller must check that the subject is the expected one.
    """
    envelope = unverified(data, max_payload_bytes)
    if complaint := _complaint(envelope, purpose, network_id, max_payload_bytes, max_lifetime_s):
        raise PeerViolation(complaint, peer_id=envelope.peer_id)
    if complaint := _time_complaint(envelope, min(now, envelope.issued_at) if expired_too else now):
        raise OutOfTime(complaint, peer_id=envelope.peer_id)
    verify(envelope.peer_id, _DOMAIN + data[:-SIGNATURE_BYTES], envelope.signature)
    return envelope


def unverified(data: bytes, max_payload_bytes: int = limits.MAX_SIGNED_PAYLOAD_BYTES) -> Envelope:
    """Return the envelope in `data`, without checking its signature or times. Raises PeerViolation."""
    if len(data) > max_payload_bytes + limits.MAX_ENVELOPE_OVERHEAD_BYTES:
        raise PeerViolation(f"envelope has {len(data)} bytes, more than its purpose allows")
    try:
        return Envelope.parse(data)
    except ValueError as error:
        raise PeerViolation(f"envelope is malformed: {error}") from error


def issued_at(data: bytes) -> float:
    """Return the stated time of signing of the envelope in `data`. With this as `now`, `unseal` reads an envelope of
    any age. Raises PeerViolation."""
    return unverified(data).issued_at


def _complaint(envelope: Envelope, purpose: str, network_id: str, max_payload_bytes: int, max_lifetime_s: float) -> str:
    if envelope.purpose != purpose:
        return f"envelope is signed as {envelope.purpose!r}, not as {purpose!r}"
    if envelope.network_id != network_id:
        return f"envelope is for network {envelope.network_id!r}, not {network_id!r}"
    if len(envelope.payload) > max_payload_bytes:
        return f"payload has {len(envelope.payload)} bytes, more than {max_payload_bytes}"
    if envelope.expires_at - envelope.issued_at > max_lifetime_s:
        return f"envelope lives for {envelope.expires_at - envelope.issued_at:.0f} s, more than {max_lifetime_s:.0f}"
    return ""


def _time_complaint(envelope: Envelope, now: float) -> str:
    if envelope.expires_at <= now:
        return f"envelope expired {now - envelope.expires_at:.0f} s ago"
    if envelope.issued_at > now + limits.MAX_CLOCK_SKEW_S:
        return f"envelope is from {envelope.issued_at - now:.0f} s in the future; one of the two clocks is wrong"
    return ""


def _check_times(issued_at: float, expires_at: float) -> None:
    # only floats, and above zero: an int would come back as another type, and -0.0 is a second form of zero
    if not all(isinstance(time, float) and math.isfinite(time) for time in (issued_at, expires_at)):
        raise ValueError("times are not finite floats")
    if not 0.0 < issued_at < expires_at <= limits.MAX_TIME_S:
        raise ValueError("times are not in order")


def _prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def _signed_bytes(envelope: Envelope) -> bytes:
    return b"".join(
        (
            bytes([ENVELOPE_VERSION]),
            _prefixed(envelope.purpose.encode()),
            _prefixed(envelope.network_id.encode()),
            _prefixed(envelope.subject.encode()),
            public_key_of(envelope.peer_id),
            _TIMES.pack(envelope.issued_at, envelope.expires_at),
            _prefixed(envelope.payload),
        )
    )


class _Reader:
    """Reads fields from the front of `data`. Raises ValueError if it ends early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def num_left(self) -> int:
        return len(self._data) - self._position

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.num_left:
            raise ValueError(f"truncated: {self.num_left} bytes where {num_bytes} belong")
        self._position += num_bytes
        return self._data[self._position - num_bytes : self._position]

    def take_prefixed(self) -> bytes:
        return self.take(int.from_bytes(self.take(_LENGTH_BYTES), "big"))


def seal_record(
    identity: Identity, *, network_id: str, key: str, payload: bytes, issued_at: float, lifetime_s: float
) -> Envelope:
    """Return `payload` as this identity's record under `key`. Raises ValueError if payload or lifetime is over
    `limits`."""
    if len(payload) > limits.MAX_RECORD_BYTES:
        raise ValueError(f"record has {len(payload)} bytes, more than {limits.MAX_RECORD_BYTES}")
    if not 0.0 < lifetime_s <= limits.MAX_RECORD_LIFETIME_S:
        raise ValueError(f"record lives for {lifetime_s} s, not in (0, {limits.MAX_RECORD_LIFETIME_S}]")
    return seal(
        identity,
        purpose=RECORD_PURPOSE,
        network_id=network_id,
        subject=key,
        payload=payload,
        issued_at=issued_at,
        expires_at=issued_at + lifetime_s,
    )


def unseal_record(data: bytes, *, network_id: str, key: str, now: float) -> Envelope:
    """Return the valid record in `data`, found under `key`. Raises PeerViolation or IntegrityError, as `unseal` does.

    The payload is not decoded: any key may hold any bytes, and `read_record` decodes the records of this package.
    """
    envelope = unseal(
        data,
        purpose=RECORD_PURPOSE,
        network_id=network_id,
        now=now,
        max_payload_bytes=limits.MAX_RECORD_BYTES,
        max_lifetime_s=limits.MAX_RECORD_LIFETIME_S,
    )
    if envelope.subject != key:
        raise PeerViolation(f"record is for key {envelope.subject!r}, not {key!r}", peer_id=envelope.peer_id)
    return envelope


@lru_cache(maxsize=2**11)
def _record_of(kind: str, payload: bytes) -> Record:
    """Decode a record, once for all its readers in this process: roles, pages, and the nodes of a simulation."""
    return _KINDS[kind].from_bytes(payload)


def read_record(envelope: Envelope) -> Record:
    """Return the record that a verified envelope carries.

    Raises PeerViolation if it is malformed, or not under one of the few keys under which its signer may publish it. So
    nobody can publish under an unrelated model, or under every key of a tree.
    """
    kind = envelope.subject.partition("#")[0].split("/", 1)[0]
    if kind not in _KINDS:
        raise PeerViolation(f"no records are kept under {envelope.subject!r}", peer_id=envelope.peer_id)
    try:
        record = _record_of(kind, envelope.payload)
    except PeerViolation as violation:
        violation.peer_id = envelope.peer_id
        raise
    depth = len(envelope.subject.partition("#")[2])
    if depth > limits.MAX_KEY_DEPTH or publish_key(record, envelope.peer_id, depth) != envelope.subject:
        raise PeerViolation(f"record does not belong under {envelope.subject!r}", peer_id=envelope.peer_id)
    return record
