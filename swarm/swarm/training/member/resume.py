"""What an outsider can do with a run: find its newest certified state, and resume the run from it.

The run's author can let some members go on from a state without the others: `survey` finds the state, `sign_order`
signs an order, and `deliver` sends it. `docs/one-history.md` says what that costs if the others still train
somewhere. Members check an order and pass it on (`round_service`, `state_sync`), so one member is enough. No state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm_protocol.errors import ConfigError, PeerTimeout, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Certificate, ResumeOrder, StandingRequest

from swarm.network.interface import Network
from swarm.training.run.methods import Methods
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.certificate import Proof, RunSignatures, most_supported, whom_to_ask
from swarm.training.state.proof_reader import CALL_TIMEOUT_S, ProofReader


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSurvey:
    """The newest certified state that members show, and who has it.

    `holders` have this state. `absent` are the members of its roster that do not have it or do not answer; `answered`
    are those of its roster that show any state. `sequence` is that of the latest resume order that any peer showed; 0
    if there is none.
    """

    proof: Proof
    holders: tuple[str, ...]
    absent: tuple[str, ...]
    answered: tuple[str, ...]
    sequence: int


async def survey(network: Network, run: SignedRun, peers: Collection[str]) -> RunSurvey:
    """Ask `peers`, trainers of `run`, for their states, and then all members of the state that most of these show.

    Raises PeerTimeout if none shows a state.
    """
    reader, request = ProofReader.of_outsider(network, run), StandingRequest(run=run.run_id, step=1, watches=True)
    admitted = dict.fromkeys(filter(reader.signatures.admits, peers), 0)
    # a peer that does not answer counts as absent
    shown, _ = await reader.newest_of(whom_to_ask(admitted, (), reader.signatures.identity.peer_id), request)
    if (proof := most_supported(shown)) is not None:
        others, _ = await reader.newest_of(set(proof.roster) - shown.keys(), request)
        shown |= others
        proof = most_supported(shown)
    if proof is None:
        raise PeerTimeout(
            f"no member of {run.run_id} shows a certified state", remedy="start a member that has one, and try again"
        )
    holders = {peer for peer, each in shown.items() if each.outcome.state_digest == proof.outcome.state_digest}
    return RunSurvey(
        proof=proof,
        holders=tuple(sorted(holders)),
        absent=tuple(sorted(set(proof.roster) - holders)),
        answered=tuple(sorted(set(proof.roster) & shown.keys())),
        sequence=max(each.sequence for each in shown.values()),
    )


def sign_order(
    run: SignedRun, found: RunSurvey, roster: Collection[str], author: Identity, *, network_id: str, now: float
) -> bytes:
    """Return a certificate that lets `roster` go on from the surveyed state. Its sequence is the time in seconds,
    unless a later one is in force: so the order that was signed last wins, also where the author did not see the
    others.

    Raises ConfigError unless `author` signed the run, which admits `roster` and is not finished.
    """
    if found.proof.outer_step >= run.config.outer_steps:
        raise ConfigError(f"{run.run_id} is finished", remedy="there is nothing to go on with")
    if author.peer_id != run.peer_id:
        raise ConfigError(
            f"{run.run_id} was signed by {run.peer_id}, and only that key can resume it",
            remedy="name its file with --identity",
        )
    signatures = RunSignatures.of_run(run, author, network_id)
    try:
        order = ResumeOrder(
            run=run.run_id,
            sequence=max(int(now), found.sequence + 1),
            outer_step=found.proof.outer_step,
            state_digest=found.proof.outcome.state_digest,
            roster=tuple(sorted(set(roster))),
        )
        data = signatures.sign_order(order, now)
        signatures.read_order(data, now)
    except (ValueError, SwarmError) as error:
        raise ConfigError(f"the run cannot be resumed like this: {error}", remedy="name other members") from error
    return Certificate(order=data).to_bytes()


async def deliver(network: Network, run: SignedRun, certificate: bytes, peers: Collection[str]) -> Mapping[str, str]:
    """Send `certificate` to `peers`. Return each peer's reason to refuse it; an empty reason means that it accepted."""
    answers = dict[str, str]()

    async def give(peer: str) -> None:
        try:
            await network.call(peer, Methods(run.run_id).resume, certificate, timeout_s=CALL_TIMEOUT_S)
            answers[peer] = ""
        except SwarmError as error:
            answers[peer] = error.message

    async with asyncio.TaskGroup() as tasks:
        for peer in peers:
            tasks.create_task(give(peer))
    return answers
