"""Tests signed groups, votes and certificates, and that forgeries are refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from support.training_swarm import certificate_of, placed_votes
from swarm.training.round.quorum import Succession
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.standing.entrance import Entrance
from swarm.training.state import certificate
from swarm.training.state.certificate import RunSignatures
from swarm_protocol.commit_messages import Certificate, Lock, Outcome, PlacedSignature, ResumeOrder, Vote, VoteKind
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import Identity, short_id
from swarm_protocol.run_credentials import credential_of, invite_to_run
from swarm_protocol.training_messages import Contribution, Follower, Group, Ready, SignedGroup, SliceCommitment

NOW = 1_750_000_000.0
IDENTITIES = sorted((Identity(bytes([number]) * 32) for number in range(4)), key=lambda each: each.peer_id)
PEERS = [each.peer_id for each in IDENTITIES]
SIGNERS = [RunSignatures(identity=each, network_id="test", run="run") for each in IDENTITIES]
STRANGER = RunSignatures(identity=Identity(b"s" * 32), network_id="test", run="run")
OUTCOME_STATE = b"n" * 32


def make_group(**changes: object) -> Group:
    values: dict[str, object] = {
        "run": "run",
        "step": 3,
        "attempt": 1,
        "state_digest": bytes(32),
        "members": tuple(
            Contribution(peer_id=each.peer_id, num_tokens=8, num_samples=2, loss=1.0) for each in IDENTITIES
        ),
        "part_values": (256, 256, 256, 232),
        "reduce_s": 10.0,
        "vote_s": 10.0,
    }
    return Group(**{**values, **changes})  # type: ignore[arg-type]


def make_outcome(signed: SignedGroup, num_parts: int = 4) -> Outcome:
    return Outcome(origin_digest=signed.digest, part_digests=(bytes(32),) * num_parts, state_digest=OUTCOME_STATE)


def make_vote(signed: SignedGroup, outcome: Outcome, kind: VoteKind = "prepare") -> Vote:
    return signed.vote(outcome, kind)


def certify(signed: SignedGroup, voters: list[RunSignatures], outcome: Outcome | None = None) -> bytes:
    return certificate_of(signed, outcome or make_outcome(signed), voters)


def make_lock(signed: SignedGroup, voters: list[RunSignatures], peers: list[str] = PEERS, **changes: Any) -> Lock:
    """Return the lock made by prepare votes of `voters` for the outcome of `signed`."""
    vote = replace(make_vote(signed, make_outcome(signed, len(signed.group.part_values))), **changes)
    return Lock(
        attempt=vote.attempt,
        group_digest=vote.group_digest,
        outcome=vote.outcome,
        votes=placed_votes(vote, voters, peers),
    )


def test_certificate_with_two_thirds_of_the_votes_proves_the_outcome() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    proof = STRANGER.check_certificate(certify(signed, SIGNERS[1:]), NOW + 86400.0)
    assert proof.outcome.state_digest == OUTCOME_STATE
    assert (proof.outer_step, proof.next_attempt) == (3, 0)
    assert proof.voters == tuple(each.identity.peer_id for each in SIGNERS[1:])


def test_group_is_parsed_once_for_certificates_with_different_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = list[bytes](), Group.from_bytes

    def counted(data: bytes) -> Group:
        parsed.append(data)
        return parse(data)

    signed = SIGNERS[0].sign_group(make_group(run="run", attempt=11), NOW)
    monkeypatch.setattr(Group, "from_bytes", counted)
    for voters in (SIGNERS[:3], SIGNERS[1:]):
        assert STRANGER.check_certificate(certify(signed, voters), NOW).origin == signed.group
    assert len(parsed) == 1


def test_certificate_with_too_few_votes_is_refused() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    with pytest.raises(PeerViolation, match="3 must agree"):
        STRANGER.check_certificate(certify(signed, SIGNERS[:2]), NOW)


def test_certificate_with_votes_of_strangers_or_for_another_outcome_is_refused() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    other, outcome = SIGNERS[1].sign_group(make_group(), NOW), make_outcome(signed)
    own = Certificate.from_bytes(certify(signed, SIGNERS[:2]))
    wanted = make_vote(signed, outcome, "commit")
    for signer, vote in (
        (STRANGER, wanted),
        (SIGNERS[2], make_vote(other, outcome, "commit")),
        (SIGNERS[2], make_vote(signed, outcome, "prepare")),
        (SIGNERS[2], make_vote(signed, replace(outcome, state_digest=bytes(32)), "commit")),
        (SIGNERS[2], replace(wanted, attempt=2)),
        (SIGNERS[2], replace(wanted, step=4)),
    ):
        foreign = PlacedSignature(place=2, signature=signer.sign_vote(vote).signature)
        with pytest.raises(IntegrityError):
            STRANGER.check_certificate(replace(own, votes=(*own.votes, foreign)).to_bytes(), NOW)
    beyond = PlacedSignature(place=4, signature=SIGNERS[2].sign_vote(wanted).signature)
    with pytest.raises(PeerViolation, match="outside the group"):
        STRANGER.check_certificate(replace(own, votes=(*own.votes, beyond)).to_bytes(), NOW)


def test_certificate_of_256_members_is_small() -> None:
    """A newcomer fetches up to 512 of them. An envelope for each vote would add a megabyte."""
    signers = [
        RunSignatures(identity=Identity(n.to_bytes(32, "big")), network_id="test", run="run") for n in range(256)
    ]
    signers.sort(key=lambda each: each.identity.peer_id)
    group = make_group(
        members=tuple(Contribution(peer_id=each.identity.peer_id, num_tokens=8, num_samples=2) for each in signers),
        part_values=(256,) * 256,
    )
    members = tuple(each.sign_group(group, NOW).group.members[n] for n, each in enumerate(signers))
    signed = signers[0].sign_group(replace(group, members=members), NOW)
    STRANGER.check_reports(signed)
    data = certify(signed, signers, make_outcome(signed, 256))
    assert len(STRANGER.check_certificate(data, NOW).voters) == 256
    assert len(data) < 80 * 1024


def test_lock_needs_prepare_votes_of_two_thirds_of_the_former_states_members() -> None:
    signed, reader = SIGNERS[0].sign_group(make_group(), NOW), replace(STRANGER, succession=Succession(min_group=2))
    reader.check_lock(make_lock(signed, SIGNERS[1:]), signed, PEERS)
    reader.check_lock(make_lock(signed, SIGNERS[1:], attempt=9), signed, PEERS)
    with pytest.raises(PeerViolation, match="2 of 4 members voted"):
        reader.check_lock(make_lock(signed, SIGNERS[:2]), signed, PEERS)
    # votes of group members do not count unless these are members of the state before
    former = [STRANGER.identity.peer_id, PEERS[0], Identity(b"t" * 32).peer_id]
    with pytest.raises(PeerViolation, match="1 of 3 members voted"):
        reader.check_lock(make_lock(signed, SIGNERS[:1], former), signed, former)
    # in a run's first round there is no state before, so that members of the outcome's group vote
    reader.check_lock(make_lock(signed, SIGNERS[1:]), signed, ())
    with pytest.raises(PeerViolation, match="2 of 4 members voted"):
        reader.check_lock(make_lock(signed, SIGNERS[1:3]), signed, ())
    with pytest.raises(PeerViolation, match="proves nothing"):
        reader.check_lock(make_lock(signed, SIGNERS, attempt=0), signed, PEERS)


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": 2},
        {"group_digest": bytes(32)},
        {"outcome": Outcome(origin_digest=bytes(32), part_digests=(bytes(32),) * 4, state_digest=bytes(32))},
    ],
)
def test_lock_with_votes_for_something_else_raises_integrity_error(changes: dict[str, Any]) -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    genuine = make_lock(signed, SIGNERS)
    with pytest.raises(IntegrityError):
        STRANGER.check_lock(replace(genuine, **changes), signed, PEERS)
    second = placed_votes(make_vote(signed, genuine.outcome, "commit"), SIGNERS, PEERS)
    with pytest.raises(IntegrityError):
        STRANGER.check_lock(replace(genuine, votes=second), signed, PEERS)


REPORT = Ready(
    run="run",
    step=3,
    attempt=1,
    state_digest=bytes(32),
    num_tokens=8,
    num_samples=2,
    loss=1.0,
    bytes_per_s=5,
    followers=(Follower(place=3, num_tokens=2, num_samples=1),),
    newcomers=(STRANGER.identity.peer_id,),
    commitment=SliceCommitment(root=bytes(32), signature=bytes(64)),
)
OTHER_LOCK = Lock(
    attempt=0,
    group_digest=bytes(32),
    outcome=Outcome(origin_digest=bytes(32), part_digests=(), state_digest=bytes(32)),
    votes=(),
)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 4},
        {"attempt": 2},
        {"state_digest": b"x" * 32},
        {"num_tokens": 9},
        {"num_samples": 3},
        {"loss": 1.5},
        {"leaving": True},
        {"bytes_per_s": 6},
        {"sequence": 1},
        {"followers": (Follower(place=4, num_tokens=2, num_samples=1),)},
        {"followers": (Follower(place=3, num_tokens=3, num_samples=1),)},
        {"followers": (Follower(place=3, num_tokens=2, num_samples=1, leaving=True),)},
        {"followers": ()},
        {"newcomers": ()},
        {"commitment": SliceCommitment(root=b"x" * 32, signature=bytes(64))},
        {"lock": OTHER_LOCK, "origin": b"origin"},
    ],
    ids=str,
)
def test_report_signature_covers_every_field_that_a_group_repeats(change: dict[str, Any]) -> None:
    ready, me = SIGNERS[0].sign_report(REPORT), PEERS[0]
    STRANGER.check_report(ready, me)
    with pytest.raises(PeerViolation, match="has not signed"):
        STRANGER.check_report(replace(ready, **change), me)
    with pytest.raises(PeerViolation, match="has not signed"):
        STRANGER.check_report(ready, PEERS[1])


def test_coordinator_is_blamed_for_a_group_with_a_report_that_its_member_did_not_sign() -> None:
    values = {"state_digest": bytes(32), "reduce_s": 1.0, "vote_s": 1.0, "part_values": (500, 500)}
    reports = [
        replace(each.sign_report(replace(REPORT, followers=(), newcomers=())), origin=b"") for each in SIGNERS[:2]
    ]
    members = tuple(each.contribution_of(peer) for each, peer in zip(reports, PEERS[:2], strict=True))
    group = make_group(members=members, **values)
    STRANGER.check_reports(SIGNERS[0].sign_group(group, NOW))
    for wrong in (
        replace(group, members=(members[0], replace(members[1], num_tokens=7))),
        replace(group, members=(members[0], replace(members[1], signature=b""))),
        replace(group, attempt=2),
    ):
        with pytest.raises(PeerViolation, match=f"{short_id(PEERS[1])} did not sign") as caught:
            STRANGER.check_reports(SIGNERS[0].sign_group(wrong, NOW))
        assert caught.value.peer_id == PEERS[0]


def test_certificate_of_a_group_with_a_peer_that_is_not_admitted_is_refused() -> None:
    """Keys cost nothing: two new ones could otherwise certify any state."""
    data = certify(SIGNERS[0].sign_group(make_group(), NOW), SIGNERS)
    peers = tuple(each.identity.peer_id for each in SIGNERS)
    assert replace(STRANGER, admission=peers).check_certificate(data, NOW).voters == peers
    with pytest.raises(PeerViolation, match="does not admit"):
        replace(STRANGER, admission=peers[1:]).check_certificate(data, NOW)


@pytest.mark.parametrize(
    ("num_members", "num_showing", "changes", "is_refused"),
    [
        (3, 2, {}, False),
        (3, 1, {}, True),
        (4, 3, {}, True),
        (3, 2, {"newcomers": (PEERS[3],)}, True),
        (3, 0, {"state_digest": b"l" * 32}, False),
    ],
    ids=["all invited", "one is not", "more than its uses", "one brings another", "of a later state, which says"],
)
def test_certificate_of_a_first_group_with_an_uninvited_member_is_refused(
    num_members: int, num_showing: int, changes: dict[str, Any], is_refused: bool
) -> None:
    """New keys could otherwise begin a run that requires invitations without any member that refuses them."""
    author, genesis = Identity(b"author".ljust(32)), b"g" * 32
    invitation = invite_to_run(author, "run", network_id="test", now=NOW - 10, lifetime_s=600.0, max_uses=2)

    def founder(place: int) -> Contribution:
        shown = credential_of([invitation], PEERS[place], "run", network_id="test", now=NOW)
        assert shown is not None
        newcomers = changes.get("newcomers", ()) if place == 0 else ()
        return Contribution(
            peer_id=PEERS[place], newcomers=newcomers, credentials=(shown,) if 1 <= place <= num_showing else ()
        )

    rule = Entrance(welcomes=True, required=True, listed=(PEERS[0],))  # the first founder needs no invitation
    reader = replace(STRANGER, inviters=(author.peer_id,), entrance=rule, genesis=genesis)
    group = make_group(
        step=1,
        state_digest=changes.get("state_digest", genesis),
        members=tuple(map(founder, range(num_members))),
        part_values=(),
    )
    signed = SIGNERS[0].sign_group(group, NOW)
    data = certify(signed, SIGNERS[:num_members], make_outcome(signed, 0))
    if is_refused:
        with pytest.raises(PeerViolation, match="was not invited"):
            reader.check_certificate(data, NOW)
    else:
        assert reader.check_certificate(data, NOW).outer_step == 0
    assert replace(reader, genesis=b"").check_certificate(data, NOW), (
        "without a pinned genesis a reader cannot know whether a group is the first"
    )


def signed_order(author: RunSignatures, outer_step: int) -> bytes:
    roster = tuple(each.peer_id for each in IDENTITIES)
    order = ResumeOrder(run="run", sequence=1, outer_step=outer_step, state_digest=bytes(32), roster=roster)
    return author.sign(order, NOW)


def test_group_is_refused_when_its_step_precedes_the_resume_order_that_it_names() -> None:
    """Steps that the author has ended could otherwise outrank those that follow from the order."""
    reader = replace(STRANGER, author=STRANGER.identity.peer_id)
    for outer_step in (3, 2):
        signed = SIGNERS[0].sign_group(make_group(order=signed_order(STRANGER, outer_step)), NOW, 1)
        data = certify(signed, SIGNERS)
        if outer_step == 3:
            with pytest.raises(PeerViolation, match="before the resume order"):
                reader.check_certificate(data, NOW)
        else:
            assert reader.check_certificate(data, NOW).sequence == 1


def test_certificate_is_refused_when_it_resumes_an_outcome_from_before_the_resume_order() -> None:
    reader = replace(STRANGER, author=STRANGER.identity.peer_id)
    order = signed_order(STRANGER, 2)
    for before, is_refused in ((b"", True), (order, False)):
        origin = SIGNERS[0].sign_group(make_group(order=before), NOW, int(bool(before)))
        outcome = make_outcome(origin)
        lock = make_lock(origin, SIGNERS)
        resuming = make_group(attempt=2, part_values=(), lock=lock, origin=origin.data, order=order)
        data = certify(SIGNERS[1].sign_group(resuming, NOW, 1), SIGNERS, outcome)
        if is_refused:
            with pytest.raises(PeerViolation, match="from before the last resume order"):
                reader.check_certificate(data, NOW)
        else:
            assert reader.check_certificate(data, NOW).sequence == 1


def test_only_the_first_of_nested_origin_groups_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message may hold two hundred nested groups. To check all of them would block its reader for a fifth of a
    second."""
    data, few = b"", make_group(members=(Contribution(peer_id=IDENTITIES[0].peer_id),), part_values=())
    for _ in range(20):
        if data:
            origin_digest = hashlib.sha256(data).digest()
            outcome = Outcome(origin_digest=origin_digest, part_digests=(), state_digest=OUTCOME_STATE)
            few = replace(few, lock=replace(OTHER_LOCK, outcome=outcome), origin=data)
        data = SIGNERS[0].sign_group(few, NOW).data
    num_read, unseal = 0, certificate.unseal

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return unseal(*arguments, **more)

    monkeypatch.setattr(certificate, "unseal", counted)
    with pytest.raises(PeerViolation, match="resumes another one"):
        STRANGER.read_group(data, NOW)
    assert num_read == 2


def test_signatures_of_a_run_take_all_checks_from_its_settings() -> None:
    config = RunConfig(name="run", outer_steps=9, min_group=3, admission=tuple(each.peer_id for each in IDENTITIES))
    run = SignedRun(config=config, peer_id=IDENTITIES[0].peer_id, issued_at=1, signature=bytes(64))
    signatures = RunSignatures.of_run(run, IDENTITIES[1], "test")
    assert (signatures.run, signatures.succession, signatures.last_step) == (run.run_id, Succession.of(config), 9)
    assert signatures.admission == config.admission


def test_certificate_with_a_forged_vote_raises_integrity_error() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    certificate = Certificate.from_bytes(certify(signed, SIGNERS[:3]))
    first, *others = certificate.votes
    broken = replace(first, signature=first.signature[:-1] + bytes([first.signature[-1] ^ 1]))
    with pytest.raises(IntegrityError):
        STRANGER.check_certificate(replace(certificate, votes=(broken, *others)).to_bytes(), NOW)


def test_certificate_of_another_run_or_network_is_refused() -> None:
    data = certify(SIGNERS[0].sign_group(make_group(), NOW), SIGNERS)
    for reader in (replace(STRANGER, run="other"), replace(STRANGER, network_id="other")):
        with pytest.raises(PeerViolation):
            reader.check_certificate(data, NOW)


def test_group_with_a_changed_byte_raises_integrity_error() -> None:
    data = bytearray(SIGNERS[0].sign_group(make_group(), NOW).data)
    data[-100] ^= 1
    with pytest.raises((IntegrityError, PeerViolation)):
        STRANGER.read_group(bytes(data), NOW)


def test_certificate_of_a_resumed_outcome_proves_the_work_of_the_first_group() -> None:
    first = SIGNERS[0].sign_group(make_group(), NOW)
    outcome = make_outcome(first)
    resumed = make_group(
        attempt=2,
        members=make_group().members[:2],
        part_values=(),
        lock=make_lock(first, SIGNERS),
        origin=first.data,
    )
    signed = SIGNERS[1].sign_group(resumed, NOW)
    proof = STRANGER.check_certificate(certify(signed, SIGNERS[:2], outcome), NOW)
    assert proof.origin == first.group
    assert proof.outcome == outcome
    with pytest.raises(PeerViolation, match="another outcome than its group resumes"):
        STRANGER.check_certificate(certify(signed, SIGNERS[:2], replace(outcome, state_digest=bytes(32))), NOW)


@pytest.mark.parametrize("change", [{"step": 4}, {"state_digest": b"z" * 32}])
def test_group_that_resumes_another_steps_outcome_is_refused(change: dict[str, object]) -> None:
    first = SIGNERS[0].sign_group(make_group(**change), NOW)
    group = make_group(attempt=2, part_values=(), lock=make_lock(first, SIGNERS), origin=first.data)
    with pytest.raises(PeerViolation, match="another step or state"):
        STRANGER.read_group(SIGNERS[1].sign_group(group, NOW).data, NOW)


def test_origin_with_other_bytes_or_another_number_of_parts_is_refused() -> None:
    first = SIGNERS[0].sign_group(make_group(), NOW)
    with pytest.raises(PeerViolation, match="another group"):
        STRANGER.check_origin(first.data + b"x", make_outcome(first), 3, bytes(32), NOW)
    with pytest.raises(PeerViolation, match="number of parts"):
        STRANGER.check_origin(first.data, make_outcome(first, num_parts=3), 3, bytes(32), NOW)


def test_rank_prefers_later_steps_then_later_admitting_attempts_then_larger_groups() -> None:
    def rank(step: int, attempt: int, tokens: int, members: int) -> tuple[int, int, int, bytes]:
        chosen = tuple(
            Contribution(peer_id=each.peer_id, num_tokens=tokens, num_samples=tokens, loss=0.0)
            for each in IDENTITIES[:members]
        )
        parts = (1,) * members if tokens else ()
        signed = SIGNERS[0].sign_group(make_group(step=step, attempt=attempt, members=chosen, part_values=parts), NOW)
        outcome = make_outcome(signed, num_parts=len(parts))
        return STRANGER.check_certificate(certify(signed, SIGNERS[:members], outcome), NOW).rank

    ranks = [rank(3, 5, 1, 2), rank(3, 0, 1, 3), rank(4, 2, 0, 1), rank(4, 7, 0, 1), rank(4, 0, 1, 1)]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)


def test_sign_group_names_the_group_by_the_digest_of_its_bytes() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    assert signed.digest == hashlib.sha256(signed.data).digest()
    assert STRANGER.read_group(signed.data, NOW) == signed
