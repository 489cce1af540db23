"""Proofs that a hostile peer has changed and signed: evidence, groups, certificates, manifests, and invitations.

A changed byte in what is signed gets no further than its signature. So each `try_…` changes fields of a right proof,
drawn from the bytes it is given, and signs what a peer may sign. It raises what the check of the proof raises.
"""

from __future__ import annotations

import base64
import hashlib
import random
from contextlib import suppress
from dataclasses import replace
from functools import cache

from protocol.private_examples import INVITATION, MEMBER, NETWORK_ID, OWNER
from support.fuzzing import Target, mutated
from support.hostile_values import altered
from support.training_swarm import config
from support.wrong_reduction import (
    CODEC,
    IDENTITIES,
    NOW,
    NUM_VALUES,
    STRANGER,
    Reduced,
    reduced,
    shown_leaf,
    signatures,
    times_minus_ten,
)
from swarm.serving.manifest.possession import (
    STATEMENT_LIFETIME_S,
    check_answer,
    check_possession,
    draw,
    possession_evidence,
    read_possession,
)
from swarm.serving.manifest.possession import accused as possession_accused
from swarm.serving.manifest.verification import complaint_about
from swarm.training.allreduce.parts import leaf_at, num_leaves
from swarm.training.evidence.evidence import accused, check
from swarm.training.evidence.wrong_interval import draw_leaves, draw_validators
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import InnerConfig
from swarm_protocol.commit_messages import Certificate, Outcome, PlacedSignature
from swarm_protocol.envelope import seal_now
from swarm_protocol.errors import ConfigError
from swarm_protocol.hash_tree import HashTree, leaf_digest
from swarm_protocol.manifest_messages import (
    POSSESSION_PURPOSE,
    BlockBytes,
    ByteRange,
    ChunkPath,
    ManifestFile,
    ModelManifest,
    PossessionRequest,
    PossessionResponse,
    PossessionStatement,
    WeightFile,
    open_manifest,
    sign_manifest,
)
from swarm_protocol.network_invitation import (
    LINK_PURPOSE,
    TERMS_PURPOSE,
    InvitationTerms,
    check_chain,
    parse_invitation,
)
from swarm_protocol.proof_messages import (
    BadSlice,
    Equivocation,
    Evidence,
    IntervalFinding,
    StatedVote,
    WrongInterval,
    WrongReduction,
)
from swarm_protocol.reduction_messages import AuditedSlice, PartStatement
from swarm_protocol.served_evidence_messages import WrongPossession
from swarm_protocol.training_messages import SignedGroup

RUN = config(aggregator="centered_clip", validation_rate=0.5, inner=InnerConfig(batch_windows=2, fresh_moments=True))
TWO = config(min_group=2)
LIAR = IDENTITIES[1]
NAMES = (*(each.peer_id for each in IDENTITIES), STRANGER.peer_id, "run", "test")
NETWORK = "test"
SERVER, ASKER = IDENTITIES[:2]
CHUNKS = (b"first chunk" * 5, b"config")


@cache
def case() -> Reduced:
    return reduced()


@cache
def wrong_reduction() -> WrongReduction:
    return case().evidence(times_minus_ten(case().result()))


def try_reduction(data: bytes) -> None:
    """Check evidence of a wrong reduction of which the liar, the coordinator and the accuser may have changed things.
    Raises AssertionError if it convicts anyone but the member that signed the wrong result."""
    chance, whole = random.Random(data), wrong_reduction()
    if chance.random() < 0.4:
        whole = altered(whole, chance, texts=NAMES)
    if chance.random() < 0.4:
        whole = replace(whole, group=signed_anew(chance).data)
    if chance.random() < 0.4:
        group_digest = hashlib.sha256(whole.group).digest()
        _, statement = signatures().read(PartStatement, wrong_reduction().statement, NOW)
        statement = altered(replace(statement, group_digest=group_digest), chance, texts=NAMES)
        whole = replace(whole, statement=signatures(LIAR).sign(statement, NOW))
    check_evidence(whole.evidence() if chance.random() < 0.9 else altered(whole.evidence(), chance), {LIAR.peer_id})


def signed_anew(chance: random.Random) -> SignedGroup:
    """Return the group with changes, as its coordinator signs it."""
    changed = altered(case().group, chance, texts=NAMES, num_changes=chance.choice((1, 3)))
    return signatures(IDENTITIES[0]).sign_group(changed, NOW)


def check_evidence(evidence: Evidence, liars: set[str], run: RunConfig = RUN) -> None:
    evidence = Evidence.from_bytes(evidence.to_bytes())
    accused(evidence, signatures())
    assert check(evidence, signatures(), run).peer_id in liars


def certificate_of(signed: SignedGroup) -> Certificate:
    """Return a certificate of what the group came to, for which all four have voted."""
    group, votes = signed.group, []
    outcome = Outcome(
        origin_digest=signed.digest, part_digests=(b"p" * 32,) * len(group.part_values), state_digest=bytes(32)
    )
    vote = signed.vote(outcome, "commit")
    for identity in IDENTITIES:
        if identity.peer_id in group.peer_ids:
            signature = signatures(identity).sign_vote(vote).signature
            votes.append(PlacedSignature(place=group.peer_ids.index(identity.peer_id), signature=signature))
    return Certificate(group=signed.data, outcome=outcome, votes=tuple(votes))


@cache
def certificate() -> Certificate:
    return certificate_of(case().signed)


@cache
def wrong_interval() -> WrongInterval:
    """What three members say of the interval of another, of which they show slices."""
    group, outcome = case().group, certificate().outcome
    assert outcome is not None
    peer, validator = next(iter(draw_validators(group, outcome, RUN.validation_rate).items()))
    place = group.peer_ids.index(peer)
    tree, vector_N = case().trees[place], case().vectors[place]
    slices = tuple(
        AuditedSlice(data=CODEC.encode(vector_N[leaf_at(NUM_VALUES, leaf)]), proof=b"".join(tree.proof(leaf, leaf + 1)))
        for leaf in draw_leaves(group, outcome, peer, validator)
    )
    finders = sorted((each for each in IDENTITIES if each.peer_id != peer), key=lambda each: each.peer_id != validator)
    finding = IntervalFinding(run="run", step=1, attempt=0, origin_digest=outcome.origin_digest, peer=peer)
    findings = tuple(signatures(each).sign(finding, NOW) for each in finders)
    return WrongInterval(certificate=certificate().to_bytes(), peer=peer, slices=slices, findings=findings)


def try_interval(data: bytes) -> None:
    """Check evidence of a wrong interval, with changes by those who signed it. Raises AssertionError if it convicts
    another member than they accuse."""
    chance, whole = random.Random(data), wrong_interval()
    if chance.random() < 0.5:
        whole = altered(whole, chance, texts=NAMES)
    if chance.random() < 0.4:
        whole = replace(whole, certificate=altered(certificate(), chance, texts=NAMES).to_bytes())
    if chance.random() < 0.4:
        signer = chance.choice(IDENTITIES)
        _, finding = signatures().read(IntervalFinding, wrong_interval().findings[0], NOW)
        finding = altered(finding, chance, texts=NAMES)
        findings = list(whole.findings) or [b""]
        findings[chance.randrange(len(findings))] = signatures(signer).sign(finding, NOW)
        whole = replace(whole, findings=tuple(dict.fromkeys(findings)))
    check_evidence(whole.evidence(), {wrong_interval().peer})


@cache
def bad_slice() -> BadSlice:
    """The liar's commitment to a leaf of NaN."""
    leaves = [CODEC.encode(case().vectors[1][leaf_at(NUM_VALUES, leaf)]) for leaf in range(num_leaves(NUM_VALUES))]
    leaves[4] = b"\xff" * len(leaves[4])
    return shown_leaf(LIAR, 1, leaves, 4)


def try_bad_slice(data: bytes) -> None:
    """Check evidence of a bad slice that its accuser has changed, or which is about an honest member's genuine
    commitment. Raises AssertionError if it convicts anyone but the member that committed to it."""
    chance, whole = random.Random(data), bad_slice()
    if chance.random() < 0.5:
        place, leaf = chance.choice((0, 2, 3)), chance.randrange(num_leaves(NUM_VALUES))
        honest, tree = case().group.members[place], case().trees[place]
        assert honest.commitment is not None
        genuine = AuditedSlice(
            data=CODEC.encode(case().vectors[place][leaf_at(NUM_VALUES, leaf)]),
            proof=b"".join(tree.proof(leaf, leaf + 1)),
        )
        root, signature = honest.commitment.root, honest.commitment.signature
        whole = replace(whole, peer=honest.peer_id, root=root, signature=signature, leaf=leaf, shown=genuine)
    if chance.random() < 0.7:
        whole = altered(whole, chance, texts=NAMES, num_changes=chance.choice((1, 2)))
    check_evidence(whole.evidence(), {LIAR.peer_id})


def try_equivocation(data: bytes) -> None:
    """Check two votes, of which one is any member's and the liar has signed the other, whatever is in it. Raises
    AssertionError if that convicts an honest member."""
    chance, signed = random.Random(data), case().signed
    outcome = Outcome(origin_digest=signed.digest, part_digests=(b"p" * 32,), state_digest=bytes(32))
    vote = signed.vote(outcome, "prepare")
    other = replace(vote, outcome=replace(outcome, state_digest=chance.randbytes(32)))
    if chance.random() < 0.5:
        changed = altered(other, chance, texts=NAMES)
        other = changed if changed.outcome else other  # nobody can sign a vote for nothing
    first = StatedVote.of(signatures(LIAR if chance.random() < 0.8 else chance.choice(IDENTITIES)).sign_vote(vote))
    second = StatedVote.of(signatures(LIAR).sign_vote(other))
    peer = (LIAR if chance.random() < 0.8 else chance.choice(IDENTITIES)).peer_id
    whole = Equivocation(statement="vote", peer=peer, first=first.to_bytes(), second=second.to_bytes())
    if chance.random() < 0.3:
        whole = altered(whole, chance, texts=NAMES)
    check_evidence(whole.evidence(), {LIAR.peer_id}, TWO)


def try_certificate(data: bytes) -> None:
    """Check a certificate whose coordinator has changed the group before all voted, or of which anything is changed."""
    chance = random.Random(data)
    whole = certificate_of(signed_anew(chance)) if chance.random() < 0.7 else certificate()
    changed = whole.to_bytes() if chance.random() < 0.5 else altered(whole, chance, texts=NAMES).to_bytes()
    signatures().check_certificate(changed, NOW)


@cache
def manifest() -> ModelManifest:
    """A model of two files, whose weights are one chunk."""
    weights, small = CHUNKS
    root = HashTree.of([leaf_digest(weights)]).root
    num_bytes = len(weights)
    return ModelManifest(
        name="story",
        publisher=SERVER.peer_id,
        published_at=1_700_000_000,
        files=(ManifestFile(name="config.json", num_bytes=len(small), sha256=hashlib.sha256(small).digest()),),
        weights=(
            WeightFile(
                name="model.safetensors", num_bytes=num_bytes, sha256=hashlib.sha256(weights).digest(), root=root
            ),
        ),
        before=(ByteRange(file=0, start=8, num_bytes=4),),
        blocks=(
            BlockBytes(ranges=(ByteRange(file=0, start=12, num_bytes=8),)),
            BlockBytes(ranges=(ByteRange(file=0, start=20, num_bytes=num_bytes - 20),)),
        ),
        after=(),
        origin="owner/story@0123",
    )


def try_manifest(data: bytes) -> None:
    """Open a manifest that its publisher has changed and signed; compare files with it, draw from it, and check what a
    server answers, of which the server may have changed anything."""
    chance = random.Random(data)
    changed = manifest() if chance.random() < 0.3 else altered(manifest(), chance, num_changes=chance.choice((1, 3)))
    published = open_manifest(sign_manifest(changed, SERVER).signed)
    opened = published.manifest
    complaint_about(opened, {"config.json": CHUNKS[1], "tokenizer.json": b""})
    start = chance.randrange(opened.num_blocks)
    drawn = draw(opened, start, chance.randrange(start, opened.num_blocks) + 1, chance)
    request = PossessionRequest(manifest=published.digest, nonce=bytes(32), drawn=drawn)
    request = PossessionRequest.from_bytes(request.to_bytes())
    statement = PossessionStatement(
        manifest=request.manifest,
        nonce=request.nonce,
        asker=ASKER.peer_id,
        drawn=drawn,
        paths=tuple(ChunkPath(digest=leaf_digest(CHUNKS[0]), siblings=b"") for _ in drawn),
    )
    sealed = seal_now(
        SERVER if chance.random() < 0.9 else ASKER,
        NETWORK,
        purpose=POSSESSION_PURPOSE,
        subject="story",
        payload=statement.to_bytes() if chance.random() < 0.5 else altered(statement, chance, texts=NAMES).to_bytes(),
        now=NOW,
        lifetime_s=STATEMENT_LIFETIME_S,
    )
    answer = PossessionResponse(statement=sealed, chunks=(CHUNKS[0],) * len(drawn))
    if evidence := possession_evidence(published, SERVER.peer_id, answer.to_bytes(), NETWORK):
        check_possession(read_possession(evidence), NETWORK)
    check_answer(
        opened,
        request,
        altered(answer, chance).to_bytes() if chance.random() < 0.4 else answer.to_bytes(),
        asker=ASKER.peer_id,
        peer_id=SERVER.peer_id,
        network_id=NETWORK,
        now=NOW,
    )


def try_possession(data: bytes) -> None:
    """Check evidence about a server: an honest one's genuine statement, or the liar's, of which it has changed
    anything, with a manifest that its publisher may have signed anew. Raises AssertionError if that convicts anyone but
    the liar."""
    chance = random.Random(data)
    published = sign_manifest(manifest(), SERVER)
    signer = LIAR if chance.random() < 0.7 else IDENTITIES[2]
    drawn = draw(published.manifest, 0, 2, random.Random(0))
    said = PossessionStatement(
        manifest=published.digest,
        nonce=bytes(32),
        asker=STRANGER.peer_id,
        drawn=drawn,
        paths=tuple(ChunkPath(digest=leaf_digest(CHUNKS[0]), siblings=b"") for _ in drawn),
    )
    if signer is LIAR:
        wrong = tuple(replace(each, digest=leaf_digest(b"another chunk")) for each in said.paths)
        said = replace(said, paths=wrong) if chance.random() < 0.5 else altered(said, chance, texts=NAMES)
    sealed = seal_now(
        signer,
        NETWORK if signer is not LIAR or chance.random() < 0.9 else "other",
        purpose=POSSESSION_PURPOSE,
        subject="story",
        payload=said.to_bytes(),
        now=NOW,
        lifetime_s=STATEMENT_LIFETIME_S,
    )
    shown = published if chance.random() < 0.7 else sign_manifest(altered(manifest(), chance), SERVER)
    whole = WrongPossession(manifest=shown.signed, statement=sealed)
    whole = altered(whole, chance) if chance.random() < 0.3 else whole
    evidence = whole.evidence().to_bytes()
    evidence = mutated(evidence, chance) if chance.random() < 0.2 else evidence
    read = read_possession(evidence)
    possession_accused(read)
    assert check_possession(read, NETWORK).peer_id == LIAR.peer_id


def try_invitation(data: bytes) -> None:
    """Check the chain of somebody whose invitation the owner has changed and signed, and read an invitation that is
    broken though its text is whole."""
    chance = random.Random(data)
    terms = InvitationTerms(serial=7, rights=("join", "serve"), is_bound=chance.random() < 0.5)
    certificate = seal_now(
        OWNER if chance.random() < 0.9 else STRANGER,
        NETWORK_ID,
        purpose=TERMS_PURPOSE,
        subject=chance.choice((MEMBER, STRANGER.peer_id, "x")),
        payload=altered(terms, chance, num_changes=chance.choice((1, 2))).to_bytes(),
        now=NOW,
        lifetime_s=chance.choice((1.0, 86400.0)),
    )
    link = seal_now(
        STRANGER, NETWORK_ID, purpose=LINK_PURPOSE, subject=MEMBER, payload=b"", now=NOW, lifetime_s=86400.0
    )
    content = mutated(INVITATION.to_bytes(), chance)
    check_digits = hashlib.sha256(content).digest()[:4]
    text = INVITATION.text()[:7] + base64.urlsafe_b64encode(content + check_digits).decode().rstrip("=")
    with suppress(ConfigError):  # its check digits are right, so most of what is refused is refused for its content
        parse_invitation(text)
    chain = (certificate, link) if chance.random() < 0.5 else (certificate,)
    check_chain(chain, network_id=NETWORK_ID, peer_id=MEMBER, now=NOW + 2.0)


TARGETS = (
    Target(name="evidence of a reduction", take=try_reduction),
    Target(name="evidence of an interval", take=try_interval),
    Target(name="evidence of two votes", take=try_equivocation),
    Target(name="evidence of a bad slice", take=try_bad_slice),
    Target(name="certificate of a step", take=try_certificate),
    Target(name="manifest and its proofs", take=try_manifest),
    Target(name="evidence of a wrong proof", take=try_possession),
    Target(name="chain of an invitation", take=try_invitation),
)
