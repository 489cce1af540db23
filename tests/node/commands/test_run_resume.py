"""`swarm-node run resume`: what it finds, prints and signs, with real members on a simulated network."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.training_swarm import AUTHOR, Swarm, config, interval_cost
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.testing import virtual_time
from swarm.training.run.run_file import write_run
from swarm.training.trainer_events import OtherHistory, OuterStep, RunResumed
from swarm_node import cli
from swarm_node.commands import run_orders
from swarm_node.commands.run_orders import AuthorVisit, read_members
from swarm_node.events.emitter import Emitter
from swarm_protocol.errors import ConfigError, PeerTimeout, PeerUnreachable
from swarm_protocol.identity import Identity

pytestmark = pytest.mark.usefixtures("only_errors_logged")

ONLOOKER = Identity(b"onlooker".ljust(32))
NUM_STEPS = 6
PEERS = tuple(Identity(bytes([number]) * 32).peer_id for number in (1, 2))


async def waiting_run(swarm: Swarm) -> None:
    """A run of four members, two of which are gone for good, and which cannot go on without them."""
    for index in range(4):
        await swarm.join(f"m{index}")
    while not all(member.of(OuterStep) for member in swarm.members.values()):
        await asyncio.sleep(0.05)
    swarm.kill("m0")
    swarm.kill("m1")
    await asyncio.sleep(10.0)


async def resume(
    swarm: Swarm, *, is_certain: bool, author: Identity = AUTHOR, named: tuple[str, ...] = ()
) -> list[dict[str, object]]:
    """Return the events of the command, once it has looked and, if it is certain, signed."""
    out = io.StringIO()
    network = swarm.internet.network(ONLOOKER)
    try:
        async with Membership(network) as membership:
            emitter = Emitter(json=True, out=out, err=io.StringIO())
            visit = AuthorVisit(network, membership, swarm.run, author, named, emitter)
            await visit.order(await visit.look(), is_certain=is_certain)
    finally:
        await network.close()
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_resume_names_the_members_that_would_go_on_and_signs_only_when_asked() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            await waiting_run(swarm)
            living = sorted(swarm.members[name].peer_id for name in ("m2", "m3"))
            gone = sorted(swarm.members[name].peer_id for name in ("m0", "m1"))
            planned, ended = await resume(swarm, is_certain=False)
            assert (planned["event"], planned["roster"], planned["left_out"]) == ("resume_planned", living, gone)
            assert ended["event"] == "resume_not_signed"
            planned, _ = await resume(swarm, is_certain=False, named=tuple(living[:1]))
            assert (planned["roster"], planned["left_out"]) == (living[:1], sorted([*gone, living[1]]))
            await asyncio.sleep(5.0)
            assert not any(member.of(RunResumed) for member in swarm.members.values())
            planned, delivered = await resume(swarm, is_certain=True)
            assert (delivered["event"], delivered["peers"]) == ("resume_delivered", living)
            await swarm.finish()
            assert swarm.members["m2"].of(OuterStep)[-1].step == NUM_STEPS

    virtual_time.run(main(), compute_s=interval_cost)


def test_resume_of_a_run_that_goes_on_says_that_it_needs_no_order() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}")
            while not all(member.of(OuterStep) for member in swarm.members.values()):
                await asyncio.sleep(0.05)
            members = sorted(member.peer_id for member in swarm.members.values())
            planned, ended = await resume(swarm, is_certain=False)
            assert ended["event"] == "resume_not_needed"
            assert (ended["members"], ended["answered"]) == (members, members)
            assert ended["outer_step"] == planned["outer_step"]
            _, delivered = await resume(swarm, is_certain=True)
            assert delivered["event"] == "resume_delivered"

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize("num_named", [0, 2], ids=["history of most", "history of those named"])
def test_resume_unites_a_run_that_was_begun_on_both_sides_of_a_partition(num_named: int) -> None:
    """Both sides go on equally fast. No vote unites them, since each side is enough for its own history."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=13)) as swarm:
            members = [await swarm.join(f"m{index}") for index in range(5)]
            few, most = members[:2], members[2:]
            swarm.internet.partition([[member.peer_id for member in few]])
            while not all(member.of(OuterStep) for member in members):
                await asyncio.sleep(0.05)
            swarm.internet.heal()
            async with asyncio.timeout(30.0):
                while not all(member.of(OtherHistory) for member in members):
                    await asyncio.sleep(0.05)
            assert few[0].of(OuterStep)[-1].group != most[0].of(OuterStep)[-1].group
            kept = few if num_named else most
            named = tuple(member.peer_id for member in few[:num_named])
            planned, delivered = await resume(swarm, is_certain=True, named=named)
            assert planned["roster"] == delivered["peers"] == sorted(member.peer_id for member in kept)
            await swarm.finish()
            assert len({member.digest for member in members}) == 1
            (event,) = kept[0].of(RunResumed)
            assert event.digest == planned["digest"] in {each.digest for each in kept[0].of(OuterStep)}
            for member in members:
                assert set(member.of(OuterStep)[-1].group) == {each.peer_id for each in members}

    virtual_time.run(main(), compute_s=partial(interval_cost, interval_s=4.0))


@pytest.mark.parametrize("certain", [False, True], ids=["asked", "certain"])
def test_resume_for_fewer_members_than_a_step_needs_says_that_others_have_to_join(certain: bool) -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            await waiting_run(swarm)
            swarm.kill("m2")
            planned, warned, ended = await resume(swarm, is_certain=certain)
            assert planned["roster"] == [swarm.members["m3"].peer_id]
            assert warned["message"] == "a step needs 2 members, and the run waits until that many are there"
            assert "swarm-node join --run" in str(warned["remedy"])
            assert ended["event"] == ("resume_delivered" if certain else "resume_not_signed")

    virtual_time.run(main(), compute_s=interval_cost)


def test_resume_of_a_run_with_too_few_seats_for_newcomers_says_whom_to_name() -> None:
    async def main() -> None:
        run = config(min_group=3, outer_steps=60)
        async with Swarm(run) as swarm:
            members = [await swarm.join(f"m{index}") for index in range(3)]
            while not all(len(member.of(OuterStep)) >= run.probation.steps for member in members):
                await asyncio.sleep(0.05)
            newcomers = [await swarm.join(f"new{index}") for index in range(2)]
            while not all(member.trainer.has_joined for member in newcomers):
                await asyncio.sleep(0.05)
            for member in members[1:]:
                member.trainer.stop()
            for member in await swarm.finish(*(member.name for member in members[1:])):
                swarm.kill(member.name)
            await asyncio.sleep(60.0)
            planned, warned, ended = await resume(swarm, is_certain=False)
            assert planned["roster"] == [members[0].peer_id]
            assert "newcomers on probation have too few seats beside 1" in str(warned["message"])
            named = sorted(member.peer_id for member in (members[0], *newcomers))
            assert str(warned["remedy"]).endswith(f"--members: {', '.join(named)}")
            assert ended["event"] == "resume_not_signed"
            planned, _ = await resume(swarm, is_certain=True, named=tuple(named))
            assert planned["roster"] == named
            before = members[0].of(OuterStep)[-1].step
            while members[0].of(OuterStep)[-1].step == before:
                await asyncio.sleep(0.05)

    virtual_time.run(main(), compute_s=interval_cost)


def test_resume_of_another_author_or_among_nobody_is_refused() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            await waiting_run(swarm)
            with pytest.raises(ConfigError, match="only that key can resume it"):
                await resume(swarm, is_certain=True, author=ONLOOKER)
            # only the members that are named count, and these have no state
            with pytest.raises(PeerTimeout, match="shows a certified state"):
                await resume(swarm, is_certain=True, named=PEERS)
            assert not any(member.of(RunResumed) for member in swarm.members.values())

    virtual_time.run(main(), compute_s=interval_cost)


def test_resume_that_no_member_accepts_is_an_error() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            await waiting_run(swarm)
            network = swarm.internet.network(ONLOOKER)
            emitter = Emitter(json=False, out=io.StringIO(), err=io.StringIO())
            async with Membership(network) as membership:
                visit = AuthorVisit(network, membership, swarm.run, AUTHOR, (), emitter)
                situation = await visit.look()
            swarm.kill("m2")
            swarm.kill("m3")
            with pytest.raises(PeerUnreachable, match="no member accepted the resume order"):
                await visit.order(situation, is_certain=True)
            await network.close()

    virtual_time.run(main(), compute_s=interval_cost)


@pytest.mark.parametrize("certain", [[], ["--yes"]], ids=["asked", "certain"])
def test_resume_is_a_command_that_signs_with_the_authors_key(
    certain: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run.toml", config(min_group=2, outer_steps=NUM_STEPS), AUTHOR)
    AUTHOR.save(tmp_path / "author.key")
    resumed = list[bool]()

    @asynccontextmanager
    async def visiting(_config: object) -> AsyncIterator[tuple[Network, Membership]]:
        async with Swarm(run.config) as swarm:
            swarm.run = run
            await waiting_run(swarm)
            network = swarm.internet.network(ONLOOKER)
            async with Membership(network) as membership:
                yield network, membership
            await network.close()
            if certain:
                await swarm.finish()
            resumed.append(any(member.of(RunResumed) for member in swarm.members.values()))

    monkeypatch.setattr(run_orders, "visiting", visiting)
    monkeypatch.setattr(
        run_orders, "asyncio", SimpleNamespace(run=lambda main: virtual_time.run(main, compute_s=interval_cost))
    )
    options = ["--peers", f"/ip4/127.0.0.1/tcp/9/p2p/{PEERS[0]}", "--identity", str(tmp_path / "author.key"), "--json"]
    assert cli.run(["run", "resume", str(tmp_path / "run.toml"), *options, *certain]) == 0
    told = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert told == ["resume_planned", "resume_delivered" if certain else "resume_not_signed"]
    assert resumed == [bool(certain)]


def test_members_file_names_peers_and_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "members"
    path.write_text(f"# those who go on\n{PEERS[0]}  # the big one\n\n{PEERS[1]}\n{PEERS[0]}\n")
    assert read_members(path) == PEERS


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"# nobody\n", "has no peer id"),
        (b"somebody\n", "not a peer id: 'somebody'"),
        (b"\xff\n", "is not a text file"),
        (None, "cannot read .*: no such file or directory"),
    ],
)
def test_members_file_that_names_no_peers_is_refused(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "members"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        read_members(path)
