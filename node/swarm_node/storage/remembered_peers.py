"""The peers that a node remembers in its home, so that it finds its network again if its seeds are gone.

    HOME/peers.json   {"network_id": …, "peers": [{"peer_id", "addrs", "first_seen", "last_seen", "relays"}, …]}

If the file is missing, damaged or of another network, only this memory is lost. A remembered peer is dialled at its
address, where only the holder of its key can answer, and exchanges a hello like a given peer. The daemon's task owns
it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.network.libp2p.libp2p_options import listen_addrs_for
from swarm.network.multiaddr import dialable
from swarm.network.paths.dial_policy import DialPolicy
from swarm_protocol import limits
from swarm_protocol.checks import check_choice, check_count, check_float
from swarm_protocol.dht_messages import Contact
from swarm_protocol.identity import check_peer_id

from swarm_node.settings.config import Config, UsageError
from swarm_node.storage.home import Home, JsonMemory
from swarm_node.storage.kept_invitation import keep_revocations

if TYPE_CHECKING:
    from swarm.network.libp2p_network import Libp2pNetwork

MAX_PEERS = 32
"""Enough that some are alive. All of them are dialled at once if no given peer answers."""

MAX_FILE_BYTES = 128 * 2**10
"""Twice the size of MAX_PEERS entries with the longest addresses."""

MAX_AGE_S = 30 * 86400.0
"""A peer that was not seen for this many seconds is forgotten."""

RECENT_S = 86400.0
"""A peer that was seen within a day keeps its place, so that a flood of newcomers cannot push it out."""

FIRST_SAVE_S = 1.0
SAVE_S = 60.0
"""Seconds between two saves. The pause doubles from FIRST_SAVE_S to this.

A new node meets most others in its first seconds, and must remember them even if it is then killed.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedPeer:
    """A peer, its addresses without the final /p2p/<peer_id>, and when it was first and last seen, in Unix seconds.

    `relays` means that it has relayed for this node. Raises ValueError for invalid values.
    """

    peer_id: str
    addrs: tuple[str, ...]
    first_seen: float
    last_seen: float
    relays: bool = False

    def __post_init__(self) -> None:
        check_peer_id(self.peer_id)
        check_count(self.addrs, "addrs", max_items=limits.MAX_CONTACT_ADDRS)
        if not self.addrs or dialable(self.addrs) != self.addrs:
            raise ValueError("addrs has none, or one that cannot be dialled")
        check_float(self.first_seen, "first_seen", high=limits.MAX_TIME_S)
        check_float(self.last_seen, "last_seen", high=limits.MAX_TIME_S)
        check_choice(repr(self.relays), "relays", ("True", "False"))

    @property
    def contact(self) -> Contact:
        return Contact(peer_id=self.peer_id, addrs=self.addrs)


def read(path: Path, network_id: str, now_s: float) -> tuple[RememberedPeer, ...]:
    """Return the peers of that network in the file at `path`, those most likely to be alive first."""
    found = []
    for entry in _memory(path, network_id).read(lambda peers: list(peers[: 2 * MAX_PEERS])) or ():
        try:
            found.append(RememberedPeer(**{**entry, "addrs": tuple(entry["addrs"])}))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            logger.warning("skipped a remembered peer: %s", error)
    return select_peers(found, {}, (), now_s)


def select_peers(
    known: Iterable[RememberedPeer], present: Mapping[str, tuple[str, ...]], relays: Iterable[str], now_s: float
) -> tuple[RememberedPeer, ...]:
    """Return the MAX_PEERS to remember of those `known` and those `present` now (with their addresses).

    Relays come first, then peers seen within a day, then others. Within each group, the peer known longest comes first.
    """
    relaying = frozenset(relays)
    # a clock that was ahead must not keep a peer forever
    seen = [replace(each, last_seen=min(each.last_seen, now_s)) for each in known]
    by_id = {each.peer_id: each for each in seen if each.last_seen > now_s - MAX_AGE_S}
    for peer_id, addrs in present.items():
        old = by_id.get(peer_id)
        by_id[peer_id] = RememberedPeer(
            peer_id=peer_id,
            addrs=addrs,
            first_seen=min(old.first_seen, now_s) if old else now_s,
            last_seen=now_s,
            relays=peer_id in relaying or (old is not None and old.relays),
        )

    def rank(each: RememberedPeer) -> tuple[bool, bool, float]:
        return not each.relays, each.last_seen <= now_s - RECENT_S, each.first_seen

    return tuple(sorted(by_id.values(), key=rank)[:MAX_PEERS])


def write(path: Path, network_id: str, peers: Sequence[RememberedPeer]) -> None:
    """Replace the file at `path` atomically. A failing disk only causes a warning."""
    _memory(path, network_id).keep([asdict(each) for each in peers])


def _memory(path: Path, network_id: str) -> JsonMemory:
    return JsonMemory(
        path=path, owner=("network_id", network_id), key="peers", what="who was there", max_bytes=MAX_FILE_BYTES
    )


def remembered(config: Config) -> tuple[RememberedPeer, ...]:
    """Return the peers of its network that the home of `config` remembers."""
    return read(Home(config.home).peers, config.network_id, time.time())


def choose_listen(config: Config) -> Config:
    """Return the settings with addresses to listen on: the configured ones, or those suitable for the peers to join
    through."""
    if "listen" in config.origins:
        return config
    known = config.peers or [addr for each in remembered(config) for addr in each.addrs]
    return config.model_copy(update={"listen": listen_addrs_for(known)})


def join_addrs(config: Config) -> tuple[str, ...]:
    """Return addresses for a client to join through: the given ones, or else remembered ones that are worth dialling.

    Raises UsageError if there are none.
    """
    policy = DialPolicy.of_machine(listen=(), given=())  # nobody can connect to a client
    found = config.peers or tuple(
        f"{addr}/p2p/{each.peer_id}" for each in remembered(config) for addr in policy.worth_knowing(each.addrs)
    )
    if not found:
        raise _nobody_to_ask()
    return found


def check_can_join(config: Config) -> None:
    """Raise UsageError if there is no peer to join through: none is given or remembered, and none is searched for
    nearby."""
    if not config.peers and not config.finds_local_peers and not remembered(config):
        raise _nobody_to_ask()


def _nobody_to_ask() -> UsageError:
    return UsageError(
        "no peer to join through is named, and this home remembers none",
        remedy="give --peers the address that a seed printed, or --invite the invitation to a private network; "
        "swarm-node seed starts a network, swarm-node demo shows everything on this machine",
    )


@asynccontextmanager
async def remembering(home: Home, network: Libp2pNetwork) -> AsyncIterator[None]:
    """Remember the peers of `network`: soon, then less and less often down to once a minute, and at the end of the
    context."""

    left = asyncio.Event()

    def merge(present: Mapping[str, tuple[str, ...]], relays: Iterable[str]) -> None:
        path, network_id, now_s = home.peers, network.network_id, time.time()
        write(path, network_id, select_peers(read(path, network_id, now_s), present, relays, now_s))

    async def save() -> None:
        # the network's tables are read in this thread, which also changes them
        present, relays = {contact.peer_id: contact.addrs for contact in network.known_peers}, network.relays
        await asyncio.to_thread(merge, present, relays)
        await asyncio.to_thread(keep_revocations, home, network.network_id, network.revocations)

    async def keep() -> None:
        pause_s = FIRST_SAVE_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await left.wait()
                    return
            await save()
            pause_s = min(2 * pause_s, SAVE_S)

    keeper = asyncio.create_task(keep(), name="remember peers")
    try:
        yield
    finally:
        left.set()
        await keeper
        await save()
