"""One member's life in a run, on a host of its own: join, train, let the others finish, leave. Owned by one task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from swarm_protocol.identity import Identity

from swarm.network.libp2p.libp2p_network import Libp2pNetwork, Libp2pOptions
from swarm.network.membership import Membership
from swarm.temporary_folder import temporary_folder
from swarm.trainer.member_options import MemberOptions
from swarm.training.inner.interval import Materials
from swarm.training.member.linger import let_others_finish
from swarm.training.member.trainer import RunMember, RunMemberOptions
from swarm.training.member.trainer_events import IntervalFailed, OuterStep, RoundAborted, TrainingEvent
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.replica_state import ReplicaState

logger = logging.getLogger(__name__)

LEAVE_S = 30.0
"""For the step that is under way when its member leaves."""


class Member:
    """Of `run`. `on_joined` (with the member's addresses) and `on_step` are called in the event loop, so briefly.

    `prepare` and `on_end` (with the last committed state, and whether the run is finished) are called in threads; the
    latter where training was, once it has ended.
    """

    def __init__(
        self,
        run: SignedRun,
        peers: Sequence[str],
        options: MemberOptions,
        *,
        prepare: Callable[[], Materials],
        on_joined: Callable[[tuple[str, ...]], None],
        on_step: Callable[[OuterStep], None],
        on_end: Callable[[ReplicaState | None, bool], None],
    ) -> None:
        self._run = run
        self._peers = tuple(peers)
        self._options = options
        self._prepare = prepare
        self._on_joined = on_joined
        self._on_step = on_step
        self._on_end = on_end
        self._leaving = asyncio.Event()
        self._warned_of: tuple[int, str] | None = None

    def leave(self) -> None:
        """With the step that is under way. Called in the event loop."""
        self._leaving.set()

    def is_leaving(self) -> bool:
        return self._leaving.is_set()

    async def live(self) -> None:
        """Until the run is finished and `leave` was called. Raises SwarmError, and what an author's function raises."""
        materials = await asyncio.to_thread(self._prepare)
        try:
            await self._live_with(materials)
        finally:
            # also if there is no trainer yet, whose affair it is
            await asyncio.to_thread(materials.inner.close)

    async def _live_with(self, materials: Materials) -> None:
        async with self._on_network() as (network, identity), Membership(network) as membership:
            trainer = RunMember(
                network,
                membership,
                identity,
                self._run,
                on_event=self._tell,
                options=RunMemberOptions(materials=materials),
            )
            async with trainer:
                self._on_joined(await network.addrs())
                await self._train(trainer, network)
                state = trainer.state
                is_finished = state is not None and state.outer_step == self._run.config.outer_steps
                # where intervals run: none is running then, and none begins
                await asyncio.wrap_future(trainer.between_intervals(lambda: self._on_end(state, is_finished)))
                if is_finished:
                    await self._leaving.wait()
                    await let_others_finish(membership, self._run.run_id, network.peer_id)

    async def _train(self, trainer: RunMember, network: Libp2pNetwork) -> None:
        training = asyncio.create_task(trainer.run(), name="train")
        leaving = asyncio.create_task(self._leaving.wait(), name="leave")
        failing = asyncio.create_task(network.wait_failed(), name="watch libp2p")
        try:
            await asyncio.wait({training, leaving, failing}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not training.done():
                trainer.stop()
                # others wait for members of the state alone
                is_member = trainer.state is not None and network.peer_id in trainer.state.roster
                timeout_s = LEAVE_S if is_member else 0.0
                await asyncio.wait({training, failing}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise failing.result()
        finally:
            for task in (leaving, failing):
                task.cancel()
            cancelled = training.cancel()
            await asyncio.wait({training})
        if not cancelled:
            training.result()

    @asynccontextmanager
    async def _on_network(self) -> AsyncIterator[tuple[Libp2pNetwork, Identity]]:
        options = self._options
        with temporary_folder("trainer") as folder:
            path = options.identity or folder / "identity.key"
            identity = Identity.load_or_create(path)
            network = await Libp2pNetwork.create(
                Libp2pOptions(
                    identity_path=path,
                    network_id=options.network_id,
                    peers=self._peers,
                    listen=options.listen,
                    announce=options.announce,
                    relay=options.relay,
                )
            )
            try:
                yield network, identity
            finally:
                await network.close()

    def _tell(self, event: TrainingEvent) -> None:
        match event:
            case OuterStep():
                self._on_step(event)
            case IntervalFailed():
                if (event.step, event.reason) != self._warned_of:  # it may fail again and again
                    self._warned_of = event.step, event.reason
                    logger.warning("this member brings nothing to outer step %d: %s", event.step, event.reason)
            case RoundAborted():
                logger.info("attempt %d at outer step %d: %s", event.attempt, event.step, event.reason)
            case _:
                pass
