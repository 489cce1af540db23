"""The demo's stages in order. Each waits, with a time limit, for reports of the nodes rather than for time to pass."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from swarm.training.run.run_file import write_run
from swarm.training.run.run_model import check_model
from swarm_protocol.identity import Identity

from swarm_node.demo import demo_answer
from swarm_node.demo.demo_answer import Completion, complete
from swarm_node.demo.demo_plan import DemoPlan
from swarm_node.demo.demo_state import DemoState
from swarm_node.demo.display import DemoSummary, Reporter
from swarm_node.demo.nodes import DemoError, Fleet


@dataclass(slots=True, kw_only=True)
class Demo:
    """The parts of a demo that its stages share."""

    plan: DemoPlan
    root: Path
    state: DemoState
    fleet: Fleet
    reporter: Reporter


async def run(demo: Demo) -> DemoSummary:
    """Run all stages, from a key to the summary. Raises DemoError."""
    started_s = time.monotonic()
    demo.reporter.stage(f"sign a run, start a seed and {demo.plan.num_nodes} volunteers")
    run_path, num_parameters = await asyncio.to_thread(_write_run, demo.plan, demo.root)
    demo.state.num_parameters = num_parameters
    addrs = await _start_seed(demo)
    await _start_volunteers(demo, run_path, addrs)
    size = f"{num_parameters / 1e6:.1f}M"
    demo.reporter.stage(f"train a byte-level Llama of {size} parameters on the standard library's source")
    tokens_per_s = await _train(demo)
    demo.reporter.stage(f"serve it: each node takes {demo.plan.blocks_per_node} of {demo.plan.num_blocks} blocks")
    checkpoint, model = await _serve(demo)
    url = await _open_gateway(demo, addrs)
    demo.reporter.stage("ask for a completion through OpenAI's client, and kill a node on the way")
    completion = await _answer(demo, url, model)
    demo.reporter.stage("compare with an undisturbed run on one machine")
    undisturbed = await asyncio.to_thread(
        demo_answer.complete_undisturbed,
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


def _write_run(plan: DemoPlan, root: Path) -> tuple[Path, int]:
    """Write a run file signed by a key of its own. Returns its path and the number of the model's parameters."""
    config = plan.run()
    identity = Identity.generate()
    identity.save(root / "researcher.key")
    path = root / "run.toml"
    write_run(path, config, identity)
    return path, check_model(config)


async def _start_seed(demo: Demo) -> tuple[str, ...]:
    await demo.fleet.spawn("seed", "seed")
    seed = demo.state.node("seed")
    await demo.fleet.until(lambda: bool(seed.addrs), within_s=demo.plan.start_within_s, what="starting the seed")
    demo.reporter.display.note(f"seed {seed.addrs[0]}")
    return seed.addrs


async def _start_volunteers(demo: Demo, run_path: Path, addrs: tuple[str, ...]) -> None:
    # no probe: on the same cores they would measure each other
    for index in range(demo.plan.num_nodes):
        await demo.fleet.spawn(
            f"node-{index + 1}",
            "join",
            *("--peers", *addrs[:1], "--run", str(run_path), "--then-serve"),
            *("--max-blocks", str(demo.plan.blocks_per_node), "--threads", "1", "--probe", "off"),
        )
    trainers = [demo.state.node(f"node-{index + 1}") for index in range(demo.plan.num_nodes)]
    await demo.fleet.until(
        lambda: all(node.peer_id for node in trainers),
        within_s=demo.plan.start_within_s,
        what="starting the volunteers",
    )


async def _train(demo: Demo) -> float:
    """Wait until every replica has the last outer step. Returns the swarm's tokens/s over all of it."""
    plan, state = demo.plan, demo.state
    started_s = time.monotonic()
    await demo.fleet.until(lambda: state.all_at(plan.outer_steps), within_s=plan.train_within_s, what="the training")
    if not state.digests_equal():
        raise DemoError("the replicas differ", remedy=f"this is a bug; the logs are in {demo.root}")
    return sum(state.num_tokens.values()) / (time.monotonic() - started_s)


async def _serve(demo: Demo) -> tuple[Path, str]:
    """Wait until any one node may die. Returns the checkpoint and the model's name."""
    state, plan = demo.state, demo.plan
    await demo.fleet.until(
        lambda: state.survives_any_death(plan.num_blocks) and plan.outer_steps in state.validation,
        within_s=plan.serve_within_s,
        what="serving each block twice",
    )
    trainers = [node for node in state.trainers if node.span]
    for node in trainers:
        assert node.span is not None
        demo.reporter.display.note(f"{node.name} serves blocks {node.span[0]}:{node.span[1]}")
    return Path(trainers[0].checkpoint), trainers[0].model


async def _open_gateway(demo: Demo, addrs: tuple[str, ...]) -> str:
    await demo.fleet.spawn("gateway", "gateway", "--peers", *addrs[:1], "--port", "0")
    gateway = demo.state.node("gateway")
    await demo.fleet.until(lambda: bool(gateway.url), within_s=demo.plan.start_within_s, what="starting the gateway")
    demo.reporter.display.note(f"gateway {gateway.url}/v1")
    return gateway.url


async def _answer(demo: Demo, url: str, model: str) -> Completion:
    """Return the completion, during which one node of its chain is killed."""

    def kill(peer_id: str) -> str:
        victim = demo.state.by_peer(peer_id)
        if victim is None:
            raise DemoError(f"the chain has a stranger, {peer_id}", remedy=f"the logs are in {demo.root}")
        demo.fleet.kill(victim.name)
        demo.reporter.killed(victim.name, peer_id)
        return victim.name

    try:
        async with asyncio.timeout(demo.plan.answer_within_s):
            completion = await complete(url, model, demo.plan, demo.reporter, kill)
    except TimeoutError:
        raise DemoError(
            f"the answer took more than {demo.plan.answer_within_s:.0f} s", remedy=f"the logs are in {demo.root}"
        ) from None
    demo.fleet.check()  # a complete answer does not excuse a node that failed beside it
    return completion


def _summarize(
    demo: Demo,
    completion: Completion,
    *,
    tokens_per_s: float,
    identical: bool,
    seconds: float,
    checkpoint: Path,
) -> DemoSummary:
    plan, state = demo.plan, demo.state
    return DemoSummary(
        nodes=plan.num_nodes,
        outer_steps=plan.outer_steps,
        parameters=state.num_parameters,
        loss_first=state.validation[0],
        loss_last=state.validation[plan.outer_steps],
        digests_equal=state.digests_equal(),
        digest=next(iter(state.digests[plan.outer_steps].values())),
        bytes_per_param_per_step=state.bytes_per_param(),
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
