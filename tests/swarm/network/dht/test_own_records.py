"""Tests of how a node dates the records that it signs, and detects copies of itself, when its clock is set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from swarm.network.dht.own_records import OwnRecords
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.envelope import Envelope
from swarm_protocol.identity import Identity

IDENTITY = Identity(b"a" * 32)
NOW = 1_700_000_000.0


class Holders:
    """Stores every record, as the nodes nearest to its key do, and finds the newest."""

    def __init__(self) -> None:
        self.stored: list[Envelope] = []

    async def store(self, envelope: Envelope) -> bool:
        self.stored.append(envelope)
        return True

    async def find(self, keys: Sequence[str], *, timeout_s: float, max_records: int) -> tuple[list[Envelope], bool]:
        del timeout_s, max_records
        found = {each.subject: each for each in sorted(self.stored, key=lambda each: each.issued_at)}
        return [found[key] for key in keys if key in found], True


class Node:
    """The records of a node whose clock shows `now`."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now
        self.holders = Holders()
        self.num_copies = 0
        self.records = OwnRecords(cast("Any", self.holders), IDENTITY, "test", lambda: self.now, self.note_copy)

    def note_copy(self) -> None:
        self.num_copies += 1

    async def publish(self, key: str = "k", payload: bytes = b"") -> float:
        """Publish a record, and return how far ahead of this node's clock it is dated."""
        await self.records.publish(key, payload, lifetime_s=limits.RECORD_LIFETIME_S)
        return self.holders.stored[-1].issued_at - self.now

    async def lookup(self, key: str = "k") -> list[bytes]:
        return [each.payload for each in await self.records.lookup([key], timeout_s=5)]


def test_records_are_dated_now_when_a_clock_that_was_ahead_is_set_back() -> None:
    async def scenario() -> None:
        node = Node()
        node.now += 3600
        await node.publish()
        node.now -= 3600
        assert await node.publish(payload=b"now") == 0
        node.holders.stored.pop(0)  # a node that holds records refuses one that is dated ahead
        assert await node.lookup() == [b"now"]
        assert node.num_copies == 0

    virtual_time.run(scenario())


def test_record_is_dated_after_the_one_before_when_the_clock_is_set_back_a_little() -> None:
    async def scenario() -> None:
        node = Node()
        await node.publish()
        node.now -= limits.MAX_CLOCK_SKEW_S - 1
        assert 0 < await node.publish() <= limits.MAX_CLOCK_SKEW_S

    virtual_time.run(scenario())


def test_own_record_is_no_copy_when_the_clock_was_set_back_and_forth() -> None:
    async def scenario() -> None:
        node = Node()
        await node.publish()
        node.now -= 2 * limits.MAX_CLOCK_SKEW_S
        await node.publish()
        node.now += 2 * limits.MAX_CLOCK_SKEW_S
        await node.lookup()
        assert node.num_copies == 0

    virtual_time.run(scenario())


def test_last_record_of_a_key_is_no_copy_when_the_clock_is_set_back_after_it_expired() -> None:
    async def scenario() -> None:
        node = Node()
        node.now += 1
        await node.publish(payload=b"the last")
        node.now += limits.RECORD_LIFETIME_S + 5
        assert await node.lookup() == []
        node.now -= 10
        await node.lookup()
        assert node.num_copies == 0

    virtual_time.run(scenario())


@pytest.mark.parametrize("publishes", [False, True])
def test_record_of_the_last_run_is_no_copy_when_the_clock_was_set_back_before_the_start(publishes: bool) -> None:
    async def scenario() -> None:
        before = Node()
        await before.publish()
        node = Node(NOW - limits.MAX_CLOCK_SKEW_S + 1)
        node.holders.stored += before.holders.stored
        for _ in range(20):
            if publishes:
                await node.publish()
            await node.lookup()
            node.now += 1
        assert node.num_copies == 0

    virtual_time.run(scenario())


def test_record_of_another_holder_of_the_key_is_a_copy() -> None:
    async def scenario() -> None:
        node, other = Node(), Node()
        await node.publish()
        node.now = other.now = NOW + limits.MAX_CLOCK_SKEW_S + 1
        await other.publish()
        node.holders.stored += other.holders.stored
        await node.lookup()
        assert node.num_copies == 1

    virtual_time.run(scenario())
