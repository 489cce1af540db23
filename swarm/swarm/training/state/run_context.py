"""The context that the parts of training share for one member, and the setup of its next round.

`setup_of` makes a round's setup from the replica's state. After a restart, `recall_promise` reads what the member
promised before it, and `recall_history` takes in the certificates that led to its state. No state.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from swarm_compression import Codec
from swarm_compression.feedback import ErrorFeedback
from swarm_protocol import limits
from swarm_protocol.errors import IntegrityError, PeerViolation, SwarmError
from swarm_protocol.run_credentials import RunCredential, grant_of, revocation_in

from swarm.network.interface import FailpointHook
from swarm.threads import in_executor
from swarm.training.allreduce.part_streams import SLICES_SHARE
from swarm.training.allreduce.parts import Residuals
from swarm.training.allreduce.peer_connections import SLOWEST_MEMBER_BYTES_PER_S, BandwidthMeter, PeerConnections
from swarm.training.round.group_members import num_demotable
from swarm.training.round.promise import Promise, PromiseFile
from swarm.training.round.quorum import Succession
from swarm.training.round.round_state import RoundSetup
from swarm.training.state.certificate import CREDENTIAL_MARGIN_S
from swarm.training.state.certificate_history import Proof
from swarm.training.state.proof_reader import ProofReader
from swarm.training.state.replica import Replica
from swarm.training.state.state_transfer import Fetcher

logger = logging.getLogger(__name__)

FOUNDING_GRACE_S = 2.0
"""Minimum grace of a run's first group. Members that start together see each other's records after about a second, and
two first groups would be two runs."""
SLOWEST_VALUES_PER_S = 2e7
"""Speed of an outer step and its digests on a very slow machine; a small computer is ten times as fast."""
SPARE_VOTE_S, SPARE_REDUCE_S = 10.0, 40.0
"""The parts of a phase's deadline that do not grow with the vector. With round trips of 3 s, as on a home's line whose
queue is full, a vote takes one of them, and a reduction with its audits ten."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunContext(ProofReader):
    """Objects that the parts of training share for one member. `executor` computes for rounds, in parallel with
    training. `residuals` exist in a run with error feedback. `credential` is shown when this member enters the run.
    `revocations` are the author's, as far as this member received them and the state may not know them yet.
    `chance` draws the leaves that this member audits and the peers that it asks. `silent` are the peers that did not
    show their state when they were last asked, so that the log names each once."""

    executor: Executor
    replica: Replica
    codec: Codec
    fetcher: Fetcher
    failpoints: FailpointHook
    residuals: Residuals | None = None
    credential: RunCredential | None = None
    revocations: list[bytes] = field(default_factory=list)
    meter: BandwidthMeter = field(default_factory=BandwidthMeter)
    chance: random.Random = field(default_factory=random.SystemRandom)
    silent: set[str] = field(default_factory=set)

    @property
    def connections(self) -> PeerConnections:
        return PeerConnections(network=self.network, methods=self.methods, meter=self.meter)

    def feedback(self, step: int) -> ErrorFeedback | None:
        """Return the error feedback of the fragment that outer step `step` moves; None in a run without it."""
        return self.residuals.of(self.replica.fragment(step)) if self.residuals else None


def setup_of(context: RunContext, convicted: Collection[str]) -> RoundSetup:
    """Return the setup of the step that follows the replica's committed state. `convicted` are the peers that this
    member has banned."""
    replica, config = context.replica, context.replica.config
    step = replica.outer_step + 1
    fragment = replica.fragment(step)
    num_values = fragment.stop - fragment.start
    roster, order = replica.roster, replica.order
    # slices and results travel at the same time, so all bytes have to fit the share for slices
    bytes_s = 2 * context.codec.encoded_bytes(num_values) / SLOWEST_MEMBER_BYTES_PER_S / SLICES_SHARE
    return RoundSetup(
        run=context.run,
        me=context.network.peer_id,
        step=step,
        first_attempt=replica.proof.next_attempt if replica.proof else 0,
        state_digest=replica.digest,
        roster=roster,
        leased=replica.leased(step),
        clusters=replica.clusters(),
        standings=replica.standings,
        held_out=replica.held_out,
        admission=config.only_named,
        credential=lasting(context.credential, context.network.now()),
        demoted=replica.standings.to_demote(convicted)[: num_demotable(config.max_group)],
        revocation=_unknown(context),
        succession=Succession.of(config),
        max_group=config.max_group,
        samples_per_member=config.samples_per_interval,
        tokens_per_sample=config.data.window_tokens,
        num_values=num_values,
        bytes_per_s=context.meter.bytes_per_s,
        sequence=order.sequence if order else 0,
        order=replica.proof.origin.order if replica.proof else b"",
        grace_s=config.quorum_grace_s if roster else max(config.quorum_grace_s, FOUNDING_GRACE_S),
        reduce_s=min(limits.MAX_PHASE_S, SPARE_REDUCE_S + bytes_s),
        vote_s=min(limits.MAX_PHASE_S, SPARE_VOTE_S + making_s(replica)),
    )


def making_s(replica: Replica) -> float:
    """Return how many seconds a very slow machine takes for the next state of `replica`, or for its digests."""
    return replica.current.manifest.num_values / SLOWEST_VALUES_PER_S


def _unknown(context: RunContext) -> bytes:
    """Return the first revocation that the state does not know, or b""; forget those that it knows."""
    standings, pending = context.replica.standings, context.revocations
    pending[:] = [each for each in pending if standings.is_news(revocation_in(each))]
    return pending[0] if pending else b""


def lasting(credential: RunCredential | None, now: float) -> RunCredential | None:
    """Return `credential` if it is still valid when a group with it is signed, soon after `now`; else None."""
    if credential is None or grant_of(credential).expires_at <= now + 2 * CREDENTIAL_MARGIN_S:
        return None
    return credential


async def recall_history(context: RunContext, certificates: Sequence[bytes]) -> None:
    """Take in the `certificates` that led to this member's state, except those that are no longer valid."""
    now = context.network.now()

    def check() -> list[Proof]:
        links = list[Proof]()
        for each in certificates:
            try:
                links.append(context.signatures.check_certificate(each, now))
            except (PeerViolation, IntegrityError) as error:
                logger.warning("a certificate of this member's history is left out: %s", error)
        return links

    if context.replica.proof is not None:
        context.replica.history.add(await in_executor(context.executor, check))


async def recall_promise(context: RunContext, promises: PromiseFile | None) -> Promise | None:
    """Return what this member promised before its restart; None if there is nothing. If it still has the parts of the
    outcome that it voted for, it proposes that outcome again."""
    if promises is None:
        return None
    kept = await in_executor(context.executor, promises.read)
    if kept is None or kept.own_prepare_vote is None or kept.report.state_digest != context.replica.digest:
        return kept
    try:
        origin = context.signatures.read_group(kept.own_prepare_vote.origin, context.network.now()).group
        outcome = kept.own_prepare_vote.vote.outcome
        await context.replica.propose(context.executor, outcome.origin_digest, origin, kept.parts)
    except SwarmError as error:
        logger.warning("the outcome that this member voted for before its restart cannot be proposed again: %s", error)
    return kept
