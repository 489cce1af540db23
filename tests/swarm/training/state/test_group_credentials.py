"""Tests that every reader of a signed group checks its credentials, and that a coordinator can change none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from swarm.training.state.certificate import CREDENTIAL_MARGIN_S, RunSignatures
from swarm_protocol import limits
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.run_credentials import RunCredential, RunInvitation, credential_of, invite_to_run
from swarm_protocol.training_messages import Contribution, Group, Ready

NOW, RUN = 1_750_000_000.0, "story-0123456789ab"
AUTHOR = Identity(b"a" * 32)
COORDINATOR, NEWCOMER, OTHER = sorted((Identity(bytes([n]) * 32) for n in (1, 2, 3)), key=lambda each: each.peer_id)


def signer(identity: Identity, *inviters: str) -> RunSignatures:
    return RunSignatures(
        identity=identity, network_id="test", run=RUN, author=AUTHOR.peer_id, inviters=inviters or (AUTHOR.peer_id,)
    )


def shown(word: RunInvitation, peer_id: str = NEWCOMER.peer_id) -> RunCredential:
    credential = credential_of([word], peer_id, RUN, network_id="test", now=NOW)
    assert credential is not None
    return credential


def invited(by: Identity = AUTHOR, lifetime_s: float = 600.0) -> RunInvitation:
    return invite_to_run(by, RUN, network_id="test", now=NOW - 10, lifetime_s=lifetime_s)


def report_of(credential: RunCredential, *demoted: str) -> Contribution:
    ready = Ready(run=RUN, step=3, attempt=0, state_digest=bytes(32), credentials=(credential,), demoted=demoted)
    return signer(NEWCOMER).sign_report(ready).contribution_of(NEWCOMER.peer_id)


def group_of(*members: Contribution) -> Group:
    return Group(
        run=RUN,
        step=3,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(sorted((Contribution(peer_id=COORDINATOR.peer_id), *members), key=lambda each: each.peer_id)),
        reduce_s=1.0,
        vote_s=1.0,
    )


def test_reader_with_only_the_runs_file_checks_the_credentials_of_a_group() -> None:
    signed = signer(COORDINATOR).sign_group(group_of(report_of(shown(invited()))), NOW)
    read = signer(OTHER).read_group(signed.data, NOW + 86400)
    signer(OTHER).check_reports(read)
    assert read.group.credentials[0].peer_id == NEWCOMER.peer_id


@pytest.mark.parametrize(
    ("credential", "at"),
    [
        (shown(invited(OTHER)), NOW),
        (replace(shown(invited(), OTHER.peer_id), peer_id=NEWCOMER.peer_id), NOW),
        (shown(invited()), NOW + 600),
    ],
    ids=["of nobody who may invite", "of another peer", "expired when the group was signed"],
)
def test_group_with_an_invalid_credential_is_refused(credential: RunCredential, at: float) -> None:
    signed = signer(COORDINATOR).sign_group(group_of(report_of(credential)), at)
    with pytest.raises((PeerViolation, IntegrityError)):
        signer(OTHER).read_group(signed.data, at)


def test_run_without_invitations_refuses_a_group_with_a_credential() -> None:
    signed = signer(COORDINATOR).sign_group(group_of(report_of(shown(invited()))), NOW)
    with pytest.raises(PeerViolation, match="but the run accepts none"):
        replace(signer(OTHER), inviters=()).read_group(signed.data, NOW)


def test_coordinator_refuses_a_credential_that_ends_before_its_group_can_be_signed() -> None:
    soon = shown(invited(lifetime_s=10 + CREDENTIAL_MARGIN_S - 1))
    signer(OTHER).check_credentials((soon,), NOW)
    with pytest.raises(PeerViolation, match="about to expire"):
        signer(OTHER).check_credentials((soon,), NOW, margin_s=CREDENTIAL_MARGIN_S)


@pytest.mark.parametrize(
    "change",
    [
        lambda report: replace(report, credentials=()),
        lambda report: replace(report, credentials=(shown(invited()),)),
        lambda report: replace(report, demoted=()),
        lambda report: replace(report, demoted=(COORDINATOR.peer_id, OTHER.peer_id)),
    ],
    ids=["taken away", "exchanged", "nobody demoted", "others demoted"],
)
def test_coordinator_can_change_neither_a_members_credential_nor_its_demotions(
    change: Callable[[Contribution], Contribution],
) -> None:
    report = report_of(shown(invited()), OTHER.peer_id)
    signer(OTHER).check_reports(signer(COORDINATOR).sign_group(group_of(report), NOW))
    with pytest.raises(PeerViolation, match="did not sign"):
        signer(OTHER).check_reports(signer(COORDINATOR).sign_group(group_of(change(report)), NOW))


def test_member_is_demoted_only_by_more_than_a_third_of_the_deciding_members() -> None:
    peers = [Identity(bytes([number]) * 32).peer_id for number in range(10, 17)]
    for num_naming, num_on_probation, is_demoted in ((2, 0, False), (3, 0, True), (3, 3, False)):
        members = [
            Contribution(
                peer_id=peer,
                demoted=(peers[6],) if index < num_naming else (),
                steps_left=1 if index < num_on_probation else 0,
            )
            for index, peer in enumerate(peers)
        ]
        group = replace(group_of(), members=tuple(sorted(members, key=lambda each: each.peer_id)))
        assert group.demoted == ((peers[6],) if is_demoted else ())
        assert (peers[6] in group.roster) != is_demoted


def test_group_with_too_many_credentials_is_refused_before_their_signatures_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = Contribution(peer_id=OTHER.peer_id, credentials=(shown(invited()),) * limits.MAX_CREDENTIALS)
    signed = signer(COORDINATOR).sign_group(group_of(many, report_of(shown(invited()))), NOW)
    monkeypatch.setattr(RunSignatures, "check_credentials", None)
    with pytest.raises(PeerViolation, match="more credentials than it may"):
        signer(OTHER).read_group(signed.data, NOW)
