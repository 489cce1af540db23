"""Members of one run, each a process of its own over real libp2p, which stand by until told to take part.

They are forked from a server that has imported everything, so that a hundred of them cost little. Each has a synthetic
model, whose inner steps sleep: an interval lasts as long as it should on any machine, and rounds are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import uvloop
from chaos.armed import ArmedFaults
from support.forked_node import forking
from support.network_worlds import libp2p_node
from support.training_swarm import SyntheticInner, config, signed
from swarm.network.membership import Membership
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.inner.interval import TrainingSetup
from swarm.training.member.run_member import RunMember, RunMemberOptions
from swarm.training.trainer_events import OuterStep, TrainingEvent
from swarm_compression import warm_up
from swarm_protocol.identity import Identity

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

E = TypeVar("E")

logger = logging.getLogger(__name__)

RUN = config(outer_steps=1_000_000, interval_steps=5, min_group=2, max_group=8, quorum_grace_s=2.0)
STEP_S = 0.1
NUM_VALUES = 300_000
"""Small enough that a joiner gets the state within an interval, even on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Hold the settings that all members share. `folder` has their identities and logs, and the armed kill."""

    folder: Path
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Hold one message of a member. `event` is None when the member is ready to take part. `certificate` proves an
    OuterStep."""

    at_s: float
    event: TrainingEvent | None = None
    certificate: bytes = b""


class RestlessInner(SyntheticInner):
    """Train towards a target that moves, so that no two contributions are alike, however long the run."""

    def train(
        self,
        sample_ids: Sequence[int],
        num_steps: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        done_steps: int = 0,
    ) -> IntervalResult:
        result = super().train(sample_ids, num_steps, stop, done_steps=done_steps)
        self.theta_N = self.theta_N + 0.1 * torch.sin(self.target_N * (1 + sum(sample_ids) % 997))
        return result


def live(name: str, plan: Plan, owner: Connection) -> None:
    """Run the whole life of the member `name`, until it is killed or `owner` ends."""
    logging.basicConfig(filename=plan.folder / f"{name}.log", level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_take_part(name, plan, owner))


async def _take_part(name: str, plan: Plan, owner: Connection) -> None:
    path = plan.folder / f"{name}.identity"
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(await libp2p_node(path, peers=plan.peers))
        membership = await stack.enter_async_context(Membership(network))
        inner = RestlessInner(num_values=NUM_VALUES, step_s=STEP_S)
        await asyncio.to_thread(warm_up)

        def tell(event: TrainingEvent) -> None:
            logger.info("%s", event)
            proof = trainer.certificate if isinstance(event, OuterStep) else b""
            owner.send(Told(at_s=time.monotonic(), event=event, certificate=proof))

        trainer = RunMember(
            network,
            membership,
            Identity.load_or_create(path),
            signed(RUN),
            on_event=tell,
            options=RunMemberOptions(setup=TrainingSetup(inner=inner, theta_N=torch.zeros(NUM_VALUES))),
            failpoints=ArmedFaults(plan.folder, name),
        )
        owner.send(Told(at_s=time.monotonic()))
        await asyncio.to_thread(owner.recv)
        await stack.enter_async_context(trainer)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_end_with(owner))
            try:
                await trainer.run()
            except Exception:
                # the thread that waits for the owner would keep the process alive and hide the error
                logger.exception("%s failed", name)
                os.kill(os.getpid(), signal.SIGKILL)


async def _end_with(owner: Connection) -> None:
    """End this process when its owner ends, so that none is left behind."""
    with contextlib.suppress(EOFError):
        await asyncio.to_thread(owner.recv)
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(eq=False, slots=True)
class Member:
    """Represent a member's process to its owner. `called_s` is the time at which it was told to take part, or 0 before
    that."""

    name: str
    process: ForkServerProcess
    connection: Connection
    told: list[Told] = field(default_factory=list)
    called_s: float = 0.0
    has_ended: bool = False

    @property
    def is_ready(self) -> bool:
        return bool(self.told)

    def of(self, kind: type[E]) -> list[tuple[float, E]]:
        """Return the member's events of that kind, each with its time."""
        return [(told.at_s, told.event) for told in self.told if isinstance(told.event, kind)]


class Members:
    """Own all processes of one run. Leaving the async context kills them."""

    def __init__(self, plan: Plan) -> None:
        self.all: dict[str, Member] = {}
        self._plan = plan
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Members:
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.all.values():
            member.process.kill()
            await asyncio.to_thread(member.process.join)
            if not member.has_ended:
                asyncio.get_running_loop().remove_reader(member.connection.fileno())
            member.connection.close()

    @property
    def alive(self) -> list[Member]:
        """Return the members that take part, as far as is known."""
        return [member for member in self.all.values() if member.called_s and not member.has_ended]

    def stand_by(self, name: str) -> Member:
        """Start a process that gets ready and then waits."""
        processes = forking()
        connection, theirs = processes.Pipe()
        process = processes.Process(target=live, args=(name, self._plan, theirs), name=name, daemon=True)
        process.start()
        theirs.close()
        member = self.all[name] = Member(name, process, connection)
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read, member)
        return member

    def call(self, member: Member) -> None:
        """Have the member take part."""
        member.called_s = time.monotonic()
        member.connection.send(None)

    async def until(self, condition: Callable[[], bool], *, within_s: float, what: str) -> None:
        """Wait until `condition()` holds. It is checked whenever a member sends a message or ends."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(
                f"{what} took more than {within_s:.0f} s; the logs are in {self._plan.folder}"
            ) from None

    def _read(self, member: Member) -> None:
        try:
            while member.connection.poll():
                member.told.append(member.connection.recv())
        except (EOFError, OSError):
            member.has_ended = True
            asyncio.get_running_loop().remove_reader(member.connection.fileno())
        self._changed.set()
