"""Finds a run's newest certified state from outside, and signs the author's orders to resume the run or to endorse a
state.

The author can let some members go on from a state without the others: `survey` finds the state, `sign_order` signs the
order, and `deliver` sends it. The page "One history" of the documentation describes the cost if the others still train
somewhere. `sign_survey` endorses the state that was found (see `endorsement`). Members check what the author signed,
and send it on (`round_service`, `state_sync`), so one member is enough. No state.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm_protocol.commit_messages import Certificate, Endorsement, ResumeOrder
from swarm_protocol.errors import ConfigError, PeerTimeout, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.member_messages import StandingRequest
from swarm_protocol.records import TrainerRecord

from swarm.network.interface import Network
from swarm.training.round.quorum import quorum
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.ancestry import best_of, seek_endorsement, those_endorsed, whom_a_newcomer_asks
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.certificate_history import Proof
from swarm.training.state.endorsement import read_endorsement
from swarm.training.state.proof_reader import CALL_TIMEOUT_S, ProofReader


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSurvey:
    """The newest certified state that members show, and who has it.

    `holders` have this state. `absent` are the members of its roster that do not have it or do not answer; `answered`
    are those of its roster that show any state. `sequence` is that of the latest resume order that any peer showed, or
    0. The state follows from the author's newest `endorsement`, if there is one.
    """

    proof: Proof
    holders: tuple[str, ...]
    absent: tuple[str, ...]
    answered: tuple[str, ...]
    sequence: int
    endorsement: Endorsement | None = None


async def survey(network: Network, run: SignedRun, peers: Mapping[str, TrainerRecord] | Collection[str]) -> RunSurvey:
    """Ask `peers`, trainers of `run`, for their states, and then all members of the state that most of these show.

    If `peers` come with records, those that claim an endorsement are first asked for it. Raises PeerTimeout if no peer
    shows a state, or one that follows from the endorsement.
    """
    reader, request = ProofReader.of_outsider(network, run), StandingRequest(run=run.run_id, step=1, watches=True)
    admitted = dict.fromkeys(filter(reader.signatures.admits, peers), 0)
    # a peer that does not answer counts as absent
    if isinstance(peers, Mapping):
        await seek_endorsement(reader, peers)
    me, endorsements = reader.signatures.identity.peer_id, reader.endorsements
    asked = whom_a_newcomer_asks(admitted, endorsements.newest, me, random.SystemRandom())
    shown = await those_endorsed(reader, (await reader.newest_of(asked, request))[0])
    if (proof := best_of(shown, endorsements.newest)) is not None:
        others, _ = await reader.newest_of(set(proof.roster) - shown.keys(), request)
        shown = await those_endorsed(reader, {**shown, **others})
        proof = best_of(shown, endorsements.newest)
    if proof is None:
        endorsement = endorsements.newest
        which = f" after outer step {endorsement.outer_step}, which its author endorses" if endorsement else ""
        raise PeerTimeout(
            f"no member of {run.run_id} shows a certified state{which}",
            remedy="start a member that has one, with --then-serve so that it stays, and try again",
        )
    holders = {peer for peer, each in shown.items() if each.outcome.state_digest == proof.outcome.state_digest}
    return RunSurvey(
        proof=proof,
        holders=tuple(sorted(holders)),
        absent=tuple(sorted(set(proof.roster) - holders)),
        answered=tuple(sorted(set(proof.roster) & shown.keys())),
        sequence=max(each.sequence for each in shown.values()),
        endorsement=endorsements.newest,
    )


def sign_order(
    run: SignedRun, found: RunSurvey, roster: Collection[str], author: Identity, *, network_id: str, now: float
) -> bytes:
    """Return a certificate that lets `roster` go on from the surveyed state. Its sequence is `_next_sequence`, so the
    order that was signed last wins, even if the author did not see the earlier ones.

    Raises ConfigError unless `author` signed the run, the run admits `roster`, and it is not finished.
    """
    if found.proof.outer_step >= run.config.outer_steps:
        raise ConfigError(f"{run.run_id} is finished", remedy="there is nothing to go on with")
    run.check_author(author.peer_id, "resume it")
    signatures = RunSignatures.of_run(run, author, network_id)
    try:
        order = ResumeOrder(
            run=run.run_id,
            sequence=_next_sequence(now, found.sequence),
            outer_step=found.proof.outer_step,
            state_digest=found.proof.outcome.state_digest,
            roster=tuple(sorted(set(roster))),
        )
        data = signatures.sign(order, now)
        signatures.read_order(data, now)
    except (ValueError, SwarmError) as error:
        raise ConfigError(f"the run cannot be resumed like this: {error}", remedy="name other members") from error
    return Certificate(order=data).to_bytes()


def sign_survey(run: SignedRun, found: RunSurvey, author: Identity, *, network_id: str, now: float) -> bytes:
    """Return an endorsement of the surveyed state, with `_next_sequence`.

    Raises ConfigError unless `author` signed the run, and the state is of an outer step and always known to its roster.
    """
    proof = found.proof
    run.check_author(author.peer_id, "endorse its states")
    if not proof.outer_step:
        raise ConfigError(f"{run.run_id} has made no outer step yet", remedy="endorse it after its first one")
    if not _is_always_known(proof):
        raise ConfigError(
            f"too many members that voted for the state of outer step {proof.outer_step} have left with it, so "
            "newcomers could not tell its proof from a forged one",
            remedy="endorse the next state",
        )
    signatures = RunSignatures.of_run(run, author, network_id)
    before = found.endorsement.sequence if found.endorsement else 0
    endorsement = Endorsement(
        run=run.run_id,
        sequence=_next_sequence(now, before),
        order_sequence=proof.sequence,
        outer_step=proof.outer_step,
        next_attempt=proof.next_attempt,
        state_digest=proof.outcome.state_digest,
        roster=proof.roster,
    )
    data = signatures.sign(endorsement, now)
    read_endorsement(data, signatures, now)
    return data


def _next_sequence(now: float, before: int) -> int:
    """Return the time in microseconds, or one more than the sequence in force if that is later. Members that take
    different orders with one sequence would part until a later order, so two orders of one second must differ."""
    return max(int(now * 1e6), before + 1)


def _is_always_known(proof: Proof) -> bool:
    """Return whether each certificate of this state is known to its roster (see `Proof.is_known_to_roster`): members
    show the votes of different quorums."""
    deciding, roster = proof.origin.deciding, proof.roster
    return 3 * (quorum(len(deciding)) - len(set(deciding) - set(roster))) > len(roster)


async def deliver(network: Network, method: str, data: bytes, peers: Collection[str]) -> Mapping[str, str]:
    """Call `method` of `peers` with what the author signed. Return each peer's reason for refusal; an empty one means
    that the peer accepted."""
    answers = dict[str, str]()

    async def give(peer: str) -> None:
        try:
            await network.call(peer, method, data, timeout_s=CALL_TIMEOUT_S)
            answers[peer] = ""
        except SwarmError as error:
            answers[peer] = error.message

    async with asyncio.TaskGroup() as tasks:
        for peer in peers:
            tasks.create_task(give(peer))
    return answers
