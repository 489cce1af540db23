"""One client's stateful inference over a chain of servers that may change under it.

Every hop keeps what it was given. A hop that fails is replaced by one or several servers that start empty, and so are
simply behind: the same loop that runs new tokens catches them up, wanting no output for what the next hop already
has. Positions are never guessed and tokens never sampled twice, so the answer is the one an undisturbed chain gives.

Leaves the choice of servers to `router`, and sampling to `generate`. Used by one task at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from uuid import uuid4

from swarm_protocol import limits
from swarm_protocol.checks import check_int
from swarm_protocol.errors import ConfigError, PeerRefused, PeerTimeout, SessionError, SwarmError
from swarm_protocol.records import ServeRecord
from swarm_protocol.serving_messages import Open
from torch import Tensor

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.router.routing import Chain, NoChain, find_chain
from swarm.serving.blocks import Want
from swarm.serving.hop import Hop
from swarm.serving.links import Links
from swarm.serving.trace import Replay, Trace

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between looks for a server that could take over."""

LEAVE_RETRY_S = 3.0
"""Between looks for others in the place of a leaving server that still answers: each costs the next token a lookup."""

MAX_FAILURES = 16
"""Of servers during one step, or in opening a chain: beyond that the request itself is what breaks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a client must know of a model to check what servers send."""

    name: str
    revision: str
    num_blocks: int
    hidden_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        """Raises ValueError: the numbers are a server's."""
        check_int(self.num_blocks, "num_blocks", low=1, high=limits.MAX_BLOCKS)
        # a row of either must fit into a message
        check_int(self.hidden_size, "hidden_size", low=1, high=limits.MAX_MESSAGE_BYTES // 4)
        check_int(self.vocab_size, "vocab_size", low=1, high=limits.MAX_MESSAGE_BYTES // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """`patience_s`: how long to look for a replacement. `max_replay_bytes`: what may be kept to survive failures."""

    patience_s: float = 20.0
    max_replay_bytes: int = 2**31
    max_step_tokens: int = 512


class Session:
    """Use as a context manager; leaving it frees the chain's caches. `servers` are those known so far."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        links: Links,
        model: ModelShape,
        *,
        max_tokens: int,
        servers: Mapping[str, ServeRecord],
        trace: Trace,
        options: SessionOptions,
    ) -> None:
        self._network = network
        self._membership = membership
        self._links = links
        self._model = model
        self._max_tokens = max_tokens
        self._trace = trace
        self._options = options
        self._id = uuid4().hex
        self._servers = servers
        self._hops: list[Hop] = []
        self._length = 0
        self._stay_until_s = 0.0
        trace.session_id = self._id

    async def __aenter__(self) -> Session:
        """Open the chain. Raises NoChain with the missing blocks, ConfigError if replays would need too much memory."""
        hops = await self._cover(0, self._model.num_blocks, asyncio.get_running_loop().time())
        replay_bytes = (len(hops) - 1) * self._max_tokens * self._model.hidden_size * 4
        self._hops = hops
        if replay_bytes > self._options.max_replay_bytes:
            await self._close_all(hops)
            raise ConfigError(
                f"surviving a failure would take {replay_bytes} bytes here, and {self._options.max_replay_bytes} "
                "are allowed",
                remedy="ask for fewer tokens or allow more memory",
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close_all(self._hops)

    async def advance(self, tokens_T: Tensor) -> Tensor:
        """Append token ids and return the logits [V] that follow them.

        Raises NoChain when blocks were lost and nobody took them over in time, SessionError when server after server
        fails. After either, and after cancelling it, the session is fit only to be closed.
        """
        loop = asyncio.get_running_loop()
        num_known = len(self._trace.replays)
        failed_at_s: list[float] = []
        self._hops[0].inputs.append(tokens_T)
        self._length += tokens_T.shape[0]
        logits_V: Tensor | None = None
        await self._leave_draining(failed_at_s)
        while (index := self._deepest_behind()) is not None:
            since_s = loop.time()
            try:
                output = await self._run(index)
            except SwarmError as error:
                failed_at_s.append(since_s)
                if len(failed_at_s) > MAX_FAILURES:
                    raise SessionError("servers keep failing at the same token", session_id=self._id) from error
                await self._replace(index, error, loop.time() + self._options.patience_s)
            else:
                logits_V = logits_V if output is None else output
        for replay, since_s in zip(self._trace.replays[num_known:], failed_at_s, strict=True):
            replay.failover_ms = (loop.time() - since_s) * 1000
        assert logits_V is not None
        return logits_V

    def _deepest_behind(self) -> int | None:
        """The last first, so that a chunk passes the whole chain before the next one enters it."""
        return next((i for i in reversed(range(len(self._hops))) if self._hops[i].is_behind), None)

    async def _run(self, index: int) -> Tensor | None:
        """One chunk on one hop, and its output to the next one. Returns the logits [V] if this was the end."""
        hop = self._hops[index]
        is_last = index + 1 == len(self._hops)
        num_known = self._length - 1 if is_last else self._hops[index + 1].inputs.length
        num_tokens = min(hop.inputs.length - hop.length, hop.max_step_tokens, self._options.max_step_tokens)
        if hop.length < num_known and not is_last:
            num_tokens = min(num_tokens, num_known - hop.length)
        wanted = Want.LAST if is_last else Want.ALL
        want = wanted if hop.length + num_tokens > num_known else Want.NOTHING
        width = self._model.vocab_size if is_last else self._model.hidden_size
        output, wire_ms = await hop.run(num_tokens, want, width)
        self._links.worked(hop.peer_id, wire_ms if num_tokens == 1 else None)
        if output is not None and is_last:
            return output[0]
        if output is not None:
            self._hops[index + 1].inputs.append(output)
        return None

    # --- when servers go --------------------------------------------------------------------------------------------

    async def _leave_draining(self, failed_at_s: list[float]) -> None:
        """Move away from servers that asked for it, if others can take over; else stay until they end the session."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._stay_until_s:
            return
        for hop in [hop for hop in self._hops if hop.is_leaving]:
            hop.is_leaving = False
            now_s = loop.time()
            refusal = PeerRefused("the server is leaving", peer_id=hop.peer_id)
            try:
                await self._replace(self._hops.index(hop), refusal, now_s, make_before_break=True)
            except NoChain as error:
                logger.info("staying with a leaving server: %s", error)
                self._stay_until_s = loop.time() + LEAVE_RETRY_S
            else:
                failed_at_s.append(now_s)

    async def _replace(
        self, index: int, error: SwarmError, give_up_at_s: float, *, make_before_break: bool = False
    ) -> None:
        """Put others in the place of one hop, with its inputs and nothing run. Raises NoChain."""
        lost = self._hops[index]
        logger.info("blocks [%d, %d) lost on %s: %s", lost.start, lost.end, lost.peer_id, error)
        self._links.failed(lost.peer_id, error)
        if not make_before_break:
            await self._close(lost)
        try:
            new = await self._cover(lost.start, lost.end, give_up_at_s)
        except NoChain as gap:
            raise gap from error
        new[0].inputs = lost.inputs
        self._hops[index : index + 1] = new
        self._trace.replays.append(
            Replay(
                lost_peer=lost.peer_id,
                start=lost.start,
                end=lost.end,
                reason=error.message,
                new_peers=tuple(hop.peer_id for hop in new),
                num_tokens=lost.inputs.length,
            )
        )
        await self._close(lost)

    async def _cover(self, start: int, end: int, give_up_at_s: float) -> list[Hop]:
        """Open hops for blocks `[start, end)`, trying until `give_up_at_s`. Raises NoChain.

        Also SessionError after MAX_FAILURES servers: more of them than one backoff has time for may never answer.
        """
        looked_up = False
        num_failed = 0
        while True:
            try:
                chain = find_chain(self._servers, start, end, self._links.outlook(self._max_tokens, self._id))
            except NoChain:
                # what was known at the start of the session may be old
                if looked_up and asyncio.get_running_loop().time() >= give_up_at_s:
                    raise
                await asyncio.sleep(RETRY_S if looked_up else 0)
                self._servers = await self._look_up()
                looked_up = True
            else:
                if hops := await self._open(chain):
                    return hops
                num_failed += 1
                if num_failed >= MAX_FAILURES:
                    raise SessionError(
                        f"{num_failed} servers in a row opened no session",
                        remedy="try again in a moment",
                        session_id=self._id,
                    )

    async def _open(self, chain: Chain) -> list[Hop]:
        """Hops for the whole chain, or none if one of its servers did not open a session."""
        hops: list[Hop] = []
        try:
            for planned in chain.hops:
                opened = self._opening(planned.start, planned.end)
                hops.append(await Hop.open(self._network, planned, opened, self._servers[planned.peer_id]))
                self._links.opened(planned.peer_id)
                self._trace.hops.append(hops[-1].trace)
        except BaseException as error:
            await self._close_all(hops)
            if not isinstance(error, SwarmError):
                raise
            logger.info("%s did not open a session: %s", planned.peer_id, error)
            self._links.failed(planned.peer_id, error)
            return []
        return hops

    async def _look_up(self) -> Mapping[str, ServeRecord]:
        try:
            servers = await self._membership.servers(self._model.name)
        except PeerTimeout as error:
            logger.info("looking up servers of %s: %s", self._model.name, error)
            return self._servers
        return {peer_id: record for peer_id, record in servers.items() if record.revision == self._model.revision}

    def _opening(self, start: int, end: int) -> Open:
        model = self._model
        return Open(
            session_id=self._id,
            model=model.name,
            revision=model.revision,
            start=start,
            end=end,
            max_tokens=self._max_tokens,
        )

    async def _close(self, hop: Hop) -> None:
        if not hop.is_closed:
            hop.is_closed = True
            self._links.closed(hop.peer_id)
            await hop.close()

    async def _close_all(self, hops: list[Hop]) -> None:
        """Each of them, also if closing another one fails or is cancelled."""
        async with AsyncExitStack() as closing:
            for hop in hops:
                closing.push_async_callback(self._close, hop)
