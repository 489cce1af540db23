"""Large requests and responses: in which order they are received, and how long waiting ones are kept."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from swarm.network.libp2p import calls as module
from swarm.network.libp2p.calls import (
    BULK_S,
    MAX_BULK_PER_PEER,
    MAX_PARCELS_PER_PEER_BYTES,
    PARCEL_S,
    Calls,
)
from swarm.network.peer_budgets import MAX_UNARY_BYTES
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerRefused, PeerTimeout

LARGE = bytes(MAX_UNARY_BYTES + 1)


class Sender:
    """A stream that sends its message when the test says so."""

    def __init__(self, calls: Calls, peer_id: str) -> None:
        self.is_read = False
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.answers: list[bytes] = []
        self.handled = asyncio.create_task(calls.bulk_handler(_size)(peer_id, self))  # type: ignore[arg-type]

    async def receive(self) -> bytes:
        self.is_read = True
        return await self.message

    async def send(self, message: bytes) -> None:
        self.answers.append(message)


async def _size(_peer_id: str, request: bytes) -> bytes:
    return b"%d" % len(request)


def _calls() -> Calls:
    """Return calls of a host whose peers are connected from the network that is the first letter of their ids."""
    return Calls(SimpleNamespace(provider_of=lambda peer_id: peer_id[:1]), None)  # type: ignore[arg-type]


def test_large_requests_of_one_peer_are_received_a_few_at_a_time_and_delay_no_other_peer() -> None:
    async def main() -> None:
        calls = _calls()
        greedy = [Sender(calls, "greedy") for _ in range(MAX_BULK_PER_PEER + 2)]
        other = Sender(calls, "other")
        await asyncio.sleep(1)
        assert [sender.is_read for sender in greedy] == [True] * MAX_BULK_PER_PEER + [False] * 2
        assert other.is_read
        greedy[0].message.set_result(LARGE)
        await greedy[0].handled
        await asyncio.sleep(1)
        assert [sender.is_read for sender in greedy[-2:]] == [True, False]
        assert greedy[0].answers == [b"%d" % len(LARGE)]
        for sender in (*greedy[1:], other):
            with pytest.raises(PeerTimeout, match="did not come in time"):
                await sender.handled
        assert not calls._turns

    virtual_time.run(main())


def test_parcel_is_given_once_to_its_caller_and_kept_for_a_while() -> None:
    async def large(_peer_id: str, _request: bytes) -> bytes:
        return LARGE

    async def fetched(calls: Calls, peer_id: str, token: bytes) -> bytes:
        stream = Sender(calls, "")
        stream.message.set_result(token)
        await calls.hand_out_parcel(peer_id, stream)  # type: ignore[arg-type]
        return stream.answers[0]

    async def main() -> None:
        calls = _calls()
        answer = calls.unary_answer(large)
        most = MAX_PARCELS_PER_PEER_BYTES // len(LARGE)
        tokens = [(await answer("caller", b""))[1:] for _ in range(most + 1)]
        foreign = (await answer("other", b""))[1:]
        with pytest.raises(PeerRefused):
            await fetched(calls, "caller", tokens[0])  # its own newer parcels displaced it
        with pytest.raises(PeerRefused):
            await fetched(calls, "caller", foreign)
        assert await fetched(calls, "caller", tokens[1]) == LARGE
        with pytest.raises(PeerRefused):
            await fetched(calls, "caller", tokens[1])
        await asyncio.sleep(PARCEL_S + 1)
        with pytest.raises(PeerRefused):
            await fetched(calls, "other", foreign)
        assert (calls._parcels, calls._num_parcel_bytes) == ({}, {})

    virtual_time.run(main())


def test_unfetched_parcels_do_not_displace_those_of_a_modest_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PARCELS_BYTES", 10 * len(LARGE))

    async def large(_peer_id: str, _request: bytes) -> bytes:
        return LARGE

    async def main() -> None:
        calls = _calls()
        answer = calls.unary_answer(large)
        token = (await answer("honest", b""))[1:]
        for number in range(100):
            await answer(f"key {number % 3}", b"")
        assert len(calls._parcels) == 10
        fetching = Sender(calls, "")
        fetching.message.set_result(token)
        await calls.hand_out_parcel("honest", fetching)  # type: ignore[arg-type]
        assert fetching.answers[0] == LARGE

    virtual_time.run(main())


def test_stream_that_names_no_parcel_is_closed() -> None:
    async def main() -> None:
        silent = Sender(_calls(), "caller")
        silent.handled.cancel()
        async with asyncio.timeout(PARCEL_S + 1):
            with pytest.raises(PeerTimeout, match="did not come in time"):
                await _calls().hand_out_parcel("caller", silent)  # type: ignore[arg-type]

    virtual_time.run(main())


class Stalled(Sender):
    """A stream whose caller reads nothing of the response."""

    async def send(self, message: bytes) -> None:
        await asyncio.Event().wait()


def test_response_is_given_up_when_its_caller_does_not_read_it() -> None:
    async def large(_peer_id: str, _request: bytes) -> bytes:
        return LARGE

    async def main() -> None:
        calls = _calls()
        caller = Stalled(calls, "caller")
        caller.message.set_result(LARGE)
        fetching = Stalled(calls, "")
        fetching.handled.cancel()
        fetching.message.set_result((await calls.unary_answer(large)("caller", b""))[1:])
        handing_out = asyncio.create_task(calls.hand_out_parcel("caller", fetching))  # type: ignore[arg-type]
        async with asyncio.timeout(BULK_S + 1):
            for stalled in (caller.handled, handing_out):
                with pytest.raises(PeerTimeout, match="was not taken in time"):
                    await stalled

    virtual_time.run(main())


def test_peer_that_reads_no_responses_has_few_of_them_made_and_kept() -> None:
    """Otherwise each of the streams that a peer may have could hold one of the largest responses for minutes."""
    num_made = 0

    async def large(_peer_id: str, _request: bytes) -> bytes:
        nonlocal num_made
        num_made += 1
        return LARGE

    async def main() -> None:
        calls = _calls()
        stalled = [Stalled(calls, "") for _ in range(MAX_BULK_PER_PEER + 2)]
        for stream in stalled:
            stream.handled.cancel()
            stream.message.set_result(b"request")
        asked = [asyncio.create_task(calls.bulk_handler(large)("greedy", each)) for each in stalled]  # type: ignore[arg-type]
        await asyncio.sleep(1)
        assert num_made == MAX_BULK_PER_PEER
        tokens = [(await calls.unary_answer(large)("greedy", b""))[1:] for _ in range(MAX_BULK_PER_PEER + 1)]
        for token in tokens:
            fetching = Stalled(calls, "")
            fetching.handled.cancel()
            fetching.message.set_result(token)
            asked.append(asyncio.create_task(calls.hand_out_parcel("greedy", fetching)))  # type: ignore[arg-type]
        await asyncio.sleep(1)
        assert list(calls._parcels) == tokens[-1:], "it waits for its turn, and counts meanwhile"
        for each in asked:
            each.cancel()
        await asyncio.wait(asked)
        assert not calls._turns

    virtual_time.run(main())


def test_parcels_are_fetched_at_once_when_large_requests_of_the_peer_are_answered_late() -> None:
    """A coordinator holds members' large reports while the same members fetch other large answers from it."""

    async def late(_peer_id: str, _request: bytes) -> bytes:
        await asyncio.sleep(60)
        return b"late"

    async def large(_peer_id: str, _request: bytes) -> bytes:
        return LARGE

    async def main() -> None:
        calls = _calls()
        reports = [Sender(calls, "") for _ in range(MAX_BULK_PER_PEER)]
        for stream in reports:
            stream.handled.cancel()
            stream.message.set_result(LARGE)
        waiting = [asyncio.create_task(calls.bulk_handler(late)("head", each)) for each in reports]  # type: ignore[arg-type]
        fetching = Sender(calls, "")
        fetching.handled.cancel()
        fetching.message.set_result((await calls.unary_answer(large)("head", b""))[1:])
        async with asyncio.timeout(1):
            await calls.hand_out_parcel("head", fetching)  # type: ignore[arg-type]
        assert fetching.answers == [LARGE]
        await asyncio.wait(waiting)

    virtual_time.run(main())


def test_unfetched_parcels_of_many_keys_do_not_displace_a_peer_of_another_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PARCELS_BYTES", 10 * len(LARGE))

    async def large(_peer_id: str, request: bytes) -> bytes:
        return LARGE + request

    async def main() -> None:
        calls = _calls()
        answer = calls.unary_answer(large)
        token = (await answer("honest", bytes(8)))[1:]
        for number in range(100):
            await answer(f"key {number}", b"")
        assert token in calls._parcels, "it is larger than that of any other key"

    virtual_time.run(main())


class Slow(Sender):
    """A stream whose caller takes a minute to read its response."""

    async def send(self, message: bytes) -> None:
        await asyncio.sleep(60)
        self.answers.append(message)


def test_peers_that_read_no_responses_displace_each_other_and_not_a_modest_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger can have any number of keys, and each key has its turns."""
    most = 10
    monkeypatch.setattr(module, "MAX_LEAVING_BYTES", most * len(LARGE))

    async def large(_peer_id: str, _request: bytes) -> bytes:
        return LARGE

    async def main() -> None:
        calls = _calls()

        def asked(stream: Sender, peer_id: str) -> asyncio.Task[None]:
            stream.handled.cancel()
            stream.message.set_result(b"request")
            return asyncio.create_task(calls.bulk_handler(large)(peer_id, stream))  # type: ignore[arg-type, return-value]

        slow = Slow(calls, "")
        honest = asked(slow, "honest")
        strangers = [asked(Stalled(calls, ""), f"key {number % 5}") for number in range(2 * most)]
        await asyncio.sleep(1)
        assert calls._leaving.num_bytes == most * len(LARGE)
        ended = [each for each in strangers if each.done()]
        assert len(ended) == most + 1
        for each in ended:
            with pytest.raises(PeerTimeout, match="was not taken in time"):
                await each
        await honest
        assert slow.answers == [LARGE]
        for each in strangers:
            each.cancel()
        await asyncio.wait(strangers)
        assert calls._leaving.num_bytes == 0

    virtual_time.run(main())
