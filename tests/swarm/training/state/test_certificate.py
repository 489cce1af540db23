"""Signed groups, votes and certificates, and the forgeries that must not pass."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.state import certificate
from swarm.training.state.certificate import RunSignatures
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Certificate, Contribution, Group, Outcome, ResumeOrder, SignedGroup, Vote

NOW = 1_750_000_000.0
IDENTITIES = sorted((Identity(bytes([number]) * 32) for number in range(4)), key=lambda each: each.peer_id)
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


def make_vote(signed: SignedGroup, outcome: Outcome) -> Vote:
    group = signed.group
    return Vote(run=group.run, step=group.step, attempt=group.attempt, group_digest=signed.digest, outcome=outcome)


def certify(signed: SignedGroup, voters: list[RunSignatures], outcome: Outcome | None = None) -> bytes:
    vote = make_vote(signed, outcome or make_outcome(signed))
    votes = tuple(each.sign_vote(vote, NOW) for each in voters)
    return Certificate(group=signed.data, votes=votes).to_bytes()


def test_check_certificate_with_two_thirds_proves_the_outcome() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    proof = STRANGER.check_certificate(certify(signed, SIGNERS[1:]), NOW + 86400.0)
    assert proof.outcome.state_digest == OUTCOME_STATE
    assert (proof.outer_step, proof.next_attempt) == (3, 0)
    assert proof.voters == tuple(each.identity.peer_id for each in SIGNERS[1:])


def test_check_certificate_with_fewer_votes_is_refused() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    with pytest.raises(PeerViolation, match="3 must agree"):
        STRANGER.check_certificate(certify(signed, SIGNERS[:2]), NOW)


def test_check_certificate_counts_neither_strangers_nor_votes_for_another_group() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    with pytest.raises(PeerViolation, match="2 of 4"):
        STRANGER.check_certificate(certify(signed, [*SIGNERS[:2], STRANGER]), NOW)
    other = SIGNERS[1].sign_group(make_group(), NOW)
    foreign = SIGNERS[2].sign_vote(make_vote(other, make_outcome(signed)), NOW)
    own = Certificate.from_bytes(certify(signed, SIGNERS[:2])).votes
    with pytest.raises(PeerViolation, match="2 of 4"):
        STRANGER.check_certificate(Certificate(group=signed.data, votes=(*own, foreign)).to_bytes(), NOW)


def test_check_certificate_of_a_group_with_a_peer_that_is_not_admitted_is_refused() -> None:
    """Keys cost nothing: two new ones could otherwise certify any state."""
    data = certify(SIGNERS[0].sign_group(make_group(), NOW), SIGNERS)
    peers = tuple(each.identity.peer_id for each in SIGNERS)
    assert replace(STRANGER, admission=peers).check_certificate(data, NOW).voters == peers
    with pytest.raises(PeerViolation, match="does not admit"):
        replace(STRANGER, admission=peers[1:]).check_certificate(data, NOW)


def signed_order(author: RunSignatures, outer_step: int) -> bytes:
    roster = tuple(each.peer_id for each in IDENTITIES)
    order = ResumeOrder(run="run", sequence=1, outer_step=outer_step, state_digest=bytes(32), roster=roster)
    return author.sign_order(order, NOW)


def test_group_of_a_step_before_the_resume_order_that_it_names_is_refused() -> None:
    """Steps that the author has ended could otherwise outrank those that follow from the order."""
    reader = replace(STRANGER, author=STRANGER.identity.peer_id)
    for outer_step in (3, 2):
        signed = SIGNERS[0].sign_group(make_group(order=signed_order(STRANGER, outer_step)), NOW)
        data = certify(signed, SIGNERS)
        if outer_step == 3:
            with pytest.raises(PeerViolation, match="before the resume order"):
                reader.check_certificate(data, NOW)
        else:
            assert reader.check_certificate(data, NOW).sequence == 1


def test_certificate_that_resumes_an_outcome_from_before_the_resume_order_is_refused() -> None:
    reader = replace(STRANGER, author=STRANGER.identity.peer_id)
    order = signed_order(STRANGER, 2)
    for before, is_refused in ((b"", True), (order, False)):
        origin = SIGNERS[0].sign_group(make_group(order=before), NOW)
        outcome = make_outcome(origin)
        resuming = make_group(attempt=2, part_values=(), resumes=outcome, origin=origin.data, order=order)
        data = certify(SIGNERS[1].sign_group(resuming, NOW), SIGNERS, outcome)
        if is_refused:
            with pytest.raises(PeerViolation, match="from before the last resume order"):
                reader.check_certificate(data, NOW)
        else:
            assert reader.check_certificate(data, NOW).sequence == 1


def test_group_within_a_group_within_another_is_read_no_further_than_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hundred of them fit into a message, and checking all would hold up its reader for a fifth of a second."""
    data, few = b"", make_group(members=(Contribution(peer_id=IDENTITIES[0].peer_id),), part_values=())
    for _ in range(20):
        if data:
            origin_digest = hashlib.sha256(data).digest()
            outcome = Outcome(origin_digest=origin_digest, part_digests=(), state_digest=OUTCOME_STATE)
            few = replace(few, resumes=outcome, origin=data)
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


def test_signatures_of_a_run_check_by_all_its_settings() -> None:
    config = RunConfig(name="run", outer_steps=9, min_group=3, admission=tuple(each.peer_id for each in IDENTITIES))
    run = SignedRun(config=config, peer_id=IDENTITIES[0].peer_id, issued_at=1, signature=bytes(64))
    signatures = RunSignatures.of_run(run, IDENTITIES[1], "test")
    assert (signatures.run, signatures.succession, signatures.last_step) == (run.run_id, config.succession, 9)
    assert signatures.admission == config.admission


def test_check_certificate_with_a_forged_vote_is_an_integrity_error() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    votes = list(Certificate.from_bytes(certify(signed, SIGNERS[:3])).votes)
    votes[0] = votes[0][:-1] + bytes([votes[0][-1] ^ 1])
    with pytest.raises(IntegrityError):
        STRANGER.check_certificate(Certificate(group=signed.data, votes=tuple(votes)).to_bytes(), NOW)


def test_check_certificate_of_another_run_or_network_is_refused() -> None:
    data = certify(SIGNERS[0].sign_group(make_group(), NOW), SIGNERS)
    for reader in (replace(STRANGER, run="other"), replace(STRANGER, network_id="other")):
        with pytest.raises(PeerViolation):
            reader.check_certificate(data, NOW)


def test_read_group_with_a_changed_byte_is_an_integrity_error() -> None:
    data = bytearray(SIGNERS[0].sign_group(make_group(), NOW).data)
    data[-100] ^= 1
    with pytest.raises((IntegrityError, PeerViolation)):
        STRANGER.read_group(bytes(data), NOW)


def test_read_vote_whose_envelope_is_about_another_round_is_refused() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    vote = make_vote(signed, make_outcome(signed))
    forged = SIGNERS[0]._seal("vote", replace(vote, attempt=2), NOW)
    with pytest.raises(PeerViolation):
        # the same payload as a group is refused by its purpose
        STRANGER.read_group(forged, NOW)
    with pytest.raises(PeerViolation):
        STRANGER.read_vote(signed.data, NOW)


def test_certificate_of_a_resumed_outcome_proves_the_first_groups_work() -> None:
    first = SIGNERS[0].sign_group(make_group(), NOW)
    outcome = make_outcome(first)
    resumed = make_group(
        attempt=2, members=make_group().members[:2], part_values=(), resumes=outcome, origin=first.data
    )
    signed = SIGNERS[1].sign_group(resumed, NOW)
    proof = STRANGER.check_certificate(certify(signed, SIGNERS[:2], outcome), NOW)
    assert proof.origin == first.group
    assert proof.outcome == outcome


@pytest.mark.parametrize("change", [{"step": 4}, {"state_digest": b"z" * 32}])
def test_read_group_that_resumes_another_steps_outcome_is_refused(change: dict[str, object]) -> None:
    first = SIGNERS[0].sign_group(make_group(**change), NOW)
    group = make_group(attempt=2, part_values=(), resumes=make_outcome(first), origin=first.data)
    with pytest.raises(PeerViolation, match="another step or state"):
        STRANGER.read_group(SIGNERS[1].sign_group(group, NOW).data, NOW)


def test_check_origin_with_other_bytes_or_another_number_of_parts_is_refused() -> None:
    first = SIGNERS[0].sign_group(make_group(), NOW)
    with pytest.raises(PeerViolation, match="another group"):
        STRANGER.check_origin(first.data + b"x", make_outcome(first), 3, bytes(32), NOW)
    with pytest.raises(PeerViolation, match="number of parts"):
        STRANGER.check_origin(first.data, make_outcome(first, num_parts=3), 3, bytes(32), NOW)


def test_rank_prefers_more_steps_then_later_admissions_then_larger_groups() -> None:
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


def test_sign_group_names_the_group_by_its_bytes() -> None:
    signed = SIGNERS[0].sign_group(make_group(), NOW)
    assert signed.digest == hashlib.sha256(signed.data).digest()
    assert STRANGER.read_group(signed.data, NOW) == signed
