"""Asks where the other members of a run are, during each step and at the end of the run.

Members of a round tell each other what they do. The watch is for a member that missed a round, or that is cut off from
the others without knowing. Its cost does not grow with the size of the run, and falls with the length of the intervals.
A follower whose head is there asks most rarely, from its first interval on, since nearly all trainers of a large run
are followers. `OuterSteps` runs the watch as a task of each step, and keeps what it has read for the next step. A
member that is done stays to serve the last state to members that lack it, and to show it to peers that watch
(`let_others_finish`).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Sequence

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
"""Number of other members that are asked each time."""

WATCH_S, MAX_WATCH_S = 5.0, 30.0
LIST_S, MAX_LIST_S = 15.0, 60.0
FIRST_WATCH_S = 0.5
"""Shortest pause in seconds between two looks while a run's first group forms, when nothing else says who is there. The
pauses grow the longer the members train or wait."""


def watch_s(interval_s: float) -> float:
    """Return the seconds after which a member that trains for `interval_s` at a time asks others again: a twentieth of
    that, between WATCH_S and MAX_WATCH_S. A member that missed a round thus loses no larger share of an interval."""
    return min(MAX_WATCH_S, max(WATCH_S, interval_s / 20))


def list_s(interval_s: float) -> float:
    """Return the seconds between two reads of the membership by a member that trains for `interval_s` at a time: a
    fifth of that, between LIST_S and MAX_LIST_S. Newcomers make themselves known by asking the others on arrival."""
    return min(MAX_LIST_S, max(LIST_S, interval_s / 5))


class MembersWatch:
    """Keeps what the records of other members say, and asks some of the members where they are. `chance` draws which
    ones; `on_look` is called at each look."""

    def __init__(self, membership: Membership, chance: random.Random, on_look: Callable[[], None]) -> None:
        self._membership = membership
        self._chance = chance
        self._on_look = on_look
        self._claims: dict[str, int] = {}
        self._list_at_s = 0.0

    async def run(self, driver: RoundDriver) -> None:
        """Ask other members of the run where they are. Runs until cancelled."""
        context, roster, interval_s = driver.context, driver.setup.roster, driver.intervals.interval_s
        now = asyncio.get_running_loop().time
        began_s = now()
        while True:
            # a head tells its follower at once what is committed, and the follower notices when it goes
            trains_s = math.inf if driver.is_led else interval_s
            if not roster or now() >= self._list_at_s:
                await self._list(context, trains_s)
            claims = dict.fromkeys(driver.known, 0) | self._claims
            free = claims.keys() - driver.queries.looking_at  # those asked may stay silent
            further = [peer for peer in free if claims[peer] > context.replica.outer_step]
            for peer in self._drawn(free, further, roster):
                driver.queries.look_at(peer)
            if context.replica.is_new:
                proof = await furthest(context, claims)
                if proof is not None and proof.rank > context.replica.rank:
                    driver.feed(Proven(certificate=proof.certificate))
            self._on_look()
            passed_s = driver.waiting.seconds if driver.waiting else now() - began_s
            # a member that waits has nothing else to do, and may wait because it missed something
            pause_s = WATCH_S if driver.waiting and not driver.is_led else watch_s(trains_s)
            await asyncio.sleep(pause_s if roster else min(WATCH_S, max(FIRST_WATCH_S, passed_s / 4)))

    def _drawn(self, free: Collection[str], further: Collection[str], roster: Sequence[str]) -> Sequence[str]:
        """Return whom of the peers in `free` to ask: one that seems to be `further`, and others drawn by chance. While
        a first group forms, there is no roster yet, and these are many."""
        peers = whom_to_ask(free, roster, self._chance)
        if not roster:
            return peers
        seem_further = whom_to_ask(further, roster, self._chance)[:1]
        return list(dict.fromkeys((*seem_further, *self._chance.sample(peers, len(peers)))))[:NUM_WATCHED]

    async def _list(self, context: RunContext, interval_s: float) -> None:
        """Read the records of other members; if that fails, read them again soon."""
        records = await trainers(self._membership, context.run)
        self._claims = claims_of(context, {peer: each for peer, each in records.items() if each.state != "leaving"})
        self._list_at_s = asyncio.get_running_loop().time() + (list_s(interval_s) if records else WATCH_S)


async def let_others_finish(
    membership: Membership,
    run: str,
    me: str,
    leaving: asyncio.Event | None = None,
    on_wait: Callable[[tuple[str, ...], float], None] = lambda _peers, _seconds: None,
    *,
    is_watched: Callable[[], bool] = lambda: False,
) -> None:
    """Return once all other members of `run` have the last state too and nobody waits to be shown it (`is_watched`),
    after LINGER_S, or when `leaving` is set.

    If members are behind for more than one look, `on_wait` is called once with them and the seconds left.
    """
    leaving = leaving or asyncio.Event()
    now = asyncio.get_running_loop().time
    until_s, num_looks = now() + LINGER_S, 0
    while now() < until_s and ((behind := await _behind(membership, run, me)) or is_watched()):
        num_looks += bool(behind)
        if behind and num_looks == 2:
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
