"""`swarm-node drain` and `swarm-node stop`: have the daemon of this home leave, and wait until it has."""

from __future__ import annotations

import time

from swarm_protocol.errors import PeerTimeout

from swarm_node.command_options import Flags
from swarm_node.control import ControlClient
from swarm_node.events import Emitter
from swarm_node.home import Home

MARGIN_S = 10.0  # what closing takes, beyond the time that work in flight gets
POLL_S = 0.05


def drain(flags: Flags) -> int:
    return _leave(flags, drained=True)


def stop(flags: Flags) -> int:
    return _leave(flags, drained=False)


def _leave(flags: Flags, *, drained: bool) -> int:
    home = Home(flags.home())
    emitter = Emitter(json=flags.json)
    reply = ControlClient(home).leave(drain=drained)
    emitter.emit("leaving", pid=reply.pid, seconds=reply.seconds)
    until = time.monotonic() + reply.seconds + MARGIN_S
    while home.owner() == reply.pid:
        if time.monotonic() > until:
            raise PeerTimeout(f"the daemon (pid {reply.pid}) is still there", remedy=f"end it: kill -9 {reply.pid}")
        time.sleep(POLL_S)
    emitter.emit("left", pid=reply.pid)
    return 0
