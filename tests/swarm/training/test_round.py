"""The round machine alone: golden traces that replay event by event, and rules that no trace may break.

Each file in `traces` is one member's life in one step: what happened, what it did, in which phase that left it. To
write them anew after a wanted change, and read the diff: `python tests/swarm/training/test_round.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm.training import round as machine
from swarm.training import round_events as events
from swarm.training.coordinator import Terms, coordinator_of, form_group
from swarm.training.round_events import (
    Action,
    Announce,
    Ask,
    CastVote,
    Event,
    Finish,
    GiveUp,
    Grouped,
    Left,
    LeftOut,
    Lost,
    Moved,
    Offered,
    Proven,
    Query,
    Recover,
    Reduce,
    Reduced,
    ReduceFailed,
    Reply,
    Reported,
    Sighted,
    Sign,
    Signed,
    Tick,
    Voted,
    Withdrew,
)
from swarm.training.round_state import RoundState
from swarm_protocol import training_messages as messages
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Abort, Certificate, Contribution, Outcome, Ready, Vote

TRACES = Path(__file__).parent / "traces"
PEERS = tuple(sorted(Identity(bytes([number]) * 32).peer_id for number in range(4)))
RUN, STEP, DIGEST = "run", 7, bytes(32)


def leader_of(attempt: int, without: tuple[str, ...] = ()) -> str:
    return coordinator_of(RUN, STEP, attempt, [peer for peer in PEERS if peer not in without])


LEADER = leader_of(0)
ME = next(peer for peer in PEERS if peer not in {LEADER, leader_of(1, (LEADER,))})
OTHERS = tuple(peer for peer in PEERS if peer not in {LEADER, ME})


def terms(me: str = ME, **changes: object) -> Terms:
    values: dict[str, object] = {
        "run": RUN,
        "me": me,
        "step": STEP,
        "first_attempt": 0,
        "state_digest": DIGEST,
        "roster": PEERS,
        "min_group": 2,
        "max_group": 8,
        "samples_per_member": 10,
        "tokens_per_sample": 4,
        "num_values": 4096,
        "grace_s": 2.0,
        "patience_s": 12.0,
        "reduce_s": 20.0,
        "vote_s": 10.0,
    }
    return Terms(**{**values, **changes})  # type: ignore[arg-type]


def contribution(peer: str) -> Contribution:
    return Contribution(peer_id=peer, num_tokens=40, num_samples=10, loss=2.5)


def ready(attempt: int = 0, **changes: object) -> Ready:
    return Ready(
        run=RUN,
        step=STEP,
        attempt=attempt,
        **{"state_digest": DIGEST, "num_tokens": 40, "num_samples": 10, "loss": 2.5, **changes},  # type: ignore[arg-type]
    )


def signed(members: tuple[str, ...] = PEERS, attempt: int = 0, signer: str = LEADER, **changes: Any) -> Signed:
    reports = {peer: ready(attempt) for peer in members}
    group, _ = form_group(terms(members[0], min_group=1), attempt, reports)
    group = replace(group, **changes)
    name = f"group {attempt} by {signer[-6:]} {sorted(changes)}".encode()
    return Signed(group=group, signer=signer, data=name, digest=(name * 32)[:32])


def outcome(group: Signed, state: bytes = b"s") -> Outcome:
    parts = tuple(bytes([index]) * 32 for index in range(len(group.group.part_values)))
    return Outcome(origin_digest=group.digest, part_digests=parts, state_digest=state * 32)


def voted(peer: str, group: Signed, chosen: Outcome) -> Voted:
    vote = Vote(run=RUN, step=STEP, attempt=group.group.attempt, group_digest=group.digest, outcome=chosen)
    return Voted(peer=peer, vote=vote, data=f"vote of {peer[-6:]}".encode())


def left(peer: str, group: Signed, reason: str) -> Left:
    attempt = group.group.attempt
    return Left(
        peer=peer,
        abort=Abort(run=RUN, step=STEP, attempt=attempt, group_digest=group.digest, reason=reason),
    )


# --- traces ----------------------------------------------------------------------------------------------------------

FIRST = signed()
OUTCOME = outcome(FIRST)
OFFER = Offered(contribution=contribution(ME))
SECOND_LEADER = leader_of(1, (LEADER,))
WITHOUT_LEADER = tuple(peer for peer in PEERS if peer != LEADER)
Script = list[tuple[float, Event]]


def member_commits() -> tuple[str, Script]:
    return ME, [
        (0.0, Sighted(peer=LEADER)),
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.0, Grouped(signed=FIRST)),
        (6.5, voted(OTHERS[0], FIRST, OUTCOME)),
        (7.0, Reduced(attempt=0, outcome=OUTCOME)),
        (7.0, voted(ME, FIRST, OUTCOME)),
        (7.1, voted(OTHERS[1], FIRST, OUTCOME)),
        (7.2, voted(LEADER, FIRST, OUTCOME)),
    ]


def coordinator_waits_grace_for_a_straggler() -> tuple[str, Script]:
    group, _ = form_group(terms(LEADER), 0, {peer: ready() for peer in (LEADER, *OTHERS)})
    own = Signed(group=group, signer=LEADER, data=b"own group", digest=b"o" * 32)
    return LEADER, [
        (4.0, Reported(peer=OTHERS[0], ready=ready())),
        (5.0, Offered(contribution=contribution(LEADER))),
        (5.2, Reported(peer=OTHERS[1], ready=ready())),
        (5.3, Withdrew(peer=OTHERS[1])),
        (5.4, Reported(peer=OTHERS[1], ready=ready())),
        (5.0 + 1.0, Tick()),
        (6.0, Tick()),
        (6.0, Grouped(signed=own)),
        (6.5, Reported(peer=ME, ready=ready())),
    ]


def coordinator_dies_and_the_next_one_takes_over() -> tuple[str, Script]:
    second = signed(WITHOUT_LEADER, 1, SECOND_LEADER)
    return ME, [
        (5.0, OFFER),
        (5.5, Lost(peer=LEADER, reason="the connection broke")),
        (5.6, Tick()),
        (6.0, Grouped(signed=second)),
        (6.2, Reduced(attempt=1, outcome=outcome(second))),
    ]


def owner_dies_and_the_parts_come_from_who_voted() -> tuple[str, Script]:
    return ME, [
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.5, voted(OTHERS[0], FIRST, OUTCOME)),
        (6.6, ReduceFailed(attempt=0, reason="the connection broke", unreachable=(OTHERS[1],))),
        (6.9, Reduced(attempt=0, outcome=OUTCOME)),
        (6.9, voted(ME, FIRST, OUTCOME)),
        (7.0, voted(LEADER, FIRST, OUTCOME)),
    ]


def undecided_vote_is_resumed_by_the_next_attempt() -> tuple[str, Script]:
    leader = leader_of(1)
    resumed = signed(PEERS, 1, leader, part_values=(), resumes=OUTCOME, origin=FIRST.data)
    return ME, [
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.5, Reduced(attempt=0, outcome=OUTCOME)),
        (6.5, voted(ME, FIRST, OUTCOME)),
        (16.5, Tick()),
        (16.6, Tick()),
        (16.7, Grouped(signed=resumed)),
        (16.7, Reduced(attempt=1, outcome=OUTCOME)),
        (16.7, voted(ME, resumed, OUTCOME)),
        (16.8, voted(OTHERS[0], resumed, OUTCOME)),
        (16.8, voted(LEADER, resumed, OUTCOME)),
    ]


def coordinator_signs_two_groups() -> tuple[str, Script]:
    return ME, [
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.1, Grouped(signed=signed(vote_s=3.0))),
    ]


def owner_gives_different_results() -> tuple[str, Script]:
    parts = OUTCOME.part_digests
    owner = PEERS.index(OTHERS[0])
    other = replace(OUTCOME, part_digests=(*parts[:owner], b"x" * 32, *parts[owner + 1 :]), state_digest=b"t" * 32)
    return ME, [
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.5, Reduced(attempt=0, outcome=OUTCOME)),
        (6.5, voted(ME, FIRST, OUTCOME)),
        (6.6, voted(OTHERS[0], FIRST, other)),
        (6.7, voted(OTHERS[1], FIRST, other)),
        (6.8, voted(LEADER, FIRST, OUTCOME)),
    ]


def first_group_of_a_run_follows_the_lowest_hash_that_it_sees() -> tuple[str, Script]:
    return ME, [
        (0.0, Offered(contribution=Contribution(peer_id=ME))),
        (0.6, Sighted(peer=LEADER)),
        (0.7, Moved(attempt=0, to=3)),
        (0.8, LeftOut(attempt=3, reason="the group is full with 8 members")),
        (1.8, Tick()),
        (2.0, Proven(certificate=b"certificate of another group")),
    ]


SCRIPTS: dict[str, Callable[[], tuple[str, Script]]] = {
    script.__name__: script
    for script in (
        member_commits,
        coordinator_waits_grace_for_a_straggler,
        coordinator_dies_and_the_next_one_takes_over,
        owner_dies_and_the_parts_come_from_who_voted,
        undecided_vote_is_resumed_by_the_next_attempt,
        coordinator_signs_two_groups,
        owner_gives_different_results,
        first_group_of_a_run_follows_the_lowest_hash_that_it_sees,
    )
}


def play(start: Terms, script: Script) -> list[dict[str, Any]]:
    state, steps = machine.begin(start, accused={}), []
    for now, event in script:
        state, actions = machine.step(state, event, now)
        steps.append(
            {
                "now": now,
                "event": to_json(event),
                "phase": state.phase,
                "attempt": state.attempt,
                "actions": to_json(actions),
            }
        )
    return steps


def trace(name: str) -> dict[str, Any]:
    me, script = SCRIPTS[name]()
    start = terms(me, roster=()) if name.startswith("first_group") else terms(me)
    return {"terms": to_json(start), "steps": play(start, script)}


def to_json(value: Any) -> Any:
    if is_dataclass(value):
        return {"is": type(value).__name__} | {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, bytes):
        return {"is": "bytes", "hex": value.hex()}
    if isinstance(value, dict):
        return {"is": "dict", "items": [[to_json(key), to_json(each)] for key, each in value.items()]}
    return [to_json(each) for each in value] if isinstance(value, list | tuple) else value


KINDS = {
    name: kind for module in (events, messages) for name, kind in vars(module).items() if isinstance(kind, type)
} | {"Terms": Terms}


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(from_json(each) for each in value)
    if not isinstance(value, dict):
        return value
    match value["is"]:
        case "bytes":
            return bytes.fromhex(value["hex"])
        case "dict":
            return {from_json(key): from_json(each) for key, each in value["items"]}
        case kind:
            return KINDS[kind](**{name: from_json(each) for name, each in value.items() if name != "is"})


@pytest.mark.parametrize("name", SCRIPTS)
def test_trace_replays_to_the_same_phases_and_actions(name: str) -> None:
    golden = json.loads((TRACES / f"{name}.json").read_text())
    start = from_json(golden["terms"])
    script = [(each["now"], from_json(each["event"])) for each in golden["steps"]]
    assert play(start, script) == golden["steps"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_trace_file_is_what_its_script_gives(name: str) -> None:
    assert json.loads((TRACES / f"{name}.json").read_text()) == json.loads(json.dumps(trace(name)))


# --- single rules ----------------------------------------------------------------------------------------------------


def run(script: Script, start: Terms | None = None) -> tuple[RoundState, list[Action]]:
    """The state, and the last event's actions."""
    state, actions = machine.begin(start or terms(), accused={}), list[Action]()
    for now, event in script:
        state, actions = machine.step(state, event, now)
    return state, actions


def test_step_with_votes_before_the_own_result_waits_for_it() -> None:
    """Others may still need this member's part, so it does not run off with a certificate."""
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    script += [(2.0, voted(peer, FIRST, OUTCOME)) for peer in (LEADER, *OTHERS)]
    state, actions = run(script)
    assert (state.phase, actions) == ("reducing", [])


def test_step_with_a_member_that_left_before_voting_ends_a_hopeless_vote_at_once() -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST)), (2.0, Reduced(attempt=0, outcome=OUTCOME))]
    script += [
        (2.0, voted(ME, FIRST, OUTCOME)),
        (2.1, left(LEADER, FIRST, "no disk")),
        (2.2, left(OTHERS[0], FIRST, "x")),
    ]
    state, actions = run(script)
    assert isinstance(actions[0], Announce)
    assert isinstance(actions[1], GiveUp)
    assert state.ballot is not None
    assert state.mine == contribution(ME), "the contribution is kept"


def test_announce_comes_before_the_attempt_is_torn_down() -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    _, actions = run([*script, (2.0, ReduceFailed(attempt=0, reason="bad slice", accused=(OTHERS[0],)))])
    assert [type(action) for action in actions] == [Announce, GiveUp]
    assert actions[0].abort.accused == (OTHERS[0],)  # type: ignore[union-attr]


def test_accused_member_stays_accused_and_unreachable_one_is_forgiven_when_heard() -> None:
    script: Script = [(0.0, OFFER), (1.0, Grouped(signed=FIRST))]
    script.append((2.0, ReduceFailed(attempt=0, reason="x", accused=(OTHERS[0],), unreachable=(OTHERS[1],))))
    state, _ = run([*script, (2.1, Reported(peer=OTHERS[1], ready=ready(1)))])
    assert set(state.accused) == {OTHERS[0]}
    assert not state.unreachable


def test_attempts_that_fail_again_and_again_rest_longer_up_to_a_bound() -> None:
    state, _ = run([(0.0, OFFER)])
    now, rests = 0.0, []
    for _ in range(12):
        state, _ = machine.step(state, Lost(peer=state.leader, reason="gone"), now)
        due = machine.wake_at(state)
        assert due is not None
        rests.append(due - now)
        # forget, so that there is always somebody to ask
        state = replace(state, unreachable={}, deadline=due)
        state, _ = machine.step(state, Tick(), due)
        state = replace(state, leader=LEADER, asked=LEADER)
        now = due
    assert rests[0] < 0.1
    assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(rests))
    assert rests[-1] == pytest.approx(5.0)


def test_reports_and_votes_of_strangers_are_bounded() -> None:
    state = machine.begin(terms(), accused={})
    for number in range(3000):
        state, _ = machine.step(state, Reported(peer=f"stranger {number}", ready=ready()), 0.0)
        state, _ = machine.step(state, replace(voted(ME, FIRST, OUTCOME), peer=f"stranger {number}"), 0.0)
    assert len(state.ready) <= 1024
    assert len(state.votes) <= 1024


def test_coordinator_whose_interval_lasts_forms_the_group_without_its_share() -> None:
    script: Script = [(0.0, Reported(peer=peer, ready=ready())) for peer in (ME, *OTHERS)]
    state, actions = run([*script, (1.0, Tick()), (2.0, Tick())], terms(LEADER))
    assert state.phase == "signing"
    (sign,) = actions
    assert isinstance(sign, Sign)
    assert next(member for member in sign.group.members if member.peer_id == LEADER).num_tokens == 0
    # its interval ends between signing and hearing of its own group
    own = Signed(group=sign.group, signer=LEADER, data=b"own", digest=b"o" * 32)
    state, _ = machine.step(state, Offered(contribution=contribution(LEADER)), 2.0)
    state, actions = machine.step(state, Grouped(signed=own), 2.0)
    assert isinstance(actions[0], Reduce)


def test_coordinator_of_a_full_group_waits_for_its_own_interval() -> None:
    script: Script = [(0.0, Reported(peer=peer, ready=ready())) for peer in (ME, *OTHERS)]
    state, actions = run(script, terms(LEADER, max_group=4))
    assert (state.phase, actions) == ("forming", [])
    _, (sign,) = machine.step(state, Offered(contribution=contribution(LEADER)), 0.1)
    assert isinstance(sign, Sign)
    assert all(member.num_tokens for member in sign.group.members)


def test_coordinator_asks_the_absent_where_they_are_and_then_to_hurry() -> None:
    script: Script = [(0.0, Offered(contribution=contribution(LEADER))), (0.5, Reported(peer=ME, ready=ready()))]
    state, actions = run(script, terms(LEADER))
    assert actions == [Query(peers=tuple(sorted(OTHERS)), hurry=False)]
    state, actions = machine.step(state, Tick(), 1.5)
    assert actions == [Query(peers=tuple(sorted(OTHERS)), hurry=True)]
    # one is found dead, the other comes: nobody is waited for any more
    state, actions = machine.step(state, Lost(peer=OTHERS[0], reason="gone"), 1.6)
    assert actions == []
    state, actions = machine.step(state, Reported(peer=OTHERS[1], ready=ready()), 1.7)
    assert isinstance(actions[0], Sign)


def test_member_behind_is_told_and_an_earlier_attempt_corrected() -> None:
    script: Script = [(0.0, OFFER), (1.0, Moved(attempt=0, to=4))]
    _, actions = run([*script, (2.0, Reported(peer=OTHERS[0], ready=ready(1)))])
    assert [(type(each), each.reply.kind, each.reply.attempt) for each in actions if isinstance(each, Reply)] == [
        (Reply, "attempt", 4)
    ]
    _, actions = run([*script, (2.0, Reported(peer=OTHERS[0], ready=ready(4, state_digest=b"x" * 32)))])
    assert actions[0].reply.kind == "behind"  # type: ignore[union-attr]


def test_coordinator_blames_who_does_not_give_the_parts_it_says_it_voted_for() -> None:
    made_up = {"voted": OUTCOME, "voted_origin": b"made up", "voted_attempt": 0}
    script: Script = [(0.0, Reported(peer=peer, ready=ready())) for peer in OTHERS]
    script += [(0.5, Reported(peer=ME, ready=ready(**made_up))), (0.6, Offered(contribution=contribution(LEADER)))]
    state, (sign,) = run(script, terms(LEADER))
    assert isinstance(sign, Sign)
    own = Signed(group=sign.group, signer=LEADER, data=b"own", digest=b"o" * 32)
    state, (recover,) = machine.step(state, Grouped(signed=own), 2.0)
    assert isinstance(recover, Recover)
    state, _ = machine.step(state, ReduceFailed(attempt=0, reason="cannot be had"), 3.0)
    assert set(state.unreachable) == {ME}


def test_finished_round_ignores_everything() -> None:
    me, script = member_commits()
    state, actions = run(script[:-1], terms(me))
    (finish,) = actions
    assert isinstance(finish, Finish)
    assert len(Certificate.from_bytes(finish.certificate).votes) == 3
    for _, event in script:
        assert machine.step(state, event, 99.0) == (state, [])
    assert machine.wake_at(state) is None


ALL_EVENTS = [event for script in SCRIPTS.values() for _, event in script()[1]]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ALL_EVENTS), st.floats(0.0, 5.0)), max_size=40), st.sampled_from(PEERS))
def test_step_in_any_order_of_events_never_raises_and_votes_once_an_attempt(
    script: list[tuple[Event, float]], me: str
) -> None:
    state, now, votes = machine.begin(terms(me), accused={}), 0.0, []
    for event, pause_s in script:
        now += pause_s
        before = state.attempt
        state, actions = machine.step(state, event, now)
        votes += [action.vote.attempt for action in actions if isinstance(action, CastVote)]
        assert state.attempt >= before
        assert all(not isinstance(action, Ask) or action.peer != me for action in actions)
    assert len(votes) == len(set(votes))


if __name__ == "__main__":
    TRACES.mkdir(exist_ok=True)
    for each in SCRIPTS:
        (TRACES / f"{each}.json").write_text(json.dumps(trace(each), indent=1) + "\n")
