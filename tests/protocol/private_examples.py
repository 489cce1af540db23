"""Examples of what a private network's owner signs, and of what its members show each other."""

from __future__ import annotations

from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import (
    InvitationTerms,
    NetworkInvitation,
    PrivateGreeting,
    Revocations,
    invite,
    network_id_of,
    seal_revocations,
)
from swarm_protocol.version import Hello

NOW = 1_700_000_000.0
OWNER = Identity(bytes([5]) * 32)
NETWORK_ID = network_id_of(OWNER.peer_id)
MEMBER = Identity(bytes([6]) * 32).peer_id
SECRET = bytes([7]) * 32


def invitation(node: str = "") -> NetworkInvitation:
    return invite(
        OWNER,
        rights=("serve", "ask"),
        now=NOW,
        lifetime_s=86400.0,
        secret=SECRET,
        seeds=(f"/ip4/203.0.113.7/tcp/4001/p2p/{OWNER.peer_id}",),
        node=node,
    )


INVITATION = invitation()
BOUND = invitation(MEMBER)
CHAIN = INVITATION.chain_for(MEMBER)
LIST = seal_revocations(OWNER, Revocations(number=3, serials=(1, 2**64 - 1)), NOW)

EXAMPLES: tuple[object, ...] = (
    InvitationTerms(serial=2**64 - 1, rights=("join", "serve", "train", "ask"), is_bound=True),
    Revocations(number=3, serials=(1, 2**64 - 1)),
    Revocations(),
    INVITATION,
    BOUND,
    PrivateGreeting(hello=Hello(network_id=NETWORK_ID, software_version="0.1.0"), chain=CHAIN, revocations=LIST),
    PrivateGreeting(hello=None, refusal="the invitation has expired"),
)
