"""Scores on held-out data on the run's page are those that most members with the committed state report."""

from __future__ import annotations

from support.dashboard_world import trainer_record
from swarm_node.dashboard.run_views import RunEnd, RunFacts, contributors, held_out_scores
from swarm_node.network_snapshot import Listed
from swarm_protocol.identity import Identity
from swarm_protocol.records import TrainerRecord

DIGEST = bytes([7]) * 32
ANN, BOB, CYD = (Identity(bytes([number]) * 32).peer_id for number in (1, 2, 3))


def facts_of(**records: TrainerRecord) -> RunFacts:
    end = RunEnd(outer_step=4, digest=DIGEST.hex(), num_members=3)
    return RunFacts(run="story", file=None, trainers=Listed(records=records, ages_s={}), steps=(), end=end)


def test_scores_are_those_of_most_members_that_hold_the_committed_state() -> None:
    honest = trainer_record(4, digest=DIGEST, held_out_scores={ANN: 0.5, BOB: -0.25})
    liar = trainer_record(4, digest=DIGEST, held_out_scores={ANN: -100.0, BOB: 100.0, CYD: 100.0})
    behind = trainer_record(3, digest=bytes(32), held_out_scores={ANN: 9.0})
    facts = facts_of(**{ANN: honest, BOB: honest, CYD: liar, "late": behind})
    assert held_out_scores(facts) == {ANN: 0.5, BOB: -0.25}
    shown = {each.peer_id: each.held_out_score for each in contributors(facts, (), {}, {}, 0.0)}
    assert shown == {ANN: 0.5, BOB: -0.25, CYD: None, "late": None}
    assert held_out_scores(facts_of()) == {}
