"""Serves a model's blocks on this node until it leaves; which blocks, `swarm.serving.volunteer` finds out."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

from swarm.router.placement import Decision
from swarm.serving.server_options import ServerOptions
from swarm.serving.volunteer import Volunteer, VolunteerOptions
from swarm_protocol.checks import check_name
from swarm_protocol.control_messages import ServingStatus
from swarm_protocol.errors import ConfigError

from swarm_node.node import Node

MEMORY_SHARE = 0.8  # of what is free; the rest is for activations, and for the machine's owner
CACHE_SHARE = 0.25  # of what may be used
MAX_CACHE_BYTES = 2**30
RATE_S = 5.0


class TokenRate:
    """Tokens a second over the last RATE_S, from a counter that only grows."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, now_s: float, num_tokens: int) -> float:
        self._seen.append((now_s, num_tokens))
        while now_s - self._seen[0][0] > RATE_S:
            self._seen.popleft()
        since_s, since_tokens = self._seen[0]
        return (num_tokens - since_tokens) / (now_s - since_s) if now_s > since_s else 0.0


def model_name(directory: Path) -> str:
    """What clients call the model in `directory`: the directory's own name. Raises ConfigError."""
    try:
        return check_name(directory.name, "name")
    except ValueError as error:
        raise ConfigError(
            f"{directory} cannot be served under its own name: {error}", remedy="rename the directory"
        ) from error


class Serving:
    """A model's part on one node, owned by the task in `until_leaving`. `numbered`: its start is reported as steps."""

    def __init__(self, node: Node, directory: Path, name: str, *, numbered: bool) -> None:
        self._node = node
        self._name = name
        self._numbered = numbered
        self._rate = TokenRate()
        self._volunteer = Volunteer(
            node.network,
            node.membership,
            directory,
            name=name,
            options=_options(node),
            on_decision=self._decided,
        )

    async def until_leaving(self) -> None:
        """Raises ConfigError or IntegrityError if the model cannot be served here, SessionError if it no longer can."""
        self._node.emitter.emit("loading", model=self._name)
        try:
            await self._volunteer.start()
            while not self._node.departure.leaving.is_set():
                if failure := self._volunteer.failure:
                    raise failure
                self._node.activity.serving = self._status()
                try:
                    async with asyncio.timeout(1.0):
                        await self._node.departure.leaving.wait()
                except TimeoutError:
                    continue
            await self._volunteer.drain(within_s=self._node.departure.grace_s)
        finally:
            await self._volunteer.close()
            self._node.activity.serving = None

    def _decided(self, decision: Decision) -> None:
        server = self._volunteer.server
        assert server is not None
        if self._numbered:
            self._numbered = False
            blocks = f"blocks {decision.start} to {decision.end} of {self._name}"
            self._node.steps.done("takes", f"{blocks}: {decision.reason}")
            self._node.steps.done("serving", "open for sessions")
        self._node.activity.state = "serving"
        self._node.emitter.emit(
            "serving",
            model=self._name,
            start=decision.start,
            end=decision.end,
            revision=server.record.revision,
            reason=decision.reason,
        )

    def _status(self) -> ServingStatus:
        server = self._volunteer.server
        assert server is not None
        return ServingStatus(
            model=self._name,
            start=server.start_block,
            end=server.end_block,
            num_sessions=len(server.sessions),
            tokens_per_s=self._rate.update(asyncio.get_running_loop().time(), server.engine.num_tokens),
        )


def _options(node: Node) -> VolunteerOptions:
    config = node.config
    usable_bytes = config.max_memory or int(node.hardware.free_memory_bytes * MEMORY_SHARE)
    return VolunteerOptions(
        span=config.blocks,
        max_blocks=config.max_blocks or None,
        max_bytes=usable_bytes,
        server=ServerOptions(
            device=node.hardware.device, kv_bytes=max(1, min(MAX_CACHE_BYTES, int(usable_bytes * CACHE_SHARE)))
        ),
    )
