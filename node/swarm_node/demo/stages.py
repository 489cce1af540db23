"""The demo's stages in their order. Each waits, with a deadline, for what the nodes say and not for time to pass."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from swarm.training.run.run_file import write_run
from swarm.training.run.run_model import check_model
from swarm_protocol.identity import Identity

from swarm_node.demo import reference
from swarm_node.demo.demo_answer import Completion, complete
from swarm_node.demo.demo_plan import Plan
from swarm_node.demo.demo_state import Board
from swarm_node.demo.nodes import DemoError, Fleet
from swarm_node.demo.reporter import Teller
from swarm_node.demo.summary import Summary


@dataclass(slots=True, kw_only=True)
class Demo:
    """What the stages share."""

    plan: Plan
    root: Path
    board: Board
    fleet: Fleet
    teller: Teller


async def run(demo: Demo) -> Summary:
    """Everything, from a key to the summary. Raises DemoError."""
    started_s = time.monotonic()
    demo.teller.stage(f"sign a run, start a seed and {demo.plan.num_nodes} volunteers")
    run_path, num_parameters = await asyncio.to_thread(_write_run, demo.plan, demo.root)
    demo.board.num_parameters = num_parameters
    addrs = await _start_seed(demo)
    await _start_volunteers(demo, run_path, addrs)
    size = f"{num_parameters / 1e6:.1f}M"
    demo.teller.stage(f"train a byte-level Llama of {size} parameters on the standard library's source")
    tokens_per_s = await _train(demo)
    demo.teller.stage(f"serve it: each node takes {demo.plan.blocks_per_node} of {demo.plan.num_blocks} blocks")
    checkpoint, model = await _serve(demo)
    url = await _open_gateway(demo, addrs)
    demo.teller.stage("ask for a completion through OpenAI's client, and kill a node on the way")
    completion = await _answer(demo, url, model)
    demo.teller.stage("compare with an undisturbed run on one machine")
    undisturbed = await asyncio.to_thread(
        reference.complete,
        checkpoint,
        demo.plan.prompt,
        len(completion.text.encode()),  # a token each, or fewer
        temperature=demo.plan.temperature,
        seed=demo.plan.sampling_seed,
    )
    return _summarize(
        demo,
        completion,
        tokens_per_s=tokens_per_s,
        identical=undisturbed.startswith(completion.text),
        seconds=time.monotonic() - started_s,
        checkpoint=checkpoint,
    )


def _write_run(plan: Plan, root: Path) -> tuple[Path, int]:
    """A run file signed by a key of its own, and how many parameters its model has."""
    config = plan.run()
    identity = Identity.generate()
    identity.save(root / "researcher.key")
    path = root / "run.toml"
    write_run(path, config, identity)
    return path, check_model(config)


async def _start_seed(demo: Demo) -> tuple[str, ...]:
    await demo.fleet.spawn("seed", "seed")
    seed = demo.board.node("seed")
    await demo.fleet.until(lambda: bool(seed.addrs), within_s=demo.plan.start_within_s, what="starting the seed")
    demo.teller.display.note(f"seed {seed.addrs[0]}")
    return seed.addrs


async def _start_volunteers(demo: Demo, run_path: Path, addrs: tuple[str, ...]) -> None:
    # all on the same cores at once, they would measure each other: no probe
    for index in range(demo.plan.num_nodes):
        await demo.fleet.spawn(
            f"node-{index + 1}",
            "join",
            *("--peers", *addrs[:1], "--run", str(run_path), "--then-serve"),
            *("--max-blocks", str(demo.plan.blocks_per_node), "--threads", "1", "--probe", "off"),
        )
    trainers = [demo.board.node(f"node-{index + 1}") for index in range(demo.plan.num_nodes)]
    await demo.fleet.until(
        lambda: all(node.peer_id for node in trainers),
        within_s=demo.plan.start_within_s,
        what="starting the volunteers",
    )


async def _train(demo: Demo) -> float:
    """Until every replica has the last outer step. Returns the swarm's tokens/s over all of it."""
    plan, board = demo.plan, demo.board
    started_s = time.monotonic()
    await demo.fleet.until(lambda: board.all_at(plan.outer_steps), within_s=plan.train_within_s, what="the training")
    if not board.digests_equal():
        raise DemoError("the replicas differ", remedy=f"this is a bug; the logs are in {demo.root}")
    return sum(board.num_tokens.values()) / (time.monotonic() - started_s)


async def _serve(demo: Demo) -> tuple[Path, str]:
    """Until any node may die. Returns the checkpoint and the model's name."""
    board, plan = demo.board, demo.plan
    await demo.fleet.until(
        lambda: board.survives_any_death(plan.num_blocks) and plan.outer_steps in board.validation,
        within_s=plan.serve_within_s,
        what="serving each block twice",
    )
    trainers = [node for node in board.trainers if node.span]
    for node in trainers:
        assert node.span is not None
        demo.teller.display.note(f"{node.name} serves blocks {node.span[0]}:{node.span[1]}")
    return Path(trainers[0].checkpoint), trainers[0].model


async def _open_gateway(demo: Demo, addrs: tuple[str, ...]) -> str:
    await demo.fleet.spawn("gateway", "gateway", "--peers", *addrs[:1], "--port", "0")
    gateway = demo.board.node("gateway")
    await demo.fleet.until(lambda: bool(gateway.url), within_s=demo.plan.start_within_s, what="starting the gateway")
    demo.teller.display.note(f"gateway {gateway.url}/v1")
    return gateway.url


async def _answer(demo: Demo, url: str, model: str) -> Completion:
    """The completion, during which one node of its chain is killed."""

    def kill(peer_id: str) -> str:
        victim = demo.board.by_peer(peer_id)
        if victim is None:
            raise DemoError(f"the chain has a stranger, {peer_id}", remedy=f"the logs are in {demo.root}")
        demo.fleet.kill(victim.name)
        demo.teller.killed(victim.name, peer_id)
        return victim.name

    try:
        async with asyncio.timeout(demo.plan.answer_within_s):
            completion = await complete(url, model, demo.plan, demo.teller, kill)
    except TimeoutError:
        raise DemoError(
            f"the answer took more than {demo.plan.answer_within_s:.0f} s", remedy=f"the logs are in {demo.root}"
        ) from None
    demo.fleet.check()  # that the answer is whole does not excuse a node that failed beside it
    return completion


def _summarize(
    demo: Demo,
    completion: Completion,
    *,
    tokens_per_s: float,
    identical: bool,
    seconds: float,
    checkpoint: Path,
) -> Summary:
    plan, board = demo.plan, demo.board
    return Summary(
        nodes=plan.num_nodes,
        outer_steps=plan.outer_steps,
        parameters=board.num_parameters,
        loss_first=board.validation[0],
        loss_last=board.validation[plan.outer_steps],
        digests_equal=board.digests_equal(),
        digest=next(iter(board.digests[plan.outer_steps].values())),
        bytes_per_param_per_step=board.bytes_per_param(),
        tokens_per_s=tokens_per_s,
        failover_ms=completion.failover_ms,
        killed=completion.killed,
        tokens=completion.num_tokens,
        tokens_identical=identical,
        prompt=plan.prompt,
        completion=completion.text,
        seconds=seconds,
        checkpoint=str(checkpoint),
    )
