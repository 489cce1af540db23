"""Tests that some of the peers which show one state are asked how it follows from the trusted one."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import cast

import pytest
from swarm.testing import virtual_time
from swarm.training.state.ancestry import LATE_S, STRANGERS_S, those_following
from swarm.training.state.certificate_history import Proof
from swarm_protocol.commit_messages import Certificate, Outcome

PEERS = [f"peer {number:02}" for number in range(16)]
ANSWER_S = LATE_S / 2
VERY_LATE_S = 1e6


def shows(state: str, group: str = "members") -> Proof:
    digest = hashlib.sha256(state.encode()).digest()
    outcome = Outcome(origin_digest=digest, part_digests=(), state_digest=digest)
    return cast(Proof, SimpleNamespace(certificate=Certificate(group=group.encode(), outcome=outcome).to_bytes()))


def found(
    shown: Mapping[str, Proof], answers: Mapping[str, bool], trusted: Collection[str] = ()
) -> tuple[set[str], list[str], float]:
    """Return the peers whose states follow, the peers that were asked, and the seconds that it took. A peer without an
    entry in `answers` answers with False, very late."""
    asked = list[str]()

    async def follows(peer: str, _proof: Proof) -> bool:
        asked.append(peer)
        await asyncio.sleep(ANSWER_S if peer in answers else VERY_LATE_S)
        return answers.get(peer, False)

    async def main() -> tuple[set[str], float]:
        now = asyncio.get_running_loop().time
        began = now()
        return set(await those_following(shown, follows, trusted)), now() - began

    peers, seconds = virtual_time.run(main())
    return peers, asked, seconds


def test_only_one_of_many_peers_that_show_the_same_state_is_asked() -> None:
    shown = dict.fromkeys(PEERS, shows("state"))
    assert found(shown, dict.fromkeys(PEERS, True)) == (set(PEERS), PEERS[:1], pytest.approx(ANSWER_S))


def test_others_are_asked_when_the_first_one_refuses_or_is_late() -> None:
    shown = dict.fromkeys(PEERS, shows("state"))
    wrong, silent, _ = PEERS[:3]
    answers = {peer: peer != wrong for peer in PEERS if peer != silent}
    assert found(shown, answers) == (set(PEERS), PEERS[:3], pytest.approx(ANSWER_S + LATE_S + ANSWER_S))


def test_silent_peers_that_show_the_members_state_cost_a_newcomer_few_waits() -> None:
    shown, honest = dict.fromkeys(PEERS, shows("state")), PEERS[-1]
    # 1, 2, 4, 8 and 16 peers are asked in turn
    assert found(shown, {honest: True}) == (set(PEERS), PEERS, pytest.approx(4 * LATE_S + ANSWER_S))


def test_several_states_are_checked_concurrently_and_one_that_does_not_follow_is_left_out() -> None:
    shown = dict.fromkeys(PEERS[:14], shows("state")) | dict.fromkeys(PEERS[14:], shows("another"))
    answers = {peer: peer in PEERS[:14] for peer in PEERS}
    expected = (set(PEERS[:14]), [PEERS[0], *PEERS[14:]], pytest.approx(2 * ANSWER_S))
    assert found(shown, answers) == expected


def test_certificate_of_another_group_is_left_out_when_its_state_follows() -> None:
    """Strangers can make a group that resumes the members' outcome, and show it to a newcomer."""
    shown = dict.fromkeys(PEERS[:2], shows("state")) | {PEERS[2]: shows("state", group="strangers")}
    answers = {PEERS[0]: True, PEERS[1]: True, PEERS[2]: False}
    assert found(shown, answers) == (set(PEERS[:2]), [PEERS[0], PEERS[2]], pytest.approx(ANSWER_S))


@pytest.mark.parametrize(
    ("trusted", "answers", "expected", "seconds"),
    [
        (PEERS[:1], {PEERS[0]: True}, {PEERS[0]}, ANSWER_S + STRANGERS_S),
        (PEERS[1:2], {PEERS[0]: True}, {PEERS[0]}, VERY_LATE_S),  # a trusted peer with a slow line is waited for
        (PEERS[2:], {PEERS[0]: True}, {PEERS[0]}, ANSWER_S + STRANGERS_S),
        (PEERS[:1], {PEERS[0]: False}, set(), VERY_LATE_S),  # the slow one may be the only one that has the state
        ((), {PEERS[0]: True}, {PEERS[0]}, VERY_LATE_S),
    ],
)
def test_strangers_are_waited_for_only_shortly_once_a_state_follows(
    trusted: Collection[str], answers: Mapping[str, bool], expected: set[str], seconds: float
) -> None:
    shown = {peer: shows(f"state of {peer}") for peer in PEERS[:2]}
    assert found(shown, answers, trusted) == (expected, PEERS[:2], pytest.approx(seconds, abs=1e-3))
