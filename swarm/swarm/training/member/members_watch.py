"""Looks where the other members of a run are: beside the step that is driven, and at the end of the run.

Members of a round tell each other what they do, so looking is for the one that missed a round, or that works apart from
others without knowing. What this costs is the same in a run of thousands, and less the longer its intervals are. A
follower whose head is there looks most rarely, from its first interval on: nearly all of a large run are followers. The
look of a step is a task of `OuterSteps`; what it has read is kept for the next step. A member that is done stays to
serve the last state to members that lack it (`let_others_finish`).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

from swarm_protocol.errors import PeerError

from swarm.network.membership import Membership
from swarm.training.member.round_driver import RoundDriver
from swarm.training.round.round_events import Proven
from swarm.training.state.certificate_history import whom_to_ask
from swarm.training.state.run_context import RunContext
from swarm.training.state.state_sync import claims_of, furthest, trainers

LINGER_S = 30.0

LOOK_S = 1.0

NUM_WATCHED = 2
"""Number of others that are asked where they are each time."""

WATCH_S, MAX_WATCH_S = 5.0, 30.0
LIST_S, MAX_LIST_S = 15.0, 60.0
FIRST_WATCH_S = 0.5
"""Seconds between two looks, and between two reads of the membership, when a run's first group forms, as nothing else
says who is there; less often the longer its members train or wait."""


def watch_s(interval_s: float) -> float:
    """Return the seconds after which others are asked again, by a member that trains for `interval_s` at a time: a
    twentieth of that, between WATCH_S and MAX_WATCH_S. Who missed a round loses no more of an interval by it."""
    return min(MAX_WATCH_S, max(WATCH_S, interval_s / 20))


def list_s(interval_s: float) -> float:
    """Return the seconds between two reads of the membership by a member that trains for `interval_s` at a time: a
    fifth of that, between LIST_S and MAX_LIST_S. Newcomers ask the others on arrival."""
    return min(MAX_LIST_S, max(LIST_S, interval_s / 5))


class MembersWatch:
    """Remembers what the other members say of themselves, and asks some of them. `chance` draws whom; `on_look` is
    called at each look."""

    def __init__(self, membership: Membership, chance: random.Random, on_look: Callable[[RunContext], None]) -> None:
        self._membership = membership
        self._chance = chance
        self._on_look = on_look
        self._claims: dict[str, int] = {}
        self._list_at_s = 0.0

    async def run(self, driver: RoundDriver, context: RunContext, interval_s: float) -> None:
        """Ask other members of the run where they are: those that seem to be further, or else some drawn by chance.
        While a first group forms, ask many. Runs until cancelled, and this member's intervals take `interval_s`."""
        roster, me, now = driver.setup.roster, context.network.peer_id, asyncio.get_running_loop().time
        began_s = now()
        while True:
            # a head tells a follower at once what is committed, and is missed when it goes
            trains_s = math.inf if driver.is_led else interval_s
            if not roster or now() >= self._list_at_s:
                await self._list(context, trains_s)
            claims = dict.fromkeys(driver.known, 0) | self._claims
            peers = whom_to_ask(claims, roster, me)
            if roster:
                further = [peer for peer in peers if claims[peer] > context.replica.outer_step]
                peers = (further or self._chance.sample(peers, len(peers)))[:NUM_WATCHED]
            for peer in peers:
                driver.look_at(peer)
            if context.replica.is_new:
                proof = await furthest(context, claims)
                if proof is not None and proof.rank > context.replica.rank:
                    driver.feed(Proven(certificate=proof.certificate))
            self._on_look(context)
            passed_s = driver.waiting.seconds if driver.waiting else now() - began_s
            # one that waits does nothing, and may wait because it missed something
            pause_s = WATCH_S if driver.waiting and not driver.is_led else watch_s(trains_s)
            await asyncio.sleep(pause_s if roster else min(WATCH_S, max(FIRST_WATCH_S, passed_s / 4)))

    async def _list(self, context: RunContext, interval_s: float) -> None:
        """Read what other members say of themselves; once more soon, if that fails."""
        records = await trainers(self._membership, context.run)
        self._claims = claims_of(context, {peer: each for peer, each in records.items() if each.state != "leaving"})
        self._list_at_s = asyncio.get_running_loop().time() + (list_s(interval_s) if records else WATCH_S)


async def let_others_finish(
    membership: Membership,
    run: str,
    me: str,
    leaving: asyncio.Event | None = None,
    on_wait: Callable[[tuple[str, ...], float], None] = lambda _peers, _seconds: None,
) -> None:
    """Return once all other members of `run` have the last state too, after LINGER_S, or when `leaving` is set.

    If one look is not enough, `on_wait` is called once with the peers that this waits for and the seconds left.
    """
    leaving = leaving or asyncio.Event()
    now = asyncio.get_running_loop().time
    until_s, num_looks = now() + LINGER_S, 0
    while now() < until_s and (behind := await _behind(membership, run, me)):
        num_looks += 1
        if num_looks == 2:
            on_wait(behind, until_s - now())
        try:
            async with asyncio.timeout(LOOK_S):
                await leaving.wait()
            return
        except TimeoutError:
            continue


async def _behind(membership: Membership, run: str, me: str) -> tuple[str, ...]:
    try:
        trainers = await membership.trainers(run)
    except PeerError:
        return ()
    others = {peer_id: record for peer_id, record in trainers.items() if peer_id != me}
    return tuple(peer_id for peer_id, record in others.items() if record.state in {"joining", "training"})
