"""Runs a second implementation of the protocol, written from docs/reference/protocol alone, against real nodes.

It imports nothing of Swarm but the generated messages. So what it can do, another team can do with these pages.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from interop.libp2p_channel import peer_id_of, public_key_of
from interop.second_node import Node as SecondNode
from interop.second_node import make_envelope, pack, read_envelope, unpack
from interop.second_observer import Observer, check_run_file, outer_step
from interop.second_server import serving
from interop.second_session import Session, find_servers
from support.node_process import Node
from support.published_models import published_copy
from support.tiny_models import FAMILIES, local_tokens, write_model
from swarm.serving.checking.finished_answer import CheckReport
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import load_checked_run, write_run
from swarm.training.run.run_tables import DEFAULT_MODEL
from swarm_protocol.identity import Identity
from swarm_protocol.proto import records_pb2

from swarm import AsyncClient

NETWORK = "second"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
PROMPT = list(b"The swarm says that ")
NUM_TOKENS = 20
SPANS = ("0:3", "3:6", "3:6")
Nodes = list[tuple[Node, str, str]]
OPTIONS = ("--network-id", NETWORK, "--probe", "off", "--device", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    published_copy(write_model(folder / "made", FAMILIES["llama"]()), folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="module")
def nodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Start a seed and three servers of which two have the same blocks, each with its peer id and address."""
    folder, started = tmp_path_factory.mktemp("nodes"), list[Node]()
    try:
        started.append(Node("seed", "--network-id", NETWORK, home=folder / "seed", is_light=True))
        ready = [started[0].wait_for("ready")]
        join = ("join", "--peers", ready[0]["addrs"][0], *OPTIONS, "--model", model)
        for number, blocks in enumerate(SPANS):
            home = folder / f"server-{number}"
            started.append(Node(*join, "--blocks", blocks, home=home, is_forked=True))
        ready += [node.wait_for("ready") for node in started[1:]]
        yield [(node, event["peer_id"], event["addrs"][0]) for node, event in zip(started, ready, strict=True)]
    finally:
        for node in started:
            node.end()


def test_second_implementation_imports_nothing_of_swarm_but_generated_messages() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        if path.name == Path(__file__).name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("swarm"):
                assert node.module == "swarm_protocol.proto", f"{path.name} imports {node.module}"


def test_second_implementation_joins_calls_and_reads_records(nodes: Nodes) -> None:
    async def look() -> None:
        _, seed, addr = nodes[0]
        async with SecondNode(NETWORK) as node:
            await node.join(addr)
            assert await node.call(seed, "ping", b"") == b""
            records = {}
            while len(records) < len(nodes):
                records = await node.find("nodes")
            assert {peer_id_of(signer) for signer in records} == {peer_id for _, peer_id, _ in nodes}
            newest = unpack(records_pb2.NodeRecord, records[public_key_of(seed)].payload)
            assert newest.role == "seed"

    asyncio.run(look())


def test_second_implementation_publishes_a_record_and_a_changed_one_is_refused(
    nodes: Nodes,
) -> None:
    async def publish() -> None:
        _, seed, addr = nodes[0]
        async with SecondNode(NETWORK) as node:
            await node.join(addr)
            record = pack(records_pb2.NodeRecord(name="second", version="2", state="alive", reachability="unknown"))
            signed = make_envelope(node.host, "record", NETWORK, "nodes#", record, 60.0)
            changed = signed.replace(b"second\x12\x012", b"Second\x12\x012")
            assert not await node.store(seed, changed)
            with pytest.raises(InvalidSignature):
                read_envelope(changed, "record", NETWORK, 300.0)
            assert await node.store(seed, signed)
            found = await node.find("nodes")
            assert found[public_key_of(node.host.peer_id)].payload == record

    asyncio.run(publish())


def test_second_implementation_serves_blocks_to_the_sdk_and_a_lie_is_noticed(nodes: Nodes, model: Path) -> None:
    async def serve() -> None:
        connected = AsyncClient.connect(peers=[nodes[0][2]], network_id=NETWORK, spot_check=1.0)
        async with SecondNode(NETWORK) as node, connected as client:
            while len(await client.servers(model.name)) < len(SPANS):
                await asyncio.sleep(0.1)
            expected, _ = await ask(client, model.name)
            await node.join(nodes[0][2])
            async with serving(node, model.name, model) as server:
                own = node.host.peer_id
                while own not in await client.servers(model.name):
                    await asyncio.sleep(0.1)
                answer, report = await ask(client, model.name, own)
                assert answer == expected
                assert (report.start, report.end, report.result) == (3, 6, "passed")
                assert server.num_looped
                while client.possession.num_proven <= len(SPANS):
                    assert not client.possession.num_failed
                    assert not client.possession.num_unanswered
                    await asyncio.sleep(0.05)
                server.blocks.factor = 1.5
                _, report = await ask(client, model.name, own)
                assert (report.result, report.reason, report.named) == ("failed", "draws", own)

    asyncio.run(serve())


async def ask(client: AsyncClient, model: str, server: str = "") -> tuple[list[int], CheckReport]:
    """Return a greedy answer in which the server took part, or any one, and the report on its last blocks."""
    for _ in range(20):
        generation = client.generate(model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0)
        answer = [token.token_id async for token in generation]
        await client.checks.settled()
        if server in ("", generation.trace()["hops"][-1]["peer_id"]):
            return answer, client.checks.reports[-1]
    raise AssertionError("The server was never asked.")


def test_second_implementation_generates_and_replaces_a_killed_server(nodes: Nodes, model: Path) -> None:
    async def generate() -> list[int]:
        async with SecondNode(NETWORK) as node:
            await node.join(nodes[0][2])
            servers = []
            while len(servers) < len(SPANS):
                servers = await find_servers(node, model.name)
            session = Session(node, model.name, len(PROMPT) + NUM_TOKENS)
            await session.open([servers[0], servers[1]])
            answer = [await session.step(PROMPT, 0)]
            while len(answer) < NUM_TOKENS:
                if len(answer) == NUM_TOKENS // 2:
                    [lost] = [node for node, peer_id, _ in nodes if peer_id == servers[1].peer_id]
                    lost.process.send_signal(signal.SIGKILL)
                answer.append(await session.step(answer[-1:], len(answer)))
            assert session.replaced == [servers[1].peer_id]
            await session.close()
            return answer

    assert asyncio.run(generate()) == local_tokens(model, PROMPT, NUM_TOKENS)


def test_second_implementation_follows_a_run_and_makes_its_outer_step(nodes: Nodes, tmp_path: Path) -> None:
    config = RunConfig(
        name="seen",
        outer_steps=1000,
        interval_steps=2,
        min_group=2,
        max_group=2,
        quorum_grace_s=0.5,
        model=dict(DEFAULT_MODEL) | SMALL,
    )
    write_run(tmp_path / "run.toml", config, Identity.generate())
    join = ("join", "--peers", nodes[0][2], *OPTIONS, "--run", tmp_path / "run.toml")
    members = [Node(*join, home=tmp_path / f"member-{number}", is_forked=True) for number in range(2)]
    try:
        run = load_checked_run(tmp_path / "run.toml").run_id
        peer_ids = [str(member.wait_for("ready")["peer_id"]) for member in members]
        for member in members:  # a member's record may be found before it answers calls
            member.wait_for("outer_step")
        asyncio.run(observe(nodes[0][2], run, peer_ids))
    finally:
        for member in members:
            member.process.kill()
            member.end()


async def observe(seed_addr: str, run: str, members: list[str]) -> None:
    async with SecondNode(NETWORK) as node:
        await node.join(seed_addr)
        while {peer_id_of(signer) for signer in await node.find(f"train/{run}")} != set(members):
            await asyncio.sleep(0.1)
        observer = Observer(node, run)
        settings, named = check_run_file(await observer.run_file(members[0]))
        assert named == run
        while True:
            first, before = await observer.state_after(members[0], 1)
            second, after = await observer.state_after(members[0], first.step + 1)
            if second.step == first.step + 1:
                break
        assert second.before == first.after
        delta = await observer.delta(members[0], second, len(before) // 8)
        outer = settings["outer"]
        assert outer_step(before, delta, outer["learning_rate"], outer["momentum"]) == after
        steps = [observer.check_certificate(each) for each in await observer.history(members[1], 1)]
        made = [each.step for each in steps if each.num_tokens]
        assert made == list(range(1, len(made) + 1))
        assert all(later.before == former.after for former, later in itertools.pairwise(steps))
