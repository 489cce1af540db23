"""`swarm-node identity`: the peer id that others know this node by."""

from __future__ import annotations

import os
import shlex

from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity

from swarm_node.command_options import Flags
from swarm_node.events import Emitter
from swarm_node.home import Home


def identity(flags: Flags) -> int:
    home = Home(flags.resolve().home)
    if flags.extra["new"]:
        home.create()
        Identity.generate().save(home.identity)
    elif not os.path.lexists(home.identity):
        remedy = f"create one: swarm-node identity --new --home {shlex.quote(str(home.path))}"
        raise ConfigError(f"there is no identity in {home.path}", remedy=remedy)
    peer_id = Identity.load(home.identity).peer_id
    emitter = Emitter(json=flags.json)
    if flags.json:
        emitter.emit("identity", peer_id=peer_id, path=str(home.identity), created=flags.extra["new"])
    else:
        emitter.result(peer_id)
    return 0
