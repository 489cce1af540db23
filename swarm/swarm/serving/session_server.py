"""The server's side of one session: its cache, its deadlines, and every check of what the client sends.

Leaves admission to `server` and compute to `engine`. Owned by the network's handler task; others only move the
deadline.
"""

from __future__ import annotations

import asyncio

import torch
from swarm_protocol import limits, serving_messages
from swarm_protocol.errors import PeerRefused, PeerViolation
from swarm_protocol.serving_messages import Open, StepResult

from swarm.network.interface import Stream
from swarm.network.phases import FaultHook
from swarm.serving.blocks import Span, Want
from swarm.serving.engine import Engine, Step
from swarm.serving.tensors import pack, unpack_floats, unpack_tokens

WANTS = {want.name.lower(): want for want in Want}


class ServedSession:
    """`max_tokens` of cache are reserved for it as long as it exists. `deadline` ends its handler when it expires."""

    def __init__(
        self,
        peer_id: str,
        opened: Open,
        span: Span,
        *,
        max_step_tokens: int,
        deadline: asyncio.Timeout,
        idle_s: float,
    ) -> None:
        self.peer_id = peer_id
        self.session_id = opened.session_id
        self.max_tokens = opened.max_tokens
        self.max_step_tokens = max_step_tokens
        self.span = span
        self.cache = span.new_cache()
        self.leave_at_s: float | None = None
        self._deadline = deadline
        self._idle_s = idle_s

    def leave_by(self, at_s: float) -> None:
        """The session is told with its next result, and ended at `at_s` of the loop's clock."""
        self.leave_at_s = at_s
        if not self._deadline.expired():
            self._deadline.reschedule(min(at_s, self._deadline.when() or at_s))

    def wait_for_client(self) -> None:
        """From here on the client may take `idle_s`."""
        at_s = asyncio.get_running_loop().time() + self._idle_s
        self._deadline.reschedule(at_s if self.leave_at_s is None else min(at_s, self.leave_at_s))

    def work(self) -> None:
        """From here on the client waits for us."""
        self._deadline.reschedule(self.leave_at_s)

    def refusal(self) -> PeerRefused:
        """Why the deadline ended it."""
        if self.leave_at_s is not None:
            return PeerRefused("the server is leaving", remedy="go on with another server")
        return PeerRefused(f"the session was silent for {self._idle_s:g} s", remedy="open it again", retry_after_s=1.0)

    @property
    def leave_within_s(self) -> float | None:
        if self.leave_at_s is None:
            return None
        return max(0.0, self.leave_at_s - asyncio.get_running_loop().time())


async def serve_steps(stream: Stream, session: ServedSession, engine: Engine, faults: FaultHook) -> None:
    """Answer steps until the client leaves. Raises PeerViolation for a step that breaks the rules."""
    while True:
        session.wait_for_client()
        request = serving_messages.Step.from_bytes(await stream.receive())
        session.work()
        step = checked_step(request, session)
        await faults.reached("serve/prefill" if step.x.shape[0] > 1 else "serve/decode")
        done = await engine.submit(step)
        result = StepResult(
            position=step.position + step.x.shape[0],
            compute_ms=done.compute_ms,
            queue_ms=done.queue_ms,
            leave_within_s=session.leave_within_s,
            tensor=None if done.output is None else pack(done.output),
        )
        await faults.reached("serve/reply")
        session.wait_for_client()
        await stream.send(result.to_bytes())


def checked_step(request: serving_messages.Step, session: ServedSession) -> Step:
    """What the engine may run. Nothing has been computed yet when this raises PeerViolation."""
    span, length, num_tokens = session.span, session.cache.length, request.tensor.shape[0]
    if request.position != length:
        raise PeerViolation(f"step at position {request.position}, and the cache ends at {length}")
    if num_tokens > session.max_step_tokens:
        raise PeerViolation(f"a step of {num_tokens} tokens, and this server takes {session.max_step_tokens}")
    if request.position + num_tokens > session.max_tokens:
        raise PeerViolation(f"{request.position + num_tokens} tokens, and the session reserved {session.max_tokens}")
    if span.is_last and request.want == "all" and 4 * num_tokens * span.vocab_size > limits.MAX_MESSAGE_BYTES // 2:
        raise PeerViolation(f"the logits of {num_tokens} tokens are too large for one message")
    if span.is_first:
        x: torch.Tensor = unpack_tokens(request.tensor, span.vocab_size)
    else:
        x = unpack_floats(request.tensor, num_tokens, span.hidden_size)
    return Step(span=span, cache=session.cache, position=request.position, x=x, want=WANTS[request.want])
