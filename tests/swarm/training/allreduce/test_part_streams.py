"""Tests that a member which sends nothing counts as gone only if it also leaves a call unanswered. All run in virtual
time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.round_scripts import COORDINATOR, ME, signed
from swarm.network.interface import no_failpoints
from swarm.network.link_meter import LinkMeter
from swarm.testing import virtual_time
from swarm.training.allreduce.part_streams import FrameInbox, PartStreams
from swarm.training.allreduce.parts import FRAME_VALUES, ReductionScheme
from swarm.training.allreduce.peer_connections import QUIET_S, SILENT_S, PeerConnections
from swarm.training.run.methods import Methods
from swarm.trust.standard_aggregators import get_aggregator
from swarm_compression import get_codec
from swarm_protocol.errors import ConfigError, PeerRefused, PeerTimeout, PeerViolation

SOON_S = QUIET_S + SILENT_S + 1.0
"""The longest time until a silent member counts as gone, on a connection that carries a few thousand values at once."""


class StubNetwork:
    """Stand in for the network to a member, and answer the call that asks whether the member is there."""

    peer_id = ME

    def __init__(self, answer: Callable[[float], Awaitable[bytes]]) -> None:
        self._answer = answer
        self.num_calls = 0
        self.links = LinkMeter()

    async def call(self, _peer: str, _method: str, _request: bytes, *, timeout_s: float) -> bytes:
        self.num_calls += 1
        return await self._answer(timeout_s)


async def never_answers(timeout_s: float) -> bytes:
    await asyncio.sleep(timeout_s)
    raise PeerTimeout("no answer")


async def answers(_timeout_s: float) -> bytes:
    return b""


async def refuses(_timeout_s: float) -> bytes:
    raise PeerRefused("not now")


async def sends_an_error_that_is_not_its_own(_timeout_s: float) -> bytes:
    raise ConfigError("no such setting")


def streams_over(network: StubNetwork) -> PartStreams:
    connections = PeerConnections(network=cast("Any", network), methods=Methods("run"))
    scheme = ReductionScheme(codec=get_codec("int8"), aggregator=get_aggregator("mean", {}))
    group = signed()
    return PartStreams(
        connections, group, None, scheme, cast("ThreadPoolExecutor", SimpleNamespace()), failpoints=no_failpoints
    )


def seconds_until_silent(answer: Callable[[float], Awaitable[bytes]], work_s: float) -> float | None:
    """Return the seconds until the member counts as gone, or None if its work ended before that."""

    async def main() -> float | None:
        begin = asyncio.get_running_loop().time()
        try:
            await streams_over(StubNetwork(answer)).while_there(COORDINATOR, asyncio.sleep(work_s))
        except PeerTimeout:
            return asyncio.get_running_loop().time() - begin
        return None

    return virtual_time.run(main())


def test_member_counts_as_gone_within_seconds_when_it_sends_nothing_and_answers_no_call() -> None:
    waited_s = seconds_until_silent(never_answers, work_s=100.0)
    assert waited_s is not None
    assert QUIET_S + SILENT_S <= waited_s < SOON_S


@pytest.mark.parametrize("answer", [answers, refuses, sends_an_error_that_is_not_its_own])
def test_member_is_waited_for_when_it_answers_calls(answer: Callable[[float], Awaitable[bytes]]) -> None:
    assert seconds_until_silent(answer, work_s=100.0) is None


def test_member_is_not_called_while_its_frames_arrive() -> None:
    async def main() -> None:
        network = StubNetwork(never_answers)
        streams = streams_over(network)

        async def frames() -> None:
            for _ in range(40):
                await asyncio.sleep(QUIET_S / 2)
                streams.heard(COORDINATOR)

        await streams.while_there(COORDINATOR, frames())
        assert not network.num_calls

    virtual_time.run(main())


def test_member_counts_as_present_when_a_frame_arrives_while_a_call_waits() -> None:
    """A full connection delays the answer to a call, while frames still arrive."""

    async def main() -> None:
        streams = streams_over(StubNetwork(never_answers))

        async def frames() -> None:
            for _ in range(10):
                await asyncio.sleep(QUIET_S + SILENT_S / 2)
                streams.heard(COORDINATOR)

        await streams.while_there(COORDINATOR, frames())

    virtual_time.run(main())


def test_inbox_refuses_a_frame_above_the_maximum_size() -> None:
    """A stream's message may be 64 times as large as a frame, and an inbox keeps several frames ahead."""
    largest = get_codec("fp32").encoded_bytes(FRAME_VALUES)

    class Flood:
        async def receive(self) -> bytes:
            sent.append(1)
            return bytes(largest + (len(sent) > 1))

    sent: list[int] = []

    async def main() -> None:
        inbox = FrameInbox(COORDINATOR, lambda _: None, largest)
        await inbox.fill(cast("Any", Flood()))
        assert len(await inbox.take()) == largest
        with pytest.raises(PeerViolation, match="larger than any"):
            await inbox.take()

    virtual_time.run(main())
    assert len(sent) == 2
