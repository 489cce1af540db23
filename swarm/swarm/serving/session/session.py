"""One client's stateful inference over a chain of servers that may change under it: questions and their answers.

Leaves decisions to `course`, carrying them out to `pilot`, and sampling to the last server. Used by one task at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.records import ServeRecord
from swarm_protocol.rows import row_bytes
from swarm_protocol.sampler import Sampler
from swarm_protocol.session_frames import SampledToken, TokenDraw
from torch import Tensor

from swarm.network.membership import Membership
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.chain import Limits
from swarm.serving.session.client_state import ClientState
from swarm.serving.session.route_finder import KnownServers, RouteFinder
from swarm.serving.session.session_decisions import Course
from swarm.serving.session.session_messages import Speech
from swarm.serving.session.session_runner import Pilot
from swarm.serving.session.trace import Trace

MAX_STEP_BYTES = 2 * 2**20
"""Of activations in one step: several steps of many clients wait at a server, in some hundred MiB in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """`patience_s`: how long to look for a replacement. `max_replay_bytes`: what may be kept to survive failures.

    `codec` of the activations on the wire: "raw", "bf16" or "int8".
    """

    patience_s: float = 20.0
    max_replay_bytes: int = 2**31
    max_step_tokens: int = 512
    codec: str = "raw"


class Session:
    """Use as a context manager; leaving it frees the chain. `servers` are those known so far.

    The chain is opened by the first question, whose tokens may be known to the servers already. Each question raises
    NoChain when blocks are missing or were lost and nobody took them over in time, ConfigError if replays would need
    too much memory, and SessionError when server after server fails. After any of these, and after cancelling one, the
    session is fit only to be closed. With a `sampler` the index of each draw counts from the session's first one, and
    ConfigError is raised for a grammar that servers cannot use, too.
    """

    def __init__(
        self,
        state: ClientState,
        membership: Membership,
        model: ModelShape,
        *,
        max_tokens: int,
        servers: Mapping[str, ServeRecord],
        trace: Trace,
        options: SessionOptions,
        sampler: Sampler | None = None,
    ) -> None:
        trace.session_id = uuid4().hex
        trace.codec = options.codec
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._speech = Speech(
            model,
            state.prefixes,
            session_id=trace.session_id,
            max_tokens=max_tokens,
            codec=options.codec,
            sampler=sampler,
        )
        finder = RouteFinder(
            KnownServers(membership, servers, model=model.name, revision=model.revision),
            state.health,
            max_tokens=max_tokens,
            salt=trace.session_id,
            patience_s=options.patience_s,
        )
        num_rows = MAX_STEP_BYTES // row_bytes(options.codec, model.hidden_size)
        step_limits = Limits(
            max_step_tokens=max(1, min(options.max_step_tokens, num_rows)),
            max_output_tokens=max(1, limits.MAX_MESSAGE_BYTES // (8 * model.vocab_size)),
        )
        self._course = Course(model.num_blocks, self._speech.new_ledger, step_limits)
        self._pilot = Pilot(
            self._course,
            self._speech,
            state,
            finder,
            max_replay_bytes=options.max_replay_bytes,
            trace=trace,
        )

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        for block, ledger in self._course.ledgers.items():
            self._speech.keep(block, ledger)
        await self._pilot.close()

    async def next_token(self, tokens: Sequence[int], draw: TokenDraw) -> SampledToken:
        """Append tokens; the last server picks the one that follows them."""
        return await self._first_token(tokens, draw, ahead=0)

    async def next_tokens(
        self, tokens: Sequence[int], draw: TokenDraw, num_tokens: int
    ) -> AsyncGenerator[SampledToken, None]:
        """Append tokens; the servers draw those that follow, each at the index after that of the one before.

        They do not wait for whoever takes them from here. Unless all were taken, the session is fit only to be closed.
        """
        yield await self._first_token(tokens, draw, ahead=num_tokens - 1)
        for _ in range(num_tokens - 1):
            (picked,) = await self._pilot.more()
            assert isinstance(picked, SampledToken)
            yield picked

    async def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens and return the logits [V] that follow the last one, float32."""
        self._speech.draw = None
        (logits_TV,) = await self._pilot.ask(self._append(tokens), "last")
        assert isinstance(logits_TV, Tensor)
        return logits_TV[-1]

    async def all_logits(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens and return the logits [T, V] that follow each of them, float32."""
        self._speech.draw = None
        outputs = await self._pilot.ask(self._append(tokens), "all")
        return torch.cat([output for output in outputs if isinstance(output, Tensor)])

    async def _first_token(self, tokens: Sequence[int], draw: TokenDraw, *, ahead: int) -> SampledToken:
        self._speech.draw = draw
        (picked,) = await self._pilot.ask(self._append(tokens, ahead=ahead), "token", ahead=ahead)
        assert isinstance(picked, SampledToken)
        return picked

    def _append(self, tokens: Sequence[int], *, ahead: int = 0) -> bytes:
        self._num_tokens += len(tokens) + ahead
        if not tokens or self._num_tokens > self._max_tokens:
            raise ConfigError(
                f"{self._num_tokens} tokens after {len(tokens) + ahead} more, and the session has room for "
                f"{self._max_tokens}",
                remedy="ask about one token or more, and open a session with room for all",
            )
        return self._speech.know(tokens)
