"""Connects the stages of one session to servers: finds servers, opens a sequence on each, sends it frames, and closes
it.

Owns no task: `session` runs what waits here in its own, and reports the results to the session's state machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.session_frames import AllowHandover, Frame

from swarm.deadline_timer import STOPPED_S
from swarm.router.routing import Hop, NoChain
from swarm.serving.session.answered import LastFrames
from swarm.serving.session.client_state import ClientState, SessionOptions
from swarm.serving.session.connection_pool import ClientConnection, ConnectionLost, ConnectionPool
from swarm.serving.session.repair import Repair
from swarm.serving.session.route_finder import KnownServers, RouteFinder
from swarm.serving.session.session_actions import OpenStage
from swarm.serving.session.session_messages import SessionMessages
from swarm.serving.session.stage import Stage

DIAL_S = 2.0
"""Seconds after which a server that is still dialled is left for others: it may be gone, and still be listed."""

AGAIN_S = 1.0
"""Seconds for an answer when several silent servers are asked again, beside others that show whether the line works."""


class StageConnections:
    """Holds the connections of one session's stages. Those to the local spans stay in this process, and all others come
    from the client's pool. `known` are the servers from which the `finder` chooses."""

    def __init__(
        self, client: ClientState, messages: SessionMessages, known: KnownServers, options: SessionOptions
    ) -> None:
        self._client = client
        self._messages = messages
        self._local_spans = options.local_spans
        self.finder = RouteFinder(known, messages, options)
        self._connections: dict[Stage, ClientConnection] = {}

    @property
    def stages(self) -> list[Stage]:
        return list(self._connections)

    def remote(self, stages: Iterable[Stage]) -> list[Stage]:
        """Return those of the stages that are connected, and run by others than this process."""
        return [stage for stage in stages if stage in self._connections and not stage.is_local]

    async def find(self, repair: Repair, between: tuple[str, str]) -> list[Stage]:
        """Return new stages for the blocks of a repair. `between` are the peers before and after it, "" for none.

        Raises NoChain, PeerError.
        """
        if (slow := repair.straggler) is not None:
            hops = await self.finder.find_others(slow.stage.hop, between)
            new = [self._new_stage(hop) for hop in hops]
            replay_s = sum(stage.timer.expected_s(slow.stage.num_run) for stage in new)
            if slow.is_worth_leaving(sum(hop.cost_ms for hop in hops), replay_s):
                return new
            raise NoChain("no other server is much faster", remedy="wait", missing=((repair.start, repair.end),))
        since_s = repair.begun_s if repair.is_patient else None
        hops = await self.finder.find(repair.start, repair.end, between, since_s=since_s)
        return [self._new_stage(hop) for hop in hops]

    def _new_stage(self, hop: Hop) -> Stage:
        messages, kept = self._messages, self._local_spans.hops if self._local_spans is not None else ()
        return Stage(
            hop=hop,
            row_bytes=messages.row_bytes(hop.start),
            output_row_bytes=messages.row_bytes(hop.end) if hop.end < messages.model.num_blocks else 0,
            is_local=hop in kept,
        )

    async def dial(self, stages: Iterable[Stage]) -> None:
        """Connect to the servers of these stages in advance, as far as they can be reached."""
        dialling = [self._client.connections.get(stage.peer_id, self._messages.model.name) for stage in stages]
        await asyncio.gather(*dialling, return_exceptions=True)

    async def open(self, action: OpenStage, on_message: Callable[[Frame | ConnectionLost], None]) -> None:
        """Connect to the stage's server, and ask it for a sequence, whose frames go to `on_message`.

        Raises PeerError, also if the dial takes long and others can have its blocks earlier.
        """
        stage, taken_over = action.stage, action.taken_over
        if taken_over is not None:
            self.send(taken_over, AllowHandover(sequence_id=taken_over.sequence_id, to_peer_id=stage.peer_id))
        local = self._local_spans if stage.is_local else None
        connection = await self._dialled(stage, (local or self._client).connections)
        connection.attach(stage.sequence_id, on_message)
        self._connections[stage] = connection
        self._client.health.opened(stage.peer_id)
        stage.since_s = asyncio.get_running_loop().time()
        connection.send(self._messages.open(action))

    async def _dialled(self, stage: Stage, pool: ConnectionPool) -> ClientConnection:
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(DIAL_S):
                return await pool.get(stage.peer_id, self._messages.model.name)
        except TimeoutError:
            # a process that was stopped meanwhile has dialled for a shorter time than it seems
            was_stopped = asyncio.get_running_loop().time() - began_s > DIAL_S + STOPPED_S
            if not was_stopped and self.finder.leaves_early(stage.hop):
                raise PeerUnreachable(f"the dial had no answer in {DIAL_S:g} s", peer_id=stage.peer_id) from None
        return await pool.get(stage.peer_id, self._messages.model.name)  # the same dial, which goes on

    def send(self, stage: Stage, frame: Frame) -> None:
        """Send a frame to the stage's server. Does nothing if the connection is lost, of which its stages are told."""
        connection = self._connections.get(stage)
        if connection is not None:
            connection.send(frame)

    def close(self, stage: Stage, commit_to: int, last: LastFrames | None) -> None:
        """End the stage's sequence, if it was asked for. `last` receives what the server still sends for a check of
        the answer before position `commit_to`."""
        connection = self._connections.pop(stage, None)
        if connection is None:
            return
        self._client.health.closed(stage.peer_id)
        self._messages.note_pages(stage, stage.num_run)
        connection.send(self._messages.close(stage, commit_to))
        connection.detach(stage.sequence_id)
        if last is not None:
            last.listen(connection, stage.sequence_id)

    async def silent(self, stages: Sequence[Stage], timeout_s: float) -> list[Stage]:
        """Return those of the stages whose servers do not answer a ping within `timeout_s`.

        If none of several does, they are asked again beside other servers of the model. If nobody answers, no server is
        returned: then it is this client's own line that pauses, as far as anybody can tell.
        """
        peers, ping = {stage.peer_id for stage in stages}, self._client.health.silent
        silent = await ping(peers, timeout_s=timeout_s)
        if len(peers) > 1 and silent == peers:
            asked = {*peers, *self.finder.others(peers)}
            silent = await ping(asked, timeout_s=AGAIN_S)
            silent = set() if silent == asked else silent
        return [stage for stage in stages if stage.peer_id in silent]
