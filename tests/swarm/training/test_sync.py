"""Whom a member asks who is further: pure."""

from __future__ import annotations

import torch
from swarm.training.state import ReplicaState
from swarm.training.sync import MAX_ASKED, whom_to_ask

MEMBERS = tuple(f"member {number:02}" for number in range(2 * MAX_ASKED))


def state(*roster: str) -> ReplicaState:
    initial = ReplicaState.initial(torch.zeros(1))
    return ReplicaState(
        outer_step=1, lanes=initial.lanes, roster=roster, theta_N=initial.theta_N, momentum_N=initial.momentum_N
    )


def test_whom_to_ask_among_many_strangers_that_claim_more_are_the_members_too() -> None:
    claims = {f"stranger {number}": 10**6 for number in range(100)} | dict.fromkeys(MEMBERS[:2], 3)
    asked = whom_to_ask(claims, state(*MEMBERS))
    assert asked[:2] == list(MEMBERS[:2])
    assert len(asked) == MAX_ASKED


def test_whom_to_ask_among_many_members_are_the_furthest_of_all_too() -> None:
    claims = {"new": 9} | {peer: step for step, peer in enumerate(MEMBERS)}
    asked = whom_to_ask(claims, state(*MEMBERS))
    assert len(asked) == len(set(asked)) == MAX_ASKED
    assert set(MEMBERS[-MAX_ASKED // 2 :]) <= set(asked)
    assert "new" in whom_to_ask({**claims, "new": 99}, state(*MEMBERS))
