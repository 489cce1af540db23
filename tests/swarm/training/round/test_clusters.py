"""Tests how clusters are drawn and what a head may claim for its own, without a network."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.training.round.clusters import (
    Clusters,
    draw_clusters,
    has_contributed,
    overclaim,
    samples_used,
    trainers_after,
)
from swarm_protocol.errors import RoundError
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Follower, Group

PEERS = tuple(sorted(Identity(number.to_bytes(32, "big")).peer_id for number in range(60)))
HEADS, OTHERS, STRANGER = PEERS[:6], PEERS[6:48], PEERS[50]
LEASED = HEADS + OTHERS
DIGEST = bytes(32)


def drawn(digest: bytes = DIGEST, trainers: tuple[str, ...] = LEASED, roster: tuple[str, ...] = HEADS) -> Clusters:
    return draw_clusters(digest, roster, frozenset(trainers), max_group=6, size=8)


def group_of(*members: Contribution) -> Group:
    ordered = tuple(sorted(members, key=lambda member: member.peer_id))
    values = (1,) * len(ordered) if any(member.num_tokens for member in ordered) else ()
    return Group(
        run="run",
        step=1,
        attempt=0,
        state_digest=DIGEST,
        members=ordered,
        part_values=values,
        reduce_s=1.0,
        vote_s=1.0,
    )


def work(peer: str, num_samples: int = 2) -> Follower:
    return Follower(place=LEASED.index(peer), num_tokens=4 * num_samples, num_samples=num_samples)


def cluster_of(head: str, *followers: Follower, own_samples: int = 2, **changes: object) -> Contribution:
    num_samples = own_samples + sum(each.num_samples for each in followers)
    num_tokens = 4 * own_samples + sum(each.num_tokens for each in followers)
    ordered = tuple(sorted(followers, key=lambda each: each.place))
    values = {"peer_id": head, "num_tokens": num_tokens, "num_samples": num_samples, "followers": ordered}
    return Contribution(**{**values, **changes})  # type: ignore[arg-type]


def claim_of(member: Contribution, clusters: Clusters) -> str:
    return overclaim(member, LEASED, clusters, max_samples=10, tokens_per_sample=4)


def test_clusters_deal_all_trainers_evenly_and_independently_of_their_order() -> None:
    clusters = drawn()
    assert clusters == drawn(trainers=tuple(reversed(LEASED)), roster=tuple(reversed(HEADS)))
    assert clusters.promoted == ()
    assert {head: len(clusters.followers_of(head)) for head in HEADS} == dict.fromkeys(HEADS, 7)
    assert {peer for peer in PEERS[:48] if clusters.follows(peer)} == set(OTHERS)


def test_second_heads_of_one_cluster_are_spread_over_all_other_heads() -> None:
    """A head that fails would otherwise leave its whole cluster to one other head."""
    clusters = drawn()
    for head in HEADS:
        seconds = Counter(clusters.heads_of(peer)[1] for peer in clusters.followers_of(head))
        assert head not in seconds
        assert max(seconds.values()) == 2


@pytest.mark.parametrize(("min_group", "is_full"), [(3, True), (4, False)])
def test_newcomers_report_themselves_while_the_round_depends_on_those_that_have_seats(
    min_group: int, is_full: bool
) -> None:
    """If the one with the seat was gone, the run would wait for it, and heads would bring all others."""
    heads, seated = HEADS[:3], OTHERS[0]
    clusters = draw_clusters(
        DIGEST,
        heads,
        frozenset({*heads, seated}),
        max_group=16,
        size=8,
        newcomers=frozenset({seated}),
        num_seats=1,
        min_group=min_group,
    )
    assert clusters.promoted == (seated,)
    assert clusters.follows(STRANGER) == is_full


@given(st.binary(min_size=32, max_size=32), st.integers(1, 42), st.integers(1, 6))
def test_each_trainer_is_a_head_promoted_or_a_follower(digest: bytes, num_others: int, num_heads: int) -> None:
    heads = HEADS[:num_heads]
    clusters = drawn(digest, heads + OTHERS[:num_others], heads)
    assert set(clusters.heads) | set(clusters.promoted) | set(clusters.dealt) == set(heads + OTHERS[:num_others])
    assert len(clusters.heads) + len(clusters.promoted) <= 6
    assert clusters.is_full == (num_heads + num_others >= 6)
    assert clusters.follows(STRANGER) == clusters.is_full


def test_clusters_of_a_step_are_drawn_only_once() -> None:
    assert drawn() is drawn(trainers=LEASED[::-1])
    assert drawn() is not drawn(trainers=LEASED[1:])


def test_clusters_differ_when_the_state_differs() -> None:
    one, other = drawn(), drawn(b"x" * 32)
    same = sum(one.dealt[peer][0] == other.dealt[peer][0] for peer in OTHERS)
    assert same < len(OTHERS) / 2


def test_no_trainer_follows_in_a_run_without_clusters_or_a_first_group() -> None:
    for clusters in (drawn(roster=()), draw_clusters(DIGEST, HEADS, frozenset(LEASED), max_group=6, size=1)):
        assert not any(map(clusters.follows, PEERS))
        assert clusters.num_newcomers(HEADS[0]) == 0


def test_head_has_room_for_newcomers_up_to_its_cluster_size() -> None:
    clusters = drawn(trainers=LEASED[:-3])
    assert sum(map(clusters.num_newcomers, HEADS)) == 3
    assert clusters.num_newcomers(OTHERS[0]) == 0
    assert set(clusters.heads_of(STRANGER)) <= set(HEADS)


def test_trainers_after_a_round_are_contributors_and_newcomers() -> None:
    clusters = drawn()
    head = clusters.heads[0]
    first, second, third, *rest = clusters.followers_of(head)
    leaving = replace(work(third), leaving=True)
    contributions = [cluster_of(head, work(first), Follower(place=LEASED.index(second)), leaving)]
    contributions[0] = replace(contributions[0], newcomers=(STRANGER,))
    contributions += [cluster_of(other, *map(work, clusters.followers_of(other))) for other in clusters.heads[1:]]
    after = trainers_after(group_of(*contributions), LEASED, clusters)
    assert after[:6] == HEADS
    assert set(after) == {*LEASED, STRANGER} - {third, *rest}
    assert after[6:] == tuple(sorted(after[6:]))


def test_followers_keep_their_leases_when_their_head_took_no_part() -> None:
    clusters = drawn()
    gone, *others = clusters.heads
    after = trainers_after(
        group_of(*(cluster_of(other, *map(work, clusters.followers_of(other))) for other in others)), LEASED, clusters
    )
    assert set(after) == set(LEASED) - {gone}


def test_used_samples_are_counted_for_each_trainer() -> None:
    clusters = drawn()
    head = clusters.heads[0]
    first, second, *_ = clusters.followers_of(head)
    origin = group_of(cluster_of(head, work(first, 3), Follower(place=LEASED.index(second)), own_samples=5))
    assert samples_used(origin, LEASED) == {head: 5, first: 3}
    assert has_contributed(first, origin, DIGEST, LEASED)
    assert not has_contributed(second, origin, DIGEST, LEASED)
    assert not has_contributed(first, origin, b"o" * 32, LEASED)
    assert has_contributed(head, origin, b"o" * 32, ())


def test_group_is_refused_when_it_names_a_place_without_a_lease() -> None:
    origin = group_of(cluster_of(HEADS[0], replace(work(OTHERS[0]), place=100)))
    with pytest.raises(RoundError, match="place 100 of 48"):
        samples_used(origin, LEASED)
    with pytest.raises(RoundError, match="place 100 of 48"):
        trainers_after(origin, LEASED, drawn())


def test_overclaim_names_the_work_that_a_head_does_not_have() -> None:
    clusters = drawn(trainers=LEASED[:-3])
    head = next(head for head in HEADS if clusters.num_newcomers(head))
    follower = clusters.followers_of(head)[0]
    stranger = next(peer for peer, heads in clusters.dealt.items() if head not in heads)
    assert claim_of(cluster_of(head, work(follower)), clusters) == ""
    assert "than its lease" in claim_of(cluster_of(head, work(follower, 11)), clusters)
    assert "than its lease" in claim_of(cluster_of(head, work(follower), own_samples=11), clusters)
    assert "does not follow it" in claim_of(cluster_of(head, work(stranger)), clusters)
    assert "does not follow it" in claim_of(cluster_of(head, replace(work(follower), place=400)), clusters)
    assert "more newcomers" in claim_of(cluster_of(head, newcomers=PEERS[48:56]), clusters)
    assert "in the run" in claim_of(cluster_of(head, newcomers=(follower,)), clusters)
    assert "more newcomers" in claim_of(cluster_of(follower, newcomers=(STRANGER,)), clusters)
