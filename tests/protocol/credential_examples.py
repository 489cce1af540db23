"""Examples of invitations to a run and of vouches, for the tests and the fuzzers of decoders."""

from __future__ import annotations

from swarm_protocol.identity import Identity
from swarm_protocol.member_messages import FollowRequest
from swarm_protocol.run_credentials import (
    RunCredential,
    RunRevocation,
    RunTerms,
    credential_of,
    invite_to_run,
    vouch_for,
)

NOW = 1_700_000_000.0
NETWORK_ID, RUN = "swarm", "story-0123456789ab"
AUTHOR, MEMBER, OTHER, NEWCOMER = (Identity(bytes([number]) * 32) for number in (11, 12, 13, 14))

INVITATION = invite_to_run(AUTHOR, RUN, network_id=NETWORK_ID, now=NOW - 100, lifetime_s=86400.0, max_uses=3)
BOUND = invite_to_run(AUTHOR, RUN, network_id=NETWORK_ID, now=NOW - 100, lifetime_s=86400.0, node=NEWCOMER.peer_id)
VOUCHES = tuple(
    vouch_for(member, RUN, NEWCOMER.peer_id, network_id=NETWORK_ID, now=NOW - 100, lifetime_s=86400.0)
    for member in (MEMBER, OTHER)
)


def shown(*given: object, by: Identity = NEWCOMER) -> RunCredential:
    """Return the credential that the newcomer makes from an invitation or vouches."""
    credential = credential_of(given, by.peer_id, RUN, network_id=NETWORK_ID, now=NOW)  # type: ignore[arg-type]
    assert credential is not None
    return credential


CREDENTIALS = (shown(INVITATION), shown(BOUND), shown(*VOUCHES))
SHOWN = tuple(
    FollowRequest(run=RUN, step=3, state_digest=bytes(32), credential=each).to_bytes() for each in CREDENTIALS
)
REVOCATION = RunRevocation(run=RUN, serials=(5, 2**64 - 1), inviters=(MEMBER.peer_id,))
EXAMPLES = (
    REVOCATION,
    INVITATION,
    BOUND,
    VOUCHES[0],
    RunTerms(run=RUN, serial=5, max_uses=2),
    RunTerms(run=RUN, serial=2**64 - 1, is_bound=True),
)
