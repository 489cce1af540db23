"""Fetched chunks survive a restart."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from support.donor_world import DonorWorld
from swarm.testing import virtual_time
from swarm.training.state.state_download import ChunkFolder
from swarm_protocol.errors import PeerUnreachable

CHUNK = b"chunk" * 100
DIGEST = hashlib.sha256(CHUNK).digest()
NUM_VALUES = 1 << 20
NUM_CHUNKS = 8


def test_chunks_are_kept_for_the_next_process_and_deleted_when_done(tmp_path: Path) -> None:
    ChunkFolder(tmp_path / "chunks", max_bytes=1 << 20).keep(DIGEST, CHUNK)
    folder = ChunkFolder(tmp_path / "chunks", max_bytes=1 << 20)
    assert list(folder.resume([DIGEST, bytes(32)])) == [CHUNK]
    folder.clear()
    assert list(tmp_path.iterdir()) == []
    assert list(folder.resume([DIGEST])) == []


def test_resume_drops_chunks_of_another_state(tmp_path: Path) -> None:
    folder = ChunkFolder(tmp_path, max_bytes=1 << 20)
    folder.keep(DIGEST, CHUNK)
    (tmp_path / "foreign").write_bytes(b"x")
    assert list(folder.resume([bytes(32)])) == []
    assert list(tmp_path.iterdir()) == []


def test_keep_stays_within_its_bytes_over_restarts(tmp_path: Path) -> None:
    chunks = [bytes([number]) * 500 for number in range(4)]
    digests = [hashlib.sha256(chunk).digest() for chunk in chunks]
    for _ in range(2):
        folder = ChunkFolder(tmp_path, max_bytes=1200)
        assert len(list(folder.resume(digests))) in {0, 2}
        for digest, chunk in zip(digests, chunks, strict=True):
            folder.keep(digest, chunk)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 1000


def test_unusable_folder_is_one_warning_and_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = ChunkFolder(tmp_path / "file", max_bytes=1 << 20)
    for _ in range(3):
        folder.keep(DIGEST, CHUNK)
    assert list(folder.resume([DIGEST])) == []
    folder.clear()
    assert caplog.text.count("after a restart the state must be fetched anew") == 1


def test_killed_download_continues_with_its_stored_chunks(tmp_path: Path) -> None:
    """The second fetcher is a new one, and shares only the folder with the first."""
    asked: list[int] = []

    async def first() -> None:
        async with DonorWorld(NUM_VALUES, store=ChunkFolder(tmp_path / "chunks", max_bytes=8 * NUM_VALUES)) as world:

            async def dies(peer: str, request: bytes) -> bytes:
                if world.num_asked[0] > NUM_CHUNKS - 3:
                    raise PeerUnreachable("the joiner is killed here", peer_id=peer)
                return await honest.chunk(peer, request)

            honest = await world.donor(20.0, chunk=dies)
            with pytest.raises(Exception, match="cannot be fetched"):
                await world.fetch()

    async def second() -> None:
        async with DonorWorld(NUM_VALUES, store=ChunkFolder(tmp_path / "chunks", max_bytes=8 * NUM_VALUES)) as world:
            await world.donor(20.0)
            fetched, _ = await world.fetch()
            asked.extend((world.num_asked[0], fetched.num_bytes))

    virtual_time.run(first())
    kept = len(list((tmp_path / "chunks").iterdir()))
    assert 1 <= kept <= NUM_CHUNKS - 3
    torn, spoiled = sorted((tmp_path / "chunks").iterdir())[:2]
    torn.write_bytes(torn.read_bytes()[:1000])
    spoiled.write_bytes(bytes(1 << 20))
    virtual_time.run(second())
    assert asked == [NUM_CHUNKS - kept + 2, (NUM_CHUNKS - kept + 2) << 20]
    assert not (tmp_path / "chunks").exists()
