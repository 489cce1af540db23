"""Endorses the newest certified state of a run, as its author: where the trust of newcomers begins from then on.

Signed only with `--yes`; with `--every` again and again, until the run is finished or the command is interrupted.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.outside.resume import RunSurvey, sign_survey, survey
from swarm.training.run.methods import Methods, short
from swarm.training.run.run_file import read_signed
from swarm.training.run.signed_run import SignedRun
from swarm_protocol.errors import PeerTimeout, PeerUnreachable
from swarm_protocol.identity import Identity

from swarm_node import diagnostics, interrupts
from swarm_node.commands.run_resume import give, read_members
from swarm_node.events.emitter import Emitter
from swarm_node.network_visit import retried, visiting
from swarm_node.settings.config import Config


def endorse_run(
    path: Path,
    author: Identity,
    members: Path | None,
    config: Config,
    emitter: Emitter,
    *,
    every_s: float | None,
    is_certain: bool,
) -> int:
    """Find the run's newest state and endorse it, once or every `every_s` seconds; without `is_certain`, only print
    what would be signed.

    `members` is a file with a peer id on each line: only these are asked where the run is. Raises ConfigError,
    IntegrityError, StartError, and if it endorses once PeerTimeout, or PeerUnreachable if no member took it.
    """
    diagnostics.quieten_libraries()
    run = read_signed(path)
    named = read_members(members) if members else ()

    async def endorse() -> None:
        async with visiting(config) as (network, membership):
            endorsing = _Endorsing(network, membership, run, author, named, emitter)
            if every_s is None or not is_certain:
                await endorsing.once(is_certain=is_certain)
            else:
                await endorsing.again_and_again(every_s)

    interrupts.raise_in_command()
    asyncio.run(endorse())
    return 0


class _Endorsing:
    """Endorses states of one run. `named` are the only peers that are asked; empty: all that train it."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        run: SignedRun,
        author: Identity,
        named: tuple[str, ...],
        emitter: Emitter,
    ) -> None:
        self._network = network
        self._membership = membership
        self._run = run
        self._author = author
        self._named = named
        self._emitter = emitter

    async def once(self, *, is_certain: bool) -> int:
        """Endorse the newest state, or only say which one it is. Return its outer step."""
        found = await retried(self._look)
        proof, before = found.proof, found.endorsement
        self._emitter.emit(
            "endorsement_planned",
            run=self._run.run_id,
            outer_step=proof.outer_step,
            digest=proof.outcome.state_digest.hex(),
            roster=sorted(proof.roster),
            roster_names=", ".join(map(short, sorted(proof.roster))),
            holders=list(found.holders),
            after=before.outer_step if before else None,
            basis=f"it follows from outer step {before.outer_step}, which was endorsed before"
            if before
            else "nothing was endorsed before: more of the members that signed this state show it than any other",
        )
        if not is_certain:
            self._emitter.emit("endorsement_not_signed", run=self._run.run_id)
            return proof.outer_step
        data = sign_survey(self._run, found, self._author, network_id=self._network.network_id, now=self._network.now())
        method = Methods(self._run.run_id).endorse
        taken = await give(self._network, method, data, found.holders, "endorsement", self._emitter)
        self._emitter.emit("endorsement_delivered", run=self._run.run_id, outer_step=proof.outer_step, peers=taken)
        return proof.outer_step

    async def again_and_again(self, every_s: float) -> None:
        """Endorse every `every_s` seconds until the run's last outer step is endorsed."""
        while True:
            try:
                if await self.once(is_certain=True) >= self._run.config.outer_steps:
                    return
            except (PeerTimeout, PeerUnreachable) as error:  # the members may come back
                self._emitter.emit("warning", message=error.message, remedy=error.remedy)
            await asyncio.sleep(every_s)

    async def _look(self) -> RunSurvey:
        peers = self._named or await self._membership.trainers(self._run.run_id)
        return await survey(self._network, self._run, peers)
