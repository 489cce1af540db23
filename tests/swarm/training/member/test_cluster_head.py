"""Tests a head and the work that followers may send it, over the simulated network: hostile, slow and partial work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.training_swarm import NUM_VALUES, Swarm, SyntheticInner, assert_equal_steps, config, identity_of
from swarm.network.interface import EndOfStream, Stream
from swarm.network.memory.memory_network import MemoryNetwork
from swarm.testing import virtual_time
from swarm.training.member.cluster_head import ALIVE_S, ClusterHead
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.round.clusters import draw_clusters
from swarm.training.run.methods import Methods
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import DataConfig, InnerConfig
from swarm.training.standing.standings import TrainerStandings
from swarm.training.trainer_events import OuterStep
from swarm_compression import get_codec
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerViolation
from swarm_protocol.member_messages import FollowerWork, FollowReply, FollowRequest
from swarm_protocol.training_messages import Contribution

pytestmark = pytest.mark.usefixtures("only_errors_logged")

STEP_S = 0.4
INTERVAL_S = 5 * STEP_S
TOKENS = 40
RUN = config(min_group=2, max_group=2, cluster_size=2, outer_steps=6, quorum_grace_s=12.0)
LARGEST = replace(
    RUN,
    interval_steps=100_000,
    interval_s=INTERVAL_S,
    data=DataConfig(window_tokens=1 << 20),
    inner=InnerConfig(batch_windows=1 << 16),
)
"""A run whose leases have more tokens than a report may have."""


class HandMade:
    """Follow two heads of a run as a follower that the test controls step by step."""

    def __init__(self, swarm: Swarm, network: MemoryNetwork) -> None:
        self.swarm = swarm
        self._network = network

    @property
    def step(self) -> int:
        state = self.swarm.members["head-0"].trainer.state
        return state.outer_step if state else 0

    async def reached(self, step: int) -> None:
        async with asyncio.timeout(100):
            while self.step < step:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    @asynccontextmanager
    async def following(self, reply: str = "welcome") -> AsyncIterator[Stream]:
        """Follow a head in the step under way, which first gives this `reply`."""
        member = self.swarm.members["head-0"].trainer
        state = member.state
        assert state is not None
        clusters = draw_clusters(
            member.digest, state.manifest.roster, frozenset(state.manifest.stripes[0].roster), max_group=2, size=2
        )
        head = clusters.heads_of(self._network.peer_id)[0]
        method = Methods(self.swarm.run.run_id).follow
        async with self._network.stream(head, method, timeout_s=100.0) as stream:
            request = FollowRequest(run=self.swarm.run.run_id, step=state.outer_step + 1, state_digest=member.digest)
            await stream.send(request.to_bytes())
            assert await heard(stream) == reply
            yield stream

    def tokens_of(self, step: int) -> int:
        return next(event.num_tokens for event in self.swarm.members["head-0"].of(OuterStep) if event.step == step)


async def heard(stream: Stream) -> str:
    return FollowReply.from_bytes(await stream.receive()).kind


@asynccontextmanager
async def run_with_follower(run: RunConfig = RUN) -> AsyncIterator[HandMade]:
    """Start two heads that are about to take outer step 3, and a follower with a lease."""
    async with Swarm(run) as swarm:
        for index in range(2):
            await swarm.join(f"head-{index}", inner=SyntheticInner(virtual_step_s=STEP_S))
        follower = HandMade(swarm, swarm.internet.network(identity_of("by hand")))
        await follower.reached(1)
        async with follower.following() as stream:
            await stream.send(FollowerWork().to_bytes())
            assert await heard(stream) == "committed"
        await follower.reached(2)
        yield follower
        assert_equal_steps(await swarm.finish(), 6)


async def send_work(stream: Stream, num_steps: int = 5, frame: bytes | None = None) -> None:
    work = FollowerWork(num_tokens=8 * num_steps, num_samples=2 * num_steps, loss=1.0)
    await stream.send(work.to_bytes())
    await stream.send(get_codec("int8").encode(torch.zeros(NUM_VALUES)) if frame is None else frame)


def test_followers_work_counts_and_it_is_shown_the_certificate() -> None:
    async def main() -> None:
        async with run_with_follower() as follower, follower.following() as stream:
            await send_work(stream)
            assert await heard(stream) == "committed"
            await follower.reached(3)
            assert follower.tokens_of(3) == 3 * TOKENS

    virtual_time.run(main())


def test_follower_is_asked_to_hurry_and_brings_partial_work_when_its_head_waits() -> None:
    async def main() -> None:
        async with run_with_follower() as follower, follower.following() as stream:
            assert await heard(stream) == "hurry"
            await send_work(stream, num_steps=2)
            assert await heard(stream) == "committed"
            await follower.reached(3)
            assert follower.tokens_of(3) == 2 * TOKENS + 16

    virtual_time.run(main())


def test_round_continues_without_a_follower_that_brings_no_work() -> None:
    async def main() -> None:
        async with run_with_follower() as follower, follower.following() as stream:
            assert [await heard(stream) for _ in range(3)] == ["hurry", "late", "committed"]
            await follower.reached(3)
            assert follower.tokens_of(3) == 2 * TOKENS

    virtual_time.run(main())


def test_head_that_went_to_the_round_takes_no_work_until_the_step_is_over() -> None:
    async def main() -> None:
        async with run_with_follower() as follower, follower.following() as stream:
            assert [await heard(stream) for _ in range(2)] == ["hurry", "late"]
            async with follower.following(reply="late"):
                pass
            assert await heard(stream) == "committed"

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("work", "frame", "words"),
    [
        (FollowerWork(num_tokens=44, num_samples=11), b"", "more tokens or samples than its lease"),
        (FollowerWork(num_tokens=41, num_samples=10), b"", "more tokens or samples than its lease"),
        (FollowerWork(num_tokens=40, num_samples=10), b"short", "sent a bad frame"),
        (FollowerWork(num_tokens=40, num_samples=10), get_codec("fp32").encode(torch.ones(NUM_VALUES)), "bad frame"),
    ],
    ids=["samples", "tokens", "short", "codec"],
)
def test_head_refuses_a_follower_that_lies_about_its_work(work: FollowerWork, frame: bytes, words: str) -> None:
    async def main() -> None:
        async with run_with_follower() as follower:
            async with follower.following() as stream:
                await stream.send(work.to_bytes())
                await stream.send(frame)
                with pytest.raises(PeerViolation, match=words):
                    await heard(stream)
            await follower.reached(3)
            assert follower.tokens_of(3) == 2 * TOKENS

    virtual_time.run(main())


def test_head_refuses_work_that_no_report_has_room_for() -> None:
    """The lease allows it, but together with the head's own tokens it is more than a report may have."""

    async def main() -> None:
        async with run_with_follower(LARGEST) as follower:
            async with follower.following() as stream:
                work = FollowerWork(num_tokens=limits.MAX_INTERVAL_TOKENS, num_samples=10**9, loss=1.0)
                await stream.send(work.to_bytes())
                await stream.send(get_codec("int8").encode(torch.zeros(NUM_VALUES)))
                with pytest.raises(PeerViolation, match="its share of a report"):
                    await heard(stream)
            await follower.reached(3)
            assert follower.tokens_of(3) == 2 * TOKENS

    virtual_time.run(main())


def test_head_refuses_a_follower_that_sends_too_few_frames() -> None:
    async def main() -> None:
        async with run_with_follower() as follower, follower.following() as stream:
            await stream.send(FollowerWork(num_tokens=40, num_samples=10).to_bytes())
            await stream.finish()
            with pytest.raises(PeerViolation, match="too little"):
                await heard(stream)

    virtual_time.run(main())


def test_head_serves_a_follower_only_over_its_newest_stream() -> None:
    """A follower could otherwise open many streams and have its head keep a vector for each."""

    async def main() -> None:
        async with run_with_follower() as follower, follower.following() as former:
            async with follower.following() as stream:
                with pytest.raises(PeerRefused, match="another stream"):
                    await heard(former)
                await send_work(stream)
                assert await heard(stream) == "committed"
            await follower.reached(3)
            assert follower.tokens_of(3) == 3 * TOKENS

    virtual_time.run(main())


def test_head_turns_away_a_trainer_that_follows_another_head_or_has_no_place() -> None:
    async def main() -> None:
        async with run_with_follower() as follower:
            stranger = follower.swarm.internet.network(identity_of("stranger"))
            head, method = follower.swarm.members["head-0"], Methods(follower.swarm.run.run_id).follow
            replies = []
            for digest in (head.trainer.digest, bytes(32)):
                for each in follower.swarm.members.values():
                    request = FollowRequest(run=follower.swarm.run.run_id, step=3, state_digest=digest)
                    async with stranger.stream(each.peer_id, method, timeout_s=10.0) as stream:
                        await stream.send(request.to_bytes())
                        replies.append(await heard(stream))
            # three of four places are taken; a head at another state shows its own
            assert sorted(replies) == ["committed", "committed", "full", "welcome"]

    virtual_time.run(main())


def test_head_sends_keepalives_while_the_step_lasts() -> None:
    async def main() -> None:
        run = config(min_group=2, max_group=2, cluster_size=2, outer_steps=2)
        async with Swarm(run) as swarm:
            for index in range(2):
                await swarm.join(f"head-{index}", inner=SyntheticInner(virtual_step_s=2 * ALIVE_S / 5))
            follower = HandMade(swarm, swarm.internet.network(identity_of("by hand")))
            await asyncio.sleep(4.0)
            async with follower.following() as stream:
                assert await heard(stream) == "welcome"
                assert await heard(stream) == "committed"
                with pytest.raises(EndOfStream):
                    await stream.receive()

    virtual_time.run(main())


def test_head_keeps_nothing_of_newcomers_that_leave() -> None:
    class Leaves:
        async def send(self, message: bytes) -> None:
            assert FollowReply.from_bytes(message).kind == "welcome"

        async def receive(self) -> bytes:
            raise EndOfStream

    async def main() -> None:
        me = identity_of("head").peer_id
        clusters = draw_clusters(bytes(32), (me,), frozenset([me]), max_group=1, size=4)
        setup = SimpleNamespace(
            me=me,
            leased=(me,),
            clusters=clusters,
            standings=TrainerStandings(),
            num_values=NUM_VALUES,
            admits=lambda peer: True,
        )
        step = SimpleNamespace(context=None, setup=setup, state=SimpleNamespace(began_at=0.0))
        head = ClusterHead(cast(Any, step))
        for index in range(10):
            with pytest.raises(PeerViolation, match="too little"):
                await head.serve(identity_of(f"newcomer {index}").peer_id, cast(Any, Leaves()))
        assert not head._seats

    virtual_time.run(main())


@pytest.mark.parametrize(("aggregator", "is_moved"), [("centered_clip", False), ("mean", True)])
def test_head_combines_its_cluster_by_the_runs_aggregator(aggregator: str, is_moved: bool) -> None:
    """The liar's numbers are well formed."""
    codec, own_F = get_codec("int8"), torch.ones(NUM_VALUES)
    sent = {identity_of(f"follower {n}").peer_id: codec.encode(own_F + 0.01 * n) for n in range(4)}
    sent[identity_of("liar").peer_id] = codec.encode(-1e4 * own_F)
    head = ClusterHead.__new__(ClusterHead)
    head._context = cast(
        "Any", SimpleNamespace(codec=codec, replica=SimpleNamespace(config=config(aggregator=aggregator)))
    )
    setup = SimpleNamespace(run="run", step=1, state_digest=bytes(32), num_values=NUM_VALUES)
    head._setup, head._frames = cast("Any", setup), [slice(0, NUM_VALUES)]
    members = [
        Contribution(peer_id=peer, num_tokens=TOKENS, num_samples=10)
        for peer in sorted([*sent, identity_of("me").peer_id])
    ]
    seats = {peer: SimpleNamespace(frames=[frame]) for peer, frame in sent.items()}
    delta_F, _ = head._aggregated(members, own_F, cast("Any", seats))
    assert (float((delta_F - own_F).abs().max()) > 1.0) is is_moved


@pytest.mark.parametrize("loss", [limits.MAX_LOSS, -limits.MAX_LOSS])
def test_mean_loss_of_a_cluster_is_never_beyond_the_bounds_of_a_report(loss: float) -> None:
    """The mean of equal losses may be rounded away from zero."""
    me, follower, num_tokens = identity_of("me").peer_id, identity_of("follower").peer_id, 18_662_816_155_346
    assert abs(loss * num_tokens / num_tokens) > limits.MAX_LOSS
    codec, head = get_codec("int8"), ClusterHead.__new__(ClusterHead)
    head._context = cast("Any", SimpleNamespace(codec=codec, replica=SimpleNamespace(config=config(aggregator="mean"))))
    setup = SimpleNamespace(
        run="run",
        step=1,
        state_digest=bytes(32),
        num_values=NUM_VALUES,
        max_group=2,
        standings=TrainerStandings(known=(me, follower)),
    )
    head._setup, head._frames, head._places = cast("Any", setup), [slice(0, NUM_VALUES)], {follower: 0}
    work = FollowerWork(num_tokens=num_tokens, num_samples=10**9, loss=loss)
    seat = SimpleNamespace(work=work, frames=[codec.encode(torch.ones(NUM_VALUES))], credential=None)
    own = IntervalOffer(contribution=Contribution(peer_id=me), delta_F=None, made_at=0.0, interval_s=0.0)
    offer, _ = head._combined(own, cast("Any", {follower: seat}))
    assert offer.contribution.loss == loss
