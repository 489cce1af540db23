"""Truncated answers of the record DHT, and the whole ones, which come over streams."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest
from swarm.network.dht.known_peers import RecordTransport, StreamedCalls
from swarm.network.dht.record_dht import RecordDht
from swarm.network.dht.record_storage import RecordValidator
from swarm.network.interface import NotServed, UnaryHandler
from swarm.network.peer_budgets import MAX_UNARY_BYTES
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact, FindRequest, FindResponse, Found, dht_id_of
from swarm_protocol.envelope import Envelope, seal_record
from swarm_protocol.errors import PeerUnreachable, PeerViolation
from swarm_protocol.identity import Identity, peer_id_of

NOW = 1_700_000_000.0
KEYS = ("nodes/1", "nodes/2")
LARGE = bytes(limits.MAX_RECORD_BYTES)
NUM_LARGE = 2 * MAX_UNARY_BYTES // len(LARGE)
ASKER, HOLDER = (Identity(bytes([number]) * 32) for number in (1, 2))


def records(key: str, num_records: int, payload: bytes = LARGE) -> tuple[Envelope, ...]:
    signers = (Identity(number.to_bytes(32, "big")) for number in range(1, num_records + 1))
    return tuple(
        seal_record(each, network_id="test", key=key, payload=payload, issued_at=NOW, lifetime_s=60) for each in signers
    )


def found(*envelopes: Envelope) -> Found:
    return Found(records=tuple(each.to_bytes() for each in envelopes))


class Wire:
    """A host that reaches a single peer, which is scripted, by unary calls and over streams."""

    peer_id = ASKER.peer_id

    def __init__(self, answer: UnaryHandler, whole: UnaryHandler) -> None:
        self._answer = answer
        self._whole = whole
        self.num_streamed = 0

    async def serve(self, protocol: str, answer: UnaryHandler) -> None: ...

    async def serve_streamed(self, protocol: str, answer: UnaryHandler, *, max_request_bytes: int) -> None: ...

    async def call(self, _peer_id: str, _protocol: str, request: bytes, **_how: object) -> bytes:
        return await self._answer(self.peer_id, request)

    async def call_streamed(
        self, _peer_id: str, _protocol: str, request: bytes, *, timeout_s: float, max_bytes: int
    ) -> bytes:
        self.num_streamed += 1
        async with asyncio.timeout(timeout_s):
            data = await self._whole(self.peer_id, request)
        assert len(data) <= max_bytes
        return data


async def found_over(wire: Wire) -> list[Envelope]:
    """Return what a node finds when its only peer answers over `wire`."""
    streams = cast("StreamedCalls", wire)
    dht = RecordDht(cast("RecordTransport", wire), "", RecordValidator("test", lambda: NOW), streams)
    dht.known.table.heard_of(HOLDER.peer_id)
    envelopes, is_answered = await dht.find(KEYS[:1], timeout_s=5)
    assert is_answered
    return envelopes


def answering(response: FindResponse) -> UnaryHandler:
    async def answer(_peer_id: str, _request: bytes) -> bytes:
        return response.to_bytes()

    return answer


async def not_asked(_peer_id: str, _request: bytes) -> bytes:
    raise AssertionError("nothing was cut")


def test_whole_answer_is_fetched_where_it_was_cut() -> None:
    held = records(KEYS[0], NUM_LARGE)
    cut = FindResponse(found=(found(*held[:3]),), is_cut=True)

    async def main() -> None:
        wire = Wire(answering(cut), answering(FindResponse(found=(found(*held),))))
        assert set(await found_over(wire)) == set(held)
        assert wire.num_streamed == 1

    virtual_time.run(main())


def test_large_unary_answer_of_an_earlier_version_is_used_whole() -> None:
    held = records(KEYS[0], NUM_LARGE)

    async def main() -> None:
        assert set(await found_over(Wire(answering(FindResponse(found=(found(*held),))), not_asked))) == set(held)

    virtual_time.run(main())


@pytest.mark.parametrize(
    "outcome",
    [
        PeerUnreachable("it left"),
        PeerViolation("it sends frames of no kind"),
        NotServed(HOLDER.peer_id),
        TimeoutError(),
        b"",
        b"\x01\xff",
        FindResponse().to_bytes(),
    ],
    ids=repr,
)
def test_cut_answer_is_used_when_the_whole_one_does_not_come(outcome: bytes | Exception) -> None:
    held = records(KEYS[0], 3)

    async def whole(_peer_id: str, _request: bytes) -> bytes:
        if isinstance(outcome, TimeoutError):
            await asyncio.Event().wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def main() -> None:
        wire = Wire(answering(FindResponse(found=(found(*held),), is_cut=True)), whole)
        assert set(await found_over(wire)) == set(held)
        assert wire.num_streamed == 1

    virtual_time.run(main())


def test_answer_over_the_unary_connection_is_small_and_names_every_peer() -> None:
    contacts = tuple(
        Contact(peer_id=peer_id_of(bytes([number]) * 32), addrs=("/ip4/1.2.3.4/tcp/1",)) for number in range(20)
    )
    first = Found(records=found(*records(KEYS[0], NUM_LARGE)).records, peers=contacts)
    answer = FindResponse(found=(first, found(*records(KEYS[1], 3, b"small"))), addrs=("/ip4/1.2.3.4/tcp/2",))
    draws = set()
    for seed in range(20):
        cut = answer.within(MAX_UNARY_BYTES, random.Random(seed))
        assert cut.is_cut
        assert cut.addrs == answer.addrs
        (place,) = cut.found
        assert place.peers == contacts
        assert set(place.records) < set(first.records)
        num_bytes = len(cut.to_bytes())
        assert MAX_UNARY_BYTES - 2 * len(LARGE) < num_bytes <= MAX_UNARY_BYTES
        draws.update(place.records)
    assert draws == set(first.records), "each node names other peers"


def test_cut_answer_begins_with_the_addresses_that_fit() -> None:
    small, large = found(*records(KEYS[0], 3, b"small")), found(*records(KEYS[1], NUM_LARGE))
    cut = FindResponse(found=(small, large)).within(MAX_UNARY_BYTES, random.Random(0))
    assert cut == FindResponse(found=(small,), is_cut=True)
    whole = FindResponse(found=(small, small))
    assert whole.within(MAX_UNARY_BYTES, random.Random(0)) is whole


def test_node_cuts_a_large_answer_and_sends_the_whole_one_over_a_stream() -> None:
    async def main() -> None:
        served: dict[str, UnaryHandler] = {}

        class Serving(Wire):
            async def serve(self, protocol: str, answer: UnaryHandler) -> None:
                served[protocol] = answer

            async def serve_streamed(self, protocol: str, answer: UnaryHandler, *, max_request_bytes: int) -> None:
                assert max_request_bytes == limits.MAX_FIND_REQUEST_BYTES
                served[protocol] = answer

        wire = Serving(not_asked, not_asked)
        streams = cast("StreamedCalls", wire)
        dht = RecordDht(cast("RecordTransport", wire), "", RecordValidator("test", lambda: NOW), streams)
        await dht.serve()
        held = records(KEYS[0], NUM_LARGE)
        for envelope in held:
            assert dht._storage.store(envelope, envelope.to_bytes())
        request = FindRequest(keys=(dht_id_of(KEYS[0]),)).to_bytes()
        cut = await served["find"](HOLDER.peer_id, request)
        assert len(cut) <= MAX_UNARY_BYTES
        assert FindResponse.from_bytes(cut).is_cut
        whole = await served["find_whole"](HOLDER.peer_id, request)
        assert FindResponse.from_bytes(whole) == FindResponse(found=(found(*held),))
        assert await served["find"](HOLDER.peer_id, b"\x01\xff") == await served["find_whole"]("", b"") == b""

    virtual_time.run(main())
