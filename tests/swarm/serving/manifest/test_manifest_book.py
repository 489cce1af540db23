"""Tests of what a client requests and reports when servers announce manifests that no server sends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from swarm.serving.manifest.manifest_book import MAX_FETCHED, RETRY_S, ManifestBook
from swarm.testing import virtual_time
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.records import ServeRecord


class NobodyAnswers:
    """A network in which all calls fail."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def call(self, peer_id: str, *_: Any, **__: Any) -> bytes:
        self.num_calls += 1
        raise PeerUnreachable("nobody is there", peer_id=peer_id)


def announcing(number: int) -> ServeRecord:
    return ServeRecord(
        model="m",
        revision=f"{number:032x}",
        num_blocks=1,
        start=0,
        end=1,
        state="serving",
        prefill_ms_per_token=1.0,
        decode_ms_per_block=1.0,
        free_kv_tokens=1,
        manifest=number.to_bytes(32, "big"),
    )


def test_missing_manifests_are_reported_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Anyone can announce ever new manifests, and each would otherwise add lines to the log for each request."""

    async def main() -> None:
        network: Any = NobodyAnswers()
        book = ManifestBook(network)
        servers = {f"peer {number}": announcing(number) for number in range(10 * MAX_FETCHED)}
        for num_told in (1, 2):
            for num_asked in range(1, 6):
                await book.learn("m", servers, within_s=1.0)
                assert network.num_calls == ((num_told - 1) * 5 + num_asked) * MAX_FETCHED
            assert [record.getMessage().split(":")[0] for record in caplog.records] == ["no manifest of m"] * num_told
            await asyncio.sleep(RETRY_S)
        await book.close()

    virtual_time.run(main())
