"""Tests how groups are formed and checked, without a network."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import round_scripts
from support.work_count import num_lines
from swarm.training.allreduce import parts
from swarm.training.allreduce.parts import fair_shares, leaf_values, part_sizes, part_values
from swarm.training.round.clusters import draw_clusters
from swarm.training.round.disputes import whom_to_leave_out, widely_accused
from swarm.training.round.group_formation import (
    EXPIRED,
    MAX_GRACE_S,
    MIN_WORK_DUE_S,
    OWN_EXPIRED,
    UNINVITED,
    decision_s,
    grace_after,
)
from swarm.training.round.group_members import (
    NOT_ADMITTED,
    complaint,
    form_group,
    origin_complaint,
)
from swarm.training.round.quorum import Succession
from swarm.training.round.round_events import (
    Action,
    Ask,
    CredentialsExpired,
    GiveUp,
    LeftOut,
    Offered,
    Reply,
    Reported,
    Sighted,
    Sign,
    Tick,
)
from swarm.training.round.round_state import RoundState, attempt_beacon, coordinator_of
from swarm.training.round.state_machine import begin, step, wake_at
from swarm.training.standing.entrance import Entrance
from swarm.training.standing.standings import TrainerStandings
from swarm_protocol import limits
from swarm_protocol.commit_messages import Lock, Outcome
from swarm_protocol.identity import Identity, short_id
from swarm_protocol.run_credentials import RunCredential, credential_of, invite_to_run
from swarm_protocol.training_messages import Contribution, Follower, Group, Ready, ReadyReply, SignedGroup

PEERS = tuple(sorted(Identity(bytes([number]) * 32).peer_id for number in range(6)))
A, B, C, D, E, F = PEERS
DIGEST = bytes(32)
TERMS = round_scripts.setup(
    A,
    step=5,
    roster=(A, B, C, D),
    leased=(A, B, C, D),
    max_group=4,
    num_values=10_000,
    grace_s=1.0,
    vote_s=10.0,
)


def ready(num_samples: int = 10, **changes: object) -> Ready:
    values: dict[str, object] = {
        "run": "run",
        "step": 5,
        "attempt": 0,
        "state_digest": DIGEST,
        "num_samples": num_samples,
        "num_tokens": 4 * num_samples,
        "loss": 2.0,
    }
    return Ready(**{**values, **changes})  # type: ignore[arg-type]


def signed(group: Group, signer: str = B, origin: SignedGroup | None = None) -> SignedGroup:
    return SignedGroup(group=group, signer=signer, data=b"group", digest=DIGEST, origin=origin)


def test_coordinator_does_not_depend_on_the_order_of_candidates() -> None:
    beacon = attempt_beacon("run", DIGEST, 3, 0)
    assert coordinator_of(beacon, PEERS) == coordinator_of(beacon, reversed(PEERS))


def test_coordinators_of_many_attempts_include_every_peer() -> None:
    drawn = {coordinator_of(attempt_beacon("run", DIGEST, 3, attempt), PEERS) for attempt in range(100)}
    assert drawn == set(PEERS)


def test_coordinator_is_drawn_evenly_over_states() -> None:
    """Otherwise a peer that made its key for a low hash would coordinate the same attempt of every step."""
    drawn = [coordinator_of(attempt_beacon("run", bytes([state]) * 32, 3, 0), PEERS) for state in range(100)]
    assert all(5 <= drawn.count(peer) <= 35 for peer in PEERS)


@given(st.integers(0, 10**7), st.lists(st.floats(0.1, 1e9), min_size=1, max_size=16))
def test_part_values_cover_the_vector_and_follow_bandwidth(num_values: int, bandwidths: list[float]) -> None:
    parts = part_values(num_values, tuple(bandwidths))
    assert sum(parts) == num_values
    assert min(parts) >= 0
    for part, bandwidth in zip(parts, bandwidths, strict=True):
        assert abs(part - num_values * bandwidth / sum(bandwidths)) <= leaf_values(num_values) + 1e-6 * num_values


def test_form_group_makes_a_group_that_each_member_accepts() -> None:
    reports = {peer: ready() for peer in (A, B, C)} | {E: ready(0)}
    group, left_out = form_group(TERMS, 0, reports)
    assert left_out == {}
    assert group.peer_ids == tuple(sorted(reports))
    assert sum(group.part_values) == TERMS.num_values
    for member in group.members:
        assert complaint(replace(TERMS, me=member.peer_id), 0, member, signed(group)) == ""


def test_form_group_seats_contributors_and_itself_first_when_there_are_too_many() -> None:
    setup = replace(TERMS, me=E, max_group=3)
    group, left_out = form_group(setup, 0, {E: ready(0), F: ready(0), A: ready(), B: ready()})
    assert group.peer_ids == tuple(sorted((A, B, E)))
    assert "full" in left_out[F]


@pytest.mark.parametrize("claim", [ready(11), ready(10, num_tokens=41)], ids=["samples", "tokens"])
def test_form_group_leaves_out_a_member_that_claims_more_than_its_lease(claim: Ready) -> None:
    group, left_out = form_group(TERMS, 0, {A: ready(), B: ready(), C: claim})
    assert group.peer_ids == (A, B)
    assert "lease" in left_out[C]


def test_form_group_leaves_out_a_contributor_without_a_lease() -> None:
    group, _ = form_group(TERMS, 0, {A: ready(), E: ready(1)})
    assert group.peer_ids == (A,)


def test_report_of_a_stranger_with_followers_is_not_kept() -> None:
    """A thousand of them, each with thousands of followers, would take gigabytes until a group is formed."""
    coordinator = coordinator_of(attempt_beacon("run", DIGEST, 5, 0), TERMS.roster)
    state = begin(replace(TERMS, me=coordinator), accused={})
    followers = tuple(Follower(place=place, num_tokens=40, num_samples=10) for place in range(4))
    for report in (ready(40, followers=followers), ready(0, newcomers=(F,))):
        state, [reply] = step(state, Reported(peer=E, ready=report), 1.0)
        assert isinstance(reply, Reply)
        assert reply.reply.kind == "left_out"
    assert state.reports == {}
    state, _ = step(state, Reported(peer=E, ready=ready(0)), 1.0)
    assert set(state.reports) == {E}


def test_form_group_without_tokens_has_no_parts() -> None:
    group, _ = form_group(TERMS, 0, {A: ready(0), E: ready(0)})
    assert group.part_values == ()


def lock(attempt: int, state: bytes = b"o") -> Lock:
    outcome = Outcome(origin_digest=DIGEST, part_digests=(), state_digest=state * 32)
    return Lock(attempt=attempt, group_digest=DIGEST, outcome=outcome, votes=())


def holds(held: Lock, **changes: object) -> Ready:
    return ready(**{"attempt": 3, "lock": held, "origin": bytes([held.attempt]), **changes})  # type: ignore[arg-type]


def test_form_group_resumes_the_outcome_of_the_highest_lock() -> None:
    group, _ = form_group(TERMS, 3, {A: ready(attempt=3), B: holds(lock(1)), C: holds(lock(2, b"n"))})
    assert (group.lock, group.resumes, group.origin) == (lock(2, b"n"), lock(2, b"n").outcome, b"\x02")
    assert group.part_values == ()
    assert [member.locked for member in group.members] == [None, lock(1).claim, lock(2, b"n").claim]


def test_complaint_names_a_group_that_does_not_resume_the_highest_reported_lock() -> None:
    """A lying coordinator can leave a lock out of the group only together with the report that names it."""
    group, _ = form_group(TERMS, 3, {A: ready(attempt=3), B: holds(lock(1)), C: holds(lock(2, b"n"))})
    origin = signed(form_group(TERMS, 0, {peer: ready() for peer in (A, B, C)})[0])
    mine = group.members[0]
    assert complaint(TERMS, 3, mine, signed(group, origin=origin)) == ""
    lower = replace(group, lock=lock(1))
    fresh = replace(group, lock=None, origin=b"", part_values=part_sizes(TERMS.num_values, group.members))
    late = replace(group, lock=lock(3), members=tuple(replace(each, locked=lock(3).claim) for each in group.members))
    for wrong in (lower, fresh):
        assert "highest lock" in complaint(TERMS, 3, mine, signed(wrong, origin=origin))
    assert "no earlier attempt" in complaint(TERMS, 3, late.members[0], signed(late, origin=origin))
    # a group may not resume a lock that no report names
    made_up, _ = form_group(TERMS, 3, {peer: ready(attempt=3) for peer in (A, B, C)})
    made_up = replace(made_up, lock=lock(2), origin=b"made up", part_values=())
    assert "highest lock" in complaint(TERMS, 3, made_up.members[0], signed(made_up, origin=origin))


def test_complaint_names_a_group_that_changes_the_lock_of_this_member() -> None:
    group, _ = form_group(TERMS, 3, {A: holds(lock(2)), B: ready(attempt=3), C: ready(attempt=3)})
    mine = group.members[0]
    without = tuple(replace(each, locked=None) for each in group.members)
    fresh = replace(group, members=without, lock=None, origin=b"", part_values=part_sizes(TERMS.num_values, without))
    assert "changes this member's report" in complaint(TERMS, 3, mine, signed(fresh))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 6}, "another round"),
        ({"attempt": 1}, "another round"),
        ({"run": "other"}, "another round"),
        ({"state_digest": b"x" * 32}, "another state"),
        ({"part_values": (1, 1, 1)}, "do not follow from the bandwidths"),
        ({"part_values": (0, 10_000, 0)}, "do not follow from the bandwidths"),
        ({"order": b"of another sequence"}, "another resume order"),
        ({"reduce_s": 21.0}, "deadlines"),
        ({"vote_s": 11.0}, "deadlines"),
    ],
)
def test_complaint_names_the_field_that_a_coordinator_changed(change: dict[str, object], words: str) -> None:
    group, _ = form_group(TERMS, 0, {peer: ready() for peer in (A, B, C)})
    mine = Contribution(peer_id=A, num_tokens=40, num_samples=10, loss=2.0)
    assert words in complaint(TERMS, 0, mine, signed(replace(group, **change)))  # type: ignore[arg-type]


def test_complaint_names_a_changed_own_weight_or_a_raised_weight_of_others() -> None:
    group, _ = form_group(TERMS, 0, {peer: ready() for peer in (A, B, C)})
    mine, other = group.members[0], group.members[1]
    lowered = replace(group, members=(replace(mine, num_tokens=4, num_samples=1), *group.members[1:]))
    raised = replace(group, members=(mine, replace(other, num_tokens=10**9, num_samples=10), group.members[2]))
    assert "changes this member's" in complaint(TERMS, 0, mine, signed(lowered))
    assert "more tokens or samples than its lease has" in complaint(TERMS, 0, mine, signed(raised))


def test_complaint_names_a_coordinator_that_changes_the_bandwidth_of_another_member() -> None:
    """It could otherwise take most of the vector. By its own bandwidth it gets at most MAX_SKEW times the usual
    part."""
    reports = {peer: ready(bytes_per_s=1000) for peer in (A, B, C)}
    group, _ = form_group(replace(TERMS, me=B, bytes_per_s=1000), 0, reports)
    mine = Contribution(peer_id=A, num_tokens=40, num_samples=10, loss=2.0, bytes_per_s=1000)
    setup = replace(TERMS, bytes_per_s=1000)
    assert complaint(setup, 0, mine, signed(group)) == ""
    made_up, _ = form_group(setup, 0, {**reports, A: ready(bytes_per_s=1), B: ready(bytes_per_s=10**9)})
    assert "changes this member's report" in complaint(setup, 0, mine, signed(made_up))
    boast, _ = form_group(replace(TERMS, me=B), 0, {**reports, B: ready(bytes_per_s=10**9)})
    assert complaint(setup, 0, mine, signed(boast)) == ""
    assert boast.part_values[1] <= 4 / 6 * TERMS.num_values + 256


def test_complaint_names_a_group_that_is_too_small_or_too_large() -> None:
    group, _ = form_group(TERMS, 0, {peer: ready() for peer in (A, B, C)})
    mine = group.members[0]
    assert "fewer than 4" in complaint(replace(TERMS, succession=Succession(min_group=4)), 0, mine, signed(group))
    assert "more than 2" in complaint(replace(TERMS, max_group=2), 0, mine, signed(group))


@pytest.mark.parametrize(
    ("signer", "members", "words"),
    [
        (B, (A, B, C), ""),
        (E, (A, B, C), "no member of the state"),
        (D, (D, E, F), "too few members of the state"),
        (D, (D,), "fewer than 2"),
    ],
)
def test_complaint_names_an_outcome_of_an_impossible_group(signer: str, members: tuple[str, ...], words: str) -> None:
    made, _ = form_group(replace(TERMS, me=members[0]), 0, {peer: ready(0) for peer in members})
    origin = signed(made, signer)
    assert words in origin_complaint(TERMS, origin)
    group, _ = form_group(TERMS, 1, {A: ready(), B: ready(), C: ready(attempt=1, lock=lock(0), origin=b"group")})
    mine = group.members[0]
    assert words in complaint(TERMS, 1, mine, signed(group, origin=origin))
    assert bool(complaint(TERMS, 1, mine, signed(group, origin=origin))) == bool(words)
    assert "not there" in complaint(TERMS, 1, mine, signed(group))


def test_first_attempt_leaves_out_only_members_that_more_than_a_third_accuse() -> None:
    """Two liars of seven could otherwise keep an honest member out of every step."""
    members = (A, B, C, D, E, F, "G")
    honest: dict[str, set[str]] = {peer: set() for peer in members}
    assert widely_accused({**honest, E: {A}, F: {A}}, len(members)) == ()
    assert widely_accused({**honest, E: {A}, F: {A}, "G": {A, "G"}}, len(members)) == (A,)
    assert widely_accused({**honest, E: {"gone"}, F: {"gone"}, "G": {"gone"}}, len(members)) == ()


def test_accusations_of_strangers_leave_nobody_out() -> None:
    strangers = {peer: ready(0, accused=(B,)) for peer in (E, F)}
    for attempt in range(8):
        group, left_out = form_group(replace(TERMS, max_group=6), attempt, {A: ready(), B: ready(), **strangers})
        assert B in group.peer_ids
        assert not left_out


@pytest.mark.parametrize("attempt", range(1, 9))
def test_dispute_leaves_out_a_member_that_all_others_accuse(attempt: int) -> None:
    assert whom_to_leave_out({A: {D}, B: {D}, C: {D}, D: set()}, attempt) == (D,)


def test_dispute_leaves_out_a_member_that_accuses_all_others() -> None:
    assert whom_to_leave_out({A: {B, C, D}, B: set(), C: set(), D: set()}, 1) == (A,)


def test_dispute_with_a_tie_leaves_out_either_member_or_none_in_turn() -> None:
    """Two members that cannot reach each other would otherwise fail every attempt. One accusation alone decides nothing
    permanently."""
    turns = [whom_to_leave_out({A: {B}, B: set(), C: set()}, num_failed) for num_failed in range(1, 100)]
    for who in ((), (A,), (B,)):
        assert turns.count(who) >= 20


def test_dispute_leaves_out_two_liars_that_also_accuse_each_other() -> None:
    honest = {A: {E, F}, B: {E, F}, C: {E, F}}
    assert set(whom_to_leave_out({**honest, E: {F}, F: {E}}, 1)) == {E, F}


@given(st.dictionaries(st.sampled_from(PEERS), st.sets(st.sampled_from(PEERS))), st.integers(1, 5))
def test_dispute_leaves_out_only_members_that_accuse_or_are_accused(
    accusations: dict[str, set[str]], num_failed: int
) -> None:
    disputed = {peer for by, accused in accusations.items() for of in accused if of in accusations for peer in (by, of)}
    assert set(whom_to_leave_out(accusations, num_failed)) <= disputed


def test_dispute_takes_a_few_lines_of_code_for_each_accusation() -> None:
    """A coordinator does this again with each report, and its event loop would otherwise block for seconds when the
    members of a full group accuse each other."""
    crowd = [f"peer {number}" for number in range(limits.MAX_GROUP_MEMBERS)]
    assert num_lines(lambda: whom_to_leave_out(dict.fromkeys(crowd, crowd), 1)) < 4 * len(crowd) ** 2


def test_form_group_seats_both_when_one_of_them_accuses_the_other() -> None:
    group, left_out = form_group(replace(TERMS, me=C), 0, {A: ready(accused=(B,)), B: ready(), C: ready()})
    assert group.peer_ids == (A, B, C)
    assert not left_out


def test_form_group_leaves_out_the_accused_and_names_the_accusers() -> None:
    reports = {A: ready(accused=(C,)), B: ready(accused=(C,)), C: ready(), D: ready()}
    group, left_out = form_group(TERMS, 1, reports)
    assert group.peer_ids == (A, B, D)
    assert short_id(A) in left_out[C]


def test_coordinator_that_gives_up_tells_only_the_accused_that_they_are_left_out() -> None:
    """The others go on to the next attempt with it, and may be fit for that one."""
    roster = PEERS[:5]
    me = coordinator_of(attempt_beacon("run", DIGEST, 5, 0), roster)
    accused, overclaims, *accusers = (peer for peer in roster if peer != me)
    state = begin(replace(TERMS, me=me, roster=roster, leased=roster, max_group=5), accused={})
    state, _ = step(state, Offered(contribution=Contribution(peer_id=me)), 0.0)
    reports = {accused: ready(), overclaims: ready(11), **dict.fromkeys(accusers, ready(accused=(accused,)))}
    for peer, report in reports.items():
        state, actions = step(state, Reported(peer=peer, ready=report), 1.0)
    assert any(isinstance(action, GiveUp) for action in actions)
    told = {action.peer: action.reply.kind for action in actions if isinstance(action, Reply)}
    assert told == {accused: "left_out", **dict.fromkeys((overclaims, *accusers), "attempt")}


def test_form_group_leaves_out_peers_that_the_run_does_not_admit_with_a_reason() -> None:
    setup = replace(TERMS, admission=(A, B, C))
    group, left_out = form_group(setup, 0, {peer: ready() for peer in (A, B, D)})
    assert group.peer_ids == (A, B)
    assert left_out == {D: NOT_ADMITTED}


def test_complaint_names_a_group_with_a_peer_that_is_not_admitted() -> None:
    group, _ = form_group(TERMS, 0, {peer: ready() for peer in (A, B, D)})
    mine = Contribution(peer_id=A, num_tokens=40, num_samples=10, loss=2.0)
    assert complaint(replace(TERMS, admission=(A, B, D)), 0, mine, signed(group)) == ""
    wrong = complaint(replace(TERMS, admission=(A, B, C)), 0, mine, signed(group))
    assert wrong == f"of {short_id(D)}, {NOT_ADMITTED}"


def test_lease_counts_for_a_member_that_was_left_out_of_the_last_group() -> None:
    """With overlap, leases come from the round before the last."""
    setup = replace(TERMS, roster=(A, B, C), leased=(A, B, C, D))
    group, left_out = form_group(setup, 0, {peer: ready() for peer in (A, B, D)})
    assert group.peer_ids == (A, B, D)
    assert not left_out
    assert form_group(replace(setup, leased=(A, B)), 0, {A: ready(), B: ready(), D: ready()})[1].keys() == {D}


def test_fair_shares_are_proportional_to_bandwidths() -> None:
    shares = fair_shares((100, 25, 100, 100))
    values = part_values(4_000_000, shares)
    average = sum(value for index, value in enumerate(values) if index != 1) / 3
    assert values[1] == pytest.approx(average / 4, rel=0.02)


@pytest.mark.parametrize(("claimed", "share"), [(10**12, 4.0), (1, 0.25), (0, 1.0)])
def test_fair_shares_are_clamped_for_a_liar_and_usual_for_a_newcomer(claimed: int, share: float) -> None:
    assert fair_shares((1000, 1000, claimed, 1000)) == (1.0, 1.0, share, 1.0)


def test_fair_shares_are_equal_when_no_bandwidth_is_known() -> None:
    assert fair_shares((0, 0, 0)) == (1.0, 1.0, 1.0)


def test_part_values_do_not_depend_on_the_version_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that compute other sizes refuse the group. From Python 3.12 on, `sum` rounds floats like `fsum`."""
    shares = fair_shares((25_000_000, 40_000_000, 25_000_000, 25_000_000, 40_000_000, 25_000_000))
    monkeypatch.setattr(parts, "sum", math.fsum, raising=False)
    assert part_values(1280, shares) == (256, 256, 256, 0, 256, 256)


def test_form_group_sizes_parts_by_bandwidths() -> None:
    slow, usual = ready(bytes_per_s=250), ready(bytes_per_s=1000)
    group, _ = form_group(replace(TERMS, num_values=1_000_000), 0, {A: usual, B: slow, C: usual})
    parts = dict(zip(group.peer_ids, group.part_values, strict=True))
    assert parts[B] == pytest.approx((parts[A] + parts[C]) / 2 / 4, rel=0.01)
    assert sum(group.part_values) == 1_000_000


@pytest.mark.parametrize(
    ("interval_s", "least_s", "grace_s"),
    [(0.0, 2.0, 2.0), (4.0, 2.0, 2.0), (24.0, 2.0, 6.0), (3600.0, 2.0, MAX_GRACE_S), (3600.0, 60.0, 60.0), (24, 0, 0)],
)
def test_grace_is_a_share_of_the_interval_within_bounds(interval_s: float, least_s: float, grace_s: float) -> None:
    assert grace_after(interval_s, least_s) == grace_s


@pytest.mark.parametrize("puts_off", [False, True])
def test_member_moves_on_when_the_coordinator_does_not_answer_or_keeps_putting_it_off(puts_off: bool) -> None:
    coordinator = coordinator_of(attempt_beacon("run", DIGEST, 5, 0), (A, B, C, D))
    me = next(peer for peer in (A, B, C, D) if peer != coordinator)
    state = begin(replace(TERMS, me=me), accused={}, interval_s=100.0)
    state, (ask,) = step(state, Offered(contribution=Contribution(peer_id=me, num_tokens=40, num_samples=10)), 0.0)
    assert isinstance(ask, Ask)
    due_s, now, actions = decision_s(state, 0.0), 0.0, list[Action]()
    while state.attempt == 0:
        if puts_off and state.asked:
            state, actions = step(state, LeftOut(attempt=0, reason="the group is full"), now)
        now = wake_at(state) or now
        state, actions = step(state, Tick(), now)
    assert now == due_s > 100.0 + MAX_GRACE_S
    (notice,) = actions
    assert isinstance(notice, GiveUp)
    assert notice.missing == (coordinator,)
    assert not state.faults.failed, "a slow coordinator is not at fault: its interval may have taken that long"
    state, (ask,) = step(state, Tick(), now + 1.0)
    assert isinstance(ask, Ask)
    assert (ask.ready.attempt, ask.peer) == (1, coordinator_of(attempt_beacon("run", DIGEST, 5, 1), (A, B, C, D)))


def test_each_failed_attempt_of_a_member_without_work_waits_longer_for_the_next_group() -> None:
    """Work of others that is due may still take many times as long, and each attempt that ends costs all of them a new
    report."""
    coordinator = coordinator_of(attempt_beacon("run", DIGEST, 5, 0), (A, B, C, D))
    me = next(peer for peer in (A, B, C, D) if peer != coordinator)
    state, now, waits, asked_at = begin(replace(TERMS, me=me), accused={}), MIN_WORK_DUE_S, list[float](), 0.0
    state, actions = step(state, Offered(contribution=Contribution(peer_id=me)), now)
    while len(waits) < 3:
        for action in actions:
            if isinstance(action, Ask):
                asked_at = now
            elif isinstance(action, GiveUp) and "has formed no group" in action.reason:
                waits.append(now - asked_at)
        now = wake_at(state) or now
        state, actions = step(state, Tick(), now)
    assert waits[0] == pytest.approx(MAX_GRACE_S + 2 * TERMS.patience_s)
    assert all(later - earlier > waits[0] / 2 for earlier, later in pairwise(waits)), waits


# --- credentials that expire while a group forms ----------------------------------------------------------------------


def invited(peer: str, *, expires_at: float) -> RunCredential:
    author = Identity(b"author".ljust(32))
    word = invite_to_run(author, "run", network_id="test", now=1.0, lifetime_s=expires_at - 1.0, node=peer)
    shown = credential_of([word], peer, "run", network_id="test", now=1.0)
    assert shown is not None
    return shown


def waiting_coordinator(num_absent: int = 0) -> RoundState:
    """Return the state of a coordinator that has waited for absent members and now signs a group with two newcomers.
    The invitation of one of them ends at 100."""
    coordinator = coordinator_of(attempt_beacon("run", DIGEST, 5, 0), (A, B, C, D))
    setup = replace(TERMS, me=coordinator, max_group=6)
    state = begin(setup, accused={})
    state, _ = step(state, Offered(contribution=Contribution(peer_id=coordinator, num_tokens=40, num_samples=10)), 0.0)
    here = [peer for peer in (A, B, C, D) if peer != coordinator][num_absent:]
    reports = {peer: ready() for peer in here}
    for peer, end in ((E, 100.0), (F, 900.0)):
        reports[peer] = ready(0, num_tokens=0, loss=0.0, credentials=(invited(peer, expires_at=end),))
    actions: list[Action] = []
    for peer, each in sorted(reports.items(), key=lambda item: item[1].num_tokens):
        state, actions = step(state, Reported(peer=peer, ready=each), 1.0)
    for _ in range(2 if num_absent else 0):  # it asks where absent members are, and then goes on without them
        state, actions = step(state, Tick(), 1.0 + MAX_GRACE_S)
    (sign,) = actions
    assert isinstance(sign, Sign)
    assert {E, F} <= {*sign.group.peer_ids}
    return state


def test_coordinator_signs_no_expired_credential_and_asks_its_member_to_report_again() -> None:
    state, actions = step(waiting_coordinator(), CredentialsExpired(attempt=0, at=100.0), 2.0)
    told, sign = actions
    assert told == Reply(peer=E, reply=ReadyReply(kind="left_out", reason=EXPIRED))
    assert isinstance(sign, Sign)
    assert E not in sign.group.peer_ids
    assert {*sign.group.peer_ids} == {A, B, C, D, F}
    assert state.phase == "signing"


def test_coordinator_does_not_wait_for_absent_members_again_when_a_credential_expires() -> None:
    state, actions = step(waiting_coordinator(num_absent=1), CredentialsExpired(attempt=0, at=100.0), 50.0)
    assert [type(action) for action in actions] == [Reply, Sign]
    assert state.phase == "signing"


@pytest.mark.parametrize("required", [True, False])
def test_head_signs_an_acceptable_group_when_its_newcomers_credential_expires(required: bool) -> None:
    """A run that requires invitations then refuses the newcomer, and would refuse all work that its head brings."""
    leased = (A, B, C, D)
    setup = replace(
        TERMS,
        clusters=draw_clusters(DIGEST, leased, frozenset(leased), max_group=4, size=4),
        standings=TrainerStandings(entrance=Entrance(welcomes=True, required=required), known=leased),
    )
    head = coordinator_of(attempt_beacon("run", DIGEST, 5, 0), leased)
    mine = Contribution(
        peer_id=head, num_tokens=40, num_samples=10, newcomers=(E,), credentials=(invited(E, expires_at=100.0),)
    )
    state, _ = step(begin(replace(setup, me=head), accused={}), Offered(contribution=mine), 0.0)
    for peer in leased:
        if peer != head:
            state, actions = step(state, Reported(peer=peer, ready=ready()), 1.0)
    (sign,) = actions
    assert isinstance(sign, Sign)
    assert sign.group.credentials
    _, (sign,) = step(state, CredentialsExpired(attempt=0, at=100.0), 2.0)
    assert isinstance(sign, Sign)
    (brought,) = [each.newcomers for each in sign.group.members if each.peer_id == head]
    assert brought == (() if required else (E,))
    for member in sign.group.members:
        assert complaint(replace(setup, me=member.peer_id), 0, member, signed(sign.group, head)) == ""


def test_member_reports_without_an_expired_credential_only_in_another_attempt() -> None:
    """Two reports to one attempt, one with the credential and one without, would convict it."""
    setup = replace(TERMS, me=E, credential=invited(E, expires_at=100.0))
    state = begin(setup, accused={})
    state, actions = step(state, Offered(contribution=Contribution(peer_id=E)), 0.0)
    (ask,) = actions
    assert isinstance(ask, Ask)
    assert ask.ready.credentials
    state, actions = step(state, CredentialsExpired(attempt=0, at=100.0), 1.0)
    (notice,) = actions
    assert isinstance(notice, GiveUp)
    assert (notice.reason, notice.missing) == (OWN_EXPIRED, ())
    assert not state.faults.failed
    state, actions = step(state, Tick(), 100.0)
    (ask,) = actions
    assert isinstance(ask, Ask)
    assert (ask.ready.attempt, ask.ready.credentials) == (1, ())


def uninvited(me: str, *, min_group: int = 2, expires_at: float = 0.0) -> RoundState:
    """Return the state of `me` in a new run that has no members and requires invitations. Its own invitation, if it has
    one, ends at `expires_at`."""
    setup = replace(
        TERMS,
        me=me,
        roster=(),
        leased=(),
        succession=Succession(min_group=min_group),
        standings=TrainerStandings(entrance=Entrance(welcomes=True, required=True)),
        credential=invited(me, expires_at=expires_at) if expires_at else None,
    )
    return begin(setup, accused={})


def test_founder_with_an_expired_invitation_signs_no_group_and_the_others_continue_without_it() -> None:
    """The others would refuse the group and accuse the founder."""
    me = coordinator_of(attempt_beacon("run", DIGEST, 5, 0), (A, B, C))
    state, others = uninvited(me, expires_at=100.0), [peer for peer in (A, B, C) if peer != me]
    for peer in others:
        state, _ = step(state, Sighted(peer=peer, attempt=0), 0.0)
    state, _ = step(state, Offered(contribution=Contribution(peer_id=me)), 0.0)
    for peer in others:
        report = ready(0, num_tokens=0, loss=0.0, credentials=(invited(peer, expires_at=900.0),))
        state, _ = step(state, Reported(peer=peer, ready=report), 1.0)
    state, (sign,) = step(state, Tick(), 50.0)
    assert isinstance(sign, Sign)
    assert {*sign.group.peer_ids} == {A, B, C}
    state, (notice, *replies) = step(state, CredentialsExpired(attempt=0, at=100.0), 100.0)
    assert isinstance(notice, GiveUp)
    assert (notice.reason, notice.missing) == (UNINVITED, ())
    assert replies == [
        Reply(peer=peer, reply=ReadyReply(kind="attempt", attempt=1, reason=UNINVITED)) for peer in others
    ]
    assert not state.faults.failed


def test_coordinator_signs_no_second_group_when_its_credential_expired_in_an_earlier_attempt() -> None:
    """Two groups of one attempt would convict it. The event of the earlier attempt may wait behind the last report."""
    founders, first = (A, B, C), coordinator_of(attempt_beacon("run", DIGEST, 5, 0), (A, B, C))
    drawn = [coordinator_of(attempt_beacon("run", DIGEST, 5, attempt), founders) for attempt in range(20)]
    later = next(attempt for attempt, peer in enumerate(drawn) if peer != first)
    me = drawn[later]
    state = uninvited(me, expires_at=100.0)
    for peer in founders:
        state, _ = step(state, Sighted(peer=peer, attempt=0), 0.0)
    state, (ask,) = step(state, Offered(contribution=Contribution(peer_id=me)), 0.0)
    assert isinstance(ask, Ask)
    for peer in founders:
        report = ready(0, attempt=later, num_tokens=0, loss=0.0, credentials=(invited(peer, expires_at=900.0),))
        if peer != me:
            state, _ = step(state, Reported(peer=peer, ready=report), 1.0)
    state, (sign,) = step(state, Tick(), 30.0)
    assert isinstance(sign, Sign)
    assert sign.group.attempt == later
    assert step(state, CredentialsExpired(attempt=0, at=100.0), 39.0) == (state, [])


def test_founder_without_an_invitation_begins_no_run_alone_and_reports_why() -> None:
    state, actions = step(uninvited(A, min_group=1), Offered(contribution=Contribution(peer_id=A)), 0.0)
    assert (actions, wake_at(state)) == ([], TERMS.patience_s)
    _, (notice,) = step(state, Tick(), TERMS.patience_s)
    assert isinstance(notice, GiveUp)
    assert notice.reason == UNINVITED
    state, _ = step(uninvited(A, min_group=1, expires_at=900.0), Offered(contribution=Contribution(peer_id=A)), 0.0)
    _, (sign,) = step(state, Tick(), TERMS.patience_s)
    assert isinstance(sign, Sign), "with an invitation the founder signs a group"
