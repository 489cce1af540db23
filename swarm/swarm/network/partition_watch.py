"""Keeps a node in its network: dials missing seeds, and remembered peers when no peer is left.

`PartitionWatch.run` is a task. It notices that seeds are missing, or that this node is cut off, and dials them. So two
groups that lost their common seed meet there again. A seed that is gone for good costs a dial every few seconds. The
names of missing seeds are looked up again, since a seed may have moved. A seed that closes the connection again and
again may be full, and is dialled more and more rarely. Two groups without a seed in common meet again because each node
pings a few of the peers that it has lost. A second task does that, and checks the routing table, because a silent peer
takes seconds there, for which rejoining the network must not wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal

from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import PeerError, PeerRefused, PeerUnreachable

from swarm.network.dht.record_dht import RecordDht
from swarm.network.discovery.peer_names import GivenPeers
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.reconnection import accepts_connections
from swarm.network.multiaddr import PeerAddr
from swarm.network.network_entry import connect
from swarm.newest_items import NewestItems

CHECK_S = 3.0
"""Pause between two checks while nothing is missing. A look at the daemon's connections takes a millisecond."""
MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
"""Pause between two attempts to reach missing peers; it doubles. A partition heals within this time after its cause is
gone."""
MAX_AGAIN_S = 60.0
"""Pause after lost peers were found, where they are lost again at each check: finding them publishes all records again.
It doubles from `CHECK_S`."""
REFRESH_S = 60.0
MAX_KNOWN_PEERS = 1024
"""Maximum peers that are remembered: at least twice the members of the routing table, so that these leave room for lost
peers."""
NUM_DIALS = 8
NUM_LOST_DIALS = 2
"""Lost peers that are pinged every REFRESH_S while others are there. Most of them have left for good."""

RejoinResult = Literal["joined", "found", "cut off"]
"""Nothing was missing; all that was missing was found again; or something is missing still."""

logger = logging.getLogger(__name__)


class PartitionWatch:
    """Notices when this node has lost its seeds or all other nodes, and dials them again."""

    def __init__(
        self,
        host: Host,
        dht: RecordDht,
        given: GivenPeers,
        network_id: str,
        on_healed: Callable[[], Awaitable[None]],
        *,
        met: Iterable[str],
        known: Iterable[Contact],
    ) -> None:
        """`met` are the peer ids of the seeds that have answered, and `known` the peers remembered from earlier
        runs."""
        self._host = host
        self._dht = dht
        self._given = given
        self._met = set(met)  # seeds that have answered, and were connected at each check since
        self._network_id = network_id
        self._on_healed = on_healed
        self._known = NewestItems[str, tuple[str, ...]](MAX_KNOWN_PEERS)
        self._known.update((contact.peer_id, contact.addrs) for contact in known)
        self._refusals = NewestItems[str, str](MAX_KNOWN_PEERS)  # what the log told of each seed

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tend(), name="tend the routing table")
            await self._keep_joined()

    async def _tend(self) -> None:
        """Check the members of the routing table, and the seeds."""
        loop = asyncio.get_running_loop()
        refresh_at = loop.time() + REFRESH_S
        while True:
            await asyncio.sleep(CHECK_S)
            await self._dht.make_room()
            if loop.time() >= refresh_at:
                refresh_at = loop.time() + REFRESH_S
                await asyncio.gather(*(self._dht.ping(peer_id) for peer_id in self._met))
                await self._dht.tend()
                await self._find_lost()

    async def _find_lost(self) -> None:
        """Ping some known peers that are in the routing table no more, and meet their part of the network if one
        answers."""
        members = set(self._dht.peers())
        lost = [peer_id for peer_id in self._known if peer_id not in members]
        asked = random.sample(lost, min(NUM_LOST_DIALS, len(lost)))
        await asyncio.gather(*(self._dht.ping(peer_id, self._known.get(peer_id, ())) for peer_id in asked))
        if found := set(asked).intersection(self._dht.peers()):  # not if there was no place in the table
            await self._meet_again(len(found))

    async def _keep_joined(self) -> None:
        pause_s = back_off_s = MIN_PAUSE_S
        again_s = CHECK_S
        trouble = ""
        while True:
            await asyncio.sleep(pause_s)
            result: RejoinResult = "cut off"
            try:
                result = await self._rejoin()
                trouble = ""
            except PeerUnreachable as error:  # if the daemon has ended, the unary connection's task ends this one
                if error.message != trouble:
                    trouble = error.message
                    logger.warning("cannot watch over the connection to the network: %s", error)
            back_off_s = min(back_off_s * 2, MAX_PAUSE_S) if result == "cut off" else MIN_PAUSE_S
            pause_s = {"joined": CHECK_S, "found": again_s, "cut off": back_off_s}[result]
            if result != "cut off":
                again_s = min(again_s * 2, MAX_AGAIN_S) if result == "found" else max(again_s / 2, CHECK_S)

    async def _rejoin(self) -> RejoinResult:
        """Dial missing seeds, and other peers if no peer is left. Return "cut off" unless all dials succeeded and a
        peer is known."""
        connected = await self._host.look()
        for contact in self._dht.contacts():
            self._known[contact.peer_id] = contact.addrs
        self._met.intersection_update(connected)
        if self._given.are_missing or self._missing():
            await self._given.look_up_again()
        missing = self._missing()
        alone = not self._dht.peers()
        if not missing and not alone:
            return "joined"
        found = await asyncio.gather(
            *(self._reach_seed(seed, is_connected=seed.peer_id in connected) for seed in missing)
        )
        if alone:
            others = [peer_id for peer_id in reversed(self._known) if peer_id not in connected][:NUM_DIALS]
            asked = {*others, *connected}
            found += await asyncio.gather(*(self._dht.ping(peer_id, self._known.get(peer_id, ())) for peer_id in asked))
        if any(found):
            await self._meet_again(sum(found))
        return "found" if all(found) and self._dht.peers() else "cut off"

    async def _meet_again(self, num_found: int) -> None:
        logger.info("found %d lost peers again", num_found)
        await self._dht.refresh()
        await self._on_healed()

    def _missing(self) -> list[PeerAddr]:
        return [seed for seed in self._given.addrs if seed.peer_id not in self._met]

    async def _reach_seed(self, seed: PeerAddr, *, is_connected: bool) -> bool:
        """Return whether a seed answers, which may have connected by itself, as from behind its NAT."""
        if not is_connected and not await accepts_connections(seed.addr):
            return False
        try:
            await connect(self._host, seed.peer_id, [seed.addr], self._network_id)
        except PeerRefused as error:  # such as one of another network, which did not run when this node started
            if self._refusals.get(seed.peer_id) != error.message:
                self._refusals[seed.peer_id] = error.message
                logger.warning("the given peer %s refuses this node: %s", seed, error)
            return False
        except PeerError as error:
            logger.debug("seed %s: %s", seed, error)
            return False
        if not await self._dht.ping(seed.peer_id):
            return False
        self._met.add(seed.peer_id)
        return True
