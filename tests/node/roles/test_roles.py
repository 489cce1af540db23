"""The roles' decisions without a network: names, rates, relays, invitations and reachability."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest
from support.private_networks import Owner
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
from swarm_node.roles.serving import ModelServing, model_name
from swarm_node.roles.training import RunTraining
from swarm_node.roles.volunteer import VolunteerRole
from swarm_node.settings.config import Config
from swarm_node.shutdown import Shutdown
from swarm_protocol.errors import ConfigError, SessionError
from swarm_protocol.network_invitation import RIGHTS, Right
from swarm_protocol.records import Reachability, TrainerRecord

PEER = "12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi"
LOCAL = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
LAN = f"/ip6/fd00::7/tcp/1/p2p/{PEER}"
RELAYED = f"/ip4/203.0.113.9/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}"
FAR = f"/ip4/203.0.113.7/tcp/1/p2p/{PEER}"


def config(**more: object) -> Config:
    return Config(home=Path("/nowhere"), name="test", **more)  # type: ignore[arg-type]


def test_join_command_prefers_an_address_that_others_can_use() -> None:
    assert join_command((LOCAL, FAR), "swarm") == f"swarm-node join --peers {FAR}"
    assert join_command((LAN, FAR, LOCAL), "swarm") == f"swarm-node join --peers {FAR}"
    assert join_command((LOCAL, LAN), "swarm") == f"swarm-node join --peers {LAN}"
    assert join_command((), "swarm") == "swarm-node join"
    assert join_command((LOCAL,), "mine") == f"swarm-node join --peers {LOCAL} --network-id mine"


@pytest.mark.parametrize("relay", ["auto", "use", "none"])
def test_volunteer_uses_relays_as_its_setting_says_and_a_seed_relays(relay: str) -> None:
    told = config(peers=(FAR,), relay=relay)
    assert VolunteerRole(told).relay(told) == StandbyRole(told).relay(told) == relay
    assert SeedRole(told).relay(told) == "serve"


@pytest.mark.parametrize(("port", "note"), [(0, "holds until the seed is started again"), (4001, "")])
def test_seed_says_that_its_address_changes_unless_its_port_is_fixed(port: int, note: str) -> None:
    node = MagicMock(config=config(listen=(f"/ip4/0.0.0.0/tcp/{port}",)))
    node.network.addrs, node.shutdown.leaving.wait = AsyncMock(return_value=(FAR,)), AsyncMock()
    asyncio.run(SeedRole(node.config).run(node))
    said = node.emitter.emit.call_args.kwargs["note"]
    assert note in said
    assert bool(said) == bool(note)


@pytest.mark.parametrize(
    ("rights", "way"),
    [(("join", "ask"), "ask the network's owner"), (RIGHTS, "restart this node without --take, or with")],
)
def test_node_without_work_prints_only_what_leads_to_work(rights: tuple[Right, ...], way: str) -> None:
    node = MagicMock(config=config(invite=Owner().invite(*rights), origins={"take": "--take"}), work_end=Shutdown())
    node.work_end.request("Ctrl-C")
    asyncio.run(StandbyRole(node.config).run(node))
    assert node.steps.done.call_args.args[1].startswith(f"to work, {way}")


def test_model_name_is_that_of_its_directory() -> None:
    assert model_name(Path("/models/tiny-1")) == "tiny-1"
    with pytest.raises(ConfigError, match="cannot be served under its own name"):
        model_name(Path("/models/tiny one"))


def test_failed_serving_ends_the_node_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    volunteer = AsyncMock(failure=None, server=MagicMock(start_block=0, end_block=1, sessions=(), num_tokens=0))
    monkeypatch.setattr("swarm_node.roles.serving.SpanPlacer", lambda *_, **__: volunteer)
    monkeypatch.setattr("swarm_node.roles.serving._options", lambda *_: VolunteerOptions())

    async def scene() -> None:
        node = MagicMock(work_end=Shutdown(), **{"network.network_id": "test"})
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


def test_finished_training_says_for_whom_and_how_long_it_stays() -> None:
    err = io.StringIO()

    async def scene() -> None:
        internet = MemoryInternet()
        network, other = internet.network(), internet.network()
        run = SignedRun(config=RunConfig(name="x"), peer_id="author", issued_at=1, signature=b"")
        async with Membership(network) as membership, Membership(other) as others:
            others.announce(TrainerRecord(run=run.run_id, outer_step=1, state="training"))
            await asyncio.sleep(1)
            node = MagicMock(network=network, membership=membership, work_end=Shutdown(), metrics=Registry())
            node.emitter = Emitter(json=False, err=err)
            staying = asyncio.create_task(RunTraining(node, run).let_others_finish())
            await asyncio.sleep(5)
            node.work_end.request("Ctrl-C")
            async with asyncio.timeout(1):
                await staying
        await internet.close()

    virtual_time.run(scene())
    assert err.getvalue().startswith("waiting up to 29 s to send the last state to members that have not finished (1;")
    assert len(err.getvalue().splitlines()) == 1


def test_finished_training_stays_while_it_is_watched() -> None:
    async def scene() -> float:
        run = SignedRun(config=RunConfig(name="x"), peer_id="author", issued_at=1, signature=b"")
        network = MagicMock(peer_id="me")
        membership = MagicMock(trainers=AsyncMock(return_value={}))  # nobody is behind
        node = MagicMock(network=network, membership=membership, work_end=Shutdown(), metrics=Registry())
        training = RunTraining(node, run)
        training._trainer = MagicMock(is_watched=True)
        now = asyncio.get_running_loop().time
        since_s = now()
        asyncio.get_running_loop().call_later(3, setattr, training._trainer, "is_watched", False)
        await training.let_others_finish()
        return now() - since_s

    assert virtual_time.run(scene()) == pytest.approx(3, abs=1.1)


@pytest.mark.parametrize(("takes_s", "lines"), [(0.5, []), (5.0, ["waiting for the current step"])])
def test_training_that_is_to_end_says_what_it_waits_for(takes_s: float, lines: list[str]) -> None:
    err = io.StringIO()

    async def scene() -> None:
        stopped = asyncio.Event()

        async def run() -> None:
            await stopped.wait()
            await asyncio.sleep(takes_s)

        run_file = SignedRun(config=RunConfig(name="x"), peer_id="author", issued_at=1, signature=b"")
        node = MagicMock(work_end=Shutdown(), metrics=Registry(), emitter=Emitter(json=False, err=err))
        training = RunTraining(node, run_file)
        training._trainer = MagicMock(run=run, stop=stopped.set, state=None)
        node.work_end.request("Ctrl-C")
        assert await training.finish() is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(scene())
    assert [line.strip().split(";")[0] for line in err.getvalue().splitlines()] == lines


@pytest.mark.parametrize(
    ("found", "addrs", "words"),
    [
        ("unknown", [LOCAL], "no network address"),
        ("unknown", [FAR], "nobody has confirmed that others reach this node; if they do not, forward a TCP port"),
        ("unknown", [RELAYED, FAR], "through relays; nobody has confirmed yet"),
        ("public", [LOCAL], "only from this machine"),
        ("public", [FAR], "directly"),
        ("public", ["/ip4/10.0.0.7/tcp/1", LOCAL], "local network"),
        ("relay", [FAR], "behind a NAT or a firewall: direct paths to peers that allow them"),
    ],
)
def test_explain_says_what_blocks_connections_and_how_to_allow_them(
    found: Reachability, addrs: list[str], words: str
) -> None:
    assert words in str(reachability.explain(found, addrs, listens=True, was_tested=True, is_symmetric=False))


def test_explain_names_a_symmetric_nat_and_a_node_without_a_listener() -> None:
    assert (
        "another port for each peer"
        in reachability.explain("relay", [], listens=True, was_tested=True, is_symmetric=True).meaning
    )
    for found, addrs in (("relay", [FAR]), ("unknown", []), ("unknown", [LOCAL]), ("public", [LOCAL])):
        explained = reachability.explain(found, addrs, listens=False, was_tested=True, is_symmetric=True)
        assert "does not listen beyond" in explained.meaning
        assert "--listen" in explained.remedy


def test_explain_names_no_nat_while_no_peer_has_answered_whether_it_reaches_the_node() -> None:
    for is_symmetric in (False, True):
        explained = reachability.explain("relay", [FAR], listens=True, was_tested=False, is_symmetric=is_symmetric)
        assert ("NAT" in explained.meaning) == is_symmetric
        assert is_symmetric or "nobody has confirmed yet" in explained.meaning


def test_explain_of_a_node_whose_peers_are_all_on_this_machine_has_no_remedy() -> None:
    for peers, words in (([LOCAL], "where its peers are, too"), ([LOCAL, FAR], "--listen"), ([], "--listen")):
        explained = reachability.explain(
            "unknown", [LOCAL], listens=False, was_tested=True, is_symmetric=False, peer_addrs=peers
        )
        assert words in str(explained)


def test_explain_of_a_reachable_node_has_no_remedy() -> None:
    assert reachability.explain("public", [FAR], listens=True, was_tested=True, is_symmetric=True).remedy == ""
