"""Tests worker processes as one replica, with real processes and gloo on this CPU: they compute what one device
computes, and leave no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.moments import whole
from support.small_net import VOCABULARY, SmallNet, loss_that_fails_on_the_last_token, small_loss, windows
from swarm.training.inner import several_devices
from swarm.training.inner.one_device import LocalOptions, OneDevice
from swarm.training.inner.several_devices import SeveralDevices
from swarm.training.run.layout import Layout
from swarm.training.run.run_tables import InnerConfig
from swarm_protocol.errors import ConfigError, IntegrityError, RoundError
from torch import Tensor, nn

# not muon, with which each worker imports torch's compiler for two seconds
CONFIG = InnerConfig(optimizer="adamw", batch_windows=5, warmup_steps=1, learning_rate=1e-2)
TWO = LocalOptions(devices=("cpu", "cpu"))


@pytest.fixture(scope="module")
def two() -> Iterator[SeveralDevices]:
    """Start two workers for all tests of this module. Each test loads its own state."""
    torch.set_num_threads(1)
    devices = SeveralDevices(CONFIG, SmallNet(), fragments=2, local=TWO, loss=loss_that_fails_on_the_last_token)
    try:
        yield devices
    finally:
        devices.close()


def _one() -> OneDevice:
    return OneDevice(CONFIG, SmallNet(), device="cpu", fragments=2, loss=small_loss)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _wait_until(condition: Callable[[], bool], limit_s: float = 100.0) -> bool:
    until = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_step_of_two_workers_equals_one_devices_up_to_rounding(two: SeveralDevices) -> None:
    one, theta_N = _one(), _one().flat()
    for device in (one, two):
        device.load(theta_N)
        device.load_state({"num_steps": torch.tensor([0])})
    # the last batch leaves one worker without a window
    batches = [windows(num_windows, num_windows) for num_windows in (5, 4, 2, 1)]
    losses = [[device.step(x_BT, 0.5) for x_BT in batches] for device in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    torch.testing.assert_close(two.flat(), one.flat(), rtol=1e-3, atol=1e-3)
    assert not torch.equal(two.flat(), theta_N)
    assert two.loss(theta_N, windows(7)) == pytest.approx(one.loss(theta_N, windows(7)), rel=1e-5)
    # a single window leaves one worker without any
    assert two.loss(theta_N, windows(1)) == pytest.approx(one.loss(theta_N, windows(1)), rel=1e-5)
    assert two.state().keys() == one.state().keys()
    found = whole(two.state())
    assert int(found["num_steps"]) == 4
    for key, value in whole(one.state()).items():
        torch.testing.assert_close(found[key], value, rtol=1e-2, atol=1e-3)


def test_loaded_state_continues_bit_for_bit(two: SeveralDevices) -> None:
    two.load(_one().flat())
    two.load_state({"num_steps": torch.tensor([0])})
    two.step(windows(4, 1), 1.0)
    middle_N, state = two.flat(), whole(two.state())
    two.step(windows(4, 2), 1.0)
    last_N = two.flat()
    two.load(middle_N)
    two.load_state(state)
    two.step(windows(4, 2), 1.0)
    assert torch.equal(two.flat(), last_N)


def test_take_in_reaches_every_worker(two: SeveralDevices) -> None:
    one, theta_N = _one(), _one().flat()
    where = Layout.of(SmallNet(), 2).slice(1)
    theta_F = theta_N[where] + 1
    for device in (one, two):
        device.load(theta_N)
        device.load_state({"num_steps": torch.tensor([0])})
        device.take_in(where, theta_F, 0.25)
    assert torch.equal(two.flat(), one.flat())
    assert torch.equal(two.flat(where), one.flat(where))
    # each worker computes its windows with its own weights: if the second one's were not mixed, the loss would differ
    assert two.step(windows(4), 1.0) == pytest.approx(one.step(windows(4), 1.0), rel=1e-4)


def test_mismatched_tensors_are_refused_and_the_workers_keep_running(two: SeveralDevices) -> None:
    two.load(_one().flat())
    pids = two.pids
    with pytest.raises(ValueError, match="the model has"):
        two.load(torch.zeros(3))
    with pytest.raises(ValueError, match="the slice has 4 values"):
        two.take_in(slice(0, 4), torch.zeros(3), 0.0)
    with pytest.raises(IntegrityError, match="not of this model's adamw"):
        two.load_state({"num_steps": torch.tensor([1])})
    assert two.flat().shape == _one().flat().shape
    assert two.pids == pids


def test_step_that_diverges_raises_round_error_and_the_workers_keep_running(two: SeveralDevices) -> None:
    theta_N, pids = _one().flat(), two.pids
    two.load(torch.full_like(theta_N, float("nan")))
    with pytest.raises(RoundError, match="training diverged: the loss is nan"):
        two.step(windows(4), 1.0)
    two.load(theta_N)
    assert torch.equal(two.flat(), theta_N)
    assert two.pids == pids


def test_worker_that_died_between_two_calls_is_noticed_by_the_next(two: SeveralDevices) -> None:
    theta_N = _one().flat()
    two.load(theta_N)
    pid = two.pids[1]
    os.kill(pid, signal.SIGKILL)
    assert _wait_until(lambda: _is_gone(pid))
    _fails(two, windows(4), "training on several devices failed")


def test_worker_that_dies_or_fails_raises_round_error_at_once_and_load_starts_new_workers(
    two: SeveralDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta_N = _one().flat()
    two.load(theta_N)
    pids = two.pids

    def kill_second(*arguments: Any, **options: Any) -> Any:
        """Kill the second worker once both have begun the step and the first one waits for the second one's
        gradient."""
        os.kill(pids[1], signal.SIGKILL)
        monkeypatch.undo()
        return connection.wait(*arguments, **options)

    os.kill(pids[1], signal.SIGSTOP)
    monkeypatch.setattr(connection, "wait", kill_second)
    _fails(two, windows(4), "the worker process of cpu ended by signal 9")
    two.load(theta_N)
    assert not set(two.pids) & set(pids)
    assert two.step(windows(4), 1.0) == pytest.approx(_one().step(windows(4), 1.0), rel=1e-4)
    x_BT = windows(4)
    x_BT[-1] = VOCABULARY - 1

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(1.0)  # until both have failed, the first one for want of the second one's gradient
        return wait(*arguments, **options)

    wait = connection.wait
    monkeypatch.setattr(connection, "wait", late)
    _fails(two, x_BT, "cpu: RuntimeError: no token of these is known")


def _fails(two: SeveralDevices, x_BT: Tensor, message: str) -> None:
    """Assert that the step fails with `message`, and that no worker is left."""
    pids = two.pids
    with pytest.raises(RoundError, match=message):
        two.step(x_BT, 1.0)
    assert all(_is_gone(pid) for pid in pids)
    with pytest.raises(RoundError, match="the worker processes have ended"):
        two.flat()


def test_model_is_refused_when_it_cannot_be_sent_to_workers() -> None:
    class Local(nn.Linear):
        pass

    with pytest.raises(ConfigError, match="the model cannot be sent to worker processes"):
        SeveralDevices(CONFIG, Local(2, 2), local=TWO)


def test_options_that_do_not_fit_the_model_are_refused_before_training() -> None:
    local = LocalOptions(devices=("cpu", "cpu"), activation_checkpointing=True)
    with pytest.raises(ConfigError, match="the model has no list of layers"):
        SeveralDevices(CONFIG, nn.Linear(2, 2), local=local)


class _Puppet:
    """Stand in for a worker process: give the prepared answers, and then stay silent."""

    def __init__(self, pipe: connection.Connection, answers: list[Any]) -> None:
        self.pid, self.exitcode = 0, None
        self.is_killed = False
        self._alive, self._dying = connection.Pipe(duplex=False)
        self.sentinel = self._alive.fileno()
        for answer in answers:
            pipe.send(("done", answer))

    def kill(self) -> None:
        self.is_killed = True

    def join(self, _timeout_s: float = 0.0) -> None:
        assert self.is_killed

    def close(self) -> None:
        self._alive.close()
        self._dying.close()


def test_worker_that_hangs_in_a_step_is_given_up_after_a_multiple_of_the_longest_step_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    puppets: list[_Puppet] = []
    pipes: list[connection.Connection] = []

    def spawn(device: str, _assignment: object) -> several_devices._WorkerProcess:
        ours, theirs = connection.Pipe()
        pipes.append(theirs)
        puppets.append(_Puppet(theirs, [None, 1.5, 2.5]))
        return several_devices._WorkerProcess(device=device, process=puppets[-1], pipe=ours)

    monkeypatch.setattr(several_devices, "_spawn", spawn)
    clock = iter([0.0, 4.0, 4.0, 5.0, 5.0])
    monkeypatch.setattr(several_devices, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for name, value in (("STEP_S", 0.0), ("SLOWER", 0.01)):
        monkeypatch.setattr(several_devices, name, value)
    devices = SeveralDevices(CONFIG, SmallNet(), local=TWO, loss=small_loss)
    assert [devices.step(windows(4), 1.0) for _ in range(2)] == [1.5, 2.5]
    with pytest.raises(RoundError, match=r"no answer from cpu, cpu for 0\.04 s"):
        devices.step(windows(4), 1.0)
    assert all(puppet.is_killed for puppet in puppets)
    for pipe in pipes:
        pipe.close()


PARENT = """
    import json, sys
    from support.small_net import SmallNet, small_loss, windows
    from swarm.training.inner.one_device import LocalOptions, OneDevice
    from swarm.training.run.run_config import InnerConfig
    from swarm.training.inner.several_devices import SeveralDevices

    if __name__ == "__main__":
        one = OneDevice(InnerConfig(optimizer="adamw"), SmallNet(), device="cpu", loss=small_loss)
        one.step(windows(4), 1.0)
        some = SeveralDevices(InnerConfig(), SmallNet(), local=LocalOptions(devices=("cpu",)), loss=small_loss)
        print(json.dumps([*some.pids, "torch._dynamo" in sys.modules]), flush=True)
        while True:
            some.step(windows(4), 1.0)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes there")
def test_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as parent:
        try:
            assert parent.stdout is not None
            pid, has_compiler = json.loads(parent.stdout.readline())
            assert not has_compiler, "the worker imported torch's compiler, which takes as long as torch itself"
            assert not _is_gone(pid)
        finally:
            parent.kill()
    assert _wait_until(lambda: _is_gone(pid))
