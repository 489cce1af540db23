"""Tests how many seats a coordinator may give to members on probation, and what every member refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import round_scripts
from swarm.training.allreduce.parts import part_sizes
from swarm.training.round.group_members import MISSTATED, NO_SEAT, complaint, form_group
from swarm.training.standing.entrance import Probation
from swarm.training.standing.standings import TrainerStandings
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group, Ready, SignedGroup

PEERS = tuple(sorted(Identity(bytes([number]) * 32).peer_id for number in range(16)))
PROVEN, FRESH = PEERS[4:8], (*PEERS[:4], *PEERS[8:])
ME = PROVEN[0]
SETUP = round_scripts.setup(
    ME,
    step=5,
    roster=PROVEN,
    leased=PEERS,
    max_group=16,
    num_values=10_000,
    grace_s=1.0,
    vote_s=10.0,
    standings=TrainerStandings(rule=Probation(steps=4), known=PEERS, left=dict.fromkeys(FRESH, 3), outer_step=4),
)


def ready(left: int = 0, tokens: int = 40) -> Ready:
    return Ready(
        run="run",
        step=5,
        attempt=0,
        state_digest=bytes(32),
        num_tokens=tokens,
        num_samples=tokens // 4,
        loss=2.0,
        steps_left=left,
    )


REPORTS = {peer: ready() for peer in PROVEN} | {peer: ready(3) for peer in FRESH}


def refused(group: Group) -> str:
    mine = next(member for member in group.members if member.peer_id == ME)
    signed = SignedGroup(group=group, signer=PROVEN[1], data=b"group", digest=bytes(32))
    return complaint(SETUP, 0, mine, signed)


def of(*members: Contribution) -> Group:
    group, _ = form_group(SETUP, 0, REPORTS)
    members = tuple(sorted(members, key=lambda member: member.peer_id))
    return replace(group, members=members, part_values=part_sizes(SETUP.num_values, members))


def test_group_seats_all_proven_members_and_at_most_half_as_many_on_probation() -> None:
    group, left_out = form_group(SETUP, 0, REPORTS)
    assert set(PROVEN) < set(group.peer_ids)
    assert len(group.on_probation) == 2
    assert set(left_out) == set(FRESH) - set(group.on_probation)
    assert set(left_out.values()) == {NO_SEAT}
    assert refused(group) == ""


def test_members_on_probation_alone_form_no_group() -> None:
    idle = {peer: ready(tokens=0) for peer in PROVEN}
    group, left_out = form_group(SETUP, 0, REPORTS | idle)
    assert set(group.peer_ids) == set(PROVEN)
    assert set(left_out) == set(FRESH)


def test_group_with_too_many_members_on_probation_is_refused() -> None:
    assert refused(of(*(each.contribution_of(peer) for peer, each in REPORTS.items()))) == (
        "it has 12 members on probation, which is too many"
    )


@pytest.mark.parametrize(("peer", "left"), [(FRESH[0], 0), (FRESH[0], 2), (PROVEN[1], 1)])
def test_member_that_misstates_its_probation_is_left_out_and_its_group_refused(peer: str, left: int) -> None:
    reports = {**{each: REPORTS[each] for each in PROVEN}, peer: ready(left)}
    group, left_out = form_group(SETUP, 0, reports)
    assert left_out == {peer: MISSTATED}
    assert peer not in group.peer_ids
    assert MISSTATED in refused(of(*(each.contribution_of(name) for name, each in reports.items())))
