"""Writes the progress of a run as TensorBoard event files, from the events that the node emits (`--tensorboard DIR`).

Files are in DIR/RUN/NAME, which separates runs and members. torch's writer queues values and writes them in its own
thread. A failing disk costs a warning and the rest of the curves, but not the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm_protocol.errors import ConfigError

from swarm_node.events.emitter import Emitter
from swarm_node.storage.home import explained

FLUSH_S = 5
"""Maximum age in seconds of the newest value in the files."""

SCALARS: Mapping[str, Mapping[str, str]] = {
    "outer_step": {
        "loss": "loss/training",
        "tokens_per_s": "speed/tokens_per_s",
        "num_tokens": "round/tokens",
        "group": "round/members",
        "seconds": "round/seconds",
        "round_s": "round/seconds_after_interval",
        "bytes_sent": "round/bytes_sent",
    },
    "committed": {
        "loss": "loss/training",
        "tokens_per_s": "speed/tokens_per_s",
        "num_tokens": "round/tokens",
        "group": "round/members",
    },
    "interval": {"loss": "loss/training_here"},
    "validated": {"loss": "loss/validation"},
    "round_aborted": {"attempt": "round/aborted_attempt"},
}
"""The curve for each field of each event. A list counts by its length. The x axis is the outer step."""


@contextmanager
def recorded(emitter: Emitter, folder: Path | None, run_id: str, name: str) -> Iterator[None]:
    """Write the events of `emitter` below `folder` while the context lasts, if `folder` is given.

    Raises ConfigError if the files cannot be written.
    """
    if folder is None:
        yield
        return
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and a second
    except ImportError as error:
        raise ConfigError(
            "--tensorboard needs the tensorboard library", remedy="pip install 'swarm-node[tensorboard]'"
        ) from error
    with explained("write TensorBoard's files", option="--tensorboard"):
        writer = SummaryWriter(str(folder / run_id / name.replace("/", "-")), flush_secs=FLUSH_S)
    curves = _Curves(writer, emitter)
    try:
        with emitter.notifying(curves.take):
            yield
    finally:
        curves.close()


class _Curves:
    def __init__(self, writer: Any, emitter: Emitter) -> None:
        self._writer: Any = writer
        self._emitter = emitter

    def take(self, event: str, fields: Mapping[str, object]) -> None:
        step = fields.get("step")
        if event not in SCALARS or not isinstance(step, int) or self._writer is None:
            return
        try:
            for field, tag in SCALARS[event].items():
                value = fields[field]
                number = len(value) if isinstance(value, list | tuple) else value
                if isinstance(number, int | float) and math.isfinite(number):
                    self._writer.add_scalar(tag, number, step)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._writer = None
        message = f"TensorBoard's files are no longer written: {error.strerror or error}"
        self._emitter.warning(message, remedy="free some space, or name another directory with --tensorboard")
