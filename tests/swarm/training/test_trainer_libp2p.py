"""One run over real sockets: two members, and a third one that joins on the way."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.training_swarm import signed
from swarm.network.libp2p.libp2p_network import Libp2pNetwork, Libp2pOptions
from swarm.network.membership import Membership
from swarm.training.data.corpus import Corpus
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.interval import TrainingSetup
from swarm.training.member.run_member import RunMember, RunMemberOptions
from swarm.training.member.trainer_events import OuterStep, StateFetched, TrainingEvent, Validated
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model, initial_theta
from swarm_protocol.identity import Identity


def test_run_among_three_real_hosts_with_a_late_joiner_ends_in_one_state(
    tiny_run: RunConfig, tiny_corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="swarm")
    run = replace(tiny_run, min_group=2, outer_steps=6, interval_steps=10, quorum_grace_s=1.0)
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
            async with asyncio.timeout(60):
                while not any(isinstance(event, OuterStep) for event in events[0]):
                    await asyncio.sleep(0.05)
                _, third = await member(stack, 2, await seed.addrs())
                running.append(asyncio.create_task(third.run()))
                await asyncio.gather(*running)
            states = [each.state for each in (first, second, third)]
            assert {state.outer_step for state in states if state} == {6}
            assert len({state.manifest().digest() for state in states if state}) == 1

    asyncio.run(main())
    assert any(isinstance(event, StateFetched) for event in events[2])
    losses = [event.loss for event in events[0] if isinstance(event, Validated)]
    assert losses[-1] < losses[0]
