"""Tests of what a client knows of all models: one lookup serves everyone who asks at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from support.plain_records import node_record, serve_record
from swarm.client import AsyncClient
from swarm.client.catalog import MODELS_FRESH_S, ModelCatalog
from swarm.client.publishers import KnownPublishers, UsedRevisions
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.serving.session.peer_health import PeerHealth
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.envelope import Envelope
from swarm_protocol.errors import PeerTimeout, SessionError

NUM_ASKING = 50
LOOK_S = 1.0


class Lookups:
    """A membership whose lookups take `look_s` and find no models; `answers` says whether any peer answers."""

    def __init__(self) -> None:
        self.num = 0
        self.look_s = LOOK_S
        self.answers = True

    async def models(self) -> tuple[str, ...]:
        self.num += 1
        await asyncio.sleep(self.look_s)
        if not self.answers:
            raise PeerTimeout("no peer answered", remedy="try again")
        return ()

    async def all_servers(self, models: Collection[str]) -> dict[str, Any]:
        assert not models
        return {}

    async def servers(self, _model: str) -> dict[str, Any]:
        await self.models()
        return {}


def catalog_over(lookups: Any) -> ModelCatalog:
    unused: Any = MagicMock()
    return ModelCatalog(
        lookups,
        PeerHealth(lookups),
        AsyncMock(),
        pins={},
        used=UsedRevisions(),
        publishers=KnownPublishers(),
        possession=unused,
        convictions=unused,
    )


def test_models_are_looked_up_once_for_all_who_ask_at_the_same_time() -> None:
    async def main() -> None:
        lookups = Lookups()
        catalog = catalog_over(lookups)
        for num_looked in (1, 2):
            assert await asyncio.gather(*(catalog.models() for _ in range(NUM_ASKING))) == [[]] * NUM_ASKING
            assert lookups.num == num_looked
            assert await catalog.models() == []
            assert lookups.num == num_looked, "the last lookup was not long ago"
            await asyncio.sleep(MODELS_FRESH_S)

    virtual_time.run(main())


def test_servers_are_looked_up_once_for_all_who_ask_for_a_model_at_the_same_time() -> None:
    async def main() -> None:
        lookups = Lookups()
        catalog = catalog_over(lookups)
        assert await asyncio.gather(*(catalog.status("tiny") for _ in range(NUM_ASKING))) == [None] * NUM_ASKING
        assert lookups.num == 1

    virtual_time.run(main())


def test_name_that_no_model_can_have_is_served_by_nobody() -> None:
    async def main() -> None:
        network = MemoryInternet().network()
        async with Membership(network) as membership:
            catalog = catalog_over(membership)
            assert await catalog.status("no\nname") is None
            assert await catalog.newest_servers("no\nname") == {}
        await network.close()

    virtual_time.run(main())


def test_request_that_waits_for_a_lookup_when_the_client_is_closed_fails_and_is_not_cancelled() -> None:
    async def main() -> None:
        lookups = Lookups()
        catalog = catalog_over(lookups)
        asking = asyncio.create_task(catalog.status("tiny"))
        await asyncio.sleep(LOOK_S / 2)
        await catalog._health.close()
        with pytest.raises(SessionError, match="the client has been closed"):
            await asking

    virtual_time.run(main())


def test_lookup_is_shared_when_it_takes_longer_than_its_result_is_valid() -> None:
    async def main() -> None:
        lookups = Lookups()
        lookups.look_s = 2 * MODELS_FRESH_S
        catalog, loop = catalog_over(lookups), asyncio.get_running_loop()
        since_s = loop.time()
        early = [asyncio.create_task(catalog.models()) for _ in range(NUM_ASKING)]
        await asyncio.sleep(1.5 * MODELS_FRESH_S)
        late = [asyncio.create_task(catalog.models()) for _ in range(NUM_ASKING)]
        await asyncio.wait(early)
        assert loop.time() - since_s == lookups.look_s
        await asyncio.wait(late)
        assert (lookups.num, loop.time() - since_s) == (2, 2 * lookups.look_s), "these callers need a newer result"

    virtual_time.run(main())


def test_failed_lookup_fails_for_all_that_wait_and_is_repeated_for_later_callers() -> None:
    async def main() -> None:
        lookups = Lookups()
        lookups.answers = False
        catalog, loop = catalog_over(lookups), asyncio.get_running_loop()
        since_s = loop.time()
        early = [asyncio.create_task(catalog.models()) for _ in range(NUM_ASKING)]
        await asyncio.sleep(LOOK_S / 2)
        late = [asyncio.create_task(catalog.models()) for _ in range(NUM_ASKING)]
        await asyncio.wait([*early, *late])
        assert (lookups.num, loop.time() - since_s) == (2, 2 * LOOK_S), (
            "a lookup that began before they asked does not serve them"
        )
        for task in (*early, *late):
            with pytest.raises(PeerTimeout, match="no peer answered: try again"):
                task.result()
        lookups.answers = True
        assert await catalog.models() == []

    virtual_time.run(main())


def test_servers_of_all_models_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers can have as many models listed as a client lists, and the client reports each to health probes."""
    lookups: list[Sequence[str]] = []
    plain = MemoryNetwork.lookup

    async def lookup(network: MemoryNetwork, keys: Sequence[str], **options: Any) -> list[Envelope]:
        lookups.append(keys)
        return await plain(network, keys, **options)

    async def main() -> None:
        internet = MemoryInternet()
        async with AsyncExitStack() as stack:
            for node in range(5):
                membership = await stack.enter_async_context(Membership(internet.network()))
                membership.announce(node_record())
                for model in range(limits.MAX_MODELS_PER_NODE):
                    membership.announce(serve_record(model=f"m{node}-{model}"))
            await asyncio.sleep(1)
            asking = internet.network()
            membership = await stack.enter_async_context(Membership(asking))
            client = await stack.enter_async_context(aclosing(AsyncClient(network=asking, membership=membership)))
            monkeypatch.setattr(MemoryNetwork, "lookup", lookup)
            found = await client.models()
            assert {model.name: model.num_servers for model in found} == {
                f"m{node}-{model}": 1 for node in range(5) for model in range(limits.MAX_MODELS_PER_NODE)
            }
            assert len(lookups) == 2, "one lookup of the nodes, and one of all that they name"

    virtual_time.run(main())
