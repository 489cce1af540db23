"""Invitations to a run, and vouches: valid ones are accepted, and those that are stolen or made up are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocol.credential_examples import (
    AUTHOR,
    BOUND,
    INVITATION,
    MEMBER,
    NETWORK_ID,
    NEWCOMER,
    NOW,
    OTHER,
    REVOCATION,
    RUN,
    VOUCHES,
    shown,
)
from swarm_protocol import limits
from swarm_protocol.envelope import seal_now
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.run_credentials import (
    MAX_TEXT_CHARS,
    Grant,
    RunCredential,
    RunInvitation,
    RunRevocation,
    check_credential,
    credential_of,
    invite_to_run,
    parse_run_invitation,
    read_revocation,
    revocation_in,
    sign_revocation,
    vouch_for,
)

THIEF = Identity(bytes([99]) * 32)


def check(credential: RunCredential, **changed: object) -> Grant:
    terms = {"network_id": NETWORK_ID, "inviters": (AUTHOR.peer_id,), "at": NOW} | changed
    return check_credential(credential, str(terms.pop("run", RUN)), **terms)  # type: ignore[arg-type]


def test_invitation_lets_in_holders_of_its_text_and_a_bound_one_its_node() -> None:
    for word in (INVITATION, BOUND):
        grant = check(shown(parse_run_invitation(word.text())))
        assert (grant.peer_id, grant.vouchers) == (NEWCOMER.peer_id, ())
        assert word.terms is not None
        assert (grant.serial, grant.max_uses) == (word.terms.serial, word.terms.max_uses)
    assert check(shown(INVITATION, by=THIEF)).peer_id == THIEF.peer_id
    with pytest.raises(ConfigError, match="for another node"):
        shown(BOUND, by=THIEF)


def test_vouches_name_their_signers_in_order_and_each_once() -> None:
    grant = check(shown(*VOUCHES, VOUCHES[0]))
    assert grant.vouchers == tuple(sorted((MEMBER.peer_id, OTHER.peer_id)))
    twice = RunCredential(peer_id=NEWCOMER.peer_id, vouches=(VOUCHES[0].vouch, VOUCHES[0].vouch))
    with pytest.raises(PeerViolation, match="sorted and distinct"):
        check(twice)
    with pytest.raises(ConfigError, match="for another node"):
        shown(VOUCHES[0], by=THIEF)


@pytest.mark.parametrize("credential", [shown(INVITATION), shown(BOUND), shown(*VOUCHES)])
def test_credential_is_invalid_for_another_peer_run_network_or_time(
    credential: RunCredential,
) -> None:
    replayed = replace(credential, peer_id=THIEF.peer_id)
    for changed in ({"run": "other-0123456789ab"}, {"network_id": "other"}, {"at": NOW + 86400}, {"at": NOW - 200}):
        with pytest.raises(PeerViolation):
            check(credential, **changed)
    with pytest.raises(PeerViolation, match="another"):
        check(replayed)


@pytest.mark.parametrize("credential", [shown(INVITATION), shown(BOUND), shown(*VOUCHES)])
def test_credential_with_any_byte_changed_is_refused(credential: RunCredential) -> None:
    parts = credential.chain or credential.vouches
    for index, part in enumerate(parts):
        for place in range(0, len(part), 7):
            changed = bytearray(part)
            changed[place] ^= 1
            wrong = (*parts[:index], bytes(changed), *parts[index + 1 :])
            field = "chain" if credential.chain else "vouches"
            with pytest.raises((PeerViolation, IntegrityError)):
                check(replace(credential, **{field: wrong}))


def test_invitation_of_another_key_is_refused_unless_the_run_names_it_as_an_inviter() -> None:
    word = invite_to_run(MEMBER, RUN, network_id=NETWORK_ID, now=NOW, lifetime_s=60.0)
    with pytest.raises(PeerViolation, match="nobody who may invite"):
        check(shown(word))
    assert check(shown(word), inviters=(AUTHOR.peer_id, MEMBER.peer_id)).max_uses == 1


def test_link_of_another_key_or_on_a_bound_certificate_is_refused() -> None:
    other = invite_to_run(AUTHOR, RUN, network_id=NETWORK_ID, now=NOW, lifetime_s=60.0)
    mixed = RunCredential(peer_id=NEWCOMER.peer_id, chain=(INVITATION.certificate, shown(other).chain[1]))
    with pytest.raises(PeerViolation, match="for another key"):
        check(mixed)
    passed_on = RunCredential(peer_id=NEWCOMER.peer_id, chain=(BOUND.certificate, shown(other).chain[1]))
    without = RunCredential(peer_id=NEWCOMER.peer_id, chain=(INVITATION.certificate,))
    for wrong in (passed_on, without):
        with pytest.raises(PeerViolation, match="bound to one node, or lacks its link"):
            check(wrong)


def test_link_or_vouch_with_a_payload_is_refused_as_other_implementations_refuse_it() -> None:
    def with_payload(signer: Identity, purpose: str, subject: str) -> bytes:
        return seal_now(signer, NETWORK_ID, purpose=purpose, subject=subject, payload=b"more", now=NOW, lifetime_s=60.0)

    link = with_payload(Identity(INVITATION.key), "run-invitee", NEWCOMER.peer_id)
    vouch = with_payload(MEMBER, "run-vouch", f"{RUN}/{NEWCOMER.peer_id}")
    for wrong in (
        RunCredential(peer_id=NEWCOMER.peer_id, chain=(INVITATION.certificate, link)),
        RunCredential(peer_id=NEWCOMER.peer_id, vouches=(vouch,)),
    ):
        with pytest.raises(PeerViolation, match="holds more"):
            check(wrong)


def test_credential_is_bounded() -> None:
    big = bytes(limits.MAX_RUN_CREDENTIAL_BYTES + 1)
    many = tuple(bytes([number]) for number in range(limits.MAX_VOUCHERS + 1))
    for fields, message in (
        ({}, "holds either an invitation or vouches"),
        ({"chain": (b"1",), "vouches": (b"2",)}, "holds either an invitation or vouches"),
        ({"chain": (big,)}, "is too large"),
        ({"vouches": many}, "vouches has 5 items, more than 4"),
    ):
        with pytest.raises(ValueError, match=message):
            RunCredential(peer_id=NEWCOMER.peer_id, **fields)  # type: ignore[arg-type]
    parts = [
        part for each in (shown(INVITATION), shown(BOUND), shown(*VOUCHES)) for part in (*each.chain, *each.vouches)
    ]
    assert max(map(len, parts)) < limits.MAX_RUN_CREDENTIAL_BYTES


def test_expired_credentials_do_not_count_and_an_invitation_has_priority_over_vouches() -> None:
    soon = invite_to_run(AUTHOR, RUN, network_id=NETWORK_ID, now=NOW - 100, lifetime_s=50.0)
    assert credential_of([soon], NEWCOMER.peer_id, RUN, network_id=NETWORK_ID, now=NOW) is None
    assert shown(soon, *VOUCHES).vouches
    assert shown(INVITATION, *VOUCHES).chain
    for run, network_id in (("other", NETWORK_ID), (RUN, "other")):
        with pytest.raises(ConfigError, match="this invitation is"):
            credential_of([INVITATION], NEWCOMER.peer_id, run, network_id=network_id, now=NOW)


def test_malformed_credential_text_is_refused_without_being_repeated() -> None:
    text = INVITATION.text()
    for wrong in (text[:-1], text[:30] + "A" + text[31:], text[1:], "swarmrun1-", text * 9, "swarmrun1-" + "é" * 9):
        with pytest.raises(ConfigError) as caught:
            parse_run_invitation(wrong)
        assert wrong[12:] == "" or wrong[12:] not in str(caught.value)
    assert len(max((word.text() for word in (INVITATION, BOUND, *VOUCHES)), key=len)) < MAX_TEXT_CHARS
    assert text not in repr(INVITATION)


def test_invitation_holds_its_own_key_and_a_vouch_none() -> None:
    for fields, message in (
        ({}, "holds neither an invitation nor a vouch"),
        ({"certificate": INVITATION.certificate}, "key is missing"),
        ({"certificate": INVITATION.certificate, "key": bytes(32)}, "key is another's"),
        ({"certificate": BOUND.certificate, "key": INVITATION.key}, "key is missing, or it is no invitation"),
        ({"vouch": INVITATION.certificate}, "is no vouch"),
        ({"vouch": VOUCHES[0].vouch, "key": INVITATION.key}, "is no vouch"),
        ({"certificate": VOUCHES[0].vouch, "key": INVITATION.key}, "RunTerms is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            RunInvitation(**fields)  # type: ignore[arg-type]


def test_digest_of_a_credential_in_a_report_covers_all_of_it() -> None:
    word = vouch_for(MEMBER, RUN, NEWCOMER.peer_id, network_id=NETWORK_ID, now=NOW, lifetime_s=9.0)
    each = [
        shown(INVITATION),
        shown(INVITATION, by=THIEF),
        shown(BOUND),
        shown(*VOUCHES),
        shown(VOUCHES[0]),
        shown(word),
    ]
    assert len({credential.digest() for credential in each}) == len(each)


def test_revocation_needs_the_run_s_author_and_does_not_expire() -> None:
    signed = sign_revocation(AUTHOR, REVOCATION, network_id=NETWORK_ID, now=NOW)
    terms = {"network_id": NETWORK_ID, "author": AUTHOR.peer_id, "now": NOW}
    assert read_revocation(signed, RUN, **(terms | {"now": NOW + 9e8})) == REVOCATION  # type: ignore[arg-type]
    assert revocation_in(signed) == REVOCATION
    assert revocation_in(b"") is None
    for run, changed in (("other", {}), (RUN, {"network_id": "other"}), (RUN, {"author": MEMBER.peer_id})):
        with pytest.raises(PeerViolation):
            read_revocation(signed, run, **(terms | changed))  # type: ignore[arg-type]
    with pytest.raises(IntegrityError):
        read_revocation(signed[:-1] + bytes([signed[-1] ^ 1]), RUN, **terms)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="revokes nothing"):
        RunRevocation(run=RUN)
