from __future__ import annotations

import base64
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol.private_examples import BOUND, INVITATION, LIST, MEMBER, NETWORK_ID, NOW, OWNER, SECRET
from swarm_protocol import limits
from swarm_protocol.envelope import seal
from swarm_protocol.errors import ConfigError, IntegrityError, PeerRefused, PeerViolation, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import (
    MAX_TEXT_CHARS,
    Capability,
    InvitationTerms,
    NetworkInvitation,
    NetworkSecret,
    PrivateGreeting,
    Revocations,
    check_chain,
    invite,
    network_id_of,
    open_revocations,
    owner_of,
    parse_invitation,
    seal_revocations,
)
from swarm_protocol.version import Hello

STRANGER = Identity(bytes([9]) * 32)
TEXT = INVITATION.text()


def check(
    chain: tuple[bytes, ...], peer_id: str = MEMBER, *, now: float = NOW, network_id: str = NETWORK_ID
) -> Capability:
    return check_chain(chain, network_id=network_id, peer_id=peer_id, now=now)


# --- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("invitation", [INVITATION, BOUND])
def test_invitation_text_round_trips(invitation: NetworkInvitation) -> None:
    word = invitation.text()
    assert parse_invitation(f"  {word[:40]}\n{word[40:]}\n") == invitation, "as a terminal wraps it"
    assert parse_invitation(word).network_id == NETWORK_ID
    assert set(word) <= set(string.ascii_letters + string.digits + "-_")


@pytest.mark.parametrize(
    "text",
    [
        *("", "swarm1-", "swarm1-!!!!", "swarm1-AAAA", "ä" * 9, "swarm1-" + "A" * MAX_TEXT_CHARS),
        *(TEXT[:-1], TEXT[:-20], TEXT[1:], TEXT.lower(), TEXT + "A"),
    ],
)
def test_damaged_invitation_text_is_refused_with_one_line_that_does_not_repeat_it(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_invitation(text)
    assert refused.value.remedy.startswith("copy the whole line")
    assert "\n" not in str(refused.value)
    assert text[7:27] not in str(refused.value) or not text[7:27]


@given(st.integers(7, len(TEXT) - 1), st.sampled_from(string.ascii_letters + string.digits))
def test_invitation_text_with_one_other_character_is_refused(index: int, character: str) -> None:
    changed = TEXT[:index] + character + TEXT[index + 1 :]
    if changed == TEXT:
        return
    with pytest.raises(ConfigError):
        parse_invitation(changed)


def test_invitation_repr_shows_no_secret() -> None:
    assert repr(INVITATION) == f"NetworkInvitation({INVITATION.terms.serial:016x})"
    assert TEXT not in f"{INVITATION!r} {INVITATION}"


def test_invitation_with_another_key_or_a_foreign_owner_is_refused() -> None:
    with pytest.raises(ValueError, match="its key is another's"):
        NetworkInvitation(certificate=INVITATION.certificate, secret=SECRET, key=bytes(32))
    with pytest.raises(ValueError, match="its key is missing"):
        NetworkInvitation(certificate=INVITATION.certificate, secret=SECRET)
    forged = seal(
        STRANGER,
        purpose="network-invitation",
        network_id=NETWORK_ID,
        subject=MEMBER,
        payload=InvitationTerms(serial=1, rights=("join",), is_bound=True).to_bytes(),
        issued_at=NOW,
        expires_at=NOW + 10,
    )
    with pytest.raises(ValueError, match="not signed by the owner"):
        NetworkInvitation(certificate=forged.to_bytes(), secret=SECRET)
    with pytest.raises(IntegrityError):
        check((forged.to_bytes(),))


def test_longest_invitation_fits_its_text() -> None:
    addrs = tuple(f"/{number:0{limits.MAX_ADDR_BYTES - 1}}" for number in range(limits.MAX_CONTACT_ADDRS))
    longest = invite(OWNER, rights=("serve", "train", "ask"), now=NOW, lifetime_s=10.0, secret=SECRET, seeds=addrs)
    assert len(longest.text()) <= MAX_TEXT_CHARS
    assert parse_invitation(longest.text()) == longest


# --- the chain -----------------------------------------------------------------------------------------------------


def test_chain_gives_its_rights_until_it_expires() -> None:
    capability = check(INVITATION.chain_for(MEMBER))
    assert capability.rights == {"join", "serve", "ask"}
    assert capability.serial == INVITATION.terms.serial
    assert capability.holds(frozenset(), NOW + 86399)
    assert not capability.holds(frozenset(), NOW + 86400)
    assert not capability.holds(frozenset({capability.serial}), NOW)
    with pytest.raises(PeerRefused, match="has expired"):
        check(INVITATION.chain_for(MEMBER), now=NOW + 86400)
    with pytest.raises(PeerRefused, match="signed 600 s in the future") as error:
        check(INVITATION.chain_for(MEMBER), now=NOW - 600)
    assert "clock" in error.value.remedy


def test_chain_of_another_peer_or_network_is_refused() -> None:
    chain = INVITATION.chain_for(MEMBER)
    with pytest.raises(PeerViolation, match="another node's"):
        check(chain, STRANGER.peer_id)
    with pytest.raises(PeerViolation, match="another network"):
        check(chain, network_id=network_id_of(STRANGER.peer_id))


def test_chain_without_the_invitation_key_is_refused() -> None:
    certificate, _ = INVITATION.chain_for(MEMBER)
    other = invite(OWNER, rights=("ask",), now=NOW, lifetime_s=10.0, secret=SECRET).chain_for(MEMBER)[1]
    with pytest.raises(PeerViolation, match="for another key"):
        check((certificate, other))
    with pytest.raises(PeerViolation, match="for an invitation, not for a node"):
        check((certificate,))
    with pytest.raises(PeerViolation):
        check(())
    with pytest.raises(PeerViolation):
        check((certificate, other, other))


def test_bound_invitation_admits_no_other_node() -> None:
    assert check(BOUND.chain_for(MEMBER)).rights == {"join", "serve", "ask"}
    with pytest.raises(ConfigError, match="for the node"):
        BOUND.chain_for(STRANGER.peer_id)
    member = Identity(bytes([6]) * 32)
    link = seal(
        member,
        purpose="network-member",
        network_id=NETWORK_ID,
        subject=STRANGER.peer_id,
        payload=b"",
        issued_at=NOW,
        expires_at=NOW + 10,
    )
    with pytest.raises(PeerViolation, match="bound to one node"):
        check((BOUND.certificate, link.to_bytes()), STRANGER.peer_id)


@given(st.binary(max_size=600), st.binary(max_size=600))
def test_chain_of_any_bytes_raises_only_typed_errors(certificate: bytes, link: bytes) -> None:
    for chain in ((certificate,), (certificate, link), (INVITATION.certificate, link)):
        with pytest.raises(SwarmError):
            check(chain)


def test_rights_always_contain_join() -> None:
    with pytest.raises(ValueError, match="join"):
        InvitationTerms(serial=1, rights=("serve",))
    assert invite(OWNER, rights=(), now=NOW, lifetime_s=10.0, secret=SECRET).terms.rights == ("join",)


# --- revocations ---------------------------------------------------------------------------------------------------


def test_revocations_count_only_when_the_owner_signed_them() -> None:
    assert open_revocations(LIST, network_id=NETWORK_ID, now=NOW).serials == (1, 2**64 - 1)
    assert open_revocations(LIST, network_id=NETWORK_ID, now=NOW + 400 * 86400).number == 3, "they do not expire"
    forged = seal_revocations(STRANGER, Revocations(number=9, serials=(5,)), NOW)
    with pytest.raises(PeerViolation, match="for network"):
        open_revocations(forged, network_id=NETWORK_ID, now=NOW)


def test_revocations_at_their_bound_fit_a_greeting() -> None:
    serials = tuple(2**64 - 1 - number for number in range(limits.MAX_REVOKED))
    signed = seal_revocations(OWNER, Revocations(number=2**53, serials=serials), NOW)
    hello = Hello(network_id=NETWORK_ID, software_version="9" * limits.MAX_VERSION_CHARS, sent_at=NOW)
    greeting = PrivateGreeting(hello=hello, chain=INVITATION.chain_for(MEMBER), revocations=signed)
    assert PrivateGreeting.from_bytes(greeting.to_bytes()) == greeting
    with pytest.raises(ValueError, match="serials"):
        Revocations(number=1, serials=tuple(range(limits.MAX_REVOKED + 1)))


# --- the network's name and secret ---------------------------------------------------------------------------------


def test_network_id_names_its_owner() -> None:
    assert owner_of(NETWORK_ID) == OWNER.peer_id
    for name in ("swarm", "private", "private-lab", f"private-{OWNER.peer_id[:-1]}", OWNER.peer_id):
        assert owner_of(name) is None, "an open network"
    assert len(NETWORK_ID) <= limits.MAX_NETWORK_ID_BYTES


def test_secret_hides_names_and_opens_only_what_was_sealed_about_the_same() -> None:
    secret, other = NetworkSecret(SECRET), NetworkSecret(bytes(32))
    names = {secret.protocol_name(f"/swarm/4/x/call/{method}") for method in ("ping", "train.vote/story")}
    assert len(names) == 2
    assert all("story" not in name and "swarm" not in name and len(name) == 33 for name in names)
    assert names.isdisjoint({other.protocol_name("/swarm/4/x/call/ping")})
    sealed = secret.seal(b"content", b"about")
    assert secret.open(sealed, b"about") == b"content"
    assert b"content" not in sealed
    for opener, data, about in (
        (other, sealed, b"about"),
        (secret, sealed, b"else"),
        (secret, sealed[:-1], b"about"),
        (secret, b"", b"about"),
        (secret, bytes(300), b"about"),
    ):
        with pytest.raises(PeerViolation):
            opener.open(data, about)
    assert base64.b64encode(SECRET).decode() not in repr(secret)
