"""Records in their signed envelopes, as the DHT stores them: one key and signer, small, and soon expired.

`network` implementations seal and unseal; whoever looks records up reads them with `read_record`.
"""

from __future__ import annotations

from swarm_protocol import limits
from swarm_protocol.envelope import Envelope, seal, unseal
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.records import NodeRecord, Record, ServeRecord, TrainerRecord, publish_key

RECORD_PURPOSE = "record"

_KINDS: dict[str, type[NodeRecord] | type[ServeRecord] | type[TrainerRecord]] = {
    "nodes": NodeRecord,
    "serve": ServeRecord,
    "train": TrainerRecord,
}


def seal_record(
    identity: Identity, *, network_id: str, key: str, payload: bytes, issued_at: float, lifetime_s: float
) -> Envelope:
    """`payload` as this identity's record under `key`. Raises ValueError if payload or lifetime is over `limits`."""
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
    """The valid record in `data`, found under `key`. Raises PeerViolation or IntegrityError, as `unseal` does.

    The payload is not looked at: any key may hold any bytes, and `read_record` knows the ones of this package.
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


def read_record(envelope: Envelope) -> Record:
    """The record that a verified envelope carries.

    Raises PeerViolation if it is malformed, or not under the one key where its signer may publish it: so nobody
    shows up under another's model, or in every shard.
    """
    record_type = _KINDS.get(envelope.subject.split("/", 1)[0])
    if record_type is None:
        raise PeerViolation(f"no records are kept under {envelope.subject!r}", peer_id=envelope.peer_id)
    try:
        record = record_type.from_bytes(envelope.payload)
    except PeerViolation as violation:
        violation.peer_id = envelope.peer_id
        raise
    if publish_key(record, envelope.peer_id) != envelope.subject:
        raise PeerViolation(f"record does not belong under {envelope.subject!r}", peer_id=envelope.peer_id)
    return record
