"""Scripts of what happens to one member in one step, and their golden traces in `swarm/training/traces`.

To write the traces anew after a wanted change, and read the diff: `PYTHONPATH=tests python -m support.round_scripts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from swarm.training.round import round_events as events
from swarm.training.round import state_machine as machine
from swarm.training.round.clusters import Clusters
from swarm.training.round.group_members import form_group
from swarm.training.round.quorum import Succession
from swarm.training.round.round_events import (
    Action,
    AttemptLeft,
    Event,
    Grouped,
    LeftOut,
    Lost,
    Moved,
    Offered,
    Proven,
    Reduced,
    ReduceFailed,
    Reported,
    Sighted,
    Tick,
    Voted,
    Withdrew,
)
from swarm.training.round.round_state import RoundSetup, RoundState, attempt_beacon, coordinator_of
from swarm.training.standing.entrance import Entrance, Probation
from swarm.training.standing.held_out_scores import HeldOutRule, HeldOutScores
from swarm.training.standing.standings import Register, TrainerStandings
from swarm_protocol import commit_messages
from swarm_protocol import training_messages as messages
from swarm_protocol.commit_messages import Abort, Lock, Outcome, PlacedSignature, VoteKind
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Ready, SignedGroup

TRACES = Path(__file__).parents[1] / "swarm" / "training" / "traces"
PEERS = tuple(sorted(Identity(bytes([number]) * 32).peer_id for number in range(4)))
RUN, STEP, DIGEST = "run", 7, bytes(32)


SIGNATURE = bytes(64)


def coordinator_at(attempt: int, without: tuple[str, ...] = ()) -> str:
    beacon = attempt_beacon(RUN, DIGEST, STEP, attempt)
    return coordinator_of(beacon, [peer for peer in PEERS if peer not in without])


COORDINATOR = coordinator_at(0)
ME = next(peer for peer in PEERS if peer not in {COORDINATOR, coordinator_at(1, (COORDINATOR,))})
OTHERS = tuple(peer for peer in PEERS if peer not in {COORDINATOR, ME})


def setup(me: str = ME, **changes: object) -> RoundSetup:
    values: dict[str, object] = {
        "run": RUN,
        "me": me,
        "step": STEP,
        "first_attempt": 0,
        "state_digest": DIGEST,
        "roster": PEERS,
        "leased": PEERS,
        "admission": (),
        "max_group": 8,
        "samples_per_member": 10,
        "tokens_per_sample": 4,
        "num_values": 4096,
        "grace_s": 2.0,
        "reduce_s": 20.0,
        "vote_s": 10.0,
    }
    rule: dict[str, Any] = {"min_group": 2}
    rule |= {name: changes.pop(name) for name in ("min_group", "majority_after_s") if name in changes}
    return RoundSetup(**{**values, **changes}, succession=Succession(**rule))  # type: ignore[arg-type]


def contribution(peer: str) -> Contribution:
    return Contribution(peer_id=peer, num_tokens=40, num_samples=10, loss=2.5)


def ready(attempt: int = 0, **changes: object) -> Ready:
    return Ready(
        run=RUN,
        step=STEP,
        attempt=attempt,
        **{"state_digest": DIGEST, "num_tokens": 40, "num_samples": 10, "loss": 2.5, **changes},  # type: ignore[arg-type]
    )


def signed(
    members: tuple[str, ...] = PEERS, attempt: int = 0, signer: str = COORDINATOR, **changes: Any
) -> SignedGroup:
    reports = {peer: ready(attempt) for peer in members}
    return signed_of(reports, attempt, signer, **changes)


def resuming(
    first: SignedGroup, attempt: int, signer: str, holder: str, origin: SignedGroup | None = None
) -> SignedGroup:
    """Return a group of all peers, of whom `holder` has a lock of what `first` came to. `origin` replaces `first`."""
    held = {"lock": locked(first), "origin": first.data}
    reports = {peer: ready(attempt, **(held if peer == holder else {})) for peer in PEERS}
    return replace(signed_of(reports, attempt, signer), origin=origin or first)


def locked(group: SignedGroup) -> Lock:
    """Return the lock that the prepare votes of all of `group` make."""
    votes = tuple(PlacedSignature(place=place, signature=SIGNATURE) for place in range(len(group.group.members)))
    return Lock(attempt=group.group.attempt, group_digest=group.digest, outcome=outcome(group), votes=votes)


def signed_of(reports: dict[str, Ready], attempt: int, signer: str, **changes: Any) -> SignedGroup:
    """Return the group of these reports, with changes that its members may find wrong."""
    group, _ = form_group(setup(next(iter(reports)), min_group=1), attempt, reports)
    group = replace(group, **changes)
    name = f"group {attempt} by {signer[-6:]} {sorted(changes)}".encode()
    return SignedGroup(group=group, signer=signer, data=name, digest=(name * 32)[:32])


def outcome(group: SignedGroup, state: bytes = b"s") -> Outcome:
    parts = tuple(bytes([index]) * 32 for index in range(len(group.group.part_values)))
    return Outcome(origin_digest=group.digest, part_digests=parts, state_digest=state * 32)


def vote_of(peer: str, group: SignedGroup, chosen: Outcome, kind: VoteKind = "prepare") -> Voted:
    return Voted(peer=peer, vote=replace(group.vote(chosen, kind), signature=SIGNATURE))


def commit_vote_of(peer: str, group: SignedGroup, chosen: Outcome) -> Voted:
    """Return the commit vote of `peer`."""
    return vote_of(peer, group, chosen, "commit")


def left(peer: str, group: SignedGroup, reason: str) -> AttemptLeft:
    attempt = group.group.attempt
    return AttemptLeft(
        peer=peer,
        abort=Abort(run=RUN, step=STEP, attempt=attempt, group_digest=group.digest, reason=reason),
    )


# --- traces ----------------------------------------------------------------------------------------------------------

FIRST = signed()
OUTCOME = outcome(FIRST)
OFFER = Offered(contribution=contribution(ME))
SECOND_LEADER = coordinator_at(1, (COORDINATOR,))
WITHOUT_LEADER = tuple(peer for peer in PEERS if peer != COORDINATOR)
Script = list[tuple[float, Event]]


def member_commits() -> tuple[str, Script]:
    return ME, [
        (0.0, Sighted(peer=COORDINATOR)),
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.0, Grouped(signed=FIRST)),
        (6.5, vote_of(OTHERS[0], FIRST, OUTCOME)),
        (7.0, Reduced(attempt=0, outcome=OUTCOME)),
        (7.0, vote_of(ME, FIRST, OUTCOME)),
        (7.1, vote_of(OTHERS[1], FIRST, OUTCOME)),
        (7.1, commit_vote_of(ME, FIRST, OUTCOME)),
        (7.2, vote_of(COORDINATOR, FIRST, OUTCOME)),
        (7.2, commit_vote_of(OTHERS[1], FIRST, OUTCOME)),
        (7.3, commit_vote_of(COORDINATOR, FIRST, OUTCOME)),
        (7.4, commit_vote_of(OTHERS[0], FIRST, OUTCOME)),
    ]


def coordinator_waits_grace_for_a_straggler() -> tuple[str, Script]:
    group, _ = form_group(setup(COORDINATOR), 0, {peer: ready() for peer in (COORDINATOR, *OTHERS)})
    own = SignedGroup(group=group, signer=COORDINATOR, data=b"own group", digest=b"o" * 32)
    return COORDINATOR, [
        (4.0, Reported(peer=OTHERS[0], ready=ready())),
        (5.0, Offered(contribution=contribution(COORDINATOR))),
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
        (5.5, Lost(peer=COORDINATOR, reason="the connection broke")),
        (5.6, Tick()),
        (6.0, Grouped(signed=second)),
        (6.2, Reduced(attempt=1, outcome=outcome(second))),
    ]


def owner_dies_and_the_parts_come_from_who_voted() -> tuple[str, Script]:
    return ME, [
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.5, vote_of(OTHERS[0], FIRST, OUTCOME)),
        (6.6, ReduceFailed(attempt=0, reason="the connection broke", unreachable=(OTHERS[1],))),
        (6.9, Reduced(attempt=0, outcome=OUTCOME)),
        (6.9, vote_of(ME, FIRST, OUTCOME)),
        (7.0, vote_of(COORDINATOR, FIRST, OUTCOME)),
        (7.0, commit_vote_of(ME, FIRST, OUTCOME)),
        (7.1, commit_vote_of(COORDINATOR, FIRST, OUTCOME)),
        (7.1, commit_vote_of(OTHERS[0], FIRST, OUTCOME)),
    ]


def undecided_vote_is_resumed_by_the_next_attempt() -> tuple[str, Script]:
    coordinator = coordinator_at(1)
    resumed = resuming(FIRST, 1, coordinator, COORDINATOR)
    return ME, [
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.5, Reduced(attempt=0, outcome=OUTCOME)),
        (6.5, vote_of(ME, FIRST, OUTCOME)),
        (36.5, Tick()),
        (36.6, Tick()),
        (36.7, Grouped(signed=resumed)),
        (36.7, Reduced(attempt=1, outcome=OUTCOME)),
        (36.7, vote_of(ME, resumed, OUTCOME)),
        (36.8, vote_of(OTHERS[0], resumed, OUTCOME)),
        (36.8, vote_of(COORDINATOR, resumed, OUTCOME)),
        (36.8, commit_vote_of(ME, resumed, OUTCOME)),
        (36.9, commit_vote_of(OTHERS[0], resumed, OUTCOME)),
        (36.9, commit_vote_of(COORDINATOR, resumed, OUTCOME)),
    ]


def lock_that_a_member_holds_is_in_its_next_report() -> tuple[str, Script]:
    coordinator = coordinator_at(1)
    return ME, [
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.5, Reduced(attempt=0, outcome=OUTCOME)),
        (6.5, vote_of(ME, FIRST, OUTCOME)),
        (6.6, vote_of(OTHERS[0], FIRST, OUTCOME)),
        (6.6, vote_of(OTHERS[1], FIRST, OUTCOME)),
        (6.6, commit_vote_of(ME, FIRST, OUTCOME)),
        (16.6, Tick()),
        (16.7, Tick()),
        # the coordinator does not carry on what this member reported
        (16.8, Grouped(signed=signed(PEERS, 1, coordinator))),
    ]


def reduction_that_fails_is_tried_again_with_the_same_contribution() -> tuple[str, Script]:
    """An owner cannot be reached and nobody has voted: the attempt is aborted, its pseudo-gradient kept."""
    gone = OTHERS[1]
    left_peers = tuple(peer for peer in PEERS if peer != gone)
    coordinator = coordinator_at(1, (gone,))
    second = signed(left_peers, 1, coordinator)
    return ME, [
        (5.0, OFFER),
        (6.0, Grouped(signed=FIRST)),
        (6.4, ReduceFailed(attempt=0, reason="the connection broke", unreachable=(gone,))),
        (6.5, Tick()),
        (7.0, Grouped(signed=second)),
        (7.5, Reduced(attempt=1, outcome=outcome(second))),
        (7.5, vote_of(ME, second, outcome(second))),
        (7.6, vote_of(COORDINATOR, second, outcome(second))),
        (7.6, vote_of(OTHERS[0], second, outcome(second))),
        (7.6, commit_vote_of(ME, second, outcome(second))),
        (7.7, commit_vote_of(COORDINATOR, second, outcome(second))),
        (7.7, commit_vote_of(OTHERS[0], second, outcome(second))),
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
        (6.5, vote_of(ME, FIRST, OUTCOME)),
        (6.6, vote_of(OTHERS[0], FIRST, other)),
        (6.7, vote_of(OTHERS[1], FIRST, other)),
        (6.8, vote_of(COORDINATOR, FIRST, OUTCOME)),
    ]


def first_group_of_a_run_follows_the_lowest_hash_that_it_sees() -> tuple[str, Script]:
    return ME, [
        (0.0, Offered(contribution=Contribution(peer_id=ME))),
        (0.6, Sighted(peer=COORDINATOR)),
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
        lock_that_a_member_holds_is_in_its_next_report,
        reduction_that_fails_is_tried_again_with_the_same_contribution,
        coordinator_signs_two_groups,
        owner_gives_different_results,
        first_group_of_a_run_follows_the_lowest_hash_that_it_sees,
    )
}


def run(script: Script, start: RoundSetup | None = None) -> tuple[RoundState, list[Action]]:
    """Return the state, and the last event's actions."""
    state, actions = machine.begin(start or setup(), accused={}), list[Action]()
    for now, event in script:
        state, actions = machine.step(state, event, now)
    return state, actions


def play(start: RoundSetup, script: Script) -> list[dict[str, Any]]:
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
    start = setup(me, roster=()) if name.startswith("first_group") else setup(me)
    return {"setup": to_json(start), "steps": play(start, script)}


def to_json(value: Any) -> Any:
    if is_dataclass(value):
        return {"is": type(value).__name__} | {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, bytes):
        return {"is": "bytes", "hex": value.hex()}
    if isinstance(value, dict):
        return {"is": "dict", "items": [[to_json(key), to_json(each)] for key, each in value.items()]}
    return [to_json(each) for each in value] if isinstance(value, list | tuple) else value


KINDS = {
    name: kind
    for module in (events, messages, commit_messages)
    for name, kind in vars(module).items()
    if isinstance(kind, type)
} | {
    each.__name__: each
    for each in (
        Clusters,
        Entrance,
        HeldOutRule,
        HeldOutScores,
        Probation,
        Register,
        RoundSetup,
        TrainerStandings,
        Succession,
    )
}


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


if __name__ == "__main__":
    TRACES.mkdir(exist_ok=True)
    for each in SCRIPTS:
        (TRACES / f"{each}.json").write_text(json.dumps(trace(each), indent=1) + "\n")
