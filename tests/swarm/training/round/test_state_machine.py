"""Tests the round machine alone: golden traces replay event by event, and no trace may break its rules.

Each file in `traces` records one member in one step: each event, the actions that followed, and the phase after it.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.round_scripts import (
    COORDINATOR,
    FIRST,
    ME,
    OFFER,
    OTHERS,
    OUTCOME,
    PEERS,
    SCRIPTS,
    TRACES,
    Script,
    commit_vote_of,
    contribution,
    coordinator_at,
    from_json,
    left,
    locked,
    member_commits,
    outcome,
    owner_gives_different_results,
    play,
    ready,
    resuming,
    run,
    setup,
    trace,
    vote_of,
)
from swarm.training.round import state_machine as machine
from swarm.training.round.group_formation import MAX_LONE_MOVES, MIN_WORK_DUE_S, awaited_peers, num_lacking
from swarm.training.round.group_members import own_report
from swarm.training.round.group_work import valid_votes
from swarm.training.round.round_events import (
    Announce,
    Ask,
    AttemptLeft,
    CastVote,
    Event,
    Finish,
    GiveUp,
    Grouped,
    Lost,
    Moved,
    Offered,
    Query,
    Recover,
    Reduce,
    Reduced,
    ReduceFailed,
    Reply,
    Reported,
    Sighted,
    Sign,
    Tick,
    Voted,
)
from swarm.training.round.round_state import DOUBTED_S, MAX_BELIEVED_ATTEMPT, RoundState
from swarm_protocol import limits
from swarm_protocol.commit_messages import Certificate
from swarm_protocol.identity import Identity, short_id
from swarm_protocol.training_messages import Contribution, Group, SignedGroup


@pytest.mark.parametrize("name", SCRIPTS)
def test_trace_replays_to_the_same_phases_and_actions(name: str) -> None:
    golden = json.loads((TRACES / f"{name}.json").read_text())
    start = from_json(golden["setup"])
    script = [(each["now"], from_json(each["event"])) for each in golden["steps"]]
    assert play(start, script) == golden["steps"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_trace_file_equals_the_trace_of_its_script(name: str) -> None:
    assert json.loads((TRACES / f"{name}.json").read_text()) == json.loads(json.dumps(trace(name)))


# --- single rules ----------------------------------------------------------------------------------------------------


def test_member_waits_for_its_own_result_when_votes_arrive_first() -> None:
    """Others may still need this member's part, so it must not finish with a certificate."""
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    script += [(2.0, vote_of(peer, FIRST, OUTCOME)) for peer in (COORDINATOR, *OTHERS)]
    state, actions = run(script)
    assert (state.phase, actions) == ("reducing", [])


def test_hopeless_vote_ends_at_once_when_members_leave_before_voting() -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (2.0, Reduced(attempt=0, outcome=OUTCOME))]
    script += [
        (2.0, vote_of(ME, FIRST, OUTCOME)),
        (2.1, left(COORDINATOR, FIRST, "no disk")),
        (2.2, left(OTHERS[0], FIRST, "x")),
    ]
    state, actions = run(script)
    assert isinstance(actions[0], Announce)
    assert isinstance(actions[1], GiveUp)
    assert state.lock is None, "two prepare votes of four prove nothing"
    assert state.mine == contribution(ME), "the contribution must be kept for the next attempt"


@pytest.mark.parametrize("change", [{"sequence": 1}, {"state_digest": b"x" * 32}])
def test_report_from_another_state_or_resume_order_is_answered_and_not_kept(change: dict[str, object]) -> None:
    start = setup(COORDINATOR)
    state, actions = run([(0.0, Reported(peer=ME, ready=ready(**change)))], start)
    assert [(each.peer, each.reply.kind) for each in actions if isinstance(each, Reply)] == [(ME, "behind")]
    assert not state.reports


def test_abort_is_announced_before_the_attempt_is_given_up() -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    _, actions = run([*script, (2.0, ReduceFailed(attempt=0, reason="bad slice", accused=(OTHERS[0],)))])
    assert [type(action) for action in actions] == [Announce, GiveUp]
    assert actions[0].abort.accused == (OTHERS[0],)  # type: ignore[union-attr]


def test_accused_member_stays_accused_and_unreachable_one_is_forgiven_when_it_reports() -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    script.append((2.0, ReduceFailed(attempt=0, reason="x", accused=(OTHERS[0],), unreachable=(OTHERS[1],))))
    state, _ = run([*script, (2.1, Reported(peer=OTHERS[1], ready=ready(2)))])
    assert set(state.faults.accused) == {OTHERS[0]}
    assert not state.faults.unreachable


@pytest.mark.parametrize("certain", [True, False])
def test_peer_with_a_bad_slice_is_accused_although_the_attempt_ended_before_the_proof(certain: bool) -> None:
    """Streams that break as an attempt ends do not show which peer was at fault."""
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (2.0, ReduceFailed(attempt=0, reason="it left"))]
    late = ReduceFailed(attempt=0, reason="bad slice", accused=(OTHERS[0],), certain=certain)
    state, actions = run([*script, (2.01, late)])
    assert set(state.faults.accused) == ({OTHERS[0]} if certain else set())
    assert (state.attempt, actions) == (1, [])


def test_rests_between_failed_attempts_grow_up_to_a_bound() -> None:
    state, _ = run([(0.0, OFFER)])
    now, rests = 0.0, []
    for _ in range(12):
        state, _ = machine.step(state, Lost(peer=state.coordinator, reason="gone"), now)
        due = machine.wake_at(state)
        assert due is not None
        rests.append(due - now)
        # forget faults, so that there is always a coordinator to ask
        faults, timers = replace(state.faults, unreachable=frozenset()), replace(state.timers, deadline=due)
        state = replace(state, faults=faults, timers=timers)
        state, _ = machine.step(state, Tick(), due)
        state = replace(state, coordinator=COORDINATOR, asked=COORDINATOR)
        now = due
    assert rests[0] < 0.1
    assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(rests))
    assert rests[-1] == pytest.approx(5.0)


def test_reports_and_votes_of_strangers_are_bounded() -> None:
    state = machine.begin(setup(), accused={})
    for number in range(3000):
        state, _ = machine.step(state, Reported(peer=f"stranger {number}", ready=ready()), 0.0)
        state, _ = machine.step(state, replace(vote_of(ME, FIRST, OUTCOME), peer=f"stranger {number}"), 0.0)
        state, _ = machine.step(state, replace(commit_vote_of(ME, FIRST, OUTCOME), peer=f"stranger {number}"), 0.0)
    assert len(state.reports) <= 1024
    assert len(state.votes["prepare"]) <= 1024
    assert len(state.votes["commit"]) <= 1024


def test_attempts_that_strangers_name_before_there_is_a_roster_are_bounded() -> None:
    state = machine.begin(setup(roster=()), accused={})
    for number in range(1500):
        state, _ = machine.step(state, Sighted(peer=f"stranger {number}", attempt=number + 1), 0.0)
    assert len(state.attempts.named) <= 1024


@pytest.mark.parametrize("tellers", [(OTHERS[0], OTHERS[0]), (OTHERS[1], COORDINATOR)], ids=["itself", "others"])
def test_member_that_leaves_twice_in_a_step_is_left_out_and_the_reporting_peers_are_not(
    tellers: tuple[str, str],
) -> None:
    state, _ = run([(0.0, OFFER)])
    for at, teller in enumerate(tellers):
        assert not state.faults.unreachable
        state = replace(state, phase="reducing", attempt=0, signed=FIRST)
        gone = left(teller, FIRST, "no disk")
        if teller != OTHERS[0]:
            gone = replace(gone, abort=replace(gone.abort, accused=(OTHERS[0],)))
        state, actions = machine.step(state, gone, 1.0 + at)
        assert actions[0].abort.accused == (teller,)  # type: ignore[union-attr]
    assert set(state.faults.unreachable) == {OTHERS[0]}


def reducing(**changes: object) -> RoundState:
    return replace(run([(0.0, OFFER), (1.0, Grouped(signed=FIRST))])[0], setup=setup(**changes))


def left_accusing(peer: str, *accused: str) -> AttemptLeft:
    gone = left(peer, FIRST, "silent")
    return replace(gone, abort=replace(gone.abort, accused=accused))


def test_member_that_leaves_and_accuses_this_one_is_left_out_of_the_next_attempt() -> None:
    """Otherwise it could stop the run: in the eyes of all others, the two are in equally many disputes."""
    state, _ = machine.step(reducing(), left_accusing(OTHERS[0], ME), 2.0)
    assert set(own_report(state).accused) == {OTHERS[0]}
    state, _ = machine.step(state, Reported(peer=OTHERS[0], ready=ready(1)), 2.1)
    assert set(own_report(state).accused) == {OTHERS[0]}


def test_stranger_that_leaves_is_left_out_of_the_next_attempt_and_whom_it_accuses_is_in_no_dispute() -> None:
    roster = tuple(peer for peer in PEERS if peer != OTHERS[0])
    state, _ = machine.step(reducing(roster=roster), left_accusing(OTHERS[0], OTHERS[1]), 2.0)
    assert set(own_report(state).accused) == {OTHERS[0]}
    assert not state.faults.disputes


def test_attempt_that_a_member_leaves_names_the_missing_peer_and_not_that_member() -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    _, actions = run([*script, (2.0, left_accusing(OTHERS[1], OTHERS[0]))])
    assert [each.missing for each in actions if isinstance(each, GiveUp)] == [(OTHERS[0],)]


@pytest.mark.parametrize("heard", [True, False])
def test_coordinator_that_was_missing_before_is_asked_with_a_short_limit_until_it_is_heard(
    heard: bool,
) -> None:
    """It has cost the others its full time once. A slow but present coordinator is given the full time again later."""
    missing = coordinator_at(1)
    gone = left_accusing(next(peer for peer in PEERS if peer not in {ME, missing}), missing)
    state, actions = run([(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (2.0, gone)])
    assert [each.missing for each in actions if isinstance(each, GiveUp)] == [(missing,)]
    if heard:
        state, _ = machine.step(state, Sighted(peer=missing), 2.01)
    for now, is_short in ((2.1, not heard), (2.0 + DOUBTED_S, False)):
        due = replace(state, timers=replace(state.timers, deadline=now))
        _, actions = machine.step(due, Tick(), now)
        assert [(each.peer, each.was_missing) for each in actions if isinstance(each, Ask)] == [(missing, is_short)]


def test_coordinator_names_only_members_that_did_not_answer_as_missing() -> None:
    mine = Offered(contribution=contribution(COORDINATOR))
    state, _ = run([(0.0, mine)], setup(COORDINATOR, min_group=4))
    due = machine.wake_at(state)
    assert due is not None
    state, actions = machine.step(state, Tick(), due)
    assert actions == [Query(peers=tuple(sorted({*OTHERS, ME})), hurry=False)]
    state, _ = machine.step(state, Sighted(peer=ME), due)
    state, _ = machine.step(state, Sighted(peer=OTHERS[0]), due)
    state, _ = machine.step(state, Lost(peer=OTHERS[0], reason="gone"), due)
    due = machine.wake_at(state)
    assert due is not None
    _, actions = machine.step(state, Tick(), due)
    [notice] = [each for each in actions if isinstance(each, GiveUp)]
    assert notice.missing == tuple(sorted(OTHERS))
    assert f"there, and not ready: {short_id(ME)}" in notice.reason


def test_grace_follows_from_the_members_last_interval() -> None:
    reports: Script = [(1.0, Reported(peer=peer, ready=ready())) for peer in OTHERS]
    mine = Offered(contribution=contribution(COORDINATOR), interval_s=40.0)
    state, _ = run([(0.0, mine), *reports], setup(COORDINATOR))
    assert state.timers.grace_until == 11.0
    state, _ = machine.step(machine.begin(setup(COORDINATOR), accused={}, interval_s=40.0), *reversed(reports[0]))
    state, _ = machine.step(state, *reversed(reports[1]))
    assert state.timers.grace_until == 11.0


def test_repeated_report_of_a_waiting_member_changes_nothing() -> None:
    state, _ = run([(1.0, Reported(peer=OTHERS[0], ready=ready()))], setup(COORDINATOR))
    again, actions = machine.step(state, Reported(peer=OTHERS[0], ready=ready()), 2.0)
    assert again is state
    assert actions == []
    changed, _ = machine.step(state, Reported(peer=OTHERS[0], ready=ready(leaving=True)), 2.0)
    assert changed.reports[OTHERS[0]].leaving


def test_member_names_the_peers_for_which_it_waits() -> None:
    reports: Script = [(1.0, Reported(peer=OTHERS[0], ready=ready()))]
    state, _ = run([(0.0, Offered(contribution=contribution(COORDINATOR))), *reports], setup(COORDINATOR))
    assert awaited_peers(state) == tuple(sorted((ME, OTHERS[1])))
    assert num_lacking(state) == 0
    state, _ = run([(0.0, Offered(contribution=contribution(COORDINATOR)))], setup(COORDINATOR, roster=()))
    assert (awaited_peers(state), num_lacking(state)) == ((), 1), "a new run has no members to name"
    state, _ = run([(0.0, OFFER)])
    assert (awaited_peers(state), num_lacking(state)) == ((COORDINATOR,), 0)
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    assert awaited_peers(run(script)[0]) == ()
    script += [(2.0, Reduced(attempt=0, outcome=OUTCOME)), (2.1, vote_of(COORDINATOR, FIRST, OUTCOME))]
    assert awaited_peers(run(script)[0]) == tuple(sorted(OTHERS))


def test_many_strangers_keep_no_member_from_voting_or_reporting() -> None:
    script: Script = [(0.0, replace(vote_of(ME, FIRST, OUTCOME), peer=f"stranger {number}")) for number in range(1100)]
    script += [(1.0, OFFER), (2.0, Grouped(signed=FIRST)), (3.0, Reduced(attempt=0, outcome=OUTCOME))]
    script += [(3.1, vote_of(peer, FIRST, OUTCOME)) for peer in PEERS]
    state, _ = run([*script, *((3.2, commit_vote_of(peer, FIRST, OUTCOME)) for peer in PEERS)])
    assert state.phase == "done"
    script = [
        (0.0, Reported(peer=f"stranger {number}", ready=ready(num_tokens=0, num_samples=0))) for number in range(1100)
    ]
    state, _ = run([*script, (1.0, Reported(peer=OTHERS[0], ready=ready()))], setup(COORDINATOR))
    assert OTHERS[0] in state.reports


def test_votes_of_peers_that_the_run_does_not_admit_are_not_kept() -> None:
    for vote in (vote_of(PEERS[3], FIRST, OUTCOME), commit_vote_of(PEERS[3], FIRST, OUTCOME)):
        state, _ = run([(0.0, vote)], setup(COORDINATOR, roster=(), admission=PEERS[:3]))
        assert not state.votes["prepare"]
        assert not state.votes["commit"]


@pytest.mark.parametrize("by_report", [True, False])
def test_single_peer_that_names_one_attempt_after_another_is_followed_three_times(by_report: bool) -> None:
    state, _ = run([(0.0, OFFER)])
    for later in range(1, 2000):
        event = Reported(peer=OTHERS[0], ready=ready(later)) if by_report else Sighted(peer=OTHERS[0], attempt=later)
        state, _ = machine.step(state, event, 0.01 * later)
    assert state.attempts.num_moved == MAX_LONE_MOVES
    assert state.attempt < 50


def test_attempt_that_more_than_a_third_have_reached_is_followed_exactly_and_however_often() -> None:
    """Members that wait for others for a day stay together, and near the first attempts."""
    state, _ = run([(0.0, OFFER)])
    for later in range(10, 5000):
        state, _ = machine.step(state, Sighted(peer=OTHERS[0], attempt=2 * later), later)
        state, _ = machine.step(state, Sighted(peer=OTHERS[1], attempt=later), later)
        if later > 100:
            assert state.attempt == later


def test_later_attempt_that_was_named_too_soon_begins_when_it_is_due() -> None:
    """The peer that named it waits there, and does not repeat it soon."""
    script: Script = [
        (0.0, OFFER),
        (1.0, Sighted(peer=OTHERS[0], attempt=1)),
        (1.01, Sighted(peer=OTHERS[0], attempt=2)),
    ]
    state, _ = run(script)
    assert state.attempt == 1
    due = machine.wake_at(state)
    assert due is not None
    assert due - 1.0 < 0.1
    state, _ = machine.step(state, Tick(), due)
    assert state.attempt == 2


def test_votes_are_counted_without_listing_the_members_anew_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    _, script = member_commits()
    state, _ = run(script[:8])
    listed, list_members = [], Group.peer_ids.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Group, "peer_ids", property(lambda group: listed.append(1) or list_members(group)))
    assert len(valid_votes(state, "prepare")) == 3
    assert len(listed) == 1


def test_coordinator_that_names_one_attempt_after_another_is_given_up() -> None:
    state, _ = run([(0.0, OFFER), (0.1, Moved(attempt=0, to=4))])
    coordinator = state.coordinator
    state, actions = machine.step(state, Moved(attempt=4, to=9, reason="1 of 2 is ready"), 0.11)
    (notice,) = [each for each in actions if isinstance(each, GiveUp)]
    assert notice.reason == f'the coordinator {short_id(coordinator)} gave the attempt up, and says "1 of 2 is ready"'
    assert (state.attempt, state.phase) == (5, "resting")


def test_attempt_that_a_stranger_names_is_ignored_while_roster_members_are_left() -> None:
    state, _ = run([(0.0, OFFER), (1.0, Reported(peer="stranger", ready=ready(3)))])
    assert state.attempt == 0
    state, _ = machine.step(state, Reported(peer=OTHERS[0], ready=ready(3)), 1.0)
    assert state.attempt == 3


def test_member_without_tokens_waits_for_training_members_and_moves_them_without_shortage() -> None:
    """A validating member reports at once. The others' long intervals must not look to it like a withheld group, and
    once it has moved them on, a bare majority must not be enough for them."""
    idle, _ = run([(0.0, Offered(contribution=replace(contribution(ME), num_tokens=0, num_samples=0)))])
    busy, _ = run([(0.0, OFFER)])
    assert idle.asked == COORDINATOR
    assert (idle.timers.waits_until or 0.0) > MIN_WORK_DUE_S > 10 * (busy.timers.waits_until or 0.0) > 0.0
    training, _ = run([(1.0, Reported(peer=OTHERS[0], ready=ready(3)))])
    moved, _ = run([(0.0, OFFER), (1.0, Reported(peer=OTHERS[0], ready=ready(3)))])
    assert (training.attempt, training.attempts.short_since) == (3, None)
    assert (moved.attempt, moved.attempts.short_since) == (3, 1.0)


def test_trainer_outside_the_roster_ends_no_attempt_and_follows_roster_members_to_the_next() -> None:
    """When a coordinator withholds the group, roster members move on, and the others only wait for them."""
    outside = setup(roster=(COORDINATOR, *OTHERS))
    state, _ = run([(0.0, OFFER), (10_000.0, Tick())], outside)
    assert (state.phase, state.attempt, machine.wake_at(state)) == ("forming", 0, None)
    state, actions = machine.step(state, Sighted(peer=OTHERS[0], attempt=1), 10_001.0)
    assert state.attempt == 1
    assert any(isinstance(action, Ask) for action in actions)


def test_trainer_outside_the_roster_stays_at_its_attempt_while_the_roster_is_away() -> None:
    """Roster members do not follow it to later attempts. After an hour they would need hours to get there."""
    state, actions = run([(0.0, OFFER)], setup(roster=(COORDINATOR, OTHERS[0])))
    now, reports = 0.0, list[Contribution]()
    while now < 3600.0:
        if asked := [each for each in actions if isinstance(each, Ask)]:
            reports.append(asked[0].ready.contribution_of(ME))
            event: Event = Lost(peer=asked[0].peer, reason="gone")
        else:
            event, now = Tick(), machine.wake_at(state) or now
        state, actions = machine.step(state, event, now)
    assert state.attempt <= 1
    assert len(reports) > 100
    assert len(set(reports)) == 1, "two reports for one attempt would convict it"
    state, actions = machine.step(state, Sighted(peer=OTHERS[0], attempt=3), now)
    assert state.attempt == 3


def test_attempt_number_that_leaves_no_room_for_later_ones_is_ignored() -> None:
    """One message could otherwise move all members to the last possible attempt."""
    last = limits.MAX_ATTEMPT
    state, _ = run([(0.0, OFFER), (1.0, Reported(peer=OTHERS[0], ready=ready(last)))])
    assert state.attempt == 0
    state, _ = run([(0.0, OFFER), (1.0, Moved(attempt=0, to=last))])
    assert (state.attempt, state.phase) == (1, "resting"), "the next coordinator must be asked"
    state, _ = run([(0.0, OFFER), (1.0, Sighted(peer=OTHERS[0], attempt=last))], setup(roster=()))
    assert state.attempt == 0


def test_attempt_that_a_single_peer_names_leaves_room_to_follow_others_afterwards() -> None:
    """A member that comes back could otherwise never follow the others from there, and the run would wait for it."""
    state, _ = run([(0.0, OFFER), (1.0, Sighted(peer=OTHERS[0], attempt=MAX_BELIEVED_ATTEMPT))])
    assert state.attempt == 0
    state, _ = machine.step(state, Sighted(peer=OTHERS[1], attempt=MAX_BELIEVED_ATTEMPT), 1.0)
    assert state.attempt == MAX_BELIEVED_ATTEMPT


def test_member_that_votes_twice_is_accused_and_its_first_vote_counts() -> None:
    first, second = vote_of(COORDINATOR, FIRST, OUTCOME), vote_of(COORDINATOR, FIRST, outcome(FIRST, b"x"))
    state, _ = run([(0.0, OFFER), (0.1, Grouped(signed=FIRST)), (0.2, first), (0.3, second)])
    assert state.faults.accused == {COORDINATOR: "voted twice"}
    assert state.votes["prepare"][COORDINATOR] == first.vote


def test_member_that_voted_in_the_attempt_before_a_resume_order_has_not_voted_twice() -> None:
    vote = vote_of(COORDINATOR, FIRST, OUTCOME)
    earlier = Voted(peer=COORDINATOR, vote=replace(vote.vote, sequence=1, outcome=outcome(FIRST, b"x")))
    for votes in ([vote, earlier], [earlier, vote]):
        state, _ = run([(0.0, OFFER), (0.1, Grouped(signed=FIRST)), *((0.2, each) for each in votes)])
        assert not state.faults.accused
        assert state.votes["prepare"][COORDINATOR] == vote.vote


def test_strangers_that_vote_twice_are_not_accused() -> None:
    """The number of strangers is unlimited, and a report can name only a limited number of peers."""
    other = outcome(FIRST, b"t")
    script: Script = [
        (0.0, vote_of(f"stranger {number}", FIRST, each)) for number in range(300) for each in (OUTCOME, other)
    ]
    state, actions = run([*script, (1.0, OFFER)])
    assert not state.faults.accused
    assert any(isinstance(action, Ask) for action in actions)


def test_report_names_accused_roster_members_before_former_ones() -> None:
    former = [Identity(number.to_bytes(32, "big")).peer_id for number in range(1, 300)]
    state = machine.begin(setup(), accused=dict.fromkeys([*former, OTHERS[0]], "it lied"))
    _, actions = machine.step(state, OFFER, 0.0)
    (ask,) = [action for action in actions if isinstance(action, Ask)]
    assert len(ask.ready.accused) == limits.MAX_GROUP_MEMBERS
    assert OTHERS[0] in ask.ready.accused


def test_coordinator_waits_for_others_in_place_of_a_member_that_it_will_leave_out() -> None:
    """It would otherwise give up as soon as all members of the state are there, and never meet one that is not."""
    liar, honest = OTHERS[0], OTHERS[1]
    state = machine.begin(
        setup(COORDINATOR, min_group=3, roster=(COORDINATOR, liar, honest)), accused={liar: "it lied"}
    )
    for peer in (liar, honest):
        state, actions = machine.step(state, Reported(peer=peer, ready=ready()), 0.0)
        assert actions == []
    state, actions = machine.step(state, OFFER, 0.1)
    assert (state.phase, actions) == ("forming", [])
    state, (sign,) = machine.step(state, Reported(peer=ME, ready=ready()), 0.2)
    assert isinstance(sign, Sign)
    assert liar not in sign.group.peer_ids


def test_coordinator_waits_for_others_in_place_of_a_member_that_others_accuse() -> None:
    liar, newcomer = OTHERS[0], Identity(b"n" * 32).peer_id
    state = machine.begin(setup(COORDINATOR, min_group=4), accused={})
    for peer in (ME, OTHERS[1]):
        state, _ = machine.step(state, Reported(peer=peer, ready=ready(accused=(liar,))), 0.0)
    state, _ = machine.step(state, Reported(peer=liar, ready=ready()), 0.0)
    state, actions = machine.step(state, OFFER, 0.1)
    assert (state.phase, actions) == ("forming", [])
    report = ready(num_tokens=0, num_samples=0)
    state, (sign,) = machine.step(state, Reported(peer=newcomer, ready=report), 0.2)
    assert isinstance(sign, Sign)
    assert set(sign.group.peer_ids) == {COORDINATOR, ME, OTHERS[1], newcomer}


def test_coordinator_forms_the_group_without_its_own_work_when_its_interval_takes_long() -> None:
    script: Script = [(0.0, Reported(peer=peer, ready=ready())) for peer in (ME, *OTHERS)]
    state, actions = run([*script, (1.0, Tick()), (2.0, Tick())], setup(COORDINATOR))
    assert state.phase == "signing"
    (sign,) = actions
    assert isinstance(sign, Sign)
    assert next(member for member in sign.group.members if member.peer_id == COORDINATOR).num_tokens == 0
    # its interval ends after signing and before it receives its own group
    own = SignedGroup(group=sign.group, signer=COORDINATOR, data=b"own", digest=b"o" * 32)
    state, _ = machine.step(state, Offered(contribution=contribution(COORDINATOR)), 2.0)
    state, actions = machine.step(state, Grouped(signed=own), 2.0)
    assert isinstance(actions[0], Reduce)


def test_coordinator_waits_for_its_own_interval_when_the_group_is_full() -> None:
    script: Script = [(0.0, Reported(peer=peer, ready=ready())) for peer in (ME, *OTHERS)]
    state, actions = run(script, setup(COORDINATOR, max_group=4))
    assert (state.phase, actions) == ("forming", [])
    _, (sign,) = machine.step(state, Offered(contribution=contribution(COORDINATOR)), 0.1)
    assert isinstance(sign, Sign)
    assert all(member.num_tokens for member in sign.group.members)


def test_coordinator_asks_absent_members_where_they_are_and_then_to_hurry() -> None:
    script: Script = [(0.0, Offered(contribution=contribution(COORDINATOR))), (0.5, Reported(peer=ME, ready=ready()))]
    state, actions = run(script, setup(COORDINATOR))
    assert actions == [Query(peers=tuple(sorted(OTHERS)), hurry=False)]
    state, actions = machine.step(state, Tick(), 1.5)
    assert actions == [Query(peers=tuple(sorted(OTHERS)), hurry=True)]
    # one is found dead and the other one reports: nobody is missing any more
    state, actions = machine.step(state, Lost(peer=OTHERS[0], reason="gone"), 1.6)
    assert actions == []
    state, actions = machine.step(state, Reported(peer=OTHERS[1], ready=ready()), 1.7)
    assert isinstance(actions[0], Sign)


def test_vote_of_an_earlier_attempt_that_did_not_arrive_does_not_end_a_later_attempt() -> None:
    """Its call may take five seconds to fail, and the peer may be back by then."""
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    script += [(2.0, ReduceFailed(attempt=0, reason="it left")), (7.0, Tick())]
    state, asked = run(script)
    coordinator = coordinator_at(1)
    assert [each.peer for each in asked if isinstance(each, Ask)] == [coordinator]
    late = Lost(peer=coordinator, reason="no answer", attempt=0)
    assert machine.step(state, late, 7.1) == (state, [])
    given_up, _ = machine.step(state, replace(late, attempt=1), 7.1)
    assert given_up.attempt == 2


def test_vote_of_an_earlier_attempt_that_did_not_arrive_does_not_silence_a_member_in_a_later_vote() -> None:
    state = replace(member_voting(), attempt=1)
    assert machine.step(state, Lost(peer=OTHERS[0], reason="no answer", attempt=0), 9.0) == (state, [])
    state, _ = machine.step(state, Lost(peer=OTHERS[0], reason="no answer", attempt=1), 9.0)
    assert OTHERS[0] in state.silent


def member_voting() -> RoundState:
    return run([(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (2.0, Reduced(attempt=0, outcome=OUTCOME))])[0]


def test_member_that_is_behind_or_at_an_earlier_attempt_is_answered_so() -> None:
    script: Script = [(0.0, OFFER), (1.0, Moved(attempt=0, to=4))]
    _, actions = run([*script, (2.0, Reported(peer=OTHERS[0], ready=ready(1)))])
    assert [(type(each), each.reply.kind, each.reply.attempt) for each in actions if isinstance(each, Reply)] == [
        (Reply, "attempt", 4)
    ]
    _, actions = run([*script, (2.0, Reported(peer=OTHERS[0], ready=ready(4, state_digest=b"x" * 32)))])
    assert actions[0].reply.kind == "behind"  # type: ignore[union-attr]


def test_coordinator_blames_a_member_that_withholds_the_parts_for_which_it_voted() -> None:
    withheld = {"lock": locked(FIRST), "origin": FIRST.data}
    start, me = setup(COORDINATOR, first_attempt=4), Offered(contribution=contribution(COORDINATOR))
    script: Script = [(0.0, Reported(peer=peer, ready=ready(4))) for peer in OTHERS]
    script += [(0.5, Reported(peer=ME, ready=ready(4, **withheld))), (0.6, me)]
    assert machine.begin(start, accused={}).coordinator == COORDINATOR
    state, (sign,) = run(script, start)
    assert isinstance(sign, Sign)
    own = SignedGroup(group=sign.group, signer=COORDINATOR, data=b"own", digest=b"o" * 32)
    state, (recover,) = machine.step(state, Grouped(signed=own), 2.0)
    assert isinstance(recover, Recover)
    assert recover.is_audited, "a lock shows that honest members have audited the parts"
    state, _ = machine.step(state, ReduceFailed(attempt=4, reason="cannot be had"), 3.0)
    assert set(state.faults.unreachable) == {ME}


def test_member_that_came_back_resumes_the_outcome_of_a_group_in_which_it_was_leaving() -> None:
    """All members of a run may be stopped and started again while they vote."""
    members = tuple(replace(each, leaving=True) for each in FIRST.group.members)
    origin = replace(FIRST, group=replace(FIRST.group, members=members))
    coordinator = machine.begin(setup(ME, first_attempt=1), accused={}).coordinator
    resumed = replace(resuming(FIRST, 1, coordinator, OTHERS[0]), origin=origin)
    state, actions = run([(0.0, OFFER), (1.0, Moved(attempt=0, to=1)), (2.0, Grouped(signed=resumed))])
    assert [type(each) for each in actions] == [Recover]
    assert not state.faults.accused


def test_member_that_has_all_parts_early_waits_for_votes_until_others_must_have_reduced_and_voted() -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (2.0, Reduced(attempt=0, outcome=OUTCOME))]
    over_at = 1.0 + FIRST.group.reduce_s + FIRST.group.vote_s
    state, actions = run([*script, (over_at - 0.1, Tick())])
    assert (state.phase, any(isinstance(each, GiveUp) for each in actions)) == ("preparing", False)
    _, actions = run([*script, (over_at, Tick())])
    assert any(isinstance(each, GiveUp) for each in actions)


def test_made_up_vote_and_a_missing_one_have_no_honest_member_accused() -> None:
    liar, made_up = OTHERS[0], replace(OUTCOME, part_digests=(b"x" * 32,) * len(PEERS), state_digest=b"x" * 32)
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (2.0, Reduced(attempt=0, outcome=OUTCOME))]
    script += [(2.0, vote_of(peer, FIRST, OUTCOME)) for peer in (ME, COORDINATOR)]
    state, actions = run([*script, (2.1, vote_of(liar, FIRST, made_up)), (32.0, Tick())])
    assert any(isinstance(each, GiveUp) for each in actions)
    assert not state.faults.accused
    assert set(state.faults.unreachable) == {liar}


def test_owner_of_a_part_with_two_results_is_left_out_of_one_attempt_and_not_accused() -> None:
    """Its backup may have sent the other one in its place. Accusations last, and would keep it out of the run."""
    _, script = owner_gives_different_results()
    state, _ = run(script)
    assert set(state.faults.unreachable) == {OTHERS[0]}
    assert not state.faults.accused


@pytest.mark.parametrize(
    ("lost", "words"),
    [((), ""), ((OTHERS[0],), "2 of the 3 members of the last step that the next one needs are there")],
)
def test_member_that_loses_too_many_others_reports_how_many_the_run_needs(lost: tuple[str, ...], words: str) -> None:
    script: Script = [(0.0, OFFER), *((0.5, Lost(peer=peer, reason="x")) for peer in lost)]
    _, actions = run([*script, (1.0, Lost(peer=COORDINATOR, reason="x"))])
    (notice,) = [each for each in actions if isinstance(each, GiveUp)]
    assert words in notice.reason
    assert ("waits" in notice.reason) == bool(words)


def test_member_out_of_time_gets_what_most_voted_for_within_the_time_of_a_vote() -> None:
    """One that votes before all others could otherwise have it look for parts that nobody else has."""
    lie, group = outcome(FIRST, b"l"), FIRST.group
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (1.5, vote_of(OTHERS[0], FIRST, lie))]
    script += [(2.0, vote_of(peer, FIRST, OUTCOME)) for peer in (COORDINATOR, OTHERS[1])]
    state, (recover,) = run([*script, (1.0 + group.reduce_s, Tick())])
    assert isinstance(recover, Recover)
    assert recover.outcome == OUTCOME
    assert machine.wake_at(state) == 1.0 + group.reduce_s + group.vote_s
    state, actions = machine.step(state, Tick(), 1.0 + group.reduce_s + group.vote_s)
    assert any(isinstance(each, GiveUp) for each in actions)


def test_finished_round_ignores_all_events() -> None:
    me, script = member_commits()
    state, actions = run(script[:-1], setup(me))
    (finish,) = actions
    assert isinstance(finish, Finish)
    certificate = Certificate.from_bytes(finish.certificate)
    assert (certificate.group, certificate.outcome) == (FIRST.data, OUTCOME)
    assert [PEERS[each.place] for each in certificate.votes] == sorted((ME, OTHERS[1], COORDINATOR))
    for _, event in script:
        assert machine.step(state, event, 99.0) == (state, [])
    assert machine.wake_at(state) is None


ALL_EVENTS = [event for script in SCRIPTS.values() for _, event in script()[1]]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ALL_EVENTS), st.floats(0.0, 5.0)), max_size=40), st.sampled_from(PEERS))
def test_step_never_raises_and_votes_once_in_an_attempt_for_events_in_any_order(
    script: list[tuple[Event, float]], me: str
) -> None:
    state, now, votes = machine.begin(setup(me), accused={}), 0.0, []
    for event, pause_s in script:
        now += pause_s
        before = state.attempt
        state, actions = machine.step(state, event, now)
        votes += [(each.vote.attempt, each.vote.kind) for each in actions if isinstance(each, CastVote)]
        assert state.attempt >= before
        assert all(not isinstance(action, Ask) or action.peer != me for action in actions)
    assert len(votes) == len(set(votes))
    assert {attempt for attempt, kind in votes if kind == "commit"} <= {
        attempt for attempt, kind in votes if kind == "prepare"
    }


def test_suspect_that_spoiled_an_attempt_is_forgiven_only_after_the_next_one() -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    script.append((2.0, ReduceFailed(attempt=0, reason="x", unreachable=(OTHERS[0],))))
    state, _ = run([*script, (2.1, Reported(peer=OTHERS[0], ready=ready(1)))])
    assert set(state.faults.unreachable) == {OTHERS[0]}
    state, _ = machine.step(state, Reported(peer=OTHERS[0], ready=ready(2)), 2.2)
    assert not state.faults.unreachable


def test_peer_that_the_run_does_not_admit_is_refused_with_the_reason_and_not_kept() -> None:
    start = setup(COORDINATOR, roster=(), admission=PEERS[:3])
    stranger = PEERS[3]
    state, _ = machine.step(machine.begin(start, accused={}), Sighted(peer=stranger), 0.0)
    assert state.known == ()
    state, actions = machine.step(state, Reported(peer=stranger, ready=ready()), 1.0)
    assert [(each.peer, each.reply.kind, each.reply.reason) for each in actions if isinstance(each, Reply)] == [
        (stranger, "left_out", "the run does not admit it")
    ]
    assert not state.reports
