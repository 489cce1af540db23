"""The control socket of a daemon: gRPC over a Unix socket that only its user may open.

`Status` serves `swarm-node status`, and `Leave` serves `drain` and `stop`. The daemon's event loop owns the server;
commands use the blocking client. Both check the other's bytes with `swarm_protocol.control_messages`.
`swarm_node.shutdown` defines what leaving means.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
from swarm_protocol import limits
from swarm_protocol.control_messages import LeaveReply, LeaveRequest, StatusReply, StatusRequest
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, StartError

from swarm_node.storage.home import Home

SERVICE = "swarm.v1.Control"
DEADLINE_S = 5.0  # a healthy daemon answers in milliseconds; if it does not, the user is told
START_S = 30.0  # a daemon that is being started first loads torch, which takes long on a busy machine
_OPTIONS = [("grpc.max_receive_message_length", limits.MAX_CONTROL_BYTES), ("grpc.so_reuseport", 0)]


@asynccontextmanager
async def serving(
    path: Path,
    status: Callable[[StatusRequest], Awaitable[StatusReply]],
    leave: Callable[[LeaveRequest], Awaitable[LeaveReply]],
) -> AsyncIterator[None]:
    """Answer on the socket `path`, which only its owner may open. The caller holds the home's lock."""
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=8)
    methods = {
        "Status": _unary(status, StatusRequest.from_bytes),
        "Leave": _unary(leave, LeaveRequest.from_bytes),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    mask = os.umask(0o177)  # the bind below creates the socket, so it is private from its first moment
    try:
        server.add_insecure_port(_address(path))
    except RuntimeError as error:  # gRPC raises nothing more specific for a failed bind
        raise StartError(
            f"cannot open the control socket {path}", remedy="see what is at this path, or choose another --home"
        ) from error
    finally:
        os.umask(mask)
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=1.0)  # the reply to `stop` itself is still being sent


class ControlClient:
    """Asks the daemon of a home. Calls raise PeerUnreachable if there is none, PeerTimeout if it does not answer.

    `on_wait` is called with what a call waits for, if the daemon is still loading its libraries.
    """

    def __init__(self, home: Home, on_wait: Callable[[str], None] = lambda _: None) -> None:
        self._home = home
        self._on_wait = on_wait

    def status(self) -> StatusReply:
        return StatusReply.from_bytes(self._ask("Status", StatusRequest().to_bytes()))

    def leave(self, *, drain: bool) -> LeaveReply:
        return LeaveReply.from_bytes(self._ask("Leave", LeaveRequest(drain=drain).to_bytes()))

    def _ask(self, method: str, request: bytes) -> bytes:
        pid = self._home.owner()
        if pid is None:
            start = "start a daemon with `swarm-node join`, or " if method == "Status" else "if one runs elsewhere, "
            raise PeerUnreachable(
                f"no daemon is running in {self._home.path}", remedy=f"{start}name its directory with --home"
            )
        deadline_s = DEADLINE_S
        if not self._home.socket.exists():
            deadline_s = START_S
            self._on_wait(
                f"the daemon (pid {pid}) has no control socket yet, as while it loads its libraries: "
                f"waiting up to {START_S:.0f} s"
            )
        with grpc.insecure_channel(_address(self._home.socket), options=_OPTIONS) as channel:
            ask = channel.unary_unary(f"/{SERVICE}/{method}")
            try:
                answer: bytes = ask(request, timeout=deadline_s, wait_for_ready=True)
            except grpc.RpcError as error:
                is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                why = f" within {deadline_s:.0f} s" if is_late else f": {error.details()}"
                raise PeerTimeout(
                    f"the daemon (pid {pid}) in {self._home.path} does not answer{why}",
                    remedy=f"it may still be starting; if this persists, read {self._home.log} and run `kill {pid}`",
                ) from error
        return answer


def _address(path: Path) -> str:
    """Return a socket's address for gRPC: a URI, so some characters of the path must be quoted."""
    return f"unix:{quote(path.as_posix())}"


def _unary(handler: Callable[[Any], Awaitable[Any]], parse: Callable[[bytes], Any]) -> grpc.RpcMethodHandler:
    async def answer(request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        reply = await handler(parse(request))
        encoded: bytes = reply.to_bytes()
        return encoded

    return grpc.unary_unary_rpc_method_handler(answer)
