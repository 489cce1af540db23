"""Some of the peers that show one state are asked how it follows from what is trusted."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest
from swarm.testing import virtual_time
from swarm.training.state.ancestry import LATE_S, those_following
from swarm.training.state.certificate_history import Proof
from swarm_protocol.commit_messages import Certificate, Outcome

PEERS = [f"peer {number:02}" for number in range(16)]
ANSWER_S = LATE_S / 2


def shows(state: str, group: str = "members") -> Proof:
    digest = hashlib.sha256(state.encode()).digest()
    outcome = Outcome(origin_digest=digest, part_digests=(), state_digest=digest)
    return cast(Proof, SimpleNamespace(certificate=Certificate(group=group.encode(), outcome=outcome).to_bytes()))


def found(shown: Mapping[str, Proof], answers: Mapping[str, bool]) -> tuple[set[str], list[str], float]:
    """Return the peers whose states follow, those that were asked, and the seconds that it took. Who has no answer is
    silent."""
    asked = list[str]()

    async def follows(peer: str, _proof: Proof) -> bool:
        asked.append(peer)
        await asyncio.sleep(ANSWER_S if peer in answers else 1e6)
        return answers[peer]

    async def main() -> tuple[set[str], float]:
        now = asyncio.get_running_loop().time
        began = now()
        return set(await those_following(shown, follows)), now() - began

    peers, seconds = virtual_time.run(main())
    return peers, asked, seconds


def test_one_of_many_that_show_one_state_is_asked_how_it_follows() -> None:
    shown = dict.fromkeys(PEERS, shows("state"))
    assert found(shown, dict.fromkeys(PEERS, True)) == (set(PEERS), PEERS[:1], pytest.approx(ANSWER_S))


def test_others_are_asked_when_the_first_does_not_show_it_or_is_late() -> None:
    shown = dict.fromkeys(PEERS, shows("state"))
    wrong, silent, _ = PEERS[:3]
    answers = {peer: peer != wrong for peer in PEERS if peer != silent}
    assert found(shown, answers) == (set(PEERS), PEERS[:3], pytest.approx(ANSWER_S + LATE_S + ANSWER_S))


def test_silent_peers_that_show_what_members_have_made_cost_a_newcomer_few_waits() -> None:
    shown, honest = dict.fromkeys(PEERS, shows("state")), PEERS[-1]
    # 1, 2, 4, 8 and 16 are asked
    assert found(shown, {honest: True}) == (set(PEERS), PEERS, pytest.approx(4 * LATE_S + ANSWER_S))


def test_states_are_asked_for_at_the_same_time_and_one_that_nobody_shows_to_follow_is_left_out() -> None:
    shown = dict.fromkeys(PEERS[:14], shows("state")) | dict.fromkeys(PEERS[14:], shows("another"))
    answers = {peer: peer in PEERS[:14] for peer in PEERS}
    expected = (set(PEERS[:14]), [PEERS[0], *PEERS[14:]], pytest.approx(2 * ANSWER_S))
    assert found(shown, answers) == expected


def test_certificate_of_another_group_for_a_state_that_follows_is_left_out() -> None:
    """Strangers can make a group of their own that resumes what members have made, and show it to a newcomer."""
    shown = dict.fromkeys(PEERS[:2], shows("state")) | {PEERS[2]: shows("state", group="strangers")}
    answers = {PEERS[0]: True, PEERS[1]: True, PEERS[2]: False}
    assert found(shown, answers) == (set(PEERS[:2]), [PEERS[0], PEERS[2]], pytest.approx(ANSWER_S))
