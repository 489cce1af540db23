"""`swarm-node run endorse`: what it finds, prints and signs, with real members on a simulated network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.training_swarm import AUTHOR, Swarm, config, interval_cost
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.testing import virtual_time
from swarm.training.outside.resume import RunSurvey, sign_survey
from swarm.training.run.run_file import write_run
from swarm.training.run.signed_run import SignedRun
from swarm.training.trainer_events import OuterStep, StateEndorsed
from swarm_node import cli
from swarm_node.commands import run_orders
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity

ONLOOKER = Identity(b"onlooker".ljust(32))


class Endorsed:
    """Runs the command among three members, which train until it ends.

    `num_endorsed` of them received the endorsement.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, author: Identity = AUTHOR) -> None:
        self.run = write_run(folder / "run.toml", config(min_group=2, outer_steps=8), AUTHOR)
        author.save(folder / "author.key")
        self._command = ["run", "endorse", str(folder / "run.toml"), "--identity", str(folder / "author.key"), "--json"]
        self._command += ["--peers", f"/ip4/127.0.0.1/tcp/9/p2p/{ONLOOKER.peer_id}"]
        self.num_endorsed = 0
        monkeypatch.setattr(run_orders, "visiting", self._visiting)
        waits = SimpleNamespace(run=lambda main: virtual_time.run(main, compute_s=interval_cost), sleep=asyncio.sleep)
        monkeypatch.setattr(run_orders, "asyncio", waits)

    @asynccontextmanager
    async def _visiting(self, _config: object) -> AsyncIterator[tuple[Network, Membership]]:
        async with Swarm(self.run.config) as swarm:
            swarm.run = self.run
            for index in range(3):
                await swarm.join(f"m{index}")
            while not all(member.of(OuterStep) for member in swarm.members.values()):
                await asyncio.sleep(0.05)
            network = swarm.internet.network(ONLOOKER)
            async with Membership(network) as membership:
                yield network, membership
            await network.close()
            await swarm.finish()
            self.num_endorsed = sum(bool(member.of(StateEndorsed)) for member in swarm.members.values())

    def __call__(self, *options: str) -> int:
        return cli.run([*self._command, *options])


@pytest.mark.parametrize("certain", [[], ["--yes"]], ids=["asked", "certain"])
def test_endorse_signs_the_newest_state_only_if_it_is_told_to(
    certain: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endorsed = Endorsed(tmp_path, monkeypatch)
    assert endorsed(*certain) == 0
    planned, ended = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert planned["event"] == "endorsement_planned"
    assert (planned["after"], len(planned["roster"]), len(planned["holders"])) == (None, 3, 3)
    assert "nothing was endorsed before" in planned["basis"]
    assert ended["event"] == ("endorsement_delivered" if certain else "endorsement_not_signed")
    assert endorsed.num_endorsed == (3 if certain else 0)


def test_endorse_repeatedly_continues_from_the_last_endorsement_until_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endorsed = Endorsed(tmp_path, monkeypatch)
    assert endorsed("--every", "10s", "--yes") == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    planned = [event for event in told if event["event"] == "endorsement_planned"]
    steps = [event["outer_step"] for event in planned]
    assert steps == sorted(set(steps))
    assert steps[-1] == 8
    assert [event["after"] for event in planned] == [None, *steps[:-1]]
    assert endorsed.num_endorsed == 3


def test_endorse_repeatedly_tries_a_later_state_when_one_cannot_be_endorsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endorsed, refused = Endorsed(tmp_path, monkeypatch), list[int]()

    def signed(run: SignedRun, found: RunSurvey, author: Identity, *, network_id: str, now: float) -> bytes:
        if not refused:
            refused.append(found.proof.outer_step)
            raise ConfigError("this one cannot be endorsed", remedy="endorse the next state")
        return sign_survey(run, found, author, network_id=network_id, now=now)

    monkeypatch.setattr(run_orders, "sign_survey", signed)
    assert endorsed("--every", "10s", "--yes") == 0
    captured = capsys.readouterr()
    assert "this one cannot be endorsed" in captured.out + captured.err
    told = [json.loads(line) for line in captured.out.splitlines()]
    assert [event["outer_step"] for event in told if event["event"] == "endorsement_delivered"] == [8]
    assert refused[0] < 8


def test_endorse_with_another_key_or_an_unusual_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endorsed = Endorsed(tmp_path, monkeypatch, author=ONLOOKER)
    for certain in ((), ("--yes",)):
        assert endorsed(*certain) == 1
        [refused] = capsys.readouterr().out.splitlines()
        assert "only that key can endorse its states" in refused
    assert endorsed("--every", "soon") == 2
    assert "--every: 'soon' is not a duration" in capsys.readouterr().out
