"""Several devices of one node as one replica: each has a worker process, and they share every step's windows.

Data parallel: each worker has all weights and moments, computes the gradient of its share of the windows, and applies
the sum over all workers (gloo on CPUs, NCCL on CUDA devices), so that all have the same weights bit for bit. Worker 0's
weights are the replica's. The parent keeps no weights: `load` must be the first call.

If a worker dies or fails, or takes far longer for a step than earlier steps took, all workers end at once, and the
running call raises RoundError. `load` then starts new workers, whose moments are zero. Blocks; one call at a time.

Shapes: B windows of a step, T tokens a window, N values of the flat vector, F of a slice, V held-out windows.
"""

from __future__ import annotations

import logging
import pickle
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist
from swarm_protocol.errors import ConfigError, RoundError, reason_of
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swarm.training.inner.device_worker import Assignment, work
from swarm.training.inner.one_device import LocalOptions, LossFunction, check_fits, next_token_loss
from swarm.training.run.layout import Layout
from swarm.training.run.run_tables import InnerConfig

ANSWER_S = 900.0
"""Time limit for an answer of a worker, which may compile or load a big model. The death of a worker is noticed at
once."""
STEP_S = 60.0
"""Minimum time limit of a step: the machine may be busy with other work."""
SLOWER = 20.0
"""The time limit of a step, in durations of the longest step before it."""
_SETTLE_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WorkerProcess:
    device: str
    process: SpawnProcess
    pipe: connection.Connection


class _Failed(Exception):
    """A worker failed; the message says why."""


class SeveralDevices:
    """Owns `model`, and drops its weights. See `OneDevice` for the meaning of the calls.

    Every call raises RoundError if a worker fails, and so does every later one until `load`.

    Raises ConfigError if the options do not fit the model, or the workers cannot start.
    """

    def __init__(
        self,
        config: InnerConfig,
        model: nn.Module,
        *,
        fragments: int = 1,
        local: LocalOptions,
        loss: LossFunction = next_token_loss,
    ) -> None:
        check_fits(local, model)
        self._local = local
        self._layout = Layout.of(model, fragments)
        self._assignment = Assignment(
            config=config,
            model=_pickled(_without_weights(model), "the model"),
            loss=_pickled(loss, "its loss function"),
            fragments=fragments,
            local=local,
        )
        self._store: TCPStore | None = None
        self._longest_step_s = 0.0  # of these workers; 0: they have taken none
        self._workers: list[_WorkerProcess] = []
        try:
            self._start()
        except _Failed as error:
            raise ConfigError(f"cannot train on several devices: {error}", remedy="use one device") from error

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers."""
        return tuple(worker.process.pid or 0 for worker in self._workers)

    def load(self, theta_N: Tensor) -> None:
        self._layout.require(theta_N)
        if not self._workers:
            logger.warning("the worker processes start again, with the optimizer's moments at zero")
            try:
                self._start()
            except _Failed as error:
                raise RoundError(f"the worker processes do not start: {error}") from error
        self._ask("load", self._to_first(theta_N))

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None:
        if theta_F.shape != (num_values := len(range(*where.indices(self._layout.num_values))),):
            raise ValueError(f"the slice has {num_values} values, but the vector has shape {tuple(theta_F.shape)}")
        self._ask("take_in", [(where, *first, mixing) for first in self._to_first(theta_F)])

    def flat(self, where: slice = slice(None)) -> Tensor:
        return torch.from_numpy(self._ask_first("flat", where))

    def step(self, x_BT: Tensor, factor: float) -> float:
        shares = torch.tensor_split(x_BT, len(self._local.devices))
        arguments = [(share.numpy(), factor, len(x_BT)) for share in shares]
        started = time.monotonic()
        losses: list[float] = self._ask("step", arguments, self._step_limit_s())
        self._longest_step_s = max(self._longest_step_s, time.monotonic() - started)
        return losses[0]

    def release_gradient(self) -> None:
        self._ask("release_gradient", [()] * len(self._local.devices))

    def loss(self, theta_N: Tensor, x_VT: Tensor) -> float:
        """Return the sum of the losses."""
        self._layout.require(theta_N)
        shares = torch.tensor_split(x_VT, len(self._local.devices))
        firsts = self._to_first(theta_N)
        losses = self._ask("loss", [(*first, share.numpy()) for first, share in zip(firsts, shares, strict=True)])
        return float(sum(losses))

    def state(self) -> dict[str, list[Tensor]]:
        return {key: [torch.from_numpy(value)] for key, value in self._ask_first("state").items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        plain = {key: value.numpy() for key, value in state.items()}
        self._ask("load_state", [(plain,) for _ in self._local.devices])

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers, self._store, self._longest_step_s = [], None, 0.0

    def _start(self) -> None:
        """Start all workers. If one does not start, raises _Failed and leaves none running."""
        try:
            self._store = _store_on_loopback()
            num_threads = max(1, torch.get_num_threads() // len(self._local.devices))
            for rank, device in enumerate(self._local.devices):
                own = replace(self._assignment, rank=rank, port=self._store.port, num_threads=num_threads)
                self._workers.append(_spawn(device, own))
        except (OSError, dist.DistError) as error:
            self.close()
            raise _Failed(f"no process for each device: {reason_of(error)}") from error
        self._collect(self._workers, ANSWER_S)

    def _step_limit_s(self) -> float:
        """Return the time limit of a step. Compilation takes minutes in the first step, and for each new number of
        windows."""
        if self._local.compile or not self._longest_step_s:
            return ANSWER_S
        return min(ANSWER_S, max(STEP_S, SLOWER * self._longest_step_s))

    def _to_first(self, values: Tensor) -> list[tuple[Any]]:
        return [(values.numpy() if rank == 0 else None,) for rank in range(len(self._local.devices))]

    def _ask(self, name: str, arguments: Sequence[tuple[Any, ...]], limit_s: float = ANSWER_S) -> list[Any]:
        """Call `name` in all workers, each with its own arguments."""
        return self._exchange(name, list(zip(self._workers, arguments, strict=bool(self._workers))), limit_s)

    def _ask_first(self, name: str, *arguments: Any) -> Any:
        [answer] = self._exchange(name, [(worker, arguments) for worker in self._workers[:1]], ANSWER_S)
        return answer

    def _exchange(
        self, name: str, asked: Sequence[tuple[_WorkerProcess, tuple[Any, ...]]], limit_s: float
    ) -> list[Any]:
        if not self._workers:
            raise RoundError("the worker processes have ended", remedy="load the committed weights first")
        try:
            for worker, arguments in asked:
                worker.pipe.send((name, arguments))
            return self._collect([worker for worker, _ in asked], limit_s)
        except (_Failed, OSError) as error:
            self.close()  # a worker that died between two calls is noticed here, and the next `load` starts all anew
            raise RoundError(
                f"training on several devices failed: {reason_of(error)}",
                remedy="training goes on from the committed weights",
            ) from error

    def _collect(self, asked: Sequence[_WorkerProcess], limit_s: float) -> list[Any]:
        """Return the answers. Raises the error that all workers raised, or _Failed, after which all workers have
        ended."""
        answers: dict[int, Any] = {}
        try:
            while len(answers) < len(asked):
                missing = {index: each for index, each in enumerate(asked) if index not in answers}
                self._receive(missing, answers, limit_s)
        except _Failed:
            self.close()
            raise
        for kind, value in answers.values():
            if kind == "raised":
                raise value
        return [answers[index][1] for index in range(len(asked))]

    def _receive(self, waiting: Mapping[int, _WorkerProcess], answers: dict[int, Any], limit_s: float) -> None:
        """Wait for at least one more answer. Raises _Failed if any worker fails, asked or not."""
        sentinels = [worker.process.sentinel for worker in self._workers]
        ready = connection.wait([*(worker.pipe for worker in waiting.values()), *sentinels], timeout=limit_s)
        if not ready:
            silent = ", ".join(worker.device for worker in waiting.values())
            raise _Failed(f"no answer from {silent} for {limit_s:.3g} s")
        for index, worker in waiting.items():
            if worker.pipe in ready:
                answers[index] = self._received(worker)
        for worker in self._workers:
            if worker.process.sentinel in ready:
                raise _Failed(_end_of(worker))

    def _received(self, worker: _WorkerProcess) -> Any:
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise _Failed(_end_of(worker)) from error
        if answer[0] == "broken":
            # the cause may be another worker: one that was killed, or that failed before this one. All others exit
            connection.wait([each.process.sentinel for each in self._workers if each is not worker], _SETTLE_S)
            cause = next((each for each in self._workers if (each.process.exitcode or 0) < 0), None)
            raise _Failed(_end_of(cause) if cause else self._first_failure(worker, answer))
        return answer

    def _first_failure(self, worker: _WorkerProcess, answer: tuple[str, float, str]) -> str:
        """Return the message of the worker that failed first. The others, such as `worker`, then missed it."""
        failures = {answer[1]: f"{worker.device}: {answer[2]}"}
        for other in self._workers:
            with suppress(EOFError, OSError):
                if other is not worker and other.pipe.poll() and (late := other.pipe.recv())[0] == "broken":
                    failures[late[1]] = f"{other.device}: {late[2]}"
        return failures[min(failures)]


def _store_on_loopback() -> TCPStore:
    """Return the rendezvous store of the workers. Without the given socket, it would listen on all interfaces."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _spawn(device: str, assignment: Assignment) -> _WorkerProcess:
    # after a fork, torch's threads and CUDA's state cannot be used
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(assignment, theirs), name=f"swarm {device}", daemon=True)
    process.start()
    theirs.close()
    return _WorkerProcess(device=device, process=process, pipe=ours)


def _end_of(worker: _WorkerProcess) -> str:
    worker.process.join(_SETTLE_S)
    code = worker.process.exitcode
    return f"the worker process of {worker.device} ended" + (f" by signal {-code}" if code and code < 0 else "")


def _without_weights(model: nn.Module) -> nn.Module:
    """Replace each parameter by one zero, expanded to its shape, so that the model is cheap to pickle."""
    for parameter in model.parameters():
        parameter.data = parameter.new_zeros(1).expand(parameter.shape)
    return model


def _pickled(thing: object, what: str) -> bytes:
    try:
        return pickle.dumps(thing)
    except Exception as error:  # pickle raises many kinds
        raise ConfigError(
            f"{what} cannot be sent to worker processes: {error}", remedy="define it in a module, or use one device"
        ) from error
