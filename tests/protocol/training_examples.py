"""Examples of each message of a training round and of state transfer."""

from __future__ import annotations

from swarm_protocol.commit_messages import (
    Abort,
    Certificate,
    Endorsement,
    Lock,
    Outcome,
    PlacedSignature,
    ResumeOrder,
    Vote,
    VoteReply,
)
from swarm_protocol.identity import Identity
from swarm_protocol.member_messages import (
    ChunkRequest,
    FollowerWork,
    FollowReply,
    FollowRequest,
    ManifestRequest,
    PartRequest,
    Standing,
    StandingRequest,
)
from swarm_protocol.reduction_messages import GroupRequest, ReduceOpening
from swarm_protocol.training_messages import Contribution, Follower, Group, Ready, ReadyReply

FIRST, SECOND = sorted(Identity(bytes([number] * 32)).peer_id for number in range(2))
DIGEST = bytes(range(32))
OUTCOME = Outcome(origin_digest=DIGEST, part_digests=(DIGEST, DIGEST), state_digest=DIGEST[::-1])
SIGNATURE = bytes(range(64))
LOCK = Lock(
    attempt=0,
    group_digest=DIGEST,
    outcome=OUTCOME,
    votes=(PlacedSignature(place=0, signature=SIGNATURE), PlacedSignature(place=3, signature=SIGNATURE)),
)
MEMBERS = (
    Contribution(
        peer_id=FIRST,
        num_tokens=4096,
        num_samples=32,
        loss=2.5,
        bytes_per_s=12_500_000,
        locked=LOCK.claim,
        signature=SIGNATURE,
    ),
    Contribution(peer_id=SECOND, num_tokens=2048, num_samples=16, loss=2.75, leaving=True),
)

FOLLOWERS = (
    Follower(place=17, num_tokens=2048, num_samples=16),
    Follower(place=3000, leaving=True),
)

EXAMPLES: tuple[object, ...] = (
    Ready(
        run="stdlib-1f00ba44",
        step=3,
        attempt=1,
        state_digest=DIGEST,
        num_tokens=4096,
        num_samples=32,
        loss=2.5,
        accused=(SECOND,),
        lock=LOCK,
        origin=b"signed group",
        signature=SIGNATURE,
        leaving=True,
        bytes_per_s=12_500_000,
        sequence=1_767_225_600,
    ),
    Ready(run="stdlib-1f00ba44", step=1, attempt=0, state_digest=DIGEST),
    Ready(
        run="stdlib-1f00ba44",
        step=4,
        attempt=0,
        state_digest=DIGEST,
        num_tokens=4096,
        num_samples=32,
        loss=2.5,
        followers=FOLLOWERS,
        newcomers=(SECOND,),
    ),
    FollowRequest(run="stdlib-1f00ba44", step=4, state_digest=DIGEST),
    FollowReply(kind="welcome"),
    FollowReply(kind="committed", certificate=b"certificate"),
    FollowerWork(num_tokens=2048, num_samples=16, loss=2.5, leaving=True),
    FollowerWork(),
    ReadyReply(kind="group", group=b"signed group"),
    ReadyReply(kind="behind", state_digest=DIGEST, certificate=b"certificate"),
    ReadyReply(kind="left_out", attempt=2, reason="too late"),
    Group(
        run="stdlib-1f00ba44",
        step=3,
        attempt=1,
        state_digest=DIGEST,
        members=MEMBERS,
        part_values=(500_000, 500_001),
        reduce_s=30.0,
        vote_s=10.0,
    ),
    Group(
        run="stdlib-1f00ba44",
        step=3,
        attempt=2,
        state_digest=DIGEST,
        members=MEMBERS[:1],
        reduce_s=30.0,
        vote_s=10.0,
        lock=LOCK,
        origin=b"signed group",
        order=b"signed order",
    ),
    ReduceOpening(kind="exchange", part=0, step=3, group_digest=DIGEST),
    ReduceOpening(kind="slices", part=1, frame=3, step=3, group_digest=DIGEST, proof=DIGEST),
    GroupRequest(run="stdlib-1f00ba44", group_digest=DIGEST),
    Vote(
        run="stdlib-1f00ba44",
        step=3,
        attempt=1,
        group_digest=DIGEST,
        outcome=OUTCOME,
        kind="prepare",
        state_digest=DIGEST,
    ),
    Vote(
        run="stdlib-1f00ba44",
        step=3,
        attempt=1,
        group_digest=DIGEST,
        outcome=OUTCOME,
        kind="commit",
        signature=SIGNATURE,
        state_digest=DIGEST,
        sequence=2,
    ),
    VoteReply(bytes_per_s=12_500_000),
    Certificate(group=b"signed group", outcome=OUTCOME, votes=(PlacedSignature(place=1, signature=SIGNATURE),)),
    Certificate(order=b"signed order"),
    ResumeOrder(
        run="stdlib-1f00ba44", sequence=1_767_225_600, outer_step=3, state_digest=DIGEST, roster=(FIRST, SECOND)
    ),
    Endorsement(
        run="stdlib-1f00ba44",
        sequence=1_767_225_600,
        order_sequence=1_767_225_000,
        outer_step=3,
        next_attempt=2,
        state_digest=DIGEST,
        roster=(FIRST, SECOND),
    ),
    Abort(
        run="stdlib-1f00ba44", step=3, attempt=1, group_digest=DIGEST, reason="a part did not come", accused=(SECOND,)
    ),
    StandingRequest(run="stdlib-1f00ba44", step=3, attempt=1, hurry=True),
    StandingRequest(run="stdlib-1f00ba44", step=3, watches=True),
    Standing(outer_step=2, state_digest=DIGEST, certificate=b"certificate", known=(FIRST, SECOND), attempt=1),
    Standing(outer_step=2, state_digest=DIGEST, certificate=b"certificate", endorsement=b"signed endorsement"),
    PartRequest(origin_digest=DIGEST, index=1),
    ManifestRequest(state_digest=DIGEST),
    ChunkRequest(state_digest=DIGEST, index=300),
)
