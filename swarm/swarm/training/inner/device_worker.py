"""The worker process of one device. It answers the requests of `several_devices`, and ends when its parent ends.

Workers listen only on loopback.

Shapes: N values of the flat vector, F of a slice of it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from swarm_protocol.errors import SwarmError
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swarm.training.inner.one_device import LocalOptions, OneDevice
from swarm.training.run.layout import Layout
from swarm.training.run.run_tables import InnerConfig

COLLECTIVE_S = 600.0
"""Time limit for workers that wait for each other."""
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Everything that worker `rank` needs to start. `model` is a pickled module, `loss` a pickled `LossFunction`. The
    rendezvous store of the workers is on `port` of loopback."""

    config: InnerConfig
    model: bytes
    loss: bytes
    fragments: int
    local: LocalOptions
    rank: int = 0
    port: int = 0
    num_threads: int = 1


def work(assignment: Assignment, pipe: connection.Connection) -> None:
    """Run the process. Answer each (name, arguments) with ("done", value), with ("raised", error) for a SwarmError,
    which all workers raise, or with ("broken", time in seconds, message), after which the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        worker = _DeviceWorker(assignment)
        pipe.send(("done", None))
        while True:
            name, arguments = pipe.recv()
            try:
                answer: tuple[Any, ...] = ("done", getattr(worker, name)(*arguments))
            except SwarmError as error:
                answer = ("raised", error)
            pipe.send(answer)
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the parent is gone
    except Exception as error:  # torch and the model raise many kinds; the other workers must not wait for this one
        pipe.send(("broken", time.monotonic(), f"{type(error).__name__}: {error}"[:500]))
        os._exit(1)  # without the clean-up of torch's connections, which can abort this process when another one ends


class _DeviceWorker:
    """The public methods are the parent's requests. All workers that take part in one raise the same error."""

    def __init__(self, assignment: Assignment) -> None:
        local = assignment.local
        self._device = torch.device(local.devices[assignment.rank])
        torch.set_num_threads(assignment.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        _join_workers(assignment.port, assignment.rank, len(local.devices), self._device.type)
        model = pickle.loads(assignment.model)  # noqa: S301  # our parent's
        self._num_values = Layout.of(model).num_values
        self._steps = OneDevice(
            assignment.config,
            model,
            device=str(self._device),
            fragments=assignment.fragments,
            local=local,
            loss=pickle.loads(assignment.loss),  # noqa: S301
            all_reduce=dist.all_reduce,
        )

    def load(self, theta_N: NDArray[Any] | None) -> None:
        self._steps.load(self._from_first(theta_N, self._num_values))

    def take_in(self, where: slice, theta_F: NDArray[Any] | None, mixing: float) -> None:
        num_values = len(range(*where.indices(self._num_values)))
        self._steps.take_in(where, self._from_first(theta_F, num_values), mixing)

    def flat(self, where: slice) -> NDArray[Any]:
        return self._steps.flat(where).numpy()

    def step(self, x_BT: NDArray[Any], factor: float, num_windows: int) -> float:
        return self._steps.step(torch.from_numpy(x_BT), factor, num_windows)

    def release_gradient(self) -> None:
        self._steps.release_gradient()

    def loss(self, theta_N: NDArray[Any] | None, x_VT: NDArray[Any]) -> float:
        return self._steps.loss(self._from_first(theta_N, self._num_values), torch.from_numpy(x_VT))

    def state(self) -> dict[str, NDArray[Any]]:
        return {key: torch.cat(pieces).cpu().numpy() for key, pieces in self._steps.state().items()}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._steps.load_state({key: torch.from_numpy(value) for key, value in state.items()})

    def _from_first(self, values: NDArray[Any] | None, num_values: int) -> Tensor:
        """Broadcast the `values` that worker 0 got from the parent."""
        if values is None:
            vector = torch.empty(num_values, device=self._device)
        else:
            vector = torch.from_numpy(values).to(self._device)
        dist.broadcast(vector, 0)
        return vector


def _join_workers(port: int, rank: int, num_workers: int, kind: str) -> None:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    timeout = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=TCPStore("127.0.0.1", port, is_master=False, timeout=timeout),
        rank=rank,
        world_size=num_workers,
        timeout=timeout,
    )


def _end_with_parent() -> None:
    """End this process when the parent ends, even by SIGKILL, and even if another child still holds the parent's pipe.

    Ends without cleanup, since the process may be waiting for a worker that never answers.
    """
    parent = parent_process()
    assert parent is not None
    while not connection.wait([parent.sentinel], timeout=_LOOK_S) and os.getppid() == parent.pid:
        pass
    os._exit(1)
