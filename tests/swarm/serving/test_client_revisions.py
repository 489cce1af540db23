"""Servers of several weights under one name: which of them a client uses, how its user learns of it, and how to pin
one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm.client import AsyncClient, UsedRevisions
from swarm.client.async_client import ClientOptions
from swarm.client.catalog import LOST_S
from swarm.serving.model.model_files import open_model
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, SwarmError

HALVES = [(0, 3), (3, 6)]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, llama_dir: Path, write_tiny: Any) -> Callable[[bool], Path]:
    """`others(True)` returns other weights whose digest is greater, `others(False)` ones whose digest is less."""

    def written() -> Iterator[tuple[bool, Path]]:
        own = open_model(llama_dir).revision()
        for seed in range(1, 20):
            directory = write_tiny(tmp_path_factory.mktemp(f"other{seed}"), "llama", seed=seed)
            yield open_model(directory).revision() > own, directory

    found: dict[bool, Path] = {}
    for is_greater, directory in written():
        found.setdefault(is_greater, directory)
        if len(found) == 2:
            break
    return found.__getitem__


async def newcomers(box: Any, directory: Path, *spans: tuple[int, int]) -> str:
    """Let servers with other weights join under the same name, wait until all see them, and return their revision."""
    honest, box.directory = box.directory, directory
    for start, end in spans:
        server = await box.add(start, end)
    await box.known(len(box.servers))
    await asyncio.sleep(3)
    box.directory = honest
    return str(server.revision)


@pytest.mark.parametrize("num_newcomers", [2, 4])
def test_client_keeps_the_weights_that_it_has_used_when_newcomers_join(
    boxes: Any, llama_dir: Path, others: Any, num_newcomers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without this rule, two newcomers take a name over from two honest servers by the greater digest, and four by
    number.
    """

    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            assert await box.tokens() == box.expected()
            own = box.client.trace()["revision"]
            other = await newcomers(box, others(True), *(HALVES * (num_newcomers // 2)))
            with caplog.at_level(logging.WARNING, logger="swarm.client.catalog"):
                for _ in range(3):
                    assert await box.tokens() == box.expected()
            assert [line.getMessage() for line in caplog.records] == [
                f"tiny is served with several weights: revision {own[:12]} by 2 servers, which is used here, and "
                f"{other[:12]} by {num_newcomers} servers; to be sure of one, ask for tiny@{own[:12]}"
            ]
            (status,) = await box.client.models()
            assert status.revision == own
            assert [(each.revision, each.num_servers, each.is_whole) for each in status.others] == [
                (other, num_newcomers, True)
            ]
            assert box.client.trace()["revision"] == own

    virtual_time.run(scenario())


def test_client_remembers_used_weights_after_a_restart(boxes: Any, llama_dir: Path, others: Any) -> None:
    told: list[dict[str, list[str]]] = []

    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            used = UsedRevisions(on_new=lambda all_used: told.append({m: list(r) for m, r in all_used.items()}))
            client = AsyncClient(network=box.network, membership=box.membership, options=ClientOptions(used=used))
            box.client, first = client, box.client
            assert await box.tokens() == box.expected()
            await client.aclose()
            other = await newcomers(box, others(True), *HALVES)
            assert told == [{"tiny": [client.trace()["revision"]]}]
            box.client = AsyncClient(
                network=box.network, membership=box.membership, options=ClientOptions(used=UsedRevisions(told[0]))
            )
            assert await box.tokens() == box.expected()
            await box.client.aclose()
            box.client = first
            assert await box.tokens() != box.expected(), (
                "a client that has used none takes the one with the greater digest"
            )
            assert first.trace()["revision"] == other

    virtual_time.run(scenario())


def test_client_uses_other_weights_only_when_the_used_ones_are_lost(boxes: Any, llama_dir: Path, others: Any) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)], detection_s=0.1) as box:
            assert await box.tokens() == box.expected()
            own = box.client.trace()["revision"]
            other = await newcomers(box, others(False), (0, 6))
            box.internet.crash(box.who["s0"])
            since_s = asyncio.get_running_loop().time()
            while box.client.trace()["revision"] == own:
                await asyncio.sleep(1)
                try:
                    await box.tokens(2)
                except SwarmError:
                    continue
            assert LOST_S <= asyncio.get_running_loop().time() - since_s <= LOST_S + 5
            assert box.client.trace()["revision"] == other

    virtual_time.run(scenario())


@pytest.mark.parametrize("num_whole", [1, 2])
def test_client_uses_a_live_whole_revision_when_the_servers_of_another_are_dead(
    boxes: Any, llama_dir: Path, others: Any, num_whole: int
) -> None:
    """Their records are valid for another minute."""

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 3, detection_s=0.1) as box:
            other = await newcomers(box, others(False), *[(0, 6)] * num_whole)
            for who in ("s0", "s1", "s2"):
                box.internet.crash(box.who[who])
            for pause_s in (0, 0, 1, 2, 5, 10, 20):
                await asyncio.sleep(pause_s)
                await box.tokens(2)
                assert box.client.trace()["revision"] == other

    virtual_time.run(scenario())


def test_client_uses_only_the_pinned_revision(boxes: Any, llama_dir: Path, others: Any) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            own = open_model(llama_dir).revision()
            other = await newcomers(box, others(True), (0, 6), (0, 3))
            for model in (f"tiny@{own[:8]}", f"tiny@{own}"):
                assert await box.tokens(model=model) == box.expected()
                assert box.client.trace()["revision"] == own
                assert box.client.trace()["model"] == "tiny"
                assert await box.client.context_tokens(model) == 256
            status = await box.client.model(f"tiny@{other[:8]}")
            assert (status.revision, status.num_servers) == (other, 2)
            assert await box.client.model("tiny@00000000") is None
            listed = f"{other[:12]} by 2 servers, {own[:12]} by 2 servers"
            with pytest.raises(ConfigError, match=f"nobody serves that revision of tiny; served are {listed}"):
                await box.tokens(model="tiny@00000000")
            for who in ("s0", "s1"):
                await box.servers[box.who[who]].close()
            await asyncio.sleep(3)
            with pytest.raises(SwarmError):
                await box.tokens(model=f"tiny@{own}")

    virtual_time.run(scenario())


def test_client_pin_for_all_requests_holds_for_each(boxes: Any, llama_dir: Path, others: Any) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            own = open_model(llama_dir).revision()
            other = await newcomers(box, others(True), (0, 6), (0, 6), (0, 6))
            first = box.client
            box.client = AsyncClient(
                network=box.network, membership=box.membership, options=ClientOptions(pins={"tiny": own[:8]})
            )
            try:
                assert await box.tokens() == box.expected()
                assert await box.tokens(model=f"tiny@{own}") == box.expected()
                with pytest.raises(ConfigError, match=f"of tiny only revision {own[:8]} is used here, and not {other}"):
                    await box.tokens(model=f"tiny@{other}")
                (status,) = await box.client.models()
                assert status.revision == own
            finally:
                await box.client.aclose()
                box.client = first
            with pytest.raises(ConfigError, match="'main' is not the beginning of a revision of tiny"):
                AsyncClient(
                    network=box.network, membership=box.membership, options=ClientOptions(pins={"tiny": "main"})
                )

    virtual_time.run(scenario())


def test_used_revisions_are_bounded_and_the_last_used_ones_are_kept() -> None:
    used = UsedRevisions({f"m{i}": ["r"] for i in range(1000)})
    assert used.of("m0") == ()
    assert list(used.of("m999")) == ["r"]
    for i in range(9):
        used.add("tiny", f"r{i}")
        used.add("tiny", f"r{i}")
    assert list(used.of("tiny")) == ["r5", "r6", "r7", "r8"]
    with pytest.raises(ValueError, match="not a name"):
        UsedRevisions({"../etc": ["r"]})
