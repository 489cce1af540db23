"""Tests one run over real sockets: two members, and a third trainer that joins later and follows one of them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.training_swarm import signed
from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.membership import Membership
from swarm.training.data.corpus import Corpus
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.interval import TrainingSetup
from swarm.training.member.run_member import RunMember, RunMemberOptions
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm.training.trainer_events import OuterStep, StateFetched, TrainingEvent
from swarm_protocol.identity import Identity


def test_three_real_hosts_with_a_late_follower_end_with_one_state(
    tiny_run: RunConfig, tiny_corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="swarm")
    run = replace(
        tiny_run, min_group=2, max_group=2, cluster_size=2, outer_steps=1000, interval_steps=10, quorum_grace_s=1.0
    )
    events: dict[int, list[TrainingEvent]] = {}

    async def member(stack: AsyncExitStack, index: int, peers: tuple[str, ...]) -> tuple[Libp2pNetwork, RunMember]:
        path = tmp_path / f"identity-{index}"
        identity = Identity.load_or_create(path)
        options = Libp2pOptions(identity_path=path, network_id="test", peers=peers)
        network = await stack.enter_async_context(await Libp2pNetwork.create(options))
        membership = await stack.enter_async_context(Membership(network))
        inner = InnerLoop(run, build_model(run.model), tiny_corpus)
        events[index] = []
        trainer = RunMember(
            network,
            membership,
            identity,
            signed(run),
            on_event=events[index].append,
            options=RunMemberOptions(setup=TrainingSetup(inner=inner, theta_N=initial_theta(run))),
        )
        return network, await stack.enter_async_context(trainer)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            seed, first = await member(stack, 0, ())
            _, second = await member(stack, 1, await seed.addrs())
            running = [asyncio.create_task(each.run()) for each in (first, second)]
            async with asyncio.timeout(240):
                while not any(isinstance(event, OuterStep) for event in events[0]):
                    await asyncio.sleep(0.05)
                _, third = await member(stack, 2, await seed.addrs())
                running.append(asyncio.create_task(third.run()))
                while not any(isinstance(event, OuterStep) and event.num_trainers == 3 for event in events[2]):
                    await asyncio.sleep(0.05)
                for each in (first, second, third):
                    each.stop()
                await asyncio.gather(*running)

    asyncio.run(main())
    assert any(isinstance(event, StateFetched) for event in events[2])
    steps = [[event for event in events[index] if isinstance(event, OuterStep)] for index in range(3)]
    common = {step.step for step in steps[0]} & {step.step for step in steps[2]}
    assert common
    for step in common:
        assert len({each.digest for of_member in steps for each in of_member if each.step == step}) == 1
    assert steps[0][-1].loss < steps[0][0].loss
