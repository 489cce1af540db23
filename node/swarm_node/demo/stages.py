"""The demo's stages in order. Each waits, with a time limit, for reports of the nodes rather than for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarm.threads import in_own_thread
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import write_run
from swarm_protocol.identity import Identity

from swarm_node.demo import demo_answer
from swarm_node.demo.command import DemoPlan
from swarm_node.demo.demo_answer import Completion, complete
from swarm_node.demo.display import DemoSummary, Reporter
from swarm_node.demo.nodes import DemoError, DemoState, Fleet, NodeState
from swarm_node.machine.lean_imports import lean_imports

START_S, TRAIN_S, SERVE_S, ANSWER_S = 300.0, 600.0, 300.0, 120.0
"""Time limits in seconds. They are many times what two cores need, which may have other work."""


@dataclass(slots=True, kw_only=True)
class Demo:
    """The parts of a demo that its stages share."""

    plan: DemoPlan
    state: DemoState
    fleet: Fleet
    reporter: Reporter


async def run(demo: Demo) -> DemoSummary:
    """Run all stages and return the summary. Raises DemoError."""
    started_s, plan, state = time.monotonic(), demo.plan, demo.state
    demo.reporter.stage(f"sign a run, start a seed and {plan.num_nodes} volunteers")
    run_path = demo.fleet.root / "run.toml"
    identity = Identity.generate()
    identity.save(demo.fleet.root / "researcher.key")
    state.num_parameters, seed = await asyncio.gather(
        in_own_thread(_write_run, run_path, run_of(plan), identity),
        _start(demo, "seed", lambda node: bool(node.addrs)),
    )
    demo.reporter.display.note(f"seed {seed.addrs[0]}")
    await _start_volunteers(demo, run_path, seed.addrs)
    size = f"{state.num_parameters / 1e6:.1f}M"
    demo.reporter.stage(f"train a byte-level Llama of {size} parameters on the standard library's source")
    tokens_per_s = await _train(demo)
    demo.reporter.stage(f"serve it: each node takes {plan.blocks_per_node} of {plan.num_blocks} blocks")
    peers = ("--peers", *seed.addrs[:1], "--port", "0")
    # start the gateway while the nodes wait for each other's proposals of spans, when the processor is idle
    (checkpoint, model), gateway = await asyncio.gather(
        _serve(demo), _start(demo, "gateway", lambda node: bool(node.url), *peers)
    )
    demo.reporter.display.note(f"gateway {gateway.url}/v1")
    demo.reporter.stage("ask for a completion through OpenAI's client, and kill a node on the way")
    completion = await _answer(demo, gateway.url, model)
    demo.reporter.stage("compare with an undisturbed run on one machine")
    undisturbed = await asyncio.to_thread(
        demo_answer.complete_undisturbed,
        checkpoint,
        plan.prompt,
        len(completion.text.encode()),  # at most one token per byte
        temperature=plan.temperature,
    )
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
        tokens_identical=undisturbed.startswith(completion.text),
        prompt=plan.prompt,
        completion=completion.text,
        seconds=time.monotonic() - started_s,
        checkpoint=str(checkpoint),
    )


def run_of(plan: DemoPlan) -> RunConfig:
    """Return the run. It allows late members a long grace period, so that all take the first step together."""
    return RunConfig(
        name="demo",
        outer_steps=plan.outer_steps,
        interval_steps=plan.interval_steps,
        min_group=max(2, plan.num_nodes // 2),
        max_group=plan.num_nodes,
        cluster_size=1,
        quorum_grace_s=10.0,
    )


def _write_run(path: Path, run: RunConfig, identity: Identity) -> int:
    """Sign the run, and return the number of its model's parameters.

    Runs in a thread, since it imports torch and transformers: the first output, the seed and Ctrl-C must not wait for
    that.
    """
    with lean_imports():
        from swarm.training.run.run_model import check_model  # noqa: PLC0415

        num_parameters = check_model(run)
    write_run(path, run, identity)
    return num_parameters


async def _start(demo: Demo, name: str, is_up: Callable[[NodeState], bool], *arguments: str) -> NodeState:
    """Start the process of the command `name`, and wait until it is up."""
    await demo.fleet.spawn(name, name, *arguments)
    node = demo.state.node(name)
    await demo.fleet.until(lambda: is_up(node), within_s=START_S, what=f"starting the {name}")
    return node


async def _start_volunteers(demo: Demo, run_path: Path, addrs: tuple[str, ...]) -> None:
    # no probe: on the same cores the measurements would disturb each other
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
        within_s=START_S,
        what="starting the volunteers",
    )


async def _train(demo: Demo) -> float:
    """Wait until every replica has the last outer step. Return the swarm's tokens per second over the whole
    training."""
    plan, state = demo.plan, demo.state
    started_s = time.monotonic()
    await demo.fleet.until(lambda: state.all_at(plan.outer_steps), within_s=TRAIN_S, what="the training")
    if not state.digests_equal():
        raise DemoError("the replicas differ", remedy=f"this is a bug; the logs are in {demo.fleet.root}")
    return sum(state.num_tokens.values()) / (time.monotonic() - started_s)


async def _serve(demo: Demo) -> tuple[Path, str]:
    """Wait until any one node may die. Return the checkpoint and the model's name."""
    state, plan = demo.state, demo.plan
    await demo.fleet.until(
        lambda: state.survives_any_death(plan.num_blocks) and plan.outer_steps in state.validation,
        within_s=SERVE_S,
        what="serving each block twice",
    )
    trainers = [node for node in state.trainers if node.span]
    for node in trainers:
        assert node.span is not None
        demo.reporter.display.note(f"{node.name} serves blocks {node.span[0]}:{node.span[1]}")
    return Path(trainers[0].checkpoint), trainers[0].model


async def _answer(demo: Demo, url: str, model: str) -> Completion:
    """Return the completion, during which one node of its chain is killed."""

    def kill(peer_id: str) -> str:
        victim = demo.state.by_peer(peer_id)
        if victim is None:
            raise DemoError(
                f"the chain has a node of another network, {peer_id}", remedy=f"the logs are in {demo.fleet.root}"
            )
        demo.fleet.kill(victim.name)
        demo.reporter.killed(victim.name, peer_id)
        return victim.name

    try:
        async with asyncio.timeout(ANSWER_S):
            completion = await complete(url, model, demo.plan, demo.reporter, kill)
    except TimeoutError:
        raise DemoError(
            f"the answer took more than {ANSWER_S:.0f} s", remedy=f"the logs are in {demo.fleet.root}"
        ) from None
    demo.fleet.check()  # a complete answer must not hide that another node failed
    return completion
