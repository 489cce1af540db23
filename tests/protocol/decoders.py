"""Every decoder of bytes from peers, with examples, for the property tests and the fuzzer.

A new message adds an example to the `…_examples.py` of its topic. `test_decoders.py` fails for each class with
`from_bytes` that has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm_protocol.envelope import read_record, seal, seal_record, unseal, unseal_record
from swarm_protocol.errors import PeerRefused, PeerViolation, RoundError, SessionError
from swarm_protocol.failure_messages import decode_failure, encode_failure
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import open_manifest
from swarm_protocol.member_messages import FollowRequest
from swarm_protocol.network_invitation import PrivateGreeting, check_chain, open_revocations
from swarm_protocol.records import (
    NodeRecord,
    PathCounts,
    Refusal,
    RoundReport,
    ServeRecord,
    TrainerRecord,
    ValidationReport,
    publish_key,
)
from swarm_protocol.run_credentials import check_credential
from swarm_protocol.version import Hello

from protocol import (
    control_examples,
    credential_examples,
    dht_examples,
    equivocation_examples,
    manifest_examples,
    path_examples,
    private_examples,
    proof_examples,
    served_evidence_examples,
    serving_examples,
    session_examples,
    training_examples,
)

IDENTITY = Identity(bytes(range(32)))
NEIGHBOUR = Identity(bytes(range(1, 33))).peer_id
NOW = 1_700_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder: `decode` returns a value or raises PeerViolation or IntegrityError, and accepts the `examples`.
    `encode` is its inverse; it is None if there is none, as for errors, which compare by identity.
    """

    name: str
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes] | None
    examples: tuple[bytes, ...]


def name_of(message_type: type[Any]) -> str:
    """Return a unique name, since two topics may both have a `Ready`."""
    return f"{message_type.__module__.rsplit('.', 1)[-1]}.{message_type.__name__}"


def by_class(*examples: Any) -> tuple[Decoder, ...]:
    """Return the `from_bytes` of each class among `examples`."""
    classes = dict.fromkeys(type(example) for example in examples)
    return tuple(
        Decoder(
            name=name_of(message_type),
            decode=message_type.from_bytes,
            encode=message_type.to_bytes,
            examples=tuple(example.to_bytes() for example in examples if type(example) is message_type),
        )
        for message_type in classes
    )


NODE = NodeRecord(
    name="Ada's desk, 2nd floor",
    version="0.1.0",
    addrs=(f"/ip4/203.0.113.7/tcp/4001/p2p/{IDENTITY.peer_id}", f"/dns4/a.example/udp/4001/quic-v1/p2p/{NEIGHBOUR}"),
    device="NVIDIA GeForce RTX 5090",
    memory_bytes=32 * 2**30,
    free_memory_bytes=30 * 2**30,
    reachability="public",
    prefill_tokens_per_s=12_000.0,
    decode_tokens_per_s=90.5,
    training_tokens_per_s=20_000.0,
    started_at=NOW - 60.0,
    state="alive",
    models=("meta-llama/Llama-3.1-8B",),
    runs=("stdlib-1f00ba44",),
    role="gateway",
    first_token_p50_s=0.4,
    first_token_p95_s=1.25,
    paths=PathCounts(direct=12, punched=3, relayed=1),
)
SERVE = ServeRecord(
    model="meta-llama/Llama-3.1-8B",
    revision="0e9e39f249a16976918f6564b8830bc894c89659",
    num_blocks=32,
    start=8,
    end=20,
    state="serving",
    prefill_ms_per_token=0.01,
    decode_ms_per_block=0.4,
    free_kv_tokens=100_000,
    queue_depth=3,
    rtt_ms={NEIGHBOUR: 25.5},
    tokens_per_s=41.5,
    source="meta-llama/Llama-3.1-8B@0e9e39f249a16976918f6564b8830bc894c89659",
    manifest=bytes(range(32)),
    dtype="bfloat16",
)
TRAINER = TrainerRecord(
    run="stdlib-1f00ba44",
    outer_step=17,
    digest=bytes(range(32)),
    tokens_per_s=20_000.0,
    loss=2.5,
    state="training",
    report=RoundReport(
        outer_step=17,
        phases_s={"interval": 60.5, "group": 0.25, "reduce": 3.0, "commit": 0.5, "apply": 0.0},
        bytes_sent=12_345_678,
        refused=(Refusal(peer_id=NEIGHBOUR, reason="it sent a bad slice: 3 bytes, not 4"),),
    ),
    num_parameters=7_000_000_000,
    validation=ValidationReport(outer_step=40, loss=2.25),
)
JOINING_TRAINER = TrainerRecord(run="stdlib-1f00ba44", outer_step=0, state="joining")
HELLO = Hello(network_id="swarm-main", software_version="0.1.0", sent_at=NOW)
KEY = publish_key(TRAINER, IDENTITY.peer_id)

VOTE_ENVELOPE = seal(
    IDENTITY,
    purpose="vote",
    network_id="test",
    subject="stdlib-1f00ba44/17/0",
    payload=b"yes",
    issued_at=NOW,
    expires_at=NOW + 30.0,
)
RECORD_ENVELOPE = seal_record(
    IDENTITY, network_id="test", key=KEY, payload=TRAINER.to_bytes(), issued_at=NOW, lifetime_s=60.0
)


def _unseal_vote(data: bytes) -> Any:
    return unseal(data, purpose="vote", network_id="test", now=NOW)


def _unseal_record(data: bytes) -> Any:
    envelope = unseal_record(data, network_id="test", key=KEY, now=NOW)
    read_record(envelope)
    return envelope


def _check_chain(data: bytes) -> Any:
    try:
        return check_chain(
            PrivateGreeting.from_bytes(data).chain,
            network_id=private_examples.NETWORK_ID,
            peer_id=private_examples.MEMBER,
            now=NOW,
        )
    except PeerRefused as error:  # it has expired
        raise PeerViolation(error.message) from None


def _check_credential(data: bytes) -> object:
    request = FollowRequest.from_bytes(data)
    if request.credential is None:
        raise PeerViolation("there is none")
    return check_credential(
        request.credential,
        credential_examples.RUN,
        network_id=credential_examples.NETWORK_ID,
        inviters=(credential_examples.AUTHOR.peer_id,),
        at=credential_examples.NOW,
    )


DECODERS: tuple[Decoder, ...] = (
    *by_class(NODE, SERVE, TRAINER, JOINING_TRAINER, HELLO),
    *by_class(*training_examples.EXAMPLES, *serving_examples.EXAMPLES, *control_examples.EXAMPLES),
    *by_class(*private_examples.EXAMPLES, *credential_examples.EXAMPLES),
    *by_class(*session_examples.EXAMPLES, *dht_examples.EXAMPLES, *path_examples.EXAMPLES, *proof_examples.EXAMPLES),
    *by_class(*manifest_examples.EXAMPLES, *equivocation_examples.EXAMPLES, *served_evidence_examples.EXAMPLES),
    Decoder(
        name="PublishedManifest",
        decode=open_manifest,
        encode=lambda value: value.signed,
        examples=(manifest_examples.SIGNED,),
    ),
    Decoder(
        name="Failure",
        decode=lambda data: decode_failure(data, IDENTITY.peer_id),
        encode=None,
        examples=(
            encode_failure(PeerRefused("full", remedy="ask again", peer_id=NEIGHBOUR, retry_after_s=2.5)),
            encode_failure(RoundError("no quorum", missing=(NEIGHBOUR, IDENTITY.peer_id))),
            encode_failure(SessionError("evicted", session_id="s-1")),
            encode_failure(KeyError("secret")),
        ),
    ),
    Decoder(
        name="Envelope",
        decode=_unseal_vote,
        encode=lambda value: value.to_bytes(),
        examples=(VOTE_ENVELOPE.to_bytes(),),
    ),
    Decoder(
        name="SignedRecord",
        decode=_unseal_record,
        encode=lambda value: value.to_bytes(),
        examples=(RECORD_ENVELOPE.to_bytes(),),
    ),
    Decoder(
        name="Chain",
        decode=_check_chain,
        encode=None,
        examples=(
            PrivateGreeting(hello=None, chain=private_examples.CHAIN).to_bytes(),
            PrivateGreeting(hello=None, chain=private_examples.BOUND.chain_for(private_examples.MEMBER)).to_bytes(),
        ),
    ),
    Decoder(
        name="RunCredential",
        decode=_check_credential,
        encode=None,
        examples=credential_examples.SHOWN,
    ),
    Decoder(
        name="SignedRevocations",
        decode=lambda data: open_revocations(data, network_id=private_examples.NETWORK_ID, now=NOW),
        encode=None,
        examples=(private_examples.LIST,),
    ),
)
