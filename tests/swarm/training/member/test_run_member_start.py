"""Tests members of a run that starts from a checkpoint: which of them load it, and with which state they begin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from support.training_swarm import NUM_VALUES, Swarm, SyntheticInner, assert_equal_steps, config
from swarm.network.membership import Membership
from swarm.start_checkpoint import CheckpointSource, bringing, pin_of
from swarm.testing import virtual_time
from swarm.training.data.corpus import Corpus
from swarm.training.evidence.convictions import Convictions
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.interval import TrainingSetup, prepare
from swarm.training.inner.one_device import ONE_CPU
from swarm.training.member import run_member
from swarm.training.run.layout import Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model
from swarm.training.run.run_tables import StartConfig
from swarm.training.state.replica_state import ReplicaState
from swarm.training.trainer_events import HeldOutMeasured, OuterStep, StateFetched
from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.identity import Identity, short_id
from transformers import AutoModelForCausalLM

STARTED = config(min_group=2, start=StartConfig(checkpoint="local", digest="ab" * 32))


def from_checkpoint(bring: Callable[[], torch.Tensor]) -> TrainingSetup:
    return TrainingSetup(inner=SyntheticInner(), theta_N=torch.zeros(NUM_VALUES), bounds=(0, NUM_VALUES), bring=bring)


def weights() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, NUM_VALUES)


def refuse() -> torch.Tensor:
    raise IntegrityError("the checkpoint has other weights")


def test_members_begin_with_the_values_of_a_real_checkpoint(
    tmp_path: Path, tiny_run: RunConfig, tiny_corpus: Corpus
) -> None:
    torch.manual_seed(1)
    model = build_model(tiny_run.model)
    model.save_pretrained(tmp_path / "checkpoint")  # type: ignore[operator]
    source = CheckpointSource(place=tmp_path / "checkpoint", cache=tmp_path)
    run = replace(tiny_run, outer_steps=1, interval_steps=2, start=StartConfig(checkpoint="local"))
    run = replace(run, start=replace(run.start, digest=pin_of(run, source).digest))
    layout = Layout.of(model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    begins = ReplicaState.initial(layout.flatten(loaded)).digest

    async def main() -> None:
        async with Swarm(run) as swarm:
            for name in ("m0", "m1"):
                inner = InnerLoop(run, build_model(run.model), tiny_corpus)
                theta_N = torch.zeros(layout.num_values)
                setup = TrainingSetup(inner=inner, theta_N=theta_N, bring=bringing(run, source))
                member = await swarm.join(name, setup=setup)
                while not member.of(HeldOutMeasured):
                    await asyncio.sleep(0.01)
                assert member.trainer.digest == begins
            assert_equal_steps(await swarm.finish(), 1)

    virtual_time.run(main())


def test_late_member_fetches_the_committed_state_and_loads_no_checkpoint() -> None:
    brought: list[str] = []

    def bring(name: str) -> Callable[[], torch.Tensor]:
        def count() -> torch.Tensor:
            brought.append(name)
            return weights()

        return count

    async def main() -> None:
        async with Swarm(replace(STARTED, outer_steps=6)) as swarm:
            for name in ("m0", "m1"):
                await swarm.join(name, setup=from_checkpoint(bring(name)))
            while not swarm.members["m0"].of(OuterStep):
                await asyncio.sleep(0.1)
            late = await swarm.join("late", setup=from_checkpoint(bring("late")))
            assert_equal_steps(await swarm.finish(), 6)
            assert late.of(StateFetched)
        assert sorted(brought) == ["m0", "m1"]

    virtual_time.run(main())


def test_member_ends_with_the_reason_and_is_not_waited_for_when_its_checkpoint_is_refused() -> None:
    async def main() -> None:
        async with Swarm(STARTED) as swarm:
            for name in ("m0", "m1"):
                await swarm.join(name, setup=from_checkpoint(weights))
            bad = await swarm.join("bad", setup=from_checkpoint(refuse))
            assert bad.task is not None
            with pytest.raises(IntegrityError, match="the checkpoint has other weights"):
                await bad.task
            bad.is_alive = False
            assert_equal_steps(await swarm.finish(), 3)

    virtual_time.run(main())


@pytest.mark.parametrize("awaited", ["furthest", "in_own_thread", None], ids=["peers", "checkpoint", "nothing"])
def test_member_leaves_at_once_when_it_is_stopped_while_it_joins(
    monkeypatch: pytest.MonkeyPatch, awaited: str | None
) -> None:
    """It is stopped while it asks peers that do not answer, while it waits for its checkpoint, or after joining, while
    it asks for bans."""

    async def wait_for_ever(*_: object) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Convictions, "ask", wait_for_ever)
    if awaited is not None:
        monkeypatch.setattr(run_member, awaited, wait_for_ever)

    async def main() -> None:
        async with Swarm(STARTED) as swarm:
            member = await swarm.join("m0", setup=from_checkpoint(weights))
            await asyncio.sleep(10)
            assert member.trainer.has_joined == (awaited is None)
            member.trainer.stop()
            assert member.task is not None
            async with asyncio.timeout(1):
                await member.task
            assert member.trainer.has_joined == (awaited is None)

    virtual_time.run(main())


def test_prepare_is_refused_when_nothing_loads_the_runs_checkpoint(tiny_run: RunConfig) -> None:
    run = replace(tiny_run, start=StartConfig(checkpoint="local", digest="ab" * 32))
    with pytest.raises(ConfigError, match="starts from a checkpoint"):
        prepare(run, ONE_CPU)


def test_member_logs_once_that_a_peer_of_a_finished_run_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """The record of a member that has left stays for up to a minute, in which a newcomer asks it every second."""

    async def main() -> list[str]:
        async with Swarm(config(min_group=2)) as swarm, Membership(swarm.internet.network(Identity(b"s" * 32))):
            gone = [await swarm.join("m0"), await swarm.join("m1")]
            await swarm.finish()
            for member in gone:
                swarm.kill(member.name)
            await swarm.join("late")
            await asyncio.sleep(20)
            return [short_id(member.peer_id) for member in gone]

    gone = virtual_time.run(main())
    told = [record.getMessage() for record in caplog.records if "did not show its state" in record.getMessage()]
    assert sorted(line.split()[0] for line in told) == sorted(gone)
