"""`Trainer`: a member of a run for code without an event loop. It lives in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from swarm_compression import warm_up
from swarm_protocol.errors import ConfigError, SessionError
from torch import nn

from swarm.trainer.member import Member
from swarm.trainer.member_options import AS_USUAL, MemberOptions
from swarm.trainer.own_module import Batches, Dataset, LossOf, ModuleInner, OptimizerFactory, OwnModule
from swarm.trainer.start_checkpoint import CheckpointSource, bringing
from swarm.training.data import PreparationStopped
from swarm.training.data.local import shared_cache
from swarm.training.inner.interval import Materials, prepare
from swarm.training.inner.run_model import build_model
from swarm.training.member.root_cause import cause
from swarm.training.member.trainer_events import OuterStep
from swarm.training.run.module_run import refuse_module_run
from swarm.training.run.run_file import load_run
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.layout import Layout, fragment_of
from swarm.training.state.replica_state import ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An outer step that the run has taken, and this member with it: all its replicas have this `digest` now.

    `loss` is the group's mean training loss, weighted by tokens, `tokens_per_s` this member's own speed. `fragment` of
    the model is what the step moved; 0 where all of it moves at once.
    """

    outer_step: int
    loss: float
    digest: str
    group: tuple[str, ...]
    num_tokens: int
    tokens_per_s: float
    seconds: float
    fragment: int


class Trainer:
    """Takes part in a run, as `swarm-node join --run` does. A context manager, and an iterator over outer steps.

        with Trainer("run.toml", peers=["/ip4/…/p2p/…"]) as trainer:
            for step in trainer:
                print(step.outer_step, step.loss, step.digest)
        print(trainer.module)

    Training begins with the `with` block and goes on beside it; the iterator waits for the next step, and ends with the
    run. Leaving the block leaves the run, with the step that is under way; `module` then holds the committed weights.
    Where a step of training raises something, the iterator raises it.

    For a run of a module of one's own (`module_run`) give `model`, `optimizer`, `data` and `loss`, see `OwnModule`:
    the module is trained in place, and is not to be touched meanwhile. Else leave them out: the run's file says all.
    Checkpoints are not kept; a member that starts again gets the state from the others.
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
        options: MemberOptions = AS_USUAL,
    ) -> None:
        """`peers` are addresses of members or seeds; none: the others join through this one.

        Raises ConfigError or IntegrityError if the run or the module cannot be trained.
        """
        self._run = load_run(Path(run))
        self._peers = peers
        self._options = options
        self._own = _own_module(self._run, model, optimizer, data, loss, options)
        self._inner = ModuleInner(self._run.config, self._own) if self._own else None
        self._state: ReplicaState | None = None
        self._addrs: tuple[str, ...] = ()
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._joined: Future[None] = Future()
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._member: Member

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
        """The outer steps from now on, each once, until the run is finished. Raises what ended the training."""
        if self._thread is None:
            raise SessionError("the trainer has not joined", remedy="use it as: with Trainer(…) as trainer")
        while (step := self._steps.get()) is not None:
            yield step
        self._steps.put(None)
        self._raise_failure()

    def close(self) -> None:
        """Leave the run, with the step that is under way, and end the thread. Idempotent."""
        if self._thread is None:
            return
        self._begun.wait()
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._member.leave)
        self._thread.join()

    @property
    def run(self) -> SignedRun:
        return self._run

    @property
    def addrs(self) -> tuple[str, ...]:
        """Where others reach this member."""
        return self._addrs

    @property
    def module(self) -> nn.Module:
        """With the committed weights, once training has ended. Raises SessionError before.

        The own module; else the run's model, a transformers one, made when it is asked for.
        """
        if self._state is None:
            raise SessionError("there are no weights before the training has ended", remedy="leave the `with` block")
        if self._own is not None:
            return self._own.module
        module = build_model(self._run.config.model)
        Layout.of(module, self._run.config.fragments).set_parameters(module, self._state.theta_N)
        return module

    async def _live(self) -> None:
        """The thread's whole life."""
        self._loop = asyncio.get_running_loop()
        self._member = Member(
            self._run,
            self._peers,
            self._options,
            prepare=self._prepare,
            on_joined=self._on_joined,
            on_step=self._on_step,
            on_end=self._on_end,
        )
        self._begun.set()
        try:
            await self._member.live()
        except PreparationStopped:
            pass  # it was told to leave before its data was ready
        except BaseException as error:
            self._failure = cause(error)
        finally:
            self._steps.put(None)
            if not self._joined.done():
                self._joined.set_result(None)

    def _prepare(self) -> Materials:
        config = self._run.config
        if self._inner is None:
            data = replace(self._options.data, stop=self._member.is_leaving)
            source = CheckpointSource(place=self._options.start, cache=shared_cache().parent / "models")
            return prepare(config, self._options.local, data, bringing(config, source))
        warm_up()
        layout = self._inner.layout
        return Materials(inner=self._inner, theta_N=self._inner.flat(), bounds=layout.bounds)

    def _on_joined(self, addrs: tuple[str, ...]) -> None:
        self._addrs = addrs
        self._joined.set_result(None)

    def _on_step(self, event: OuterStep) -> None:
        self._steps.put(
            Step(
                outer_step=event.step,
                loss=event.loss,
                digest=event.digest,
                group=event.group,
                num_tokens=event.num_tokens,
                tokens_per_s=event.tokens_per_s,
                seconds=event.seconds,
                fragment=fragment_of(event.step, self._run.config.fragments),
            )
        )

    def _on_end(self, state: ReplicaState | None, is_finished: bool) -> None:
        self._state = state
        if state is not None and self._inner is not None:
            self._inner.load(state.theta_N)
        if is_finished:
            self._steps.put(None)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _own_module(
    run: SignedRun,
    model: nn.Module | None,
    optimizer: OptimizerFactory | None,
    data: Dataset | Batches | None,
    loss: LossOf | None,
    options: MemberOptions,
) -> OwnModule | None:
    """Raises ConfigError if some of it is missing."""
    if model is None and optimizer is None and data is None and loss is None:
        refuse_module_run(run.config.model)
        return None
    if model is None or optimizer is None or data is None or loss is None:
        given = {"model": model, "optimizer": optimizer, "data": data, "loss": loss}
        missing = [name for name, value in given.items() if value is None]
        raise ConfigError(
            f"a module of your own lacks {' and '.join(missing)}", remedy="give model, optimizer, data and loss"
        )
    return OwnModule(module=model, optimizer=optimizer, data=data, loss=loss, collate=options.collate)
