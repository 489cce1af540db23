"""Runs the reductions of one step: one for each attempt, from a signed group to the outcome that this member votes for.

Before it votes, a member audits the parts that others have made (`audit`). It can also fetch the parts of an outcome
that others have reached. `round_driver` owns the tasks. Shapes: F values of the fragment that the step moves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from swarm_compression import CodecError
from swarm_compression.codec import Data
from swarm_protocol.envelope import OutOfTime
from swarm_protocol.errors import PeerError, PeerViolation, RoundError, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.reduction_messages import PartStatement, ReduceOpening
from swarm_protocol.training_messages import Group, SignedGroup

from swarm.network.interface import Stream
from swarm.threads import in_executor
from swarm.training.allreduce.audit import Auditing, NotAudited
from swarm.training.allreduce.committed_slices import committed_tree
from swarm.training.allreduce.part_streams import AUDITS_SHARE, PartStreams
from swarm.training.allreduce.parts import CaughtLying, ReductionScheme, UndecodableSlice, encode_slice
from swarm.training.allreduce.peer_connections import MeteredStream
from swarm.training.evidence.interval_audits import DrawnInterval
from swarm.training.evidence.wrong_interval import draw_leaves, draw_validators
from swarm.training.member.current_step import CurrentStep
from swarm.training.member.held_out_effects import DrawnSlices
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.round.clusters import has_contributed
from swarm.training.round.round_events import Recover, Reduced, ReduceFailed
from swarm.training.round.round_state import RoundSetup
from swarm.training.state.certificate_history import Proof
from swarm.training.state.run_context import RunContext
from swarm.training.state.state_sync import kept_parts, repair_if_damaged

logger = logging.getLogger(__name__)

SLICES_S = 1.0
"""Seconds for which the end of a step waits for slices that this member needs to validate or to measure; all of them
are there if its part is complete."""
GROUP_WAIT_S = 5.0
"""Seconds for which a stream of another member waits until this member knows the stream's group."""
NUM_KEPT = 2
"""Number of a step's reductions that are kept. Each takes some two bytes per value with int8. One outcome may be
resumed while another is tried."""


class Reductions:
    """Runs the reductions of one step."""

    def __init__(self, step: CurrentStep) -> None:
        self.drawn: DrawnInterval | None = None
        """The interval that this member is to validate, once the step is committed."""
        self.measurable: DrawnSlices | None = None
        """This member's slices of the contributions that the step's outcome draws to be measured."""
        self._step = step
        self._context = step.context
        # by the digests of their groups. Earlier attempts are kept, too: their streams may still be served
        self._reductions: dict[bytes, Auditing] = {}
        self._failed_groups: set[bytes] = set()
        self._changed = asyncio.Event()
        self._is_closed = False

    async def reduce(self, signed: SignedGroup, offer: IntervalOffer | None) -> None:
        """Take part in the group's reduction with what this member offers, and audit the others. Ends with Reduced,
        with evidence, or with ReduceFailed, after which it may run until it is cancelled."""
        context, group = self._context, signed.group
        await repair_if_damaged(context, group)
        if not group.part_values:
            await self._propose(group.attempt, signed.digest, group, ())
            return
        try:
            context.signatures.check_commitments(signed)
        except SwarmError as error:
            self._step.feed(reduce_failed(group.attempt, error))
            return
        if all(each.peer_id != context.network.peer_id for each in group.contributors):
            offer = None  # this member has yielded
        streams = PartStreams(
            context.connections,
            signed,
            offer.delta_F if offer else None,
            self._scheme(group),
            context.executor,
            tree=offer.tree if offer else None,
            failpoints=context.failpoints,
        )
        auditing = Auditing(
            streams,
            partial(self._failed, group.attempt),
            context.chance,
            sign=lambda statement: context.signatures.sign(statement, context.network.now()),
            read=lambda data: context.signatures.read(PartStatement, data, context.network.now()),
        )
        butterfly = auditing.butterfly
        context.meter.begin([peer for peer in group.peer_ids if peer != context.network.peer_id])
        self._add(signed.digest, auditing)
        try:
            parts = await butterfly.run()
        except BaseException:
            self._failed_groups.add(signed.digest)
            raise
        # the others may commit these parts before this member has audited them
        context.replica.keep_parts(signed.digest, parts)
        # the reduction is still served: the backup of an owner that fails late may need this member's slices, and
        # others audit it
        if not await self._is_right(auditing, group.attempt, parts, streams.left_s(AUDITS_SHARE)):
            return
        self._step.note_reduced(butterfly.own.reducer.kept_shares, "in the part that this member reduces")
        await self._propose(group.attempt, signed.digest, group, parts)

    async def _is_right(
        self, auditing: Auditing, attempt: int, parts: Sequence[Data], within_s: float, *, are_given: bool = True
    ) -> bool:
        """Return whether audits within about `within_s` find nothing wrong with `parts`. If they do, feed the events
        that follow. Of parts that their owners have not given to this member, an owner is accused only with evidence:
        who says that it voted for them can have made them up."""
        try:
            await auditing.sign_own_part()
            if not are_given:
                await auditing.compare(parts)
            audit = auditing.audit(parts, within_s)
            await (audit if are_given else _unblamed(audit))
        except SwarmError as error:
            await self._failed(attempt, error)
        else:
            return True
        return False

    async def _failed(self, attempt: int, error: SwarmError) -> None:
        """End the attempt: by the evidence in `error` if it has some that convicts, else by ReduceFailed."""
        if not isinstance(error, CaughtLying):
            self._step.feed(reduce_failed(attempt, error))
            return
        logger.warning("%s lied: %s", short_id(error.peer_id), error.message)
        try:
            await self._step.convictions.convict(error.evidence)
        except SwarmError as failure:  # too large, for instance: then this member only accuses the peer
            logger.warning("this lie could not be turned into evidence: %s", failure)
            self._step.feed(reduce_failed(attempt, error))

    def refuse(self, signed: SignedGroup) -> None:
        """Refuse all streams of the reduction of `signed`."""
        self._failed_groups.add(signed.digest)
        self._wake()

    async def recover(self, action: Recover) -> None:
        """Fetch the parts of an outcome from other members. Ends with Reduced, with ReduceFailed, or with evidence."""
        signed, outcome = action.signed, action.outcome
        context, attempt = self._context, signed.group.attempt
        await repair_if_damaged(context, signed.group)
        if context.replica.proposal(outcome) is not None:
            self._step.feed(Reduced(attempt=attempt, outcome=outcome))
            return
        try:
            origin = context.signatures.read_group(signed.group.origin or signed.data, context.network.now()).group
            parts = await kept_parts(context, outcome)
            if not (are_given := len(parts) == len(outcome.part_digests)):
                parts = await context.fetcher.parts(origin, outcome, action.holders, context.codec)
        except SwarmError as error:
            self._step.feed(reduce_failed(attempt, error))
            return
        if parts and not action.is_audited:
            auditing = self._reductions.get(outcome.origin_digest)
            if auditing is None:
                self._step.feed(
                    reduce_failed(attempt, RoundError("this member cannot audit parts that it had no share in"))
                )
                return
            # those that voted wait for this member's vote
            if not await self._is_right(auditing, attempt, parts, signed.group.vote_s / 2, are_given=are_given):
                return
        await self._propose(attempt, outcome.origin_digest, origin, parts)

    async def accept(self, peer: str, opening: ReduceOpening, stream: Stream) -> None:
        """Pass `peer`'s stream to the butterfly of the group that its `opening` names, once this member takes part in
        that group. Raises RoundError."""
        digest = opening.group_digest
        with suppress(TimeoutError):
            async with asyncio.timeout(GROUP_WAIT_S):
                while digest not in {*self._reductions, *self._failed_groups} and not self._is_closed:
                    await self._changed.wait()
        if digest not in self._reductions or digest in self._failed_groups:
            raise RoundError("this member takes no part in the group of this part")
        metered = MeteredStream(stream, lambda rate: self._context.meter.measured(peer, rate))
        await self._reductions[digest].butterfly.accept(peer, opening, metered)

    async def keep_drawn(self, proof: Proof) -> None:
        """Keep the slices that this member needs of the contributions that the committed outcome draws, before `close`
        drops all: those that it validates, and those that it measures. It needs none if it has not made its part."""
        config, origin, outcome = self._context.replica.config, proof.origin, proof.outcome
        auditing = self._reductions.get(outcome.origin_digest)
        if auditing is None:
            return
        # no report follows the last step, so nothing need be measured
        is_last = proof.outer_step == config.outer_steps
        measured = () if is_last else config.held_out_rule.draw(origin, outcome.part_digests)
        if config.validation_rate:
            async with _if_in_time("validated", origin.step):
                self.drawn = await self._to_validate(auditing, proof)
        if measured:
            async with _if_in_time("measured", origin.step):
                self.measurable = await self._to_measure(auditing, origin, measured)

    async def _to_validate(self, auditing: Auditing, proof: Proof) -> DrawnInterval | None:
        """Return what this member needs to validate the interval that the step's outcome draws for it, or None if it
        draws none. Raises RoundError or PeerError if this member has not made its part."""
        me, rate = self._context.network.peer_id, self._context.replica.config.validation_rate
        origin, outcome = proof.origin, proof.outcome
        drawn = next((peer for peer, by in draw_validators(origin, outcome, rate).items() if by == me), None)
        if drawn is None:
            return None
        slices = await auditing.slices_of(drawn, draw_leaves(origin, outcome, drawn, me))
        return DrawnInterval(peer=drawn, slices=slices)

    async def _to_measure(self, auditing: Auditing, origin: Group, drawn: Sequence[str]) -> DrawnSlices | None:
        """Return the slices that this member holds of the contributions of `drawn` to the group `origin`, or None if
        there are none. Raises RoundError or PeerError if this member has not made its part."""
        me = self._context.network.peer_id
        others = [peer for peer in drawn if peer != me]
        if not others or not origin.part_values[origin.peer_ids.index(me)]:
            return None
        values = {peer: await auditing.values_of(peer) for peer in others}
        where = next(where for where, _ in values.values())
        return DrawnSlices(where=where, slices={peer: x_F for peer, (_, x_F) in values.items()})

    def close(self) -> None:
        """Refuse the streams that still wait for a group, and drop the data of the reductions, since the step is
        over."""
        self._is_closed = True
        self._changed.set()
        for each in self._reductions.values():
            self._drop(each)

    def _add(self, digest: bytes, auditing: Auditing) -> None:
        """Serve another reduction, and drop all but the newest NUM_KEPT: attempts that fail one after the other would
        otherwise fill the memory."""
        self._reductions[digest] = auditing
        for old in list(self._reductions)[:-NUM_KEPT]:
            self._drop(self._reductions.pop(old))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _drop(self, auditing: Auditing) -> None:
        self._step.log.sent(auditing.butterfly.streams.bytes_sent)
        auditing.butterfly.drop()

    def _scheme(self, group: Group) -> ReductionScheme:
        context, config = self._context, self._context.replica.config
        num_contributors = sum(member.num_tokens > 0 for member in group.members)
        aggregator = config.aggregator_for(num_contributors)
        if aggregator.name != config.aggregator:
            logger.warning("with %d contributions this round's aggregator is %s", num_contributors, aggregator.name)
        return ReductionScheme(
            codec=context.codec,
            aggregator=aggregator,
            feedback=context.feedback(group.step),
            probation=config.probation,
        )

    async def _propose(self, attempt: int, digest: bytes, origin: Group, parts: tuple[Data, ...]) -> None:
        try:
            outcome = await self._context.replica.propose(self._context.executor, digest, origin, parts)
        except SwarmError as error:
            self._step.feed(reduce_failed(attempt, error))
        else:
            await self._context.failpoints.reached("round.proposed")
            self._step.feed(Reduced(attempt=attempt, outcome=outcome))


@asynccontextmanager
async def _if_in_time(done: str, outer_step: int) -> AsyncIterator[None]:
    """Let the body get slices for SLICES_S. If it cannot, no contribution is `done`."""
    try:
        async with asyncio.timeout(SLICES_S):
            yield
    except (SwarmError, TimeoutError) as error:
        logger.info("no contribution to outer step %d is %s: %s", outer_step, done, error)


async def _unblamed(audit: Coroutine[Any, Any, None]) -> None:
    """Await `audit`. Raises RoundError in place of a PeerViolation without evidence."""
    try:
        await audit
    except PeerViolation as error:
        if isinstance(error, CaughtLying):
            raise
        raise RoundError(f"a part that another member shows is not its owner's: {error.message}") from error


async def commit_slices(context: RunContext, setup: RoundSetup, offer: IntervalOffer) -> IntervalOffer:
    """Return `offer` with a commitment to the slices that this member will send. If the pseudo-gradient cannot be
    encoded, return an offer without a contribution."""
    delta_F, contribution = offer.delta_F, offer.contribution
    if delta_F is None or not contribution.num_tokens or setup.follows:
        return offer
    encode = partial(encode_slice, context.codec, context.feedback(setup.step), delta_F)
    try:
        tree = await in_executor(context.executor, committed_tree, encode, context.codec, setup.num_values)
    except (CodecError, RoundError) as error:
        logger.warning("this member contributes nothing to outer step %d: %s", setup.step, error)
        nothing = replace(contribution, num_tokens=0, num_samples=0, loss=0.0, followers=())
        return replace(offer, contribution=nothing, delta_F=None)
    commitment = context.signatures.sign_slices(setup.step, setup.state_digest, tree.root)
    return replace(offer, contribution=replace(contribution, commitment=commitment), tree=tree)


async def settle(context: RunContext, setup: RoundSetup, proof: Proof | None) -> None:
    """End the step of `setup`, whose committed result `proof` shows. The residual of this member's contribution is
    committed if the new state includes the contribution, and discarded otherwise."""
    if context.residuals is None:
        return
    origin = proof.origin if proof is not None and proof.origin.step == setup.step else None
    counts = origin is not None and has_contributed(setup.me, origin, setup.state_digest, setup.leased)
    work = partial(context.residuals.settle, context.replica.fragment(setup.step), is_committed=counts)
    await in_executor(context.executor, work)


def reduce_failed(attempt: int, error: SwarmError) -> ReduceFailed:
    """Return the event for `error`. It accuses a peer that broke the protocol. It only names a peer that could not be
    reached, or whose clock differs from this one's, since an accusation outlasts the step. A peer that only reported
    the error is not blamed."""
    peers = (error.peer_id,) if error.peer_id else ()
    reason = f"{short_id(error.peer_id)}: {error.message}" if peers else error.message
    if isinstance(error, PeerViolation) and not isinstance(error, OutOfTime):
        certain = isinstance(error, UndecodableSlice)
        return ReduceFailed(attempt=attempt, reason=reason, accused=peers, certain=certain)
    if isinstance(error, PeerError):
        unaudited = isinstance(error, NotAudited)
        return ReduceFailed(attempt=attempt, reason=reason, unreachable=peers, unaudited=unaudited)
    return ReduceFailed(attempt=attempt, reason=error.message)
