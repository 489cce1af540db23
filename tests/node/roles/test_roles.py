"""The decisions of the roles without a network: names, rates, relays, invitations and reachability."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.serving.server.capability import VolunteerOptions
from swarm.testing import virtual_time
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun
from swarm_node.events.emitter import Emitter
from swarm_node.machine import reachability
from swarm_node.metrics.metric_registry import Registry
from swarm_node.roles.helper import StandbyRole
from swarm_node.roles.seed import SeedRole, join_command
from swarm_node.roles.serving import ModelServing, TokenRate, model_name
from swarm_node.roles.training import RunTraining
from swarm_node.roles.volunteer import VolunteerRole
from swarm_node.settings.config import Config
from swarm_node.shutdown import Shutdown
from swarm_protocol.errors import ConfigError, PeerRefused, SessionError, StartError, SwarmError
from swarm_protocol.records import NodeRecord, TrainerRecord

PEER = "12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi"
LOCAL = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
FAR = f"/ip4/203.0.113.7/tcp/1/p2p/{PEER}"


def config(**more: object) -> Config:
    return Config(home=Path("/nowhere"), name="test", **more)  # type: ignore[arg-type]


def test_join_command_prefers_an_address_that_others_can_use() -> None:
    assert join_command((LOCAL, FAR), "swarm") == f"swarm-node join --peers {FAR}"
    assert join_command((LOCAL,), "mine") == f"swarm-node join --peers {LOCAL} --network-id mine"


@pytest.mark.parametrize(
    ("more", "relay"),
    [
        ({"peers": (LOCAL,)}, "none"),
        ({"peers": (LOCAL, FAR)}, "use"),
        ({"peers": (FAR,), "announce": ("/ip4/198.51.100.1/tcp/4001",)}, "none"),
        ({"peers": (LOCAL,), "relay": "use"}, "use"),
        ({"peers": (FAR,), "relay": "none"}, "none"),
    ],
)
def test_volunteer_uses_a_relay_unless_all_is_local_or_its_way_is_open(more: dict[str, object], relay: str) -> None:
    told = config(**more)
    assert VolunteerRole(told).relay(told) == StandbyRole(told).relay(told) == relay
    assert SeedRole(told).relay(told) == "serve"


def test_token_rate_is_over_the_last_seconds() -> None:
    rate = TokenRate()
    assert rate.update(0.0, 0) == 0
    assert rate.update(1.0, 10) == 10
    assert rate.update(5.0, 10) == 2
    assert rate.update(7.0, 10) == 0


def test_model_name_is_the_directorys() -> None:
    assert model_name(Path("/models/tiny-1")) == "tiny-1"
    with pytest.raises(ConfigError, match="cannot be served under its own name"):
        model_name(Path("/models/tiny one"))


def test_serving_that_fails_ends_the_node_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    volunteer = AsyncMock(failure=None, server=MagicMock(start_block=0, end_block=1, sessions=(), num_tokens=0))
    monkeypatch.setattr("swarm_node.roles.serving.SpanVolunteer", lambda *_, **__: volunteer)
    monkeypatch.setattr("swarm_node.roles.serving._options", lambda *_: VolunteerOptions())

    async def scene() -> None:
        node = MagicMock(shift=Shutdown())
        serving = asyncio.create_task(ModelServing(node, Path("tiny"), "tiny", numbered=False).until_leaving())
        await asyncio.sleep(10)
        assert not serving.done()
        volunteer.failure = SessionError("tiny is served here no more")
        with pytest.raises(SessionError, match="no more"):
            async with asyncio.timeout(2):
                await serving
        assert node.activity.serving is None
        volunteer.close.assert_awaited_once()

    virtual_time.run(scene())


def test_training_that_is_done_says_for_whom_and_how_long_it_stays() -> None:
    err = io.StringIO()

    async def scene() -> None:
        internet = MemoryInternet()
        network, other = internet.network(), internet.network()
        run = SignedRun(config=RunConfig(name="x"), peer_id="author", issued_at=1, signature=b"")
        async with Membership(network) as membership, Membership(other) as others:
            others.announce(TrainerRecord(run=run.run_id, outer_step=1, state="training"))
            await asyncio.sleep(1)
            node = MagicMock(network=network, membership=membership, shift=Shutdown(), metrics=Registry())
            node.emitter = Emitter(json=False, err=err)
            staying = asyncio.create_task(RunTraining(node, run).let_others_finish())
            await asyncio.sleep(5)
            node.shift.request("Ctrl-C")
            async with asyncio.timeout(1):
                await staying
        await internet.close()

    virtual_time.run(scene())
    assert err.getvalue().startswith("waiting up to 29 s for members that have not finished (1, dead ones among them)")
    assert len(err.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("takes_s", "lines"), [(0.5, []), (5.0, ["waiting for the step that is under way"])])
def test_training_that_is_to_end_says_what_it_waits_for(takes_s: float, lines: list[str]) -> None:
    err = io.StringIO()

    async def scene() -> None:
        stopped = asyncio.Event()

        async def run() -> None:
            await stopped.wait()
            await asyncio.sleep(takes_s)

        run_file = SignedRun(config=RunConfig(name="x"), peer_id="author", issued_at=1, signature=b"")
        node = MagicMock(shift=Shutdown(), metrics=Registry(), emitter=Emitter(json=False, err=err))
        training = RunTraining(node, run_file)
        training._trainer = MagicMock(run=run, stop=stopped.set, state=None)
        node.shift.request("Ctrl-C")
        assert await training.finish() is None

    virtual_time.run(scene())
    assert [line.strip().split(";")[0] for line in err.getvalue().splitlines()] == lines


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"reached", "public"),
        (b"not reached", "unknown"),
        (PeerRefused("too many ask"), "unknown"),
        (StartError("the seed's own trouble"), "unknown"),
    ],
)
def test_measure_is_what_the_seed_found(answer: bytes | SwarmError, found: str) -> None:
    async def scene() -> str:
        internet = MemoryInternet()
        seed, node = internet.network(), internet.network()

        async def dial_back(_peer_id: str, _request: bytes) -> bytes:
            if isinstance(answer, SwarmError):
                raise answer
            return answer

        await seed.serve(reachability.METHOD, dial_back)
        measured = await reachability.measure(node, [seed.peer_id])
        await node.close()
        await seed.close()
        return measured

    assert virtual_time.run(scene()) == found


def test_serve_refuses_whoever_has_no_record() -> None:
    async def scene() -> None:
        internet = MemoryInternet()
        seed, node = internet.network(), internet.network()
        async with Membership(seed) as membership:
            await reachability.serve(seed, membership)
            with pytest.raises(PeerRefused, match="record has not arrived"):
                await node.call(seed.peer_id, reachability.METHOD, b"", timeout_s=30)
        await node.close()
        await seed.close()

    virtual_time.run(scene())


@asynccontextmanager
async def asking_to_be_dialled(*addrs: str) -> AsyncIterator[tuple[Network, Network]]:
    """A seed that dials back, and a node whose record it has: with `addrs`, where {0} stands for the node's peer id."""
    internet = MemoryInternet()
    seed, node = internet.network(), internet.network()
    record = NodeRecord(
        name="node",
        version="1",
        addrs=tuple(addr.format(node.peer_id) for addr in addrs),
        device="cpu",
        memory_bytes=0,
        free_memory_bytes=0,
        reachability="unknown",
        started_at=0.0,
    )
    async with Membership(seed) as membership, Membership(node) as asker:
        asker.announce(record)
        await reachability.serve(seed, membership)
        await asyncio.sleep(5)
        yield seed, node
    await node.close()
    await seed.close()


def test_serve_dials_back_each_asker_once_at_a_time_and_says_if_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    may_start = asyncio.Event()

    async def start(_options: object) -> None:
        await may_start.wait()
        raise StartError("no more processes")

    monkeypatch.setattr("swarm_node.machine.reachability.Host.start", start)

    async def scene() -> None:
        async with asking_to_be_dialled("/ip4/203.0.113.7/tcp/1/p2p/{0}") as (seed, node):
            first = asyncio.create_task(node.call(seed.peer_id, reachability.METHOD, b"", timeout_s=30))
            await asyncio.sleep(1)
            with pytest.raises(PeerRefused, match="too many"):
                await node.call(seed.peer_id, reachability.METHOD, b"", timeout_s=30)
            may_start.set()
            with pytest.raises(PeerRefused, match="cannot dial back"):
                await first

    virtual_time.run(scene())


def test_serve_dials_nothing_that_is_no_address_of_the_asker(monkeypatch: pytest.MonkeyPatch) -> None:
    start = AsyncMock(side_effect=AssertionError("a host was started for nothing"))
    monkeypatch.setattr("swarm_node.machine.reachability.Host.start", start)

    async def scene() -> None:
        # no port of that number, no address, another peer's, and one through a relay
        odd = ("/ip4/1.2.3.4/tcp/99999", "/nonsense/x", FAR, f"{FAR}/p2p-circuit/p2p/{{0}}")
        async with asking_to_be_dialled(*odd) as (seed, node):
            assert await node.call(seed.peer_id, reachability.METHOD, b"", timeout_s=30) == b"not reached"

    virtual_time.run(scene())


def test_serve_whose_host_breaks_says_so_without_waiting_for_the_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise RuntimeError("a bug in the connection")

    host = MagicMock()
    host.unary.run = broken
    host.control.connect = lambda *_: asyncio.Event().wait()
    host.stop = AsyncMock()
    monkeypatch.setattr("swarm_node.machine.reachability.Host.start", AsyncMock(return_value=host))

    async def scene() -> None:
        membership = MagicMock(nodes=AsyncMock(return_value={PEER: MagicMock(addrs=(FAR,))}))
        async with asyncio.timeout(1):
            with pytest.raises(ExceptionGroup) as failed:
                await reachability._reaches(membership, PEER)
        assert failed.group_contains(RuntimeError, match="a bug in the connection")
        host.stop.assert_awaited_once()

    virtual_time.run(scene())


def test_explain_of_a_node_that_listens_on_loopback_only_says_how_to_open_it() -> None:
    assert "--listen" in reachability.explain("unknown", [LOCAL])
    assert "forward a port" in reachability.explain("unknown", [FAR])
    assert "only from this machine" in reachability.explain("public", [LOCAL])
    assert "directly" in reachability.explain("public", [FAR])
    assert "local network" in reachability.explain("public", ["/ip4/10.0.0.7/tcp/1", LOCAL])
    assert "through a seed" in reachability.explain("relay", [FAR])
    assert "through a seed" in reachability.explain("relay", []), "it listens nowhere itself"


def test_measure_asks_again_when_the_record_has_not_arrived_yet() -> None:
    async def main() -> None:
        internet = MemoryInternet()
        seed, node = internet.network(), internet.network()
        answers: list[PeerRefused | bytes] = [
            PeerRefused("this node's record has not arrived yet", retry_after_s=1.0),
            b"reached",
        ]

        async def dial_back(_peer_id: str, _request: bytes) -> bytes:
            answer = answers.pop(0)
            if isinstance(answer, PeerRefused):
                raise answer
            return answer

        await seed.serve(reachability.METHOD, dial_back)
        assert await reachability.measure(node, [seed.peer_id]) == "public"
        assert answers == []
        await internet.close()

    virtual_time.run(main())
