"""Runs one step's cluster at its head: takes the work of the followers, and makes one contribution from it and the
head's own.

Each follower holds a stream to its head from the beginning of its interval on. So a head knows which followers are
there, and waits for no others. A follower whose head is gone turns to its second head before its work is done. The head
waits only for a part of the round's grace, so that it is not too late itself, and asks followers to hurry before that
time ends. The committed certificate goes back over the streams.

The head aggregates the followers' vectors as the owner of a part does, with the run's own aggregator. Its followers
trust it to do that, as members trust the owner of a part: a follower sees in the certificate whether its tokens count,
and the next step draws the heads anew. The round's aggregator bounds the effect of a head on the state.

`round_driver` owns the head, and `round_service` passes streams to it. Shapes: F values of the step's fragment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from swarm_compression import CodecError
from swarm_protocol import limits
from swarm_protocol.checks import shared_fields
from swarm_protocol.errors import PeerRefused, PeerViolation, SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import FollowerWork, FollowReply
from swarm_protocol.run_credentials import RunCredential
from swarm_protocol.training_messages import Contribution, Follower
from torch import Tensor

from swarm.network.interface import EndOfStream, Stream
from swarm.threads import in_executor
from swarm.training.allreduce.part_reduction import PartReducer
from swarm.training.allreduce.parts import (
    ReductionScheme,
    check_frame,
    encode_slice,
    frames_of,
    leaf_values,
    num_values,
)
from swarm.training.member.current_step import CurrentStep
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.round.group_formation import grace_after
from swarm.training.round.group_members import num_presentable
from swarm.training.standing.standings import grants_in
from swarm.trust.mixing import leaf_beacon

logger = logging.getLogger(__name__)

ALIVE_S = 15.0
"""Seconds between two messages by which a head shows that it is there."""
ARRIVAL_S = 2.0
"""Seconds after the beginning of a step for which a head waits for followers that have not connected."""
GRACE_SHARE = 1 / 3
"""The share of the round's grace for which a head waits for its followers. A head that was asked to hurry, after half
of the grace, still comes in time."""


@dataclass(slots=True, eq=False)
class _Seat:
    """One follower's place: the head's queued replies to it, and the work that it has brought."""

    replies: asyncio.Queue[FollowReply | SwarmError] = field(default_factory=asyncio.Queue)
    work: FollowerWork | None = None
    frames: list[bytes] = field(default_factory=list)
    is_here: bool = True
    credential: RunCredential | None = None


class ClusterHead:
    """The cluster that this member heads in one step."""

    def __init__(self, step: CurrentStep) -> None:
        self._step = step
        self._context = step.context
        self._setup = setup = step.setup
        self._began_at = step.state.began_at
        self._own_followers = setup.clusters.followers_of(setup.me)
        self._places = {peer: place for place, peer in enumerate(setup.leased)}
        num_trainers = 1 + sum(setup.me in heads for heads in setup.clusters.dealt.values())
        self._most_tokens = limits.MAX_INTERVAL_TOKENS // num_trainers  # of each, so that their sum fits a report
        self._frames = frames_of(setup.num_values)
        self._seats: dict[str, _Seat] = {}
        self._changed = asyncio.Event()
        self._is_closed = False
        self._last: FollowReply | SwarmError | None = None

    async def serve(self, peer: str, stream: Stream, credential: RunCredential | None = None) -> None:
        """Take the work of `peer`, which shows this `credential`, over `stream`, and tell it what was committed. Raises
        PeerViolation."""
        if not self._takes(peer, credential):
            await stream.send(FollowReply(kind="full").to_bytes())
            return
        if self._is_closed and self._last is None and peer in self._places:
            await stream.send(FollowReply(kind="late").to_bytes())  # its other head may still take its work
            return
        if (former := self._seats.get(peer)) is not None:
            # each stream may carry a whole vector, and only one per peer counts
            former.replies.put_nowait(PeerRefused("its work comes over another stream"))
        seat = self._seats[peer] = _Seat(credential=credential)
        seat.replies.put_nowait(FollowReply(kind="welcome"))
        if self._last is not None:
            seat.replies.put_nowait(self._last)
        self._notify()
        receiving = asyncio.create_task(self._receive(peer, seat, stream), name=f"work of {short_id(peer)}")
        try:
            while (await self._say_next(seat, stream)).kind != "committed":
                pass
        finally:
            receiving.cancel()
            seat.is_here = False
            if peer not in self._places and self._seats.get(peer) is seat:
                del self._seats[peer]  # keys cost nothing, and a newcomer brings no work
            self._notify()

    async def gather(self, offer: IntervalOffer) -> IntervalOffer:
        """Wait for the followers, and return the cluster's contribution. `offer` is the head's own."""
        clock = asyncio.get_running_loop().time
        grace_s = GRACE_SHARE * grace_after(offer.interval_s or clock() - self._began_at, self._setup.grace_s)
        until, hurry_at = clock() + grace_s, clock() + grace_s / 2
        while (awaited := self._awaited(clock())) and clock() < until:
            if clock() >= hurry_at:
                self._tell(awaited, FollowReply(kind="hurry"))
                hurry_at = until
            await self._change_or(min(until, hurry_at, max(clock(), self._began_at + ARRIVAL_S) + ARRIVAL_S / 10))
        self._is_closed = True
        if absent := self._awaited(clock()):
            logger.warning("going to the round without %s, which follow this member", ", ".join(map(short_id, absent)))
            self._tell(absent, FollowReply(kind="late"))
        seats = {
            peer: seat
            for peer, seat in self._seats.items()
            if seat.work is not None and (seat.is_here or peer in self._places)
        }
        try:
            result, kept_shares = await in_executor(self._context.executor, self._combined, offer, seats)
        except SwarmError as error:
            logger.warning("going to the round without this member's cluster: %s", error)
            return offer
        self._step.note_reduced(kept_shares, "in this member's cluster")
        for seat in self._seats.values():
            seat.frames.clear()
        return result

    def finish(self, certificate: bytes) -> None:
        """Tell the followers that the step is over. An empty `certificate` means that this member stops training."""
        self._is_closed = True
        gone = PeerRefused("this member does not train any more")
        self._last = FollowReply(kind="committed", certificate=certificate) if certificate else gone
        for seat in self._seats.values():
            seat.replies.put_nowait(self._last)
            seat.frames.clear()

    def _takes(self, peer: str, credential: RunCredential | None) -> bool:
        setup = self._setup
        if peer in setup.clusters.dealt:
            known = self._seats.get(peer)
            # work that it brought before it lost its connection counts
            return setup.me in setup.clusters.dealt[peer] and (known is None or known.work is None)
        is_known = peer in setup.leased or peer in setup.clusters.heads
        others = {other for other, seat in self._seats.items() if seat.is_here and other not in {*self._places, peer}}
        shown = grants_in((credential,) if credential else ())
        may_enter = setup.admits(peer) and not setup.standings.refuses(peer, shown.get(peer))
        return may_enter and not is_known and len(others) < setup.clusters.num_newcomers(setup.me)

    def _awaited(self, now: float) -> list[str]:
        """Return the followers whose work may still arrive."""
        absent = [peer for peer in self._own_followers if peer not in self._seats]
        here = [peer for peer, seat in self._seats.items() if seat.is_here and seat.work is None]
        return [*(absent if now < self._began_at + ARRIVAL_S else ()), *(peer for peer in here if peer in self._places)]

    def _tell(self, peers: Sequence[str], reply: FollowReply) -> None:
        for peer in peers:
            if peer in self._seats:
                self._seats[peer].replies.put_nowait(reply)

    async def _say_next(self, seat: _Seat, stream: Stream) -> FollowReply:
        try:
            async with asyncio.timeout(ALIVE_S):
                reply = await seat.replies.get()
        except TimeoutError:
            reply = FollowReply(kind="welcome")
        if isinstance(reply, SwarmError):
            raise reply
        await stream.send(reply.to_bytes())
        return reply

    async def _receive(self, peer: str, seat: _Seat, stream: Stream) -> None:
        try:
            work = FollowerWork.from_bytes(await stream.receive())
            self._check(peer, work)
            frames = [await self._frame(stream, each, peer) for each in self._frames] if work.num_tokens else []
        except EndOfStream:
            seat.replies.put_nowait(PeerViolation("it sent too little of its work", peer_id=peer))
        except SwarmError as error:
            seat.replies.put_nowait(error)
        else:
            if not self._is_closed:
                seat.work, seat.frames = work, frames
            self._notify()

    def _check(self, peer: str, work: FollowerWork) -> None:
        most_samples = self._setup.samples_per_member if peer in self._places else 0
        most_tokens = min(work.num_samples * self._setup.tokens_per_sample, self._most_tokens)
        if work.num_samples > most_samples or work.num_tokens > most_tokens:
            reason = "it claims more tokens or samples than its lease has, or than its share of a report"
            raise PeerViolation(reason, peer_id=peer)

    async def _frame(self, stream: Stream, frame: slice, peer: str) -> bytes:
        data = await stream.receive()
        try:
            await in_executor(self._context.executor, check_frame, self._context.codec, data, num_values(frame))
        except CodecError as error:
            raise PeerViolation(f"it sent a bad frame: {error}", peer_id=peer) from error
        return data

    def _combined(self, offer: IntervalOffer, seats: Mapping[str, _Seat]) -> tuple[IntervalOffer, Mapping[str, float]]:
        """Return the cluster's offer, and the share of its weight that each notably reduced trainer keeps. Blocks."""
        works = {peer: seat.work for peer, seat in seats.items() if seat.work is not None and peer in self._places}
        own, standings = offer.contribution, self._setup.standings
        followers = [
            Follower(
                place=self._places[peer],
                num_tokens=work.num_tokens,
                num_samples=work.num_samples,
                leaving=work.leaving,
                steps_left=standings.steps_left(peer),
            )
            for peer, work in works.items()
        ]
        shown = (seats[peer].credential for peer in sorted(seats) if peer not in self._places)
        # a group has room for so many of each head
        credentials = tuple(filter(None, shown))[: num_presentable(self._setup.max_group)]
        grants = grants_in(credentials)
        newcomers = tuple(sorted(p for p in seats if p not in self._places and not standings.refuses(p, grants.get(p))))
        num_tokens = own.num_tokens + sum(each.num_tokens for each in followers)
        loss_sum = own.loss * own.num_tokens + sum(work.loss * work.num_tokens for work in works.values())
        mean_loss = loss_sum / num_tokens if num_tokens else 0.0
        contribution = replace(
            own,
            num_tokens=num_tokens,
            num_samples=own.num_samples + sum(each.num_samples for each in followers),
            loss=max(-limits.MAX_LOSS, min(mean_loss, limits.MAX_LOSS)),  # rounding may have led beyond the bounds
            followers=tuple(sorted(followers, key=lambda each: each.place)),
            newcomers=newcomers,
            credentials=credentials,
        )
        contributors = [
            Contribution(peer_id=peer, **shared_fields(each, Contribution))
            for peer, each in zip(works, followers, strict=True)
        ]
        if not any(each.num_tokens for each in contributors):
            return replace(offer, contribution=contribution), {}
        delta_F, kept_shares = self._aggregated(
            sorted((own, *contributors), key=lambda each: each.peer_id), offer.delta_F, seats
        )
        return replace(offer, contribution=contribution, delta_F=delta_F), kept_shares

    def _aggregated(
        self, members: Sequence[Contribution], own_F: Tensor | None, seats: Mapping[str, _Seat]
    ) -> tuple[Tensor, Mapping[str, float]]:
        context, num_contributors = self._context, sum(member.num_tokens > 0 for member in members)
        config, setup = context.replica.config, self._setup
        aggregator = config.aggregator_for(num_contributors, in_cluster=True)
        scheme = ReductionScheme(codec=context.codec, aggregator=aggregator, probation=config.probation)
        beacon = partial(leaf_beacon, setup.run, setup.step, setup.state_digest)
        reducer = PartReducer(scheme, members, leaf_values(setup.num_values), beacon)

        def slices(index: int) -> list[bytes]:
            own = b"" if own_F is None else encode_slice(context.codec, None, own_F, self._frames[index])
            return [
                seats[member.peer_id].frames[index] if member.peer_id in seats else own
                for member in reducer.contributors
            ]

        delta_F = torch.empty(self._setup.num_values)
        for index, frame in enumerate(self._frames):
            delta_F[frame] = reducer.combined(slices(index), frame)
        return delta_F, reducer.kept_shares

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _change_or(self, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._changed.wait()
