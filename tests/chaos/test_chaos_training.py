"""kill -9 of trainers: on real processes over real libp2p, at moments drawn by chance, again and again: `make chaos`.

The seed of each trial is its number, so that one that failed can be repeated alone.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from swarm.training.run_config import RunConfig
from swarm.training.run_file import write_run
from swarm_node.demo.board import Board, Event
from swarm_node.demo.nodes import Fleet
from swarm_protocol.identity import Identity

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

NUM_NODES = 4
OUTER_STEPS = 5
NUM_TRAINING_TRIALS = 5


async def _seed(fleet: Fleet) -> str:
    await fleet.spawn("seed", "seed")
    seed = fleet.board.node("seed")
    await fleet.until(lambda: bool(seed.addrs), within_s=120, what="starting the seed")
    return seed.addrs[0]


@pytest.mark.parametrize("trial", range(NUM_TRAINING_TRIALS))
def test_training_survivors_stay_identical_when_a_member_is_killed_in_a_round(tmp_path: Path, trial: int) -> None:
    """Even trials: as soon as the victim has finished an interval, so in the round; odd: any time after a step."""
    chance = random.Random(trial)
    victim, fatal_step = f"node-{chance.randint(1, NUM_NODES)}", chance.randint(2, OUTER_STEPS - 1)
    wanted = "interval" if trial % 2 == 0 else "outer_step"
    delay_s = chance.uniform(0.0, 0.2 if trial % 2 == 0 else 2.0)
    reached = asyncio.Event()

    def hook(name: str, event: Event) -> None:
        if (name, event["event"], event.get("step")) == (victim, wanted, fatal_step):
            reached.set()

    async def main() -> Board:
        board = Board(num_nodes=NUM_NODES)
        async with Fleet(tmp_path, board, hook) as fleet:
            run = RunConfig(name="chaos", outer_steps=OUTER_STEPS, interval_steps=6, max_group=NUM_NODES)
            write_run(tmp_path / "run.toml", run, Identity.generate())
            addr = await _seed(fleet)
            for index in range(NUM_NODES):
                options = ("--run", str(tmp_path / "run.toml"), "--threads", "1")
                await fleet.spawn(f"node-{index + 1}", "join", "--peers", addr, *options)
            await fleet.until(reached.is_set, within_s=300, what="reaching the fatal moment")
            await asyncio.sleep(delay_s)
            fleet.kill(victim)
            survivors = {node.name for node in board.trainers} - {victim}
            await fleet.until(
                lambda: board.digests.get(OUTER_STEPS, {}).keys() >= survivors, within_s=300, what="the last step"
            )
        return board

    board = asyncio.run(main())
    assert board.digests_equal()
    assert len(board.digests[OUTER_STEPS]) >= NUM_NODES - 1
