"""Compares the protocol version of a running node with those of its connected peers.

A node is refused by name only while it joins. One that runs while the others are updated stays connected to them, but
neither side can call the other: without this watch it would be alone without a word. The caller's task owns the watch.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_protocol.version import PROTOCOL_VERSION, Hello


class VersionWatch:
    """Tells once that peers are newer than this node, and once that they are older."""

    def __init__(self) -> None:
        self._told: set[bool] = set()

    def look(self, hellos: Sequence[Hello]) -> Hello | None:
        """Return the newest of the peers' hellos with another protocol version if there is something to tell.

        It is told if at least half of the peers differ, since these cut this node off from the network. So one peer
        that lies is told of only where it is half of the peers that answer.
        """
        others = [hello for hello in hellos if hello.protocol_version != PROTOCOL_VERSION]
        if not others or 2 * len(others) < len(hellos):
            return None
        newest = max(others, key=lambda hello: hello.protocol_version)
        is_newer = newest.protocol_version > PROTOCOL_VERSION
        if is_newer in self._told:
            return None
        self._told.add(is_newer)
        return newest
