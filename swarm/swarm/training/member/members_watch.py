"""Looks where the other members of a run are, beside the step that is driven.

`watch_pace` says how often. The look of a step is a task of `RunMember`; what it has read is kept for the next step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from swarm.network.membership import Membership
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.watch_pace import FIRST_WATCH_S, NUM_WATCHED, WATCH_S, list_s, watch_s
from swarm.training.round.round_events import Proven
from swarm.training.state.certificate_history import whom_to_ask
from swarm.training.state.run_context import RunContext
from swarm.training.state.state_sync import claims_of, furthest, trainers


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
            if not roster or now() >= self._list_at_s:
                await self._list(context, interval_s)
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
            pause_s = WATCH_S if driver.waiting else watch_s(interval_s)
            await asyncio.sleep(pause_s if roster else min(WATCH_S, max(FIRST_WATCH_S, passed_s / 4)))

    async def _list(self, context: RunContext, interval_s: float) -> None:
        """Read what other members say of themselves; once more soon, if that fails."""
        records = await trainers(self._membership, context.run)
        self._claims = claims_of(context, {peer: each for peer, each in records.items() if each.state != "leaving"})
        self._list_at_s = asyncio.get_running_loop().time() + (list_s(interval_s) if records else WATCH_S)
