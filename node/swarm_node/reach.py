"""From where others reach a node: what its seed found out, as far as its announced addresses can be true elsewhere.

A seed on the same machine or in the same local network dials such an address, too, and calls the node public. Every
display asks here; records and the control socket keep the seed's word. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from swarm.network.multiaddr import is_loopback, is_private

Reach: TypeAlias = Literal["public", "relay", "local network only", "this machine only", "unknown"]
REACHES: tuple[Reach, ...] = get_args(Reach)


def reach(found: str, addrs: Sequence[str]) -> Reach:
    """`found` is the reachability that a record or a status tells, `addrs` what the node announces."""
    if found == "relay":
        return "relay"
    if addrs and all(map(is_loopback, addrs)):
        return "this machine only"
    if found != "public":
        return "unknown"
    return "local network only" if addrs and all(map(is_private, addrs)) else "public"
