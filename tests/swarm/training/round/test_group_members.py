"""Tests what members refuse of a group in a run with clusters. `test_group_formation` has the checks of all runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import round_scripts
from swarm.training.round.clusters import draw_clusters
from swarm.training.round.group_formation import absent_members, awaited_peers, on_reported
from swarm.training.round.group_members import TOO_MANY_ENTER, cluster_overclaim, complaint, form_group
from swarm.training.round.round_events import Reply
from swarm.training.round.state_machine import begin
from swarm.training.standing.entrance import Entrance
from swarm.training.standing.standings import TrainerStandings
from swarm_protocol.identity import Identity
from swarm_protocol.run_credentials import RunCredential, RunInvitation, credential_of, invite_to_run
from swarm_protocol.training_messages import Contribution, Follower, Ready, SignedGroup

PEERS = tuple(sorted(Identity(bytes([number]) * 32).peer_id for number in range(14)))
HEADS, FOLLOWERS, STRANGER = PEERS[:4], PEERS[4:12], PEERS[12]
LEASED = HEADS + FOLLOWERS
DIGEST = bytes(32)
CLUSTERS = draw_clusters(DIGEST, HEADS, frozenset(LEASED), max_group=4, size=4)
HEAD = HEADS[0]
SETUP = round_scripts.setup(
    HEAD,
    step=5,
    roster=HEADS,
    leased=LEASED,
    max_group=4,
    num_values=10_000,
    grace_s=1.0,
    vote_s=10.0,
    clusters=CLUSTERS,
)


def ready(head: str, *followers: str, **changes: object) -> Ready:
    brought = sorted(
        (Follower(place=LEASED.index(peer), num_tokens=40, num_samples=10) for peer in followers),
        key=lambda each: each.place,
    )
    values: dict[str, object] = {
        "run": "run",
        "step": 5,
        "attempt": 0,
        "state_digest": DIGEST,
        "num_samples": 10 * (1 + len(brought)),
        "num_tokens": 40 * (1 + len(brought)),
        "loss": 2.0,
        "followers": tuple(brought),
    }
    return Ready(**{**values, **changes})  # type: ignore[arg-type]


REPORTS = {head: ready(head, *CLUSTERS.followers_of(head)) for head in HEADS}


def signed(members: tuple[Contribution, ...]) -> SignedGroup:
    """Return a signed group of all heads."""
    group, _ = form_group(SETUP, 0, REPORTS)
    return SignedGroup(group=replace(group, members=members), signer=HEADS[1], data=b"group", digest=DIGEST)


def test_members_accept_a_group_of_heads_with_all_followers() -> None:
    group, left_out = form_group(SETUP, 0, REPORTS)
    assert not left_out
    assert group.num_tokens == 40 * len(LEASED)
    assert complaint(SETUP, 0, group.members[0], signed(group.members)) == ""


def test_coordinator_leaves_out_a_head_that_brings_followers_of_another_head() -> None:
    thief = HEADS[1]
    stolen = next(peer for peer, heads in CLUSTERS.dealt.items() if thief not in heads)
    _, left_out = form_group(SETUP, 0, {**REPORTS, thief: ready(thief, stolen)})
    assert left_out == {thief: "it claims the work of a trainer that does not follow it"}


def test_coordinator_takes_a_trainers_work_from_only_one_head() -> None:
    follower = CLUSTERS.followers_of(HEAD)[0]
    second = CLUSTERS.heads_of(follower)[1]
    group, left_out = form_group(SETUP, 0, {**REPORTS, second: ready(second, follower)})
    assert left_out == {second: "it brings a trainer's work that another member brings, too"}
    assert group.members[0].followers == REPORTS[HEAD].followers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"newcomers": (FOLLOWERS[0],)}, "brings a newcomer that is in the run"),
        ({"num_tokens": 10**9}, "more tokens or samples than its lease has"),
    ],
)
def test_members_refuse_a_group_in_which_a_head_claims_work_that_it_does_not_have(
    changes: dict[str, object], words: str
) -> None:
    group, _ = form_group(SETUP, 0, REPORTS)
    wrong = replace(group.members[2], **changes)  # type: ignore[arg-type]
    members = (*group.members[:2], wrong, group.members[3])
    assert words in complaint(SETUP, 0, group.members[0], signed(members))


def test_members_refuse_a_group_that_counts_one_trainer_twice() -> None:
    group, _ = form_group(SETUP, 0, REPORTS)
    follower = CLUSTERS.followers_of(HEAD)[0]
    second = CLUSTERS.heads_of(follower)[1]
    again = replace(
        group.members[HEADS.index(second)],
        num_tokens=80,
        num_samples=20,
        followers=(Follower(place=LEASED.index(follower), num_tokens=40, num_samples=10),),
    )
    members = tuple(again if member.peer_id == second else member for member in group.members)
    assert "one trainer's work" in complaint(SETUP, 0, group.members[0], signed(members))


def test_members_refuse_newcomers_that_the_run_does_not_admit() -> None:
    clusters = draw_clusters(DIGEST, HEADS, frozenset(LEASED), max_group=4, size=5)
    setup = replace(SETUP, clusters=clusters, admission=LEASED)
    reports = {head: ready(head) for head in HEADS}
    _, left_out = form_group(setup, 0, {**reports, HEADS[1]: ready(HEADS[1], newcomers=(STRANGER,))})
    assert left_out == {HEADS[1]: "it brings a newcomer that the run does not admit"}
    group, _ = form_group(setup, 0, reports)
    wrong = replace(group.members[1], newcomers=(STRANGER,))
    members = (group.members[0], wrong, *group.members[2:])
    assert "a newcomer that the run does not admit" in complaint(setup, 0, group.members[0], signed(members))


def test_coordinator_refers_a_follower_that_reports_to_it_to_its_head() -> None:
    state = begin(SETUP, accused={})
    _, actions = on_reported(state, FOLLOWERS[0], ready(FOLLOWERS[0]), 0.0)
    assert [action.reply.kind for action in actions if isinstance(action, Reply)] == ["left_out"]


def test_follower_waits_for_its_head() -> None:
    follower = CLUSTERS.followers_of(HEAD)[0]
    assert awaited_peers(begin(replace(SETUP, me=follower), accused={})) == (HEAD,)


def test_coordinator_waits_for_trainers_that_take_vacant_places() -> None:
    clusters = draw_clusters(DIGEST, HEADS[:3], frozenset(LEASED), max_group=4, size=4)
    setup = replace(SETUP, roster=HEADS[:3], clusters=clusters)
    (promoted,) = clusters.promoted
    assert set(absent_members(begin(setup, accused={}))) == {*HEADS[:3], promoted}


def test_group_states_members_and_followers_on_probation() -> None:
    group = signed((*form_group(SETUP, 0, REPORTS)[0].members,)).group
    head = next(member for member in group.members if member.followers)
    followers = (replace(head.followers[0], steps_left=2), *head.followers[1:])
    others = [member for member in group.members if member is not head]
    late = (replace(head, followers=followers), replace(others[0], steps_left=1), *others[1:])
    late = tuple(sorted(late, key=lambda member: member.peer_id))
    assert (group.num_on_probation, replace(group, members=late).num_on_probation) == (0, 2)


# --- members that enter or lose standing ------------------------------------------------------------------------------


def credential(word: RunInvitation, peer: str) -> RunCredential:
    shown = credential_of([word], peer, "run", network_id="test", now=1.0)
    assert shown is not None
    return shown


def test_group_stays_valid_when_a_peer_shows_one_credential_itself_and_another_through_a_head() -> None:
    """The credential that the head shows uses up the entry of a third peer, and the peer's own one does not."""
    once, other = (
        invite_to_run(Identity(b"a" * 32), "run", network_id="test", now=1.0, lifetime_s=100.0) for _ in range(2)
    )
    third, twice = PEERS[:2]
    heads = PEERS[2:8]
    clusters = draw_clusters(DIGEST, heads, frozenset(heads), max_group=6, size=5)
    standings = TrainerStandings(entrance=Entrance(welcomes=True), known=heads)
    setup = replace(SETUP, me=heads[0], roster=heads, leased=heads, clusters=clusters, max_group=6, standings=standings)
    reports = {
        heads[0]: ready(heads[0]),
        **{head: ready(head) for head in heads[1:3]},  # two heads are absent, so that newcomers have seats
        heads[3]: ready(heads[3], newcomers=(twice,), credentials=(credential(once, twice),)),
        third: ready(third, num_tokens=0, num_samples=0, loss=0.0, credentials=(credential(once, third),)),
        twice: ready(twice, num_tokens=0, num_samples=0, loss=0.0, credentials=(credential(other, twice),)),
    }
    group, left_out = form_group(setup, 0, reports)
    made = SignedGroup(group=group, signer=heads[0], data=b"group", digest=DIGEST)
    assert complaint(setup, 0, next(each for each in group.members if each.peer_id == heads[0]), made) == ""
    assert left_out == {twice: TOO_MANY_ENTER}, "the credential that its head shows counts"


@pytest.mark.parametrize(("max_group", "most"), [(4, 64), (16, 16), (256, 1)])
def test_report_is_left_out_when_it_demotes_more_members_than_its_share(max_group: int, most: int) -> None:
    setup = replace(SETUP, max_group=max_group)
    named = tuple(Identity(number.to_bytes(32, "big")).peer_id for number in range(1, most + 2))
    assert not cluster_overclaim(setup, Contribution(peer_id=HEADS[1], demoted=named[:most]))
    assert "demotes more" in cluster_overclaim(setup, Contribution(peer_id=HEADS[1], demoted=named))
