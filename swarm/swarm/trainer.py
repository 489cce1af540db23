"""The SDK for training: take part in a run from Python, with the run's own model or with your own module.

Make a run for your own module with `module_run`, sign it with `swarm.training.run.run_file.write_run`, and give it to
the members as a file, together with the module's code and first weights.

`Trainer` needs no event loop: it runs one in its own thread, which owns the network and all training.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch
from swarm_compression import warm_up
from swarm_protocol.checks import shared_fields
from swarm_protocol.errors import SessionError, cause
from swarm_protocol.identity import Identity, short_id
from swarm_protocol.network_invitation import given_invitation
from swarm_protocol.run_credentials import check_given, parse_run_invitation
from torch import nn

from swarm.ended_tasks import end_tasks
from swarm.member_options import MemberOptions
from swarm.network.discovery.peer_names import check_peers
from swarm.network.libp2p.libp2p_options import Libp2pOptions, listen_addrs_for
from swarm.network.libp2p_network import Libp2pNetwork
from swarm.network.membership import Membership
from swarm.start_checkpoint import CheckpointSource, bringing
from swarm.temporary_folder import temporary_folder
from swarm.training.data.local_data import LocalData, shared_cache
from swarm.training.data.tokenizing import PreparationStopped
from swarm.training.inner.inner_loop import InnerLoop
from swarm.training.inner.interval import TrainingSetup, prepare
from swarm.training.inner.one_device import LocalOptions
from swarm.training.inner.own_module import (
    Batches,
    Dataset,
    Evaluate,
    LossOf,
    ModuleInner,
    OptimizerFactory,
    given_module,
)
from swarm.training.member.checkpoint_writer import CheckpointWriter
from swarm.training.member.members_watch import let_others_finish
from swarm.training.member.run_member import RunMember, RunMemberOptions
from swarm.training.round.promise import PromiseFile
from swarm.training.run.layout import Layout, fragment_of
from swarm.training.run.run_file import load_checked_run
from swarm.training.run.run_model import build_model, module_run
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.replica_state import ReplicaState
from swarm.training.trainer_events import (
    IntervalFailed,
    InvitationRefused,
    OtherHistory,
    OuterStep,
    TrainingEvent,
)

__all__ = ["LocalData", "LocalOptions", "MemberOptions", "Step", "Trainer", "module_run"]

logger = logging.getLogger(__name__)

NETWORK_ID = "swarm"
LEAVE_S = 30.0
"""Maximum time that a leaving member waits for the step under way, if the others wait for it."""


DEFAULT_OPTIONS = MemberOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An outer step that the run and this member have committed: all replicas of the run have this `digest` now.

    `loss` is the group's mean training loss, weighted by tokens. `tokens_per_s` is this member's own speed. `fragment`
    is the part of the model that the step moved; it is 0 if every step moves the whole model.
    """

    outer_step: int
    loss: float
    digest: str
    group: tuple[str, ...]
    num_tokens: int
    tokens_per_s: float
    seconds: float
    fragment: int


class FailedIntervals:
    """Logs the first of a member's failures for one reason at a step, and then each time that their number has
    doubled."""

    def __init__(self) -> None:
        self._last: IntervalFailed | None = None
        self._num_failed = 0

    def warn_of(self, event: IntervalFailed) -> None:
        self._num_failed = self._num_failed + 1 if event == self._last else 1
        self._last = event
        if self._num_failed.bit_count() == 1:
            times = f" ({self._num_failed} times in a row)" if self._num_failed > 1 else ""
            logger.warning("this member brings nothing to outer step %d: %s%s", event.step, event.reason, times)


class Trainer:
    """Takes part in a run, as `swarm-node join --run` does. A context manager, and an iterator over outer steps.

        with Trainer("run.toml", peers=["/ip4/…/p2p/…"]) as trainer:
            for step in trainer:
                print(step.outer_step, step.loss, step.digest)
        print(trainer.module)

    Training begins with the `with` block and continues in the background. The iterator waits for the next step and ends
    with the run. Leaving the block leaves the run; a member of the last step's roster first waits up to 30 s for the
    step under way. `module` then holds the committed weights. If training raises an exception, the iterator raises it.

    For a run of your own module (`module_run`) give `model`, `optimizer`, `data` and `loss`, and perhaps `evaluate`,
    see `OwnModule`: the module is trained in place, and must not be used meanwhile. Otherwise leave them out: the run's
    file describes everything. A restarted member goes on from its newest checkpoint (`MemberOptions(checkpoints=…)`),
    or from the others' state. If nobody has the state from which it voted any more, it waits, and the log says so.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        peers: Sequence[str],
        model: nn.Module | None = None,
        optimizer: OptimizerFactory | None = None,
        data: Dataset | Batches | None = None,
        loss: LossOf | None = None,
        evaluate: Evaluate | None = None,
        options: MemberOptions = DEFAULT_OPTIONS,
    ) -> None:
        """`peers` are addresses of members or seeds; with none, the others join through this member.

        Raises ConfigError or IntegrityError if the run or the module cannot be trained or an invitation cannot be read.
        """
        self.run: SignedRun = load_checked_run(Path(run))
        self.addrs: tuple[str, ...] = ()
        """The addresses at which others reach this member."""
        self._options = options
        self._invitation = given_invitation(options.invite)
        self._network_id = options.network_id or (self._invitation.network_id if self._invitation else NETWORK_ID)
        self._peers = check_peers(peers) or (self._invitation.seeds if self._invitation else ())
        self._run_invitations = tuple(
            parse_run_invitation(each) if isinstance(each, str) else each for each in options.invitations
        )
        given = {"model": model, "optimizer": optimizer, "data": data, "loss": loss}
        own = given_module(self.run.config, given, evaluate, options.collate)
        self._inner = ModuleInner(self.run.config, own) if own else None
        self._state: ReplicaState | None = None
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()  # None: there are no more
        self._failure: BaseException | None = None
        self._joined: Future[None] = Future()
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._leaving = asyncio.Event()
        self._failed_intervals = FailedIntervals()

    def __enter__(self) -> Trainer:
        """Join. Raises StartError, ConfigError or IntegrityError."""
        if self._thread is not None:
            raise SessionError("the trainer has been used already", remedy="make a new one")
        self._thread = threading.Thread(target=asyncio.run, args=(self._live(),), name="swarm-trainer", daemon=True)
        self._thread.start()
        try:
            self._joined.result()
            self._raise_failure()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self._raise_failure()

    def __iter__(self) -> Iterator[Step]:
        """Yield each outer step from now on, until the run is finished. Raises what ended the training."""
        if self._thread is None:
            raise SessionError("the trainer has not joined", remedy="use it as: with Trainer(…) as trainer")
        while (step := self._steps.get()) is not None:
            yield step
        self._steps.put(None)
        self._raise_failure()

    def close(self) -> None:
        """Leave the run, and end the thread; a member of the last step's roster first waits up to LEAVE_S for the step
        under way. Once the run is finished, wait as long for members that lack its last state. A second call does
        nothing."""
        if self._thread is None:
            return
        self._begun.wait()
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._leaving.set)
        self._thread.join()

    @property
    def module(self) -> nn.Module:
        """The module with the committed weights, once training has ended. Raises SessionError before, and after a
        session that ended before this member had a state.

        It is your own module, or the run's transformers model, which each access builds.
        """
        if self._state is None:
            if self._thread is not None and not self._thread.is_alive():
                raise SessionError("this member left before it had a state of the run", remedy="use a new trainer")
            raise SessionError("there are no weights before the training has ended", remedy="leave the `with` block")
        if self._inner is not None:
            return self._inner.own.module
        module = build_model(self.run.config.model)
        Layout.of(module, self.run.config.fragments).set_parameters(module, self._state.theta_N)
        return module

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def _live(self) -> None:
        """Run the thread. The methods below run in its event loop or in threads that it waits for."""
        # denormal numbers count in a part's digest, and a new thread inherits the program's setting
        torch.set_flush_denormal(False)
        self._loop = asyncio.get_running_loop()
        self._begun.set()
        try:
            await self._take_part()
        except PreparationStopped:
            pass  # `close` was called before the data was ready
        except BaseException as error:
            self._failure = cause(error)
        finally:
            self._steps.put(None)
            if not self._joined.done():
                self._joined.set_result(None)

    async def _take_part(self) -> None:
        """Train until the run is finished and `close` was called.

        Raises SwarmError, or what the author's code raises.
        """
        with temporary_folder("trainer") as folder:
            key = Path(self._options.identity or folder / "identity.key")
            identity = Identity.load_or_create(key)
            self.run.check_names(identity.peer_id)
            check_given(self._run_invitations, identity.peer_id, self.run.run_id, network_id=self._network_id)
            # under a key that ends with the session nothing can be voted twice
            kept = key.with_name(f"{key.name}.votes") / self.run.run_id if self._options.identity else None
            with PromiseFile(kept).locked() if kept else contextlib.nullcontext():
                await self._take_part_with(identity, key, kept)

    async def _take_part_with(self, identity: Identity, key: Path, kept: Path | None) -> None:
        saving = self._checkpoint_writer(identity)
        options = await asyncio.to_thread(self._prepare, kept, saving)
        inner = options.setup.inner
        assert isinstance(inner, InnerLoop | ModuleInner)

        def on_event(event: TrainingEvent) -> None:
            self._on_event(event)
            if saving is not None:
                saving.after(event, member, inner.state)

        try:
            network = await Libp2pNetwork.create(self._libp2p_options(key))
            async with network, Membership(network) as membership:
                member = RunMember(network, membership, identity, self.run, on_event=on_event, options=options)
                del options  # the member owns the state now
                async with member:
                    self.addrs = await network.addrs()
                    self._joined.set_result(None)
                    try:
                        await self._train(member, network)
                    finally:
                        # in the thread that trains, where no interval runs or begins now
                        await asyncio.wrap_future(member.between_intervals(lambda: self._keep(member.state)))
                        if saving is not None:
                            await saving.finish()
                    if self._state is not None and self._state.outer_step == self.run.config.outer_steps:
                        self._steps.put(None)
                        await self._leaving.wait()
                        await let_others_finish(
                            membership, self.run.run_id, network.peer_id, is_watched=lambda: member.is_watched
                        )
        finally:
            # the member closes it too, if it came to be
            await asyncio.to_thread(inner.close)

    def _checkpoint_writer(self, identity: Identity) -> CheckpointWriter | None:
        if self._options.checkpoints is None:
            return None
        # of this member alone, since several on one machine may be given one directory
        folder = Path(self._options.checkpoints) / self.run.run_id / identity.peer_id
        return CheckpointWriter(folder, on_failure=lambda error: logger.warning("%s", error))

    def _prepare(self, kept: Path | None, saving: CheckpointWriter | None) -> RunMemberOptions:
        """Make what the member trains with, from its newest checkpoint if it has one. Blocks."""
        config, resumed = self.run.config, saving.resume() if saving else None
        if self._inner is None:
            stop = self._leaving.is_set
            place = None if self._options.start is None else Path(self._options.start)
            bring = bringing(config, CheckpointSource(place=place, cache=shared_cache().parent / "models"), stop)
            data = replace(self._options.data, stop=stop)
            setup = prepare(config, self._options.local, data, bring, resumed.inner if resumed else None)
        else:
            warm_up()
            setup = TrainingSetup(inner=self._inner, theta_N=self._inner.flat(), bounds=self._inner.layout.bounds)
        options = RunMemberOptions(
            setup=setup,
            state=resumed.state if resumed else None,
            certificate=resumed.certificate if resumed else b"",
            history=resumed.history if resumed else (),
            invitations=self._run_invitations,
        )
        return options if kept is None else options.kept_in(kept, kept / "evidence", self.run, self._network_id)

    def _libp2p_options(self, key: Path) -> Libp2pOptions:
        options = self._options
        return Libp2pOptions(
            identity_path=key,
            network_id=self._network_id,
            peers=self._peers,
            invitation=self._invitation,
            listen=listen_addrs_for(self._peers) if options.listen is None else options.listen,
            announce=options.announce,
            relay=options.relay,
        )

    async def _train(self, member: RunMember, network: Libp2pNetwork) -> None:
        """Train until the run is finished, `close` was called or libp2p failed."""
        training = asyncio.create_task(member.run(), name="train")
        leaving = asyncio.create_task(self._leaving.wait(), name="leave")
        failing = asyncio.create_task(network.wait_failed(), name="watch libp2p")
        try:
            await asyncio.wait({training, leaving, failing}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not training.done():
                member.stop()
                # others wait only for members of the state
                is_member = member.state is not None and network.peer_id in member.state.manifest.roster
                timeout_s = LEAVE_S if is_member else 0.0
                await asyncio.wait({training, failing}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise failing.result()
        finally:
            await end_tasks(training, leaving, failing)
        if not training.cancelled():
            training.result()

    def _keep(self, state: ReplicaState | None) -> None:
        """Keep the last committed state. Blocks while it is copied into the user's own module."""
        self._state = state
        if state is not None and self._inner is not None:
            self._inner.load(state.theta_N)

    def _on_event(self, event: TrainingEvent) -> None:
        match event:
            case OuterStep():
                self._steps.put(
                    Step(
                        outer_step=event.step,
                        fragment=fragment_of(event.step, self.run.config.fragments),
                        **shared_fields(event, Step),
                    )
                )
            case IntervalFailed():
                self._failed_intervals.warn_of(event)
            case InvitationRefused():
                logger.warning("the invitation with serial %s %s", event.serial, event.reason)
            case OtherHistory():
                logger.warning("%s; this member keeps its own; %s", event.words(short_id), event.remedy)
