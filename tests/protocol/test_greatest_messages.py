"""The greatest valid message of each kind fits the limit of its kind, that of an envelope if it travels in one, that of
a DHT value if it is a record, and a frame.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import swarm_protocol
from support.greatest_messages import Builder, longest_addrs, peer_ids
from swarm_protocol import limits, network_invitation, run_credentials
from swarm_protocol.commit_messages import Certificate, Endorsement, Lock, PlacedSignature, ResumeOrder
from swarm_protocol.dht_messages import MAX_STORED_BYTES, Contact, Found
from swarm_protocol.identity import SIGNATURE_BYTES, Identity
from swarm_protocol.manifest_messages import (
    CHUNK_BYTES,
    ByteRange,
    ManifestFile,
    ModelManifest,
    PossessionStatement,
    SignedManifest,
)
from swarm_protocol.network_invitation import RIGHTS, InvitationTerms, NetworkInvitation, Revocations, invite
from swarm_protocol.proof_messages import Evidence, IntervalFinding, WrongReduction
from swarm_protocol.reduction_messages import AuditedSlice, PartStatement
from swarm_protocol.run_credentials import (
    MAX_USES,
    RunCredential,
    RunInvitation,
    RunRevocation,
    credential_of,
    invite_to_run,
    vouch_for,
)
from swarm_protocol.training_messages import Contribution, Follower, Group
from swarm_protocol.wire import WireMessage

MEMBERS = limits.MAX_GROUP_MEMBERS
LEAF_BYTES = 4 * 98_304
PATH_BYTES = limits.DIGEST_BYTES * 18
"""The longest path in a tree over the leaves of MAX_PART_VALUES."""
NOW = 1_800_000_000.0
RUN = "r" * limits.MAX_NAME_BYTES
NETWORK = "n" * limits.MAX_NETWORK_ID_BYTES


def sealed(kind: type[WireMessage]) -> bytes:
    """Return as many bytes as the greatest message of this kind has in the greatest envelope."""
    return bytes(len(greatest(kind).to_bytes()) + limits.MAX_ENVELOPE_OVERHEAD_BYTES)


def bare(kind: type[WireMessage]) -> bytes:
    return bytes(len(greatest(kind).to_bytes()))


def votes(count: int = MEMBERS) -> tuple[PlacedSignature, ...]:
    return tuple(PlacedSignature(place=place, signature=bytes(SIGNATURE_BYTES)) for place in range(count))


def followers(places: range) -> tuple[Follower, ...]:
    """Return followers that are large each, and that have together less than an interval's tokens."""
    most = limits.MAX_INTERVAL_TOKENS // limits.MAX_TRAINERS
    return tuple(
        Follower(place=place, num_tokens=most, num_samples=most, leaving=True, steps_left=limits.MAX_PROBATION_STEPS)
        for place in places
    )


@cache
def credential() -> RunCredential:
    """Return as many vouches with the longest names as one newcomer shows; an invitation and its link are shorter."""
    given = [
        vouch_for(Identity(bytes([n]) * 32), RUN, peer_ids(1024)[0], network_id=NETWORK, now=NOW, lifetime_s=3600.0)
        for n in range(limits.MAX_VOUCHERS)
    ]
    shown = credential_of(given, peer_ids(1024)[0], RUN, network_id=NETWORK, now=NOW)
    assert shown is not None
    return shown


def contribution(place: int) -> Contribution:
    """Return one of the MEMBERS reports that fill a group, with an equal share of what groups bound in all."""
    each, ids = (limits.MAX_TRAINERS - MEMBERS) // MEMBERS, peer_ids(1024)
    newcomers = limits.MAX_NEWCOMERS // MEMBERS
    return replace(
        builder().message(Contribution, place),
        followers=followers(range(MEMBERS + place * each, MEMBERS + (place + 1) * each)),
        newcomers=ids[place * newcomers : (place + 1) * newcomers],
        credentials=(credential(),) if place < limits.MAX_CREDENTIALS else (),
        demoted=(ids[place],),
    )


@cache
def origin() -> Group:
    return Group(
        run=RUN,
        step=limits.MAX_OUTER_STEP,
        attempt=limits.MAX_ATTEMPT,
        state_digest=bytes(32),
        members=tuple(contribution(place) for place in range(MEMBERS)),
        part_values=(limits.MAX_PART_VALUES // MEMBERS,) * MEMBERS,
        reduce_s=limits.MAX_PHASE_S,
        vote_s=limits.MAX_PHASE_S,
        order=sealed(ResumeOrder),
        revocation=sealed(RunRevocation),
    )


def sealed_origin() -> bytes:
    return bytes(len(origin().to_bytes()) + limits.MAX_ENVELOPE_OVERHEAD_BYTES)


@cache
def lock() -> Lock:
    return builder().message(Lock)  # type: ignore[no-any-return]


@cache
def group() -> Group:
    return replace(origin(), part_values=(), lock=lock(), origin=sealed_origin())


def ranges() -> tuple[ByteRange, ...]:
    """Return the ranges of one block, when those that a manifest may have are spread equally over all blocks."""
    half, count = limits.MAX_WEIGHT_FILE_BYTES // 2, limits.MAX_MANIFEST_RANGES // limits.MAX_BLOCKS
    return (ByteRange(file=0, start=half, num_bytes=half),) * count


CHANGES: dict[tuple[str, str], Callable[[], Any]] = {
    # bounds that several fields share
    ("AnswerCommitment", "end"): lambda: limits.MAX_BLOCKS,
    ("AnswerCommitment", "inputs_to"): lambda: limits.MAX_SESSION_TOKENS,
    ("AnswerCommitment", "outputs_to"): lambda: limits.MAX_SESSION_TOKENS,
    ("Compute", "start"): lambda: 0,
    ("Compute", "end"): lambda: limits.MAX_BLOCKS,
    ("Compute", "num_sequences"): lambda: 1,
    ("Compute", "num_last"): lambda: limits.MAX_SESSION_TOKENS,
    ("Contribution", "followers"): lambda: (),
    ("Contribution", "credentials"): lambda: (),
    ("KvRequest", "end"): lambda: limits.MAX_BLOCKS,
    ("NodeRecord", "free_memory_bytes"): lambda: limits.MAX_MEMORY_BYTES,
    ("ServeRecord", "start"): lambda: limits.MAX_BLOCKS - 1,
    ("ServeRecord", "end"): lambda: limits.MAX_BLOCKS,
    ("ServeRecord", "next_start"): lambda: limits.MAX_BLOCKS - 1,
    ("ServeRecord", "next_end"): lambda: limits.MAX_BLOCKS,
    ("ServingStatus", "start"): lambda: limits.MAX_BLOCKS - 1,
    # maps, and texts with their own check
    ("ServeRecord", "rtt_ms"): lambda: dict.fromkeys(peer_ids(1024)[: limits.MAX_RTT_PEERS], limits.MAX_RTT_MS),
    ("ServeRecord", "token_ms"): lambda: dict.fromkeys(peer_ids(1024)[: limits.MAX_RTT_PEERS], limits.MAX_RTT_MS),
    ("ServeRecord", "source"): lambda: "s" * limits.MAX_SOURCE_BYTES,
    ("RoundReport", "phases_s"): lambda: {
        f"{n}{'p' * (limits.MAX_PHASE_NAME_BYTES - 1)}": limits.MAX_MEASURED_S for n in range(limits.MAX_PHASES)
    },
    ("RoundReport", "rates_from"): lambda: dict.fromkeys(
        peer_ids(1024)[: limits.MAX_REPORTED_RATES], limits.MAX_LINK_BYTES_PER_S
    ),
    ("TrainerRecord", "held_out_scores"): lambda: dict.fromkeys(
        peer_ids(1024)[: limits.MAX_REPORTED_SCORES], float(limits.MAX_EFFECT)
    ),
    # filled by another message
    ("Certificate", "group"): lambda: sealed(Group),
    ("Certificate", "order"): lambda: b"",
    ("Certificate", "votes"): votes,
    ("Lock", "votes"): votes,
    ("Ready", "followers"): lambda: followers(range(MEMBERS, limits.MAX_TRAINERS)),
    ("Ready", "credentials"): lambda: (credential(),) * limits.MAX_CREDENTIALS,
    ("Ready", "origin"): sealed_origin,
    ("StatedReport", "report"): lambda: replace(
        contribution(0),
        followers=followers(range(MEMBERS, limits.MAX_TRAINERS)),
        credentials=(credential(),) * limits.MAX_CREDENTIALS,
        newcomers=peer_ids(1024)[: limits.MAX_NEWCOMERS],
        demoted=peer_ids(1024)[: limits.MAX_DEMOTED],
    ),
    ("ReadyReply", "kind"): lambda: "behind",
    ("ReadyReply", "group"): lambda: b"",
    ("ReadyReply", "certificate"): lambda: bare(Certificate),
    ("ReadyReply", "state_digest"): lambda: bytes(32),
    ("FollowReply", "certificate"): lambda: bare(Certificate),
    ("Standing", "certificate"): lambda: bare(Certificate),
    ("Standing", "endorsement"): lambda: sealed(Endorsement),
    ("ReduceOpening", "proof"): lambda: bytes(2 * 19 * limits.DIGEST_BYTES),
    ("FollowRequest", "credential"): credential,
    ("AuditedSlice", "data"): lambda: bytes(LEAF_BYTES),
    ("AuditedSlice", "proof"): lambda: bytes(PATH_BYTES),
    # 256 members with fp32 exceed what evidence may have, as limits.py says
    ("WrongReduction", "group"): lambda: sealed(Group),
    ("WrongReduction", "statement"): lambda: sealed(PartStatement),
    ("WrongReduction", "result"): lambda: bytes(LEAF_BYTES),
    ("WrongReduction", "result_proof"): lambda: bytes(PATH_BYTES),
    ("WrongReduction", "slices"): lambda: (
        (AuditedSlice(data=bytes(98_304 + 4 * 384), proof=bytes(PATH_BYTES)),) * MEMBERS
    ),
    ("WrongInterval", "certificate"): lambda: bare(Certificate),
    ("WrongInterval", "findings"): lambda: tuple(
        number.to_bytes(2, "big") + sealed(IntervalFinding)[2:] for number in range(MEMBERS)
    ),
    ("Equivocation", "first"): lambda: sealed(Group),
    ("Equivocation", "second"): lambda: sealed(Group),
    ("Evidence", "body"): lambda: bare(WrongReduction),
    ("EvidenceFile", "run"): lambda: bytes(64 * 2**10),
    ("EvidenceFile", "evidence"): lambda: bare(Evidence),
    # the last block's server returned draws, and any other one outputs, which are longer
    ("ServedEvidence", "draws"): lambda: (),
    ("ServedEvidence", "commitment"): lambda: bytes(limits.MAX_OPEN_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES),
    ("ServedEvidence", "inputs"): lambda: bytes(500 * 4096 * 4),
    ("ServedEvidence", "outputs"): lambda: bytes(500 * 4096 * 4),
    ("ChunkPath", "siblings"): lambda: bytes(limits.MAX_CHUNK_PATH * limits.DIGEST_BYTES),
    ("PossessionResponse", "statement"): lambda: sealed(PossessionStatement),
    ("PossessionResponse", "chunks"): lambda: (bytes(CHUNK_BYTES),) * limits.MAX_DRAWN_CHUNKS,
    ("SignedManifest", "manifest"): lambda: bare(ModelManifest),
    ("WrongPossession", "manifest"): lambda: bare(SignedManifest),
    ("WrongPossession", "statement"): lambda: sealed(PossessionStatement),
    ("BlockBytes", "ranges"): ranges,
    ("ModelManifest", "files"): lambda: tuple(
        replace(builder().message(ManifestFile, number), name=f"{number:0{limits.MAX_NAME_BYTES - 1}}f")
        for number in range(limits.MAX_MANIFEST_FILES)
    ),
    ("ModelManifest", "before"): lambda: (),
    ("ModelManifest", "after"): lambda: (),
    ("Revocations", "serials"): lambda: tuple(2**64 - 1 - number for number in range(limits.MAX_REVOKED)),
    ("PrivateGreeting", "chain"): lambda: (sealed(InvitationTerms),) * 2,
    ("PrivateGreeting", "revocations"): lambda: sealed(Revocations),
    ("InvitationTerms", "rights"): lambda: RIGHTS,
    ("StoreRequest", "record"): lambda: bytes(MAX_STORED_BYTES),
    ("FindResponse", "found"): lambda: (found(),),
}
"""The value of each field that its own annotation does not bound, or not alone."""


def found() -> Found:
    """Return the content of an answer of all records of a key and of the peers near it; longer answers are cut."""
    contacts = tuple(Contact(peer_id=peer, addrs=longest_addrs()) for peer in peer_ids(1024)[: limits.MAX_FOUND_PEERS])
    records = (number.to_bytes(2, "big").ljust(MAX_STORED_BYTES, b"r") for number in range(limits.MAX_RECORDS_PER_KEY))
    return Found(records=tuple(records), peers=contacts)


def run_word() -> RunInvitation:
    owner = Identity(b"o" * 32)
    return invite_to_run(owner, RUN, network_id=NETWORK, now=NOW, lifetime_s=3600.0, max_uses=MAX_USES)


def network_word() -> NetworkInvitation:
    owner = Identity(b"o" * 32)
    return invite(owner, rights=RIGHTS, now=NOW, lifetime_s=3600.0, secret=bytes(32), seeds=longest_addrs())


WHOLE: dict[str, Callable[[], Any]] = {
    "Group": group,
    "RunInvitation": run_word,
    "NetworkInvitation": network_word,
}
"""Messages that are bounded as a whole, not field by field."""


@cache
def builder() -> Builder:
    return Builder(CHANGES)


@cache
def greatest(kind: type[WireMessage]) -> WireMessage:
    make = WHOLE.get(kind.__name__)
    return make() if make else builder().message(kind)  # type: ignore[no-any-return]


def kinds() -> dict[str, type[WireMessage]]:
    """Return all messages of the protocol that are sent alone, by name."""
    for module in pkgutil.iter_modules(swarm_protocol.__path__):
        importlib.import_module(f"swarm_protocol.{module.name}")

    def below(kind: type[WireMessage]) -> Iterator[type[WireMessage]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    return {kind.__name__: kind for kind in below(WireMessage) if kind.__module__.startswith("swarm_protocol.")}


SIGNED = {
    "AnswerCommitment",
    "Endorsement",
    "Group",
    "IntervalFinding",
    "InvitationTerms",
    "PartStatement",
    "PossessionStatement",
    "ResumeOrder",
    "Revocations",
    "RunRevocation",
    "RunTerms",
}
"""What travels in an envelope; records do so, too."""
RECORDS = {"NodeRecord", "ServeRecord", "TrainerRecord"}


@pytest.mark.parametrize("name", sorted(kinds()))
def test_greatest_message_fits_its_limits(name: str) -> None:
    kind = kinds()[name]
    data = greatest(kind).to_bytes()
    assert len(data) <= kind.MAX_BYTES <= limits.MAX_MESSAGE_BYTES
    assert kind.from_bytes(data) == greatest(kind)
    if name in SIGNED:
        assert len(data) <= limits.MAX_SIGNED_PAYLOAD_BYTES
    if name in RECORDS:
        assert len(data) <= limits.MAX_RECORD_BYTES


def test_every_field_without_its_own_bound_has_a_greatest_value_here() -> None:
    for kind in kinds().values():
        greatest(kind)
    whole = {(name, field) for name, field in builder().unbounded if name in WHOLE}
    assert builder().unbounded - whole == set()
    assert set(CHANGES) - builder().used == set(), "these are no fields any more"


def test_envelopes_of_credentials_and_invitations_fit_their_limits() -> None:
    invited = credential_of([run_word()], peer_ids(1024)[0], RUN, network_id=NETWORK, now=NOW)
    assert invited is not None
    for envelope in (*invited.chain, *credential().vouches):
        assert len(envelope) <= limits.MAX_RUN_CREDENTIAL_BYTES
    assert sum(map(len, invited.chain)) <= sum(map(len, credential().vouches))
    assert len(run_word().text()) <= run_credentials.MAX_TEXT_CHARS
    assert len(network_word().text()) <= network_invitation.MAX_TEXT_CHARS
