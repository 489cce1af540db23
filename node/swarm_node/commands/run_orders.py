"""`swarm-node run resume` and `run endorse`: sign as a run's author while the run goes on. Only `--yes` signs.

An endorsement is of the newest certified state, and newcomers then trust it as their starting point. With `--every` the
command endorses repeatedly, until the run is finished or the command is interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.outside.resume import RunSurvey, deliver, sign_order, sign_survey, survey
from swarm.training.round.quorum import Succession
from swarm.training.run.methods import Methods
from swarm.training.run.run_file import load_signed_run
from swarm.training.run.signed_run import SignedRun
from swarm_protocol.errors import ConfigError, PeerTimeout, PeerUnreachable
from swarm_protocol.identity import Identity, check_peer_id, short_id

from swarm_node import diagnostics
from swarm_node.commands.command_options import Flags, run_file, signing_identity, with_peers
from swarm_node.events.emitter import Emitter
from swarm_node.network_join import retried, visiting
from swarm_node.settings.parsers import MAX_DURATION_S, length_of_time
from swarm_node.storage.home import read_text

MAX_MEMBERS_BYTES = 1 << 16

_EVERY = length_of_time(1, MAX_DURATION_S, "such as 30m, 12h or 7d")


def resume(flags: Flags) -> int:
    """Survey the run, sign its author's resume order and deliver it. Without --yes, only print what would be signed.

    Raises ConfigError, IntegrityError, StartError, PeerTimeout, or PeerUnreachable if no member took the order.
    """

    async def work(visit: AuthorVisit) -> None:
        await visit.order(await retried(visit.look), is_certain=flags.options["yes"])

    return _visit(flags, "resume it", work)


def endorse(flags: Flags) -> int:
    """Find the run's newest state and endorse it, once or repeatedly. Without --yes, only print what would be signed.

    Raises ConfigError, IntegrityError and StartError. A single endorsement also raises PeerTimeout, or PeerUnreachable
    if no member took it.
    """
    every_s = flags.parsed("every", _EVERY, "write --every 1h")

    async def work(visit: AuthorVisit) -> None:
        if every_s is None or not flags.options["yes"]:
            await visit.endorse(is_certain=flags.options["yes"])
        else:
            await visit.endorse_again_and_again(every_s)

    return _visit(flags, "endorse its states", work)


def _visit(flags: Flags, deed: str, work: Callable[[AuthorVisit], Awaitable[None]]) -> int:
    """Do `work` among the run's members, with its author's key. `deed` names what only the author may do."""
    config, path, author = with_peers(flags), run_file(flags), signing_identity(flags, with_any_key=False)
    diagnostics.begin_work()
    run = load_signed_run(path)
    run.check_author(author.peer_id, deed)
    members: Path | None = flags.options["members"]
    named = read_members(members) if members else ()

    async def visit() -> None:
        async with visiting(config) as (network, membership):
            await work(AuthorVisit(network, membership, run, author, named, Emitter(json=flags.json)))

    asyncio.run(visit())
    return 0


async def give(
    network: Network,
    method: str,
    data: bytes,
    peers: Collection[str],
    what: str,
    emitter: Emitter,
    *,
    heeded: Collection[str] | None = None,
) -> list[str]:
    """Send members what the author has signed, and return those that accepted it.

    Each refusal becomes a warning; if `heeded` is given, only refusals of these peers do. Raises PeerUnreachable if
    nobody accepted.
    """
    answers = await deliver(network, method, data, peers)
    for peer, refusal in answers.items():
        if refusal and (heeded is None or peer in heeded):
            emitter.warning(f"{short_id(peer)} has not accepted the {what}: {refusal}")
    taken = sorted(peer for peer, refusal in answers.items() if not refusal)
    if not taken:
        raise PeerUnreachable(f"no member accepted the {what}", remedy="try again when a member is running")
    return taken


def read_members(path: Path) -> tuple[str, ...]:
    """Return the peer ids in a file, one a line. `#` begins a comment. Raises ConfigError."""
    text = read_text(path, MAX_MEMBERS_BYTES, "name a text file of peer ids")
    words = [line.split("#")[0].strip() for line in text.splitlines()]
    peers = tuple(dict.fromkeys(word for word in words if word))
    for peer in peers:
        try:
            check_peer_id(peer)
        except ValueError as error:
            raise ConfigError(f"{path} has a line that is not a peer id: {peer[:80]!r}", remedy="correct it") from error
    if not peers:
        raise ConfigError(
            f"{path} has no peer id", remedy="write the peer ids of the members that continue, one on each line"
        )
    return peers


@dataclass(frozen=True, slots=True, eq=False)
class AuthorVisit:
    """Acts for the run's author among its members. Only the `named` peers are asked; if it is empty, all that train the
    run."""

    network: Network
    membership: Membership
    run: SignedRun
    author: Identity
    named: tuple[str, ...]
    emitter: Emitter

    async def look(self) -> RunSurvey:
        peers = self.named or await self.membership.trainers(self.run.run_id)
        return await survey(self.network, self.run, peers)

    async def order(self, situation: RunSurvey, *, is_certain: bool) -> None:
        """Sign a resume order for the named members, or those that are there. Without `is_certain`, only print what it
        would say."""
        run, proof, network = self.run, situation.proof, self.network
        here = tuple(peer for peer in situation.holders if peer in proof.roster)
        roster = self.named or here or situation.holders
        left_out = sorted(set(proof.roster) - set(roster))
        certificate = sign_order(run, situation, roster, self.author, network_id=network.network_id, now=network.now())
        self.emitter.emit(
            "resume_planned",
            run=run.run_id,
            outer_step=proof.outer_step,
            digest=proof.outcome.state_digest.hex(),
            roster=sorted(roster),
            left_out=left_out,
            left_out_names=", ".join(map(short_id, left_out)) or "none",
        )
        self._warn_of_few(roster, situation.holders, proof.outer_step)
        if not is_certain:
            self._tell_unsigned(situation)
            return
        peers = sorted({*roster, *situation.holders})
        taken = await give(
            network,
            Methods(run.run_id).resume,
            certificate,
            peers,
            "resume order",
            self.emitter,
            heeded=situation.holders,
        )
        self.emitter.emit("resume_delivered", run=run.run_id, outer_step=proof.outer_step, peers=taken)

    def _warn_of_few(self, roster: Collection[str], holders: Collection[str], outer_step: int) -> None:
        """Warn if too few members are left for a step, or if newcomers have too few seats beside `roster`. No order for
        `roster` lets such a run continue."""
        needed, there = self.run.config.min_group, {*roster, *holders}
        if len(there) >= needed and not self._can_seat(len(roster), outer_step):
            self.emitter.warning(
                f"a step needs {needed} members, and newcomers on probation have too few seats beside {len(roster)}",
                remedy=f"name newcomers too, in a file for --members: {', '.join(sorted(there))}",
            )
        elif len(there) < needed:
            self.emitter.warning(
                f"a step needs {needed} members, and the run waits until that many are there",
                remedy="let others join: swarm-node join --run FILE --peers ADDR",
            )

    def _can_seat(self, num_proven: int, outer_step: int) -> bool:
        """Return whether `num_proven` members and newcomers can be enough for the step after `outer_step`."""
        config = self.run.config
        return num_proven >= config.probation.num_proven_needed(config.min_group, config.max_group, outer_step)

    def _tell_unsigned(self, situation: RunSurvey) -> None:
        """Say that nothing was signed. If enough members are alive, also say that no order is needed.

        An order may cost the members that it leaves out some of their steps, and a run with enough members continues
        without one.
        """
        run, proof = self.run, situation.proof
        is_enough = Succession.of(run.config).is_enough(proof.roster, situation.answered)
        if not is_enough or not self._can_seat(len(situation.answered), proof.outer_step):
            self.emitter.emit("resume_not_signed", run=run.run_id)
            return
        self.emitter.emit(
            "resume_not_needed",
            run=run.run_id,
            outer_step=proof.outer_step,
            members=sorted(proof.roster),
            answered=list(situation.answered),
        )

    async def endorse(self, *, is_certain: bool) -> int:
        """Endorse the newest state and return its outer step. Without `is_certain`, only print which state it is."""
        found = await retried(self.look)
        proof, before = found.proof, found.endorsement
        self.emitter.emit(
            "endorsement_planned",
            run=self.run.run_id,
            outer_step=proof.outer_step,
            digest=proof.outcome.state_digest.hex(),
            roster=sorted(proof.roster),
            roster_names=", ".join(map(short_id, sorted(proof.roster))),
            holders=list(found.holders),
            after=before.outer_step if before else None,
            basis=f"it follows from outer step {before.outer_step}, which was endorsed before"
            if before
            else "nothing was endorsed before: more of the members that signed this state show it than any other",
        )
        if not is_certain:
            self.emitter.emit("endorsement_not_signed", run=self.run.run_id)
            return proof.outer_step
        data = sign_survey(self.run, found, self.author, network_id=self.network.network_id, now=self.network.now())
        taken = await give(
            self.network, Methods(self.run.run_id).endorse, data, found.holders, "endorsement", self.emitter
        )
        self.emitter.emit("endorsement_delivered", run=self.run.run_id, outer_step=proof.outer_step, peers=taken)
        return proof.outer_step

    async def endorse_again_and_again(self, every_s: float) -> None:
        """Endorse every `every_s` seconds until the run's last outer step is endorsed."""
        while True:
            try:
                if await self.endorse(is_certain=True) >= self.run.config.outer_steps:
                    return
            except (ConfigError, PeerTimeout, PeerUnreachable) as error:  # a later state may do, the members come back
                self.emitter.warning(error.message, remedy=error.remedy)
            await asyncio.sleep(every_s)
